"""Leaves that are stored flat, since ranks have runs of their elements: whole and in their shape
wherever they are read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import deltacheck
from deltacheck.backends.torch import Engine, load
from deltacheck.backends.torch.state import shards
from deltacheck.backends.torch.state.shards import Fragment
from deltacheck.cli import main
from deltacheck.errors import Damaged
from deltacheck.leaf import tree
from deltacheck.leaf.tiles import leaf_of, name, origin

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a leaf that is stored flat, and a scalar that is."""
    flat = tree.flatten(
        {
            "w": Fragment(torch.from_numpy(WEIGHT.reshape(-1).copy()), (12,), (0,), (3, 4)),
            "s": Fragment(torch.tensor([7.0]), (1,), (0,), ()),
        },
        shards.describe,
    )
    local = shards.local_flat(flat, {"w": (None, [0]), "s": (None, [0])}, flat.skeleton)
    with Engine(tmp_path / "root") as engine:
        engine._save(1, local, None)
    return tmp_path / "root"


def test_every_reader_gives_the_shape_that_the_leaf_has(root: Path) -> None:
    for found in (load(root), deltacheck.open(root).restore(), Engine(root).restore()):
        np.testing.assert_array_equal(np.asarray(found["w"]), WEIGHT)
        assert np.asarray(found["s"]).shape == ()
    named = deltacheck.open(root).restore(leaves=["w"])
    np.testing.assert_array_equal(named["w"], WEIGHT)


@pytest.mark.parametrize("form", ["safetensors", "npz", "torch"])
@pytest.mark.parametrize("leaves", [["--leaves", "w", "--leaves", "s"], []])
def test_every_export_gives_the_shape_that_the_leaf_has(
    root: Path, tmp_path: Path, form: str, leaves: list[str]
) -> None:
    out = tmp_path / f"out.{form}"
    assert main(["export", str(root), "1", *leaves, "--to", form, "--out", str(out)]) == 0
    found = {"safetensors": load_file, "npz": np.load, "torch": torch.load}[form](out)
    np.testing.assert_array_equal(np.asarray(found["w"]), WEIGHT)
    assert np.asarray(found["s"]).shape == ()


@pytest.mark.parametrize("tag", ["flat:3,5", "flat:-3,-4", "flat:x"])
def test_a_shape_of_another_size_is_damage(tag: str) -> None:
    with pytest.raises(Damaged, match="leaf 'w' has 12 elements"):
        tree.shape_in(tag, 12, "w")


def test_the_name_of_a_tile_says_where_it_begins() -> None:
    stored = name("a/b", (slice(5, 7), slice(0, 3)))
    assert (leaf_of(stored), origin(stored)) == ("a/b", (5, 0))
    assert origin("a/b") == (0,)


def test_weights_that_an_optimizer_keeps_out_of_its_groups_are_guarded(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["params"] = []  # as ZeRO 3 does between the steps
    with Engine(tmp_path / "root") as engine:
        engine.guard(optimizer)
        assert weight.untyped_storage().data_ptr() in engine._guard.owned()
