"""Conversion of a nested state into leaf paths and a JSON skeleton, and back.

A path joins the keys from the root with ``/``. A text key is percent-escaped if it contains ``/``,
``%`` or a control character, or if it looks like an integer key, so that two different key
sequences never have the same path. The skeleton has the rest: containers, key order, Python scalars
and ties. It is plain JSON (``docs/reference/format.md``, section 3). Reading it creates Python's
own containers and scalars, and those of classes that a backend knows, so no code of a checkpoint
runs. ``containers.py`` has the types of containers.

All frameworks use the same paths for the same structure.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import unquote

from deltacheck.errors import Damaged, DuplicatePath, UnsupportedLeaf
from deltacheck.leaf import containers, long_lists
from deltacheck.leaf.containers import KEYED, LISTED, Build, Level, as_plain

Json: TypeAlias = containers.Json
Node: TypeAlias = containers.Node

# Permanent tags of leaves that every framework restores as NumPy.
NUMPY_ARRAY, NUMPY_SCALAR = "numpy.array", "numpy.scalar"
# Permanent prefix of the tag of a leaf that is stored 1-D; the shape follows, as in "flat:32,16".
_FLAT = "flat:"
_NONE: Node = {"t": "none"}
_PLAIN_ARRAY: Node = {"t": "array"}
# Methods by which objects of the frameworks return what can be saved of them.
_STATES = ("state_dict",)
_OBJECTS = ("object", "tensor")  # containers that cannot be built without one of their arrays
# Nested containers, refused beyond this when saving and restoring: the walks are recursive.
MAX_DEPTH = 128
_LOOKS_LIKE_INTEGER = re.compile(r"-?[0-9]+\Z")
_UNSAFE = re.compile(r"[/%\x00-\x1f\x7f]")


class ArrayLeaf(NamedTuple):
    """A backend's description of an array.

    Attributes:
        shape: The length of each axis.
        dtype: The name of the element type.
        identity: Equal for two arrays that share their memory (tied weights); ``None`` if ties do
            not matter.
        tag: Information for the backend to restore the type of the array
            (``"jax.key:threefry2x32"``); ``None`` for a plain array.
    """

    shape: tuple[int, ...]
    dtype: str
    identity: Hashable | None = None
    tag: str | None = None


class Flat(NamedTuple):
    """A flattened tree.

    Attributes:
        skeleton: The tree without its arrays.
        arrays: The arrays by path, ascending; tied arrays once.
        leaves: Their descriptions by path.
    """

    skeleton: Node
    arrays: Mapping[str, object]
    leaves: Mapping[str, ArrayLeaf]


Describe: TypeAlias = Callable[[object], "ArrayLeaf | None"]
Expand: TypeAlias = Callable[[object], "Level | None"]


def escape_key(key: object) -> str:
    """Return a key as a path component.

    Raises:
        UnsupportedLeaf: The key is neither text nor an integer.
    """
    # A key of a subclass, such as an enumeration, would be restored as plain text or number.
    if type(key) is int:
        return _digits(key)
    if type(key) is str:
        return _escaped(key)
    raise UnsupportedLeaf(
        f"a key of type {type(key).__name__} ({key!r}) cannot be kept exactly; use text or"
        " integer keys"
    )


@lru_cache(1 << 14)  # states have the same keys at every save
def _escaped(key: str) -> str:
    if not key.isascii():
        _require_utf8(key, f"the key {key!r}")
    if key == "" or _LOOKS_LIKE_INTEGER.match(key):
        return "%" + (f"{ord(key[0]):02X}{key[1:]}" if key else "")
    return _UNSAFE.sub(lambda m: f"%{ord(m.group()):02X}", key)


def plain_name(path: str) -> str:
    """Return a leaf path with its keys as they were before ``escape_key``.

    Different paths may have one plain name: ``x%2Fy`` and ``x/y``, or ``%31`` and ``1``. Whoever
    writes names for others calls ``distinct``.
    """
    return "/".join("" if key == "%" else unquote(key) for key in path.split("/"))


def distinct(names: Iterable[tuple[str, str]], place: str) -> dict[str, str]:
    """Return leaf paths by the name that each gets in another format.

    Args:
        names: Name and leaf path of each value.
        place: The format or the file that gets the names, for the error.

    Raises:
        DuplicatePath: Two values would get one name, so that one of them would be lost.
    """
    paths: dict[str, str] = {}
    for name, path in names:
        if paths.setdefault(name, path) != path:
            raise DuplicatePath(
                f"leaves {paths[name]!r} and {path!r} would both be called {name!r} in {place};"
                " rename one of them in the state, or write one alone (--leaves)"
            )
    return paths


def flatten(tree: object, describe: Describe, expand: Expand = lambda container: None) -> Flat:
    """Flatten a nested state.

    Containers are those of ``containers.level_of`` and of ``expand``. Tied leaves are stored
    under the smallest of their paths, whatever the order of the keys.

    Args:
        tree: The state.
        describe: Returns a description of an array, and ``None`` for anything else, which must
            then be a container, a Python scalar, text, bytes or ``None``.
        expand: Returns one level of a container of the backend's framework or of a class that it
            knows, and ``None`` for anything else. It may refuse a value with ``UnsupportedLeaf``.

    Returns:
        The skeleton and the arrays by path.

    Raises:
        UnsupportedLeaf: A leaf, key or container cannot be kept exactly; names path and type.
        DuplicatePath: Two leaves have the same path.
    """
    walk = _Walk(describe, expand, {}, {}, {})
    skeleton = _flatten(tree, "", 0, walk)
    for places in walk.ties.values():
        owner = min(path for path, _ in places)
        for path, node in places:
            if path != owner:
                node["of"] = owner
                del walk.arrays[path], walk.leaves[path]
    order = sorted(walk.arrays)
    return Flat(skeleton, {p: walk.arrays[p] for p in order}, {p: walk.leaves[p] for p in order})


class _Walk(NamedTuple):
    """The functions and the results of a walk. ``ties`` has the places of each identity."""

    describe: Describe
    expand: Expand
    arrays: dict[str, object]
    leaves: dict[str, ArrayLeaf]
    ties: dict[Hashable, list[tuple[str, Node]]]


def _flatten(value: object, path: str, depth: int, walk: _Walk) -> Node:
    """Return the node of a value, and add its arrays to the walk."""
    # Before anything else: a container that contains itself would exhaust the stack.
    if depth > MAX_DEPTH:
        raise UnsupportedLeaf(f"leaf {path!r}: containers are nested deeper than {MAX_DEPTH}")
    try:
        array = walk.describe(value)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"leaf {path!r}: {error}") from None
    if array is not None:
        return _add_array(value, array, path, walk)
    scalar = scalar_node(value, path)
    if scalar is not None:
        return scalar
    text = long_lists.text_of(value)
    if text is not None:
        return long_list_node(text)
    level, pairs, names = _opened(value, path, walk)
    prefix = f"{path}/" if depth else ""
    children = [
        _flatten(item, prefix + name, depth + 1, walk)
        for name, (_, item) in zip(names, pairs, strict=True)
    ]
    if level.attributes:
        level.node["a"] = [
            [name, _attribute(item, f"{path}.{name}", depth + 1, walk)]
            for name, item in level.attributes.items()
        ]
    if level.node["t"] in KEYED:
        level.node["k"] = [
            [cast("str | int", key), child] for (key, _), child in zip(pairs, children, strict=True)
        ]
    elif level.node["t"] in LISTED:
        level.node["n"] = cast("Json", children)
    return level.node


def _opened(
    value: object, path: str, walk: _Walk
) -> tuple[Level, list[tuple[object, object]], list[str]]:
    """Return one level of a container, its children by key, and the names of their keys."""
    try:
        level = containers.level_of(value) or walk.expand(value)
        pairs = [] if level is None else list(level.pairs)
        names = [escape_key(key) for key, _ in pairs]
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"leaf {path!r}: {error}") from None
    if level is None:
        raise _unsupported(value, path)
    if len(set(names)) < len(names):
        raise DuplicatePath(f"leaf {path!r}: two of its children have the same key; rename one")
    return level, pairs, names


def _add_array(value: object, array: ArrayLeaf, path: str, walk: _Walk) -> Node:
    """Add an array to the walk, and return its node."""
    if path in walk.arrays:
        raise DuplicatePath(f"two leaves have the path {path!r}; rename one of them")
    walk.arrays[path], walk.leaves[path] = value, array
    node: Node = {"t": "array"} if array.tag is None else {"t": "array", "tag": array.tag}
    if array.identity is not None:
        walk.ties.setdefault((array.identity, array.shape, array.dtype), []).append((path, node))
    return node


def _unsupported(value: object, path: str) -> UnsupportedLeaf:
    """Return the error of a value that is neither an array, nor a scalar, nor a container."""
    methods = [f"{name}()" for name in _STATES if hasattr(value, name)]
    remedy = (
        f"save its {' or '.join(methods)}"
        if methods
        else "turn it into arrays, numbers, text, bytes or None, or leave it out"
    )
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsupportedLeaf(
        f"leaf {path!r} is of type {kind}, which cannot be kept exactly; {remedy}"
    )


def _attribute(value: object, path: str, depth: int, walk: _Walk) -> Node:
    """Return the node of an attribute of a container, which is no leaf and has no path."""
    inner = walk._replace(arrays={}, leaves={}, ties={})
    node = _flatten(value, path, depth, inner)
    if inner.arrays:
        raise UnsupportedLeaf(
            f"leaf {path!r} is an array in an attribute of a container, which cannot be kept; move"
            " it to a key of the state"
        )
    return node


def scalar_node(value: object, path: str) -> Node | None:
    """Return the node of a Python scalar; ``None`` for any other value."""
    # Exact types: a value of a subclass, such as an IntEnum, would be restored as a plain number.
    kind = type(value)
    if value is None:
        return {"t": "none"}
    if kind is bool:
        return {"t": "bool", "v": cast("bool", value)}
    if kind is int:
        # As text: JSON readers may keep only 53 bits of a number.
        return {"t": "int", "v": _digits(cast("int", value))}
    if kind is float:
        return {"t": "float", "v": _float_text(cast("float", value))}
    if kind is complex:
        number = cast("complex", value)
        return {"t": "complex", "v": [_float_text(number.real), _float_text(number.imag)]}
    if kind is str:
        text = cast("str", value)
        _require_utf8(text, f"leaf {path!r}")
        return {"t": "str", "v": text}
    if kind is bytes or kind is bytearray:
        node: Node = {"t": "bytes", "v": base64.b64encode(cast("bytes", value)).decode()}
        return node if kind is bytes else {**node, "c": "bytearray"}
    return None


def long_list_node(text: str) -> Node:
    """Return the node of a list that is kept as one text (``long_lists.text_of``)."""
    return {"t": "json", "v": text}


def _require_utf8(text: str, subject: str) -> None:
    """Raise ``UnsupportedLeaf`` for text that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedLeaf(
            f"{subject} is text with lone surrogates, which UTF-8 cannot keep; store it as bytes"
        ) from None


