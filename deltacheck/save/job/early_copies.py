"""Copy leaves for a training that waits until they are captured.

A copy takes less time than the encoding of a leaf, and training may go on after either.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from functools import partial
from typing import Any, NoReturn

import numpy as np

from deltacheck.codec import host_memory, memory
from deltacheck.save.job.source import LeafSource, itself


class EarlyCopies:
    """The copies of one save.

    The encoder takes leaves from the front of the queue. Meanwhile, the thread that waits copies
    leaves from its end.

    Args:
        sources: The leaves that are captured behind the training loop.
        most_bytes: The most bytes of copies. Larger: training waits less; smaller: less memory.
    """

    def __init__(self, sources: deque[LeafSource], most_bytes: int) -> None:
        self._sources = sources
        self._bytes_left = most_bytes
        self._copies: deque[LeafSource] = deque()
        # Held by the one thread that copies. Nobody waits for it: a handler of a signal that has
        # interrupted a copy leaves the rest to the encoder.
        self._copying = threading.Lock()

    def make(self) -> None:
        """Copy leaves until none is left, memory is used up, or one is no view of host memory.

        Do nothing if copies are being made already.
        """
        if not self._copying.acquire(blocking=False):
            return
        try:
            while self._make_one():
                pass
        finally:
            self._copying.release()

    def take(self) -> deque[LeafSource]:
        """Return the copied leaves, in the order of the queue.

        The caller has emptied the queue, and may have captured the first of them itself. A copy
        that is still under way is of such a leaf: each leaves the queue after it is complete.
        """
        return self._copies.copy()

    def _make_one(self) -> bool:
        try:
            source = self._sources[-1]
            size = source.spec.raw_bytes
            if not source.is_view or size > self._bytes_left:
                return False
            out = host_memory.empty(size)
        except (IndexError, MemoryError):
            return False
        self._bytes_left -= size
        # Copied before it leaves the queue: if Ctrl-C ends the copy, the encoder reads the leaf.
        self._copies.appendleft(_copied(source, out))
        # Empty if the encoder has taken the leaf meanwhile.
        with contextlib.suppress(IndexError):
            self._sources.pop()
        return True


def _copied(source: LeafSource, out: np.ndarray[Any, np.dtype[np.uint8]]) -> LeafSource:
    """Return the source of a copy of a leaf, or of the error that its check has raised."""
    try:
        content = memory.copied(source.current(), out)
        source.check(content)
    except Exception as error:  # noqa: BLE001 - the encoder raises it, and fails the save
        return LeafSource(source.spec, partial(_fail, error), lazy=True)
    return LeafSource(source.spec, partial(itself, content), lazy=True)


def _fail(error: Exception) -> NoReturn:
    raise error
