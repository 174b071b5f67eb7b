"""Memory and processor time of a process, and processes for what must be measured alone."""

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
    """Run ``python -m module arguments`` with the packages of this process.

    Returns:
        The JSON of the last line that it prints.

    Raises:
        RuntimeError: It failed; the message contains the end of its stderr.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    # The same packages, in the same order.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise RuntimeError(
            f"the measuring process failed: {' '.join(arguments)}\n{result.stderr[-4000:]}"
        )
    return json.loads(result.stdout.splitlines()[-1])


@dataclass(slots=True)
class Peak:
    """The largest resident memory while a block runs.

    It is the kernel's high-water mark if that can be reset, else the largest of many samples.
    Memory that belongs to child processes alone is added, sampled. Memory that they share with this
    process is counted once.
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
    """Return a line of the kernel's status of a process, in bytes."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not report {name}")


def trim() -> None:
    """Return glibc's free memory to the kernel.

    Memory that training has left in the heap must not count as a save's.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def child_processes() -> list[int]:
    """Return the living processes that this one has started, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    descendants, queue = [], [os.getpid()]
    while queue:
        children = parents.get(queue.pop(), [])
        descendants += children
        queue += children
    return descendants


def cpu_seconds() -> float:
    """Return the processor time so far of this process and of those that it has started."""
    usages = [
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),  # those that have ended
    ]
    ticks = 0
    for child in child_processes():
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return seconds + ticks / os.sysconf("SC_CLK_TCK")


def _anonymous(process: int) -> int:
    try:
        return status("RssAnon", str(process))
    except (OSError, RuntimeError):  # it has ended
        return 0
