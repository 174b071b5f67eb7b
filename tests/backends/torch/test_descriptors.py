"""Megatron-style descriptors as leaves: by their keys, and back. On several ranks:
``tests/ranks/test_megatron.py``.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltacheck.backends.torch.state import descriptors, shards
from deltacheck.backends.torch.state.shards import Shard, Shards
from deltacheck.errors import UnsupportedLeaf


def tensor(
    key: str, data: Any, shape: tuple[int, ...], offset: tuple[int, ...], **more: Any
) -> Any:
    fields = {"replica_id": 0, "prepend_axis_num": 0, **more}
    return SimpleNamespace(key=key, data=data, global_shape=shape, global_offset=offset, **fields)


def thing(key: str, data: object, replica_id: object = 0) -> Any:
    return SimpleNamespace(key=key, data=data, unique_key=f"{key}/shard_0_1", replica_id=replica_id)


def test_layers_that_a_stage_numbers_for_itself_become_parts_of_one_leaf() -> None:
    first, second = torch.ones(2, 3), torch.zeros(2, 3)
    state = {
        "model": {
            "layers.0": tensor("layers", first, (4, 2, 3), (2, 0, 0), prepend_axis_num=1),
            "layers.1": tensor("layers", second, (4, 2, 3), (3, 0, 0), prepend_axis_num=1),
        },
        "iteration": 3,
        "inner": OrderedDict(lr=0.5, w=tensor("w", torch.ones(2), (4,), (2,))),
        "list": [1, thing("rng", io.BytesIO(b"abc"))],
    }
    found: Any = descriptors.by_key(state)
    assert found["common"] == {"iteration": 3, "inner": {"lr": 0.5}, "list": [1, None]}
    assert isinstance(found["common"]["inner"], OrderedDict)
    assert found["sharded"].keys() == {"layers", "w", "rng/shard_0_1"}
    assert found["sharded"]["rng/shard_0_1"] == b"abc"
    pieces = list(shards.pieces(found["sharded"]["layers"]))
    assert [piece.box for piece in pieces] == [
        (slice(i, i + 1), slice(0, 2), slice(0, 3)) for i in (2, 3)
    ]
    assert isinstance(pieces[0].values, torch.Tensor)
    assert (
        pieces[0].values.data_ptr() == first.data_ptr()
    )  # what is restored into it is in the model


def test_a_state_without_descriptors_is_left_as_it_is() -> None:
    state = {"w": torch.ones(2), "n": [{"a": 1}], "s": Shard(torch.ones(2), (4,), (0,))}
    assert descriptors.by_key(state) is state
    assert descriptors.filled(state, state) is state


def test_what_was_restored_goes_back_to_the_places_of_the_target() -> None:
    described = tensor("w", torch.zeros(2), (4,), (2,))
    rng, text = thing("rng", io.BytesIO()), thing("text", "")
    state = {"a": {"w": described, "n": 0}, "l": [0, rng], "t": text, "i": 0}
    restored = {
        "sharded": {"w": object(), "rng/shard_0_1": b"xyz", "text/shard_0_1": "said"},
        "common": {"a": {"n": 5}, "l": [7, None], "i": 9},
    }
    found: Any = descriptors.filled(state, restored)
    assert found == {"a": {"w": described, "n": 5}, "l": [7, rng], "t": text, "i": 9}
    assert rng.data.getvalue() == b"xyz"
    assert text.data == "said"


@pytest.mark.parametrize(
    ("replica_id", "saved"), [(0, True), (1, False), ((0, 0, 0), True), ((0, 0, 2), False)]
)
def test_of_objects_the_main_replica_is_saved_and_every_replica_restored(
    replica_id: object, saved: bool
) -> None:
    state = {"rng": thing("rng", "x", replica_id), "n": 1}
    found: Any = descriptors.by_key(state)
    assert found["sharded"] == ({"rng/shard_0_1": "x"} if saved else {})
    asked: Any = descriptors.by_key(state, replicas=True)
    assert asked["sharded"] == {"rng/shard_0_1": "x"}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (tensor("k", None, (4,), (0,)), "'k' has no tensor as its data; call init_data first"),
        (
            tensor("k", torch.ones(2), (4,), (0,), flattened_range=slice(0, 2)),
            "'k' is a range of a flattened tensor",
        ),
        (tensor("k", torch.ones(2), (4,), (3,)), "'k': a shard of shape"),
        (
            SimpleNamespace(key="k", build_fn=print, merge_fn=print),
            "'k' is a factory of shards; call apply_factories",
        ),
    ],
)
def test_what_is_no_part_of_a_leaf_is_refused_by_its_key(value: Any, why: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=why):
        descriptors.by_key({"x": value})


def test_parts_of_one_leaf_agree_on_its_type_and_shape() -> None:
    state = {
        "a": tensor("k", torch.ones(2), (4,), (0,)),
        "b": tensor("k", torch.ones(2).half(), (4,), (2,)),
    }
    with pytest.raises(UnsupportedLeaf, match="'k': parts of one leaf have one dtype"):
        descriptors.by_key(state)
    with pytest.raises(ValueError, match="one dtype and one global shape"):
        Shards((Shard(torch.ones(2), (4,), (0,)), Shard(torch.ones(2).half(), (4,), (2,))))
