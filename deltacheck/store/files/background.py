"""Threads that carry out what they are handed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

_Task = tuple[Future[None], Callable[[], None]]


class Background:
    """A number of threads; they end with ``close``, or when this object goes, after what was handed
    to
    them.

    They are daemons, and no executor of ``concurrent.futures``: those are gone when ``atexit``
    finishes the saves under way. All are started at once, since from Python 3.12 on none can be
    started then.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads = [
            Thread(target=_serve, args=(self._tasks,), name=name, daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(
            self, _end, self._tasks
        ).atexit = False  # the saves under way may be finished after its time

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Call ``work`` on one of the threads; the future tells when it is done, and what it
        raised.
        """
        future: Future[None] = Future()
        self._tasks.put((future, work))
        return future

    def close(self) -> None:
        """End after what was handed over, to which nothing may be added. Waits for the threads, but
        not for a disk that hangs.
        """
        _end(self._tasks)
        for thread in self._threads:
            thread.join(1.0)


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        carry_out(*task)
        del task  # with the memory that the work refers to
    _end(tasks)


def carry_out(future: Future[None], work: Callable[[], None]) -> None:
    """Call ``work`` and let the future tell what came of it."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - it is raised where the future is waited for
        future.set_exception(error)
    else:
        future.set_result(None)


def _end(tasks: SimpleQueue[_Task | None]) -> None:
    tasks.put(None)  # for the first thread that gets it, which hands it on