def _digits(value: int) -> str:
    """Return an integer in decimal; raise ``UnsupportedLeaf`` if Python could not parse it."""
    try:
        return str(value)
    except ValueError as error:
        raise UnsupportedLeaf(
            f"an integer of {value.bit_length()} bits cannot be kept ({error}); store it as bytes"
        ) from None


def _float_text(value: float) -> str:
    """Return a float as exact, readable text: C99 hexadecimal, or the bit pattern of a NaN."""
    # The hexadecimal form of a NaN would lose its sign and payload.
    return value.hex() if value == value else "nan:" + struct.pack(">d", value).hex()


def _float_of(text: str) -> float:
    """Return the float of a text that ``_float_text`` wrote."""
    if text.startswith("nan:"):
        bits = bytes.fromhex(text[4:])
        if len(bits) != 8:
            raise ValueError(f"a float has 64 bits, not those of {text!r}")
        return float(struct.unpack(">d", bits)[0])
    return float.fromhex(text)


Place: TypeAlias = Callable[[str, str, "str | None"], object]


def unflatten(skeleton: Node, place: Place, build: Build = as_plain) -> object:
    """Build a tree from its skeleton.

    Args:
        skeleton: The skeleton.
        place: Called with path, owner and tag of each array; returns the array. The owner is the
            path of the leaf that holds the bytes: the path itself, except for ties.
        build: Makes the values of classes that are none of Python's own. The default leaves them
            in Python's own types.

    Returns:
        The tree.

    Raises:
        Damaged: The skeleton does not follow the format.
    """
    return _build(skeleton, "", 0, place, build)


