"""`deltacheck eval`: statistics, judgements and contracts on planted values, and the command."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import deltacheck
from deltacheck.backends.numpy_leaves import describe_numpy, numpy_bytes
from deltacheck.cli import main
from deltacheck.evaluate import significance as stats
from deltacheck.evaluate import worker, workload
from deltacheck.evaluate.comparison import contract, snapshot
from deltacheck.evaluate.comparison.snapshot import Snapshot
from deltacheck.evaluate.judge import judge
from deltacheck.evaluate.records import (
    Ending,
    EvaluationPlan,
    Evidence,
    Kill,
    LeafCheck,
    MeasuredSave,
    Recovery,
)
from deltacheck.evaluate.run import best_saves, evaluate
from deltacheck.evaluate.session import kills
from deltacheck.leaf.contracts import Bounded, Promise, Reused
from deltacheck.leaf.tree import flatten
from deltacheck.policy import Policy

SUPPORT = Path(__file__).parents[1] / "support"


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [(0.95, 1, 6.314), (0.95, 2, 2.920), (0.95, 11, 1.796), (0.975, 30, 2.042)],
)
def test_quantiles_of_student_are_those_of_the_tables(
    confidence: float, freedom: int, expected: float
) -> None:
    assert stats.student_quantile(confidence, freedom) == pytest.approx(expected, abs=5e-4)


def test_a_rate_is_bounded_from_below_as_clopper_and_pearson_do() -> None:
    assert stats.least_rate(300, 300) == pytest.approx(0.05 ** (1 / 300))
    assert stats.least_rate(9, 10) == pytest.approx(0.6058, abs=1e-4)
    assert stats.least_rate(0, 4) == 0.0
    with pytest.raises(ValueError, match="5 of 4"):
        stats.least_rate(5, 4)


def _seeds(mean: float, sd: float, count: int) -> dict[int, list[float]]:
    """Return differences of some seeds with exactly this mean and standard deviation."""
    dice = random.Random(1)
    raw = np.array([dice.gauss(0, 1) for _ in range(count)])
    scaled = mean + sd * (raw - raw.mean()) / raw.std(ddof=1)
    return {seed: [float(value)] for seed, value in enumerate(scaled)}


UNKILLED = [
    values[0] for values in _seeds(2.5, 0.002, 12).values()
]  # so the margin is half of 0.002


def test_a_planted_regression_is_called_one() -> None:
    result = stats.equivalence(_seeds(0.003, 0.0005, 6), UNKILLED)
    assert result.margin == pytest.approx(0.001)
    assert result.verdict == "outside"
    assert result.low > result.margin


def test_a_model_that_is_better_by_more_than_noise_is_not_the_same_either() -> None:
    assert stats.equivalence(_seeds(-0.003, 0.0005, 6), UNKILLED).verdict == "outside"


def test_small_differences_of_many_seeds_are_within_the_noise() -> None:
    result = stats.equivalence(_seeds(0.0001, 0.0004, 8), UNKILLED)
    assert result.verdict == "within"
    assert -result.margin < result.low < 0.0001 < result.high < result.margin


def test_the_interval_is_that_of_two_one_sided_tests_at_5_percent() -> None:
    result = stats.equivalence(_seeds(0.0002, 0.001, 3), UNKILLED)
    assert (result.low, result.high) == pytest.approx(
        (0.0002 - 2.92 * 0.001 / 3**0.5, 0.0002 + 2.92 * 0.001 / 3**0.5), rel=1e-4
    )


@pytest.mark.parametrize(
    ("differences", "unkilled"),
    [
        (_seeds(0.0005, 0.002, 4), UNKILLED),  # too much spread for so few
        ({1: [0.0001]}, UNKILLED),  # one seed has none
        (_seeds(0.0001, 0.0004, 8), UNKILLED[: stats.LEAST_NOISE_SEEDS - 1]),  # nothing to judge by
        (_seeds(0.003, 0.0005, 6), UNKILLED[: stats.LEAST_NOISE_SEEDS - 1]),
        ({}, UNKILLED),
    ],
)
def test_too_few_seeds_have_a_verdict_of_their_own(
    differences: dict[int, list[float]], unkilled: Sequence[float]
) -> None:
    assert stats.equivalence(differences, unkilled).verdict == "too few"


def test_the_needed_number_of_seeds_follows_from_the_power() -> None:
    result = stats.equivalence(_seeds(0.0, 0.002, 4), UNKILLED)
    assert result.needed == math.ceil(10.8 * (0.002 / result.margin) ** 2) == 44


def test_the_kills_of_one_seed_are_one_observation() -> None:
    repeated = {seed: values * 10 for seed, values in _seeds(0.0005, 0.001, 3).items()}
    assert stats.equivalence(repeated, UNKILLED).seeds == 3
    assert stats.equivalence(repeated, UNKILLED).verdict == "too few"


def test_only_equal_bits_are_equal_and_nan_is_never_within() -> None:
    assert stats.equivalence({1: [0.0, 0.0], 2: [0.0]}, UNKILLED[:2]).verdict == "equal"
    assert stats.equivalence({1: [0.0, 1e-300], 2: [0.0]}, UNKILLED).verdict == "within"
    assert stats.equivalence({1: [0.0], 2: [math.nan]}, UNKILLED).verdict == "outside"


def test_a_loss_curve_has_a_first_gap_and_spikes() -> None:
    unkilled = {step: 2.0 for step in range(1, 9)}
    others = [{step: 2.0 + 0.01 * seed for step in unkilled} for seed in range(5)]
    resumed = {step: 2.0 for step in range(3, 9)} | {5: 2.001, 7: 3.0}
    curve = stats.curve(resumed, unkilled, others)
    assert (curve.steps, curve.equal, curve.first_gap, curve.spikes) == (6, 4, 5, 1)
    assert curve.largest_gap == 1.0
    assert stats.curve({3: math.nan}, {3: math.nan}, others).first_gap is None
    assert stats.curve({3: math.nan}, {3: 2.0}, others).spikes == 1


# --- contracts ------------------------------------------------------------------------------------


def _snapshot(tree: Any, run_rate: float | None = None) -> Snapshot:
    return snapshot.take(flatten(tree, describe_numpy), numpy_bytes, run_rate)


def _adam(master: float = 1.0, first: float = 1e-3, second: float = 1e-6, lr: float = 1e-5) -> Any:
    """Return a state whose parameter is known to be Adam's; each value is that of all elements."""

    def full(value: float) -> Any:
        return np.full((8, 8), value, np.float32)

    entry = {"master": full(master), "exp_avg": full(first), "exp_avg_sq": full(second)}
    group = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0]}
    return {
        "model": {"w": np.ones((8, 8), np.float16)},
        "optimizer": {"state": {0: entry}, "param_groups": [group]},
        "step": 7,
    }


