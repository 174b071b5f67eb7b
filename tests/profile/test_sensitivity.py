"""Test that candidates are judged element by element, never by the mean loss alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.repaired import repair
from deltacheck.policy import adam
from deltacheck.profile.record import AdamRule
from deltacheck.profile.sensitivity import (
    MOST_LOST_SHARE,
    Outcome,
    Verdict,
    _reasons,
    changed,
    lost_steps,
    measure,
    rolled_back,
)

RATE, STEPS, ROWS, WIDTH = 1e-3, 12, 40, 8
RULE = AdamRule(0.9, 0.999)
RARE = np.arange(30, ROWS)  # rows that a single batch touches

State = dict[str, Any]


class Embeddings:
    """A table that learns noisy targets row by row with Adam.

    Adam also moves the rows that a batch does not touch.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.targets = random.normal(size=(ROWS, WIDTH))
        self.state: State = {
            "table": np.zeros((ROWS, WIDTH), np.float32),
            "adam": [np.zeros((ROWS, WIDTH), np.float32), np.zeros((ROWS, WIDTH), np.float32)],
            "step": 0,
        }

    def train(self, batch: tuple[int, list[int]]) -> float:
        seed, rows = batch
        table, (m, v) = self.state["table"], self.state["adam"]
        error = np.zeros_like(table)
        error[rows] = (
            table[rows]
            - self.targets[rows]
            + np.random.default_rng(seed).normal(size=(len(rows), WIDTH))
        )
        m += np.float32(0.1) * (error - m)
        v += np.float32(0.001) * (error**2 - v)
        self.state["step"] += 1
        t = self.state["step"]
        table -= RATE * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        return float(np.mean((table - self.targets)[:30] ** 2))


def batches(count: int, first_seed: int) -> list[tuple[int, list[int]]]:
    return [
        (seed, sorted({seed * 7 % 30, seed * 11 % 30, seed * 13 % 30}))
        for seed in range(first_seed, first_seed + count)
    ]


@pytest.fixture(scope="module")
def states() -> tuple[State, State]:
    """Return (live, ten steps older); in between, the rare rows are touched for the first time."""
    training = Embeddings()
    for batch in batches(60, 0):
        training.train(batch)
    older = copy.deepcopy(training.state)
    for seed, rows in batches(9, 60):
        training.train((seed, [*rows, *RARE] if seed == 66 else rows))
    training.train(batches(1, 69)[0])
    return copy.deepcopy(training.state), older


def run(state: State, order: int) -> Outcome:
    training = Embeddings()
    training.state = copy.deepcopy(state)
    recorded = batches(STEPS, 100)
    if order:
        recorded = [recorded[i] for i in np.random.default_rng(order).permutation(STEPS)]
    losses = tuple(training.train(batch) for batch in recorded)
    return Outcome(losses, weights(training.state))


def weights(state: State) -> dict[str, Any]:
    return {"table": state["table"]}


def moments(state: State) -> Iterator[tuple[str, Any, Any]]:
    yield "table", state["adam"][0], state["adam"][1]


def verdicts(state: State, **candidates: State) -> dict[str, Verdict]:
    results = measure(run, state, candidates, lr=RATE, weights=weights, moments=moments, rule=RULE)
    return {verdict.name: verdict for verdict in results}


def is_second(path: str) -> bool:
    return path == "adam/1"


def test_a_stale_second_moment_that_destroys_rows_under_a_flat_loss_is_rejected(
    states: tuple[State, State],
) -> None:
    live, older = states
    verdict = verdicts(live, stale=rolled_back(live, older, is_second))["stale"]
    assert verdict.loss_change <= verdict.noise_sd  # this alone would let it pass
    assert verdict.element_change > 300
    assert verdict.law_violations == len(RARE) * WIDTH
    assert not verdict.accepted
    assert any("learning rates away" in reason for reason in verdict.reasons)
    assert any("too small for their first one" in reason for reason in verdict.reasons)


def test_the_same_second_moment_is_accepted_once_it_is_repaired_by_the_law(
    states: tuple[State, State],
) -> None:
    live, older = states
    stale = rolled_back(live, older, is_second)
    rescale = adam.bias_rescale(live["step"], older["step"], RULE.beta2)
    limit = adam.moment_limit(RULE.beta1, RULE.beta2)
    repaired = stale | {
        "adam": [stale["adam"][0], repair(stale["adam"][1] * rescale, stale["adam"][0], limit)]
    }
    verdict = verdicts(live, repaired=repaired)["repaired"]
    assert verdict.law_violations == 0
    assert verdict.element_change < 50
    assert not any(
        "second moment" in reason or "learning rates away" in reason for reason in verdict.reasons
    )