def _build(node: Json, path: str, depth: int, place: Place, build: Build) -> object:
    """Build the value of a node."""
    if depth > MAX_DEPTH:
        raise Damaged(f"tree skeleton is nested deeper than {MAX_DEPTH} at {path!r}")
    # As most nodes are. Nothing of it needs to be checked.
    if node == _PLAIN_ARRAY:
        return place(path, path, None)
    scalar: object = None
    pairs: list[tuple[str, str | int, Json]] = []
    try:
        fields = cast("Node", node)
        kind = fields["t"]
        if not isinstance(fields.get("c", ""), str):
            raise TypeError("the name of a class is text")
        owner, tag = fields.get("of", path), fields.get("tag")
        if not isinstance(owner, str) or not (tag is None or isinstance(tag, str)):
            raise TypeError("the owner and the tag of an array are text")
        if kind in _SCALARS:
            scalar = _SCALARS[cast("str", kind)](fields.get("v"))
        elif kind != "array":
            pairs = [(escape_key(key), key, item) for key, item in _children(fields)]
            if len({name for name, _, _ in pairs}) != len(pairs):
                raise ValueError("two of its children have the same key")
        attributes = cast("list[tuple[str, Json]]", fields.get("a", []))
        # Arrays have none, and a tree has thousands of them.
        if "a" in fields and any(type(name) is not str for name, _ in attributes):
            raise TypeError("the name of an attribute is text")
    except _WRONG as error:
        raise _damaged(path, error) from error
    # Errors of ``place`` and ``build`` are not damage.
    if kind == "array":
        return place(path, owner, tag)
    prefix = f"{path}/" if depth else ""
    values = [
        (key, _build(item, prefix + name, depth + 1, place, build)) for name, key, item in pairs
    ]
    by_name = {
        name: _build(item, f"{prefix}.{name}", depth + 1, _no_array, build)
        for name, item in attributes
    }
    try:
        if kind in _SCALARS:
            return containers.of_scalar(fields, scalar, build, path)
        return containers.of_children(fields, values, by_name, build, path)
    # A class that the reader does not know, and no damage.
    except UnsupportedLeaf:
        raise
    except _WRONG as error:
        raise _damaged(path, error) from error


