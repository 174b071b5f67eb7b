"""Which chunks of a leaf lie whole in which of its shards, so that each device encodes its own and
nothing is gathered.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import jax
import numpy as np

from deltacheck.codec.base import U64


class ShardChunks(NamedTuple):
    """A shard that is a run of the leaf's chunks: ``chunks`` of them from ``first_chunk`` on."""

    shard: int  # index in addressable_shards
    first_chunk: int
    chunks: int


def chunks_of_shards(leaf: jax.Array, bounds: U64, word_bytes: int) -> list[ShardChunks] | None:
    """The chunks of every shard, ascending; ``None`` where a shard is no run of whole chunks, or
    where
    two hold the same.

    Chunks are cut from the leaf and not from its shards, so that a chain goes on over a change of
    sharding. A shard is a run of them where it is contiguous in the leaf's C order and begins and
    ends between chunks: arrays cut along their first axis, mostly.
    """
    shards = leaf.addressable_shards
    if len(shards) < 2 or any(shard.replica_id != 0 for shard in shards):
        return None
    found = []
    for number, shard in enumerate(shards):
        run = _run(leaf.shape, shard.index)
        if run is None:
            return None
        edges = np.array(run, np.uint64) * np.uint64(leaf.dtype.itemsize) // np.uint64(word_bytes)
        first, stop = np.searchsorted(bounds, edges).tolist()
        if stop >= bounds.size or not np.array_equal(bounds[[first, stop]], edges):
            return None
        found.append(ShardChunks(number, first, stop - first))
    return sorted(found, key=lambda one: one.first_chunk)


def _run(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[int, int] | None:
    """The elements, in C order, that a box holds; ``None`` where they are not consecutive or
    none.
    """
    starts, stops = zip(
        *(part.indices(size)[:2] for part, size in zip(index, shape, strict=True)), strict=True
    )
    extents = [stop - start for start, stop in zip(starts, stops, strict=True)]
    cut = next((axis for axis, extent in enumerate(extents) if extent != 1), len(shape) - 1)
    if prod(extents) == 0 or extents[cut + 1 :] != list(shape[cut + 1 :]):
        return None
    begin = int(np.ravel_multi_index(starts, shape))
    return begin, begin + prod(extents)
