"""The state of one save, shared by the threads that carry it out and those that wait for it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator

from deltacheck.errors import SaveFailed, StorageTimeout
from deltacheck.leaf.external_errors import is_external, remedy
from deltacheck.leaf.spec import SaveReport
from deltacheck.restore.receipt import Receipt
from deltacheck.store.lock.deadline import Pulse
from deltacheck.store.lock.interrupts import Condition, Lock

# The states of a save, in order. captured: training may overwrite the state. encoded: the shadow is
# up to date. durable: every byte survives a power cut. committed: the step exists.
STATES = ("started", "captured", "encoded", "durable", "committed")


class Progress:
    """The state of one save. The saver's threads advance it; ``SaveHandle`` shows it to the caller.

    Args:
        step: The step that is saved.
        pulse: Shared by the saves of one saver, to tell a slow storage from one that hangs.
            ``None``: waits without a timeout have no end.
    """

    def __init__(self, step: int, pulse: Pulse | None = None) -> None:
        self.step = step
        self.state = "started"
        self.error: Exception | None = None
        self.report: SaveReport | None = None
        self.receipt: Receipt | None = None
        self.blocking_seconds = 0.0  # the time that the training thread has lost to this save
        # Shortens the wait for ``captured``; called by the thread that waits.
        self.while_awaited: Callable[[], None] | None = None
        # Nobody has been told of the error yet. The saver raises it again at its next call.
        self.has_unseen_error = False
        # Every read of the state is done or enqueued on its device.
        self.reads_enqueued = False
        # The save reads nothing but copies of its own.
        self.is_own = False
        self._pulse = pulse or Pulse(math.inf)
        # Records that the save is making progress, for those who wait without a timeout.
        self.beat = self._pulse.beat
        self.beat()
        self._owner = os.getpid()
        self._lock, self._changed = Lock(), Condition()

    # --- waiting ----------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return true if the save is committed, failed or skipped."""
        return self.state in ("committed", "failed", "skipped")

    def has_reached(self, state: str) -> bool:
        """Return true if the save has reached ``state``, or its end."""
        return self.done() or (
            self.state in STATES and STATES.index(self.state) >= STATES.index(state)
        )

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``condition()``; return false if ``timeout`` seconds have passed before.

        Raises:
            SaveFailed: This process is a forked child; no thread of the saver lives in it.
            StorageTimeout: There is no ``timeout``, and no save of this saver has made progress
                within the patience of its pulse.
        """
        # Before the lock is taken: the fork may have copied it in its locked state.
        if os.getpid() != self._owner and not condition():
            raise SaveFailed(
                f"the save of step {self.step} belongs to process {self._owner}; a forked child"
                " cannot wait for it"
            )
        if timeout is not None:
            return self._changed.wait_until(condition, timeout)
        # The pulse is read again after every wait: any save of this saver may have renewed it.
        while not self._changed.wait_until(condition, max(0.0, self._pulse.left)):
            if self._pulse.left <= 0:
                raise StorageTimeout(
                    f"the save of step {self.step} is {self.state}, and nothing has happened"
                    f" for {self._pulse.patience_seconds:g} s; the storage may hang"
                )
        return True

    def wait_for_end(self, timeout: float | None) -> None:
        """Wait until the save has ended. A failure is not raised here.

        Raises:
            TimeoutError: ``timeout`` seconds have passed.
        """
        if not self.wait_until(self.done, timeout):
            raise TimeoutError(
                f"the save of step {self.step} is only {self.state} after {timeout:.3g} s"
            )

    def block_until(self, state: str, or_enqueued: bool = False) -> None:
        """Wait on the training thread for ``state`` or the end, and count it as blocking time.

        Args:
            state: One of ``STATES``.
            or_enqueued: True: it is enough that a device will read the state before it executes
                what the caller enqueues next; false: wait for the state itself.

        Raises:
            StorageTimeout: As ``wait_until`` raises it.
        """
        begin = time.perf_counter()
        shorten = self.while_awaited

        def is_over() -> bool:
            return self.has_reached(state) or (or_enqueued and self.reads_enqueued)

        try:
            if state == "captured" and shorten is not None and not is_over():
                shorten()
            self.wait_until(is_over, None)
        finally:
            self.blocking_seconds += time.perf_counter() - begin

    # --- errors -----------------------------------------------------------------------------------

    def raise_error(self) -> None:
        """Raise the error of the save, if it failed; it then counts as seen."""
        if self.error is not None:
            self.has_unseen_error = False
            raise self.error

    def take_unseen_error(self) -> Exception | None:
        """Return the error if nobody has seen it yet; it then counts as seen."""
        with self._lock:
            error = self.error if self.has_unseen_error else None
            self.has_unseen_error = False
            return error

    def unsee_error(self) -> None:
        """Let the saver raise the error once more, if there is one."""
        self.has_unseen_error = self.error is not None

    # --- the saver's side -------------------------------------------------------------------------

    def advance(self, state: str, report: SaveReport | None = None) -> None:
        """Enter a state, unless the save was given up before."""
        self.beat()
        with self._lock:
            # A save that was given up stays failed, although its thread may still finish it.
            if self.error is None:
                # Before the state: whoever sees that the save is committed must find the report.
                self.report = report or self.report
                self.state = state
        self._changed.notify()

    def fail(self, error: Exception) -> None:
        """End the save with an error, unless it has ended already."""
        with self._lock:
            # A committed step exists, whatever fails afterwards.
            if not self.done():
                # Before the state: whoever sees that the save has failed must find the error.
                self.error, self.has_unseen_error = error, True
                self.state = "failed"
        self._changed.notify()

    def mark_reads_enqueued(self) -> None:
        """Record that every read of the state is enqueued on its device."""
        self.reads_enqueued = True
        self._changed.notify()

    def mark_own(self) -> None:
        """Record that the save reads nothing but copies of its own: nothing waits for it."""
        self.is_own = True
        self.mark_reads_enqueued()


def as_save_failed(step: int, error: BaseException) -> Exception:
    """Return any failure of a save as an error that names the step; the cause stays attached."""
    if isinstance(error, SaveFailed) and (
        type(error) is not SaveFailed or f"step {step}" in str(error)
    ):
        return error
    failure = SaveFailed(
        f"the save of step {step} failed; earlier steps are as they were. Cause:"
        f" {type(error).__name__}: {error}{remedy(error)}"
    )
    failure.__cause__ = error
    return failure


@contextlib.contextmanager
def beginning(step: int) -> Iterator[None]:
    """Return a context for the begin of a save: failures outside of this package fail the save."""
    try:
        yield
    except Exception as error:
        if is_external(error):
            raise as_save_failed(step, error) from error
        raise
