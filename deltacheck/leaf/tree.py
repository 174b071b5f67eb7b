"""Nested state <-> ordered leaf paths and a JSON skeleton: the same paths for the same structure in
both frameworks.

A path joins the keys from the root with ``/``. A text key is percent-escaped where it holds ``/``,
``%`` or a control character, and where it could be taken for an integer key, so two different key
sequences never share a path. The skeleton is the rest: containers, key order, Python scalars, ties.
It is plain JSON (``docs/reference/format.md``, section 3); reading it builds dicts, lists, tuples
and scalars and nothing else.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias, cast

import optree

from deltacheck.errors import Damaged, DuplicatePath, UnsupportedLeaf

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Node: TypeAlias = "dict[str, Json]"

NUMPY_ARRAY, NUMPY_SCALAR = (
    "numpy.array",
    "numpy.scalar",
)  # permanent tags: restored as NumPy in every framework
# Permanent, too: stored as one run of elements in C order; the shape follows, as in "flat:32,16"
_FLAT = "flat:"
MAX_DEPTH = 128  # containers in each other; a deeper tree is refused on both sides
_LOOKS_LIKE_INTEGER = re.compile(r"-?[0-9]+\Z")
_UNSAFE = re.compile(r"[/%\x00-\x1f\x7f]")


class ArrayLeaf(NamedTuple):
    """What a backend says of a leaf that is an array.

    ``identity``: equal for two leaves that are the same memory (tied weights), ``None`` where ties
    mean nothing. ``tag``: what a backend needs to give the array its own type again
    (``"jax.key:threefry2x32"``), ``None`` for a plain array.
    """

    shape: tuple[int, ...]
    dtype: str
    identity: Hashable | None = None
    tag: str | None = None


class Flat(NamedTuple):
    """A flattened tree. ``arrays``: path -> the backend's array, paths ascending, ties once;
    ``leaves``: the same keys, described.
    """

    skeleton: Node
    arrays: Mapping[str, object]
    leaves: Mapping[str, ArrayLeaf]


Describe: TypeAlias = Callable[[object], "ArrayLeaf | None"]
Expand: TypeAlias = Callable[[object], "Sequence[tuple[object, object]] | None"]


def escape_key(key: object) -> str:
    """One key as a path component; ``UnsupportedLeaf`` for a key that is neither text nor an
    integer.
    """
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise UnsupportedLeaf(
            f"a key of type {type(key).__name__} ({key!r}) cannot be kept exactly; use text or"
            " integer keys"
        )
    if isinstance(key, int):
        return _digits(int(key))
    return _escaped(key)


@lru_cache(1 << 14)  # states have the same keys at every save
def _escaped(key: str) -> str:
    if not key.isascii():
        _require_utf8(key, f"the key {key!r}")
    if key == "" or _LOOKS_LIKE_INTEGER.match(key):
        return "%" + (f"{ord(key[0]):02X}{key[1:]}" if key else "")
    return _UNSAFE.sub(lambda m: f"%{ord(m.group()):02X}", key)


def flatten(tree: object, describe: Describe, expand: Expand = lambda container: None) -> Flat:
    """Take ``tree`` apart.

    ``describe(leaf)`` gives an ``ArrayLeaf`` for the backend's arrays and ``None`` for anything
    else, which must then be a Python scalar, text, bytes or ``None``. Containers: dict and its
    subclasses that optree knows, list, tuple, named tuple, deque; what else the backend's framework
    takes for a container, ``expand(container)`` gives as (key, child) pairs. Tied leaves are held
    by the least of their paths, whatever the order of the keys.

    Raises ``UnsupportedLeaf`` (naming the path and type) and ``DuplicatePath``.
    """
    taken = _Taken(describe, expand, {}, {}, {})
    skeleton = _take_apart(tree, "", 0, taken)
    for places in taken.ties.values():
        owner = min(path for path, _ in places)
        for path, node in places:
            if path != owner:
                node["of"] = owner
                del taken.arrays[path], taken.leaves[path]
    order = sorted(taken.arrays)
    return Flat(skeleton, {p: taken.arrays[p] for p in order}, {p: taken.leaves[p] for p in order})


class _Taken(NamedTuple):
    """What a walk has found so far. ``ties``: identity -> the places that share it."""

    describe: Describe
    expand: Expand
    arrays: dict[str, object]
    leaves: dict[str, ArrayLeaf]
    ties: dict[Hashable, list[tuple[str, Node]]]


def _take_apart(value: object, path: str, depth: int, taken: _Taken) -> Node:
    if depth > MAX_DEPTH:
        raise UnsupportedLeaf(f"leaf {path!r}: containers are nested deeper than {MAX_DEPTH}")
    try:
        array = taken.describe(value)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"leaf {path!r}: {error}") from None
    if array is not None:
        if path in taken.arrays:
            raise DuplicatePath(f"two leaves have the path {path!r}; rename one of them")
        taken.arrays[path], taken.leaves[path] = value, array
        node: Node = {"t": "array"} if array.tag is None else {"t": "array", "tag": array.tag}
        if array.identity is not None:
            taken.ties.setdefault((array.identity, array.shape, array.dtype), []).append(
                (path, node)
            )
        return node
    scalar = _scalar_node(value, path)
    if scalar is not None:
        return scalar

    below = f"{path}/" if depth else ""

    def child(key: object, item: object) -> Node:
        return _take_apart(item, below + escape_key(key), depth + 1, taken)

    def entry(key: object, item: object) -> list[Json]:
        node = child(key, item)  # refuses what is neither text nor an integer
        return [str(key) if isinstance(key, str) else int(cast("int", key)), node]

    if isinstance(value, OrderedDict):
        return {"t": "odict", "k": [entry(k, v) for k, v in value.items()]}
    if isinstance(value, dict):
        return {"t": "dict", "k": [entry(k, v) for k, v in value.items()]}
    if isinstance(value, deque):
        return {
            "t": "deque",
            "maxlen": value.maxlen,
            "n": [child(i, v) for i, v in enumerate(value)],
        }
    if isinstance(value, list):
        return {"t": "list", "n": [child(i, v) for i, v in enumerate(value)]}
    if isinstance(value, tuple) and not optree.is_namedtuple(value):
        return {"t": "tuple", "n": [child(i, v) for i, v in enumerate(value)]}
    pairs = _fields_of(value, taken.expand)
    if pairs is None:
        raise UnsupportedLeaf(
            f"leaf {path!r} is of type {type(value).__module__}.{type(value).__qualname__}, which"
            " cannot be kept exactly; turn it into arrays, numbers, text, bytes or None, or leave"
            " it out"
        )
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"t": "fields", "c": name, "k": [entry(k, v) for k, v in pairs]}


def _fields_of(value: object, expand: Expand) -> Sequence[tuple[object, object]] | None:
    """The named fields of a named tuple, or of any other container that the backend or optree's
    registry can take apart.
    """
    pairs = None if optree.is_namedtuple(value) else expand(value)
    if pairs is not None:
        return pairs
    try:
        one = optree.tree_flatten_one_level(cast("optree.PyTree[object]", value), none_is_leaf=True)
    except ValueError:
        return None
    return list(zip(getattr(value, "_fields", None) or one.entries, one.children, strict=True))


def _scalar_node(value: object, path: str) -> Node | None:
    kind = type(value)
    if value is None:
        return {"t": "none"}
    if kind is bool:
        return {"t": "bool", "v": cast("bool", value)}
    if kind is int:
        return {
            "t": "int",
            "v": _digits(cast("int", value)),
        }  # as text: JSON readers need not keep more than 53 bits
    if kind is float:
        return {"t": "float", "v": _float_text(cast("float", value))}
    if kind is complex:
        number = cast("complex", value)
        return {"t": "complex", "v": [_float_text(number.real), _float_text(number.imag)]}
    if kind is str:
        text = cast("str", value)
        _require_utf8(text, f"leaf {path!r}")
        return {"t": "str", "v": text}
    if isinstance(value, bytes | bytearray):
        return {"t": "bytes", "v": base64.b64encode(value).decode()}
    return None


def _require_utf8(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedLeaf(
            f"{what} is text with lone surrogates, which UTF-8 cannot keep; store it as bytes"
        ) from None


def _digits(value: int) -> str:
    """In decimal; ``UnsupportedLeaf`` where Python itself would refuse to read it again."""
    try:
        return str(value)
    except ValueError as error:
        raise UnsupportedLeaf(
            f"an integer of {value.bit_length()} bits cannot be kept ({error}); store it as bytes"
        ) from None


def _float_text(value: float) -> str:
    """Exact and readable: C99 hexadecimal, or the bit pattern of a NaN."""
    return value.hex() if value == value else "nan:" + struct.pack(">d", value).hex()


def _float_of(text: str) -> float:
    if text.startswith("nan:"):
        bits = bytes.fromhex(text[4:])
        if len(bits) != 8:
            raise ValueError(f"a float has 64 bits, not those of {text!r}")
        return float(struct.unpack(">d", bits)[0])
    return float.fromhex(text)


Place: TypeAlias = Callable[[str, str, "str | None"], object]


def unflatten(skeleton: Node, place: Place) -> object:
    """Build the tree again. ``place(path, owner, tag)`` gives the array at ``path``: the bytes of
    the
    leaf ``owner`` (itself, but for ties).

    Raises ``Damaged`` where the skeleton is not one.
    """
    return _build(skeleton, (), place)


def _build(node: Json, keys: tuple[str, ...], place: Place) -> object:
    path = "/".join(keys)
    if len(keys) > MAX_DEPTH:
        raise Damaged(f"tree skeleton is nested deeper than {MAX_DEPTH} at {path!r}")
    try:
        fields = cast("Node", node)
        kind = fields["t"]
        if kind in _SCALARS:
            return _SCALARS[cast("str", kind)](fields.get("v"))
        owner, tag = fields.get("of", path), fields.get("tag")
        pairs = (
            []
            if kind == "array"
            else [(escape_key(key), key, item) for key, item in _children(fields)]
        )
        if not isinstance(owner, str) or not (tag is None or isinstance(tag, str)):
            raise TypeError("the owner and the tag of an array are text")
        if len({name for name, _, _ in pairs}) != len(pairs):
            raise ValueError("two of its children have the same key")
        maxlen = _maxlen_of(fields, len(pairs)) if kind == "deque" else None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Damaged(
            f"tree skeleton is damaged at {path!r}: {type(error).__name__}: {error}"
        ) from error
    if kind == "array":  # out of the handler's reach: what place() raises is no damage
        return place(path, owner, tag)
    values = [(key, _build(item, (*keys, name), place)) for name, key, item in pairs]
    if kind == "odict":
        return OrderedDict(values)
    if kind in ("dict", "fields"):
        return dict(values)
    items = [value for _, value in values]
    if kind == "tuple":
        return tuple(items)
    return items if kind == "list" else deque(items, maxlen=maxlen)


def _maxlen_of(node: Node, items: int) -> int | None:
    """The greatest length of a deque of so many items."""
    maxlen = node.get("maxlen")
    if maxlen is not None and not (type(maxlen) is int and items <= maxlen <= sys.maxsize):
        raise ValueError(f"a deque of {items} items cannot have the greatest length {maxlen!r}")
    return maxlen


_SCALARS: Mapping[str, Callable[[Json], object]] = {
    "none": lambda v: None,
    "bool": lambda v: bool(v),
    "int": lambda v: int(cast("str", v)),
    "float": lambda v: _float_of(cast("str", v)),
    "complex": lambda v: complex(*(_float_of(part) for part in cast("list[str]", v))),
    "str": lambda v: str(v),
    "bytes": lambda v: base64.b64decode(cast("str", v), validate=True),
}


def _children(node: Node) -> Iterator[tuple[str | int, Json]]:
    """The (key, child) pairs of a container node."""
    if node["t"] in ("dict", "odict", "fields"):
        yield from cast("list[tuple[str | int, Json]]", node["k"])
    elif node["t"] in ("list", "tuple", "deque"):
        yield from enumerate(cast("Sequence[Json]", node["n"]))
    else:
        raise ValueError(f"unknown node kind {node['t']!r}")


def merged(skeletons: Sequence[Node]) -> Node:
    """One skeleton of trees that several processes have parts of: of dicts every key, of all else
    what
    they agree on.

    Raises ``UnsupportedLeaf`` naming the place, both numbers of the processes and both values where
    they do not agree.
    """
    found = skeletons[0]
    for number, other in enumerate(skeletons[1:], 1):
        found = _merged(found, other, (), number)
    return found


def _merged(one: Node, other: Node, keys: tuple[str, ...], number: int) -> Node:
    if one == other:
        return one
    if one["t"] == other["t"] and one["t"] in ("dict", "odict"):
        pairs = {escape_key(key): (key, cast("Node", item)) for key, item in _children(one)}
        for key, item in _children(other):
            name = escape_key(key)
            known = pairs.get(name)
            child = cast("Node", item)
            pairs[name] = (
                key,
                child if known is None else _merged(known[1], child, (*keys, name), number),
            )
        return {"t": one["t"], "k": cast("Json", [list(pair) for pair in pairs.values()])}
    raise UnsupportedLeaf(
        f"leaf {'/'.join(keys)!r} is {_shown(one)} in an earlier process and {_shown(other)} in"
        f" process {number}; save what each has for itself under a key of its own, such as f'rank"
        " {rank}'"
    )


def _shown(node: Node) -> str:
    return f"{node['t']} {node['v']}" if "v" in node else f"a {node['t']}"


def pruned(skeleton: Node, like: Node) -> Node:
    """A skeleton without the keys of its dicts that another one does not have in the same place."""
    if skeleton["t"] in ("dict", "odict") and like["t"] in ("dict", "odict"):
        kept = {escape_key(key): cast("Node", item) for key, item in _children(like)}
        pairs = [(key, cast("Node", item)) for key, item in _children(skeleton)]
        return {
            "t": skeleton["t"],
            "k": cast(
                "Json",
                [
                    [key, pruned(item, kept[escape_key(key)])]
                    for key, item in pairs
                    if escape_key(key) in kept
                ],
            ),
        }
    return skeleton


def array_paths(skeleton: Node) -> dict[str, str]:
    """Every array place of the tree: path -> path of the leaf that holds its bytes (itself, but for
    a
    tie).

    Raises ``Damaged`` where any part of the skeleton is not one: what it has taken, ``unflatten``
    and ``scalars`` take, too.
    """
    found: dict[str, str] = {}

    def place(path: str, owner: str, tag: str | None) -> None:
        if found.setdefault(path, owner) != owner:
            raise Damaged(f"tree skeleton has two arrays at {path!r}")

    unflatten(skeleton, place)
    return found


def flat_tag(shape: Sequence[int]) -> str:
    """The tag of a leaf of this shape that is stored flat, 1-D."""
    return _FLAT + ",".join(map(str, shape))


def shape_in(tag: str | None, elements: int, path: str) -> tuple[int, ...] | None:
    """The shape that a leaf of so many elements is given by its tag; ``None`` where it has the one
    that it is stored with.

    Raises ``Damaged`` for a shape of another size.
    """
    if tag is None or not tag.startswith(_FLAT):
        return None
    try:
        shape = tuple(int(size) for size in tag[len(_FLAT) :].split(",") if size)
    except ValueError:
        shape = (-1,)
    if min(shape, default=0) < 0 or math.prod(shape) != elements:
        raise Damaged(
            f"leaf {path!r} has {elements} elements, which its tag {tag!r} gives no shape"
        )
    return shape


def flat_tags(skeleton: Node) -> dict[str, str]:
    """Every array place whose leaf is stored flat: path -> tag."""
    found: dict[str, str] = {}

    def place(path: str, owner: str, tag: str | None) -> None:
        if tag is not None and tag.startswith(_FLAT):
            found[path] = tag

    unflatten(skeleton, place)
    return found


def scalars(skeleton: Node) -> dict[str, object]:
    """Every Python scalar of the tree: path -> value. REQUIRES: ``array_paths`` takes the
    skeleton.
    """
    found: dict[str, object] = {}

    def visit(node: Json, keys: tuple[str, ...]) -> None:
        fields = cast("Node", node)
        if fields["t"] in _SCALARS:
            found["/".join(keys)] = _SCALARS[cast("str", fields["t"])](fields.get("v"))
        elif fields["t"] != "array":
            for key, item in _children(fields):
                visit(item, (*keys, escape_key(key)))

    visit(skeleton, ())
    return found
