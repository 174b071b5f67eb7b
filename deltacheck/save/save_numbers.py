"""The cost of committed saves as numbers for the logger of a training."""

from __future__ import annotations

from collections import deque

from deltacheck.leaf.spec import SaveReport


class SaveNumbers:
    """Collects the reports of saves on one thread, and sums them up on another."""

    def __init__(self) -> None:
        self._reports: deque[SaveReport] = deque()

    def add(self, report: SaveReport) -> None:
        """Take the report of a save; a listener of ``Engine.on_commit``."""
        self._reports.append(report)

    def take(self) -> dict[str, float]:
        """Return the cost of the saves since the last call; nothing if none was committed.

        Returns:
            The number of saves, the bytes that they wrote, the seconds that training waited, and
            the longest time from a call to its commit.
        """
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        if not reports:
            return {}
        return {
            "deltacheck/saves": len(reports),
            "deltacheck/bytes": sum(report.stored_bytes for report in reports),
            "deltacheck/blocking_seconds": sum(report.blocking_seconds for report in reports),
            "deltacheck/durable_seconds": max(report.durable_seconds for report in reports),
        }
