"""Peak host memory of saves beyond the memory before the engine's creation.

Each setting has a process of its own (``python -m benchmarks.memory BYTES HOST_CACHE_BYTES
FOLDER``), because an allocator keeps memory that it has once requested.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.process import Peak, in_own_process, status, trim
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from deltacheck import SaveOptions

DELTAS = 5  # saves after the keyframes
HOST_CACHE_BYTES = (64 << 20, 256 << 20)


def run(settings: Settings) -> Result:
    """Measure each size of the host cache."""
    size = 8 << 20 if settings.quick else 700 << 20
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    for host_cache_bytes in HOST_CACHE_BYTES[:1] if settings.quick else HOST_CACHE_BYTES:
        folder = settings.folder / str(host_cache_bytes)
        arguments = (str(size), str(host_cache_bytes), str(folder))
        measured = in_own_process("benchmarks.memory", *arguments)
        allowed = measured["state"] + host_cache_bytes
        peaks = {
            "first save, keyframes": measured["keyframe"],
            f"later saves, deltas (worst of {DELTAS})": max(measured["deltas"]),
        }
        for name, peak in peaks.items():
            cells = [
                measured["state"],
                host_cache_bytes,
                name,
                peak,
                peak - measured["state"],
                peak - allowed,
                peak / allowed,
            ]
            rows.append([*cells])
            figures.append(
                Figure(
                    f"peak of {name}, host cache {host_cache_bytes >> 20} MiB, of shadow + host"
                    " cache",
                    peak / allowed,
                    1.0,
                )
            )
        rest = median(measured["after"])
        rows.append(
            [
                measured["state"],
                host_cache_bytes,
                "between saves",
                rest,
                rest - measured["state"],
                None,
                rest / allowed,
            ]
        )
    columns: dict[str, Unit] = {
        "state = shadow": "bytes",
        "host cache": "bytes",
        "when": "text",
        "extra memory": "bytes",
        "beyond the shadow": "bytes",
        "beyond shadow and cache": "bytes",
        "of shadow + cache": "ratio",
    }
    about = (
        "resident memory (VmHWM, reset before each save) beyond that before the engine existed;"
        " synthetic state, libraries loaded before, glibc's allocator with its defaults"
    )
    return Result("memory", about, [Table("extra host memory", columns, rows)], figures)


def measure(size: int, host_cache_bytes: int, folder: Path) -> dict[str, Any]:
    """Measure in this process, in bytes."""
    from benchmarks import states
    from deltacheck.backends.torch import Engine

    with tempfile.TemporaryDirectory() as scratch, Engine(Path(scratch) / "root") as engine:
        # Loads libraries and starts thread pools, whose memory does not count as a save's.
        engine.save(0, states.Synthetic(1 << 20).state()).wait()
    synthetic = states.Synthetic(size)
    synthetic.train_step()  # allocates what the optimizer itself keeps
    trim()
    before = status("VmRSS")
    deltas, after = [], []
    with Engine(folder, options=SaveOptions(host_cache_bytes=host_cache_bytes)) as engine:
        engine.guard(synthetic.optimizer)
        for save in range(1 + DELTAS):
            if save:
                synthetic.train_step()
                trim()
            with Peak() as peak:
                engine.save(save, synthetic.state()).wait()
            deltas.append(peak.bytes - before)
            after.append(status("VmRSS") - before)
    return {
        "state": states.raw_bytes(synthetic.state()),
        "keyframe": deltas[0],
        "deltas": deltas[1:],
        "after": after[1:],
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
