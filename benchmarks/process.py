"""What a process takes: memory, processor time, and a process of its own for whatever must be
measured alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAMPLE_SECONDS = 0.002
_CHILDREN_SECONDS = 0.02


def in_own_process(module: str, *arguments: str) -> Any:
    """Run ``python -m module arguments`` with the packages of this process. Returns the JSON of the
    last line that it prints.

    Raises ``RuntimeError`` with the end of what it says on stderr where it fails.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    found_at = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
    }  # the same packages, in the same order
    done = subprocess.run(command, capture_output=True, text=True, env=found_at)
    if done.returncode != 0:
        raise RuntimeError(
            f"the measuring process failed: {' '.join(arguments)}\n{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(slots=True)
class Peak:
    """The most resident memory while a block runs: the kernel's mark where it can be reset, else
    the
    largest of many samples.

    Memory of child processes that is theirs alone is added, sampled; what they share with this
    process is counted here.
    """

    bytes: int = 0
    _children: int = 0
    _stop: threading.Event | None = None
    _sampler: threading.Thread | None = None
    _marked: bool = True

    def __enter__(self) -> Peak:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # not every container allows it
            self._marked = False
        if not self._marked or child_processes():
            self._stop = threading.Event()
            self._sampler = threading.Thread(target=self._sample, args=(self._stop,))
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._stop is not None and self._sampler is not None:
            self._stop.set()
            self._sampler.join()
        if self._marked:
            self.bytes = status("VmHWM")
        self.bytes += self._children

    def _sample(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if not self._marked:
                self.bytes = max(self.bytes, status("VmRSS"))
            self._children = max(
                self._children, sum(_anonymous(child) for child in child_processes())
            )
            time.sleep(_CHILDREN_SECONDS if self._marked else _SAMPLE_SECONDS)


def status(name: str, process: str = "self") -> int:
    """A line of the kernel's account of a process, in bytes."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel tells no {name}")


def trim() -> None:
    """Let glibc give back what is free: what training leaves in its heap is not a save's."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def child_processes() -> list[int]:
    """The processes that this one started, theirs included, and that still live."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, way = [], [os.getpid()]
    while way:
        children = parents.get(way.pop(), [])
        found += children
        way += children
    return found


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started, so far."""
    own, ended = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    ticks = 0
    for child in child_processes():
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return (
        own.ru_utime
        + own.ru_stime
        + ended.ru_utime
        + ended.ru_stime
        + ticks / os.sysconf("SC_CLK_TCK")
    )


def _anonymous(process: int) -> int:
    try:
        return status("RssAnon", str(process))
    except (OSError, RuntimeError):  # it has ended
        return 0
