"""The use of Orbax's v1 interface beyond its public names (0.12.4 to 0.12.8)."""

from __future__ import annotations

from typing import Any

from orbax.checkpoint import v1
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.handlers.compatibility import (
    CompatibilityCheckpointHandler,
)


def active_context() -> Any:
    """Return the context of the ``with`` block that the caller is in, or Orbax's default."""
    return get_context()


def with_handler(registry: Any, handler: type) -> Any:
    """Return a copy of a registry in which ``handler`` has every place of Orbax's for trees.

    All other handlers keep their places, which decide between handlers that accept the same object.
    """
    new_registry = v1.handlers.local_registry(include_global_registry=False)
    trees = v1.handlers.PyTreeHandler
    name = f"{trees.__module__}.{trees.__qualname__}"
    for entry, item in registry.get_all_entries():
        typestrs = [*registry.get_secondary_typestrs(entry)]
        new_registry.add(
            handler if entry is trees else entry,
            checkpointable_name=item,
            # Trees that plain Orbax has saved are loaded with its own handler, by ours.
            secondary_typestrs=[name, *typestrs] if entry is trees else typestrs,
        )
    return new_registry


def is_of_manager(directory: Any) -> bool:
    """Return whether a save into a directory belongs to a ``Checkpointer`` and not to a function.

    A ``Checkpointer`` begins to create the directory before it calls the handler. The functions
    create it after all handlers have begun.
    """
    return bool(type(directory).__module__ == CompatibilityCheckpointHandler.__module__)


def is_partial_save(checkpointable: object) -> bool:
    """Return whether an object stands for a part of a tree, from ``v1.partial.save``."""
    return bool(type(checkpointable).__module__ == v1.partial.save.__module__)
