"""Chunk grids: consecutive in memory, of the right size, each element once."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltacheck.leaf import grid

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(shapes, st.integers(1, 40))
def test_chunks_are_consecutive_runs_that_cover_the_leaf(
    shape: tuple[int, ...], budget: int
) -> None:
    chunk = small_chunk(shape, budget)
    assert grid.is_contiguous(shape, chunk)
    if math.prod(shape) == 0:
        return
    elements = np.arange(math.prod(shape)).reshape(shape)
    bounds = grid.bounds(shape, chunk)
    for number in range(grid.chunk_count(shape, chunk)):
        box = grid.box(shape, chunk, number)
        assert elements[box].reshape(-1).tolist() == list(
            range(int(bounds[number]), int(bounds[number + 1]))
        )
    assert bounds[-1] == elements.size


def small_chunk(shape: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """Return ``grid.chunk_shape`` for a target of ``budget`` elements."""
    return grid.chunk_shape(shape, max(1, grid.CHUNK_BYTES // budget))


@given(shapes, st.integers(1, 40), st.data())
def test_the_chunks_of_a_box_are_those_that_it_touches(
    shape: tuple[int, ...], budget: int, data: st.DataObject
) -> None:
    chunk = small_chunk(shape, budget)
    slices = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        slices.append(slice(start, data.draw(st.integers(start, size))))
    touched = [
        number
        for number in range(grid.chunk_count(shape, chunk))
        if all(
            max(a.start, b.start) < min(a.stop, b.stop)
            for a, b in zip(grid.box(shape, chunk, number), slices, strict=True)
        )
    ]
    assert grid.chunks_of_slices(shape, chunk, slices) == touched


def test_a_large_leaf_is_cut_into_chunks_of_the_target_size_and_shards_of_whole_chunks() -> None:
    shape = (4096, 4096)
    chunk = grid.chunk_shape(shape, 4)
    assert math.prod(chunk) * 4 == grid.CHUNK_BYTES
    shard = grid.shard_shape(shape, chunk, 4)
    assert math.prod(shard) * 4 == grid.SHARD_BYTES
    assert all(s % c == 0 for s, c in zip(shard, chunk, strict=True))


def test_column_blocks_are_not_contiguous() -> None:
    assert not grid.is_contiguous((8, 8), (8, 4))
    assert not grid.is_contiguous((2, 8, 8), (2, 4, 8))
    assert grid.is_contiguous((8, 8), (1, 4))
    assert not grid.is_contiguous((8, 8), (0, 8))
