"""Nested states of all types of containers, and their comparison in type, order and bit."""

from __future__ import annotations

import struct
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.support.states import bits

Moments = namedtuple("Moments", "mu nu")


@dataclass(frozen=True)
class Progress:
    """A dataclass whose ``__init__`` would change what it is given."""

    total: object
    rest: object = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rest", (self.rest, "changed by __post_init__"))


@dataclass(slots=True)
class Slotted:
    content: object


class Table(dict):  # type: ignore[type-arg]
    """A subclass with attributes."""


class Row(list):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the methods of a subclass are not called")


class Pair(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


# The classes that a user would name.
CLASSES = (Moments, Progress, Slotted, Table, Row, Pair, Color, Level)


class Foreign:
    """A class that no state can hold."""

    def __init__(self, content: object = None) -> None:
        self.content = content


class Unnamed(dict):  # type: ignore[type-arg]
    """A class that the user has not named."""


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_keys = st.one_of(_text, st.integers(-(2**70), 2**70), st.sampled_from(["0", "a/b", "%", "", "-1"]))
_odd_keys = st.sampled_from([1.5, True, None, (1,), Level.LOW, np.str_("n")])
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    _text,
    st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray),
    st.sampled_from([Color.RED, Level.LOW, time.gmtime(3), time.localtime(7e8)]),
    st.sampled_from([np.float64(0.1), np.int64(2**62), np.bool_(True), np.uint8(3)]),
    st.integers(0, 9).map(lambda size: np.arange(size, dtype=np.float32)),
)
_refused = st.sampled_from(
    [Foreign(), {1}, range(3), np.datetime64("2020-01-01"), np.str_("x"), Unnamed(a=1), "\ud800"]
)


def _table(items: dict[Any, Any]) -> Table:
    table = Table(items)
    table.note = "an attribute"  # type: ignore[attr-defined]
    return table


def _ordered(items: dict[Any, Any]) -> OrderedDict[Any, Any]:
    ordered = OrderedDict(items)
    ordered._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return ordered


def _containers(child: SearchStrategy[Any], keys: SearchStrategy[Any]) -> SearchStrategy[Any]:
    items = st.dictionaries(keys, child, max_size=3)
    rows = st.lists(child, max_size=3)
    pairs = st.tuples(child, child)
    factories = st.sampled_from([None, int, float, list, dict, set, str])
    return st.one_of(
        items,
        items.map(OrderedDict),
        items.map(_ordered),
        items.map(_table),
        items.map(Counter),
        st.tuples(factories, items).map(lambda both: defaultdict(*both)),
        rows,
        rows.map(Row),
        rows.map(Pair),
        rows.map(tuple),
        st.tuples(rows, st.integers(3, 5)).map(lambda both: deque(both[0], maxlen=both[1])),
        pairs.map(lambda both: Moments(*both)),
        pairs.map(lambda both: Progress(*both)),
        child.map(Slotted),
    )


def states(
    leaves: SearchStrategy[Any] = _scalars, refused: SearchStrategy[Any] = _refused
) -> SearchStrategy[Any]:
    """Return nested states that can be kept, and some that cannot.

    Args:
        leaves: Values beside those of Python and NumPy.
        refused: Values that cannot be kept.
    """
    kept = st.recursive(
        st.one_of(_scalars, leaves), lambda child: _containers(child, _keys), max_leaves=12
    )
    odd = st.one_of(
        refused,
        kept.map(Foreign),
        st.dictionaries(_odd_keys, kept, min_size=1, max_size=1),
        st.just(defaultdict(lambda: 0)),
    )
    return st.one_of(
        kept,
        kept,
        st.recursive(odd, lambda child: _containers(st.one_of(kept, child), _keys), max_leaves=4),
    )


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yield the places at which two states differ in type, order or bits."""
    if type(a) is not type(b):
        yield f"{path}: {type(a).__name__} against {type(b).__name__}"
    elif isinstance(a, torch.Tensor | np.ndarray | np.generic):
        if (a.dtype, a.shape, bits(a)) != (b.dtype, b.shape, bits(b)):
            yield f"{path}: {a!r} against {b!r}"
    elif isinstance(a, float | complex):
        if _bits(a) != _bits(b):
            yield f"{path}: {a!r} against {b!r}"
    elif isinstance(a, dict | list | tuple | deque | Progress | Slotted):
        yield from _children(a, b, path)
    elif a != b:
        yield f"{path}: {a!r} against {b!r}"


def _children(a: Any, b: Any, path: str) -> Iterator[str]:
    pairs, others = _pairs(a), _pairs(b)
    if [(type(key), key) for key, _ in pairs] != [(type(key), key) for key, _ in others]:
        yield f"{path}: keys {pairs} against {others}"
    for (key, x), (_, y) in zip(pairs, others, strict=False):
        yield from differences(x, y, f"{path}/{key}")
    for name in ("maxlen", "default_factory", "tm_zone", "tm_gmtoff"):
        if getattr(a, name, None) != getattr(b, name, None):
            yield f"{path}: another {name}"
    if isinstance(a, dict) and hasattr(a, "__dict__"):
        yield from differences(dict(vars(a)), dict(vars(b)), path + ".")


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Progress):
        return [("total", value.total), ("rest", value.rest)]
    if isinstance(value, Slotted):
        return [("content", value.content)]
    if isinstance(value, dict):
        return list(dict.items(value))
    return list(enumerate(list.__iter__(value) if isinstance(value, list) else value))


def _bits(number: complex) -> bytes:
    return struct.pack("dd", number.real, number.imag)
