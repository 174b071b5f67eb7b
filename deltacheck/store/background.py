"""Threads that carry out what they are handed, for one segment."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Task = tuple[Future[None], Callable[[], None]]


class Background:
    """At most ``most`` threads, started as they are needed; they end when this object goes, after what was handed to them.

    They are daemons, and no executor of ``concurrent.futures``: those are gone when ``atexit`` finishes the saves under way.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._started = 0
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        weakref.finalize(self, _end, self._tasks).atexit = False  # the saves under way may be finished after its time

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Call ``work`` on one of the threads; the future tells when it is done, and what it raised."""
        future: Future[None] = Future()
        self._tasks.put((future, work))
        if self._started < self._most:
            self._started += 1
            threading.Thread(target=_serve, args=(self._tasks,), name=self._name, daemon=True).start()
        return future


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        _carry_out(*task)
        del task  # with the memory that the work refers to
    _end(tasks)


def _carry_out(future: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - it is raised where the future is waited for
        future.set_exception(error)
    else:
        future.set_result(None)


def _end(tasks: SimpleQueue[_Task | None]) -> None:
    tasks.put(None)  # for the first thread that gets it, which hands it on
