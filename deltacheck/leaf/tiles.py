"""Arithmetic on boxes: the tiles of a leaf that several ranks hold.

A leaf is cut along each of its axes. The tiles are the cells between the cuts, counted in C order.
Each tile is stored like a leaf, under a path that names its origin.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Box: TypeAlias = tuple[slice, ...]  # bounded, of step 1, one slice an axis
Cuts: TypeAlias = tuple[tuple[int, ...], ...]  # per axis, ascending, from 0 to its size

# Separates the leaf path from the origin of a tile. No leaf path contains it: in a key, a percent
# sign is followed by two hexadecimal digits or ends the key.
_MARK = "%@"


class Overlap(NamedTuple):
    """The intersection of a tile and a box.

    Attributes:
        number: The number of the tile.
        in_tile: The intersection in coordinates of the tile.
        in_box: The intersection in coordinates of the box.
    """

    number: int
    in_tile: Box
    in_box: Box


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole leaf."""
    return tuple(slice(0, size) for size in shape)


def inside(box: Box, outer: Box) -> Box:
    """Return a box in coordinates of another box that contains it."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True)
    )


def shape_of(cuts: Cuts) -> tuple[int, ...]:
    """Return the shape of the leaf."""
    return tuple(edges[-1] for edges in cuts)


def grid_of(cuts: Cuts) -> tuple[int, ...]:
    """Return the number of tiles along each axis."""
    return tuple(len(edges) - 1 for edges in cuts)


def count(cuts: Cuts) -> int:
    """Return the number of tiles."""
    return math.prod(grid_of(cuts))


def box(cuts: Cuts, number: int) -> Box:
    """Return the box of a tile."""
    position = np.unravel_index(number, grid_of(cuts))
    return tuple(slice(edges[i], edges[i + 1]) for edges, i in zip(cuts, position, strict=True))


def name(path: str, origin: Box) -> str:
    """Return the path that a tile is stored under.

    Args:
        path: The leaf.
        origin: The box of the tile.
    """
    return f"{path}{_MARK}{','.join(str(s.start) for s in origin)}"


def leaf_of(stored_path: str) -> str:
    """Return the leaf of a stored path: the path itself, or the leaf that it is a tile of."""
    return stored_path.rpartition(_MARK)[0] if _MARK in stored_path else stored_path


def origin(stored_path: str) -> tuple[int, ...]:
    """Return the position of a tile in its leaf; ``(0,)`` for a leaf that is stored whole."""
    return (
        tuple(int(start) for start in stored_path.rpartition(_MARK)[2].split(","))
        if _MARK in stored_path
        else (0,)
    )


def is_name(stored_path: str) -> bool:
    """Return True if a stored path is the path of a tile."""
    return _MARK in stored_path


def numbered(cuts: Cuts, stored_path: str) -> int:
    """Return the number of the tile that is stored under a path.

    Raises:
        LookupError: No tile has this origin.
    """
    number = 0
    origin = stored_path.rpartition(_MARK)[2].split(",")
    if len(origin) != len(cuts):
        raise LookupError(stored_path)
    for edges, text in zip(cuts, origin, strict=True):
        start = int(text) if text.isdecimal() and len(text) < 20 else -1
        i = bisect.bisect_left(edges, start, 0, len(edges) - 1)
        if str(edges[i]) != text or i == len(edges) - 1:
            raise LookupError(stored_path)
        number = number * (len(edges) - 1) + i
    return number


def is_possible(cuts: Cuts) -> bool:
    """Return True if cuts are valid: at least one axis, and ascending from 0 along each axis."""
    return bool(cuts) and all(
        len(edges) > 1 and edges[0] == 0 and all(a < b for a, b in itertools.pairwise(edges))
        for edges in cuts
    )


def overlaps(cuts: Cuts, box: Box) -> Iterator[Overlap]:
    """Yield the intersections of a box with the tiles that it touches, ascending by tile."""
    spans = []
    for edges, s in zip(cuts, box, strict=True):
        first, stop = bisect.bisect_right(edges, s.start) - 1, bisect.bisect_left(edges, s.stop)
        spans.append(range(first, stop if s.stop > s.start else first))
    grid = grid_of(cuts)
    for position in itertools.product(*spans):
        in_tile, in_box = [], []
        for edges, i, s in zip(cuts, position, box, strict=True):
            start, stop = max(edges[i], s.start), min(edges[i + 1], s.stop)
            in_tile.append(slice(start - edges[i], stop - edges[i]))
            in_box.append(slice(start - s.start, stop - s.start))
        yield Overlap(int(np.ravel_multi_index(position, grid)), tuple(in_tile), tuple(in_box))


def boxes_of_range(shape: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """Yield the elements ``first`` to ``stop`` in C order as the smallest number of boxes."""
    while first < stop:
        # Elements of the largest block of whole trailing axes that begins here and fits.
        inner = 1
        axis = len(shape)
        while (
            axis > 0
            and first % (inner * shape[axis - 1]) == 0
            and first + inner * shape[axis - 1] <= stop
        ):
            axis -= 1
            inner *= shape[axis]
        rest = first // inner
        slices = []
        for size in reversed(shape[:axis]):
            rest, i = divmod(rest, size)
            slices.append(slice(i, i + 1))
        if axis > 0:  # take as many of these blocks as fit along the next outer axis
            i = slices[0].start
            times = min(shape[axis - 1] - i, (stop - first) // inner)
            slices[0] = slice(i, i + times)
            inner *= times
        yield (*reversed(slices), *(slice(0, size) for size in shape[axis:]))
        first += inner
