"""The steps of a part, and their resources."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import Result


class Skipped(Exception):
    """A step cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Context:
    """The resources of a step.

    ``folder``: an empty folder on the disk to measure. ``deadline``: of the whole part, by
    ``time.monotonic``. ``rehearse``: the processor stands in for the device, and figures have no
    meaning. ``memory``: an empty folder in memory, for what must not wait for a disk; ``None``:
    there is none.
    """

    folder: Path
    out: Path
    deadline: float
    rehearse: bool = False
    memory: Path | None = None

    @property
    def device(self) -> str:
        """Device of all tensors."""
        return "cpu" if self.rehearse else "cuda"

    def fast_folder(self, needed_bytes: int) -> Path:
        """Return a folder in memory if there is so much room, else one on the disk."""
        memory = self.memory
        is_large = memory is not None and shutil.disk_usage(memory).free >= needed_bytes
        return memory if memory is not None and is_large else self.folder

    def seconds_left(self) -> float:
        """Return the seconds until the part must end."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a part.

    ``needs``: packages. ``seconds``: its usual time on a GPU; with less left, it is skipped.
    ``checks_device``: without it, no later part is meaningful.
    """

    title: str
    run: Callable[[Context], Result]
    needs: Sequence[str] = ()
    seconds: float = 10.0
    checks_device: bool = False