# The errors that a skeleton of another form causes.
_WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def _damaged(path: str, error: Exception) -> Damaged:
    return Damaged(f"tree skeleton is damaged at {path!r}: {type(error).__name__}: {error}")


def _no_array(path: str, owner: str, tag: str | None) -> object:
    raise Damaged(f"tree skeleton has an array in an attribute, at {path!r}")


_SCALARS: Mapping[str, Callable[[Any], object]] = {
    "none": lambda v: None,
    "bool": bool,
    "int": int,
    "float": _float_of,
    "complex": lambda v: complex(*map(_float_of, v)),
    "str": str,
    # Without ``validate``, foreign characters would be skipped silently.
    "bytes": lambda v: base64.b64decode(v, validate=True),
    # The name of the member. A reader that does not know the class returns the name.
    "enum": str,
    "json": long_lists.value_of,
}


def _children(node: Node) -> Iterator[tuple[str | int, Json]]:
    """Yield the (key, child) pairs of a container node."""
    if node["t"] in KEYED:
        yield from cast("list[tuple[str | int, Json]]", node["k"])
    elif node["t"] in LISTED:
        yield from enumerate(cast("Sequence[Json]", node["n"]))
    else:
        raise ValueError(f"unknown node kind {node['t']!r}")


def merged(skeletons: Sequence[Node]) -> Node:
    """Merge the skeletons of several processes into one.

    Dicts are united. Everything else must be equal in all processes.

    Args:
        skeletons: The skeletons by process number.

    Raises:
        UnsupportedLeaf: Two processes disagree; names the path and both values.
    """
    union = skeletons[0]
    for number, skeleton in enumerate(skeletons[1:], 1):
        union = _merged(union, skeleton, (), number)
    return union


