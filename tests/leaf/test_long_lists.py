"""Long lists of plain values are one text, and come back as they were."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltacheck
from deltacheck.backends.numpy_leaves import describe_numpy
from deltacheck.errors import Damaged, UnsupportedLeaf
from deltacheck.leaf import long_lists, tree


class Number(IntEnum):
    ONE = 1


LEAST = long_lists.LEAST_ITEMS
LOG: list[Any] = [{"loss": 0.1 + step * 1e-5, "step": step} for step in range(16_000)]
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(plain)
def test_every_plain_value_comes_back_in_value_and_type(item: object) -> None:
    value = [item, *range(LEAST - 1)]
    skeleton = tree.flatten({"log": value}, describe_numpy).skeleton
    assert skeleton["k"][0][1]["t"] == "json"  # type: ignore[call-overload, index]
    stored = json.loads(json.dumps(skeleton))
    # The text tells types and signs of zeros apart.
    assert repr(tree.unflatten(stored, lambda *_: None)) == repr({"log": value})


@pytest.mark.parametrize(
    "item",
    [
        math.nan,
        -math.inf,
        2**53,
        -(2**53),
        1 + 2j,
        b"bytes",
        (1, 2),
        Number.ONE,
        np.float64(1.0),
        OrderedDict(a=1),
        {1: "an integer key"},
        {"deep": [{"deeper": math.nan}]},
        np.zeros(2),
    ],
    ids=repr,
)
def test_a_list_with_another_value_has_a_node_for_each(item: object) -> None:
    value = [item, *[0] * (LEAST - 1)]
    assert long_lists.text_of(value) is None
    try:
        skeleton = tree.flatten({"log": value}, describe_numpy).skeleton
    except UnsupportedLeaf:
        return
    assert skeleton["k"][0][1]["t"] == "list"  # type: ignore[call-overload, index]


def test_short_lists_and_lone_surrogates_have_nodes() -> None:
    assert long_lists.text_of([0] * (LEAST - 1)) is None
    assert long_lists.text_of(["\ud800"] * LEAST) is None
    with pytest.raises(UnsupportedLeaf, match="lone surrogates"):
        tree.flatten({"log": ["\ud800"] * LEAST}, describe_numpy)


def test_lists_that_are_nested_too_deeply_have_nodes() -> None:
    value: list[Any] = [0] * LEAST
    for _ in range(long_lists.MAX_DEPTH):
        value = [value, *[0] * (LEAST - 1)]
    assert long_lists.text_of(value) is None


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{}",
        json.dumps([0] * (LEAST - 1)),
        json.dumps([math.nan] * LEAST),
        json.dumps([2**53] * LEAST),
        "[" + '{"a":1,"a":2},' * LEAST + "0]",
        "[" * 100_000,
        "[" * 70 + "0" + "]" * 70,
        json.dumps([0] * LEAST)[:-1],
    ],
    ids=range(10),
)
def test_a_text_that_no_writer_makes_is_refused(text: object) -> None:
    with pytest.raises(Damaged, match="skeleton is damaged at 'log'"):
        tree.unflatten({"t": "dict", "k": [["log", {"t": "json", "v": text}]]}, lambda *_: None)


def test_values_of_a_long_list_have_the_paths_of_nodes() -> None:
    short = tree.flatten({"a/b": [{"x/y": 1, "2": None}, [True]]}, describe_numpy)
    long = tree.flatten({"a/b": [{"x/y": 1, "2": None}, [True], *[0] * LEAST]}, describe_numpy)
    expected, found = tree.scalars(short.skeleton), tree.scalars(long.skeleton)
    assert {path: found[path] for path in expected} == expected
    assert len(found) == len(expected) + LEAST


def test_the_log_of_a_long_training_is_one_node_and_is_restored(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from deltacheck.backends.torch import Engine

    state = {"w": torch.zeros(10), "log": list(LOG)}
    with Engine(tmp_path) as engine:
        for step in range(3):
            state["log"].append({"loss": 0.5, "step": 16_000 + step})  # type: ignore[union-attr]
            engine.save(step, state).wait()
            expected = list(state["log"])
            assert engine.restore(step)["log"] == expected
        state["log"][3] = {"loss": 0.25, "step": 3}  # type: ignore[index]
        engine.save(3, state).wait()
    opened = deltacheck.open(tmp_path)
    assert opened.restore(3)["log"][3] == {"loss": 0.25, "step": 3}
    assert opened.restore(2)["log"] == expected
    assert opened.verify(deep=True) == []
    nodes = json.dumps(opened.manifest(3).tree).count('"t"')
    assert nodes == 3
