"""The use of Orbax beyond its handler interface: the names of its directories, and its commits.

Orbax writes item ``<item>`` of step 30 to
``<root>/30.orbax-checkpoint-tmp/<item>.orbax-checkpoint-tmp`` and renames both, the item first. In
its ``CommitFile`` mode it writes in place instead and ends with a file ``commit_success.txt``.
Nothing here imports from ``orbax._src``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from deltacheck.store.files import storage
from deltacheck.store.layout import UNFINISHED_STEP, step_name
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.lock.interrupts import join
from deltacheck.store.roots.manager_steps import MANAGER_STORE

_COMMIT_FILE = "commit_success.txt"
# Orbax writes it when it creates the directory of a step.
_STEP_METADATA = "_CHECKPOINT_METADATA"
# The item of a step that is saved without a name for it.
DEFAULT_ITEM = "default"


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The directory of one item of one step, finished or not.

    Attributes:
        directory: The directory.
        is_ours: Orbax does not make it, because it has been given the directory of the step, or
            that of a root of one step.
        has_own_root: The root has this step alone, and Orbax commits it with the step.
    """

    directory: Path
    is_ours: bool = False
    has_own_root: bool = False

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
        return cls(storage.local(path, "a handler").absolute())

    @classmethod
    def to_save(cls, directory: str | os.PathLike[str], root: Path | None) -> ItemPlace:
        """Return the place for the manifest of a save.

        Args:
            directory: The directory that Orbax passes to a handler: of an item, of a step, or, for
                a ``Checkpointer`` without a root, of a checkpoint anywhere.
            root: The root of the handler; ``None``: it has none.

        Raises:
            ValueError: The directory is not in the root, or its step has no number.
        """
        place = cls.of(directory)
        if root is None:
            if (
                UNFINISHED_STEP in place.directory.name
                and UNFINISHED_STEP not in place.directory.parent.name
            ):
                step = step_name(_final_name(place.directory))
                number = str(step[1]) if step else "0"
                return cls(place.directory / number / DEFAULT_ITEM, is_ours=True, has_own_root=True)
        elif _is_same(place.directory.parent, root):
            place = cls(place.directory / DEFAULT_ITEM, is_ours=True)
        elif not _is_same(place.root, root):
            raise ValueError(
                f"{place.directory} is no item of a step of {root}, the root of this handler, which"
                f" would not keep the segments that it needs. Save to {root}/STEP, or give another"
                " root"
            )
        place.step  # noqa: B018 - raises if the name has no number
        return place

    @classmethod
    def to_read(cls, directory: str | os.PathLike[str]) -> ItemPlace:
        """Return the place of the manifest in a directory that Orbax has committed."""
        place = cls.of(directory)
        if not (place.directory / "zarr.json").exists():
            if (place.directory / DEFAULT_ITEM / "zarr.json").exists():
                return cls(place.directory / DEFAULT_ITEM, is_ours=True)
            for manifest in place.directory.glob(f"*/{DEFAULT_ITEM}/zarr.json"):
                return cls(manifest.parent, is_ours=True, has_own_root=True)
        return place

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
        step = step_name(name)
        if step is None:
            raise ValueError(
                f"{self.directory} does not lie in a step of a CheckpointManager ({name!r} ends in"
                " no step number): which directory is the root, and where the segments go, cannot"
                " be known. Save through deltacheck.backends.orbax.manager(root), or to a name such"
                " as step_0"
            )
        return step[1]

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


def item_names(step_directory: Path) -> set[str]:
    """Return the names of the items in the folder of a step."""
    return {entry.name for entry in step_directory.iterdir() if entry.is_dir()}


def delete_by_rename(manager: Any) -> None:
    """Let a ``CheckpointManager`` give a step a temporary name before it deletes the step.

    Orbax deletes file by file. A process that ends meanwhile would leave a step that is listed and
    lacks a part. Directories with temporary names are no steps.
    """
    deleter, options = manager._checkpoint_deleter, manager._options
    # With these options, Orbax renames the step itself.
    if options.todelete_subdir is not None or options.todelete_full_path is not None:
        return
    delete_step = deleter.delete

    def delete(step: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # the step is deleted where it is, then
            if jax.process_index() == 0:
                path = Path(manager._get_read_step_directory(step, manager.directory))
                path.rename(path.with_name(path.name + UNFINISHED_STEP))
        delete_step(step)

    deleter.delete = delete


def is_foreign(place: ItemPlace) -> bool:
    """Return whether plain Orbax has saved an item that is a tree."""
    path = place.directory
    if not (path / "_METADATA").exists() or (path / "zarr.json").exists():
        return False
    # Items of ours have ``_METADATA``, too, but no arrays beside it, only a store at most: one that
    # lacks its manifest is damaged.
    entries = {entry.name for entry in path.iterdir() if entry.is_dir()}
    return (path / "manifest.ocdbt").exists() or bool(entries - {MANAGER_STORE})


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


def remove_unused(directory: str | os.PathLike[str], awaited_seconds: float = 0.0) -> None:
    """Remove the directories that Orbax has created for a save that is refused.

    Those of other items, and everything that has content, stay.

    Args:
        directory: The directory that Orbax has passed to the handler.
        awaited_seconds: The longest wait for the file that Orbax writes into the directory of a
            step on a thread. Without the directory, that thread would fail.
    """
    path = Path(os.fspath(directory))
    temporary = [place for place in (path, path.parent) if UNFINISHED_STEP in place.name]
    if not temporary or jax.process_index() != 0 or "://" in str(path):
        return
    description = temporary[-1] / _STEP_METADATA
    deadline = Deadline.after(awaited_seconds)
    while deadline.left and temporary[-1].exists() and not description.exists():
        time.sleep(0.005)
    if awaited_seconds and not description.exists():
        return
    with contextlib.suppress(OSError):
        # The v1 functions give a temporary name to the step only.
        for place in dict.fromkeys((path, *temporary)):
            if {entry.name for entry in place.iterdir()} <= {_STEP_METADATA}:
                (place / _STEP_METADATA).unlink(missing_ok=True)
                place.rmdir()


def await_renames(deadline: Deadline) -> bool:
    """Wait until Orbax has finished, well or not, its work after the futures of a save are done.

    Each manager has threads for that work, with fixed names (0.12.5 to 0.12.8). If a release
    renames them, ``wait_until_finished`` waits for them without a deadline. The thread that commits
    may be alone, if Ctrl-C has ended the call of ``save`` that had begun it.

    Returns:
        False if the time ran out.
    """
    return all(
        join(thread, deadline.left)
        for thread in threading.enumerate()
        if thread.name in ("async_save", "save_finalize")
    )


def await_renames_of(manager: Any) -> None:
    """Wait as ``await_renames``, for the last save of one manager, as long as it takes.

    Orbax waits with ``Thread.join``, and is to find the thread ended: see ``join``.
    """
    thread = manager._finalize_thread.get()
    if thread is not None:
        join(thread)


def _is_same(path: Path, root: Path) -> bool:
    return path == root or path.resolve() == root.resolve()


def _final_name(path: Path) -> str:
    return path.name.partition(UNFINISHED_STEP)[0]
