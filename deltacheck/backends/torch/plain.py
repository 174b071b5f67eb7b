"""Convert objects of a framework's checkpoint to plain dicts, and back, by a list of classes.

An object is stored as ``{"deltacheck.class": name, "deltacheck.is": content}``. A program that
reads such a tree without this module sees these dicts. A restore creates no object of a class that
is not in the list.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import containers
from deltacheck.leaf.tree import escape_key

_CLASS, _IS = "deltacheck.class", "deltacheck.is"  # permanent
# Permanent, too. It marks the place of a tensor that is stored elsewhere in the tree.
_HOLE = "hole"
# Compared with the exact type: a subclass, such as an ``IntEnum``, would lose its class.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)


class _SavedClass(NamedTuple):
    """A class that may be saved.

    ``take`` returns an object as plain values, ``give`` creates the object from them.
    """

    module: str
    name: str
    take: Callable[[Any], Any]
    give: Callable[[type[Any], Any], Any]


def _from_attributes(kind: type[Any], attributes: dict[str, Any]) -> Any:
    # Not through the constructor: no code of the class runs on content of a checkpoint.
    instance = object.__new__(kind)
    instance.__dict__.update(attributes)
    return instance


def _of_attributes(module: str, name: str) -> _SavedClass:
    return _SavedClass(module, name, lambda value: dict(vars(value)), _from_attributes)


# By the name that is stored.
_classes: dict[str, _SavedClass] = {
    entry.name: entry
    for entry in (
        _of_attributes("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        _of_attributes("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        _SavedClass(
            "deepspeed.runtime.zero.config", "ZeroStageEnum", int, lambda kind, value: kind(value)
        ),
        _of_attributes("deepspeed.utils.tensor_fragment", "fragment_address"),
        _SavedClass("torch", "Size", list, lambda kind, sizes: kind(sizes)),
        _SavedClass(
            "torch",
            "dtype",
            lambda value: str(value).removeprefix("torch."),
            lambda kind, name: _dtype(name),
        ),
    )
}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    # The name comes from a checkpoint, and may be that of any attribute of torch.
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedLeaf(f"torch has no dtype {name!r}")
    return dtype


def register(kind: type[Any]) -> type[Any]:
    """Allow objects of a class in saves. May decorate the class.

    An object is stored as its attributes, an enumeration member as its value. The program that
    restores must register the class too. A restore creates the object and sets its attributes,
    without a call of any method. Register only classes for which that is enough.

    Args:
        kind: The class.

    Returns:
        The class.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    entry = _of_attributes(kind.__module__, kind.__qualname__)
    # Members of an enumeration are single objects, so they are found by value and never created.
    if issubclass(kind, enum.Enum):
        entry = _SavedClass(
            kind.__module__,
            kind.__qualname__,
            lambda value: value.value,
            lambda enumeration, value: enumeration(value),
        )
    _kinds[name] = kind
    _classes[name] = entry
    return kind


# Registered classes by name, because a module need not export them.
_kinds: dict[str, type[Any]] = {}


def encoded(
    value: Any,
    keys: Iterable[str],
    place_of: Callable[[torch.Tensor], list[Any] | None] = lambda tensor: None,
) -> Any:
    """Return a state as dicts, lists, tuples, arrays and plain values.

    Args:
        value: The state.
        keys: The path of the state, for messages.
        place_of: Returns plain values that stand for a tensor that is stored elsewhere; ``None``
            for any other tensor.

    Raises:
        UnsupportedLeaf: An object is of a class that is not registered. The message names path and
            type.
    """
    return _encoded(value, tuple(keys), place_of)


def hole(place: list[Any]) -> dict[str, Any]:
    """Return the dict that stands for a tensor that is stored elsewhere, at ``place``."""
    return {_CLASS: _HOLE, _IS: place}


def place_in(value: Any) -> list[Any] | None:
    """Return the place in the dict of a hole; ``None`` for any other value."""
    is_hole = (
        isinstance(value, dict) and value.get(_CLASS) == _HOLE and isinstance(value.get(_IS), list)
    )
    return value[_IS] if is_hole else None


def _encoded(
    value: Any, keys: tuple[str, ...], place_of: Callable[[torch.Tensor], list[Any] | None]
) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        instead = place_of(value)
        return value if instead is None else hole(instead)
    if kind in _PLAIN or isinstance(value, np.ndarray | np.generic):
        return value
    # A restore would take such a dict for an object.
    if isinstance(value, dict) and _CLASS in value:
        raise UnsupportedLeaf(
            f"{'/'.join(keys)!r} has the key {_CLASS!r}, which stands for objects here; rename it"
        )
    # Exact types again: a subclass of dict may have content that its items do not show.
    try:
        level = containers.level_of(value)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"leaf {'/'.join(keys)!r}: {error}") from None
    if level is not None:
        pairs = [
            (key, _encoded(item, (*keys, escape_key(key)), place_of)) for key, item in level.pairs
        ]
        return _rebuilt(level, pairs)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for stored_name, entry in _classes.items():
        # Listed classes are compared by name, so that DeepSpeed need not be imported.
        if _kinds.get(stored_name) is kind or (entry.module, entry.name) == (
            kind.__module__,
            kind.__qualname__,
        ):
            return {_CLASS: stored_name, _IS: _encoded(entry.take(value), keys, place_of)}
    raise UnsupportedLeaf(
        f"leaf {'/'.join(keys)!r} is of type {name}, which cannot be kept exactly; turn it into"
        " arrays, numbers, text, bytes, dicts, lists or None, leave it out, or allow it with"
        f" deltacheck.backends.torch.plain.register({kind.__qualname__}), in whoever reads"
        " it, too"
    )


def decoded(value: Any, fill: Callable[[list[Any]], torch.Tensor] | None = None) -> Any:
    """Return the state that ``encoded`` was given.

    Args:
        value: A result of ``encoded``.
        fill: Returns the tensor for the place of a hole.

    Raises:
        UnsupportedLeaf: The class of an object is not registered in this process.
    """
    if isinstance(value, dict) and _CLASS in value:
        name, content = value[_CLASS], value.get(_IS)
        place = place_in(value)
        if place is not None and fill is not None:
            return fill(place)
        entry = _classes.get(name)
        # A checkpoint never chooses what is imported: the class must be in the list of this
        # process.
        if entry is None:
            raise UnsupportedLeaf(
                f"the checkpoint has an object of class {name!r}, which is not known here; nothing"
                " is made of it. Where you trust the class, allow it with"
                " deltacheck.backends.torch.plain.register(...) before you read"
            )
        # The module and the name come from the list, not from the checkpoint.
        kind = _kinds.get(name) or getattr(importlib.import_module(entry.module), entry.name)
        return entry.give(kind, decoded(content, fill))
    level = containers.level_of(value)
    if level is None:
        return value
    return _rebuilt(level, [(key, decoded(item, fill)) for key, item in level.pairs])


def _rebuilt(level: containers.Level, pairs: list[tuple[object, Any]]) -> Any:
    """Return a container of the same type with other children."""
    return containers.of_children(level.node, pairs, level.attributes, containers.as_plain, "")
