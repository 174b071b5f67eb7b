"""The types of containers: one level of a state as a node of the skeleton, and back.

Only Python's own types are known here. A backend adds those of its framework and of its user's
classes. A name in a file selects from what is known, and never causes an import.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

from deltacheck.errors import UnsupportedLeaf

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Node: TypeAlias = "dict[str, Json]"

# Kinds of nodes by the field that has their children: [key, node] pairs, or nodes by position.
KEYED = ("dict", "odict", "fields", "object", "tensor")
LISTED = ("list", "tuple", "deque")
# Permanent name of a class.
COUNTER = "collections.Counter"
# Permanent prefix of the tag of an array with an element type that only its framework has.
DTYPE = "dtype:"
# Permanent names. A factory is a function, and others would have to be imported by name.
_FACTORIES: Mapping[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)
}


class Level(NamedTuple):
    """One level of a state: a container without its children, and its children.

    Attributes:
        node: The fields of the node that do not depend on the children.
        pairs: Key and value of each child, in order. Positions are the keys of sequences.
        attributes: Values by name that belong to the container and are no children. They cannot
            hold arrays.
    """

    node: Node
    pairs: Iterable[tuple[object, object]] = ()
    attributes: Mapping[str, object] = {}


# Makes the value of a node with a class that is none of Python's own. Arguments: the path, the
# node, its value in Python's own types, and the attributes by name.
Build: TypeAlias = Callable[[str, Node, object, Mapping[str, object]], object]


def as_plain(path: str, node: Node, plain: object, attributes: Mapping[str, object]) -> object:
    """Return the value in Python's own types: the ``Build`` of readers that know no classes."""
    return plain


def level_of(value: object) -> Level | None:
    """Return one level of a container of Python; ``None`` for any other value.

    Types are compared exactly, because a subclass would be restored as its base.

    Raises:
        UnsupportedLeaf: The container has a part that cannot be kept.
    """
    make = _LEVELS.get(type(value))
    return None if make is None else make(value)


def _default_level(value: object) -> Level:
    container = cast("defaultdict[object, object]", value)
    factory = container.default_factory
    name = next((name for name, known in _FACTORIES.items() if known is factory), None)
    if factory is not None and name is None:
        raise UnsupportedLeaf(
            f"the default_factory of a defaultdict is {factory!r}, which cannot be kept; use one of"
            f" {', '.join(_FACTORIES)}, or save dict(value)"
        )
    node: Node = {"t": "dict", "c": "collections.defaultdict", "factory": name}
    return Level(node, container.items())


def _time_level(value: object) -> Level:
    moment = cast("time.struct_time", value)
    # The zone and its offset are fields that a struct_time does not have as a tuple.
    fields = (*moment, moment.tm_zone, moment.tm_gmtoff)
    return Level({"t": "tuple", "c": "time.struct_time"}, enumerate(fields))


_LEVELS: Mapping[type, Callable[..., Level]] = {
    dict: lambda value: Level({"t": "dict"}, value.items()),
    # Instances have attributes, such as the ``_metadata`` of a torch module's state dict.
    OrderedDict: lambda value: Level({"t": "odict"}, value.items(), vars(value)),
    Counter: lambda value: Level({"t": "dict", "c": COUNTER}, value.items(), vars(value)),
    defaultdict: _default_level,
    list: lambda value: Level({"t": "list"}, enumerate(value)),
    tuple: lambda value: Level({"t": "tuple"}, enumerate(value)),
    deque: lambda value: Level({"t": "deque", "maxlen": value.maxlen}, enumerate(value)),
    time.struct_time: _time_level,
}


def has_types(node: Node) -> bool:
    """Return ``True`` if a skeleton has a node that only the feature ``types`` has."""
    pending = [node]
    while pending:
        node = pending.pop()
        kind, tag = node["t"], node.get("tag")
        if (
            kind in ("object", "tensor", "enum")
            # Such a name was always there, and is for people.
            or ("c" in node and kind != "fields")
            or "a" in node
            or (isinstance(tag, str) and tag.startswith(DTYPE))
        ):
            return True
        if kind in KEYED:
            pending += [item for _, item in cast("list[tuple[str, Node]]", node["k"])]
        elif kind in LISTED:
            pending += cast("list[Node]", node["n"])
    return False


def of_scalar(node: Node, plain: object, build: Build, path: str) -> object:
    """Return the value of a scalar node.

    Args:
        node: The node.
        plain: Its value without the class.
        build: Makes values of other classes than Python's.
        path: The path of the leaf.

    Raises:
        TypeError: The value is not one of its class.
    """
    if "c" not in node:
        return plain
    if node["c"] == "bytearray":
        return bytearray(cast("bytes", plain))
    return build(path, node, plain, {})


def of_children(
    node: Node,
    values: Sequence[tuple[object, object]],
    attributes: Mapping[str, object],
    build: Build,
    path: str,
) -> object:
    """Return the container of a node.

    Args:
        node: The node.
        values: Key and value of each child.
        attributes: The attributes by name.
        build: Makes containers of other classes than Python's.
        path: The path of the container.

    Raises:
        TypeError, ValueError: The node does not describe a container.
    """
    kind, name = node["t"], node.get("c")
    items = [value for _, value in values]
    if name == "collections.defaultdict":
        return defaultdict(_factory_of(node), values)
    if name == "time.struct_time":
        return time.struct_time(cast("list[int]", items))
    plain: object
    if kind == "odict":
        plain = OrderedDict(values)
    elif name == COUNTER:
        plain = Counter(cast("dict[object, int]", dict(values)))
    elif kind in KEYED:
        plain = dict(values)
    elif kind == "deque":
        plain = deque(items, maxlen=_maxlen_of(node, len(items)))
    else:
        plain = tuple(items) if kind == "tuple" else items
    if kind == "fields" or name in (None, COUNTER):
        # Only the instances of these two classes have attributes.
        if attributes and isinstance(plain, OrderedDict | Counter):
            vars(plain).update(attributes)
        return plain
    return build(path, node, plain, attributes)


def _factory_of(node: Node) -> Callable[[], object] | None:
    name = node.get("factory")
    if name is not None and name not in _FACTORIES:
        raise ValueError(f"a defaultdict cannot have the factory {name!r}")
    return None if name is None else _FACTORIES[cast("str", name)]


def _maxlen_of(node: Node, items: int) -> int | None:
    """Return the maximal length of a deque node with this number of items."""
    maxlen = node.get("maxlen")
    if maxlen is not None and not (type(maxlen) is int and items <= maxlen <= sys.maxsize):
        raise ValueError(f"a deque of {items} items cannot have the greatest length {maxlen!r}")
    return maxlen
