"""Let the saves of one process to a root follow each other.

DCP makes several calls for a save, on a thread of its own if the save is asynchronous. It does not
say when it has given up between two calls.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from deltacheck.errors import SaveFailed
from deltacheck.store.lock.interrupts import Condition, Lock

# A save without a call for so long has failed between two of them, in a planner or a collective.
_IDLE_SECONDS = 60.0


class Turns:
    """The save whose turn it is. A save has it from its first call to its end."""

    def __init__(self) -> None:
        self._lock, self._changed = Lock(), Condition()
        self._save: object | None = None
        self._thread: threading.Thread | None = None
        self._is_in_call = False
        self._last_call = 0.0

    def begin(self, save: object) -> None:
        """Wait until no other thread has the turn, and take it."""
        while not self._take(save):
            # With a limit, because the end of a thread notifies nobody.
            self._changed.wait_until(lambda: not self._is_taken(), 0.02)

    def _take(self, save: object) -> bool:
        with self._lock:
            if self._is_taken():
                return False
            self._save, self._thread = save, threading.current_thread()
            self._last_call = time.monotonic()
            return True

    @contextlib.contextmanager
    def call(self, save: object, *, is_last: bool = False) -> Iterator[None]:
        """A call of a save that has the turn. It ends with the last call, or if one fails.

        Raises:
            SaveFailed: Another save has taken the turn.
        """
        with self._lock:
            if self._save is not save:
                raise SaveFailed(
                    "another save to this root has begun meanwhile: wait for the result of"
                    " async_save before the next save"
                )
            self._is_in_call = True
        has_ended = True
        try:
            yield
            has_ended = is_last
        finally:
            with self._lock:
                self._is_in_call, self._last_call = False, time.monotonic()
                if has_ended:
                    self._save = self._thread = None
            self._changed.notify()

    def _is_taken(self) -> bool:
        thread = self._thread
        if self._save is None or thread is None or thread is threading.current_thread():
            return False
        if self._is_in_call:
            return True
        return thread.is_alive() and time.monotonic() - self._last_call < _IDLE_SECONDS
