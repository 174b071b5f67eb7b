"""The handle that a caller holds while a save goes on behind the training loop."""

from __future__ import annotations

import dataclasses
from functools import partial

from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.spec import SaveReport
from deltacheck.restore.receipt import Receipt
from deltacheck.save.progress import STATES, Progress
from deltacheck.store.lock.deadline import Pulse


@typed
class SaveHandle:
    """One save. It reaches ``captured``, ``encoded``, ``durable`` and ``committed`` in this order.

    It ends earlier if it fails or was skipped. Engines return handles; a program has no reason to
    make one.

    Args:
        step: The step that is saved.
        pulse: Shared by the saves of one saver, to tell a slow storage from one that hangs.
            ``None``: waits without a timeout have no end.
    """

    # The state is in Progress, which the saver's threads share. It refers to no leaf, so that a
    # caller may keep handles.
    def __init__(self, step: int, pulse: Pulse | None = None) -> None:
        self.step = step
        self._progress = Progress(step, pulse)

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, state={self.state!r})"

    @property
    def state(self) -> str:
        """The present state of the save.

        Returns:
            ``"started"``, ``"captured"`` (training may change the state again), ``"encoded"``,
            ``"durable"`` (every byte survives a power cut), ``"committed"`` (the step exists),
            ``"failed"`` or ``"skipped"``.
        """
        return self._progress.state

    @property
    def blocking_seconds(self) -> float:
        """Wall time that the training thread has lost to this save so far.

        Returns:
            Seconds, with the waits before the next optimizer step.
        """
        return self._progress.blocking_seconds

    @property
    def report(self) -> SaveReport | None:
        """The cost of the save.

        Returns:
            The report with the present ``blocking_seconds``; ``None`` before the commit.
        """
        report = self._progress.report
        # Waits before the next optimizer step may still add to the blocking time.
        return (
            None
            if report is None
            else dataclasses.replace(report, blocking_seconds=self._progress.blocking_seconds)
        )

    @property
    def receipt(self) -> Receipt | None:
        """The proof that the step was rebuilt from disk as it was captured.

        Returns:
            The receipt; ``None`` if ``verify`` is ``"none"``, or before the commit.
        """
        return self._progress.receipt

    def done(self) -> bool:
        """Return true if the save is committed, failed or skipped.

        Returns:
            True if ``state`` changes no more.
        """
        return self._progress.done()

    def wait(self, state: str = "committed", timeout: float | None = None) -> SaveHandle:
        """Wait until the save has reached ``state``.

        A skipped save has reached every state.

        Args:
            state: ``"started"``, ``"captured"``, ``"encoded"``, ``"durable"`` or ``"committed"``.
                Later states take longer and promise more.
            timeout: Seconds. ``None``: wait as long as the saver makes progress.

        Returns:
            This handle.

        Raises:
            SaveFailed: The save failed (or an error of the save itself), or this process is a
                forked child.
            TimeoutError: ``timeout`` has passed.
            StorageTimeout: Without a timeout, no save has made progress for twice
                ``io_timeout_seconds``. It is a ``TimeoutError``, too.
            ValueError: ``state`` is unknown.
        """
        if state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, not {state!r}")
        progress = self._progress
        if not progress.wait_until(partial(progress.has_reached, state), timeout):
            raise TimeoutError(
                f"the save of step {self.step} is only {self.state} after {timeout:.3g} s, not yet"
                f" {state}"
            )
        progress.raise_error()
        return self

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Wait for the commit and return the report.

        Args:
            timeout: Seconds. ``None``: wait as long as the saver makes progress.

        Returns:
            The report; ``None`` if the save was skipped.

        Raises:
            SaveFailed: As ``wait`` raises it.
            TimeoutError: ``timeout`` has passed.
        """
        self.wait("committed", timeout)
        return self.report

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait for the end and return the error.

        Args:
            timeout: Seconds. ``None``: wait as long as the saver makes progress.

        Returns:
            The error; ``None`` if the save was committed or skipped.

        Raises:
            TimeoutError: ``timeout`` has passed, or (``StorageTimeout``) the saver makes no
                progress.
        """
        try:
            self.wait("committed", timeout)
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever failed the save is the answer here
            return error
        return None


def progress_of(handle: SaveHandle) -> Progress:
    """Return the state behind a handle, for the code that carries the save out."""
    return handle._progress


def skipped(step: int) -> SaveHandle:
    """Return the handle of a save that was skipped."""
    handle = SaveHandle(step)
    handle._progress.advance("skipped")
    return handle
