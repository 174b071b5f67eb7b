"""Locks, waits and blocks that the handlers of signals do not disturb.

Python calls the handlers of signals on the main thread, between two bytecodes of whatever it does.
A handler may wait for the saves under way, or save by itself. If the main thread then held a lock
that a thread of a saver needs, both would wait for ever. So the main thread holds no lock of this
package where a handler may run:

* while it holds a ``Lock``, handlers are postponed;
* ``postponed`` does the same for a block that must not be entered twice, such as a save;
* it waits with ``Condition``, ``Flag`` and ``Turn``, which hold no lock.

No wait trusts its notification: each looks again within a second.
"""

from __future__ import annotations

# Of `signal`, whose functions convert every handler to an enumeration.
import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from deltacheck.errors import SaveFailed
from deltacheck.store.lock.deadline import Deadline

_LOOK_SECONDS = 1.0
# The longest delay of a handler in a wait for a thread.
_JOIN_SECONDS = 0.1
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

# All of these belong to the main thread. The number of locks that it holds, and of the blocks that
# it is in:
_locks = 0
_blocks = 0
# The errors of handlers in each ``shielded`` block that it is in.
_shields: list[list[Exception]] = []
# Meanwhile ``_arrived`` stands in for every handler. The handlers by signal:
_originals: dict[int, Any] = {}
_is_installed = False
# Signals that have arrived and are not handled yet, and actions of ``when_free``.
_arrived_signals: dict[int, None] = {}
_actions: list[Callable[[], None]] = []


def exempt(handler: Callable[..., None]) -> Callable[..., None]:
    """Mark a handler that is never postponed; it must take no lock."""
    handler.is_exempt_from_postponement = True  # type: ignore[attr-defined]
    return handler


def when_free(action: Callable[[], None]) -> None:
    """Call ``action`` on the main thread: now, or once it holds no lock and is in no block."""
    if _locks or _blocks:
        _actions.append(action)
    else:
        action()


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Postpone the handlers of signals to the end of this block, if this is the main thread.

    Ctrl-C is not postponed: it raises ``KeyboardInterrupt`` in the block.
    """
    global _blocks
    if not _is_main_thread():
        yield
        return
    _blocks += 1
    try:
        _install()
        yield
    finally:
        _blocks -= 1
        _deliver()


@contextlib.contextmanager
def shielded() -> Iterator[list[Exception]]:
    """Collect what handlers raise, so that a wait at the end of a process goes on.

    torch's handler of SIGCHLD raises an error if a worker of a ``DataLoader`` was killed.

    Yields:
        The errors so far. The outermost of several blocks collects those of all.
    """
    errors: list[Exception] = []
    if not _is_main_thread():
        yield errors
        return
    _shields.append(errors)
    try:
        _install()
        yield errors
    finally:
        _shields.remove(errors)
        _deliver()


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _install() -> None:
    """Let ``_arrived`` stand in for every handler."""
    global _is_installed
    if _is_installed:
        return
    # A handler that interrupts this loop finds it unfinished, and finishes it for its own blocks.
    # ``ValueError``: the interpreter is embedded, and calls no handlers on this thread.
    with contextlib.suppress(ValueError):
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if (
                callable(handler)
                and handler is not _arrived
                and not getattr(handler, "is_exempt_from_postponement", False)
            ):
                _originals[number] = handler
                _signal.signal(number, _arrived)
    _is_installed = True


def _deliver() -> None:
    """Call what may be called now: handlers whose signals have arrived, and actions."""
    if not (_locks or _blocks or _shields):
        _restore()
    number = next(filter(_may_handle, list(_arrived_signals)), None)
    if number is not None:
        _arrived_signals.pop(number, None)
        try:
            _arrived(number, sys._getframe(1))
        finally:  # also if it has raised an error
            _deliver()
    while _actions and not (_locks or _blocks):
        _actions.pop(0)()


def _restore() -> None:
    global _is_installed
    _is_installed = False
    with contextlib.suppress(ValueError):
        for number, handler in list(_originals.items()):
            if _signal.getsignal(number) is _arrived:
                _signal.signal(number, handler)
            _originals.pop(number, None)


def _handler(number: int) -> Any:
    return _originals.get(number) or _signal.getsignal(number)


def _may_handle(number: int) -> bool:
    return not _locks and (not _blocks or _handler(number) is signal.default_int_handler)


def _arrived(number: int, frame: FrameType | None) -> None:
    """Handle a signal, or postpone it."""
    handler = _handler(number)
    if not _may_handle(number):
        _arrived_signals[number] = None
    elif not callable(handler):  # it was removed meanwhile
        return
    elif not _shields:
        handler(number, frame)
    else:
        try:
            handler(number, frame)
        except Exception as error:  # noqa: BLE001 - the block raises it, or has a reason not to
            _shields[0].append(error)


def _forget_in_child() -> None:
    # Another thread may have forked while the main thread held a lock.
    global _locks, _blocks
    _locks = _blocks = 0
    _shields.clear()
    _arrived_signals.clear()
    _actions.clear()
    _restore()


os.register_at_fork(after_in_child=_forget_in_child)


# --- instead of those of ``threading`` ------------------------------------------------------------


class Lock:
    """A reentrant lock. Handlers of signals, Ctrl-C included, wait until it is released.

    It must be held briefly, and never for the storage.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        global _locks
        if _is_main_thread():
            _locks += 1
            try:
                _install()
                self._lock.acquire()
            except BaseException:
                _locks -= 1
                raise
        else:
            self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _locks
        self._lock.release()
        if _is_main_thread():
            _locks -= 1
            _deliver()


