"""When a wait ends: every wait of this package has one of these, or is a caller's own choice."""

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
        """``seconds`` from now; ``None``: never."""
        return cls(math.inf if seconds is None else time.monotonic() + seconds)

    @property
    def left(self) -> float | None:
        """Seconds left, at least 0, in the form that waiting functions take: ``None`` without
        end.
        """
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())


class Pulse:
    """When the saves of one saver last got on, so that whoever waits for them can tell a slow
    storage
    from one that hangs.

    ``patience_seconds``: how long nothing at all may happen. Longer: a stalled file system gets
    more time to come back; shorter: training is told of a dead one sooner.
    """

    def __init__(self, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self._last = time.monotonic()

    def beat(self) -> None:
        """Something got on."""
        self._last = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds of patience left; 0 or less: none."""
        return self._last + self.patience_seconds - time.monotonic()
