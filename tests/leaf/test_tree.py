"""Trees: distinct paths, exact scalars, and refusals that name the leaf."""

from __future__ import annotations

import json
import math
import struct
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import StrEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck.backends.numpy_leaves import describe_numpy
from deltacheck.errors import Damaged, DuplicatePath, UnsupportedLeaf
from deltacheck.leaf import containers, tree
from deltacheck.leaf.containers import Level

Moments = namedtuple("Moments", "mu nu")


def round_trip(value: object) -> object:
    flat = tree.flatten(value, describe_numpy)
    skeleton = json.loads(json.dumps(flat.skeleton))
    return tree.unflatten(skeleton, lambda path, owner, tag: flat.arrays[owner])


keys = st.one_of(
    st.integers(-(2**70), 2**70),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.sampled_from(["", ".", "..", "0", "-1", "a/b", "%", "a\0b"]),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.binary(max_size=9),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
)
trees = st.recursive(
    scalars,
    lambda child: st.one_of(
        st.lists(child, max_size=4),
        st.tuples(child, child),
        st.dictionaries(keys, child, max_size=4),
    ),
    max_leaves=20,
)


@given(trees)
def test_any_nested_state_of_scalars_comes_back_equal_in_type_and_order(value: object) -> None:
    back = round_trip(value)
    assert repr(back) == repr(value)


@given(st.lists(st.lists(keys, min_size=1, max_size=3), max_size=30))
def test_different_key_sequences_never_share_a_path(sequences: list[list[object]]) -> None:
    distinct = {tuple((type(k), k) for k in sequence) for sequence in sequences}
    paths = {"/".join(tree.escape_key(k) for _, k in sequence) for sequence in distinct}
    assert len(paths) == len(distinct)


def test_lookalike_keys_stay_apart() -> None:
    x, y, z = np.zeros(1), np.ones(1), np.full(1, 2.0)
    flat = tree.flatten(
        {"a": {"b": x}, "a/b": y, "a.b": z, 0: np.ones(2), "0": np.ones(3)}, describe_numpy
    )
    assert set(flat.arrays) == {"a/b", "a%2Fb", "a.b", "0", "%30"}


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -math.nan,
        struct.unpack(">d", bytes.fromhex("7ff00000deadbeef"))[0],
        -0.0,
        math.inf,
        5e-324,
    ],
)
def test_floats_keep_every_bit(value: float) -> None:
    back = round_trip({"x": value})
    assert isinstance(back, dict)
    assert struct.pack(">d", back["x"]) == struct.pack(">d", value)


def test_tied_arrays_are_held_by_the_least_path_whatever_the_order() -> None:
    shared = np.ones(3)
    one = tree.flatten({"z": shared, "a": shared}, describe_numpy)
    other = tree.flatten({"a": shared, "z": shared}, describe_numpy)
    assert list(one.arrays) == list(other.arrays) == ["a"]
    back = round_trip({"z": shared, "a": shared})
    assert isinstance(back, dict)
    assert back["a"] is back["z"]


def test_containers_come_back_as_what_they_were() -> None:
    value = {
        "o": OrderedDict(b=1, a=2),
        "d": deque([1, 2], maxlen=3),
        "t": (1, [2]),
        "f": defaultdict(list, x=[1]),
        "n": defaultdict(None, x=[1]),
        "c": Counter({30: 1, "a": -2}),
        "b": bytearray(b"\0\xff"),
        "s": time.localtime(1e9),
    }
    back = round_trip(value)
    assert isinstance(back, dict)
    assert back == value
    assert {key: type(item) for key, item in back.items()} == {
        key: type(item) for key, item in value.items()
    }
    assert back["d"].maxlen == 3
    assert [back[key].default_factory for key in "fn"] == [list, None]
    assert back["s"].tm_gmtoff == value["s"].tm_gmtoff  # type: ignore[attr-defined]
    assert back["s"].tm_zone == value["s"].tm_zone  # type: ignore[attr-defined]


class Name(StrEnum):
    FIRST = "first"


class Table(dict):  # type: ignore[type-arg]
    pass


class Row(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "container",
    [Moments(1, 2), Table(), Row(), Name.FIRST, defaultdict(lambda: 0), np.str_("a")],
    ids=lambda value: type(value).__name__,
)
def test_a_container_of_another_type_is_refused_by_path(container: object) -> None:
    with pytest.raises(UnsupportedLeaf, match="leaf 'outer/inner'"):
        tree.flatten({"outer": {"inner": container}}, describe_numpy)


def test_attributes_of_a_container_are_no_leaves() -> None:
    value = OrderedDict(w=np.ones(2))
    value._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    flat = tree.flatten({"m": value}, describe_numpy)
    assert list(flat.arrays) == ["m/w"]
    assert tree.scalars(flat.skeleton) == {}
    back = round_trip({"m": value})
    assert isinstance(back, dict)
    assert back["m"]._metadata == value._metadata  # type: ignore[attr-defined]
    assert type(back["m"]._metadata) is OrderedDict
    value._metadata = np.ones(3)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedLeaf, match=r"'m\._metadata' is an array"):
        tree.flatten({"m": value}, describe_numpy)


def test_a_rank_gets_its_keys_of_a_dict_and_all_of_a_counter() -> None:
    saved = tree.flatten({"a": 1, "b": Counter({3: 1}), "c": 2}, describe_numpy).skeleton
    target = tree.flatten({"a": 0, "b": Counter()}, describe_numpy).skeleton
    part = tree.unflatten(tree.pruned(saved, target), lambda *_: None)
    assert part == {"a": 1, "b": Counter({3: 1})}


