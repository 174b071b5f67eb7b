"""The lossy policies store and restore by the laws of docs/explanation/policy.md.

One change breaks each law.
"""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.codec import derivation
from deltacheck.codec.lossy import lattice
from deltacheck.leaf.contracts import Bounded, Reused
from deltacheck.leaf.spec import LeafKind
from deltacheck.policy import adam
from deltacheck.save.treatment.weight_capture import WeightCapture
from tests.suites.damage_trials import small_leaves
from tests.support.adam_run import BFLOAT16, AdamRun
from tests.support.promises import broken

LIMIT = adam.moment_limit(0.9, 0.999)


class Saves:
    """An engine and the run that it saves, every ten steps."""

    def __init__(self, root: Path, policy: Policy, run: AdamRun) -> None:
        self.engine, self.run = Engine(root, policy=policy), run
        self.states: dict[int, dict[str, Any]] = {}

    def save(
        self, saves: int = 1, every: int = 10, size: float = 1.0, **metrics: float
    ) -> deltacheck.SaveReport:
        for _ in range(saves):
            self.run.advance(every, size)
            self.states[self.run.step] = self.run.state()
            report = self.engine.save(
                self.run.step, self.states[self.run.step], metrics=metrics
            ).result()
        return report

    def until_stable(self) -> None:
        self.run.advance(100)  # nothing is stable before
        for _ in range(30):
            self.save()
            if self.manifest().stage == "stable":
                return
        raise AssertionError("the run never became stable")

    def manifest(self, step: int | None = None) -> Any:
        return deltacheck.open(self.engine.root).manifest(step)

    def restored(self, step: int | None = None, **options: Any) -> Any:
        return deltacheck.open(self.engine.root).restore(step, **options)

    def live(self) -> dict[str, Any]:
        return self.states[self.run.step]


@pytest.fixture
def saves(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    opened: list[Engine] = []

    def make(policy: Policy, run: AdamRun | None = None) -> Saves:
        made = Saves(tmp_path / f"root{len(opened)}", policy, run or AdamRun())
        opened.append(made.engine)
        return made

    yield make
    for engine in opened:
        engine.close()


def kinds(report: deltacheck.SaveReport) -> dict[str, LeafKind]:
    return {leaf.path: leaf.kind for leaf in report.leaves}


def moments(state: dict[str, Any], number: int = 0) -> tuple[np.ndarray, np.ndarray]:
    kept = state["optimizer"]["state"][number]
    return kept["exp_avg"], kept["exp_avg_sq"]


def test_derived_weights_are_restored_in_every_bit(saves: Any) -> None:
    made = saves(Policy.exact(derive=True))
    made.save(3)
    found = made.restored(contract="exact")
    np.testing.assert_equal(found, made.live())
    assert made.manifest().contract == "exact"


def update_changes(found: Any, live: Any, number: int, count: int, betas: Any) -> np.ndarray:
    """Return by how many learning rates each element's update changes with the restored m."""
    (m, _), (live_m, live_v) = moments(found, number), moments(live, number)
    roots = np.sqrt(live_v.astype(np.float64) / (1 - betas[1] ** count))
    return np.abs(m.astype(np.float64) - live_m) / (1 - betas[0] ** count) / roots


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.98)])
@pytest.mark.parametrize("every", [1, 10])
def test_every_bound_holds_from_the_first_save_on(saves: Any, betas: Any, every: int) -> None:
    made = saves(Policy.auto(derive=False, moments="bounded"), AdamRun(betas=betas))
    for number in range(12):
        made.run.rate = 1e-5 * min(1, (number + 1) / 6)  # a warm-up
        made.save(every=every)
        manifest, found, live = made.manifest(), made.restored(), made.live()
        assert manifest.stage != "degraded"
        np.testing.assert_equal(found["model"], live["model"])
        for n in (0, 1):
            of = {
                name: manifest.contracts[f"optimizer/state/{n}/{name}"]
                for name in ("master", "exp_avg", "exp_avg_sq")
            }
            masters = [s["optimizer"]["state"][n]["master"] for s in (found, live)]
            measured = {
                "master": np.abs(masters[0] - masters[1]).max() / made.run.rate,
                "exp_avg": update_changes(found, live, n, made.run.step, betas).max(),
                "exp_avg_sq": np.abs(
                    np.log2(moments(found, n)[1] / moments(live, n)[1].astype(np.float64))
                ).max(),
            }
            error = min(32, made.run.step / 2)
            for name, limit in (("master", error), ("exp_avg", 0.3), ("exp_avg_sq", 0.5)):
                assert of[name].terms.limit == limit
                assert of[name].measured == pytest.approx(measured[name], rel=1e-4)
                assert measured[name] <= limit


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFF800000], ids=["sNaN", "NaN", "-inf"])
def test_leaves_that_are_not_finite_are_exact_and_raise_no_warning(saves: Any, bits: int) -> None:
    made = saves(Policy.auto(derive=False))
    for _ in range(3):
        made.run.advance(10)
        state = made.run.state()
        for name in ("master", "exp_avg", "exp_avg_sq"):
            state["optimizer"]["state"][0][name].reshape(-1).view(np.uint32)[5] = bits
        made.engine.save(made.run.step, state).result()
    contracts = made.manifest().contracts
    assert {path.split("/")[2] for path in contracts} == {"1"}
    found, live = (s["optimizer"]["state"][0] for s in (made.restored(), state))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        np.testing.assert_array_equal(found[name].view(np.uint32), live[name].view(np.uint32))


