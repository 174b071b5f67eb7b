"""Test the arithmetic of Adam with the moments of a simulated Adam."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.repaired import repair
from deltacheck.policy import adam
from deltacheck.policy.adam import F32

BETAS = (0.9, 0.999)
C = adam.moment_limit(*BETAS)


def simulated(
    gradients: F32, betas: tuple[float, float] = BETAS, m: F32 | None = None, v: F32 | None = None
) -> tuple[list[F32], list[F32]]:
    """Return m and v after each step, float32, for gradients (steps, elements)."""
    b1, b2 = (np.float32(b) for b in betas)
    m = np.zeros(gradients.shape[1], np.float32) if m is None else m
    v = np.zeros(gradients.shape[1], np.float32) if v is None else v
    moments: tuple[list[F32], list[F32]] = ([], [])
    for g in gradients:
        m = m + (1 - b1) * (g - m)
        v = b2 * v + (1 - b2) * g * g
        moments[0].append(m)
        moments[1].append(v)
    return moments


def gradients(kind: str, steps: int, elements: int = 2000, seed: int = 0) -> F32:
    random = np.random.default_rng(seed)
    noise = random.standard_normal((steps, elements)).astype(np.float32)
    if kind == "noise":
        return noise * 1e-3
    if kind == "heavy":  # a scale for each element, steps that are mostly small
        return (
            noise * np.exp(2 * random.standard_normal((steps, elements))).astype(np.float32) * 1e-4
        )
    if kind == "rare":  # rows of an embedding: touched now and then
        return np.where(random.random((steps, elements)) < 0.02, noise, 0).astype(np.float32)
    return np.cumprod(np.full((steps, elements), 1 / 0.9, np.float32), axis=0) * np.float32(
        1e-8
    )  # growing: near the worst case


@pytest.mark.parametrize("kind", ["noise", "heavy", "rare", "growing"])
def test_no_live_state_of_adam_breaks_the_law(kind: str) -> None:
    for betas in (BETAS, (0.9, 0.95), (0.5, 0.99)):
        limit = adam.moment_limit(*betas)
        for m, v in zip(*simulated(gradients(kind, 120), betas), strict=True):
            assert adam.law_violations(m, v, limit) == 0
            np.testing.assert_allclose(repair(v, m, limit), v, rtol=1e-5)


def test_the_limit_is_the_least_that_holds() -> None:
    assert pytest.approx(52.9, abs=0.05) == C
    # For this gradient the inequality is an equality.
    grown = np.cumprod(np.full((400, 1), BETAS[1] / BETAS[0]), axis=0) * 1e-15
    m, v = simulated(grown.astype(np.float32))
    assert float(m[-1][0]) ** 2 / float(v[-1][0]) > 0.99 * C
    assert adam.law_violations(m[-1], v[-1], 0.98 * C) == 1


@pytest.mark.parametrize("betas", [(0.99, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.95, 0.9025)])
def test_betas_without_a_limit_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="beta1\\^2 < beta2"):
        adam.moment_limit(*betas)


def test_a_stale_v_without_repair_multiplies_updates_and_with_it_does_not() -> None:
    """Test law 4 with rows that were untouched when v was stored.

    With v' >= m^2 / C no element moves by more than sqrt(C) learning rates.
    """
    calm = gradients("noise", 100)
    calm[:, :20] = 0  # untouched until v was stored
    late = gradients("noise", 10, seed=1)
    old_run = simulated(calm)
    m, v = simulated(late, m=old_run[0][-1], v=old_run[1][-1])
    stale, live = old_run[1][-1], v[-1]
    assert adam.law_violations(m[-1], stale, C) == 20
    assert adam.law_violations(m[-1], live, C) == 0
    assert np.abs(adam.update(m[-1], stale, 1e-8)).max() > 1e3
    repaired = repair(stale, m[-1], C)
    assert adam.law_violations(m[-1], repaired, C) == 0
    assert np.abs(adam.update(m[-1], repaired, 1e-8)).max() <= math.sqrt(C) * 1.001
    assert adam.update_change(m[-1], live, stale, 1e-8) > 100 * adam.update_change(
        m[-1], live, repaired, 1e-8
    )


def test_a_pair_from_one_step_obeys_the_law_however_old_it_is() -> None:
    """Test law 5: m and v that are reused together need no repair.

    After the rescale, the update has its former size.
    """
    m, v = simulated(gradients("heavy", 250))
    old = v[99] * np.float32(adam.bias_rescale(250, 100, BETAS[1]))
    assert adam.law_violations(m[99], old, C) == 0
    assert adam.law_violations(m[-1], v[99], C) <= adam.law_violations(m[-1], v[9], C)
    corrected, before = v[-1] / (1 - BETAS[1] ** 250), v[99] / (1 - BETAS[1] ** 100)
    np.testing.assert_allclose(old / (1 - BETAS[1] ** 250), before, rtol=1e-4)
    assert np.median(np.abs(np.log2(before / corrected))) < np.median(
        np.abs(np.log2(v[99] / v[-1]))
    )


@pytest.mark.parametrize("step", [100, 300, 900])
def test_v_drifts_within_the_tolerance_where_training_is_stationary(step: int) -> None:
    """Test law 7: the drift follows from the memory of v, not from convergence."""
    _, v = simulated(gradients("noise", step, elements=400))
    for tolerance in (0.08, 0.15):
        steps_apart = adam.permitted_staleness(tolerance, step, BETAS[1])
        older = v[-1 - steps_apart] * np.float32(
            adam.bias_rescale(step, step - steps_apart, BETAS[1])
        )
        drift = float(np.median(np.abs(np.log2(v[-1] / older))))
        assert 0.1 * tolerance < drift < 1.2 * tolerance


def test_the_formula_reads_as_it_was_measured() -> None:
    assert adam.permitted_staleness(0.1, 10_000, 0.999) == 138
    assert adam.permitted_staleness(0.1, 100, 0.999) == 13


def test_a_short_memory_permits_no_reuse() -> None:
    """Test law 7: with beta2 = .95, v is stale after three steps."""
    assert adam.permitted_staleness(0.1, 100_000, 0.95) == 0
    assert adam.permitted_staleness(0.1, 50, 0.999) == 0


def test_a_repair_leaves_nan_and_what_is_too_small_to_judge() -> None:
    v = np.array([np.nan, 0, 1e-4, 0], np.float32)
    m = np.array([1, 1e-22, 1e-3, 1], np.float32)
    repaired = repair(v, m, C)
    assert np.isnan(repaired[0])
    assert repaired[2] == v[2]
    assert repaired[3] == pytest.approx(1 / C)
    assert adam.law_violations(m, v, C) == 2  # the NaN, and the last


def test_a_change_of_v_shows_in_the_update_by_half_in_the_exponent() -> None:
    m, v = simulated(gradients("noise", 50))
    assert adam.update_change(m[-1], v[-1], v[-1], 1e-8) == 0
    assert adam.update_change(m[-1], v[-1], 4 * v[-1], 0.0) == pytest.approx(0.5)
    assert adam.update_change(m[-1], v[-1], 0 * v[-1], 0.0) == math.inf
    nothing = np.zeros(3, np.float32)
    assert adam.update_change(nothing, nothing, nothing, 1e-8) == 0


def test_a_rescale_goes_forward_only() -> None:
    assert adam.bias_rescale(7, 7, 0.999) == 1
    assert adam.bias_rescale(200, 100, 0.999) == pytest.approx((1 - 0.999**200) / (1 - 0.999**100))
    with pytest.raises(ValueError, match="stored_step"):
        adam.bias_rescale(6, 7, 0.999)
