"""``Policy.auto`` weakens the same leaves with and without weights, and says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy, Profiler
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.policy.stage import SaveObservation, Stage, advance, explain
from deltacheck.report.data import collect
from tests.support.adam_run import AdamRun


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run under three policies; a NaN interrupts it when it is stable."""
    folder = tmp_path_factory.mktemp("auto")
    policies = {
        "auto": Policy.auto(),
        "stored": Policy.auto(derive=False),
        "exact": Policy.exact(derive=True),
    }
    for name, policy in policies.items():
        run = AdamRun()
        with Engine(folder / name, policy=policy) as engine:
            for number in range(1, 18):
                run.advance(10)
                loss = float("nan") if number == 15 else 1.0
                engine.save(run.step, run.state(), metrics={"loss": loss}).wait()
    return {name: folder / name for name in policies}


def test_no_leaf_has_a_weaker_promise_than_the_policy_names(roots: dict[str, Path]) -> None:
    auto, other, exact = (deltacheck.open(roots[n]) for n in ("auto", "stored", "exact"))
    assert auto.steps() == other.steps()
    for step in auto.steps():
        ours, theirs = auto.manifest(step), other.manifest(step)
        assert ours.stage == theirs.stage
        assert ours.contracts == theirs.contracts
        assert exact.manifest(step).contracts == {}
        for path, values in auto.restore(step)["model"].items():
            np.testing.assert_array_equal(
                values.view(np.uint8), exact.restore(step)["model"][path].view(np.uint8)
            )
    assert {auto.manifest(step).stage for step in auto.steps()} == {"warm", "stable", "degraded"}


def test_weights_are_stored_because_bounded_masters_lie_in_their_cells(
    roots: dict[str, Path],
) -> None:
    auto = deltacheck.open(roots["auto"])
    # Also at the exact save of an event: the next save needs them again.
    assert not [step for step in auto.steps() if "model/w0" in auto.manifest(step).derived]
    exact = deltacheck.open(roots["exact"])
    assert exact.manifest(10).derived["model/w0"].how == "cast"


def test_each_decision_is_explained_in_the_log_and_in_the_report(
    roots: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log", str(roots["auto"]), "--json"]) == 0
    rows = {row["step"]: row for row in json.loads(capsys.readouterr().out)["steps"]}
    stable = min(step for step, row in rows.items() if row["stage"] == "stable")
    assert "no second moment" in rows[10]["stage_reason"]
    assert "drift by" in rows[30]["stage_reason"]
    assert rows[stable - 10]["stage_reason"] == "bounded: 2 of 3 quiet saves"
    assert "from this save on (3 quiet saves)" in rows[stable]["stage_reason"]
    assert rows[150]["stage_reason"].startswith("exact: nonfinite")
    assert [step.reason for step in collect(roots["auto"]).steps] == [
        row["stage_reason"] for row in rows.values()
    ]
    assert main(["log", str(roots["auto"])]) == 0
    assert "exact: nonfinite" in capsys.readouterr().out
    assert main(["log", str(roots["exact"])]) == 0
    assert "DECISION" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rates", "drift", "stable_from", "events", "reason"),
    [
        ((1e-6, 2e-6), 0.01, None, (), "the learning rate rises, from 1e-06 to 2e-06"),
        ((1e-6, 1e-6), 0.5, None, (), "second moments drift by 0.5 octaves, at most 0.1"),
        ((1e-6, 1e-6), 0.01, None, ("loss",), "exact: loss"),
        ((1e-6, 1e-6), 0.01, 900, (), "may be reused from step 900 on"),
    ],
)
def test_a_reason_names_what_holds_the_stage_back(
    rates: tuple[float, float],
    drift: float,
    stable_from: int | None,
    events: tuple[str, ...],
    reason: str,
) -> None:
    before = Stage(quiet=2, learning_rate=rates[0])
    observation = SaveObservation(100, rates[1], drift, events)
    after = advance(before, observation, 0.1, stable_from)
    assert reason in explain(before, after, observation, 0.1, stable_from)


def test_a_profile_gives_constants_and_the_leaves_that_may_be_inexact() -> None:
    run, profiler = AdamRun(), Profiler(interval_steps=10)
    for _ in range(25):
        run.advance(10)
        profiler.observe(run.step, run.state())
    profile = profiler.profile()
    assert profile.optimizer is not None
    plain, profiled = Policy.auto().hidden, Policy.auto(profile).hidden
    assert plain is not None
    assert profiled == replace(
        plain,
        betas=(profile.optimizer.beta1, profile.optimizer.beta2),
        steady_from=profile.stable_start,
    )
    assert Policy.auto(profile, betas=(0.5, 0.6)).hidden == replace(profiled, betas=(0.5, 0.6))
    with pytest.raises(ValueError, match="rate_floor must be from 0 to 1"):
        Policy.auto(rate_floor=2.0)
