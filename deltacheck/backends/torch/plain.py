"""Objects of a framework's checkpoint as plain dicts, and back, by a list of classes: nothing else
is
ever made of what was read.

An object is ``{"deltacheck.class": name, "deltacheck.is": what it is}``. Whoever reads such a tree
without this module sees just that.
"""

from __future__ import annotations

import enum
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.tree import escape_key

_CLASS, _IS = "deltacheck.class", "deltacheck.is"  # permanent
_HOLE = "hole"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class _Known(NamedTuple):
    """A class that may be kept. ``take``: an object as plain values; ``give``: the object again."""

    module: str
    name: str
    take: Callable[[Any], Any]
    give: Callable[[type[Any], Any], Any]


def _from_attributes(kind: type[Any], attributes: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def _of_attributes(module: str, name: str) -> _Known:
    return _Known(module, name, lambda value: dict(vars(value)), _from_attributes)


_known: dict[str, _Known] = {
    known.name: known
    for known in (
        _of_attributes("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        _of_attributes("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        _Known(
            "deepspeed.runtime.zero.config", "ZeroStageEnum", int, lambda kind, value: kind(value)
        ),
        _of_attributes("deepspeed.utils.tensor_fragment", "fragment_address"),
        _Known("torch", "Size", list, lambda kind, sizes: kind(sizes)),
        _Known(
            "torch",
            "dtype",
            lambda value: str(value).removeprefix("torch."),
            lambda kind, name: _dtype(name),
        ),
    )
}  # by the name that is stored


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedLeaf(f"torch has no dtype {name!r}")
    return found


def register(kind: type[Any]) -> type[Any]:
    """Allow objects of a class in what is saved, by their attributes (of an enumeration: by the
    value). May decorate the class.

    Whoever reads has to register it, too. A read makes the object and sets its attributes, and
    calls none of its methods: register classes for which that is all. Raises ``ValueError`` where
    another class has the name.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    known = _of_attributes(kind.__module__, kind.__qualname__)
    if issubclass(kind, enum.Enum):
        known = _Known(
            kind.__module__,
            kind.__qualname__,
            lambda value: value.value,
            lambda of, value: of(value),
        )
    _kinds[name] = kind
    _known[name] = known
    return kind


_kinds: dict[str, type[Any]] = {}  # registered ones, which need not be found by their module


def encoded(
    value: Any,
    keys: Iterable[str],
    place_of: Callable[[torch.Tensor], list[Any] | None] = lambda tensor: None,
) -> Any:
    """A state as dicts, lists, tuples, arrays and plain values alone. ``keys``: its path.

    ``place_of(tensor)``: plain values that stand for a tensor which is stored elsewhere; ``None``
    for any other. Raises ``UnsupportedLeaf`` naming path, type and way out.
    """
    return _encoded(value, tuple(keys), place_of)


def hole(place: list[Any]) -> dict[str, Any]:
    """What stands for a tensor that is stored elsewhere. ``place``: plain values."""
    return {_CLASS: _HOLE, _IS: place}


def place_in(value: Any) -> list[Any] | None:
    """What a hole was made of; ``None`` of anything else."""
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
    if kind in (dict, OrderedDict):
        if _CLASS in value:
            raise UnsupportedLeaf(
                f"{'/'.join(keys)!r} has the key {_CLASS!r}, which stands for objects here;"
                " rename it"
            )
        return kind(
            (key, _encoded(item, (*keys, escape_key(key)), place_of)) for key, item in value.items()
        )
    if kind in (list, tuple):
        return kind(
            _encoded(item, (*keys, str(number)), place_of) for number, item in enumerate(value)
        )
    name = f"{kind.__module__}.{kind.__qualname__}"
    for stored, known in _known.items():
        if _kinds.get(stored) is kind or (known.module, known.name) == (
            kind.__module__,
            kind.__qualname__,
        ):
            return {_CLASS: stored, _IS: _encoded(known.take(value), keys, place_of)}
    raise UnsupportedLeaf(
        f"leaf {'/'.join(keys)!r} is of type {name}, which cannot be kept exactly; turn it into"
        " arrays, numbers, text, bytes, dicts, lists or None, leave it out, or allow it with"
        f" deltacheck.backends.torch.plain.register({kind.__qualname__}), in whoever reads"
        " it, too"
    )


def decoded(value: Any, fill: Callable[[list[Any]], torch.Tensor] | None = None) -> Any:
    """What ``encoded`` was given. ``fill``: gives what stands in a hole.

    Raises ``UnsupportedLeaf`` for a class that is not known here.
    """
    if isinstance(value, dict) and _CLASS in value:
        name, content = value[_CLASS], value.get(_IS)
        place = place_in(value)
        if place is not None and fill is not None:
            return fill(place)
        known = _known.get(name)
        if known is None:
            raise UnsupportedLeaf(
                f"the checkpoint has an object of class {name!r}, which is not known here; nothing"
                " is made of it. Where you trust the class, allow it with"
                " deltacheck.backends.torch.plain.register(...) before you read"
            )
        kind = _kinds.get(name) or getattr(importlib.import_module(known.module), known.name)
        return known.give(kind, decoded(content, fill))
    if isinstance(value, OrderedDict):
        return OrderedDict((key, decoded(item, fill)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: decoded(item, fill) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decoded(item, fill) for item in value)
    return value
