"""Parts that the clients of all object stores share: a mark of missing objects, counted bytes."""

from __future__ import annotations

import tensorstore as ts

from deltacheck.store.lock.interrupts import Lock

# The generation of a missing key: a write under this condition creates, and never replaces.
ABSENT = b"\x02"


class _WriteCounter:
    """The bytes that this process has written to object stores.

    Listings have no sizes, and TensorStore counts only the sum.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._before = 0

    def take(self) -> int:
        """Return the bytes written since the last call."""
        metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/", False)
        now = sum(
            int(m["values"][0]["value"])
            for m in metrics
            if m["name"].endswith(("/s3/bytes_written", "/gcs/bytes_written"))
        )
        with self._lock:
            before, self._before = self._before, now
        return max(0, now - before)

    def add(self, size: int) -> None:
        """Count ``size`` bytes that were written without TensorStore."""
        self.exclude(-size)

    def exclude(self, size: int) -> None:
        """Do not count ``size`` of the bytes written since the last call of ``take``."""
        with self._lock:
            self._before += size


written = _WriteCounter()
