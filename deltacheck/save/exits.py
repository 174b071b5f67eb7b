"""Finish the saves under way when the process ends by itself, by an exception or by a signal.

Engines and managers register here. At exit each is closed within its own time. A failure that
nobody has seen is written to stderr, and the exit status becomes ``STATUS``, so that a scheduler
that sees 0 may rely on every save. ``finish_on_signal`` does the same for SIGTERM, which otherwise
ends Python at once, and ``StopSignals`` lets a training save before it ends. Nothing can be done if
the process itself has no chance to act: SIGKILL, ``os._exit``, a crash of native code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, Self
from weakref import WeakKeyDictionary

from deltacheck.leaf.external_errors import typed
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.lock.interrupts import exempt, shielded, when_free

# Python's own status if its clean-up fails, whatever the status would have been.
STATUS = 120
# A signal handler may exceed its grace period by this much before the watch ends the process.
_SLACK_SECONDS = 1.0


class Saves(Protocol):
    """An object that may have saves under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the saves. Raises the error that failed them, or ``TimeoutError``."""
        ...

    def close(self, timeout: float | None = None) -> None:
        """Finish the saves and stop. Raises what ``wait`` raises."""
        ...


# The owning process, the place for messages, and the seconds at exit. Weak keys: a registration
# must not keep an engine alive.
_open: WeakKeyDictionary[Saves, tuple[int, str, float]] = WeakKeyDictionary()
# Failures of saves whose owner nobody refers to, with the process that they are of.
_unseen: list[tuple[int, str]] = []
# Processes with an exit hook: this one, or those that it was forked from.
_hooked: set[int] = set()


def finish_at_exit(saves: Saves, place: str, seconds: float) -> None:
    """Close ``saves`` when the process ends, without keeping them alive.

    Args:
        saves: An engine or a manager.
        place: Its root, for messages.
        seconds: The longest time for it.
    """
    _open[saves] = os.getpid(), place, seconds
    if os.getpid() in _hooked:
        return
    # A forked child inherits the hooks of `atexit`, so a process and its forks register once.
    if not _hooked:
        atexit.register(_finish_all)
    _hooked.add(os.getpid())
    if _is_worker():
        # A forked worker ends by os._exit, which calls no other hooks than these.
        from multiprocessing.util import Finalize

        Finalize(None, _finish_all, exitpriority=100)


def forget(saves: Saves) -> None:
    """Do nothing for ``saves`` at exit, because they were closed."""
    _open.pop(saves, None)


def close_unattended(saves: Saves) -> None:
    """Close ``saves`` that nobody refers to any more. A failure is reported at exit."""
    _, place, _ = _open.get(saves, (0, "", 0.0))
    try:
        saves.close()
    except BaseException as error:  # noqa: BLE001 - the log has it, and nobody else can see it
        _unseen.append((os.getpid(), _lost(place, error)))
    finally:
        forget(saves)


def fail(message: str) -> None:
    """Report a failure on stderr, and let the ending process end with ``STATUS``."""
    _write_message(f"{message}. The exit status is {STATUS}")
    if not isinstance(sys.stderr, _FailingStream):
        sys.stderr = _FailingStream(sys.stderr)


def end_now(message: str) -> None:
    """Report a failure, and end the process at once.

    It would not end by itself if threads of other libraries wait for a storage that hangs.
    """
    _write_message(f"{message}. The process ends at once, with status {STATUS}")
    # `os._exit` calls no hooks, so those of other libraries are called here.
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(STATUS)


def _finish_all() -> None:
    # All times run from now: they are not added up over several engines.
    begin = Deadline.after(0).at
    for saves, place, seconds in _saves_of_process():
        _open.pop(saves, None)
        try:
            with shielded():
                saves.close(Deadline(begin + seconds).left)
        except BaseException as error:  # noqa: BLE001 - a second Ctrl-C, too, ends this wait only
            fail(_lost(place, error))
    for owner, message in _unseen:
        if owner == os.getpid():
            fail(message)


def _lost(place: str, error: BaseException) -> str:
    return f"{place}: the last save did not become a checkpoint. {_description(error)}"


def _saves_of_process() -> list[tuple[Saves, str, float]]:
    """Return the registrations of this process.

    A forked child also has those of its parent, and must not touch them.
    """
    return [
        (saves, place, seconds)
        for saves, (owner, place, seconds) in list(_open.items())
        if owner == os.getpid()
    ]


def _is_worker() -> bool:
    """Return true in a child of ``multiprocessing``."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


