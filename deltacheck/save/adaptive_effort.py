"""How hard the entropy stage works next: more where the storage is the bottleneck, less where the
processor is.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltacheck.store.files.effort import Effort

EFFORTS = ("auto", *Effort)  # what users choose from

_SHARE_OF_STORAGE, _SHARE_OF_PROCESSOR = (
    0.05,
    0.2,
)  # of the time between saves, below which neither is a bottleneck


@dataclass(frozen=True, slots=True)
class Timing:
    """Where one save's time went, in seconds of one thread. ``interval_seconds``: since the save
    before.
    """

    interval_seconds: float
    entropy_seconds: float
    storage_seconds: float


def next_effort(effort: Effort, seen: Timing) -> Effort:
    """The effort of the next save: one step up or down, or the same.

    Up where the save waited for the storage for twice as long as its entropy stage took, and for a
    twentieth of the time between saves: smaller files are then worth work. Down where it is the
    other way round and the stage took a fifth of that time: training wants the processor. Else as
    it was, so that the choice does not swing.
    """
    order = list(Effort)
    at = order.index(effort)
    if seen.storage_seconds > max(
        2 * seen.entropy_seconds, _SHARE_OF_STORAGE * seen.interval_seconds
    ):
        return order[min(at + 1, len(order) - 1)]
    if seen.entropy_seconds > max(
        2 * seen.storage_seconds, _SHARE_OF_PROCESSOR * seen.interval_seconds
    ):
        return order[max(at - 1, 0)]
    return effort
