"""Types of containers under the Engine: the same types and bits after a restore, or refused."""

from __future__ import annotations

import os
import sys
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    safe_globals,
)

import deltacheck
from deltacheck.backends.torch import Engine, load
from deltacheck.backends.torch.state import leaves
from deltacheck.cli import main
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import instances
from deltacheck.restore.content import Loaded
from deltacheck.store.roots.opening import open_root
from tests.support import nested


@pytest.fixture(autouse=True)
def _named() -> Iterator[None]:
    before = get_safe_globals()
    add_safe_globals(list(nested.CLASSES))
    yield
    # A test may have imported a library that names its classes.
    kept = {*before, *get_safe_globals()}.difference(list(nested.CLASSES))
    clear_safe_globals()
    add_safe_globals(list(kept))


def restored(root: Path, state: object) -> Any:
    with Engine(root) as engine:
        engine.save(0, state).result(240)
    with Engine(root) as engine:
        return engine.restore()


def round_trip(state: object) -> object:
    """Save and restore without files."""
    flat = leaves.flatten(state)
    specs = {
        path: deltacheck.LeafSpec.of(path, leaf.shape, leaf.dtype)
        for path, leaf in flat.leaves.items()
    }
    loaded = {
        path: Loaded(specs[path], [], leaves.bytes_of(value).copy())
        for path, value in flat.arrays.items()
    }
    return leaves.tree_of(flat.skeleton, loaded)


torch_leaves = st.one_of(
    st.integers(0, 4).map(lambda size: torch.arange(size, dtype=torch.bfloat16)),
    st.sampled_from([torch.Size([2, 3]), torch.float32, torch.complex32]),
)


@given(nested.states(torch_leaves))
@settings(max_examples=150, deadline=None)
def test_a_state_keeps_its_types_or_is_refused_by_path(state: Any) -> None:
    state = {"state": state}
    try:
        leaves.flatten(state)
    except UnsupportedLeaf as error:
        refusal = str(error)
    else:
        assert list(nested.differences(state, round_trip(state))) == []
        return
    assert refusal.startswith(("leaf 'state", 'leaf "state')), refusal


def test_every_type_of_container_survives_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Linear(2, 2).state_dict()
    state = {
        "moments": nested.Moments(torch.ones(2), 3),
        "progress": nested.Progress(1, [torch.zeros(1)]),
        "size": torch.Size([2, 3]),
        "table": nested.Table(a=nested.Row([nested.Color.RED])),
        "milestones": Counter({2: 1, 5: 2}),
        "weight": weight,
    }
    # No code of a class runs on content of a checkpoint.
    monkeypatch.delattr(nested.Progress, "__init__")
    back = restored(tmp_path, state)
    assert list(nested.differences(state, back)) == []
    assert back["weight"]._metadata == weight._metadata
    into = dict(state, moments=nested.Moments(torch.zeros(2), 0), milestones=Counter())
    with Engine(tmp_path) as engine:
        filled = engine.restore(into=into)
        assert filled["moments"].mu is into["moments"].mu
    assert list(nested.differences(state, filled)) == []
    assert list(nested.differences(state, load(tmp_path))) == []


def test_a_class_that_this_process_has_not_named_is_refused_on_both_sides(tmp_path: Path) -> None:
    restored(tmp_path, {"a": {"m": nested.Moments(torch.ones(2), 3)}})
    clear_safe_globals()
    with Engine(tmp_path) as engine:
        with pytest.raises(
            UnsupportedLeaf, match=r"'a/m' was saved as .*Moments.*add_safe_globals"
        ):
            engine.restore()
        with pytest.raises(UnsupportedLeaf, match=r"'n': .*Moments.*add_safe_globals"):
            engine.save(1, {"n": nested.Moments(1, 2)})
    # A reader without classes has Python's own types.
    plain = deltacheck.open(tmp_path).restore()
    assert plain["a"]["m"]["nu"] == 3
    assert plain["a"]["m"]["mu"].tolist() == [1.0, 1.0]


class Scaler:
    """An object that has nothing but attributes."""

    def __init__(self) -> None:
        raise AssertionError("a read calls no constructor")


