"""Cuts and owners that follow a rule have a short form, and any others one that is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltacheck.codec.regular import Axis, Series, length, numbers, series


@given(st.integers(1, 400), st.integers(1, 40))
def test_even_divisions_are_three_numbers_at_most(size: int, parts: int) -> None:
    starts, position = [0], 0
    for part in torch.arange(size).chunk(parts):
        position += len(part)
        starts.append(position)
    balanced = sorted({size * i // parts for i in range(parts + 1)})
    for cuts in (starts, balanced):
        axis = Axis.of(cuts)
        assert not axis.edges
        assert axis.is_possible
        assert (axis.cuts(), axis.count) == (tuple(cuts), len(cuts) - 1)


@given(st.sets(st.integers(1, 50), min_size=1))
def test_any_cuts_come_back(cuts: set[int]) -> None:
    axis = Axis.of([0, *sorted(cuts)])
    assert axis.is_possible
    assert (axis.cuts(), axis.count) == ((0, *sorted(cuts)), len(cuts))


@given(st.lists(st.integers(-3, 3) | st.just(7), max_size=60))
def test_any_numbers_come_back_from_their_series(values: list[int]) -> None:
    short = series(values)
    assert list(numbers(short)) == values
    assert length(short) == len(values)


@pytest.mark.parametrize(
    ("values", "short"),
    [
        (range(8, 1024), ((8, 1, 1016),)),
        ([5] * 100, ((5, 0, 100),)),
        ([*range(0, 64, 8), *range(1, 64, 8)], ((0, 8, 8), (1, 8, 8))),
        ([3, 9, 4], (3, 9, 4)),
    ],
)
def test_the_owners_of_a_mesh_are_few_series(values: list[int], short: Series) -> None:
    assert series(values) == short


def test_a_series_without_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="no numbers"):
        length(((0, 1, 0),))
