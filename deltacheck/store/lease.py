"""One writer a root: an advisory lock on the control group, with the holder's name in its attributes.

The kernel frees the lock when the holder dies, however it dies, so a killed run never has to be cleaned up after. The fence
that holds without the lock is the exclusive creation of the next manifest (``root.py``).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from deltacheck.errors import RootBusy
from deltacheck.store import arrays, layout

_held: weakref.WeakSet[Lease] = weakref.WeakSet()


class Lease:
    """The right to write to a root. Raises ``RootBusy``, naming the holder, where another has it."""

    def __init__(self, root: Path) -> None:
        folder = root / layout.CONTROL
        folder.mkdir(exist_ok=True)
        self._descriptor = os.open(folder / "zarr.json", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take(root)
        except BaseException:
            self._close()  # which gives the lock back
            raise
        _held.add(self)

    def _take(self, root: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(self._descriptor, 4096, 0))
            raise RootBusy(
                f"{root} is being written by {holder}. Wait for it to close, or write to another directory"
            ) from None
        content = arrays.group_json({layout.ATTRIBUTE: {"holder": f"process {os.getpid()} on {socket.gethostname()}"}})
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))

    def release(self) -> None:
        """Give the root back; more than once does nothing."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _holder(content: bytes) -> str:
    try:
        return str(json.loads(content)["attributes"][layout.ATTRIBUTE]["holder"])
    except (ValueError, KeyError, TypeError):
        return "a process that has just started"


def _forget_in_child() -> None:
    # A forked data loader shares the open file: without this it would hold the root after its parent was killed.
    for lease in list(_held):
        lease._close()


os.register_at_fork(after_in_child=_forget_in_child)
