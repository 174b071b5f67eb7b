"""Test that events are detected within ten steps, and that healthy runs raise none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from deltacheck.policy.events import Detector, RunObservation
from deltacheck.profile.record import Event

STEPS = 400


def events(observations: Sequence[RunObservation]) -> list[Event]:
    detector, raised_events = Detector(), []
    for observation in observations:
        detector, new_events = detector.advance(observation)
        raised_events += new_events
    return raised_events


def losses(seed: int, steps: int = STEPS) -> np.ndarray[Any, Any]:
    """Return a loss that falls steeply, then slowly, with the noise of batches."""
    t = np.arange(steps)
    return 2 + 3 * np.exp(-t / 30) + 0.1 * np.random.default_rng(seed).standard_normal(steps)


def norms(seed: int, steps: int = STEPS) -> np.ndarray[Any, Any]:
    return np.exp(0.3 * np.random.default_rng(1000 + seed).standard_normal(steps))


def observed(
    loss: Any, norm: Any = None, every: int = 1, **more: Sequence[Any]
) -> list[RunObservation]:
    return [
        RunObservation(
            every * (i + 1),
            float(loss[i]),
            None if norm is None else float(norm[i]),
            **{k: v[i] for k, v in more.items()},
        )
        for i in range(len(loss))
    ]


def warmup_then_cosine(steps: int = STEPS, warmup: int = 40, floor: float = 0.0) -> list[float]:
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return (
            floor + (1 - floor) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        )

    return [2e-5 * factor(step) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_raises_no_alarm(seed: int) -> None:
    assert events(observed(losses(seed), norms(seed), learning_rate=warmup_then_cosine())) == []
    flat = 2 + 0.1 * np.random.default_rng(seed).standard_normal(STEPS)
    assert events(observed(flat, norms(seed), learning_rate=[1e-6] * STEPS)) == []
    assert (
        events(
            observed(
                flat[::10], norms(seed)[::10], every=10, learning_rate=warmup_then_cosine()[::10]
            )
        )
        == []
    )


@pytest.mark.parametrize(
    "rates", [warmup_then_cosine(), warmup_then_cosine(floor=0.1), warmup_then_cosine(warmup=4)]
)
@pytest.mark.parametrize("every", [1, 5, 20])
def test_a_schedule_is_no_jump_of_the_learning_rate(rates: list[float], every: int) -> None:
    assert (
        events([RunObservation(step, learning_rate=rates[step]) for step in range(0, STEPS, every)])
        == []
    )
    linear = [1e-5 * max(0.0, 1 - step / STEPS) for step in range(STEPS + 1)]
    assert (
        events(
            [
                RunObservation(step, learning_rate=linear[step])
                for step in range(0, STEPS + 1, 5 * every)
            ]
        )
        == []
    )


@pytest.mark.parametrize("factor", [5.0, 0.2])
@pytest.mark.parametrize("every", [1, 10])
def test_a_jump_of_the_learning_rate_is_found_at_once_and_told_once(
    factor: float, every: int
) -> None:
    rates = [
        rate * (factor if step >= 200 else 1) for step, rate in enumerate(warmup_then_cosine())
    ]
    (event,) = events(
        [RunObservation(step, learning_rate=rates[step]) for step in range(0, STEPS, every)]
    )
    assert (event.step, event.what) == (200, "learning-rate")
    assert event.size == pytest.approx(factor, rel=0.1)


def test_a_rate_that_comes_out_of_nothing_has_a_size_that_a_profile_can_hold() -> None:
    rates = [1e-5, 1e-5, 0.0, 0.0, 1e-5]
    detected = events([RunObservation(step, learning_rate=rate) for step, rate in enumerate(rates)])
    assert [event.step for event in detected] == [2, 4]
    assert all(math.isfinite(event.size) for event in detected)


@pytest.mark.parametrize("every", [1, 10])
def test_a_rate_that_creeps_upwards_is_found_when_it_has_doubled(every: int) -> None:
    rates = [1e-6 * k / 10 for k in range(1, 11)] + [1e-6] * 10
    rates += [1e-6 * 1.9**k for k in range(1, 9)] + [1e-6 * 1.9**8] * 10
    detected = events(
        [RunObservation(every * step, learning_rate=rate) for step, rate in enumerate(rates)]
    )
    assert [(event.step // every, event.what) for event in detected] == [
        (step, "learning-rate") for step in (21, 23, 25, 27)
    ]
    assert all(event.size == pytest.approx(1.9**2) for event in detected)


def test_each_group_has_a_learning_rate() -> None:
    rates = [(1e-5, 1e-6 if step < 60 else 9e-6) for step in range(100)]
    (event,) = events([RunObservation(step, learning_rate=rate) for step, rate in enumerate(rates)])
    assert (event.step, event.what) == (60, "learning-rate")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("offset", range(3))
def test_a_shift_of_the_loss_is_found_within_ten_steps(seed: int, offset: int) -> None:
    loss, shift_step = losses(seed), 200 + 2 * offset
    loss[shift_step:] += 0.6
    shifts = [event for event in events(observed(loss, norms(seed))) if event.what == "loss"]
    assert shift_step < shifts[0].step <= shift_step + 10
    assert shifts[0].size > 0


def test_a_shift_of_the_gradient_norm_is_found_within_ten_steps() -> None:
    norm = norms(1)
    norm[203:] *= 5
    (event,) = events(observed(losses(1), norm))
    assert event.what == "gradient"
    assert 203 < event.step <= 213


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_at_once_and_forgotten(bad: float) -> None:
    loss, norm = losses(2), norms(2)
    loss[150], norm[250] = bad, bad
    assert [(e.step, e.what) for e in events(observed(loss, norm))] == [
        (151, "nonfinite"),
        (251, "nonfinite"),
    ]
    skipped = [False] * 50 + [True] + [False] * 10
    assert [(e.step, e.what) for e in events(observed(loss[:61], skipped=skipped))] == [
        (51, "nonfinite")
    ]


def test_other_betas_or_another_layout_are_an_event() -> None:
    optimizers: list[object] = (
        [((0.9, 0.999), "4 leaves")] * 20 + [None] + [((0.9, 0.95), "4 leaves")] * 20
    )
    detected = events(observed(losses(3)[:41], optimizer=optimizers))
    assert [(event.step, event.what) for event in detected] == [(22, "optimizer")]


def test_a_resume_is_an_event_and_a_new_beginning() -> None:
    """The caller reports a resume, or the step does not ascend; earlier rates are no trend."""
    resumed = [RunObservation(1, resumed=True)]
    assert [event.what for event in events(resumed)] == ["resume"]
    run = [RunObservation(step, 2.0, learning_rate=1e-5) for step in range(30)]
    repeated = [RunObservation(step, 2.0, learning_rate=9e-5) for step in range(20, 40)]
    assert [(event.step, event.what) for event in events([*run, *repeated])] == [(20, "resume")]
    later = [RunObservation(50, 2.0, learning_rate=1e-5, resumed=True)]
    assert [(event.step, event.what) for event in events([*run, *later])] == [(50, "resume")]


def test_the_first_windows_are_not_judged() -> None:
    assert events(observed(np.linspace(9, 2, 40))) == []
    assert events(observed(np.full(STEPS, 2.0))) == []
