"""Verified content of a leaf in memory: chunks, boxes and arrays.

A chunk is a run of consecutive elements of a leaf in C order. Chunk numbers, byte offsets and boxes
are converted into each other here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.errors import BudgetExceeded
from deltacheck.leaf import grid, tiles
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Loaded(NamedTuple):
    """Verified bytes of a leaf.

    Attributes:
        spec: The leaf.
        chunks: Numbers of the loaded chunks, ascending.
        data: Their bytes, one chunk after the other; uint8, 1-D.
    """

    spec: LeafSpec
    chunks: list[int]
    data: U8


def chunk_bytes(spec: LeafSpec, chunks: Sequence[int]) -> int:
    """Return the size of some chunks in memory. No chunk may be named twice."""
    # A leaf that is read whole needs no table of its chunks, which is long for a large leaf.
    if len(chunks) == spec.chunk_count:
        return spec.raw_bytes
    return int(np.diff(spec.bounds())[list(chunks)].sum()) * spec.word_bytes if chunks else 0


def byte_extents(spec: LeafSpec, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the byte range of each chunk in a buffer that holds only these chunks."""
    sizes = np.diff(spec.bounds())[chunks] * np.uint64(spec.word_bytes)
    ends = np.cumsum(sizes).astype(np.int64)
    return list(zip((ends - sizes.astype(np.int64)).tolist(), ends.tolist(), strict=True))


def element_runs(spec: LeafSpec, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the elements of some chunks as ranges ``(first, stop)``, neighbours as one range."""
    if len(chunks) == spec.chunk_count:
        return [(0, math.prod(spec.shape))] if chunks else []
    bounds = spec.bounds() // np.uint64(spec.element.item_bytes // spec.word_bytes)
    runs: list[tuple[int, int]] = []
    for number in chunks:
        first, stop = int(bounds[number]), int(bounds[number + 1])
        if runs and runs[-1][1] == first:
            first = runs.pop()[0]
        runs.append((first, stop))
    return runs


def boxes_of_chunks(spec: LeafSpec, chunks: Sequence[int]) -> list[Box]:
    """Return boxes of whole chunks that hold some chunks, in the order of the elements."""
    if len(chunks) == spec.chunk_count:
        return [tiles.whole(spec.shape)]
    return [
        box
        for first, stop in element_runs(spec, chunks)
        for box in tiles.boxes_of_range(spec.shape, first, stop)
    ]


def chunks_of_box(spec: LeafSpec, box: Sequence[slice]) -> list[int]:
    """Return the chunks that a box touches, ascending."""
    if tuple(box) == tiles.whole(spec.shape):
        return list(range(spec.chunk_count))
    return grid.chunks_of_slices(spec.shape, spec.chunk, box)


def as_array(item: Loaded) -> Array:
    """Return a leaf as an array of its own dtype and shape. All of its chunks must be loaded."""
    return item.data.view(item.spec.element.numpy).reshape(item.spec.shape)


def cut_box(item: Loaded, box: Box) -> Array:
    """Copy a box (bounded, step 1) out of the loaded chunks, which must cover it."""
    spec = item.spec
    out = np.empty([s.stop - s.start for s in box], spec.element.numpy)
    touched_chunks = set(chunks_of_box(spec, box))
    for chunk, (begin, end) in zip(item.chunks, byte_extents(spec, item.chunks), strict=True):
        # More chunks may be loaded than this box touches, for other boxes of the leaf.
        if chunk not in touched_chunks:
            continue
        chunk_box = grid.box(spec.shape, spec.chunk, chunk)
        values = (
            item.data[begin:end]
            .view(spec.element.numpy)
            .reshape([s.stop - s.start for s in chunk_box])
        )
        common = tuple(
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(chunk_box, box, strict=True)
        )
        out[tiles.inside(common, box)] = values[tiles.inside(common, chunk_box)]
    return out


def box_bytes(spec: LeafSpec, box: Sequence[slice]) -> int:
    """Return the size of a bounded box of a leaf in memory."""
    size: int = math.prod(s.stop - s.start for s in box) * spec.element.item_bytes
    return size


def bounded_slices(
    path: str, shape: Sequence[int], slices: Sequence[slice | int]
) -> tuple[slice, ...]:
    """Return a user's slices of a leaf as bounded step-1 slices, one for each axis.

    Args:
        path: The leaf, for error messages.
        shape: Its shape.
        slices: At most one for each axis; missing ones take the whole axis. An integer keeps its
            axis, with length 1.

    Raises:
        ValueError: There are more slices than axes, a step is not 1, or an index is out of range.
    """
    if len(slices) > len(shape):
        raise ValueError(
            f"leaf {path!r} has shape {tuple(shape)}; {len(slices)} slices are too many"
        )
    bounded = []
    for size, item in zip(
        shape, [*slices, *[slice(None)] * (len(shape) - len(slices))], strict=True
    ):
        if isinstance(item, int):
            if not -size <= item < size:
                raise ValueError(
                    f"leaf {path!r}: index {item} is out of range for an axis of {size}"
                )
            item = slice(item % size, item % size + 1)
        start, stop, step = item.indices(size)
        if step != 1:
            raise ValueError(f"leaf {path!r}: only slices of step 1 can be restored, not {item}")
        # A stop before the start selects nothing, as in NumPy.
        bounded.append(slice(start, max(start, stop)))
    return tuple(bounded)


def machine_bytes() -> int:
    """Return the memory of this machine, which is the default budget of a restore."""
    # All physical memory, whoever uses it: the default budget refuses only what can never fit.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_budget(max_bytes: int | None, size: int) -> None:
    """Raise ``BudgetExceeded`` if a restore would allocate more than its budget.

    Args:
        max_bytes: The budget; ``None``: the memory of the machine.
        size: Bytes that the restore would allocate.
    """
    budget = machine_bytes() if max_bytes is None else max_bytes
    if size > budget:
        raise BudgetExceeded(
            f"the restore would allocate {size} bytes, more than max_bytes={budget}; name fewer"
            " leaves or slices"
        )
