"""Worker threads that save and read while training goes on, and bounded waits for the storage."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from deltacheck.errors import StorageTimeout
from deltacheck.store.lock.interrupts import Condition

Result = TypeVar("Result")

_MOST_NICENESS = 19
# The longest wait without progress, at the end of the process, for tasks that nobody waits for.
_EXIT_SECONDS = 5.0

# Of one read, or one small file. Longer: a stalled file system gets more time; shorter: a caller
# learns of a lost one sooner.
TIMEOUT_SECONDS = 600.0

# The tasks of this process that are not finished.
_under_way: set[Task[Any]] = set()
_ends = Condition()
os.register_at_fork(after_in_child=_under_way.clear)


class Task(Generic[Result]):
    """Work of another thread, as a future, without a lock (``interrupts``).

    Args:
        work: Called on the thread.

    Attributes:
        error: The error of the work, once it has ended; ``None``: it has none.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work: Callable[[], Result] | None = work
        self._result: list[Result] = []
        self.error: BaseException | None = None
        self._end = Condition()
        # The end of the process waits for this task.
        _under_way.add(self)

    def done(self) -> bool:
        """Return true if the work has ended."""
        return self._work is None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; return false if ``timeout`` seconds have passed before."""
        return self._end.wait_until(self.done, timeout)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end, and return what the work has returned.

        Raises the error of the work, or ``TimeoutError``.
        """
        if not self.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self._result[0]

    def carry_out(self) -> None:
        """Do the work on the calling thread."""
        assert self._work is not None
        try:
            self._result.append(self._work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the end is waited for
            self.error = error
        finally:
            # The memory that the work refers to must not live as long as the task.
            self._work = None
            _under_way.discard(self)
            self._end.notify()
            _ends.notify()


class Background:
    """A fixed number of worker threads.

    They end with ``close``, or when this object is deleted, after the tasks that were handed over.
    The end of the process waits for tasks under way, unless their storage hangs. The threads are
    daemons and no executor of ``concurrent.futures``: those are gone when ``atexit`` finishes the
    saves under way. All are started at once, because from Python 3.12 on none can be started then.

    Args:
        threads: Number of threads.
        name: Name of the threads.
        niceness: Added to the niceness of the process. Larger: training loses less time; smaller:
            the work ends sooner beside training.
    """

    def __init__(self, threads: int, name: str, niceness: int = 0) -> None:
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._threads = [
            Thread(target=_serve, args=(self._tasks, niceness), name=name, daemon=True)
            for _ in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            # Those that were started would wait for tasks that nobody can hand over.
            _end(self._tasks)
            raise
        # Not at exit: the saves under way may be finished after that.
        weakref.finalize(self, _end, self._tasks).atexit = False

    def start(self, work: Callable[[], Result]) -> Task[Result]:
        """Call ``work`` on one of the threads; return the task."""
        task = Task(work)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """End after the tasks that were handed over; none may be added.

        The call waits for the threads, but not for a disk that hangs.
        """
        _end(self._tasks)
        for thread in self._threads:
            thread.join(1.0)


def _serve(tasks: SimpleQueue[Task[Any] | None], niceness: int) -> None:
    if niceness:
        lower_priority(niceness)
    while (task := tasks.get()) is not None:
        task.carry_out()
        # Its error has the frames of those who waited for it, and so the segments that they pinned,
        # which an idle thread must not hold.
        del task
    _end(tasks)


def wait_for(future: Any, path: object, seconds: float | None = None) -> Any:
    """Return the result of a task or a future of TensorStore; ``StorageTimeout`` after ``seconds``.

    TensorStore retries some failures of a file system without end.

    Args:
        future: The operation under way.
        path: The file or array that it concerns, for the error.
        seconds: Longest wait; ``None``: ``TIMEOUT_SECONDS``.
    """
    seconds = TIMEOUT_SECONDS if seconds is None else seconds
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        raise StorageTimeout(
            f"{path}: the storage did not answer within {seconds:.3g} s; it may hang"
        ) from None


def lower_priority(niceness: int) -> None:
    """Let the calling thread, and those that it starts, yield to the training.

    Args:
        niceness: Added to the niceness of the process; 1 to 19.
    """
    # Linux gives each thread a priority of its own; elsewhere the thread keeps that of the process.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            base = os.getpriority(os.PRIO_PROCESS, os.getpid())
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), min(_MOST_NICENESS, base + niceness)
            )


def carried_out(work: Callable[[], Result]) -> Task[Result]:
    """Call ``work`` on the calling thread; return a task that has ended."""
    task = Task(work)
    task.carry_out()
    return task


def _end(tasks: SimpleQueue[Task[Any] | None]) -> None:
    # One mark is enough: the first thread that gets it passes it on.
    tasks.put(None)


@atexit.register
def _finish() -> None:
    """Wait for the tasks under way at the end of the process.

    Up to Python 3.13 a thread that comes back from native code while the interpreter ends is
    unwound, which C++ answers with an abort. The hook of this module runs after those that finish
    saves, because it is registered before them.
    """
    # A busy machine may need long for all of them; only storage that hangs ends the wait.
    while pending := list(_under_way):
        if not _ends.wait_until(lambda: any(task.done() for task in pending), _EXIT_SECONDS):
            return
