"""Short forms of numbers that follow a rule: the cuts of an axis, and the owners of tiles.

Frameworks divide leaves evenly, so a few numbers stand for the cuts of a thousand ranks.
``docs/reference/format.md``, section 3, defines both forms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

# A number stands for itself; ``(first, step, count)`` for an arithmetic series.
Series: TypeAlias = tuple[int | tuple[int, int, int], ...]

# A series takes the room of about three numbers.
_SHORTEST_SERIES = 4


class Axis(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cuts of one axis. At most one of ``step``, ``parts`` and ``edges`` is given.

    Attributes:
        size: The size of the axis.
        step: The size of all tiles but the last, as ``torch.chunk`` and FSDP divide.
        parts: The number of tiles; tile ``i`` begins at ``size * i // parts``.
        edges: The cuts between 0 and ``size``, if they follow neither rule.
    """

    size: int
    step: int = 0
    parts: int = 0
    edges: tuple[int, ...] = ()

    @classmethod
    def of(cls, cuts: Sequence[int]) -> Axis:
        """Return the short form of cuts that ascend from 0 to the size."""
        size, count = cuts[-1], len(cuts) - 1
        if count == 1:
            return cls(size)
        for axis in (cls(size, step=cuts[1]), cls(size, parts=count)):
            if axis.count == count and axis.cuts() == tuple(cuts):
                return axis
        return cls(size, edges=tuple(cuts[1:-1]))

    @property
    def count(self) -> int:
        """The number of tiles along the axis, without their computation."""
        return -(-self.size // self.step) if self.step else self.parts or len(self.edges) + 1

    @property
    def is_possible(self) -> bool:
        """True if the fields can be those of an axis; ``edges`` may still be out of order."""
        forms = [self.step != 0, self.parts != 0, bool(self.edges)]
        return (
            self.size > 0
            and sum(forms) <= 1
            and 0 <= self.step <= self.size
            and 0 <= self.parts <= self.size
        )

    def cuts(self) -> tuple[int, ...]:
        """Return the cuts, from 0 to the size."""
        if self.step:
            return (*range(0, self.size, self.step), self.size)
        if self.parts:
            return tuple(self.size * i // self.parts for i in range(self.parts + 1))
        return (0, *self.edges, self.size)


def series(numbers: Sequence[int]) -> Series:
    """Return the short form of some numbers: long arithmetic series in it are named as such."""
    short: list[int | tuple[int, int, int]] = []
    position = 0
    while position < len(numbers):
        first = numbers[position]
        step = numbers[position + 1] - first if position + 1 < len(numbers) else 0
        stop = position + 1
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        if stop - position >= _SHORTEST_SERIES:
            short.append((first, step, stop - position))
            position = stop
        else:
            # One number only: a series may begin with the next.
            short.append(first)
            position += 1
    return tuple(short)


def length(short: Series) -> int:
    """Return how many numbers a short form stands for, without their computation.

    Raises:
        ValueError: A series has no numbers.
    """
    counts = [1 if isinstance(part, int) else part[2] for part in short]
    if any(count < 1 for count in counts):
        raise ValueError("a series of it has no numbers")
    return sum(counts)


def numbers(short: Series) -> tuple[int, ...]:
    """Return the numbers that a short form stands for."""
    return tuple(
        itertools.chain.from_iterable(
            (part,)
            if isinstance(part, int)
            else range(part[0], part[0] + part[1] * part[2], part[1])
            if part[1]
            else itertools.repeat(part[0], part[2])
            for part in short
        )
    )
