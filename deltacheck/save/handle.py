"""What a caller holds while a save goes on behind the training loop."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable

from deltacheck.errors import SaveFailed, StorageTimeout
from deltacheck.leaf.spec import SaveReport
from deltacheck.restore.receipt import Receipt
from deltacheck.store.deadline import Deadline, Pulse

# The states of a save, in order. captured: training may overwrite the state. encoded: the shadow is
# up to date. durable: every byte survives a power cut. committed: the step exists.
STATES = ("started", "captured", "encoded", "durable", "committed")


class SaveHandle:
    """One save. Reaches the states ``captured``, ``encoded``, ``durable``, ``committed`` in this
    order, or fails, or was skipped.
    """

    def __init__(self, step: int, pulse: Pulse | None = None) -> None:
        self.step = step
        self._pulse = pulse or Pulse(math.inf)
        self._pulse.beat()
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._state = "started"
        self._error: Exception | None = None
        self._seen = False
        self._reads_enqueued = (
            False  # on a device: what is enqueued there from now on comes after them
        )
        self._report: SaveReport | None = None
        self._blocking_seconds = 0.0
        self._receipt: Receipt | None = None
        self._awaits_receipt = False

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, state={self.state!r})"

    @property
    def state(self) -> str:
        """One of ``STATES``, ``"failed"`` or ``"skipped"``."""
        return self._state

    @property
    def blocking_seconds(self) -> float:
        """Wall time that the training thread has lost to this save so far, waits before the next
        optimizer step included.
        """
        return self._blocking_seconds

    @property
    def report(self) -> SaveReport | None:
        """What the save cost, once it is committed."""
        report = self._report
        return (
            None
            if report is None
            else dataclasses.replace(report, blocking_seconds=self._blocking_seconds)
        )

    @property
    def receipt(self) -> Receipt | None:
        """Proof that the step was rebuilt from disk as it was captured: where ``verify`` asks for
        it, once it is in.
        """
        return self._receipt

    def wait_for_receipt(self, timeout: float | None = None) -> Receipt | None:
        """Wait until the step is committed and read back; ``None`` where ``verify`` is ``"none"``
        or
        the save was skipped.

        Raises what ``wait`` raises, and ``ReceiptFailed`` naming leaf and file where the step did
        not come back as it was captured.
        """
        deadline = Deadline.after(timeout)
        self.wait("committed", timeout)
        if not self._await(lambda: not self._awaits_receipt, deadline.left):
            raise TimeoutError(
                f"step {self.step} is committed, but not yet read back after {timeout} s"
            )
        with self._changed:
            if self._error is not None:
                self._seen = True
                raise self._error
        return self._receipt

    def done(self) -> bool:
        """Whether the save is committed, failed or skipped."""
        return self._state in ("committed", "failed", "skipped")

    def wait(self, state: str = "committed", timeout: float | None = None) -> SaveHandle:
        """Wait until the save has reached ``state``; a skipped save has reached them all.

        ``timeout`` in seconds; without one, as long as the saver gets on at all. Raises the save's
        own error where it failed, ``TimeoutError`` where time ran out, ``StorageTimeout`` (one,
        too) where nothing has happened for twice ``io_timeout_seconds``, ``ValueError`` for an
        unknown state, ``SaveFailed`` in a forked child.
        """
        if state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, not {state!r}")
        target = STATES.index(state)
        if not self._await(lambda: self._reached(target), timeout):
            raise TimeoutError(
                f"the save of step {self.step} is only {self._state} after {timeout:.3g} s, not yet"
                f" {state}"
            )
        with self._changed:
            if self._error is not None:
                self._seen = True
                raise self._error
        return self

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Wait for the commit and return the report (``None`` where the save was skipped); raises
        as ``wait`` does.
        """
        self.wait("committed", timeout)
        return self.report

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait for the end and return the error, if there was one."""
        try:
            self.wait("committed", timeout)
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever failed the save is the answer here
            return error
        return None

    def _await(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``reached()``; ``False`` where ``timeout`` has passed."""
        if (
            os.getpid() != self._owner and not reached()
        ):  # before the lock, which the fork may have left locked
            raise SaveFailed(
                f"the save of step {self.step} belongs to process {self._owner}; a forked child"
                " cannot wait for it"
            )
        deadline = Deadline.after(timeout)
        with self._changed:
            while not reached():
                left, patience = deadline.left, self._pulse.left
                if left == 0:
                    return False
                if left is None and patience <= 0:
                    raise StorageTimeout(
                        f"the save of step {self.step} is {self._state}, and nothing has happened"
                        f" for {self._pulse.patience_seconds:g} s; the storage may hang"
                    )
                self._changed.wait(min(patience if left is None else left, threading.TIMEOUT_MAX))
        return True

    def _reached(self, target: int) -> bool:
        return self.done() or (self._state in STATES and STATES.index(self._state) >= target)

    # The saver's side.

    def _advance(self, state: str, report: SaveReport | None = None) -> None:
        self._pulse.beat()
        with self._changed:
            if self._error is None:  # else it was given up
                self._state = state
                self._report = report or self._report
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self.done():
                self._state, self._error = "failed", error
            self._awaits_receipt = False
            self._changed.notify_all()

    def _give_receipt(self, receipt: Receipt | Exception) -> None:
        """The step was read back; or why that failed, of a step that is committed."""
        self._pulse.beat()
        with self._changed:
            self._awaits_receipt = False
            if isinstance(receipt, Exception):
                self._error = receipt
            else:
                self._receipt = receipt
            self._changed.notify_all()

    def _await_end(self, timeout: float | None) -> None:
        """Wait until nothing more will come of the save, whatever the end is. Raises
        ``TimeoutError``, as ``wait`` does.
        """
        if not self._await(lambda: self.done() and not self._awaits_receipt, timeout):
            raise TimeoutError(
                f"the save of step {self.step} is only {self._state} after {timeout:.3g} s"
            )

    def _unseen_error(self) -> Exception | None:
        """The error, if nobody was told yet; from now on somebody is."""
        with self._changed:
            error = None if self._seen else self._error
            self._seen = True if error is not None else self._seen
            return error

    def _mark_reads_enqueued(self) -> None:
        with self._changed:
            self._reads_enqueued = True
            self._changed.notify_all()

    def _settle(self, state: str, or_enqueued: bool = False) -> None:
        """Wait for ``state`` or the end, whatever the end is: the training thread's wait, counted
        as
        blocking time.

        ``or_enqueued``: it is enough that a device will have read the state before what is held
        back behind its reads. Raises ``StorageTimeout`` as ``wait`` does.
        """
        begin = time.perf_counter()
        try:
            self._await(
                lambda: (
                    self._reached(STATES.index(state)) or (or_enqueued and self._reads_enqueued)
                ),
                None,
            )
        finally:
            self._blocking_seconds += time.perf_counter() - begin

    def _beat(self) -> None:
        """Tell those who wait that the save is getting on."""
        self._pulse.beat()

    def _add_blocking(self, seconds: float) -> None:
        self._blocking_seconds += seconds


def as_save_failed(step: int, error: BaseException) -> Exception:
    """Any failure of a save as one of ours, which names the step; the cause stays attached."""
    if isinstance(error, SaveFailed) and (
        type(error) is not SaveFailed or f"step {step}" in str(error)
    ):
        return error
    failed = SaveFailed(
        f"the save of step {step} failed; earlier steps are as they were. Cause:"
        f" {type(error).__name__}: {error}"
    )
    failed.__cause__ = error
    return failed
