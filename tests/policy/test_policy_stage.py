"""Test the stages of a run and the decisions that follow from them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from deltacheck import Policy
from deltacheck.leaf.contracts import Bounded, PeakRate, Reused
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.decide import (
    Lattice,
    Situation,
    decide,
    error_unit,
    master_lattice,
)
from deltacheck.policy.parameters import Hyperparameters, Parameter, peak_rates
from deltacheck.policy.presets import Hidden
from deltacheck.policy.stage import DEGRADED, STABLE, WARM, SaveObservation, Stage, advance

QUIET = dict(learning_rate=1e-5, drift_octaves=0.05)


def stages(
    *observations: SaveObservation, stable_from: int | None = None, first: Stage | None = None
) -> list[str]:
    stage, names = first or Stage(), []
    for observation in observations:
        stage = advance(stage, observation, 0.1, stable_from)
        names.append(stage.name)
    return names


def test_three_quiet_saves_make_a_run_stable() -> None:
    assert stages(*(SaveObservation(step, **QUIET) for step in range(4))) == [
        WARM,
        WARM,
        STABLE,
        STABLE,
    ]


def test_nothing_is_stable_before_the_step_that_a_profile_found() -> None:
    assert (
        stages(*(SaveObservation(step, **QUIET) for step in range(0, 60, 10)), stable_from=40)
        == [WARM] * 4 + [STABLE] * 2
    )


def test_a_profile_speaks_for_the_drift_until_the_first_event() -> None:
    drifting = [SaveObservation(step, 1e-5, 0.5) for step in range(40, 100, 10)]

    def names(*observations: SaveObservation) -> list[str]:
        stage, result = Stage(), []
        for observation in observations:
            stage = advance(stage, observation, 0.1, None, steady_from=40)
            result.append(stage.name)
        return result

    assert names(*drifting) == [WARM] * 2 + [STABLE] * 4
    event = SaveObservation(30, 1e-5, 0.5, ("loss",))
    assert names(event, *drifting) == [DEGRADED] + [WARM] * 6


def test_a_learning_rate_that_rises_is_not_quiet() -> None:
    rates = [1e-6, 2e-6, 3e-6, 4e-6, 4e-6, 4e-6, 4e-6]
    assert stages(*(SaveObservation(n, rate, 0.01) for n, rate in enumerate(rates))) == [
        WARM
    ] * 6 + [STABLE]


def test_a_save_that_has_nothing_to_compare_with_is_not_quiet() -> None:
    drifts = [None, 0.01, 0.01, None, 0.01, 0.01, 0.01]
    assert stages(*(SaveObservation(n, 1e-5, drift) for n, drift in enumerate(drifts))) == [
        WARM
    ] * 6 + [STABLE]


@pytest.mark.parametrize(
    "event", ["loss", "gradient", "learning-rate", "nonfinite", "optimizer", "resume"]
)
def test_an_event_degrades_one_save_and_three_quiet_saves_make_the_run_stable(event: str) -> None:
    observations = [
        SaveObservation(0, **QUIET, events=(event,)),
        *(SaveObservation(n, **QUIET) for n in range(1, 4)),
    ]
    for first in (Stage(STABLE, 3, 1e-5), Stage()):
        assert stages(*observations, first=first) == [DEGRADED, WARM, WARM, STABLE]


def test_drift_is_a_condition_of_becoming_stable_and_not_of_staying_so() -> None:
    fast = SaveObservation(0, 1e-5, 0.2)
    assert stages(fast, fast, fast, fast) == [WARM] * 4
    assert stages(fast, first=Stage(STABLE, 3, 1e-5)) == [STABLE]


# --- decisions ------------------------------------------------------------------------------------

PARAMETER = Parameter(
    "p", weight="w", master="x", first="m", second="v", count="t", group="g", adam=True
)
SPECS = {"w": LeafSpec.of("w", (64, 64), "bfloat16")} | {
    p: LeafSpec.of(p, (64, 64), "float32") for p in "xmv"
}


def situation(
    rate: float | None = 1e-5,
    step: int | None = 1000,
    spacing: float | None = None,
    scale: float = 1.0,
) -> Situation:
    lattice = None if spacing is None else Lattice(spacing)
    return Situation(Hyperparameters(rate, 0.9, 0.999, 1e-8), step, lattice, scale)


def hidden(**changes: object) -> Hidden:
    terms = Policy.auto(derive=False, **changes).hidden  # type: ignore[arg-type]
    assert terms is not None
    return terms


def test_after_an_event_nothing_is_inexact_and_no_weight_is_derived_for_one_save() -> None:
    for policy in (Policy.auto(derive=False), Policy.auto(), Policy.auto(weights="bounded")):
        assert decide(policy, DEGRADED, PARAMETER, SPECS, situation()) == {}
    # Masters of float16 weights stay exact, so these weights are derived at every save.
    specs = SPECS | {"w": LeafSpec.of("w", (64, 64), "float16")}
    for stage in (WARM, STABLE, DEGRADED):
        assert decide(Policy.auto(), stage, PARAMETER, specs, situation())["w"].how == "cast"


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.98)])
@pytest.mark.parametrize("step", [1, 30, 10_000])
def test_before_the_stable_stage_masters_and_moments_are_bounded(
    betas: tuple[float, float], step: int
) -> None:
    now = dataclasses.replace(
        situation(step=step), hyperparameters=Hyperparameters(1e-5, *betas, 1e-8)
    )
    decisions = decide(Policy.auto(), WARM, PARAMETER, SPECS, now)
    assert {path: decision.terms for path, decision in decisions.items()} == {
        "x": Bounded(min(32.0, step / 2), "lr"),
        "m": Bounded(0.3, "updates"),
        "v": Bounded(0.5, "octaves"),
    }


def test_before_the_first_update_moments_are_exact() -> None:
    decisions = decide(Policy.auto(), WARM, PARAMETER, SPECS, situation(step=None))
    assert decisions.keys() == {"x"}


def test_weights_are_never_reused_whatever_the_policy() -> None:
    for moments in ("exact", "bounded", "reused"):
        decisions = decide(
            Policy.auto(derive=False, moments=moments), STABLE, PARAMETER, SPECS, situation()
        )
        assert "w" not in decisions
        assert decisions["x"].of == "w"


def test_moments_are_reused_as_a_pair_or_not_at_all() -> None:
    decisions = decide(Policy.auto(derive=False), STABLE, PARAMETER, SPECS, situation())
    assert decisions["m"].terms == Reused(138)  # 0.1 octaves of a memory of 1,000 steps
    assert isinstance(decisions["v"].terms, Reused)
    assert decisions["v"].terms.max_age_steps == 138
    for moments, step in (("reused", 50), ("bounded", 1000)):
        policy = Policy.auto(derive=False, moments=moments)
        bounded = decide(policy, STABLE, PARAMETER, SPECS, situation(step=step))
        assert bounded["m"].terms == Bounded(0.3, "updates")
        assert bounded["v"].terms == Bounded(0.5, "octaves")


def test_small_leaves_and_vectors_stay_exact() -> None:
    for shape in ((4096 * 4,), (8, 8)):
        specs = {path: LeafSpec.of(path, shape, spec.dtype) for path, spec in SPECS.items()}
        assert (
            decide(
                Policy.auto(derive=False, moments="bounded"), STABLE, PARAMETER, specs, situation()
            )
            == {}
        )


def test_without_a_learning_rate_a_master_stays_exact() -> None:
    for rate in (None, 0.0, -1.0, math.nan, math.inf):
        assert "x" not in decide(
            Policy.auto(derive=False), STABLE, PARAMETER, SPECS, situation(rate)
        )


def test_a_lattice_is_kept_while_its_error_is_allowed_and_chosen_anew_when_it_is_not() -> None:
    terms = hidden(master_error_lr=10.0)

    def spacing(rate: float, current: float | None = None, peak: float = 1e-4) -> float:
        now = dataclasses.replace(situation(rate, spacing=current), peak_rate=peak)
        lattice = master_lattice(terms, now, "x")
        assert lattice is not None
        assert lattice.spacing / 2 < 10 * rate
        return lattice.spacing

    first = spacing(1e-5)
    assert spacing(0.99e-5, first) == first == spacing(3e-5, first)
    lower = spacing(0.5e-5, first)
    assert lower == first / 2
    assert spacing(0.495e-5, lower) == lower == spacing(1.5e-5, lower)
    assert spacing(7e-5, first) > first
    # Once the rate is as large as ever, a lattice is soon worth another one.
    assert spacing(1.2e-5, first, peak=1.2e-5) == first < spacing(3e-5, first, peak=3e-5)


@pytest.mark.parametrize("first", [1, 10, 17, 25])
def test_a_new_optimizer_has_fine_lattices_until_it_has_made_64_updates(first: int) -> None:
    terms, rate, lattice, made = hidden(), 1e-5, None, 0
    for step in range(first, 200, 10):
        now = situation(rate, step=step, spacing=lattice.spacing if lattice else None)
        now = dataclasses.replace(now, peak_rate=rate)
        new = master_lattice(terms, now, "x")
        assert new is not None
        assert new.spacing / 2 <= min(32.0, step / 2) * rate
        made += new != lattice
        lattice = new
    assert lattice is not None
    assert lattice.spacing >= 0.8 * 32.0 * rate
    assert made <= (3 if first == 1 else 2)  # at the first save, and when it may be much coarser
    before = dataclasses.replace(now, step=None, lattice=None)
    assert decide(Policy.auto(), WARM, PARAMETER, SPECS, before)["x"].terms == Bounded(0.5, "lr")


def test_the_unit_of_an_error_is_at_least_a_share_of_the_largest_rate() -> None:
    terms = hidden(rate_floor=1 / 32)

    def unit(rate: float | None, peak: float) -> float | None:
        return error_unit(terms, dataclasses.replace(situation(rate), peak_rate=peak))

    assert unit(1e-5, 3.2e-5) == 1e-5
    assert unit(0.0, 3.2e-5) == unit(1e-9, 3.2e-5) == 1e-6
    assert [unit(0.0, 0.0), unit(None, 1.0), unit(-1.0, 1.0), unit(math.nan, 1.0)] == [None] * 4
    falling = dataclasses.replace(situation(1e-9), peak_rate=3.2e-5)
    master = decide(Policy.auto(derive=False), STABLE, PARAMETER, SPECS, falling)["x"]
    assert master.terms == Bounded(32.0, "lr", 1e-6)
    assert 0.3 * 32e-6 < master.spacing < 2 * 32e-6


def course(*rates: float, **last: Any) -> float:
    """Return the peak after saves at these rates, the last of them as described."""
    peaks: dict[str, PeakRate] = {}
    for number, rate in enumerate(rates):
        is_last = number == len(rates) - 1
        events, count = last.get("events", ()) if is_last else (), 10 * number
        count = last.get("count", count) if is_last else count
        resumed = is_last and last.get("is_resumed", False)
        peaks = peak_rates(peaks, {"g": rate}, {"g": count}, events, is_resumed=resumed)
    return peaks["g"].peak


def test_the_largest_rate_is_forgotten_if_the_run_goes_on_with_another_schedule() -> None:
    assert course(1e-5, 2e-5, 1e-6, 0.0) == 2e-5  # warm-up and decay
    assert course(2e-5, 1e-5, 4e-5) == 4e-5
    assert course(2e-5, 0.0, math.nan) == course(2e-5, 0.0, -1.0) == 2e-5
    assert course(2e-5, 1e-6, 3e-6, events=["loss", "frozen"]) == 2e-5
    for event in ("learning-rate", "optimizer"):
        assert course(2e-5, 1e-6, 3e-6, events=[event]) == 3e-6
    assert course(2e-5, 2e-5, 3e-6, count=5) == 3e-6  # an optimizer that counts anew
    assert course(2e-5, 2e-5, 3e-6, is_resumed=True) == 3e-6
    assert course(2e-5, 2e-5, 1.2e-5, is_resumed=True) == 2e-5
    assert course(2e-5, 1e-6, 0.0, is_resumed=True) == 2e-5  # the end of a cosine


def lattices_of(
    terms: Hidden,
    rates: list[float],
    path: str,
    *,
    peak: float | None = None,
    scale: float = 1.0,
) -> list[Lattice]:
    """Return the lattice of a master at each of some saves."""
    lattices: list[Lattice] = []
    for number, rate in enumerate(rates):
        last = lattices[-1] if lattices else None
        now = dataclasses.replace(
            situation(rate, scale=scale),
            lattice=last,
            peak_rate=max(rates[: number + 1]) if peak is None else peak,
        )
        lattice = master_lattice(terms, now, path)
        assert lattice is not None
        lattices.append(lattice)
    return lattices


# The weights beside a master, its scale, and the largest spacings at the largest rate and at its
# floor, in units of that rate. Small masters without exact weights limit them.
SPACINGS = {
    "exact": ("exact", 1.0, 1.98 * 32, 1.98),
    "bounded": ("bounded", 1.0, 1.98 * 32, 1.98),
    "small and bounded": ("bounded", 6e-3, 16, 1.98),
    "smaller and bounded": ("bounded", 3.5e-3, 10.9375, 1.98),
    "tiny and bounded": ("bounded", 2e-3, 6.25, 1.5625),
}


def on_spacings(name: str) -> tuple[Hidden, float, float, float]:
    weights, scale, first, last = SPACINGS[name]
    return dataclasses.replace(hidden(), weights=weights), scale, first * 1e-5, last * 1e-5


@pytest.mark.parametrize("name", SPACINGS)
def test_a_lattice_that_became_too_coarse_is_halved_until_the_rate_is_at_its_floor(
    name: str,
) -> None:
    terms, scale, most_first, most_last = on_spacings(name)
    rates = [1e-5 * 0.5 * (1 + math.cos(math.pi * step / 100)) for step in range(101)]
    for number in range(20):
        lattices = lattices_of(terms, rates, f"optimizer/state/{number}/master", scale=scale)
        first, last = lattices[0], lattices[-1]
        assert (first.halvings, first.spare_bits) == (0, 0)
        assert 0.8 * most_first <= first.spacing <= 0.985 * most_first
        for before, after in itertools.pairwise(lattices):
            ratio = before.spacing / after.spacing
            if ratio > 1:
                added = math.log2(ratio)
                # From a lattice without room, no bits can be kept.
                if before.spare_bits or terms.weights == "exact":
                    assert added.is_integer()
                assert after.halvings == (before.halvings + added if before.spare_bits else 0)
            else:
                assert after.halvings == before.halvings
            if before.spare_bits:
                # Otherwise the type of the codes would change, and each would be written anew.
                total = after.halvings + after.spare_bits
                assert before.halvings + before.spare_bits == total
        assert 0.8 * most_last <= last.spacing <= 0.985 * most_last
        assert last.spare_bits == 0
        assert math.log2(first.spacing / last.spacing) == pytest.approx(
            math.log2(most_first / most_last), abs=0.02
        )


@pytest.mark.parametrize("name", SPACINGS)
def test_a_first_lattice_after_the_rate_has_begun_to_fall_ends_as_coarse_as_the_floor_permits(
    name: str,
) -> None:
    terms, scale, most_first, most_last = on_spacings(name)
    for share in (1.0, 0.9, 0.64, 0.4, 0.1, 0.02, 0.0):
        first, last = lattices_of(terms, [share * 1e-5, 0.0], "x", peak=1e-5, scale=scale)
        error = 32 * max(share, 1 / 32) * 1e-5
        assert first.spacing <= min(1.98 * error, most_first)
        assert scale < 1 or first.spacing > 0.9 * error
        # Room from the start, so that no halving writes every code anew.
        has_room = share < 1 and first.spacing > most_last
        assert first.halvings == 0
        assert (first.spare_bits > 0) == has_room
        if has_room:
            assert (last.halvings, last.spare_bits) == (first.spare_bits, 0)
            assert 0.8 * most_last <= last.spacing <= 0.985 * most_last


def test_codes_have_no_room_for_bits_while_the_rate_stays_nor_after_it_has_risen() -> None:
    lattices = lattices_of(hidden(), [1e-5, 1e-5, 0.8e-5, 0.7e-5, 0.6e-5, 5e-5], "x")
    assert {lattice.halvings for lattice in lattices} == {0}
    room = [lattice.spare_bits > 0 for lattice in lattices]
    assert room == [False, False, True, True, True, False]
    terms = hidden(rate_floor=0.0)
    without_floor = lattices_of(terms, [1e-5 * 0.5**number for number in range(40)], "x")
    # Without a bit for one more halving, a new lattice begins.
    halvings = [lattice.halvings for lattice in without_floor[1:]]
    assert halvings == [number % 7 for number in range(39)]
    assert [lattice.spare_bits for lattice in without_floor[1:9]] == [6, 5, 4, 3, 2, 1, 0, 6]


@pytest.mark.parametrize(("name", "halvings"), list(zip(SPACINGS, (5, 5, 3, 2, 2), strict=True)))
def test_leaves_do_not_change_their_lattice_in_the_same_save(name: str, halvings: int) -> None:
    """Each leaf that changes has a new bit for most elements: all at once would be a burst."""
    terms, scale, *_ = on_spacings(name)
    paths = [f"optimizer/state/{number}/master" for number in range(100)]
    rates = [1e-5 * 0.5 * (1 + math.cos(math.pi * step / 200)) for step in range(200)]
    lattices = [lattices_of(terms, rates, path, scale=scale) for path in paths]
    spacings = np.array([[each.spacing for each in of_leaf] for of_leaf in lattices])
    changed = np.count_nonzero(np.diff(spacings, axis=1), axis=0)
    # The last saves of a cosine to 0 halve the rate between two of them.
    assert 0 < changed[:180].max() < 50
    # The first halving may only make room for bits, at nearly the same spacing.
    assert 100 * halvings <= changed.sum() <= 100 * (halvings + (scale < 1))


def test_a_lattice_is_small_beside_the_weights() -> None:
    lattice = master_lattice(hidden(), situation(1e-2, scale=0.01), "x")
    assert lattice is not None
    assert lattice.spacing == pytest.approx(0.01 / 32)


def test_bounded_weights_are_the_cast_of_their_bounded_master() -> None:
    terms = hidden()
    policy = Policy(32, dataclasses.replace(terms, weights="bounded"), derive=True)
    decisions = decide(policy, STABLE, PARAMETER, SPECS, situation())
    assert decisions["w"].how == "cast"
    assert isinstance(decisions["w"].terms, Bounded)
    assert (decisions["x"].how, decisions["x"].of) == ("lattice", "")
    falling = dataclasses.replace(situation(), peak_rate=1.5e-5)
    master = decide(policy, STABLE, PARAMETER, SPECS, falling)["x"]
    assert (master.how, master.of, master.halvings) == ("lattice", "", 0)
    assert master.spare_bits > 0


def test_a_float32_weight_without_a_bfloat16_copy_is_halved_like_a_master() -> None:
    terms = dataclasses.replace(hidden(), float32_weights="bounded")
    parameter = dataclasses.replace(PARAMETER, weight="x", master=None, proven=True)
    falling = dataclasses.replace(situation(0.2e-5), lattice=Lattice(2e-4, 1, 3), peak_rate=1e-5)
    weight = decide(Policy(32, terms), STABLE, parameter, SPECS, falling)["x"]
    assert (weight.how, weight.of, weight.spacing) == ("lattice", "", 1e-4)
    assert (weight.halvings, weight.spare_bits) == (2, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"moments": "some"},
        {"master_error_lr": 0.0},
        {"moment_error_octaves": 3.0},
        {"max_drift_octaves": 0.0},
        {"max_age_steps": -1},
        {"rate_floor": 1.5},
        {"rate_floor": math.nan},
        {"max_chain_depth": -1},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|moments one of"):
        Policy.auto(derive=False, **options)  # type: ignore[arg-type]