def test_a_named_object_comes_back_with_its_attributes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaler = object.__new__(Scaler)
    scaler.__dict__.update(scale=2.0, history=[torch.ones(2)])
    with safe_globals([Scaler]):
        back = restored(tmp_path, {"s": scaler})["s"]
        assert type(back) is Scaler
        assert list(nested.differences(vars(scaler), vars(back))) == []
    assert deltacheck.open(tmp_path).restore()["s"]["scale"] == 2.0
    with pytest.raises(UnsupportedLeaf, match=r"'s' was saved as a .*Scaler.*add_safe_globals"):
        load(tmp_path)
    file = tmp_path.parent / f"{tmp_path.name}.pt"
    assert main(["export", str(tmp_path), "--out", str(file)]) == 0
    assert "weights_only=False" not in capsys.readouterr().out
    assert torch.load(file, weights_only=True)["s"]["scale"] == 2.0
    with safe_globals([Scaler]):
        assert main(["export", str(tmp_path), "--out", f"{file}.object.pt"]) == 0
    assert "weights_only=False" in capsys.readouterr().out
    with (
        safe_globals([(type("Scaler", (dict,), {}), instances.name_of(Scaler))]),
        pytest.raises(UnsupportedLeaf, match="no longer what it was"),
    ):
        load(tmp_path)


def test_an_object_that_is_not_named_or_is_more_than_its_attributes_is_refused(
    tmp_path: Path,
) -> None:
    class Slots:
        __slots__ = ("at",)

    class Module:
        def state_dict(self) -> dict[str, int]:
            return {}

    with Engine(tmp_path) as engine:
        for value, advice in (
            (object.__new__(Scaler), r"'s': .*add_safe_globals\(\[Scaler\]\); or save vars\(value"),
            (Module(), r"'s' is of type .*; save its state_dict\(\)"),
        ):
            with pytest.raises(UnsupportedLeaf, match=advice):
                engine.save(0, {"s": value})
        with safe_globals([Slots]), pytest.raises(UnsupportedLeaf, match="cannot be kept exactly"):
            engine.save(0, {"s": Slots()})


def test_a_class_that_has_other_fields_than_saved_is_refused(tmp_path: Path) -> None:
    restored(tmp_path, {"m": nested.Moments(1, 2)})

    class Moments(namedtuple("Moments", "mu")):
        __slots__ = ()

    clear_safe_globals()
    with (
        safe_globals([(Moments, "tests.support.nested.Moments")]),
        pytest.raises(UnsupportedLeaf, match=r"'m' was saved as .* has the fields \('mu',\)"),
    ):
        load(tmp_path)


def test_a_file_never_causes_an_import(tmp_path: Path) -> None:
    restored(tmp_path, {"m": nested.Moments(1, 2)})
    clear_safe_globals()
    add_safe_globals([os.getcwd])
    for name in ("antigravity.Moments", "os.getcwd", "posix.getcwd", "torch.nn.Linear"):
        node = {"t": "object", "c": name, "k": [["mu", {"t": "str", "v": "true"}]]}
        with pytest.raises(UnsupportedLeaf, match="has not named"):
            leaves.tree_of(node, {})
    assert "antigravity" not in sys.modules


SCHEDULERS: dict[str, Any] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 7]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [2, 3])], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [5])]
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
# SequentialLR itself passes an epoch, of which PyTorch 2.6 warns.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_a_schedule_resumes_exactly(name: str, tmp_path: Path) -> None:
    def run(steps: range, saved: Any = None) -> tuple[list[float], Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        schedule = SCHEDULERS[name](optimizer)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
        rates = []
        for _ in steps:
            optimizer.step()
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
        return rates, {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}

    whole, _ = run(range(10))
    first, state = run(range(3))
    if any(callable(value) for value in state["schedule"].values()):
        with pytest.raises(UnsupportedLeaf, match=r"leaf 'schedule/\w+' is of type .*function"):
            restored(tmp_path, state)
        pytest.skip("the state of this PyTorch's schedule has a function (SWALR in 2.6)")
    back = restored(tmp_path, state)
    assert list(nested.differences(state, back)) == []
    assert first + run(range(7), back)[0] == whole


def test_only_a_state_with_new_types_needs_the_feature(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.save(0, {"a": [OrderedDict(w=torch.ones(2))]}).result(240)
        engine.save(1, {"a": [Counter(w=1)]}).result(240)
    root = open_root(tmp_path)
    assert [root.manifest(step).must_understand for step in (0, 1)] == [(), ("types",)]
