"""Report each committed save: to the log, with a summary at the end, and to listeners."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from deltacheck.leaf.spec import SaveReport
from deltacheck.save.progress import Progress

log = logging.getLogger("deltacheck")


class SaveLog:
    """The log of the saves of one root in one process, at level INFO. Every entry point has it."""

    def __init__(self) -> None:
        self._root: object = None
        self._committed = self._failed = self._stored_bytes = 0
        self._blocking_seconds = 0.0
        # Training may still wait for this save, so its time is added later.
        self._last: Progress | None = None
        self._listeners: list[Callable[[SaveReport], object]] = []

    def listen(self, listener: Callable[[SaveReport], object]) -> None:
        """Call a function with the report of each save that is committed from now on."""
        self._listeners.append(listener)

    def committed(self, root: object, progress: Progress, report: SaveReport) -> None:
        """Log a save that was committed.

        Args:
            root: The root.
            progress: The state of the save.
            report: The cost of the save.
        """
        self._root = root
        self._committed += 1
        self._stored_bytes += report.stored_bytes
        self._take_last()
        self._last = progress
        log.info(
            "step %d is committed to %s: %s bytes of %s written, in %.2f s in the background;"
            " training waited %.3f s",
            report.step,
            root,
            f"{report.stored_bytes:,}",
            f"{report.raw_bytes:,}",
            report.durable_seconds,
            report.blocking_seconds,
        )
        for listener in self._listeners:
            # The step exists, and a report about it must not end the saves of the run.
            try:
                listener(report)
            except Exception:
                log.warning("a listener failed on step %d", report.step, exc_info=True)

    def failed(self) -> None:
        """Count a save that failed. Its error is logged where it arises."""
        self._failed += 1

    def close(self) -> None:
        """Log the summary, if there was a save that ended."""
        self._take_last()
        if self._root is not None:
            log.info(
                "%s: %d saves committed, %d failed; %s bytes written, training waited %.3f s",
                self._root,
                self._committed,
                self._failed,
                f"{self._stored_bytes:,}",
                self._blocking_seconds,
            )

    def _take_last(self) -> None:
        if self._last is not None:
            self._blocking_seconds += self._last.blocking_seconds
        self._last = None


class SaveNumbers:
    """The cost of committed saves as numbers for the logger of a training.

    Reports come on one thread, and are summed up on another.
    """

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
