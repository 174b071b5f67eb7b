"""The outline of a flattened state, by which a state of the same structure is flattened again.

A training loop saves the same containers at every save. A walk that describes each leaf takes
microseconds per leaf on the training thread. An outline compares keys and types depth by depth
instead, in a few calls per depth that loop in C. It knows Python's own containers, and those that a
backend expands; a state with others has no outline.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, compress, count
from operator import is_not, itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import long_lists, tree
from deltacheck.leaf.tree import Expand, Json, Node

_MAPPINGS = (dict, OrderedDict)
_NATIVE = {dict, list, tuple}
_CONTAINERS = (OrderedDict, *_NATIVE)
# Immutable, so that the values of the last save can be kept for a comparison.
_SCALARS = (type(None), bool, int, float, str, bytes)
# The slot of the attributes of an OrderedDict, a dictionary that follows its children.
_ATTRIBUTES = -1

# Returns the children of dictionaries, lists and tuples, in order; ``None`` if a length, a key or a
# type differs from those that are passed: ``_native.matching_children``.
MatchChildren: TypeAlias = Callable[
    [list[Any], list[int], list[object], list[type]], "list[Any] | None"
]


class _Contents(NamedTuple):
    """Keys and types of the containers of one depth, which are compared."""

    # In this order: keys are compared only if their types are those of text and integers.
    lengths: list[int]
    key_types: list[type]
    types: list[type]
    keys: list[object]


class _Depth(NamedTuple):
    """The containers of one depth.

    Attributes:
        is_plain: All of them are ``dict``.
        is_native: All of them are ``dict``, ``list`` or ``tuple``, which native code can read.
        contents: Their keys and the types of their children.
        places: For every child, the number of its container and its slot there.
        containers: The positions of the children that are containers of the next depth.
        leaves: The positions of those that are arrays.
        scalars: The positions of those that are Python scalars, or lists that are kept as one text.
        texts: Of ``scalars``, the numbers of the latter.
    """

    is_plain: bool
    is_native: bool
    contents: _Contents
    places: list[tuple[int, int]]
    containers: list[int]
    leaves: list[int]
    scalars: list[int]
    texts: list[int]


class _LongList(NamedTuple):
    """The text of a list."""

    text: str


class Outlined(NamedTuple):
    """A state that has the structure of an outline.

    Attributes:
        skeleton: Its skeleton, with its own Python scalars.
        leaves: Its arrays, in the order of ``Outline.owners``.
    """

    skeleton: Node
    leaves: list[Any]


class Outline:
    """The containers, keys and types of a state, and its skeleton. ``Outline.of`` makes one.

    Attributes:
        owners: The path of every array, tied ones included, and the path of the leaf that holds its
            bytes.
    """

    def __init__(
        self,
        depths: list[_Depth],
        skeleton: Node,
        scalars: list[object],
        owners: Sequence[tuple[str, str]],
        match_children: MatchChildren,
        expand: Expand | None,
    ) -> None:
        self.owners = owners
        self._match_children = match_children
        self._expand = expand
        self._depths = depths
        self._skeleton = skeleton
        self._scalars = scalars
        self._floats = [n for n, value in enumerate(scalars) if type(value) is float]
        self._float_bits = _bits(chosen(scalars, self._floats))

    @classmethod
    def of(
        cls,
        state: object,
        skeleton: Node,
        match_children: MatchChildren,
        expand: Expand | None = None,
    ) -> Outline | None:
        """Return the outline of a state; ``None`` if it has containers of other types.

        Args:
            state: The state.
            skeleton: Its skeleton, as ``tree.flatten`` returns it.
            match_children: The comparison of the dictionaries, lists and tuples of one depth.
            expand: As for ``tree.flatten``, for containers whose nodes have fields. Default: a
                state with other containers than Python's has no outline.
        """
        depths: list[_Depth] = []
        scalars: list[object] = []
        owners: list[tuple[str, str]] = []
        # A list around the state, so that the type of the state is compared too.
        containers: list[Any] = [[state]]
        nodes = [(0, 0, skeleton, "")]
        while containers:
            is_plain = all(type(container) is dict for container in containers)
            contents, values = _contents(containers, is_plain, expand)
            is_native = {type(container) for container in containers} <= _NATIVE
            depth = _Depth(is_plain, is_native, contents, [n[:2] for n in nodes], [], [], [], [])
            children: list[tuple[int, int, Node, str]] = []
            for position, (value, (_, _, node, path)) in enumerate(zip(values, nodes, strict=True)):
                kind = type(value)
                if node["t"] == "array":
                    depth.leaves.append(position)
                    owners.append((path, cast(str, node.get("of", path))))
                elif node["t"] == "json":
                    depth.texts.append(len(depth.scalars))
                    depth.scalars.append(position)
                    scalars.append(_LongList(cast(str, node["v"])))
                elif kind in _CONTAINERS or (expand is not None and node["t"] == "fields"):
                    children += _children_of(len(depth.containers), node, kind, path)
                    depth.containers.append(position)
                elif kind in _SCALARS:
                    depth.scalars.append(position)
                    scalars.append(value)
                else:
                    return None
            depths.append(depth)
            containers = chosen(values, depth.containers)
            nodes = children
        return cls(depths, skeleton, scalars, owners, match_children, expand)

    def match(self, state: object) -> Outlined | None:
        """Flatten a state if its structure is that of the outline.

        Args:
            state: The state.

        Returns:
            The state; ``None`` if a container, a key or a type differs, or if a scalar cannot be
            kept. ``tree.flatten`` then gives the result or the error.
        """
        containers: list[Any] = [[state]]
        leaves: list[Any] = []
        scalars: list[object] = []
        for depth in self._depths:
            values = self._children(containers, depth)
            if values is None:
                return None
            containers = chosen(values, depth.containers)
            leaves += chosen(values, depth.leaves)
            scalars += chosen(values, depth.scalars)
            for number in depth.texts:
                # Not the list itself, which may change until the next save.
                number += len(scalars) - len(depth.scalars)
                text = long_lists.text_of(scalars[number])
                if text is None:
                    return None
                scalars[number] = _LongList(text)
        try:
            self._take(scalars)
        except UnsupportedLeaf:
            return None
        return Outlined(self._skeleton, leaves)

    def _children(self, containers: list[Any], depth: _Depth) -> list[Any] | None:
        """Return the children of the containers of a depth; ``None`` if they do not match it."""
        if not depth.is_native:
            contents, values = _contents(containers, depth.is_plain, self._expand)
            return values if contents == depth.contents else None
        expected = depth.contents
        return self._match_children(containers, expected.lengths, expected.keys, expected.types)

    def _take(self, scalars: list[object]) -> None:
        """Bring the skeleton to these scalars. It keeps all nodes whose scalars are the same."""
        # 0.0 equals -0.0, and NaN does not equal itself, so floats are compared by their bits.
        bits = _bits(chosen(scalars, self._floats))
        if bits == self._float_bits and scalars == self._scalars:
            return
        is_float = set(self._floats)
        changed = [
            number
            # Most scalars are the objects of the last save.
            for number in compress(count(), map(is_not, scalars, self._scalars))
            if (
                _bits([scalars[number]]) != _bits([self._scalars[number]])
                if number in is_float
                else scalars[number] != self._scalars[number]
            )
        ]
        ends = list(accumulate(len(depth.scalars) for depth in self._depths))
        changes: dict[int, Any] = {}
        for number in changed:
            depth = bisect_right(ends, number)
            # Counted from the end of the depth.
            position = self._depths[depth].scalars[number - ends[depth]]
            *route, last = self._route(depth, position)
            inner = changes
            for slot in route:
                inner = inner.setdefault(slot, {})
            value = scalars[number]
            inner[last] = (
                tree.long_list_node(value.text)
                if isinstance(value, _LongList)
                else tree.scalar_node(value, "")
            )
        wrapper: Node = {"t": "list", "n": [self._skeleton]}
        self._skeleton = cast("list[Node]", _replaced(wrapper, changes)["n"])[0]
        self._scalars, self._float_bits = scalars, bits

    def _route(self, depth: int, position: int) -> list[int]:
        """Return the slots that lead to a child, from the list around the state on."""
        route: list[int] = []
        for number in range(depth, -1, -1):
            container, slot = self._depths[number].places[position]
            route.insert(0, slot)
            if number:
                position = self._depths[number - 1].containers[container]
        return route


def _contents(
    containers: list[Any], is_plain: bool, expand: Expand | None
) -> tuple[_Contents, list[Any]]:
    """Return what is compared of some containers, and their children in order."""
    if is_plain:
        lengths = list(map(len, containers))
        keys = list(chain.from_iterable(containers))
        values = list(chain.from_iterable(map(dict.values, containers)))
    else:
        lengths, keys, values = [], [], []
        for container in containers:
            if type(container) not in _CONTAINERS:
                assert expand is not None  # containers without it have no outline
                level = expand(container)
                pairs = [] if level is None else list(level.pairs)
                lengths.append(len(pairs))
                keys += [key for key, _ in pairs]
                values += [value for _, value in pairs]
                continue
            lengths.append(len(container))
            if type(container) in _MAPPINGS:
                keys += container
                values += container.values()
                if type(container) is OrderedDict:
                    values.append(vars(container))
            else:
                values += container
    return _Contents(lengths, list(map(type, keys)), list(map(type, values)), keys), values


def _children_of(
    container: int, node: Node, kind: type, path: str
) -> Iterable[tuple[int, int, Node, str]]:
    """Yield container number, slot, node and path of each child of a container."""
    prefix = f"{path}/" if path else ""
    if kind in _MAPPINGS or node["t"] == "fields":
        pairs = cast("list[tuple[str | int, Node]]", node["k"])
    else:
        pairs = list(enumerate(cast("list[Node]", node["n"])))
    for slot, (key, child) in enumerate(pairs):
        yield container, slot, child, prefix + tree.escape_key(key)
    if kind is OrderedDict:
        attributes: Node = {"t": "dict", "k": node.get("a", [])}
        yield container, _ATTRIBUTES, attributes, f"{path}."


def chosen(values: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Return the values at some positions, ascending."""
    if len(positions) == len(values):
        return values if isinstance(values, list) else list(values)
    if len(positions) < 2:
        return [values[position] for position in positions]
    return list(itemgetter(*positions)(values))


def _bits(floats: Sequence[Any]) -> bytes:
    return struct.pack(f"{len(floats)}d", *floats)


def _replaced(node: Node, changes: Mapping[int, Any]) -> Node:
    """Return a copy of a container's node with other children; what does not change is shared.

    Args:
        node: The node.
        changes: For each slot, the new node of a scalar, or the changes of a container there.
    """
    changes = dict(changes)
    result = dict(node)
    attributes = changes.pop(_ATTRIBUTES, None)
    if attributes is not None:
        result["a"] = _replaced({"t": "dict", "k": node["a"]}, attributes)["k"]
    if "k" in node:
        pairs = list(cast("list[list[Json]]", node["k"]))
        for slot, change in changes.items():
            key, child = pairs[slot]
            pairs[slot] = [key, _changed(cast("Node", child), change)]
        result["k"] = cast("Json", pairs)
    else:
        items = list(cast("list[Node]", node["n"]))
        for slot, change in changes.items():
            items[slot] = _changed(items[slot], change)
        result["n"] = cast("Json", items)
    return result


def _changed(node: Node, change: dict[Any, Any]) -> Node:
    # Fields of a node have names, slots are numbers.
    return cast("Node", change) if "t" in change else _replaced(node, change)
