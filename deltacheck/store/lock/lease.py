"""One writer per root: an advisory lock on the control group, with the holder's name in it.

The kernel frees the lock when the holder dies, however it dies, so nothing has to be cleaned up
after a killed run. If locks do not work, the exclusive creation of the next manifest is the fence
(``commit.py``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from deltacheck.errors import Damaged, RootBusy
from deltacheck.store import layout
from deltacheck.store.lock.capabilities import lacking
from deltacheck.store.lock.holding import Holding

_held: weakref.WeakSet[LocalLease] = weakref.WeakSet()


class Lease(Protocol):
    """The right to write to a root, as ``storage.take_lease`` gives it.

    A lease that nobody refers to is given back.
    """

    holding: Holding

    def check(self) -> None:
        """Raise ``RootBusy`` if the right has been lost."""

    def release(self) -> None:
        """Give the root back; more than once does nothing."""


class LocalLease:
    """A lock on the control group of a local root.

    Args:
        root: A root whose control directory exists and is no link.

    Raises:
        RootBusy: Another process holds the root; the message names it.
        Damaged: The lock's file is not a regular file.
        StorageFailed: The file system has no locks.
    """

    def __init__(self, root: Path) -> None:
        self._descriptor = -1
        self.holding = Holding()
        self._root, self._path = root, root / layout.CONTROL / "zarr.json"
        # The file is written to: never through a link.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        irregular = f"{self._path} is not a regular file; remove it, it only names the writer"
        try:
            self._descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            raise Damaged(irregular, file=self._path) from error
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self._close()
            raise Damaged(irregular, file=self._path)
        try:
            self._take(root)
        except BaseException:
            # Closing the descriptor gives the lock back.
            self._close()
            raise
        _held.add(self)

    def _take(self, root: Path) -> None:
        if not self._is_locked():
            own = self._own_holding()
            # Another owner of this process may have been dropped without being closed. If there is
            # none, it may have been released since the look at the lock.
            is_free = own is None or own.await_release(root)
            if not (is_free and self._is_locked()):
                content = os.pread(self._descriptor, 4096, 0)
                holder = _holder(content) if own is None or own.released.is_set() else own
                raise RootBusy(
                    f"{root} is being written by {holder}. Wait for it to close, or write to"
                    " another directory"
                )
        # The holder is for people. The nonce lets ``check`` recognise the file as this writer's
        # own.
        attributes = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "nonce": secrets.token_hex(8),
        }
        self._content = content = layout.group_json({layout.ATTRIBUTE: attributes})
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))

    def _is_locked(self) -> bool:
        """Take the lock; return false if another open file has it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            missing = lacking(self._path, error, "lock")
            if missing is None:
                raise
            raise missing from error
        return True

    def _own_holding(self) -> Holding | None:
        """Return the holding of the lease of this process on the same file, if there is one."""
        file = os.fstat(self._descriptor)
        for lease in list(_held):
            with contextlib.suppress(OSError):  # it is released meanwhile
                if os.path.samestat(file, os.fstat(lease._descriptor)):
                    return lease.holding
        return None

    def check(self) -> None:
        """Raise ``RootBusy`` if the right has been lost.

        The lock's file was then replaced or written to by another process, as happens if locks do
        not work.
        """
        try:
            content = self._path.read_bytes()
        # A lock file that cannot be read protects nobody, so it counts as lost.
        except OSError as error:
            content = str(error).encode()
        if self._descriptor < 0 or content != self._content:
            raise RootBusy(
                f"this process has lost {self._root}: {_holder(content)} writes to it now. Nothing"
                " more is committed or deleted by this one"
            )

    def release(self) -> None:
        """Give the root back; more than once does nothing."""
        if self._descriptor >= 0:
            # Closing alone is not enough: a child that was just forked may share the open file.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()
            self.holding.released.set()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Globals may be gone while the interpreter ends, after which the kernel frees the lock.
        if not _is_finalizing():
            self.release()


def _holder(content: bytes) -> str:
    try:
        return str(json.loads(content)["attributes"][layout.ATTRIBUTE]["holder"])
    except (ValueError, KeyError, TypeError):
        return "another process"


def _forget_in_child() -> None:
    # A forked data loader shares the open file: without this it would hold the root after its
    # parent was killed.
    for lease in list(_held):
        # Closed and not unlocked: unlocking in the child would also unlock the parent's open file.
        lease._close()


os.register_at_fork(after_in_child=_forget_in_child)