def with_attribute() -> OrderedDict[str, object]:
    value: OrderedDict[str, object] = OrderedDict()
    value._metadata = {}  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    ("value", "is_new"),
    [
        ({"a": [(1, "x")], "b": OrderedDict(c=deque([2]))}, False),
        ({"a": Counter({3: 1})}, True),
        ([bytearray(b"x")], True),
        (([time.gmtime(0)],), True),
        ([with_attribute()], True),
    ],
)
def test_only_a_new_type_needs_the_feature(value: object, is_new: bool) -> None:
    skeleton = tree.flatten(value, describe_numpy).skeleton
    assert containers.has_types(skeleton) is is_new


def test_dicts_of_several_processes_are_united_with_their_types_and_attributes() -> None:
    parts = []
    for number in range(2):
        layers = OrderedDict({f"w{number}": number})
        layers._metadata = {f"layer{number}": {"version": 1}}  # type: ignore[attr-defined]
        parts.append(tree.flatten({"m": layers, "c": Counter({7: 1})}, describe_numpy).skeleton)
    union = tree.unflatten(tree.merged(parts), lambda *_: None)
    assert isinstance(union, dict)
    assert union["m"] == OrderedDict(w0=0, w1=1)
    assert list(union["m"]._metadata) == ["layer0", "layer1"]  # type: ignore[attr-defined]
    assert type(union["c"]) is Counter
    other = tree.flatten({"m": OrderedDict(), "c": {7: 1}}, describe_numpy).skeleton
    with pytest.raises(
        UnsupportedLeaf, match=r"'c' is a collections\.Counter .* a dict in process 1"
    ):
        tree.merged([parts[0], other])


@pytest.mark.parametrize("leaf", [object(), {1, 2}, lambda: None, type, "\ud800"])
def test_a_leaf_that_cannot_be_kept_is_refused_by_path(leaf: object) -> None:
    with pytest.raises(UnsupportedLeaf, match="'outer/inner'"):
        tree.flatten({"outer": {"inner": leaf}}, describe_numpy)


@pytest.mark.parametrize("key", [1.5, True, (1, 2), None, b"x", np.str_("a"), Name.FIRST])
def test_a_key_that_is_neither_text_nor_integer_is_refused(key: object) -> None:
    with pytest.raises(UnsupportedLeaf, match=r"leaf 'a': .* text or integer keys"):
        tree.flatten({"a": {key: 1}}, describe_numpy)


def test_none_takes_the_place_of_arrays_and_of_containers_without_any() -> None:
    one = np.ones(2)
    value = {
        "keep": [one, {"x": np.zeros(1), "n": 3}],
        "mixed": (np.full(1, 7), np.full(1, 8)),
        "gone": {"a/b": np.full(2, 9), "lr": 0.1},
        "numbers": {"step": 4},
    }
    flat = tree.flatten(value, describe_numpy)
    kept = {"keep/0", "mixed/1"}
    skeleton, removed = tree.without_arrays(flat.skeleton, kept)
    assert removed == ["keep/1", "mixed/0", "gone"]
    assert set(tree.array_paths(skeleton)) == kept
    assert tree.scalars(skeleton) == {
        "keep/1": None,
        "mixed/0": None,
        "gone": None,
        "numbers/step": 4,
    }
    assert tree.without_arrays(flat.skeleton, set(flat.arrays)) == (flat.skeleton, [])


def test_a_tree_that_is_nested_too_deep_is_refused_on_both_sides() -> None:
    value: object = 1
    node: dict[str, object] = {"t": "int", "v": "1"}
    for _ in range(tree.MAX_DEPTH + 2):
        value, node = [value], {"t": "list", "n": [node]}
    with pytest.raises(UnsupportedLeaf, match="deeper"):
        tree.flatten(value, describe_numpy)
    with pytest.raises(Damaged, match="deeper"):
        tree.unflatten(node, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"t": "exec"},
        {"t": "dict", "k": [[1.5, {"t": "none"}]]},
        {"t": "list"},
        [],
        {"t": "float", "v": "x"},
        {"t": "dict", "c": 1, "k": []},
        {"t": "dict", "c": "collections.defaultdict", "factory": "exec", "k": []},
        {"t": "tuple", "c": "time.struct_time", "n": []},
        {"t": "str", "c": "bytearray", "v": "x"},
        {"t": "odict", "k": [], "a": [[1, {"t": "none"}]]},
        {"t": "odict", "k": [], "a": [["b", {"t": "array"}]]},
    ],
)
def test_a_damaged_skeleton_is_an_error(node: object) -> None:
    with pytest.raises((Damaged, UnsupportedLeaf)):
        tree.unflatten(node, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, ">f4"),
        np.ma.masked_array([1.0], [True]),
        np.zeros(2, "U3"),
        np.zeros(2, "M8[s]"),
        np.array([object()]),
        np.zeros(2).view(np.recarray),
    ],
)
def test_numpy_arrays_that_cannot_be_kept_are_refused(array: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(UnsupportedLeaf, match="'x'"):
        tree.flatten({"x": array}, describe_numpy)


def test_two_children_of_a_container_with_one_key_are_refused() -> None:
    class Pair:
        """A container whose children have the same key, as a registered class of JAX may."""

    def expand(value: object) -> Level | None:
        return Level({"t": "fields"}, [("x", 1), ("x", 2)]) if isinstance(value, Pair) else None

    with pytest.raises(DuplicatePath, match="leaf 'a': two of its children have the same key"):
        tree.flatten({"a": Pair()}, lambda value: None, expand)
