"""Objects of a framework's checkpoint: kept by a list of classes, refused with the way out, and
made of nothing else when they are read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from enum import Enum
from typing import Any

import pytest
import torch

from deltacheck.backends.torch import plain
from deltacheck.errors import UnsupportedLeaf


class Colour(Enum):
    RED = 1


class Custom:
    def __init__(self) -> None:
        raise AssertionError("a read calls no constructor")


def test_known_objects_come_back_as_they_were() -> None:
    state: dict[Any, Any] = {
        "sizes": [torch.Size([3, 4])],
        "dtype": torch.bfloat16,
        3: (1, None),
        "order": OrderedDict(b=1.5, a="x"),
        "milestones": Counter({30: 1}),
        "default": defaultdict(list, a=[torch.float16]),
    }
    state["order"]._metadata = {"": {"version": 2}}
    kept = plain.encoded(state, ("file",))
    assert kept["sizes"] == [{"deltacheck.class": "Size", "deltacheck.is": [3, 4]}]
    found = plain.decoded(kept)
    assert found == state
    assert type(found["sizes"][0]) is torch.Size
    assert [type(value) for value in found.values()] == [type(value) for value in state.values()]
    assert found["order"]._metadata == {"": {"version": 2}}
    assert found["default"].default_factory is list


def test_an_unknown_object_is_refused_with_its_path_and_the_way_out() -> None:
    with pytest.raises(
        UnsupportedLeaf, match=r"leaf 'file/a%2Fb/0' is of type .*Custom, .*globals\(\[Custom\]\)"
    ):
        plain.encoded({"a/b": [object.__new__(Custom)]}, ("file",))


def test_a_container_that_would_come_back_as_another_is_refused() -> None:
    for container in (defaultdict(lambda: 0), type("Table", (dict,), {})()):
        with pytest.raises(UnsupportedLeaf, match=r"leaf 'file/d'"):
            plain.encoded({"d": container}, ("file",))


def test_a_key_that_stands_for_an_object_is_refused() -> None:
    with pytest.raises(UnsupportedLeaf, match="rename it"):
        plain.encoded({"deltacheck.class": "Size"}, ("file",))


def test_a_named_class_is_kept_by_its_attributes_or_its_value() -> None:
    value = object.__new__(Custom)
    value.at = 7
    with torch.serialization.safe_globals([Custom, Colour]):
        kept = plain.encoded([value, Colour.RED], ())
        found, colour = plain.decoded(kept)
    assert found.at == 7
    assert type(found) is Custom
    assert colour is Colour.RED
    with pytest.raises(UnsupportedLeaf, match="not known here"):
        plain.decoded(kept)


def test_a_named_class_with_other_content_than_attributes_is_refused() -> None:
    class Table(dict[str, int]):
        pass

    class Slots:
        __slots__ = ("at",)

    for value in (Table(a=1), Slots()):
        kind = type(value)
        with (
            torch.serialization.safe_globals([kind]),
            pytest.raises(UnsupportedLeaf, match="cannot be kept exactly"),
        ):
            plain.encoded(value, ("file",))


def test_a_named_class_that_cannot_be_made_is_refused() -> None:
    with (
        torch.serialization.safe_globals([torch.nn.Parameter]),
        pytest.raises(UnsupportedLeaf, match="cannot be made"),
    ):
        plain.decoded({"deltacheck.class": "torch.nn.parameter.Parameter", "deltacheck.is": {}})


def test_a_class_that_is_not_listed_is_never_made_from_what_is_read() -> None:
    with pytest.raises(UnsupportedLeaf, match="not known here; nothing is made of it"):
        plain.decoded({"deltacheck.class": "os.system", "deltacheck.is": "true"})


def test_a_dtype_is_no_other_attribute_of_torch() -> None:
    with pytest.raises(UnsupportedLeaf, match="no dtype 'load'"):
        plain.decoded({"deltacheck.class": "dtype", "deltacheck.is": "load"})


def test_a_hole_is_filled_by_whoever_reads() -> None:
    tensor = torch.ones(2)
    kept = plain.encoded({"t": tensor}, (), lambda one: ["here", 1] if one is tensor else None)
    assert plain.decoded(kept, lambda place: torch.full((1,), float(place[1])))["t"].item() == 1.0
