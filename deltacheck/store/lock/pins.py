"""Shared locks of readers: a segment that a reader has open is not removed.

The kernel frees the lock when the reader ends, however it ends. A pin gives no right to write and
leaves nothing behind. If the file system has no locks, the collector's grace period protects a
reader.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

_held: weakref.WeakSet[Pin] = weakref.WeakSet()


class Pin:
    """A shared lock on a file, for as long as this object lives.

    No lock is taken, without an error, if the file does not exist or cannot be locked.

    Args:
        path: The table of a segment.
    """

    # Bound here: a pin may outlive the globals of its module, because a module that is torn down
    # later, or a thread, still refers to a reader. The kernel would free the lock either way.
    _close = staticmethod(os.close)

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        try:
            self._descriptor = os.open(
                path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            # The file is missing or being removed, no descriptor is left, or there are no locks.
            # The read that follows reports what matters.
            self.release()
        _held.add(self)

    def release(self) -> None:
        """Give the lock back; more than once does nothing."""
        if self._descriptor >= 0:
            self._close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()


def unlink_unless_pinned(path: Path) -> bool:
    """Remove a file; return ``False`` if a reader has pinned it.

    A file that does not exist counts as removed.
    """
    lock = -1
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    except OSError:
        # The file is missing, is none that a reader opens as a table, or there are no locks.
        pass
    try:
        path.unlink(missing_ok=True)
    finally:
        if lock >= 0:
            os.close(lock)
    return True


def _forget_in_child() -> None:
    # A forked data loader shares the open files: without this it would hold segments for as long as
    # it lives.
    for pin in list(_held):
        pin.release()


os.register_at_fork(after_in_child=_forget_in_child)
