"""Copy leaves for a training that waits until they are captured.

A copy takes less time than the encoding of a leaf, and training may go on after either.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from deltacheck.codec import host_memory
from deltacheck.save.job.source import LeafSource, ViewedLeaf


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
        """Copy leaves until none is left, memory is used up, or one is read from elsewhere.

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
            views = source.views or ((ViewedLeaf(source),) if source.is_view else ())
            size = sum(view.bytes_to_copy for view in views)
            if not views or size > self._bytes_left:
                return False
            memories = [host_memory.empty(view.bytes_to_copy) for view in views]
        except (IndexError, MemoryError):
            return False
        self._bytes_left -= size
        for view, out in zip(views, memories, strict=True):
            view.copy(out)
        # Copied before it leaves the queue: if Ctrl-C ends the copy, the encoder reads the leaf.
        self._copies.appendleft(source if source.views else views[0].source())
        # Empty if the encoder has taken the leaf meanwhile.
        with contextlib.suppress(IndexError):
            self._sources.pop()
        return True