def _problems(
    live: Any,
    restored: Any,
    promises: dict[str, Promise] | None = None,
    earlier: Any = None,
    **more: Any,
) -> dict[str, str]:
    then = _snapshot(live if earlier is None else earlier)
    checks = contract.check(
        _snapshot(live, **more), _snapshot(restored, **more), promises or {}, 100, lambda step: then
    )
    assert len({leaf.path for leaf in checks}) == len(checks)
    return {leaf.path: leaf.problem for leaf in checks if leaf.problem}


def test_every_bit_and_every_python_value_is_compared() -> None:
    assert _problems(_adam(), _adam()) == {}
    other = _adam()
    other["model"]["w"][2, 3] = np.float16(1.001)
    other["optimizer"]["state"][0]["exp_avg"][:] = -other["optimizer"]["state"][0]["exp_avg"]
    other["step"] = 8
    other["optimizer"]["param_groups"][0]["lr"] = 1e-5 + 1e-21
    problems = _problems(_adam(), other)
    assert sorted(problems) == [
        "model/w",
        "optimizer/param_groups/0/lr",
        "optimizer/state/0/exp_avg",
        "step",
    ]
    assert "1 of 64 elements differ in bits, first element 19: was 1.0" in problems["model/w"]
    assert "64 of 64" in problems["optimizer/state/0/exp_avg"]


def test_zero_and_minus_zero_differ_and_equal_nans_do_not() -> None:
    def state(value: float) -> Any:
        return {"a": np.array([value, 1.0], np.float32)}

    assert "a" in _problems(state(0.0), state(-0.0))
    assert _problems(state(math.nan), state(math.nan)) == {}


def test_leaves_that_are_missing_added_or_of_another_kind_are_named() -> None:
    one = {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32), "n": 1, "t": True}
    other = {"a": np.zeros(3, np.float64), "c": np.zeros(3, np.float32), "n": 1.0, "u": True}
    problems = _problems(one, other)
    assert problems["a"] == "was float32[3], came back as float64[3]"
    assert problems["b"] == problems["t"] == "did not come back"
    assert problems["c"] == problems["u"] == "was not there when the step was saved"
    assert "int 1" in problems["n"]


