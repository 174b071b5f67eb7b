"""What becomes of saves under way when the process ends: by itself, by an exception, or by a
signal.

Whoever saves registers here. At exit each is closed within its own time; a failure that nobody was
told of is said on stderr, and the exit status becomes ``STATUS``: a scheduler that sees 0 may rely
on every save. ``finish_on_signal`` does as much for SIGTERM, which ends Python at once otherwise.
Nothing can be done where the process has no say: SIGKILL, ``os._exit``, a crash of native code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from deltacheck.store.deadline import Deadline

STATUS = 120  # what Python itself gives where its clean-up fails, whatever the status was to be
# That a signal handler may take longer than its grace period before the watch ends the process
_SLACK_SECONDS = 1.0


class Saves(Protocol):
    """Who may have saves under way. ``str()`` of it says where; both raise what failed, or
    ``TimeoutError``.
    """

    def wait(self, timeout: float | None = None) -> None: ...

    def close(self, timeout: float | None = None) -> None: ...


_open: WeakKeyDictionary[Saves, tuple[int, str, float]] = (
    WeakKeyDictionary()
)  # process, place, seconds
_hooked: set[int] = set()  # processes whose end we watch, this one or those that it was forked from


def finish_at_exit(saves: Saves, where: str, seconds: float) -> None:
    """Close ``saves`` when the process ends, for at most ``seconds``, without keeping it alive.
    ``where``: for messages.
    """
    _open[saves] = os.getpid(), where, seconds
    if os.getpid() in _hooked:
        return
    if not _hooked:
        atexit.register(_finish_all)
    _hooked.add(os.getpid())
    if _is_worker():
        # One that was forked ends by os._exit: of all hooks only these are called.
        from multiprocessing.util import Finalize

        Finalize(None, _finish_all, exitpriority=100)


def forget(saves: Saves) -> None:
    """It was closed: nothing is left to do at exit."""
    _open.pop(saves, None)


def fail(message: str) -> None:
    """Say a failure that nobody else will hear of, and let the process end with ``STATUS``.
    REQUIRES: the process is ending.
    """
    _say(f"{message}. The exit status is {STATUS}")
    if not isinstance(sys.stderr, _FailingStream):
        sys.stderr = _FailingStream(sys.stderr)


def end_now(message: str) -> None:
    """As ``fail``, for a process that would not end by itself because threads of others wait for a
    storage that hangs.
    """
    _say(f"{message}. The process ends at once, with status {STATUS}")
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(STATUS)


def _finish_all() -> None:
    began = Deadline.after(0).at
    for saves, where, seconds in _own():
        _open.pop(saves, None)
        try:
            saves.close(Deadline(began + seconds).left)
        except BaseException as error:  # noqa: BLE001 - also a second Ctrl-C: it ends this wait, and must be told
            fail(f"{where}: the last save did not become a checkpoint. {_words(error)}")


def _own() -> list[tuple[Saves, str, float]]:
    """Those of this process; a forked child has also its parent's, with which it must do
    nothing.
    """
    return [
        (saves, where, seconds)
        for saves, (owner, where, seconds) in list(_open.items())
        if owner == os.getpid()
    ]


def _is_worker() -> bool:
    """Whether this is a child of ``multiprocessing``."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


class _FailingStream:
    """Stands for ``sys.stderr`` while the interpreter ends, and fails its last flush: the one
    documented way for a hook at exit to make the exit status differ from 0 (``sys.exit``: "the exit
    status is changed to 120") that leaves every other hook its turn.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.flush()
        if (
            sys.is_finalizing() or _is_worker()
        ):  # workers flush while they still run, and end with status 1 where that fails
            raise OSError("a save did not become a checkpoint")


# --- signals --------------------------------------------------------------------------------------


def finish_on_signal(*signals: int, grace_seconds: float = 25.0) -> Callable[[], None]:
    """On these signals (by default SIGTERM) finish the saves under way first, then end as the
    process
    would have without this.

    The handler waits for every save of this process for at most ``grace_seconds``, says on stderr
    what it could not finish, and hands on to the handler that was there before; where that was the
    default, the process dies by the signal itself, so that its parent sees why. Longer: a slow
    storage gets the save through; shorter: further away from the SIGKILL that follows (Kubernetes
    and Slurm: 30 s by default). A second signal ends the process at once. No further save is made:
    where the newest step is worth one, set a flag in a handler of your own and save from the
    training loop.

    Python calls handlers in the main thread, between two bytecodes. While that is in a long native
    call, saves go on by themselves, and the process ends when the call does. Returns a function
    that puts the handlers of before back. Raises ``ValueError`` outside the main thread.
    """
    return _Finisher(signals or (signal.SIGTERM,), grace_seconds).remove


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let a signal's handler wait until the end of this block: a save that the main thread is in
    the middle of is finished, too.
    """
    global _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        while not _depth and _deferred:
            _deferred.pop()()


_depth = 0  # of blocks that the main thread is in
_deferred: list[Callable[[], None]] = []


class _Finisher:
    """The handler of some signals, and a watch that ends the process where the handler does not
    come to its end.
    """

    def __init__(self, signals: tuple[int, ...], grace_seconds: float) -> None:
        if not grace_seconds > 0:
            raise ValueError(f"grace_seconds must be more than 0, not {grace_seconds}")
        self._owner = os.getpid()
        self._grace_seconds = grace_seconds
        self._number = 0  # of the signal that is being handled
        self._removed = False
        self._deadline = Deadline.after(None)
        self._arrived, self._done = threading.Event(), threading.Event()
        self._before: dict[int, Any] = {}
        try:
            for number in signals:
                self._before[number] = signal.signal(number, self._handle)
        except BaseException:
            self.remove()
            raise
        # Started now: where the interpreter is ending already, none can be.
        threading.Thread(target=self._watch, name="deltacheck-grace", daemon=True).start()

    def remove(self) -> None:
        """Put the handlers of before back, where nobody has taken our place since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._removed = True
        self._done.set()
        self._arrived.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner or self._number:
            _die(number)
            return
        self._number = number
        self._deadline = Deadline.after(self._grace_seconds)
        self._arrived.set()
        if _depth:
            _deferred.append(lambda: self._finish(number, frame))
        else:
            self._finish(number, frame)

    def _finish(self, number: int, frame: FrameType | None) -> None:
        for saves, where, _ in _own():
            try:
                saves.wait(self._deadline.left)
            except Exception as error:  # noqa: BLE001 - the process ends; what is left to do is to say why
                _say(
                    f"{where}: ended by {_name(number)} before the last save became a checkpoint."
                    f" {_words(error)}"
                )
        before = self._before[number]
        if before in (signal.SIG_DFL, None):
            _die(number)
            return
        self._number = 0  # the handler of before may let the process live
        self._done.set()
        if callable(before):
            before(number, frame)

    def _watch(self) -> None:
        while True:
            self._arrived.wait()
            self._arrived.clear()
            if self._removed:
                return
            number = self._number
            if not self._done.wait(self._grace_seconds + _SLACK_SECONDS):
                _say(
                    f"ended by {_name(number)}: the saves under way took longer than"
                    f" {self._grace_seconds:g} s"
                )
                os._exit(128 + number)
            self._done.clear()


def _die(number: int) -> None:
    """End by the signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _say(message: str) -> None:
    # Not through sys.stderr: the main thread may be writing to it where a signal has interrupted
    # it.
    with contextlib.suppress(OSError):
        os.write(2, f"deltacheck: {message}\n".encode(errors="replace"))