def test_an_error_that_is_not_allowed_makes_both_moments_exact(
    saves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saves(Policy.auto(derive=False))
    made.save()
    monkeypatch.setattr(
        "deltacheck.save.treatment.moment_codes.largest_update_change", lambda *_: float("nan")
    )
    made.save()
    assert made.manifest().contracts.keys() == {f"optimizer/state/{n}/master" for n in (0, 1)}
    np.testing.assert_equal(moments(made.restored()), moments(made.live()))


@pytest.mark.parametrize(
    "policy",
    [Policy.exact(), Policy.exact(derive=True), Policy.auto(derive=False, moments="reused")],
    ids=["exact", "derive", "auto"],
)
def test_a_save_lets_go_of_every_leaf_when_it_is_done(saves: Any, policy: Policy) -> None:
    made = saves(policy)
    if policy.hidden is None:
        made.save(3)
    else:
        made.until_stable()
    made.states.clear()
    gc.collect()
    gc.disable()  # JAX's arrays are memory of a device, that Python's collector knows nothing of
    try:
        made.run.advance(10)
        state = made.run.state()
        held = {path: weakref.ref(leaf) for path, leaf in _arrays(state).items()}
        assert any(path.endswith("exp_avg") for path in held)
        made.engine.save(made.run.step, state).result()
        del state
        assert [path for path, leaf in held.items() if leaf() is not None] == []
    finally:
        gc.enable()


def _arrays(state: Any, at: str = "") -> dict[str, np.ndarray]:
    if isinstance(state, np.ndarray):
        return {at: state}
    items = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list | tuple)
        else ()
    )
    return {
        path: leaf for key, value in items for path, leaf in _arrays(value, f"{at}/{key}").items()
    }


def test_weights_that_are_the_cast_of_their_master_are_not_stored_and_come_back(saves: Any) -> None:
    made = saves(Policy.exact(derive=True))
    report = made.save(2)
    assert kinds(report)["model/w0"] is LeafKind.DERIVED
    np.testing.assert_equal(made.restored(), made.live())


def test_a_weight_that_is_not_the_cast_of_its_master_is_stored(saves: Any) -> None:
    made = saves(Policy.exact(derive=True))
    made.save()
    state = made.run.state()
    state["model"]["w0"][5, 7] = 1.0
    report = made.engine.save(11, state).result()
    assert kinds(report)["model/w0"] is LeafKind.KEYFRAME
    assert kinds(report)["model/w1"] is LeafKind.DERIVED
    np.testing.assert_equal(made.restored(), state)


