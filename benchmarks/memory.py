"""Peak host memory of saves: what a process needs beyond what it had before the engine existed.

One process for each setting (``python -m benchmarks.memory BYTES HOST_CACHE_BYTES FOLDER``), for an
allocator keeps memory that it has once asked for.
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

DELTAS = 5  # saves after the keyframes
HOST_CACHE_BYTES = (64 << 20, 256 << 20)


def run(settings: Settings) -> Result:
    size = 8 << 20 if settings.quick else 700 << 20
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    for host_cache_bytes in HOST_CACHE_BYTES[:1] if settings.quick else HOST_CACHE_BYTES:
        folder = settings.folder / str(host_cache_bytes)
        found = in_own_process("benchmarks.memory", str(size), str(host_cache_bytes), str(folder))
        allowed = found["state"] + host_cache_bytes
        peaks = {
            "first save, keyframes": found["keyframe"],
            f"later saves, deltas (worst of {DELTAS})": max(found["deltas"]),
        }
        for name, peak in peaks.items():
            cells = [
                found["state"],
                host_cache_bytes,
                name,
                peak,
                peak - found["state"],
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
        rest = median(found["after"])
        rows.append(
            [
                found["state"],
                host_cache_bytes,
                "between saves",
                rest,
                rest - found["state"],
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
        " synthetic state, libraries loaded before, glibc's allocator as it is"
    )
    return Result("memory", about, [Table("extra host memory", columns, rows)], figures)


def measure(size: int, host_cache_bytes: int, folder: Path) -> dict[str, Any]:
    """Everything one process finds, in bytes."""
    from benchmarks import states
    from deltacheck.backends.torch import Engine

    with tempfile.TemporaryDirectory() as scratch, Engine(Path(scratch) / "root") as engine:
        engine.save(
            0, states.Synthetic(1 << 20).state()
        ).wait()  # libraries and thread pools, which are not a save's
    synthetic = states.Synthetic(size)
    synthetic.train_step()  # what the optimizer itself leaves allocated
    trim()
    before = status("VmRSS")
    deltas, after = [], []
    with Engine(folder, host_cache_bytes=host_cache_bytes) as engine:
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
