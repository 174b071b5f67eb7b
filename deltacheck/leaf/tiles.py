"""Where a leaf that several ranks hold is cut into tiles: pure arithmetic on boxes.

A leaf is cut along each of its axes; the tiles are the cells between the cuts, counted in C order.
Each is stored as a leaf of its own.
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

# No leaf path has it: a percent sign of a key stands before two hexadecimal digits or at the end of
# the key
_MARK = "%@"


class Overlap(NamedTuple):
    """What of a tile lies in a box: in coordinates of the tile, and in those of the box."""

    number: int
    in_tile: Box
    in_box: Box


def shape_of(cuts: Cuts) -> tuple[int, ...]:
    """The shape of the leaf."""
    return tuple(along[-1] for along in cuts)


def grid_of(cuts: Cuts) -> tuple[int, ...]:
    """Tiles along each axis."""
    return tuple(len(along) - 1 for along in cuts)


def count(cuts: Cuts) -> int:
    return math.prod(grid_of(cuts))


def box(cuts: Cuts, number: int) -> Box:
    """The box of one tile."""
    at = np.unravel_index(number, grid_of(cuts))
    return tuple(slice(along[i], along[i + 1]) for along, i in zip(cuts, at, strict=True))


def name(path: str, origin: Box) -> str:
    """The path that a tile of the leaf ``path`` is stored under."""
    return f"{path}{_MARK}{','.join(str(s.start) for s in origin)}"


def leaf_of(stored: str) -> str:
    """The leaf that a stored path is of: itself, or the one that it is a tile of."""
    return stored.rpartition(_MARK)[0] if _MARK in stored else stored


def origin(stored: str) -> tuple[int, ...]:
    """Where in its leaf a stored tile begins; a leaf that is stored whole begins at 0."""
    return (
        tuple(int(start) for start in stored.rpartition(_MARK)[2].split(","))
        if _MARK in stored
        else (0,)
    )


def is_name(stored: str) -> bool:
    """Whether a stored path is that of a tile."""
    return _MARK in stored


def about(stored: str) -> str:
    """Which tile of its leaf a stored path is, for people, before what is said of it; nothing for a
    leaf that is stored whole.
    """
    return (
        f"tile at [{stored.rpartition(_MARK)[2].replace(',', ', ')}]: " if _MARK in stored else ""
    )


def numbered(cuts: Cuts, stored: str) -> int:
    """The number of the tile that is stored under a path. ``LookupError`` where there is none of
    that origin.
    """
    number = 0
    origin = stored.rpartition(_MARK)[2].split(",")
    if len(origin) != len(cuts):
        raise LookupError(stored)
    for along, text in zip(cuts, origin, strict=True):
        at = int(text) if text.isdecimal() and len(text) < 20 else -1
        i = bisect.bisect_left(along, at, 0, len(along) - 1)
        if str(along[i]) != text or i == len(along) - 1:
            raise LookupError(stored)
        number = number * (len(along) - 1) + i
    return number


def is_possible(cuts: Cuts) -> bool:
    """Whether a leaf can be cut so: at least one axis, and along each from 0 upwards."""
    return bool(cuts) and all(
        len(along) > 1 and along[0] == 0 and all(a < b for a, b in itertools.pairwise(along))
        for along in cuts
    )


def overlaps(cuts: Cuts, of: Box) -> Iterator[Overlap]:
    """The tiles that a box touches, ascending."""
    spans = []
    for along, s in zip(cuts, of, strict=True):
        first, stop = bisect.bisect_right(along, s.start) - 1, bisect.bisect_left(along, s.stop)
        spans.append(range(first, stop if s.stop > s.start else first))
    grid = grid_of(cuts)
    for at in itertools.product(*spans):
        in_tile, in_box = [], []
        for along, i, s in zip(cuts, at, of, strict=True):
            start, stop = max(along[i], s.start), min(along[i + 1], s.stop)
            in_tile.append(slice(start - along[i], stop - along[i]))
            in_box.append(slice(start - s.start, stop - s.start))
        yield Overlap(int(np.ravel_multi_index(at, grid)), tuple(in_tile), tuple(in_box))


def boxes_of_range(shape: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The elements ``first`` to ``stop`` of a leaf in C order as boxes, one after the other, as few
    as it takes.
    """
    while first < stop:
        inner = 1  # elements of the largest trailing block that begins here and ends in the range
        axis = len(shape)
        while (
            axis > 0
            and first % (inner * shape[axis - 1]) == 0
            and first + inner * shape[axis - 1] <= stop
        ):
            axis -= 1
            inner *= shape[axis]
        rest = first // inner
        at = []
        for size in reversed(shape[:axis]):
            rest, i = divmod(rest, size)
            at.append(slice(i, i + 1))
        if axis > 0:  # as many of these blocks as fit along the axis outside of them
            i = at[0].start
            times = min(shape[axis - 1] - i, (stop - first) // inner)
            at[0] = slice(i, i + times)
            inner *= times
        yield (*reversed(at), *(slice(0, size) for size in shape[axis:]))
        first += inner
