"""The use of Orbax beyond its handler interface: the names of its directories, and its commits.

Orbax writes item ``<item>`` of step 30 to
``<root>/30.orbax-checkpoint-tmp/<item>.orbax-checkpoint-tmp`` and renames both, the item first. In
its ``CommitFile`` mode it writes in place instead and ends with a file ``commit_success.txt``.
Nothing here imports from ``orbax._src``.
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
# A prefix such as ``checkpoint_`` may precede the digits, as Orbax's name formats allow.
_STEP = re.compile(r"(?:.*[^0-9])?([0-9]+)\Z")


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The directory of one item of one step, finished or not."""

    directory: Path

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> ItemPlace:
        """Return the place of a directory that Orbax passes to a handler.

        Raises ``ValueError`` if it is not in the file system of this machine.
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
        """The name of the item."""
        return _final_name(self.directory)

    @property
    def root(self) -> Path:
        """The manager's directory."""
        return self.directory.parent.parent

    @property
    def step(self) -> int:
        """The training step, from the last digits of the step directory's name.

        Raises ``ValueError`` if it has none: then this is no step of a ``CheckpointManager``.
        """
        name = _final_name(self.directory.parent)
        match = _STEP.match(name)
        if match is None:
            raise ValueError(
                f"{self.directory} does not lie in a step of a CheckpointManager ({name!r} ends in"
                " no step number): which directory is the root, and where the segments go, cannot"
                " be known. Save through deltacheck.backends.orbax.manager(root)"
            )
        return int(match[1])

    def is_committed(self) -> bool:
        """Return whether Orbax has committed the step, even if it has deleted it since.

        Orbax must have finished writing the step.
        """
        step = self.directory.parent
        final = step.with_name(_final_name(step))
        if final.exists():
            # Without a temporary name, Orbax writes in place, and only its last file proves the
            # commit.
            return final != step or (step / _COMMIT_FILE).exists()
        # Neither name exists: the step was renamed and deleted since. A step that was given up
        # keeps its temporary name.
        return not step.exists()


def await_directories(timeout_seconds: float = 30.0) -> None:
    """Wait until Orbax has created the directories of the save that it is beginning.

    A handler that is about to refuse the save calls this. Orbax does not wait for its own threads
    then: a retry races with them for the same directory, and the loser blocks the end of the
    program for minutes (seen in 0.12.8).
    """

    # Orbax starts a coroutine of a handler when the directories exist. This one marks that moment.
    async def nothing() -> None: ...

    with contextlib.suppress(Exception):
        CommitFutureAwaitingContractedSignals(nothing(), name="deltacheck-refusal").result(
            timeout_seconds
        )


def await_renames(deadline: Deadline) -> bool:
    """Wait until Orbax has finished, well or not, its work after the futures of a save are done.

    Each manager has a thread for that work, with a fixed name (0.11.30 to 0.12.8). If a release
    renames it, ``wait_until_finished`` waits for it without a deadline.

    Returns:
        False if the time ran out.
    """
    # The manager refers to its thread only in private attributes, so it is found by name.
    for thread in threading.enumerate():
        if thread.name == "save_finalize":
            # Orbax's own ``join`` would raise the failure here, and the manager would not.
            threading.Thread.join(thread, deadline.left)
            if thread.is_alive():
                return False
    return True


def _final_name(path: Path) -> str:
    return path.name.partition(_TEMPORARY)[0]
