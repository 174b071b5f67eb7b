"""Arithmetic on shapes: the chunks of a leaf and the shards of its zarr array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 1 << 20  # target size of a chunk, the unit that is encoded, hashed and read
SHARD_BYTES = 32 << 20  # target size of a zarr shard, which is one file of a keyframe
# Smaller leaves share one array per storage type. A file for each would cost more than its content.
PACK_BELOW_BYTES = 256 << 10


def chunk_shape(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return the standard chunk shape of a leaf: about ``CHUNK_BYTES``, contiguous in C order.

    The form is ``(1, .., 1, rows, *whole trailing dimensions)``, so chunks in C order of the grid
    are consecutive runs of the leaf's memory. The result depends on shape and item size only, so
    that all frameworks and processes agree.

    Args:
        shape: The shape of the leaf.
        item_bytes: Bytes of one element.
    """
    # Readers compute this shape for tiles and derived leaves, so it is fixed by section 1 of the
    # format.
    budget = max(1, CHUNK_BYTES // item_bytes)
    chunk = [1] * len(shape)
    for axis in range(len(shape) - 1, -1, -1):
        chunk[axis] = max(1, min(shape[axis], budget))
        if chunk[axis] < shape[axis]:
            break
        budget //= max(1, chunk[axis])
    return tuple(chunk)


def is_contiguous(shape: Sequence[int], chunk: Sequence[int]) -> bool:
    """Return True if chunks of this shape are consecutive runs of a C-ordered leaf.

    Format version 1 requires this form.
    """
    if len(shape) != len(chunk) or any(c < 1 for c in chunk):
        return False
    axis = next((k for k, c in enumerate(chunk) if c != 1), len(chunk))
    return all(c >= s for s, c in zip(shape[axis + 1 :], chunk[axis + 1 :], strict=True))


def grid_shape(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks along each axis."""
    return tuple(-(-s // c) for s, c in zip(shape, chunk, strict=True))


def box(shape: Sequence[int], chunk: Sequence[int], number: int) -> tuple[slice, ...]:
    """Return the box of a chunk. Chunks are counted in C order of the grid."""
    slices = []
    for s, c in zip(reversed(shape), reversed(chunk), strict=True):
        number, i = divmod(number, -(-s // c))
        slices.append(slice(i * c, min((i + 1) * c, s)))
    return tuple(reversed(slices))


@lru_cache(256)  # leaves have few shapes
def bounds(
    shape: tuple[int, ...], chunk: tuple[int, ...], words_per_item: int = 1
) -> NDArray[np.uint64]:
    """Return the offsets of the chunks in words, from 0 to the number of words.

    Args:
        shape: The shape of the leaf.
        chunk: The chunk shape, for which ``is_contiguous(shape, chunk)`` must hold.
        words_per_item: Words of one element.

    Returns:
        A uint64 array of shape ``(chunks + 1,)``, read-only.
    """
    sizes = np.ones((1,), np.uint64)
    for s, c in zip(shape, chunk, strict=True):
        axis_sizes = np.minimum(c, s - np.arange(0, s, c, dtype=np.int64)).astype(np.uint64)
        sizes = np.multiply.outer(sizes, axis_sizes).reshape(-1)
    offsets: NDArray[np.uint64] = np.zeros(sizes.size + 1, np.uint64)
    np.cumsum(sizes * np.uint64(words_per_item), out=offsets[1:])
    offsets.flags.writeable = False  # the cache gives the same array to all callers
    return offsets


@lru_cache(1024)
def chunk_count(shape: tuple[int, ...], chunk: tuple[int, ...]) -> int:
    """Return the number of chunks of a leaf."""
    return math.prod(grid_shape(shape, chunk))


def shard_shape(shape: Sequence[int], chunk: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return the zarr shard shape of a natural array: whole chunks, about ``SHARD_BYTES``.

    A shard is no larger than the array needs.
    """
    shard = list(chunk)
    chunks = max(1, SHARD_BYTES // max(1, math.prod(chunk) * item_bytes))
    # From the last axis, so that a shard covers long runs of memory.
    for axis in range(len(shape) - 1, -1, -1):
        times = max(1, min(chunks, -(-shape[axis] // chunk[axis])))
        shard[axis] = chunk[axis] * times
        chunks //= times
    return tuple(shard)


def chunks_of_slices(
    shape: Sequence[int], chunk: Sequence[int], slices: Sequence[slice]
) -> list[int]:
    """Return the numbers of the chunks that a box of step-1 slices touches, ascending."""
    grid = grid_shape(shape, chunk)
    spans = [
        range(s.start // c, -(-s.stop // c) if s.stop > s.start else s.start // c)
        for s, c in zip(slices, chunk, strict=True)
    ]
    if any(len(span) == 0 for span in spans):
        return []
    if not spans:
        return [0]
    return np.ravel_multi_index(np.meshgrid(*spans, indexing="ij"), grid).reshape(-1).tolist()
