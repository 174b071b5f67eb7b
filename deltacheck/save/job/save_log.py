"""Report the saves that are committed, and count those that fail.

Reports go to the log, with a summary at the end, and to listeners. The failures decide which of
them a later call raises.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from deltacheck.errors import ReceiptFailed, SaveFailed
from deltacheck.leaf.spec import SaveReport
from deltacheck.save.progress import Progress
from deltacheck.store.lock.interrupts import Lock

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


class FailureCount:
    """The failed saves of one saver since it committed a step. Any thread may call it.

    Args:
        on_error: ``"raise"``: the next call raises a failure. ``"log"``: only the log and the
            handle have it, until ``max_failures`` saves in a row have failed.
        max_failures: The number of failures in a row from which on ``"log"`` raises, too.

    Attributes:
        in_a_row: The saves that failed since the last commit.
    """

    def __init__(self, on_error: str, max_failures: int) -> None:
        self.is_tolerant = on_error == "log"
        self._max_failures = max_failures
        self.in_a_row = 0
        self._newest: Exception | None = None
        self._lock = Lock()

    def add(self, error: Exception) -> None:
        """Count a failed save."""
        with self._lock:
            self.in_a_row += 1
            self._newest = error

    def committed(self, counted: int) -> None:
        """Begin a new row after a commit whose manifest has counted ``counted`` failures."""
        with self._lock:
            # A later save may have failed while this one was committed.
            self.in_a_row -= counted
            if not self.in_a_row:
                self._newest = None

    def to_raise(self, error: Exception) -> Exception | None:
        """Return the error that a call must raise for a failed save, or ``None``."""
        # Bits have changed between memory and disk, which the next save does not cure.
        if not self.is_tolerant or isinstance(error, ReceiptFailed):
            return error
        if self.in_a_row < self._max_failures:
            return None
        failure = SaveFailed(
            f"{self.in_a_row} saves in a row have failed (max_failures={self._max_failures})."
            f" {error}"
        )
        failure.__cause__ = error
        return failure

    def raise_lost(self) -> None:
        """Raise the failure of the newest save, which ``"log"`` has kept, if nothing followed it.

        For the end of the process: its exit status must say that the last save is lost.
        """
        newest = self._newest
        if self.is_tolerant and newest is not None:
            raise newest


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
