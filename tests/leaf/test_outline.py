"""A state of the same structure is flattened by its outline as ``tree.flatten`` does it."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from deltacheck.backends.numpy_leaves import describe_numpy
from deltacheck.codec.extension import native
from deltacheck.leaf import tree
from deltacheck.leaf.containers import Level
from deltacheck.leaf.outline import Outline


def state() -> dict[str, Any]:
    weight = np.arange(6.0)
    model = OrderedDict(weight=weight, tied=weight)
    model._metadata = OrderedDict([("", {"version": 1})])  # type: ignore[attr-defined]
    return {
        "model": model,
        "optimizer": {"state": {0: {"m": np.ones(2)}, 1: {"m": np.ones(3)}}, "lr": 0.5},
        "list": [1, None, ("text", b"bytes", True, [])],
        "zero": 0.0,
    }


def flat(value: object) -> tree.Flat:
    return tree.flatten(value, describe_numpy)


@pytest.fixture(params=[True, False], ids=["native", "python"])
def outline(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[object], Outline]:
    if not request.param:  # as for containers of other types
        monkeypatch.setattr("deltacheck.leaf.outline._NATIVE", set())

    def make(value: object) -> Outline:
        result = Outline.of(value, flat(value).skeleton, native.matching_children)
        assert result is not None
        return result

    return make


Make: TypeAlias = Callable[[object], Outline]


def test_the_arrays_and_the_skeleton_are_those_of_flatten(outline: Make) -> None:
    first = outline(state())
    for change in range(3):
        changed = state()
        changed["optimizer"]["lr"] = 0.1 * change
        changed["list"][0] += change
        changed["zero"] = -0.0 if change else 0.0  # equal, but not the same
        changed["model"]._metadata[""]["version"] += change
        result = first.match(changed)
        expected = flat(changed)
        assert result is not None
        assert repr(result.skeleton) == repr(expected.skeleton)
        for (path, owner), value in zip(first.owners, result.leaves, strict=True):
            assert path != owner or expected.arrays[path] is value
    changed["zero"] = 0.0
    result = first.match(changed)
    assert result is not None
    assert repr(result.skeleton) == repr(flat(changed).skeleton)
    assert dict(first.owners)["model/weight"] == dict(first.owners)["model/tied"]


def test_the_skeleton_of_an_earlier_save_does_not_change(outline: Make) -> None:
    first = outline(state())
    before = first.match(state())
    assert before is not None
    kept = copy.deepcopy(before.skeleton)
    changed = state()
    changed["optimizer"]["lr"] = 2.0
    after = first.match(changed)
    assert after is not None
    assert before.skeleton == kept != after.skeleton


def without(value: dict[str, Any]) -> None:
    del value["optimizer"]["state"][1]


def renamed(value: dict[str, Any]) -> None:
    value["optimizer"]["state"][2] = value["optimizer"]["state"].pop(1)


def as_text_key(value: dict[str, Any]) -> None:
    value["optimizer"]["state"] = {
        str(key): item for key, item in value["optimizer"]["state"].items()
    }


def as_bool(value: dict[str, Any]) -> None:
    value["list"][0] = True  # equal to 1


def as_list(value: dict[str, Any]) -> None:
    value["list"][2] = list(value["list"][2])


def longer(value: dict[str, Any]) -> None:
    value["list"].append(None)


def in_other_order(value: dict[str, Any]) -> None:
    value["optimizer"]["state"][0] = value["optimizer"]["state"].pop(0)


def as_array(value: dict[str, Any]) -> None:
    value["zero"] = np.zeros(1)


def reordered(value: dict[str, Any]) -> None:
    value["model"].move_to_end("weight")


def with_attribute(value: dict[str, Any]) -> None:
    value["model"].tag = 1


@pytest.mark.parametrize(
    "change",
    [
        without,
        renamed,
        as_text_key,
        as_bool,
        as_list,
        longer,
        in_other_order,
        as_array,
        reordered,
        with_attribute,
    ],
    ids=lambda change: change.__name__,
)
def test_another_structure_does_not_match(change: Any, outline: Make) -> None:
    first = outline(state())
    changed = state()
    change(changed)
    assert first.match(changed) is None
    assert first.match([changed]) is None


def test_a_state_with_other_containers_has_no_outline() -> None:
    value = {"a": deque([1])}
    assert Outline.of(value, flat(value).skeleton, native.matching_children) is None


class Pair:
    """A container that only a backend knows."""

    def __init__(self, keys: tuple[str, str], left: object, right: object) -> None:
        self.keys = keys
        self.items = (left, right)


def expand(value: object) -> Level | None:
    if not isinstance(value, Pair):
        return None
    return Level({"t": "fields", "c": "Pair"}, zip(value.keys, value.items, strict=True))


def test_containers_of_a_backend_are_expanded_and_compared() -> None:
    def make(left: float = 1.0, keys: tuple[str, str] = ("a", "b")) -> dict[str, Any]:
        return {"pair": Pair(keys, [np.ones(2), left], {"m": np.zeros(3)}), "n": 1}

    value = make()
    flat_value = tree.flatten(value, describe_numpy, expand)
    outline = Outline.of(value, flat_value.skeleton, native.matching_children, expand)
    assert outline is not None
    changed = make(2.0)
    result = outline.match(changed)
    assert result is not None
    assert result.skeleton == tree.flatten(changed, describe_numpy, expand).skeleton
    assert [path for path, _ in outline.owners] == ["pair/a/0", "pair/b/m"]
    assert result.leaves[1] is changed["pair"].items[1]["m"]
    assert outline.match(make(keys=("a", "c"))) is None
    assert outline.match({**make(), "pair": 1}) is None


def test_a_long_list_is_compared_by_what_it_has_now(outline: Make) -> None:
    log: list[dict[str, object]] = [{"loss": float(step), "step": step} for step in range(300)]
    value = {"log": log, "after": 1}
    made = outline(value)
    for change in range(4):
        if change == 1:
            log.append({"loss": 0.5, "step": 300})
        if change == 2:
            log[7]["loss"] = 7.5  # within an object that was there before
        if change == 3:
            value["after"] = 2
        matched = made.match(value)
        assert matched is not None
        assert matched.skeleton == flat(value).skeleton
    log.append({"loss": math.nan})
    assert made.match(value) is None
