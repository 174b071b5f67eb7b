"""Marks for tensors that are stored elsewhere in a tree."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch

from deltacheck.backends.torch import holes
from deltacheck.errors import UnsupportedLeaf


def test_a_hole_is_filled_by_whoever_reads_and_all_else_stays_as_it_was() -> None:
    elsewhere, here = torch.ones(2), torch.zeros(3)
    state: dict[Any, Any] = {
        "here": here,
        3: (1, None),
        "order": OrderedDict(b=1.5, a="x"),
        "milestones": Counter({30: 1}),
        "default": defaultdict(list, a=[torch.float16]),
        "last": deque([elsewhere], maxlen=3),
    }
    state["order"]._metadata = {"": {"version": 2}}
    kept = holes.with_holes(state, lambda one: ["there", 1] if one is elsewhere else None)
    assert kept["here"] is here
    assert kept["last"][0] == {"deltacheck.hole": ["there", 1]}
    found = holes.filled(kept, lambda place: elsewhere)
    assert found["last"].popleft() is elsewhere
    assert state["last"].popleft() is elsewhere
    assert found == state
    assert [type(value) for value in found.values()] == [type(value) for value in state.values()]
    assert found["order"]._metadata == {"": {"version": 2}}
    assert found["default"].default_factory is list


def test_the_key_of_holes_is_refused() -> None:
    with pytest.raises(UnsupportedLeaf, match="rename it"):
        holes.with_holes([{"deltacheck.hole": [1]}], lambda tensor: None)