def test_tied_leaves_are_compared_at_every_path() -> None:
    shared = np.arange(3, dtype=np.float32)
    live = {"embed": shared, "head": shared}
    assert _problems(live, {"embed": shared.copy(), "head": shared.copy()}) == {}
    assert list(_problems(live, {"embed": shared.copy(), "head": shared + 1})) == ["head"]


@pytest.mark.parametrize(("error_lr", "holds"), [(31.0, True), (33.0, False)])
def test_a_bounded_master_is_measured_in_its_own_learning_rates(
    error_lr: float, holds: bool
) -> None:
    path = "optimizer/state/0/master"
    promise = {path: Promise(Bounded(32.0, "lr"), 1.0)}  # it says of itself that it holds
    problems = _problems(_adam(), _adam(master=1.0 + error_lr * 1e-5), promise)
    assert (path not in problems) == holds


@pytest.mark.parametrize(
    ("unit", "error", "problem"),
    [(1e-6, 31e-6, ""), (1e-6, 33e-6, "its error is"), (1.1e-6, 1e-6, "permits at most 1e-06")],
)
def test_the_unit_of_an_error_is_a_permitted_share_of_the_largest_rate_of_the_run(
    unit: float, error: float, problem: str
) -> None:
    path = "optimizer/state/0/master"
    promise = {path: Promise(Bounded(32.0, "lr", unit), 1.0)}
    live, restored = _snapshot(_adam(lr=0.0)), _snapshot(_adam(master=1.0 + error, lr=0.0))
    earlier = _snapshot(_adam(lr=3.2e-5))
    checks = contract.check(
        live, restored, promise, 100, lambda _: earlier, earlier_steps=[90], rate_floor=1 / 32
    )
    reported = {leaf.path: leaf.problem for leaf in checks}[path]
    assert problem in reported
    assert bool(problem) == bool(reported)


def test_a_missing_learning_rate_is_a_problem_and_that_of_the_run_is_used() -> None:
    path = "optimizer/state/0/master"
    promise = {path: Promise(Bounded(32.0, "lr"), 1.0)}

    def without(master: float) -> Any:
        state = _adam(master)
        del state["optimizer"]["param_groups"][0]["lr"]
        return state

    assert "tells the rate" in _problems(without(1.0), without(1.0), promise)[path]
    assert _problems(without(1.0), without(1.0 + 1e-4), promise, run_rate=1e-5) == {}
    assert path in _problems(without(1.0), without(1.0 + 1e-4), promise, run_rate=1e-6)


@pytest.mark.parametrize(
    ("live", "restored", "holds"),
    [
        (1e-3, 1.4e-3, True),
        (1e-3, 1.5e-3, False),
        (1e-3, -1e-3, False),
        (1e-3, 0.0, False),
        (1e-3, math.nan, False),
        (2.0**-101, 0.0, True),  # counts as zero
        (0.0, 2.0**-101, True),
        (0.0, 1e-3, False),
    ],
)
def test_a_bounded_moment_is_measured_in_octaves(live: float, restored: float, holds: bool) -> None:
    path = "optimizer/state/0/exp_avg"
    promise = {path: Promise(Bounded(0.5, "octaves"), 0.1)}
    assert (path not in _problems(_adam(first=live), _adam(first=restored), promise)) == holds


def test_other_norms_are_relative_to_the_leaf() -> None:
    path = "model/w"
    for norm in ("l2", "max"):
        live, restored = _adam(), _adam()
        restored["model"]["w"] += np.float16(0.0107)
        assert _problems(live, restored, {path: Promise(Bounded(0.011, norm), 0.0)}) == {}
        assert path in _problems(live, restored, {path: Promise(Bounded(0.01, norm), 0.0)})


def test_a_reused_leaf_is_held_to_its_age_and_its_drift() -> None:
    path = "optimizer/state/0/exp_avg_sq"

    def problem(restored: float, age: int) -> str:
        promise = {path: Promise(Reused(50, 0.35), 0.0, from_step=100 - age)}
        return _problems(_adam(), _adam(second=restored), promise).get(path, "")

    assert problem(1.2e-6, 50) == ""
    assert "51 steps old" in problem(1.2e-6, 51)
    assert "-1 steps old" in problem(1.2e-6, -1)
    assert "octaves" in problem(1.4e-6, 50)
    assert "not finite" in problem(math.nan, 50)


