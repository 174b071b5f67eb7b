"""Test the events that step counts show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deltacheck.policy.activity import Activity

SIZES = {"a": 96, "b": 4, "c": 900}


def events(*rows: Sequence[int]) -> list[tuple[int, str, float]]:
    """Return the events of saves with these counts of the parameters a, b and c."""
    activity, raised = Activity(), []
    for step, row in enumerate(rows):
        activity, new = activity.advance(step, dict(zip(SIZES, row, strict=False)), SIZES)
        raised += [(event.step, event.what, round(event.size, 3)) for event in new]
    return raised


def test_counts_that_advance_raise_no_event() -> None:
    assert events(*([n] * 3 for n in (0, 1, 5, 6, 50))) == []


@pytest.mark.parametrize("first", [0, 3])
def test_a_count_that_goes_back_is_a_new_optimizer_once(first: int) -> None:
    rows = [[40, 40, 40], [50, 50, 50], [first] * 3, [first + 10] * 3, [first + 20] * 3]
    assert events(*rows) == [(2, "optimizer", 0.0)]


def test_parameters_that_stand_still_are_frozen_and_unfrozen_once() -> None:
    counts = [10, 20, 30, 40, 40, 40, 40, 50, 60]
    rows = [[count, count, 10 * n] for n, count in enumerate(counts)]
    assert events(*rows) == [(4, "frozen", 0.1), (7, "unfrozen", 0.1)]


def test_a_small_parameter_does_not_disturb_the_others() -> None:
    counts = [10, 20, 30, 40, 40, 40, 40, 50]
    assert events(*([10 * n, count, 10 * n] for n, count in enumerate(counts))) == []


def test_an_expert_that_stands_still_at_random_raises_no_event() -> None:
    counts = [10, 11, 11, 12, 12, 12, 13, 14, 14, 15]
    assert events(*([count, 10 * n, 10 * n] for n, count in enumerate(counts))) == []


def test_saves_between_two_updates_freeze_nothing() -> None:
    assert events(*([count] * 3 for count in (1, 2, 3, 4, 4, 4, 5, 5, 6))) == []
