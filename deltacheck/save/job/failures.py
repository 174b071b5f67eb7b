"""Count the saves that fail, and decide which of them a later call raises."""

from __future__ import annotations

from deltacheck.errors import ReceiptFailed, SaveFailed
from deltacheck.store.lock.interrupts import Lock


class FailureCount:
    """The failed saves of one saver since it committed a step. Any thread may call it.

    Args:
        on_error: ``"raise"``: the next call raises a failure. ``"log"``: only the log and the
            handle have it, until ``max_failures`` saves in a row have failed.
        max_failures: The number of failures in a row from which on ``"log"`` raises, too.
    """

    def __init__(self, on_error: str, max_failures: int) -> None:
        self.is_tolerant = on_error == "log"
        self._max_failures = max_failures
        self._in_a_row = 0
        self._newest: Exception | None = None
        self._lock = Lock()

    @property
    def in_a_row(self) -> int:
        """The saves that failed since the last commit."""
        return self._in_a_row

    def add(self, error: Exception) -> None:
        """Count a failed save."""
        with self._lock:
            self._in_a_row += 1
            self._newest = error

    def committed(self, counted: int) -> None:
        """Begin a new row after a commit whose manifest has counted ``counted`` failures."""
        with self._lock:
            # A later save may have failed while this one was committed.
            self._in_a_row -= counted
            if not self._in_a_row:
                self._newest = None

    def to_raise(self, error: Exception) -> Exception | None:
        """Return the error that a call must raise for a failed save, or ``None``."""
        # Bits have changed between memory and disk, which the next save does not cure.
        if not self.is_tolerant or isinstance(error, ReceiptFailed):
            return error
        if self._in_a_row < self._max_failures:
            return None
        failure = SaveFailed(
            f"{self._in_a_row} saves in a row have failed (max_failures={self._max_failures})."
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