class Condition:
    """A change that threads wait for, as with a condition, without a lock."""

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()

    def notify(self) -> None:
        """Let all waiting threads look at their conditions."""
        for waiter in list(self._waiters):
            with contextlib.suppress(RuntimeError):  # it has been woken already
                waiter.release()

    def wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``condition()``; return false if ``timeout`` seconds have passed before."""
        if condition():
            return True
        deadline = Deadline.after(timeout)
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            while not condition():
                left = deadline.left
                if left == 0:
                    return False
                # Handlers of signals run in this call, between two attempts to take the lock.
                waiter.acquire(timeout=_LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS))
            return True
        finally:
            self._waiters.remove(waiter)


def join(thread: threading.Thread, timeout: float | None = None) -> bool:
    """Wait for the end of a thread; return false if ``timeout`` seconds have passed before.

    Up to Python 3.12, ``Thread.join`` takes a running thread for ended if a handler raises an error
    in it, such as ``KeyboardInterrupt``. Nobody waits for that thread any more, not even the end of
    the process. So handlers run between two short waits here.
    """
    deadline = Deadline.after(timeout)
    while True:
        left = deadline.left
        with Lock():
            # Not that of a subclass, which may raise the error of the thread.
            threading.Thread.join(
                thread, _JOIN_SECONDS if left is None else min(left, _JOIN_SECONDS)
            )
            if not thread.is_alive():
                return True
        if left == 0:
            return False


class Flag:
    """A flag that threads wait for, as ``threading.Event``."""

    def __init__(self) -> None:
        self._flag = False
        self._change = Condition()

    def is_set(self) -> bool:
        """Return the flag."""
        return self._flag

    def set(self) -> None:
        """Set the flag."""
        self._flag = True
        self._change.notify()

    def clear(self) -> None:
        """Clear the flag."""
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the flag; return it."""
        return self._change.wait_until(self.is_set, timeout)


class Turn:
    """The right of one thread at a time to begin a save, or to restore."""

    def __init__(self) -> None:
        # By process: the thread that has the turn may not live in a forked child.
        self._holder: dict[int, tuple[int, str]] = {}
        self._change = Condition()

    @contextlib.contextmanager
    def of(self, action: str, *, postpones: bool = False) -> Iterator[None]:
        """Wait for the turn, and take it for the block.

        Args:
            action: What the block does, for the error.
            postpones: Postpone the handlers of signals in the block, but not in the wait for it.

        Raises:
            SaveFailed: This thread has the turn already: a handler of a signal has interrupted
                the call that has it.
        """
        process, mine = os.getpid(), (threading.get_ident(), action)
        while True:
            with postponed() if postpones else contextlib.nullcontext():
                holder = self._holder.get(process)
                if holder is not None and holder[0] == mine[0]:
                    raise SaveFailed(
                        f"the handler of a signal cannot {action}, because it has interrupted the"
                        f" call that has begun to {holder[1]}. Let the handler set a flag, and"
                        f" {action} in the training loop"
                    )
                try:
                    # ``setdefault`` looks and takes in one operation.
                    if self._holder.setdefault(process, mine) is mine:
                        yield
                        return
                finally:
                    if self._holder.get(process) is mine:
                        self._holder.pop(process)
                        self._change.notify()
            self._change.wait_until(lambda: process not in self._holder)
