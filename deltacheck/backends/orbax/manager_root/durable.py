"""Steps of a ``CheckpointManager`` that survive a power cut.

Orbax syncs neither its own files nor the renames that make a step exist. It lets its users choose
the class that makes a directory and renames it when it is done. The class made here is Orbax's own
with two syncs. The one before the rename makes the content durable before the step exists. The one
after it makes the step durable before anything that follows, such as the return of
``wait_until_finished`` or the deletion of older steps.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from etils import epath
from orbax import checkpoint as ocp

from deltacheck.leaf.external_errors import walk
from deltacheck.store.files.durability import sync_directory

_Result = TypeVar("_Result")


def with_durable_steps(root: Path, options: Any) -> Any:
    """Return a copy of ``CheckpointManagerOptions`` whose steps are durable when they exist."""
    options = ocp.CheckpointManagerOptions() if options is None else copy.copy(options)
    path_class = (
        options.temporary_path_class
        or ocp.path.atomicity_defaults.get_default_temporary_path_class(
            epath.Path(root), atomicity_options=options.atomicity_options
        )
    )
    options.temporary_path_class = _durable(path_class)
    return options


async def on_thread(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function on a thread, or on this one if the interpreter ends.

    A program may end while a save is under way. From Python 3.12 on, no thread can be started then,
    and Orbax's own calls that follow in this event loop run on this thread, too.
    """
    is_started = False

    def call() -> _Result:
        nonlocal is_started
        is_started = True
        return function(*arguments)

    try:
        return await asyncio.to_thread(call)
    except RuntimeError:
        if is_started:
            raise
        asyncio.get_running_loop().set_default_executor(_SameThread())
        return function(*arguments)


class _SameThread(ThreadPoolExecutor):
    """Runs each call on the calling thread. An event loop takes this class of executors only."""

    def submit(self, call: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        future = Future[_Result]()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        return future


@functools.cache
def _durable(kind: Any) -> Any:
    """Return a subclass of one of Orbax's classes for unfinished directories."""

    class Durable(kind):  # type: ignore[misc]
        async def finalize(self) -> None:
            """Sync the content, let Orbax make the directory final, and sync the entries."""
            # On threads: a sync may take long, and the event loop is Orbax's.
            await on_thread(_sync_tree, Path(self.get()))
            await super().finalize()
            final = Path(self.get_final())
            # Once more: in its ``CommitFile`` mode Orbax ends with a new file in the directory, and
            # a rename changes entries.
            await on_thread(_sync_files, final)
            await on_thread(sync_directory, final.parent)

    Durable.__name__ = Durable.__qualname__ = f"Durable{kind.__name__}"
    return Durable


def _sync_tree(path: Path) -> None:
    """Sync all files and directories below a path.

    They are few and small, because the segments are in the store and not in the step.
    """
    for directory, _, _ in walk(path):
        _sync_files(Path(directory))


def _sync_files(directory: Path) -> None:
    """Sync the files of a directory, and the directory."""
    for entry in os.scandir(directory):
        # A link is not followed: what it refers to is not a part of the step.
        if not entry.is_dir(follow_symlinks=False):
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    sync_directory(directory)
