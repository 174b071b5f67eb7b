"""What a reader reads is not removed under it: a shared lock on each segment's table, for as long
as
the segment is open.

The kernel frees the lock when the reader ends, however it ends. It takes no right to write, and
leaves nothing behind. Where the file system has no locks, the collector's grace period is what
protects a reader.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

_held: weakref.WeakSet[Pin] = weakref.WeakSet()


class Pin:
    """A shared lock on a file, until this object goes. Takes none, silently, where the file or the
    means is not there.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        try:
            self._descriptor = os.open(
                path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # missing, being removed at this moment, no descriptor left, no locks: whoever reads it will see
            self.release()
        _held.add(self)

    def release(self) -> None:
        """Let the file go; more than once does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()


def unlink_unless_pinned(path: Path) -> bool:
    """Remove a file that no reader has pinned; ``False`` where one has. A file that is not there
    counts as removed.
    """
    lock = -1
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    except OSError:  # not there, or no file that a reader would take for a table, or no locks here
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
