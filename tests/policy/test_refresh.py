"""Test that the writes of reused moments are spread over saves and never late."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deltacheck.policy import adam
from deltacheck.policy.refresh import Clock, places

SIZES = {f"layers.{n}": 300 if n % 3 == 0 else 1000 for n in range(36)}


def writes(every: int, first: int, saves: int, sizes: dict[str, int]) -> dict[str, list[int]]:
    """Return the steps at which each pair is written: when it must be, or in its turn."""
    clock, written = Clock(), {name: [] for name in sizes}  # type: dict[str, list[int]]
    for step in range(first, first + every * saves, every):
        max_age = adam.permitted_staleness(0.1, step, 0.999)
        later = clock.advance(step, max_age)
        for name, place in places(sizes).items():
            is_late = not written[name] or step - written[name][-1] > max_age
            if is_late or clock.passes(later, place):
                written[name].append(step)
        clock = later
    return written


@pytest.mark.parametrize("every", [1, 10, 25])
@pytest.mark.parametrize("first", [110, 1500])
def test_no_save_after_the_first_carries_most_pairs(every: int, first: int) -> None:
    saves = 400 // every
    written = writes(every, first, saves, SIZES)
    by_step: dict[int, int] = {}
    for name, steps in written.items():
        for step in steps[1:]:
            by_step[step] = by_step.get(step, 0) + SIZES[name]
    # The period grows with the age of the run, so early saves carry more than the mean.
    period = adam.permitted_staleness(0.1, first, 0.999) // every + 1
    largest = max(SIZES.values())
    assert max(by_step.values()) <= sum(SIZES.values()) / period + 2 * largest


def test_a_pair_is_kept_about_as_long_as_it_may_be() -> None:
    for steps in writes(10, 2000, 100, SIZES).values():
        ages = [later - before for before, later in pairwise(steps[1:])]
        assert set(ages) == {140}  # 138 steps are permitted, and saves are 10 apart


def test_turns_depend_on_names_and_sizes_only() -> None:
    backwards = dict(reversed(SIZES.items()))
    assert places(SIZES) == places(backwards)
    assert sorted(places({"a": 1}).values()) == [0.5]
    assert places({}) == {}


def test_a_clock_stands_still_without_updates_and_after_the_count_went_back() -> None:
    clock = Clock().advance(100, 50).advance(110, 50)
    assert clock.phase == pytest.approx(1 / 6)
    assert clock.advance(110, 50).phase == clock.phase
    assert clock.advance(10, 50) == Clock(clock.phase, 10)