def test_the_exact_state_itself_is_accepted_and_loses_nothing(states: tuple[State, State]) -> None:
    verdict = verdicts(states[0], same=copy.deepcopy(states[0]))["same"]
    assert verdict.accepted
    assert (
        verdict.loss_change,
        verdict.element_change,
        verdict.law_violations,
    ) == (0, 0, 0)
    assert verdict.lost_steps == pytest.approx(0)
    assert verdict.noise_sd > 0


def test_a_stale_weight_loses_about_as_many_steps_as_it_is_old(states: tuple[State, State]) -> None:
    live, older = states
    verdict = verdicts(live, stale=rolled_back(live, older, lambda path: path == "table"))["stale"]
    assert verdict.lost_steps > 2
    assert not verdict.accepted


def test_a_second_moment_within_half_an_octave_is_accepted(states: tuple[State, State]) -> None:
    live, _ = states
    coarse = changed(
        live,
        lambda path, leaf: np.exp2(np.round(np.log2(leaf + 1e-38))) if is_second(path) else leaf,
    )
    verdict = verdicts(live, coarse=coarse)["coarse"]
    assert verdict.accepted, verdict.reasons


def test_progress_is_counted_along_the_way_of_the_exact_run() -> None:
    def at(*values: float) -> dict[str, Any]:
        return {"w": np.array(values, np.float32)}

    assert lost_steps(at(0, 0), at(4, 0), at(1, 7), steps=20) == pytest.approx(15)
    assert lost_steps(at(0, 0), at(0, 0), at(1, 0), steps=20) == 0  # nothing to lose


def test_a_result_that_is_not_a_number_is_rejected(states: tuple[State, State]) -> None:
    def broken(state: State, order: int) -> Outcome:
        outcome = run(state, order)
        if not state["table"].any():
            nan = np.full_like(state["table"], np.nan)
            outcome = replace(outcome, weights={"table": nan}, losses=(float("nan"),) * STEPS)
        return outcome

    live = states[0]
    zero = live | {"table": np.zeros_like(live["table"])}
    (verdict,) = measure(
        broken, live, {"zero": zero}, lr=RATE, weights=weights, moments=moments, rule=None
    )
    assert not verdict.accepted
    assert len(verdict.reasons) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss_change": 2.0}, "the loss grows by 2"),
        ({"loss_change": float("nan")}, "the loss grows by nan"),
        ({"lost_steps": 10 * MOST_LOST_SHARE + 0.1}, "steps are lost"),
        ({"element_change": 51.0}, "51 learning rates away"),
        ({"law_violations": 3}, "3 elements have a second moment"),
    ],
)
def test_each_reason_rejects_a_candidate(changes: dict[str, Any], reason: str) -> None:
    harmless = Verdict("moments", True, 0.1, 1.0, 20.0, 0.5, 0, ())
    assert list(_reasons(harmless, 10)) == []
    (rejection,) = _reasons(replace(harmless, **changes), 10)
    assert reason in rejection


def test_held_out_losses_go_before_training_losses() -> None:
    outcome = Outcome((3.0, 1.0), {})
    assert outcome.loss == 2.0
    assert replace(outcome, evaluation=5.0).loss == 5.0


def test_candidates_leave_the_state_that_they_are_made_of_alone(
    states: tuple[State, State],
) -> None:
    live, older = states
    before = copy.deepcopy(live)
    coarse = changed(live, lambda path, leaf: leaf * 2 if path == "table" else leaf)
    assert np.array_equal(coarse["table"], live["table"] * 2)
    stale = rolled_back(live, older, is_second)
    assert np.array_equal(stale["adam"][1], older["adam"][1])
    stale["adam"][0] = None
    assert np.array_equal(live["table"], before["table"])
    assert np.array_equal(live["adam"][1], before["adam"][1])
    assert coarse["adam"][0] is live["adam"][0]
    with pytest.raises(KeyError, match="adam/1"):
        rolled_back(live, {"table": live["table"]}, is_second)


def test_a_measurement_without_noise_or_rate_is_refused(states: tuple[State, State]) -> None:
    for wrong in ({"orders": 1}, {"lr": 0.0}):
        options: dict[str, Any] = {
            "lr": RATE,
            "weights": weights,
            "moments": moments,
            "rule": RULE,
        } | wrong
        with pytest.raises(ValueError, match="not"):
            measure(run, states[0], {}, **options)
    with pytest.raises(ValueError, match="one side only"):
        lost_steps({"a": np.zeros(1, np.float32)}, {"b": np.zeros(1, np.float32)}, {}, 1)