def test_the_age_of_a_reused_leaf_is_counted_by_the_optimizer() -> None:
    path = "optimizer/state/0/exp_avg_sq"

    def problem(age_steps: int, updates: int) -> str:
        live, earlier = _adam(), _adam()
        live["optimizer"]["state"][0]["step"] = np.array(500.0 + updates, np.float32)
        earlier["optimizer"]["state"][0]["step"] = np.array(500.0, np.float32)
        promise = {path: Promise(Reused(50, 0.35), 0.0, 98, age_steps)}
        return _problems(live, live, promise, earlier).get(path, "")

    assert problem(age_steps=40, updates=40) == ""
    assert problem(age_steps=2, updates=51) == "it is 51 steps old, promised were 50"


def test_a_reused_first_moment_must_have_the_values_of_its_earlier_step() -> None:
    path = "optimizer/state/0/exp_avg"
    promise = {path: Promise(Reused(50), 0.0, from_step=60)}
    live, earlier = _adam(first=5e-3), _adam(first=1e-3)
    assert _problems(live, _adam(first=1.4e-3), promise, earlier) == {}
    assert (
        "elements are not those of step 60"
        in _problems(live, _adam(first=5e-3), promise, earlier)[path]
    )
    assert "not there at step 60" in _problems(live, _adam(first=1e-3), promise, {"other": 1})[path]
    # An element whose second moment has drifted may have been written since.
    drifted = _adam(first=5e-3, second=4e-6)
    assert _problems(drifted, drifted, promise, earlier) == {}


def test_a_snapshot_survives_the_disk(tmp_path: Path) -> None:
    shared = np.arange(6, dtype=np.float32).reshape(2, 3)
    tree = {
        "a": shared,
        "b": [shared, np.array(True)],
        "empty": np.zeros((0, 4), np.int8),
        "n": None,
        "x": math.inf,
    }
    snapshot.write(flatten(tree, describe_numpy), numpy_bytes, 0.5, tmp_path / "live.npz")
    reread, live = snapshot.read(tmp_path / "live.npz"), _snapshot(tree, run_rate=0.5)
    assert snapshot.digests(reread) == snapshot.digests(live)
    assert (reread.specs, reread.values, reread.ties, reread.run_rate) == (
        live.specs,
        live.values,
        live.ties,
        0.5,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["live.npz"]


# --- the judgement --------------------------------------------------------------------------------

PLAN = EvaluationPlan("f:g", "exact", steps=9, every=2, kills=1, seeds=2, noise_seeds=6)


def _ending(seed: int, first: int = 1, shift: float = 0.0, **digests: str) -> Ending:
    losses = {step: 1.0 / step + 0.01 * seed + shift for step in range(first, 10)}
    return Ending(seed, losses, 2.5 + 0.001 * seed + shift, {"a": "1", "b": "2"} | digests)


def _recovery(seed: int, **changes: Any) -> Recovery:
    kill = Kill(seed, 0, 4, mid_save=True, share=0.5)
    return replace(Recovery(kill, 5, 4, 4, 0.1, 2, ending=_ending(seed, first=5)), **changes)


def _evidence(*recoveries: Recovery, **changes: Any) -> Evidence:
    saves = tuple(MeasuredSave(step, 100, 50, 110, 0.2, 0.3, 0.4) for step in (2, 4, 6))
    unkilled = tuple(_ending(seed) for seed in range(1, 7))
    all_recoveries = recoveries or (_recovery(1), _recovery(2))
    return replace(
        Evidence(
            PLAN, "torch", "peer", unkilled, _ending(1), _ending(1), saves, (), all_recoveries
        ),
        **changes,
    )


def test_a_recovery_bit_for_bit_holds() -> None:
    judgement = judge(_evidence())
    assert judgement.holds
    assert (
        judgement.correctness.held,
        judgement.correctness.trials,
        judgement.correctness.equal_endings,
    ) == (
        2,
        2,
        2,
    )
    assert judgement.quality.final.verdict == "equal"
    assert judgement.size.later.median == 50 / 110
    assert judgement.latency.blocking.median == 0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"failed": (LeafCheck("a/b", "exact", "1 of 9 elements differ"),)},
            "leaf 'a/b' (exact): 1 of 9 elements differ",
        ),
        ({"acknowledged_step": 6}, "step 6 was reported durable, and is gone"),
        (
            {"not_put_back": ("optimizer/step",)},
            "load() does not put back what was restored: optimizer/step",
        ),
        ({"ending": None, "error": "ChainBroken: step 4"}, "seed 2, kill 1: ChainBroken: step 4"),
        ({"ending": _ending(2, first=5, shift=1e-12)}, "the loss of step 5 is"),
        ({"ending": _ending(2, first=5, b="3")}, "the last state differs in b"),
        (
            {"ending": replace(_ending(2, first=5), evaluation=2.6)},
            "something that decides how the run continues is not in its state()",
        ),
    ],
)
def test_the_failure_of_a_recovery_is_the_reason(changes: dict[str, Any], reason: str) -> None:
    judgement = judge(_evidence(_recovery(1), _recovery(2, **changes)))
    assert not judgement.holds
    assert judgement.correctness.held == 1
    assert any(reason in why for why in judgement.reasons), judgement.reasons


