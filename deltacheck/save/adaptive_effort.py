"""Choose the effort of the entropy stage by the bottleneck of the last save.

A slow storage calls for more effort, a busy processor for less.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from deltacheck.store.files.effort import Effort

log = logging.getLogger("deltacheck")

EFFORTS = ("auto", *Effort)

# Shares of the time between saves. Below them neither side is a bottleneck.
_STORAGE_SHARE, _PROCESSOR_SHARE = 0.05, 0.2


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one save, in seconds of one thread.

    Args:
        interval_seconds: Time since the last save began.
        entropy_seconds: Time in the entropy stage.
        storage_seconds: Time waiting for the storage.
    """

    interval_seconds: float
    entropy_seconds: float
    storage_seconds: float


def next_effort(effort: Effort, timing: Timing) -> Effort:
    """Return the effort of the next save: one step up or down, or the same.

    Up, if the save waited for the storage twice as long as its entropy stage took, and for a
    twentieth of the time between saves: smaller files are then worth work. Down, if the entropy
    stage took twice as long, and a fifth of that time: training wants the processor. Otherwise the
    same, so that the choice does not swing.
    """
    # The members of `Effort` are declared from the least effort to the most.
    efforts = list(Effort)
    position = efforts.index(effort)
    if timing.storage_seconds > max(
        2 * timing.entropy_seconds, _STORAGE_SHARE * timing.interval_seconds
    ):
        return efforts[min(position + 1, len(efforts) - 1)]
    if timing.entropy_seconds > max(
        2 * timing.storage_seconds, _PROCESSOR_SHARE * timing.interval_seconds
    ):
        return efforts[max(position - 1, 0)]
    return effort


class EffortChoice:
    """The effort of each save of one saver.

    Args:
        effort: One of ``EFFORTS``. ``"auto"``: adapted after every save, so that equal states no
            longer give equal files; others: fixed.
    """

    def __init__(self, effort: str) -> None:
        self._adapts = effort == "auto"
        self.current = Effort.NORMAL if self._adapts else Effort(effort)
        self._last_begin: float | None = None

    def adapt(self, begin: float, entropy_seconds: float, storage_seconds: float) -> None:
        """Choose the effort of the next save by the times of one that began at ``begin``.

        A change is logged, with the times.
        """
        last_begin, self._last_begin = self._last_begin, begin
        # The first save has no interval to compare its times with.
        if self._adapts and last_begin is not None:
            timing = Timing(begin - last_begin, entropy_seconds, storage_seconds)
            chosen = next_effort(self.current, timing)
            if chosen is not self.current:
                log.info(
                    "effort %s instead of %s: between two saves, %.3g s apart, the entropy stage"
                    " took %.3g s and the storage %.3g s",
                    chosen.value,
                    self.current.value,
                    timing.interval_seconds,
                    entropy_seconds,
                    storage_seconds,
                )
            self.current = chosen
