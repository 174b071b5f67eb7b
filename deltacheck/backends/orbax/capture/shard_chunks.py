"""Find the shards of a leaf that consist of whole chunks.

Each device can encode the chunks of its own shard, so that nothing is gathered.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import jax
import numpy as np

from deltacheck.codec.base import U64


class ShardChunks(NamedTuple):
    """A shard that is a run of ``chunks`` chunks of the leaf, from ``first_chunk`` on."""

    shard: int  # index in addressable_shards
    first_chunk: int
    chunks: int


def chunks_of_shards(leaf: jax.Array, bounds: U64, word_bytes: int) -> list[ShardChunks] | None:
    """Return the chunks of every shard, ascending.

    Chunks are cut from the leaf and not from its shards, so that a chain continues after a change
    of the sharding. A shard is a run of chunks if it is contiguous in the leaf's C order, and
    begins and ends between chunks. That holds mostly for arrays that are cut along their first
    axis.

    Returns:
        The runs; ``None`` if a shard is not a run of whole chunks, or if two shards hold the same.
    """
    shards = leaf.addressable_shards
    # A replica would be encoded twice, and a single shard needs no search.
    if len(shards) < 2 or any(shard.replica_id != 0 for shard in shards):
        return None
    runs = []
    for number, shard in enumerate(shards):
        run = _run(leaf.shape, shard.index)
        if run is None:
            return None
        # In words, as the bounds are. An element of complex128 has two words.
        edges = np.array(run, np.uint64) * np.uint64(leaf.dtype.itemsize) // np.uint64(word_bytes)
        first, stop = np.searchsorted(bounds, edges).tolist()
        # ``searchsorted`` gives the next bound; the shard must begin and end exactly at one.
        if stop >= bounds.size or not np.array_equal(bounds[[first, stop]], edges):
            return None
        runs.append(ShardChunks(number, first, stop - first))
    return sorted(runs, key=lambda run: run.first_chunk)


def _run(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[int, int] | None:
    """Return the elements of a box, in C order, as a range.

    Return ``None`` if they are not consecutive or if there are none.
    """
    starts, stops = zip(
        *(part.indices(size)[:2] for part, size in zip(index, shape, strict=True)), strict=True
    )
    extents = [stop - start for start, stop in zip(starts, stops, strict=True)]
    # The first axis with more than one element may be cut. All axes after it must be whole, else
    # the elements of the box are not consecutive.
    cut = next((axis for axis, extent in enumerate(extents) if extent != 1), len(shape) - 1)
    if prod(extents) == 0 or extents[cut + 1 :] != list(shape[cut + 1 :]):
        return None
    begin = int(np.ravel_multi_index(starts, shape))
    return begin, begin + prod(extents)