def test_a_master_that_changes_after_its_weight_was_cast_from_it_tears_the_save(
    saves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step would be committed, but the cast of the stored master is another weight."""
    made = saves(Policy.exact(derive=True))
    # Else small leaves are copied before the first of them is encoded.
    monkeypatch.setattr(made.engine, "_is_eager", True)
    made.save()
    state = made.run.state()
    capture_cast = WeightCapture.capture_cast

    def with_a_late_write(self: WeightCapture, path: str, decision: Any) -> Any:
        content = capture_cast(self, path, decision)
        if path == "model/w0":
            state["optimizer"]["state"][0]["master"].flat[0] += 1
        return content

    monkeypatch.setattr(WeightCapture, "capture_cast", with_a_late_write)
    made.engine.save(11, state)
    with pytest.raises(errors.SnapshotTorn, match="leaf 'optimizer/state/0/master' was written to"):
        made.engine.wait()
    assert made.engine.steps() == [10]


def test_step_counts_that_are_equal_are_stored_once(saves: Any) -> None:
    made = saves(Policy.exact(derive=True))
    report = made.save(2)
    counts = [f"optimizer/state/{n}/step" for n in range(3)]
    assert [kinds(report)[path] is LeafKind.DERIVED for path in counts] == [False, True, True]
    state = made.run.state()
    state["optimizer"]["state"][1]["step"] += 1
    made.engine.save(99, state).result()
    np.testing.assert_equal(made.restored(), state)
    assert [path in made.manifest().derived for path in counts] == [False, False, True]


def test_a_derived_leaf_whose_source_gives_other_bits_is_refused(
    saves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saves(Policy.exact(derive=True))
    made.save()
    truncated = lambda values, element: (  # noqa: E731
        (values.view(np.uint32) >> 16).astype(np.uint16).view(element)
    )
    monkeypatch.setattr("deltacheck.codec.derivation.cast", truncated)
    with pytest.raises(
        errors.Damaged, match=r"'model/w\d' follows from 'optimizer/state/\d/master' by cast"
    ):
        made.restored()


@pytest.mark.parametrize("kind", ["bounded", "reused", "exact"])
def test_what_the_forward_pass_sees_is_exact_and_masters_stay_in_their_cells(
    saves: Any, kind: str
) -> None:  # laws 1, 2
    made = saves(Policy.auto(derive=False, moments=kind))
    made.until_stable()
    made.save(3)
    found, live = made.restored(), made.live()
    np.testing.assert_equal(found["model"], live["model"])
    for number in (0, 1):
        master = found["optimizer"]["state"][number]["master"]
        assert np.array_equal(master.astype(BFLOAT16), live["model"][f"w{number}"])
        error = np.abs(master - live["optimizer"]["state"][number]["master"]).max()
        promise = made.manifest().contracts[f"optimizer/state/{number}/master"]
        assert 0 < error / made.run.rate == pytest.approx(promise.measured)
        assert promise.terms == Bounded(32.0, "lr")


def bounded_masters(made: Saves, change: Any) -> list[int]:
    """Save after ten more steps what ``change`` makes of the state, see that it comes back, and
    tell whose masters were bounded.
    """
    made.run.advance(10)
    state = made.run.state()
    change(state["model"])
    made.engine.save(made.run.step, state).result()
    np.testing.assert_equal(made.restored()["model"], state["model"])
    return [n for n in range(3) if f"optimizer/state/{n}/master" in made.manifest().contracts]


def exchanged(model: dict[str, Any]) -> None:
    model["w0"], model["w1"] = model["w1"], model["w0"]


def test_weights_that_change_places_are_found_again(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save(2)
    assert bounded_masters(made, lambda model: None) == [0, 1]
    assert bounded_masters(made, exchanged) == [], (
        "each is refused by the cells of a weight that is not its own"
    )
    assert bounded_masters(made, exchanged) == [0, 1]


def test_a_master_without_a_weight_gets_it_as_soon_as_one_fits(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save(2)

    def other(model: dict[str, Any]) -> None:
        model["w0"] = np.ones_like(model["w0"])

    assert [bounded_masters(made, other) for _ in range(3)] == [[1]] * 3
    assert bounded_masters(made, lambda model: None) == [0, 1]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.7, 3.0])
def test_a_lattice_keeps_the_progress_of_steps_of_any_size(share: float) -> None:  # law 2
    spacing = 2.0**-10
    masters = np.random.default_rng(0).integers(-20, 20, 1 << 22).astype(np.float32) * np.float32(
        spacing
    )  # in phase, all of them
    moved = masters + np.float32(share * spacing)
    before, after = (
        lattice.values(lattice.codes(x, spacing, 5).codes, spacing, 5) for x in (masters, moved)
    )
    assert np.mean(after - before, dtype=np.float64) / np.mean(
        moved - masters, dtype=np.float64
    ) == pytest.approx(1, abs=0.02)


def test_no_leaf_of_the_model_is_ever_reused(saves: Any) -> None:  # law 1
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save(2)
    assert any(isinstance(p.terms, Reused) for p in made.manifest().contracts.values())
    assert not any(path.startswith("model/") for path in made.manifest().contracts)


def test_restored_moments_obey_the_law_of_adam(saves: Any) -> None:  # law 4
    made = saves(Policy.auto(derive=False, max_age_steps=100, max_drift_octaves=1.0))
    made.until_stable()
    made.save(2)
    for kind in ("reused", "bounded"):
        other = saves(Policy.auto(derive=False, moments=kind, stable_from=0))
        other.until_stable()
        # One element's gradient grows until m^2 is close to C v; coarse codes of both would break
        # the law there.
        other.run.scale[0][0] *= 30
        other.save(1, every=3)
        m, v = moments(other.restored())
        assert adam.law_violations(m, v, LIMIT) == 0


def test_moments_are_reused_as_a_pair_of_one_step_with_v_rescaled(saves: Any) -> None:  # law 5
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save(2, every=3)
    contracts, derived = made.manifest().contracts, made.manifest().derived
    first, second = (f"optimizer/state/0/{name}" for name in ("exp_avg", "exp_avg_sq"))
    assert contracts[first].from_step == contracts[second].from_step
    kept = [
        n for n in (0, 1) if contracts[f"optimizer/state/{n}/exp_avg"].from_step < made.run.step
    ]
    assert kept
    second = f"optimizer/state/{kept[0]}/exp_avg_sq"
    assert derived[second].scale == pytest.approx(1 - 0.999**made.run.step)
    old, now = (
        moments(made.states[contracts[second].from_step], kept[0])[1],
        moments(made.restored(), kept[0])[1],
    )
    grown = (1 - 0.999**made.run.step) / (1 - 0.999 ** contracts[second].from_step)
    error = np.log2(now / (old * grown))
    assert np.abs(error).max() <= 0.5  # the codes' own
    assert abs(error.mean()) < 0.05


def test_reused_moments_are_never_older_than_promised(saves: Any) -> None:
    made = saves(Policy.auto(derive=False, max_age_steps=30, max_drift_octaves=1.0))
    made.until_stable()
    for _ in range(8):
        made.save()
        for path, promise in made.manifest().contracts.items():
            if isinstance(promise.terms, Reused):
                assert made.run.step - promise.from_step <= promise.terms.max_age_steps <= 30, path


@pytest.mark.parametrize(
    "number", [lambda step: step // 20, lambda step: 16 * step], ids=["saves", "micro-steps"]
)
@pytest.mark.parametrize("counted", [True, False])
def test_the_optimizer_counts_the_age_of_its_moments(
    tmp_path: Path, number: Any, counted: bool
) -> None:
    run, promised = AdamRun((64, 64), 6), {}
    run.advance(300)
    policy = Policy.auto(derive=False, max_age_steps=100, max_drift_octaves=2.0, stable_from=0)
    with Engine(tmp_path, policy=policy) as engine:
        for _ in range(14):
            run.advance(20)
            state = run.state()
            for entry in state["optimizer"]["state"].values() if not counted else ():
                del entry["step"]
            engine.save(number(run.step), state).result()
            contracts = deltacheck.open(tmp_path).manifest().contracts
            promised[run.step] = {
                path: promise
                for path, promise in contracts.items()
                if path.endswith("exp_avg_sq") and isinstance(promise.terms, Reused)
            }
    # The number of a step stands for the count if the state holds none.
    counts = {number(step): step if counted else number(step) for step in promised}
    ages = [
        (counts[number(step)] - counts[promise.from_step], promise.age(number(step)))
        for step, promises in promised.items()
        for promise in promises.values()
    ]
    assert all(age == stated <= 100 for age, stated in ages)
    if counted:
        assert max(age for age, _ in ages) in (80, 100)
        assert sum(age == 0 for age, _ in ages) < len(ages) / 2


def frozen(run: AdamRun) -> None:
    run.frozen = {0}


def made_anew(run: AdamRun) -> None:
    for moments_of_all in (run.first, run.second):
        for values in moments_of_all:
            values[:] = 0
    run.counted_from = run.step


def zeroed(run: AdamRun) -> None:
    for moments_of_all in (run.first, run.second):
        for values in moments_of_all:
            values[:] = 0


@pytest.mark.parametrize(
    ("change", "later"), [(made_anew, 0), (frozen, 0), (zeroed, 1)], ids=["new", "frozen", "zeros"]
)
def test_a_new_optimizer_and_a_frozen_parameter_are_events(
    saves: Any, change: Any, later: int
) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save(3)
    assert made.manifest().stage == "stable"
    if change is zeroed:  # the save itself must show zeros
        change(made.run)
        made.run.step += 1
        made.engine.save(made.run.step, made.run.state()).result()
    else:
        change(made.run)
        made.save()
    for _ in range(later):
        made.save()
    assert made.manifest().stage == "degraded"
    np.testing.assert_equal(made.restored(), made.live())


def test_refreshes_do_not_all_fall_on_one_save(saves: Any) -> None:
    made = saves(
        Policy.auto(derive=False, max_age_steps=60, max_drift_octaves=2.0), AdamRun((64, 64), 12)
    )
    made.until_stable()
    fresh = []
    for _ in range(12):
        made.save()
        terms = made.manifest().contracts
        fresh.append(
            sum(terms[f"optimizer/state/{n}/exp_avg"].from_step == made.run.step for n in range(12))
        )
    assert sum(fresh) >= 12
    assert max(fresh) < 12


def test_a_young_run_has_no_save_that_refreshes_most_moments(saves: Any) -> None:
    made = saves(Policy.auto(derive=False, stable_from=0), AdamRun((64, 64), 16))
    made.until_stable()
    assert made.run.step < 180  # pairs may be reused for less than 25 steps
    reports, fresh = [], []
    for _ in range(12):
        reports.append(made.save())
        terms = made.manifest().contracts
        seconds = [p for path, p in terms.items() if path.endswith("exp_avg_sq")]
        fresh.append(sum(promise.from_step == made.run.step for promise in seconds) / len(seconds))
        assert all(p.age(made.run.step) <= p.terms.max_age_steps for p in seconds)
    assert max(fresh) < 0.7
    stored = [report.stored_bytes for report in reports]
    assert max(stored) <= 3 * sum(stored) / len(stored)


def test_drift_beyond_the_contract_turns_reuse_into_a_write_at_once(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save()
    made.run.scale[0] *= (
        8  # v grows within a few steps; no loss and no norm is told, so no event shows it
    )
    made.save()
    contracts = made.manifest().contracts
    assert contracts["optimizer/state/0/exp_avg_sq"].from_step == made.run.step
    assert (
        contracts["optimizer/state/0/exp_avg_sq"].measured
        <= contracts["optimizer/state/0/exp_avg_sq"].terms.max_drift
    )


def test_rows_that_are_touched_for_the_first_time_are_written(saves: Any) -> None:  # law 8
    run = AdamRun((64, 96), 2)
    run.scale[0][10:] = 0  # an embedding of which ten rows occur
    made = saves(Policy.auto(derive=False), run)
    made.until_stable()
    while made.manifest().contracts["optimizer/state/0/exp_avg_sq"].from_step == run.step:
        made.save()  # until it is reused
    assert not moments(made.restored())[1][10:].any()
    run.scale[0][40] = 1e-3
    report = made.save(every=5)
    v, live = moments(made.restored())[1], moments(made.live())[1]
    assert np.all(np.abs(np.log2(v[40] / live[40])) <= 0.5)
    assert not v[10:40].any()
    # The other rows are reused: of the leaf, one row is written.
    assert made.manifest().contracts["optimizer/state/0/exp_avg_sq"].from_step < made.run.step
    changed = {leaf.path: leaf.changed for leaf in report.leaves}
    assert changed["optimizer/state/0/exp_avg_sq"] == 96
    # A first moment that moves its weight by less than a quarter of the learning rate has code 0.
    assert 48 < changed["optimizer/state/0/exp_avg"] <= 96


def test_counts_vectors_and_numbers_are_always_exact(saves: Any) -> None:  # law 6
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    vector = len(made.run.masters) - 1
    found, live = made.restored(), made.live()
    np.testing.assert_equal(found["optimizer"]["state"][vector], live["optimizer"]["state"][vector])
    np.testing.assert_equal(
        found["optimizer"]["state"][0]["step"], live["optimizer"]["state"][0]["step"]
    )
    assert found["optimizer"]["param_groups"] == live["optimizer"]["param_groups"]


def test_moments_of_a_short_memory_are_not_reused(saves: Any) -> None:  # law 7
    made = saves(Policy.auto(derive=False, stable_from=0), AdamRun(betas=(0.9, 0.95)))
    made.save(32, every=1)
    assert made.manifest().stage == "warm"
    assert made.manifest().contracts["optimizer/state/0/exp_avg"].terms == Bounded(0.3, "updates")
    assert made.manifest().contract == "bounded"


def test_moments_of_an_unknown_optimizer_are_exact(saves: Any) -> None:  # law 7
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.run.advance(10)
    state = made.run.state()
    for kept in state["optimizer"]["state"].values():
        kept["exp_avg_diff"] = np.zeros_like(kept["exp_avg"])
    made.engine.save(made.run.step, state).result()
    np.testing.assert_equal(moments(made.restored()), moments(state))


def test_moments_that_break_the_law_are_exact_whatever_they_are_called(saves: Any) -> None:
    made = saves(Policy.auto(derive=False, moments="bounded"))
    made.until_stable()
    made.run.advance(10)
    made.run.second[0] *= np.float32(1e-6)
    state = made.run.state()
    made.engine.save(made.run.step, state).result()
    assert "optimizer/state/0/exp_avg_sq" not in made.manifest().contracts
    assert "optimizer/state/1/exp_avg_sq" in made.manifest().contracts
    np.testing.assert_equal(moments(made.restored()), moments(state))


@pytest.mark.parametrize("event", ["rate", "nan", "loss"])
def test_an_event_makes_every_leaf_exact_at_once(saves: Any, event: str) -> None:
    made = saves(Policy.auto(derive=False))
    random = np.random.default_rng(1)
    for _ in range(60):
        made.save(loss=2 + 0.01 * random.normal())
    assert made.manifest().stage == "stable"
    if event == "rate":
        made.run.rate *= 5
    made.save(loss={"nan": float("nan"), "loss": 9.0, "rate": 2.0}[event])
    assert made.manifest().stage == "degraded"
    assert made.manifest().contract == "exact"
    np.testing.assert_equal(made.restored(), made.live())


def test_no_pair_from_before_an_event_is_reused_after_it(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.run.advance(500)  # so that a pair may be reused over many saves
    made.until_stable()
    made.save(loss=float("nan"))
    assert made.manifest().stage == "degraded"
    stages = []
    for _ in range(4):
        made.save()
        stages.append(made.manifest().stage)
        found = broken(
            made.live(), made.restored(), made.manifest(), made.states.__getitem__, made.run.rate
        )
        assert found == []
    assert stages == ["warm", "warm", "warm", "stable"]
    assert made.manifest().contracts["optimizer/state/0/exp_avg"].from_step == made.run.step


def test_what_is_written_exactly_in_any_case_does_not_end_the_reuse_of_the_rest(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    before = made.run.step
    made.run.second[-1] *= np.float32(8)  # of a vector: three octaves, at one step
    made.save(3, every=1)
    assert made.manifest().stage == "stable"
    assert made.manifest().contracts["optimizer/state/0/exp_avg_sq"].from_step == before
    np.testing.assert_equal(
        moments(made.restored(), len(made.run.masters) - 1),
        moments(made.live(), len(made.run.masters) - 1),
    )


def test_moments_that_drift_are_written_again_and_the_run_stays_stable(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    for second in made.run.second:
        second *= np.float32(2)
    made.save(every=1)
    assert made.manifest().stage == "stable"
    promise = made.manifest().contracts["optimizer/state/0/exp_avg_sq"]
    assert promise.from_step == made.run.step
    assert promise.measured <= promise.terms.max_drift


def masters_at(manifest: Any) -> set[Any]:
    return {c.terms for path, c in manifest.contracts.items() if path.endswith("master")}


@pytest.mark.parametrize("floor", [1 / 32, 0.0])
def test_at_rate_0_the_largest_rate_of_the_run_is_the_unit_of_a_masters_error(
    saves: Any, floor: float
) -> None:
    made = saves(Policy.auto(derive=False, moments="exact", rate_floor=floor))
    made.until_stable()
    for rate in (6e-6, 3e-6, 0.0):
        made.run.rate = rate
        made.save()
    at_zero = {Bounded(32.0, "lr", 1e-5 / 32)} if floor else set()
    assert made.manifest().stage == "stable"
    assert masters_at(made.manifest()) == at_zero
    made.engine.restore()  # another writer goes on with what the manifest tells
    made.save(6)
    assert made.manifest().stage == "stable"
    assert masters_at(made.manifest()) == at_zero
    made_anew(made.run)
    made.run.rate = 1e-7
    made.save()
    assert {rate.peak for rate in made.manifest().rates.values()} == {1e-7}


def test_a_resumed_run_reuses_nothing_before_it_is_stable_again(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save()
    assert made.manifest().contract == "reused"
    made.engine.restore()
    made.save()
    assert made.manifest().stage == "warm"
    assert made.manifest().contract == "bounded"


def in_torch(node: Any) -> Any:
    """A state with float32 arrays as tensors that share their memory."""
    if isinstance(node, dict):
        return {key: in_torch(value) for key, value in node.items()}
    if isinstance(node, list):
        return [in_torch(value) for value in node]
    return (
        torch.from_numpy(node)
        if isinstance(node, np.ndarray) and node.dtype == np.float32
        else node
    )


def test_leaves_that_a_restore_computes_are_computed_in_the_targets_own_memory(
    saves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A lattice that is finer than the weights.
    made = saves(Policy.auto(derive=False), AdamRun((300, 200), rate=1e-6))
    made.until_stable()
    made.save(2)
    expected, arrays = made.restored(), made.run.state()
    target = in_torch(arrays)
    given = []
    compute = derivation.compute
    monkeypatch.setattr(
        derivation, "compute", lambda *arguments: given.append(compute(*arguments)) or given[-1]
    )
    assert (
        made.engine.restore(into=target)["optimizer"]["state"][0]["master"]
        is target["optimizer"]["state"][0]["master"]
    )
    np.testing.assert_equal(arrays, expected)
    computed = [
        arrays["optimizer"]["state"][n][name]
        for n in (0, 1)
        for name in ("master", "exp_avg", "exp_avg_sq")
    ]
    assert all(any(np.shares_memory(leaf, values) for values in given) for leaf in computed)


def test_a_step_that_is_damaged_anywhere_leaves_the_target_as_it_was(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save(2)
    before, arrays = made.live(), made.run.state()
    refused = 0
    for file in sorted(Path(made.engine.root).rglob("*")):
        if (
            not file.is_file()
            or not any(part.startswith(("leaves", "packed", "delta")) for part in file.parts[-3:])
            or file.suffix == ".json"
        ):
            continue
        content = file.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        file.write_bytes(changed)
        try:
            made.engine.restore(into=in_torch(arrays))
        except errors.DeltacheckError:
            refused += 1
            np.testing.assert_equal(arrays, before)
        else:  # it belongs to earlier steps
            arrays = made.run.state()
        file.write_bytes(content)
    assert refused > 5


def test_a_derived_leaf_that_is_refused_leaves_the_target_as_it_was(
    saves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = Policy.auto(derive=False)
    assert bounded.hidden is not None
    first = frozenset(f"optimizer/state/0/{name}" for name in ("master", "exp_avg", "exp_avg_sq"))
    policy = replace(bounded, derive=True, hidden=replace(bounded.hidden, leaves=first))
    made = saves(policy, AdamRun(rate=1e-6))
    made.until_stable()
    made.save()
    derived = made.manifest().derived
    assert (derived["optimizer/state/0/master"].how, derived["model/w1"].how) == (
        "lattice",
        "cast",
    )
    arrays = made.run.state()
    arrays["optimizer"]["state"][0]["master"][:] = 7.0
    wrong = lambda values, element: np.zeros_like(values, element)  # noqa: E731
    monkeypatch.setattr("deltacheck.codec.derivation.cast", wrong)
    with pytest.raises(errors.Damaged, match="'model/w1' follows from"):
        made.engine.restore(into=in_torch(arrays))
    assert np.all(arrays["optimizer"]["state"][0]["master"] == 7.0)


def test_errors_do_not_add_up_over_saves_and_restores(saves: Any) -> None:
    made = saves(Policy.auto(derive=False, moments="bounded", stable_from=0))
    made.until_stable()
    for _ in range(6):
        made.save()
        for number in (0, 1):
            found, live = (s["optimizer"]["state"][number] for s in (made.restored(), made.live()))
            assert np.abs(found["master"] - live["master"]).max() <= 32 * made.run.rate
            assert np.abs(np.log2(found["exp_avg_sq"] / live["exp_avg_sq"])).max() <= 0.5


def test_a_run_that_is_killed_again_keeps_what_it_gained_since_the_resume(saves: Any) -> None:
    """On the lattice of the restored step, each master would return to where the resume began."""
    made = saves(Policy.auto(derive=False, moments="exact", stable_from=0), AdamRun(rate=1e-6))
    made.until_stable()

    def masters(state: Any) -> list[Any]:
        return [e["master"] for e in state["optimizer"]["state"].values()]

    seeds, kept = set(), []
    for _ in range(3):
        seeds |= {made.manifest().derived["optimizer/state/0/master"].seed}
        state = made.engine.restore()
        start = [np.array(master) for master in masters(state)]
        made.run.masters = [master.copy() for master in start]
        while made.save(every=2) and made.manifest().stage != "stable":
            pass
        assert made.manifest().contracts.keys() == {f"optimizer/state/{n}/master" for n in (0, 1)}
        for begin, live, restored in zip(
            start, masters(made.live()), masters(made.restored()), strict=True
        ):
            gained = live - begin
            assert 0 < np.abs(gained).max() < 25 * made.run.rate  # less than half a spacing
            kept.append(float(np.sum((restored - begin) * gained) / np.sum(gained * gained)))
    # Masters are drawn from the cells of their weights, and the updates of this run pull them back.
    assert 0.7 < np.mean(kept) < 2, kept
    assert len(seeds) == 3


def test_exact_is_refused_where_the_step_is_not_and_the_leaves_are_named(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save()
    for door in (made.engine.restore, lambda contract: made.restored(contract=contract)):
        with pytest.raises(
            errors.ContractNotMet,
            match=r"step \d+ cannot be restored as exact: leaf 'optimizer/state/0/",
        ):
            door(contract="exact")
    with pytest.raises(errors.ContractNotMet, match="is reused"):
        made.restored(contract="bounded")
    weights = made.restored(leaves=["model/w0"], contract="exact")
    np.testing.assert_equal(weights["model/w0"], made.live()["model"]["w0"])
    with pytest.raises(ValueError, match="contract must be one of exact, bounded, reused"):
        made.restored(contract="perfect")


def test_slices_of_derived_leaves_equal_the_leaf(saves: Any) -> None:
    with small_leaves(pack_below=1024, chunk=4096):
        made = saves(Policy.auto(derive=False, moments="bounded"), AdamRun((70, 96), rate=1e-6))
        made.until_stable()
        assert made.manifest().leaves["optimizer/state/0/master"].chunk == (42, 96)
        whole = made.restored()["optimizer"]["state"][0]
        for name in ("master", "exp_avg", "exp_avg_sq"):
            path = f"optimizer/state/0/{name}"
            part = made.restored(slices={path: (slice(13, 61), slice(5, 90))})[path]
            np.testing.assert_array_equal(part, whole[name][13:61, 5:90])


def test_every_byte_of_a_lossy_root_is_verified(saves: Any) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save(3)
    assert deltacheck.open(made.engine.root).verify(deep=True) == []


def test_a_save_after_a_failed_one_writes_what_would_have_been_reused(
    saves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save()
    with monkeypatch.context() as patch:
        patch.setattr("deltacheck.save.root_writer.commit", lambda path, manifest: 1 / 0)
        made.run.advance(10)
        with pytest.raises(errors.SaveFailed):
            made.engine.save(made.run.step, made.run.state()).result()
    made.save()
    fresh = made.manifest().contracts["optimizer/state/0/exp_avg"]
    assert fresh.from_step == made.run.step
    assert deltacheck.open(made.engine.root).verify(deep=True) == []


def test_verify_prints_the_contracts_of_a_step_and_finds_one_that_does_not_hold(
    saves: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saves(Policy.auto(derive=False))
    made.until_stable()
    made.save(2)
    root, step = str(made.engine.root), made.run.step
    assert main(["verify", root, str(step), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["contracts"]
    assert {row["leaf"] for row in rows} == set(made.manifest().contracts)
    assert 0 < max(row["used"] for row in rows) <= 1
    assert main(["verify", root]) == 0
    assert "leaves that are not exact" in capsys.readouterr().out
    monkeypatch.setattr("deltacheck.leaf.contracts.Promise.used", lambda self, step: 2.0)
    assert main(["verify", root, str(step)]) == 1
    assert "its contract allows" in capsys.readouterr().out