def _merged(union: Node, other: Node, keys: tuple[str, ...], number: int) -> Node:
    """Merge the node of process ``number`` into the node of the processes before it."""
    if union == other:
        return union
    if union["t"] in ("dict", "odict") and _form_of(union) == _form_of(other):
        attributes = _merged_pairs(union.get("a", []), other.get("a", []), keys, number)
        form = {**_form_of(union), "a": attributes} if attributes else _form_of(union)
        return {**form, "k": _merged_pairs(union["k"], other["k"], keys, number)}
    raise UnsupportedLeaf(
        f"leaf {'/'.join(keys)!r} is {_text_of(union)} in an earlier process and {_text_of(other)}"
        f" in process {number}; save what each has for itself under a key of its own, such as"
        " f'rank {rank}'"
    )


def _form_of(node: Node) -> Node:
    """Return the fields of a dict's node that do not depend on its children and attributes."""
    return {name: value for name, value in node.items() if name not in ("k", "a")}


def _merged_pairs(union: Json, other: Json, keys: tuple[str, ...], number: int) -> Json:
    """Merge the [key, node] pairs of process ``number`` into those before it."""
    pairs = {key: item for key, item in cast("list[tuple[str | int, Node]]", union)}
    for key, item in cast("list[tuple[str | int, Node]]", other):
        path = (*keys, escape_key(key))
        pairs[key] = _merged(pairs[key], item, path, number) if key in pairs else item
    return cast("Json", [list(pair) for pair in pairs.items()])


def _text_of(node: Node) -> str:
    """Return a node in words, for error messages."""
    if node["t"] == "json":
        return "a long list"
    return f"{node['t']} {node['v']}" if "v" in node else f"a {node.get('c', node['t'])}"


def pruned(skeleton: Node, like: Node) -> Node:
    """Return a skeleton without dict keys that another skeleton lacks in the same place."""
    is_value = skeleton.get("c") == containers.COUNTER  # its keys are content, and of all ranks
    if skeleton["t"] in ("dict", "odict") and like["t"] in ("dict", "odict") and not is_value:
        like_items = {escape_key(key): cast("Node", item) for key, item in _children(like)}
        pairs = [(key, cast("Node", item)) for key, item in _children(skeleton)]
        return {
            **skeleton,
            "k": cast(
                "Json",
                [
                    [key, pruned(item, like_items[escape_key(key)])]
                    for key, item in pairs
                    if escape_key(key) in like_items
                ],
            ),
        }
    return skeleton


def without_arrays(skeleton: Node, kept: Container[str]) -> tuple[Node, list[str]]:
    """Return a skeleton without some of its arrays.

    ``None`` takes the place of an array, or of a container that has no other array. The arrays of
    one object stay together: all of them stay if one does.

    Args:
        skeleton: The skeleton, which ``array_nodes`` accepts.
        kept: The paths of the arrays to keep. Others may stay beside them, see above.

    Returns:
        The new skeleton, and the paths that have ``None`` now, in order.
    """
    node, _, removed = _without_arrays(skeleton, (), kept)
    return node, removed