def test_a_run_that_does_not_repeat_itself_is_not_compared_in_bits_after_its_restore() -> None:
    apart = _recovery(1, ending=_ending(1, first=5, shift=1e-6))
    assert not judge(_evidence(apart)).holds
    judgement = judge(_evidence(apart, repeat=_ending(1, shift=2e-6)))
    assert judgement.holds
    assert not judgement.correctness.deterministic
    assert judgement.correctness.repeat_gap == pytest.approx(2e-6)
    failed = replace(apart, failed=(LeafCheck("a", "exact", "differs"),))
    assert not judge(
        _evidence(failed, repeat=_ending(1, shift=2e-6))
    ).holds  # the restore itself is, always


def test_saves_that_change_the_training_are_found() -> None:
    judgement = judge(_evidence(saving=_ending(1, shift=1e-9)))
    assert not judgement.holds
    assert "saving changes the training" in judgement.reasons[0]


def _lossy(shift: float, seeds: int) -> Evidence:
    inexact = (LeafCheck("m", "bounded", measured=1.0, limit=2.0, role="first_moment"),)
    shifts = [shift + 1e-7 * seed for seed in range(seeds)]
    recoveries = [
        _recovery(seed, inexact=inexact, ending=_ending(seed, first=5, shift=by))
        for seed, by in enumerate(shifts, start=1)
    ]
    return _evidence(
        *recoveries, plan=replace(PLAN, policy="auto"), contracts=("first_moment bounded",)
    )


def test_a_lossy_policy_must_show_that_the_model_is_as_good() -> None:
    assert judge(_lossy(1e-6, seeds=4)).holds
    worse = judge(_lossy(0.01, seeds=4))
    assert worse.correctness.holds  # every leaf is what was promised
    assert (worse.holds, worse.is_undecided) == (False, False)
    assert "resumed runs end elsewhere: the final loss differs by +0.01" in worse.reasons[0]


def test_a_lossy_policy_with_too_few_seeds_does_not_hold_and_says_why() -> None:
    judgement = judge(_lossy(1e-6, seeds=1))
    assert (judgement.holds, judgement.is_undecided) == (False, True)
    # A contract that no restore tested is no question of seeds.
    untested = ("first_moment bounded", "master bounded")
    assert not judge(replace(_lossy(1e-6, seeds=1), contracts=untested)).is_undecided
    assert "not enough seeds to tell" in judgement.reasons[0]
    assert judge(
        replace(_lossy(1e-6, seeds=1), plan=PLAN)
    ).holds  # what promises every bit is judged by bits


def test_an_evaluation_that_did_not_restore_what_the_policy_weakens_does_not_hold() -> None:
    tested = _lossy(1e-6, seeds=4)
    judgement = judge(tested)
    assert judgement.correctness.exercised == ("first_moment bounded",)
    assert judgement.correctness.unexercised == ()
    more = judge(replace(tested, contracts=("first_moment bounded", "master bounded")))
    assert not more.holds
    assert more.correctness.unexercised == ("master bounded",)
    assert "not tested at any restore: master bounded" in more.reasons[0]
    # A pair that the restored step itself has stored tests no reuse.
    fresh = LeafCheck("v", "reused", "", 0, 9, "second_moment", 0)
    assert (fresh.exercise, replace(fresh, age_steps=3).exercise) == ("", "second_moment reused")
    never = judge(replace(tested, contracts=()))
    assert not never.holds
    assert "every leaf was exact at every checkpoint" in never.reasons[0]


