"""The use of Orbax's v1 interface beyond its public names (0.12.4 to 0.12.8)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.handlers.compatibility import (
    CompatibilityCheckpointHandler,
)

from deltacheck.backends.orbax.manager_root.orbax_internals import remove_unused
from deltacheck.store.lock.interrupts import Lock


def active_context() -> Any:
    """Return the context of the ``with`` block that the caller is in, or Orbax's default."""
    return get_context()


def with_handler(registry: Any, handler: type) -> Any:
    """Return a copy of a registry in which ``handler`` has every place of Orbax's for trees.

    All other handlers keep their places, which decide between handlers that accept the same object.
    """
    new_registry = v1.handlers.local_registry(include_global_registry=False)
    for entry, item in registry.get_all_entries():
        is_of_trees = entry is v1.handlers.PyTreeHandler or entry in _active_handlers
        typestrs = [*registry.get_secondary_typestrs(entry)]
        new_registry.add(
            handler if is_of_trees else entry,
            checkpointable_name=item,
            # Trees that plain Orbax has saved are loaded with its own handler, by ours.
            secondary_typestrs=[*dict.fromkeys((*_TREE_NAMES, *typestrs))]
            if is_of_trees
            else typestrs,
        )
    return new_registry


_TREE_NAMES = (f"{v1.handlers.PyTreeHandler.__module__}.{v1.handlers.PyTreeHandler.__qualname__}",)
# The handlers of the open contexts, in the order of their beginning.
_active_handlers: list[type] = []
_lock = Lock()


@contextlib.contextmanager
def for_new_contexts(handler: type) -> Iterator[None]:
    """Give the places of Orbax's handler for trees to ``handler`` in contexts that are made inside.

    A library such as Tunix makes its own, with the handlers that are registered globally then.
    """
    with _lock:
        _active_handlers.append(handler)
        _register_globally(handler)
    try:
        yield
    finally:
        with _lock:
            _active_handlers.remove(handler)
            _register_globally(
                _active_handlers[-1] if _active_handlers else v1.handlers.PyTreeHandler, handler
            )


@contextlib.contextmanager
def without_plain_saves(root: Path) -> Iterator[None]:
    """Refuse that Orbax's own handler saves a tree in ``root``.

    A context that was made before has that handler, and nothing would show it.
    """
    _roots.append(root)
    v1.handlers.PyTreeHandler.save = _save_elsewhere
    try:
        yield
    finally:
        _roots.remove(root)
        if not _roots:
            v1.handlers.PyTreeHandler.save = _SAVE


_SAVE: Any = v1.handlers.PyTreeHandler.save
_roots: list[Path] = []


@functools.wraps(_SAVE)
async def _save_elsewhere(handler: Any, directory: Any, checkpointable: Any) -> Any:
    for root in _roots:
        if root in Path(directory.path).parents:
            drop_creation(directory)
            remove_unused(directory.path)
            raise ValueError(
                f"the active context, or that of the Checkpointer, was made before the one of"
                f" deltacheck, and would save {directory.path} with Orbax's handler. Make it inside"
                f" of v1.context({str(root)!r}), or give it as v1.context({str(root)!r}, base)"
            )
    return await _SAVE(handler, directory, checkpointable)


def _register_globally(handler: type, *former: type) -> None:
    # Orbax has no call for this: it can only add a handler, behind the one registered by name.
    registry = v1.handlers.global_registry()
    entries: Any = registry.get_all_entries()
    typestrs = registry._secondary_typestrs
    trees = (v1.handlers.PyTreeHandler, *_active_handlers, *former)
    typestrs[handler] = [
        *dict.fromkeys((*_TREE_NAMES, *registry.get_secondary_typestrs(v1.handlers.PyTreeHandler)))
    ]
    entries[:] = [(handler if entry in trees else entry, item) for entry, item in entries]
    for entry in former:
        typestrs.pop(entry, None)


def is_of_manager(directory: Any) -> bool:
    """Return whether a save into a directory belongs to a ``Checkpointer`` and not to a function.

    A ``Checkpointer`` begins to create the directory before it calls the handler. The functions
    create it after all handlers have begun.
    """
    return bool(type(directory).__module__ == CompatibilityCheckpointHandler.__module__)


def is_creation_ended(directory: Any) -> bool:
    """Return whether Orbax has created a directory that a function saves into, or has failed to."""
    creation = _creation_of(directory)
    return creation is not None and inspect.getcoroutinestate(creation) == inspect.CORO_CLOSED


def drop_creation(directory: Any) -> None:
    """Close the coroutine that would create a directory, of a save that a handler has refused.

    Orbax forgets it, and Python would warn of it at any later moment.
    """
    creation = _creation_of(directory)
    if creation is not None and inspect.getcoroutinestate(creation) == inspect.CORO_CREATED:
        creation.close()


def _creation_of(directory: Any) -> Any:
    """Return the coroutine that creates a directory of a function; ``None`` if there is none."""
    creation = getattr(getattr(directory, "_base_path", None), "_awaitable", None)
    return creation if inspect.iscoroutine(creation) else None


def at_end_of_tasks(call: Callable[[], object]) -> None:
    """Call a function once all tasks of the running event loop have ended.

    Orbax runs the background of each save in an event loop of its own. The last task there is the
    one that commits the step.
    """
    tasks = asyncio.all_tasks()

    def ended(_: asyncio.Task[Any]) -> None:
        if all(task.done() for task in tasks):
            call()

    for task in tasks:
        task.add_done_callback(ended)


def is_partial_save(checkpointable: object) -> bool:
    """Return whether an object stands for a part of a tree, from ``v1.partial.save``."""
    return bool(type(checkpointable).__module__ == v1.partial.save.__module__)
