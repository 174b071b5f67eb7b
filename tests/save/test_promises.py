"""Under any schedule and with any values, a step restores what its contracts promise.

The judge below reads a step as a user does and compares it with the state that was saved. It shares
no code with the writer: neither codes nor error measures.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.leaf.spec import LeafKind
from tests.support.adam_run import BFLOAT16, AdamRun
from tests.support.promises import broken, torch_weight

# More of them: DELTACHECK_PROMISE_RUNS=100 makes about 2,000 lossy saves.
RUNS = int(os.environ.get("DELTACHECK_PROMISE_RUNS", "3"))
SAVES = 24


def cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def warmup_stable_decay(share: float) -> float:
    return 1.0 if share < 0.6 else (1 - share) / 0.4


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "cosine": cosine,
    "cosine to a tenth": lambda share: 0.1 + 0.9 * cosine(share),
    "linear": lambda share: 1 - share,
    "warm-up, stable, decay": warmup_stable_decay,
    "restarts": lambda share: cosine(2 * share % 1.0),
    "jumps": lambda share: (1.0, 0.05, 3.0)[min(int(3 * share), 2)],
}


def element(value: float) -> Callable[[AdamRun, Any], None]:
    """Put a value into a master, and its rounding into the weight beside it."""

    def change(run: AdamRun, state: Any) -> None:
        master = state["optimizer"]["state"][0]["master"]
        master[3, 5] = value
        with np.errstate(over="ignore", invalid="ignore"):
            state["model"]["w0"][...] = master.astype(BFLOAT16)

    return change


def other_weight(run: AdamRun, state: Any) -> None:
    state["model"]["w0"][7, 1] += np.asarray(0.25, BFLOAT16)


def neighbour_weight(run: AdamRun, state: Any) -> None:
    state["model"]["w0"].view(np.uint16)[7, 1] += 1


def frozen(run: AdamRun, state: Any) -> None:
    run.scale[0][...] = 0.0


def all_zero(run: AdamRun, state: Any) -> None:
    state["optimizer"]["state"][0]["master"][...] = 0.0
    state["model"]["w0"][...] = 0.0


DISTURBANCES: dict[str, Callable[[AdamRun, Any], None]] = {
    "NaN": element(math.nan),
    "infinity": element(-math.inf),
    "rounds to infinity": element(float(np.finfo(np.float32).max)),
    "huge": element(1e30),
    "large": element(97.3),
    "subnormal": element(1e-41),
    "negative zero": element(-0.0),
    "another weight": other_weight,
    "the neighbour's weight": neighbour_weight,
    "frozen": frozen,
    "all zero": all_zero,
}


def judge(opened: Any, step: int, state: Any, peak: float = 0.0) -> set[str]:
    """Compare a step with the state that was saved, and return the rules of bounded masters.

    Below 1/32 of the largest rate of the run, that share is the largest unit of an error.
    """
    restored, manifest = opened.restore(step), opened.manifest(step)
    rules = set()
    for number, live in state["optimizer"]["state"].items():
        kept = restored["optimizer"]["state"][number]
        for name in ("master", "exp_avg", "exp_avg_sq"):
            path = f"optimizer/state/{number}/{name}"
            if path not in manifest.contracts:
                assert kept[name].tobytes() == live[name].tobytes(), (step, path)
            elif name == "master":
                promise = manifest.contracts[path]
                rate = state["optimizer"]["param_groups"][0]["lr"]
                error = np.abs(kept[name].astype(np.float64) - live[name].astype(np.float64)).max()
                unit = promise.terms.rate or rate
                assert promise.terms.norm == "lr"
                assert promise.terms.limit == 32
                assert rate <= unit <= max(rate, peak / 32), (step, path)
                assert error <= 32 * unit, (step, path)
                assert error / unit == pytest.approx(promise.measured), (step, path)
                weight = state["model"][f"w{number}"]
                assert kept[name].astype(BFLOAT16).tobytes() == weight.tobytes(), (step, path)
                rules.add(manifest.derived[path].how)
    for name, weight in state["model"].items():
        assert restored["model"][name].tobytes() == weight.tobytes(), (step, name)
    assert restored["step"] == state["step"]
    return rules


# Of a run: the schedule, the largest rate, the steps between saves, the disturbed saves, the seed.
COURSES = (
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from([1e-4, 2e-5, 5e-6, 1e-6, 3e-8]),
    st.integers(1, 10),
    st.dictionaries(st.integers(3, SAVES - 1), st.sampled_from(sorted(DISTURBANCES)), max_size=5),
    st.integers(0, 99),
)
# Not shrunk: a run takes seconds.
UNSHRUNK = settings(max_examples=RUNS, deadline=None, phases=[Phase.generate])


@given(*COURSES)
@UNSHRUNK
def test_every_step_keeps_its_promise(
    schedule: str, rate: float, every: int, disturbances: dict[int, str], seed: int
) -> None:
    run = AdamRun((32, 40), 2, rate=rate, seed=seed)
    run.advance(100)
    policy, peak = Policy.auto(derive=False, moments="exact", stable_from=0, max_chain_depth=6), 0.0
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=policy) as engine:
        for save in range(SAVES):
            run.rate = rate * SCHEDULES[schedule](save / (SAVES - 1))
            peak = max(peak, run.rate)
            run.advance(every)
            state = run.state()
            if save in disturbances:
                DISTURBANCES[disturbances[save]](run, state)
            engine.save(run.step, state).result()
            judge(deltacheck.open(root), run.step, state, peak)
        assert deltacheck.open(root).verify(deep=True) == []


def moment(first: float | None, second: float | None) -> Callable[[AdamRun], None]:
    """Put values into both moments of one element."""

    def change(run: AdamRun) -> None:
        if first is not None:
            run.first[0][3, 5] = first
        if second is not None:
            run.second[0][3, 5] = second

    return change


def spike(run: AdamRun) -> None:
    run.advance(1, size=1e4)


def new_rows(run: AdamRun) -> None:
    run.scale[0][:8] = 1e-2


def vanishing_gradients(run: AdamRun) -> None:
    run.scale[0][...] = 1e-21


MOMENTS: dict[str, Callable[[AdamRun], None]] = {
    "beyond the law": moment(1.0, 1e-8),
    "at the limit of the law": moment(7.2e-4, 1e-8),
    "no second moment": moment(0.0, 0.0),
    "tiny beside none": moment(1e-20, 0.0),
    "subnormal": moment(1e-21, 1e-41),
    "huge": moment(1e15, 1e31),
    "NaN": moment(math.nan, None),
    "infinite": moment(None, math.inf),
    "negative": moment(None, -1.0),
    "spike": spike,
    "new rows": new_rows,
    "vanishing gradients": vanishing_gradients,
}


@given(
    st.integers(1, 10),
    st.dictionaries(st.integers(3, SAVES - 1), st.sampled_from(sorted(MOMENTS)), max_size=3),
    st.integers(0, 99),
)
@UNSHRUNK
def test_every_reused_moment_keeps_its_promise(
    every: int, disturbances: dict[int, str], seed: int
) -> None:
    run = AdamRun((32, 40), 2, seed=seed)
    run.scale[0][:8] = 0.0  # rows that do not occur
    run.advance(100)
    policy = Policy.auto(derive=False, stable_from=0, max_chain_depth=6)
    states, rules = {}, set()
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=policy) as engine:
        for save in range(SAVES):
            with np.errstate(all="ignore"):  # NaN and infinities stay in the run
                run.advance(every)
                if save in disturbances:
                    MOMENTS[disturbances[save]](run)
            states[run.step] = run.state()
            engine.save(run.step, states[run.step]).result()
            opened = deltacheck.open(root)
            manifest = opened.manifest()
            restored = opened.restore(run.step)
            found = broken(
                states[run.step], restored, manifest, states.__getitem__, run.rate, torch_weight
            )
            assert found == [], (save, disturbances)
            rules |= {rule.how for rule in manifest.derived.values()}
        assert deltacheck.open(root).verify(deep=True) == []
    assert {"ratio", "octaves"} <= rules


@pytest.mark.parametrize(
    ("rate", "value", "rule", "dtype"),
    [
        (1e-6, 0.0, "lattice", "uint8"),
        (1e-6, 97.3, "lattice", "uint16"),
        (1e-6, 3e4, "lattice", "int32"),
        (1e-6, None, "drawn", None),
    ],
    ids=["codes of a byte", "codes of two bytes", "too many cells", "weights as close"],
)
def test_a_master_is_stored_by_the_shortest_rule_that_keeps_its_promise(
    rate: float, value: float | None, rule: str, dtype: str | None
) -> None:
    run = AdamRun((32, 40), 1, rate=rate)
    if value is None:  # no weight is much larger than the others
        run.masters[0] = np.linspace(-9e-4, 9e-4, 1280, dtype=np.float32).reshape(32, 40)
    run.advance(100)
    path = "optimizer/state/0/master"
    policy = Policy.auto(derive=False, moments="exact", stable_from=0)
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=policy) as engine:
        for _ in range(6):
            run.advance(5)
            state = run.state()
            element(value or 0.0)(run, state)
            report = engine.save(run.step, state).result()
        opened = deltacheck.open(root)
        manifest = opened.manifest()
        assert judge(opened, run.step, state) == {rule}
        assert (manifest.leaves[path].dtype if path in manifest.leaves else None) == dtype
        if rule == "drawn":
            kinds = {leaf.path: leaf.kind for leaf in report.leaves}
            assert kinds[path] is LeafKind.DERIVED


@pytest.mark.parametrize(
    ("value", "dtype"), [(0.0, "uint8"), (2.0, "uint16")], ids=["codes of a byte", "of two bytes"]
)
def test_a_master_keeps_its_promise_while_its_lattice_is_halved(value: float, dtype: str) -> None:
    run = AdamRun((32, 40), 1, rate=1e-6)
    run.masters[0] /= np.float32(8)
    run.advance(100)
    path = "optimizer/state/0/master"
    policy = Policy.auto(derive=False, moments="exact", stable_from=0)
    halvings, codes, first = [], [], {}
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=policy) as engine:
        for _ in range(24):
            run.advance(5)
            state = run.state()
            element(value)(run, state)
            report = engine.save(run.step, state).result()
            opened = deltacheck.open(root)
            rule = opened.manifest().derived.get(path)
            if rule is not None:
                run.rate *= 0.8
                rules = judge(opened, run.step, state, 1e-6)
                assert rules == {rule.how} == {"lattice"}
            if rule is not None and (rule.halvings or rule.spare_bits):
                halvings.append(rule.halvings)
                codes.append(opened.manifest().leaves[path].dtype)
                written = next(leaf for leaf in report.leaves if leaf.path == path)
                first.setdefault(rule.halvings, written)
        assert opened.verify(deep=True) == []
        # A run that goes on from the step keeps the spacing, with other phases.
        seed, spacing = rule.seed, rule.spacing
        engine.restore()
        for _ in range(8):
            run.advance(5)
            engine.save(run.step, run.state()).result()
            judge(deltacheck.open(root), run.step, run.state(), 1e-6)
        rule = deltacheck.open(root).manifest().derived[path]
        assert (rule.how, rule.spacing) == ("lattice", spacing)
        assert rule.seed != seed
    assert set(codes) == {dtype}  # the type is that of the last halving from the first one on
    assert halvings == sorted(halvings)
    assert sorted(first) == [0, 1, 2, 3, 4]
    assert {written.cause for written in first.values()} == {"lattice"}
    # The new bit of an element is 1 or 0. If every code were new, nearly all would change.
    assert all(first[number].changed < 0.65 * 32 * 40 for number in (1, 2, 3, 4)), first


def bounded_weights() -> Policy:
    """Return a policy under which no exact weight bounds a master."""
    hidden = Policy.auto(derive=False, moments="exact", stable_from=0).hidden
    assert hidden is not None
    hidden = replace(hidden, weights="bounded", float32_weights="bounded")
    return Policy(6, hidden, derive=True)


def broken_contracts(opened: Any, run: AdamRun, state: Any, peak: float) -> list[str]:
    """Return the leaves of the newest step that break their contracts."""
    step = run.step
    return broken(
        state,
        opened.restore(step),
        opened.manifest(step),
        lambda earlier: state,  # nothing is reused
        state["optimizer"]["param_groups"][0]["lr"],
        # A weight whose cast would err too much is exact, and its master stays on the lattice.
        lambda master: "",
        peak,
    )


def lattices(opened: Any) -> dict[str, Any]:
    """Return the rules of the newest step that have a spacing, by path."""
    return {path: rule for path, rule in opened.manifest().derived.items() if rule.spacing}


@given(st.sampled_from(["bfloat16", "float32"]), *COURSES)
@UNSHRUNK
def test_every_step_of_bounded_weights_keeps_its_promise(
    weights: str,
    schedule: str,
    rate: float,
    every: int,
    disturbances: dict[int, str],
    seed: int,
) -> None:
    run, peak = AdamRun((32, 40), 2, rate=rate, seed=seed, weights=weights), 0.0
    run.advance(100)
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=bounded_weights()) as engine:
        for save in range(SAVES):
            run.rate = rate * SCHEDULES[schedule](save / (SAVES - 1))
            peak = max(peak, run.rate)
            run.advance(every)
            state = run.state()
            if save in disturbances and weights == "bfloat16":
                DISTURBANCES[disturbances[save]](run, state)
            engine.save(run.step, state).result()
            opened = deltacheck.open(root)
            assert broken_contracts(opened, run, state, peak) == [], (save, disturbances)
        assert deltacheck.open(root).verify(deep=True) == []


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_a_lattice_without_an_exact_weight_is_halved_within_its_promise(weights: str) -> None:
    run = AdamRun((32, 40), 1, rate=1e-6, weights=weights)
    run.advance(100)
    path = "optimizer/state/0/master" if weights == "bfloat16" else "model/w0"
    # No keyframes, whose every code would count as changed.
    policy = replace(bounded_weights(), max_chain_depth=32)
    halvings, first = [], {}
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=policy) as engine:
        for _ in range(24):
            run.advance(5)
            state = run.state()
            report = engine.save(run.step, state).result()
            opened = deltacheck.open(root)
            assert broken_contracts(opened, run, state, 1e-6) == []
            rules = lattices(opened)
            assert rules.keys() <= {path}
            if path in rules:
                run.rate *= 0.8
                assert rules[path].of == ""
                assert opened.manifest().leaves[path].dtype == "int32"
            if path in rules and (rules[path].halvings or rules[path].spare_bits):
                halvings.append(rules[path].halvings)
                written = next(leaf for leaf in report.leaves if leaf.path == path)
                first.setdefault(rules[path].halvings, written)
        assert opened.verify(deep=True) == []
        # A run that goes on from the step keeps the spacing, with other phases.
        seed, spacing = rules[path].seed, rules[path].spacing
        engine.restore()
        for _ in range(8):
            run.advance(5)
            engine.save(run.step, run.state()).result()
            assert broken_contracts(deltacheck.open(root), run, run.state(), 1e-6) == []
        rule = lattices(deltacheck.open(root))[path]
        assert (rule.how, rule.spacing) == ("lattice", spacing)
        assert rule.seed != seed
    assert halvings == sorted(halvings)
    assert sorted(first) == list(range(len(first)))
    assert len(first) >= 4
    assert {written.cause for written in first.values()} == {"lattice"}
    # The new bit of an element is 1 or 0. If every code were new, nearly all would change.
    changes = [first[number].changed / (32 * 40) for number in range(1, len(first))]
    assert max(changes) < 0.65, changes


@pytest.mark.parametrize("disturbance", ["NaN", "infinity", "another weight"])
def test_a_leaf_whose_promise_would_not_hold_is_exact_in_that_step_only(disturbance: str) -> None:
    run = AdamRun((32, 40), 2, rate=1e-6)
    run.advance(100)
    path = "optimizer/state/0/master"
    policy = Policy.auto(derive=False, moments="exact", stable_from=0)
    bounded = []
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=policy) as engine:
        for save in range(9):
            run.advance(5)
            state = run.state()
            if save == 6:
                DISTURBANCES[disturbance](run, state)
            engine.save(run.step, state).result()
            opened = deltacheck.open(root)
            judge(opened, run.step, state)
            bounded.append(path in opened.manifest().contracts)
    assert bounded[-3:] == [False, True, True]
    assert bounded[-4]