def test_kills_come_where_most_contracts_are_tested() -> None:
    used = {10: set(), 20: {"a"}, 30: {"a", "b"}, 40: {"a", "b"}, 50: {"a", "b"}}
    assert best_saves(used) == [30, 40, 50]
    assert best_saves({step: used[step] for step in (10, 20, 30)}) == [20, 30]
    assert best_saves({10: set()}) == []


def test_kills_test_contracts_that_no_save_uses_together() -> None:
    first, later = {"first_moment bounded"}, {"first_moment reused"}
    used = {step: first if step < 50 else later for step in range(10, 80, 10)}
    assert best_saves(used) == [20, 30, 40, 50, 60, 70]


def test_kills_are_spread_over_the_saves_and_the_same_for_the_same_seeds() -> None:
    plan = replace(PLAN, steps=101, every=5, kills=4, seeds=3)
    planned_kills = kills(plan)
    assert planned_kills == kills(plan)
    assert len(planned_kills) == 12
    steps = [kill.saving_step for kill in planned_kills[:4]]
    assert steps == sorted(set(steps))
    assert all(
        plan.checkpoints()[0] < kill.saving_step < plan.steps and 0 <= kill.share < 1
        for kill in planned_kills
    )
    assert {kill.mid_save for kill in planned_kills} == {True, False}
    assert {kill.saving_step for kill in kills(plan, inexact=[80, 85, 90])} <= {
        85,
        90,
    }  # the save before is inexact, too
    assert kills(plan, inexact=[85]) == planned_kills  # one alone leaves nothing to kill between


# --- the user's workload ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("make", "names no factory"),
        (":make", "names no factory"),
        ("absent.py:make", "no Python file"),
        ("no_such_module:make", "no module 'no_such_module'"),
        ("no_such_module.inner:make", "no module"),
        ("json:absent", "has no function 'absent'"),
        ("json:__name__", "has no function"),
    ],
)
def test_a_missing_factory_is_refused_by_name(named: str, says: str) -> None:
    with pytest.raises(workload.NoWorkload, match=says):
        workload.load_factory(named)


