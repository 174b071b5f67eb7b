"""Reading without a framework: any step, leaf or box, and plain zarr."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.store.files.native_files import JoinedRead
from tests.support.states import bits, nudge, training_state

BIG = "optimizer/state/0/master"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Save a keyframe and three deltas; return the root and the saved states."""
    import copy

    root = tmp_path_factory.mktemp("root")
    state, states = training_state(), []
    with Engine(root) as engine:
        for step in range(4):
            states.append(copy.deepcopy(state))
            engine.save(step, state, metrics={"loss": 1 / (step + 1)})
            nudge(state, seed=step)
    return root, states


def test_a_whole_step_comes_back_as_numpy_in_its_own_dtypes(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, states = saved
    for step, state in enumerate(states):
        back = deltacheck.open(root).restore(step)
        assert back["model"]["embed.weight"].dtype == ml_dtypes.bfloat16
        assert bits(back["model"]["embed.weight"]) == bits(state["model"]["embed.weight"])
        assert bits(back["optimizer"]["state"][0]["exp_avg"]) == bits(
            state["optimizer"]["state"][0]["exp_avg"]
        )
        assert back["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
        assert back["step"] == state["step"]


@pytest.mark.parametrize(
    "box",
    [
        (slice(0, 1),),
        (slice(300, 301), slice(5, 9)),
        (-1,),
        (slice(None), slice(-3, None)),
        (slice(10, 10),),
        (262, 0),
        (slice(261, 525, 1), slice(7)),
    ],
)
def test_a_slice_equals_the_slice_of_the_whole(
    saved: tuple[Path, list[dict[str, Any]]], box: tuple[Any, ...]
) -> None:
    root, states = saved
    whole = states[3]["optimizer"]["state"][0]["master"].numpy()
    found = deltacheck.open(root).restore(3, slices={BIG: box})[BIG]
    kept = tuple(
        slice(b % whole.shape[k], b % whole.shape[k] + 1) if isinstance(b, int) else b
        for k, b in enumerate(box)
    )
    assert found.shape == whole[kept].shape
    assert bits(found) == bits(whole[kept])


@pytest.mark.parametrize(
    ("box", "message"),
    [((0, 0, 0), "too many"), ((700,), "out of range"), ((slice(0, 9, 2),), "step 1")],
)
def test_a_wrong_slice_is_refused(
    saved: tuple[Path, list[dict[str, Any]]], box: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        deltacheck.open(saved[0]).restore(slices={BIG: box})


def test_leaves_and_slices_go_together(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    found = deltacheck.open(saved[0]).restore(2, leaves=["model/head.bias"], slices={BIG: (0,)})
    assert {path: array.shape for path, array in found.items()} == {
        "model/head.bias": (64,),
        BIG: (1, 1000),
    }


@pytest.mark.parametrize("names", ["model", ["model"], ["model/*"], ["*.bias", "model"]])
def test_subtrees_and_patterns_name_leaves_as_on_the_command_line(
    saved: tuple[Path, list[dict[str, Any]]], names: Any
) -> None:
    opened = deltacheck.open(saved[0])
    paths = {path for path in opened.manifest(2).arrays if path.startswith("model/")}
    assert len(paths) > 1
    assert opened.restore(2, leaves=names).keys() == paths
    with pytest.raises(errors.LeafNotFound, match=r"no leaf 'mod\*x'; near it: '"):
        opened.restore(2, leaves="mod*x")


def test_a_slice_reads_only_the_chunks_that_it_needs(
    saved: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = JoinedRead.add_box

    def add_box(self: Any, array: Any, box: Any, out: Any) -> None:
        read.append(out.nbytes)
        original(self, array, box, out)

    monkeypatch.setattr(JoinedRead, "add_box", add_box)
    deltacheck.open(saved[0]).restore(0, slices={BIG: (slice(0, 2),)})
    one_chunk = 262 * 1000 * 4
    assert one_chunk <= sum(read) < one_chunk * 1.2


def test_the_budget_covers_leaves_and_slices(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    with pytest.raises(errors.BudgetExceeded):
        deltacheck.open(saved[0]).restore(slices={BIG: (0,)}, max_bytes=1000)


def test_the_budget_counts_every_slice_once(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    with Engine(tmp_path) as engine:
        engine.save(0, {name: torch.zeros(1000) for name in names})
    slices = {name: (slice(0, 1000),) for name in names}
    opened = deltacheck.open(tmp_path)
    assert opened.restore(slices=slices, max_bytes=3 * 4000).keys() == set(names)
    with pytest.raises(errors.BudgetExceeded):
        opened.restore(slices=slices, max_bytes=3 * 4000 - 1)


def test_a_repeated_step_is_the_newest_of_that_number(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        for value in range(3):
            engine.save(5, {"x": torch.tensor(float(value))})
    opened = deltacheck.open(tmp_path)
    assert opened.steps() == [5]
    assert opened.restore(5)["x"] == 2


def test_reading_pulls_in_no_framework(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    code = (
        "import sys, deltacheck; deltacheck.open(sys.argv[1]).restore(); print(sorted({'torch',"
        " 'jax', 'flax', 'orbax'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved[0])],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_importing_the_package_alone_is_light() -> None:
    code = (
        "import sys, deltacheck; print(sorted({'numpy', 'tensorstore', 'rich', 'typer', 'torch',"
        " 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    for name in deltacheck.__all__:
        assert getattr(deltacheck, name) is not None
    assert set(deltacheck.__all__) <= set(dir(deltacheck))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = deltacheck.nonsense


# --- plain zarr -----------------------------------------------------------------------------------


def test_plain_zarr_opens_everything_without_a_warning(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(saved[0], mode="r")
        shown = str(group.tree())
        assert "params" not in shown
        arrays_found = [
            node for _, node in group.members(max_depth=None) if isinstance(node, zarr.Array)
        ]
        assert len(arrays_found) >= 8
        for array in arrays_found:
            array[...]


def test_a_keyframe_is_a_natural_zarr_array_that_says_how_to_view_it(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, states = saved
    segment = deltacheck.open(root).manifest(0).segments[0].id
    leaf = zarr.open_array(root / "segments" / segment / "leaves" / "model.embed.weight", mode="r")
    assert leaf.shape == (700, 1000)
    assert dict(leaf.attrs) == {
        "leaf_path": "model/embed.weight",
        "dtype": "bfloat16",
        "view": "array[...].view(ml_dtypes.bfloat16)",
    }
    values = np.asarray(leaf[...]).view(ml_dtypes.bfloat16)
    assert bits(values) == bits(states[0]["model"]["embed.weight"])


def test_deltas_are_typed_arrays_that_explain_themselves(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, _ = saved
    segment = deltacheck.open(root).manifest(1).segments[-1].id
    table = zarr.open_group(root / "segments" / segment, mode="r")
    members = table.members()
    assert members
    for name, array in members:
        assert "content" in array.attrs, name
