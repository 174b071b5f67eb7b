"""Convert objects of a framework's checkpoint to plain dicts, and back, by a list of classes.

An object is stored as ``{"deltacheck.class": name, "deltacheck.is": content}``: its attributes, or
the value of a member of an enumeration. A program that reads such a tree without this module sees
these dicts. A restore creates no object of a class that is neither in the list nor named by
``torch.serialization.add_safe_globals``. It sets the attributes of a named class without a call of
any method.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from deltacheck.backends.torch.state.classes import named
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import containers, instances
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


def _member(kind: type[Any], value: Any) -> Any:
    return kind(value)


def _of_attributes(module: str, name: str) -> _SavedClass:
    return _SavedClass(module, name, lambda value: dict(vars(value)), _from_attributes)


# By the name that is stored.
_CLASSES: Mapping[str, _SavedClass] = {
    entry.name: entry
    for entry in (
        _of_attributes("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        _of_attributes("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        _SavedClass("deepspeed.runtime.zero.config", "ZeroStageEnum", int, _member),
        _of_attributes("deepspeed.utils.tensor_fragment", "fragment_address"),
        _SavedClass("torch", "Size", list, _member),
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
        UnsupportedLeaf: An object is of a class that is not named. The message names path and type.
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
    for stored_name, entry in _CLASSES.items():
        # Listed classes are compared by name, so that DeepSpeed need not be imported.
        if (entry.module, entry.name) == (kind.__module__, kind.__qualname__):
            return {_CLASS: stored_name, _IS: _encoded(entry.take(value), keys, place_of)}
    name = instances.name_of(kind)
    if named(name) is kind and (isinstance(value, enum.Enum) or _has_attributes_alone(kind)):
        content = value.value if isinstance(value, enum.Enum) else dict(vars(value))
        return {_CLASS: name, _IS: _encoded(content, keys, place_of)}
    raise UnsupportedLeaf(
        f"leaf {'/'.join(keys)!r} is of type {name}, which cannot be kept exactly; turn it into"
        " arrays, numbers, text, bytes, dicts, lists or None, leave it out, or name the class with"
        f" torch.serialization.add_safe_globals([{kind.__qualname__}]), in whoever reads it, too"
    )


def _has_attributes_alone(kind: type[Any]) -> bool:
    """Return true unless instances have slots, or the content of a base such as ``dict``."""
    has_slots = any(base.__dict__.get("__slots__") for base in kind.__mro__)
    new: Any = kind.__new__
    return new is object.__new__ and not has_slots


def decoded(value: Any, fill: Callable[[list[Any]], torch.Tensor] | None = None) -> Any:
    """Return the state that ``encoded`` was given.

    Args:
        value: A result of ``encoded``.
        fill: Returns the tensor for the place of a hole.

    Raises:
        UnsupportedLeaf: The class of an object is not named in this process.
    """
    if isinstance(value, dict) and _CLASS in value:
        name, content = value[_CLASS], value.get(_IS)
        place = place_in(value)
        if place is not None and fill is not None:
            return fill(place)
        entry = _CLASSES.get(name)
        # A checkpoint never chooses what is imported: the module and the name come from the list,
        # and other classes are those that this process has named.
        if entry is not None:
            kind = getattr(importlib.import_module(entry.module), entry.name)
            return entry.give(kind, decoded(content, fill))
        kind = named(name)
        if kind is None:
            raise UnsupportedLeaf(
                f"the checkpoint has an object of class {name!r}, which is not known here; nothing"
                " is made of it. If you trust the class, name it with"
                " torch.serialization.add_safe_globals([...]) before you read"
            )
        give = _member if issubclass(kind, enum.Enum) else _from_attributes
        try:
            return give(kind, decoded(content, fill))
        except (TypeError, ValueError, AttributeError) as error:
            raise UnsupportedLeaf(
                f"the checkpoint has an object of class {name!r}, which cannot be made: {error}"
            ) from error
    level = containers.level_of(value)
    if level is None:
        return value
    return _rebuilt(level, [(key, decoded(item, fill)) for key, item in level.pairs])


def _rebuilt(level: containers.Level, pairs: list[tuple[object, Any]]) -> Any:
    """Return a container of the same type with other children."""
    return containers.of_children(level.node, pairs, level.attributes, containers.as_plain, "")