def test_a_file_is_run_and_a_run_that_lacks_a_method_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())  # loading a file puts its folder there
    (tmp_path / "json.py").write_text(
        "import json\nanswer = json.dumps\nclass Half:\n    def step(self): ...\ndef make(seed):"
        " return Half()"
    )
    assert (
        workload.load_factory(f"{tmp_path / 'json.py'}:answer")([1]) == "[1]"
    )  # its name is not taken for that of what it imports
    with pytest.raises(workload.NoWorkload, match="type Half without state, load, evaluate"):
        workload.create_workload(workload.load_factory(f"{tmp_path / 'json.py'}:make"), 1)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_each_framework_saves_restores_and_has_a_peer(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("torch" if framework == "torch" else "orbax.checkpoint")
    backend: Any = importlib.import_module(
        f"deltacheck.backends.{'torch' if framework == 'torch' else 'orbax'}.files.evaluation"
    )
    values = np.arange(4096, dtype=np.float32)
    if framework == "torch":
        import torch

        state = {"w": torch.from_numpy(values), "step": 3}
    else:
        import jax.numpy as jnp

        state = {"w": jnp.asarray(values), "step": 3}
    assert (
        backend.peer_save(state, tmp_path / "peer")
        == (tmp_path / "peer").stat().st_size
        > values.nbytes
    )
    saver = backend.Saver(tmp_path / "root", Policy.exact())
    assert saver.finish() is None
    saver.save(3, state, {"loss": 1.0})
    step, blocking, durable, stored = saver.finish()
    assert step == 3
    assert 0 < blocking < 60
    assert 0 < durable < 60
    assert stored > 1000
    restored_step, restored = saver.restore(state)
    saver.close()
    assert restored_step == 3
    expected, actual = (
        snapshot.digests(snapshot.take(backend.flat(tree), backend.bytes_of))
        for tree in (state, restored)
    )
    assert expected == actual
    assert set(expected) == {"w", "step"}


# --- from end to end ------------------------------------------------------------------------------


@pytest.fixture
def single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(SUPPORT)


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.timeout(300)
def test_a_sound_run_holds_and_all_measurements_are_in_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    words = ["eval", "eval_workload.py:make", "--quick", "--json", "--keep", str(kept)]
    code = main(words)
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    document = json.loads(printed.out)
    assert document["holds"]
    assert document["reasons"] == []
    assert document["machine"]["versions"]["torch"]
    assert document["plan"]["killed_seeds"] == [1]
    assert [save["step"] for save in document["saves"]] == [3, 6, 9]
    assert {group["name"] for group in document["size"]["groups"]} == {
        "weights",
        "momentum",
        "generator",
    }
    (recovery,) = document["recoveries"]
    assert recovery["leaves"] == 4
    assert recovery["failed"] == recovery["not_put_back"] == []
    assert recovery["restored_step"] >= recovery["acknowledged_step"]
    assert recovery["last_step"] >= recovery["kill"]["saving_step"]
    assert set(recovery["ending"]["losses"]) == {
        str(step) for step in range(recovery["restored_step"] + 1, 13)
    }
    assert document["recovery"]["equal_endings"] == document["recovery"]["trials"] == 1
    assert document["quality"]["final"]["verdict"] == "equal"
    # 4 unkilled runs, a killed one, a resumed one
    assert (kept / "log.txt").read_text().count("whatever a run prints") == 6


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.timeout(300)
def test_a_wrong_restore_and_a_forgotten_leaf_end_with_1_and_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["eval", "eval_workload.py:planted", "--quick"])
    printed = capsys.readouterr().out
    assert code == 1, printed
    assert "DOES NOT HOLD: seed 1, kill 1: step" in printed
    assert "leaf 'weights' (exact): 1 of 1024 elements differ in bits, first element 101" in printed
    assert (
        "DOES NOT HOLD: seed 1, kill 1: the workload's load() does not put back what was restored:"
        " momentum" in printed
    )
    assert "0 of 1 recoveries are correct" in printed
    assert "holds (" not in printed


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.timeout(300)
def test_kills_of_a_lossy_run_restore_what_the_policy_weakens(tmp_path: Path) -> None:
    # One kill before moments are reused, and one after.
    plan = EvaluationPlan("eval_workload.py:adam", "auto:max_chain_depth=16", 100, 5, 2, 1, 2)
    evidence = evaluate(plan, tmp_path)
    judgement = judge(evidence)
    assert judgement.correctness.unexercised == ()
    assert judgement.correctness.exercised == evidence.contracts
    assert {"master bounded", "first_moment reused"} <= set(evidence.contracts)
    for recovery in evidence.recoveries:
        assert (recovery.failed, recovery.error) == ((), "")
        rates = [leaf.rate for leaf in recovery.inexact if leaf.role == "master"]
        assert rates == [pytest.approx(1e-5, rel=0.05)]
        assert recovery.missing_steps is not None
        assert -1 < recovery.missing_steps < 5


@pytest.mark.usefixtures("single_threaded")
def test_a_worker_saves_nothing_after_the_save_of_its_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the signal comes, the kill is at the save that was chosen for it."""
    plan = EvaluationPlan("eval_workload.py:make", "exact", 15, 3, 1, 1, 1)
    factory = workload.load_factory(plan.factory)

    def never_killed(seconds: float) -> None:
        raise TimeoutError

    clocks = SimpleNamespace(sleep=never_killed, perf_counter=time.perf_counter)
    monkeypatch.setattr(worker, "time", clocks)
    kill = Kill(1, 0, 6, mid_save=True, share=0.5)
    with pytest.raises(TimeoutError):
        worker.save_until_killed(plan, tmp_path, factory, kill)
    assert deltacheck.open(tmp_path / "roots" / "1-0" / "root").steps()[-1] == 6


@pytest.mark.usefixtures("single_threaded")
def test_an_evaluation_that_cannot_begin_reports_the_reason_alone(tmp_path: Path) -> None:
    with pytest.raises(workload.NoWorkload, match=r"^json has no function 'absent'$"):
        evaluate(replace(PLAN, factory="json:absent"), tmp_path)


def test_misuse_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    for words, says in (
        (["--policy", "lossy"], "is no policy; choose from whole, exact, auto"),
        (["--policy", "auto:moments=none"], "moments must be one of"),
        (["--profile", "p.json"], "goes with --policy auto"),
        (["--steps", "15", "--every", "5"], "leaves 2 checkpoints; give at least 16"),
        (["--keep", str(tmp_path)], "not empty"),
    ):
        assert main(["eval", "eval_workload.py:make", *words]) == 2
        assert says in capsys.readouterr().err
