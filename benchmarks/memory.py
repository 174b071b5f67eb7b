"""Peak host memory of saves: what a process needs beyond what it had before the engine existed.

One process for each setting (``python -m benchmarks.memory BYTES HOST_CACHE_BYTES FOLDER``), for an allocator keeps memory that it has once
asked for.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit

DELTAS = 5  # saves after the keyframes
HOST_CACHE_BYTES = (64 << 20, 256 << 20)
_SAMPLE_SECONDS = 0.002


def run(settings: Settings) -> Result:
    size = 8 << 20 if settings.quick else 700 << 20
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    for host_cache_bytes in HOST_CACHE_BYTES[:1] if settings.quick else HOST_CACHE_BYTES:
        folder = settings.folder / str(host_cache_bytes)
        found = _in_own_process(size, host_cache_bytes, folder)
        allowed = found["state"] + host_cache_bytes
        peaks = {"first save, keyframes": found["keyframe"], f"later saves, deltas (worst of {DELTAS})": max(found["deltas"])}
        for name, peak in peaks.items():
            cells = [found["state"], host_cache_bytes, name, peak, peak - found["state"], peak - allowed, peak / allowed]
            rows.append([*cells])
            figures.append(
                Figure(f"peak of {name}, host cache {host_cache_bytes >> 20} MiB, of shadow + host cache", peak / allowed, 1.0)
            )
        rest = median(found["after"])
        rows.append([found["state"], host_cache_bytes, "between saves", rest, rest - found["state"], None, rest / allowed])
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
        "resident memory (VmHWM, reset before each save) beyond that before the engine existed; synthetic state, libraries loaded before, "
        "glibc's allocator as it is"
    )
    return Result("memory", about, [Table("extra host memory", columns, rows)], figures)


def _in_own_process(size: int, host_cache_bytes: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "benchmarks.memory", str(size), str(host_cache_bytes), str(folder)]
    found_at = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
    }  # the same packages as here, in the same order
    done = subprocess.run(command, capture_output=True, text=True, env=found_at)
    if done.returncode != 0:
        raise RuntimeError(f"the measuring process failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@dataclass(slots=True)
class Peak:
    """The most resident memory while a block runs: the kernel's mark where it can be reset, else the largest of many samples."""

    bytes: int = 0
    _stop: threading.Event | None = None
    _sampler: threading.Thread | None = None

    def __enter__(self) -> Peak:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # not every container allows it
            self._stop = threading.Event()
            self._sampler = threading.Thread(target=self._sample, args=(self._stop,))
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._stop is None or self._sampler is None:
            self.bytes = _status("VmHWM")
        else:
            self._stop.set()
            self._sampler.join()

    def _sample(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.bytes = max(self.bytes, _status("VmRSS"))
            time.sleep(_SAMPLE_SECONDS)


def _status(name: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel tells no {name}")


def _trim() -> None:
    """Let glibc give back what is free: what training leaves in its heap is not the engine's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def measure(size: int, host_cache_bytes: int, folder: Path) -> dict[str, Any]:
    """Everything one process finds, in bytes."""
    from benchmarks import states
    from deltacheck.backends.torch import Engine

    with tempfile.TemporaryDirectory() as scratch, Engine(Path(scratch) / "root") as engine:
        engine.save(0, states.Synthetic(1 << 20).state()).wait()  # libraries and thread pools, which are not a save's
    synthetic = states.Synthetic(size)
    synthetic.train_step()  # what the optimizer itself leaves allocated
    _trim()
    before = _status("VmRSS")
    deltas, after = [], []
    with Engine(folder, host_cache_bytes=host_cache_bytes) as engine:
        engine.guard(synthetic.optimizer)
        for save in range(1 + DELTAS):
            if save:
                synthetic.train_step()
                _trim()
            with Peak() as peak:
                engine.save(save, synthetic.state()).wait()
            deltas.append(peak.bytes - before)
            after.append(_status("VmRSS") - before)
    return {"state": states.raw_bytes(synthetic.state()), "keyframe": deltas[0], "deltas": deltas[1:], "after": after[1:]}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