class _FailingStream:
    """A stand-in for ``sys.stderr`` that fails its last flush while the interpreter ends.

    This is the one documented way to change the exit status from a hook at exit that lets every
    other hook run (``sys.exit``: "the exit status is changed to 120").
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.flush()
        # A worker flushes while it still runs, and ends with status 1 if that fails.
        if sys.is_finalizing() or _is_worker():
            raise OSError("a save did not become a checkpoint")


# --- signals --------------------------------------------------------------------------------------


def finish_on_signal(*signals: int, grace_seconds: float = 25.0) -> Callable[[], None]:
    """Finish the saves under way on a signal, then end as the process would have without this.

    The handler waits for every save of this process, writes to stderr what it could not finish, and
    calls the handler that was installed before. If that was the default, the process dies by the
    signal itself, so that its parent sees the reason. A second signal ends the process at once. No
    further save is made: if the newest step is worth one, set a flag in a handler of your own and
    save from the training loop.

    Python calls handlers in the main thread, between two bytecodes. While that thread is in a long
    native call, saves go on by themselves, and the process ends when the call returns.

    Args:
        *signals: Signal numbers. Default: SIGTERM.
        grace_seconds: The longest wait for the saves. Longer: a slow storage gets the save through;
            shorter: further away from the SIGKILL that follows (Kubernetes and Slurm: 30 s by
            default).

    Returns:
        A function that puts the earlier handlers back.

    Raises:
        ValueError: ``grace_seconds`` is not positive, or this is not the main thread.
    """
    return _Finisher(signals or (signal.SIGTERM,), grace_seconds).remove


class _Finisher:
    """The handler of some signals, and a thread that ends the process if the handler hangs."""

    def __init__(self, signals: tuple[int, ...], grace_seconds: float) -> None:
        if not grace_seconds > 0:
            raise ValueError(f"grace_seconds must be more than 0, not {grace_seconds}")
        self._owner = os.getpid()
        self._grace_seconds = grace_seconds
        self._number = 0  # the signal that is being handled
        self._removed = False
        self._deadline = Deadline.after(None)
        self._arrived, self._finished = threading.Event(), threading.Event()
        self._handlers = _Handlers(signals, self._handle)
        # Started before it is needed: an interpreter that is ending starts no thread.
        threading.Thread(target=self._watch, name="deltacheck-grace", daemon=True).start()

    def remove(self) -> None:
        """Put the earlier handlers back, unless another one was installed since."""
        self._handlers.remove()
        self._removed = True
        self._finished.set()
        self._arrived.set()

    @exempt
    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A second signal ends the process at once. So does a first one in a forked child, which has
        # no thread that could finish a save.
        if os.getpid() != self._owner or self._number:
            _die(number)
            return
        self._number = number
        self._deadline = Deadline.after(self._grace_seconds)
        self._arrived.set()
        # A save that the main thread has half begun is finished, too.
        when_free(lambda: self._finish(number, frame))

    def _finish(self, number: int, frame: FrameType | None) -> None:
        for saves, place, _ in _saves_of_process():
            try:
                # The group of a terminal or of a scheduler gets the signal as a whole: torch's
                # handler of SIGCHLD then raises the end of a worker, and this wait goes on.
                with shielded():
                    saves.wait(self._deadline.left)
            except Exception as error:  # noqa: BLE001 - the process ends, and the message says why
                _write_message(
                    f"{place}: ended by {_name(number)} before the last save became a checkpoint."
                    f" {_description(error)}"
                )
        earlier = self._handlers.earlier[number]
        if earlier in (signal.SIG_DFL, None):
            _die(number)
            return
        # The earlier handler may let the process live, so the next signal is a first one again.
        self._number = 0
        self._finished.set()
        if callable(earlier):
            earlier(number, frame)

    def _watch(self) -> None:
        while True:
            self._arrived.wait()
            self._arrived.clear()
            if self._removed:
                return
            number = self._number
            if not self._finished.wait(self._grace_seconds + _SLACK_SECONDS):
                _write_message(
                    f"ended by {_name(number)}: the saves under way took longer than"
                    f" {self._grace_seconds:g} s"
                )
                # The status that a shell reports for a process that this signal has ended.
                os._exit(128 + number)
            self._finished.clear()


@typed
class StopSignals:
    """Handlers that remember a signal, so that the training saves at the end of its step and ends.

    Call ``end`` once the save is committed. The process then ends as it would have without this, so
    that the scheduler sees the reason. Further signals change nothing: starters of several
    processes and schedulers send the same one twice. In a ``with`` statement, the earlier handlers
    come back at the end of the block.

    Args:
        *signals: Signal numbers. Default: SIGTERM, and SIGUSR1, which Slurm sends before the end of
            a job if it is asked to.

    Raises:
        ValueError: This is not the main thread.
    """

    def __init__(self, *signals: int) -> None:
        self._owner = os.getpid()
        self._number = 0
        self._handlers = _Handlers(signals or (signal.SIGTERM, signal.SIGUSR1), self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    @property
    def number(self) -> int:
        """The first signal that has come.

        Returns:
            Its number; 0: none has come.
        """
        return self._number

    def remove(self) -> None:
        """Put the earlier handlers back, unless another one was installed since."""
        self._handlers.remove()

    def end(self, number: int | None = None) -> None:
        """End the process by the signal that has come; do nothing if none has.

        A handler that was installed before is called instead. If it returns, the process exits with
        128 and the number.

        Args:
            number: The signal that another rank has got. Default: that of this process.

        Raises:
            SystemExit: A handler of before has returned.
        """
        number = self._number if number is None else number
        self.remove()
        if number:
            end_by(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child, such as a worker of a loader, has no training to end, but serves one. Its
        # parent ends it by SIGTERM.
        if os.getpid() != self._owner:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._number = self._number or number


def end_by(number: int) -> NoReturn:
    """End the process by a signal, or through the handler of the program."""
    signal.raise_signal(number)
    raise SystemExit(128 + number)


class _Handlers:
    """A handler of several signals, in the place of earlier ones.

    Attributes:
        earlier: The handlers of before, by signal.
    """

    def __init__(
        self, signals: tuple[int, ...], handle: Callable[[int, FrameType | None], None]
    ) -> None:
        self._handle = handle
        self.earlier: dict[int, Any] = {}
        try:
            for number in signals:
                self.earlier[number] = signal.signal(number, handle)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Put the earlier handlers back, unless another one was installed since."""
        for number, earlier in self.earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def _die(number: int) -> None:
    """End the process by the signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _description(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _write_message(message: str) -> None:
    # Not through sys.stderr: a signal may have interrupted the main thread within a write to it,
    # and its buffer is not reentrant.
    with contextlib.suppress(OSError):
        os.write(2, f"deltacheck: {message}\n".encode(errors="replace"))
