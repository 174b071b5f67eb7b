"""Order the threads of a test, and give it a clock: no verdict depends on elapsed time.

Sleeps and comparisons of times belong here, and in no other file of the tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from deltacheck import SaveOptions

Found = TypeVar("Found")

# Ends a hang, and nothing else: a machine that is busy with other work may take minutes.
HANG_SECONDS = 240.0
# What a wait takes on the clock of a test.
WAIT_SECONDS = 3600.0


def wait_until(condition: Callable[[], Found], limit_seconds: float = HANG_SECONDS) -> Found:
    """Return the value of ``condition()`` as soon as it is true.

    Args:
        condition: What is waited for; it is called again and again.
        limit_seconds: Ends a hang. It must be so long that a busy machine does not reach it.

    Raises:
        AssertionError: The condition has not become true.
    """
    end = time.monotonic() + limit_seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"still {value!r} after {limit_seconds:g} s"
        time.sleep(0.005)
    return value


def open_when_called(
    patch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    gate: threading.Event,
    clock: ShiftedClock | None = None,
) -> None:
    """Let the first call of a method by this thread set ``gate`` before anything else.

    The method is one that waits for a thread which ``gate`` holds back. If the gate is open
    afterwards, then the caller has waited. Seen by ``clock``, it has done so for an hour.
    """
    original, caller = getattr(owner, method), threading.current_thread()

    def opening(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is caller and not gate.is_set():
            if clock is not None:
                clock.advance(WAIT_SECONDS)
            gate.set()
        return original(*args, **options)

    patch.setattr(owner, method, opening)


def set_deadline(options: SaveOptions, seconds: float) -> None:
    """Give another deadline to whatever was opened with these options, which users cannot change.

    A short deadline then holds for the save that meets a hang, and not for those before and after.
    """
    object.__setattr__(options, "io_timeout_seconds", seconds)


class ShiftedClock:
    """Stands in for the module ``time`` in a module of the product, and may be moved ahead.

    Real time goes on, too: move it by hours, so that the minutes of a busy machine do not count.
    """

    def __init__(self) -> None:
        self._ahead_seconds = 0.0
        self.slept: list[float] = []
        # Called at the end of each sleep.
        self.after_sleep: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def advance(self, seconds: float) -> None:
        """Move the clocks ahead."""
        self._ahead_seconds += seconds

    def sleep(self, seconds: float) -> None:
        """Move the clocks ahead instead of waiting."""
        self.slept.append(seconds)
        self.advance(seconds)
        self.after_sleep()

    def time(self) -> float:
        return time.time() + self._ahead_seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_seconds

    def perf_counter(self) -> float:
        return time.perf_counter() + self._ahead_seconds


class SleepWatch:
    """Stands in for the module ``time`` in a module of the product that polls.

    ``began`` is set once a thread sleeps there. No sleep takes more than ``longest_seconds``.
    """

    def __init__(self, longest_seconds: float = 1.0) -> None:
        self.began = threading.Event()
        self._longest_seconds = longest_seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        self.began.set()
        time.sleep(min(seconds, self._longest_seconds))
