"""`deltacheck eval` takes the learning rate of a leaf from its last update, not from names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files import evaluation
from deltacheck.evaluate.comparison import contract, snapshot
from deltacheck.evaluate.comparison.observed_rates import observed_rate
from deltacheck.evaluate.comparison.snapshot import Snapshot
from tests.support.grouped_run import NAMED, GroupedRun, Network, Tensor

pytestmark = pytest.mark.tools

RATES = {"a": 1e-5, "b": 16e-5}


def start() -> GroupedRun:
    """Return a run of two matrices of one shape, in groups with different learning rates."""
    random = np.random.default_rng(0)
    tensors = [
        Tensor(
            name,
            rate,
            random.normal(0, 0.02, (16, 96)).astype(np.float32),
            np.exp(random.normal(0, 1, (16, 96))) * 1e-3,
        )
        for name, rate in RATES.items()
    ]
    return GroupedRun([Network(tensors, [["a"], ["b"]], "model", "masters", "optimizer")], NAMED)


def exchanged(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose parameter groups name each other's parameters."""
    first, second = state["optimizer"]["param_groups"]
    groups = [first | {"params": second["params"]}, second | {"params": first["params"]}]
    return state | {"optimizer": state["optimizer"] | {"param_groups": groups}}


def take(state: Any) -> Snapshot:
    return snapshot.take(evaluation.flat(state), evaluation.bytes_of)


def problems(root: Path, change: Any) -> tuple[dict[str, str], dict[str, float | None]]:
    """Save a run whose states a function changes; return the problems and the observed rates."""
    run = start()
    run.advance(20)
    with Engine(root, policy=Policy.auto(derive=False)) as engine:
        before = take(change(run.state()))
        run.advance(1)
        live = take(change(run.state()))
        engine.save(run.step, change(run.state())).result()
    opened = deltacheck.open(root)
    promises = opened.manifest().contracts
    checks = contract.check(live, take(opened.restore()), promises, run.step, lambda step: live)
    checks = contract.with_rates(checks, promises, before, live)
    masters = {check.path: check.rate for check in checks if check.role == "master"}
    return {check.path: check.problem for check in checks if check.problem}, masters


def test_a_leaf_whose_rate_its_update_shows_has_no_problem(tmp_path: Path) -> None:
    found, rates = problems(tmp_path, lambda state: state)
    assert found == {}
    assert rates == {
        f"masters/{name}": pytest.approx(rate, rel=0.05) for name, rate in RATES.items()
    }


def test_a_unit_of_another_group_is_a_problem(tmp_path: Path) -> None:
    found, _ = problems(tmp_path, exchanged)
    # The bound of the other matrix is in a smaller unit than its own, so it holds.
    assert found["masters/a"] == (
        "its error is promised in learning rates of 0.00016; its last update shows 1e-05"
    )
    assert "masters/b" not in found


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rate_is_shown_by_one_update_alone(steps: int) -> None:
    run = start()
    run.advance(20)
    before = take(run.state())
    run.advance(steps)
    assert observed_rate("masters/a", before, take(run.state())) is None


def test_a_leaf_that_no_state_moves_shows_no_rate() -> None:
    run = start()
    run.advance(20)
    before = take(run.state())
    run.advance(1)
    live = run.state()
    live["masters"]["a"] = live["masters"]["a"] + np.float32(1e-5)
    live["masters"]["a"][::2] -= np.float32(3e-5)
    assert observed_rate("masters/a", before, take(live)) is None
    assert observed_rate("masters/b", before, take(live)) == pytest.approx(16e-5, rel=0.05)
