"""Deadlines and signs of progress: every wait of this package is bounded by one of them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock, which no change of the wall clock moves."""

    at: float

    @classmethod
    def after(cls, seconds: float | None) -> Self:
        """Return the deadline ``seconds`` from now; ``None``: it never comes."""
        return cls(math.inf if seconds is None else time.monotonic() + seconds)

    @property
    def left(self) -> float | None:
        """Seconds left, at least 0, as waiting functions take them; ``None``: no limit."""
        # Python's waiting functions raise OverflowError for an infinite timeout.
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())


class Pulse:
    """The time of the last progress of a saver; it separates slow storage from storage that hangs.

    Args:
        patience_seconds: Longest time without any progress. Longer: a stalled file system gets more
            time to come back; shorter: training learns of a dead one sooner.
    """

    def __init__(self, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self._last = time.monotonic()

    def beat(self) -> None:
        """Note progress."""
        # Other threads read it without a lock: the assignment of a float is atomic.
        self._last = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds of patience left; none if it is 0 or less."""
        return self._last + self.patience_seconds - time.monotonic()
