"""Steps of a ``CheckpointManager`` that survive a power cut: Orbax syncs neither its own files nor
the
renames that make a step exist.

Orbax lets its users choose the class that makes a directory and renames it when it is done. Ours is
Orbax's own, with a sync before the rename, so that no step exists before its content, and one after
it, so that nothing which follows (the return of ``wait_until_finished``, the deletion of older
steps) comes before the step itself is safe.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import os
from pathlib import Path
from typing import Any

from etils import epath
from orbax import checkpoint as ocp

from deltacheck.store.files.durability import sync_directory


def with_durable_steps(root: Path, options: Any) -> Any:
    """``CheckpointManagerOptions`` whose steps and items are durable when they exist; those given
    stay as they are.
    """
    options = ocp.CheckpointManagerOptions() if options is None else copy.copy(options)
    chosen = (
        options.temporary_path_class
        or ocp.path.atomicity_defaults.get_default_temporary_path_class(
            epath.Path(root), atomicity_options=options.atomicity_options
        )
    )
    options.temporary_path_class = _durable(chosen)
    return options


@functools.cache
def _durable(kind: Any) -> Any:
    """A subclass of one of Orbax's classes for directories under way."""

    class Durable(kind):  # type: ignore[misc]
        async def finalize(self) -> None:
            await asyncio.to_thread(_sync_files, Path(self.get()))
            await super().finalize()
            final = Path(self.get_final())
            await asyncio.to_thread(_sync_files, final)
            await asyncio.to_thread(sync_directory, final.parent)

    Durable.__name__ = Durable.__qualname__ = f"Durable{kind.__name__}"
    return Durable


def _sync_files(path: Path) -> None:
    """fsync what lies in a directory under way, files and directories: a few small ones, since our
    segments lie elsewhere.
    """
    for directory, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(Path(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(directory))
