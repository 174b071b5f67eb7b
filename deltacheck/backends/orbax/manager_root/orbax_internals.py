"""What we know of Orbax beyond its handler interface: how its directories are called, and when one
exists for good.

Orbax writes item ``<item>`` of step 30 to
``<root>/30.orbax-checkpoint-tmp/<item>.orbax-checkpoint-tmp`` and renames both, the item first.
Where its ``CommitFile`` mode is asked for, it writes in place instead and ends with a file
``commit_success.txt``. Nothing here imports from ``orbax._src``.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from deltacheck.store.deadline import Deadline

_TEMPORARY = ".orbax-checkpoint-tmp"  # older releases append a number
_COMMIT_FILE = "commit_success.txt"
_STEP = re.compile(r"(?:.*[^0-9])?([0-9]+)\Z")


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where one item of one step is being written, or was."""

    directory: Path

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> ItemPlace:
        """From what Orbax hands to a handler. Raises ``ValueError`` where it is not in this
        machine's file system.
        """
        path = os.fspath(directory)
        if "://" in path:
            raise ValueError(
                f"{path} is not in a local file system; this version writes and reads local"
                " directories only"
            )
        return cls(Path(path).absolute())

    @property
    def item(self) -> str:
        return _final_name(self.directory)

    @property
    def root(self) -> Path:
        return self.directory.parent.parent

    @property
    def step(self) -> int:
        """The training step, from the last digits of the step directory's name.

        Raises ``ValueError`` where it has none: then this is not the directory of a
        ``CheckpointManager``'s step.
        """
        name = _final_name(self.directory.parent)
        found = _STEP.match(name)
        if found is None:
            raise ValueError(
                f"{self.directory} does not lie in a step of a CheckpointManager ({name!r} ends in"
                " no step number): which directory is the root, and where the segments go, cannot"
                " be known. Save through deltacheck.backends.orbax.manager(root)"
            )
        return int(found[1])

    def is_committed(self) -> bool:
        """Whether Orbax has made the step exist, now that it is no longer writing it; it may have
        deleted it again since.
        """
        step = self.directory.parent
        final = step.with_name(_final_name(step))
        if final.exists():
            return final != step or (step / _COMMIT_FILE).exists()
        return not step.exists()


def await_directories(timeout_seconds: float = 30.0) -> None:
    """Wait until Orbax has created the directories of the save that it is beginning.

    For a handler that is about to refuse that save: Orbax does not wait for its own threads then, a
    retry races with them for the same directory, and the loser blocks the end of the program for
    minutes (seen in 0.12.8).
    """

    async def nothing() -> None: ...

    with contextlib.suppress(Exception):
        CommitFutureAwaitingContractedSignals(nothing(), name="deltacheck-refusal").result(
            timeout_seconds
        )


def await_renames(deadline: Deadline) -> bool:
    """Wait until Orbax has ended, well or not, what it does after a save's futures are done;
    whether
    it has in time.

    Its managers have a thread each for that, known by its name (0.11.30 to 0.12.8). Under another
    name it is not found here, and ``wait_until_finished`` waits for it as long as it takes.
    """
    for thread in threading.enumerate():
        if thread.name == "save_finalize":
            threading.Thread.join(
                thread, deadline.left
            )  # Orbax's own would raise here, and not where it is looked for
            if thread.is_alive():
                return False
    return True


def _final_name(path: Path) -> str:
    return path.name.partition(_TEMPORARY)[0]