def _without_arrays(
    node: Node, keys: tuple[str, ...], kept: Container[str]
) -> tuple[Node, bool, list[str]]:
    """Return the new node, if it has an array, and the paths without their arrays."""
    path = "/".join(keys)
    if node["t"] in _SCALARS:
        return node, False, []
    if node["t"] == "array":
        return (node, True, []) if path in kept else (_NONE, False, [path])
    results = [
        (key, _without_arrays(cast("Node", item), (*keys, escape_key(key)), kept))
        for key, item in _children(node)
    ]
    removed = [name for _, result in results for name in result[2]]
    if not removed:
        return node, any(has_array for _, (_, has_array, _) in results), []
    if not any(has_array for _, (_, has_array, _) in results):
        return _NONE, False, [path]
    if node["t"] in _OBJECTS:
        return node, True, []
    children = [child for _, (child, _, _) in results]
    if node["t"] in LISTED:
        return {**node, "n": cast("Json", children)}, True, removed
    pairs = [[key, child] for (key, _), child in zip(results, children, strict=True)]
    return {**node, "k": cast("Json", pairs)}, True, removed


class ArrayNode(NamedTuple):
    """An array of a skeleton.

    Attributes:
        owner: The path of the leaf that holds its bytes: its own, except for tied arrays.
        tag: As in ``ArrayLeaf``.
    """

    owner: str
    tag: str | None


def array_nodes(skeleton: Node) -> dict[str, ArrayNode]:
    """Return the arrays of a tree by path.

    A skeleton that this function accepts is also accepted by ``unflatten`` and ``scalars``.

    Raises:
        Damaged: The skeleton does not follow the format.
    """
    nodes: dict[str, ArrayNode] = {}

    def place(path: str, owner: str, tag: str | None) -> None:
        # A damaged skeleton may have two nodes whose keys give one path.
        if nodes.setdefault(path, ArrayNode(owner, tag)).owner != owner:
            raise Damaged(f"tree skeleton has two arrays at {path!r}")

    unflatten(skeleton, place)
    return nodes


def array_paths(skeleton: Node) -> dict[str, str]:
    """Return the owner of each array of a tree, as ``array_nodes`` has it."""
    return {path: node.owner for path, node in array_nodes(skeleton).items()}


def flat_tag(shape: Sequence[int]) -> str:
    """Return the tag of a leaf of this shape that is stored 1-D."""
    return _FLAT + ",".join(map(str, shape))


def shape_in(tag: str | None, elements: int, path: str) -> tuple[int, ...] | None:
    """Return the shape that a tag gives to a leaf.

    Args:
        tag: The tag of the leaf.
        elements: The number of its elements.
        path: Its path, for error messages.

    Returns:
        The shape; ``None`` if the leaf has the shape that it is stored with.

    Raises:
        Damaged: The shape has another number of elements.
    """
    if tag is None or not tag.startswith(_FLAT):
        return None
    try:
        shape = tuple(int(size) for size in tag[len(_FLAT) :].split(",") if size)
    except ValueError:
        # Refused below, with the same error as a shape of another size.
        shape = (-1,)
    if min(shape, default=0) < 0 or math.prod(shape) != elements:
        raise Damaged(
            f"leaf {path!r} has {elements} elements, which its tag {tag!r} gives no shape"
        )
    return shape


def flat_tags(skeleton: Node) -> dict[str, str]:
    """Return the tags of all leaves that are stored 1-D, by path."""
    return {
        path: node.tag
        for path, node in array_nodes(skeleton).items()
        if node.tag is not None and node.tag.startswith(_FLAT)
    }


def scalars(skeleton: Node) -> dict[str, object]:
    """Return all Python scalars of a tree by path. ``array_paths`` must accept the skeleton."""
    values: dict[str, object] = {}

    def visit_plain(value: object, path: str) -> None:
        if isinstance(value, (list, dict)):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in pairs:
                visit_plain(item, f"{path}/{escape_key(key)}" if path else escape_key(key))
        else:
            values[path] = value

    def visit(node: Json, keys: tuple[str, ...]) -> None:
        fields = cast("Node", node)
        if fields["t"] == "json":
            visit_plain(long_lists.value_of(fields["v"]), "/".join(keys))
        elif fields["t"] in _SCALARS:
            path = "/".join(keys)
            plain = _SCALARS[cast("str", fields["t"])](fields.get("v"))
            values[path] = containers.of_scalar(fields, plain, as_plain, path)
        elif fields["t"] != "array":
            for key, item in _children(fields):
                visit(item, (*keys, escape_key(key)))

    visit(skeleton, ())
    return values
