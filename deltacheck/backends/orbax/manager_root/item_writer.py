"""The right of a process to write to a manager root, shared by the handlers of the process."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Protocol

from deltacheck.save.chains.chain_state import Numbers
from deltacheck.save.root_writer import RootWriter
from deltacheck.store.files.background import Background
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import take_lease
from deltacheck.store.lock.interrupts import postponed
from deltacheck.store.roots.manager_steps import MANAGER_STORE
from deltacheck.store.roots.opening import create_manager_store
from deltacheck.store.roots.root import Root
from deltacheck.store.roots.store import Store

log = logging.getLogger("deltacheck")

# The writers of this process, by root, because a process can hold the lease of a root once. The
# lock also guards the users of every writer.
_writers: dict[Path, Writer] = {}
_lock = threading.RLock()


class Holder(Protocol):
    """An object that builds on segments of a root: it writes, or has restored a step."""

    root: Path

    def protected(self) -> set[str]:
        """Return the segments that its next save may build on."""
        ...


holders: weakref.WeakSet[Holder] = weakref.WeakSet()  # all holders of this process


class Writer:
    """The writer of one manager root. ``writer_of`` makes it, and each of its users releases it."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        with contextlib.ExitStack() as acquired:
            self.store: Store = create_manager_store(path, durability=durability)
            acquired.callback(self.store.close)
            self.root = Root(path, self.store)
            # The store comes first, because the lease lies in it.
            lease = take_lease(self.store.path)
            acquired.callback(lease.release)
            # Read under the lease: before, another process could have used the number.
            self.numbers = Numbers(self.root.next_seq())
            # From here on, ``release`` gives both back.
            acquired.pop_all()
        self._writer = RootWriter(self.root, lease)
        self._writer.protect(self._protected)
        self._users: set[object] = set()
        # A thread, because a call into a hanging storage cannot be interrupted.
        self._collector = Background(1, "deltacheck-collector")

    def collect(self, grace_seconds: float, timeout_seconds: float) -> None:
        """Remove the segments that no step and no save under way needs.

        A failure is only logged, and a hanging storage is not waited for: a step is about to be
        committed, and unneeded segments can wait.
        """
        if not self._collector.start(partial(self._collect, grace_seconds)).wait(timeout_seconds):
            # The hanging collection may continue at any time: a segment that no step needs now, no
            # later step will need.
            self._collector = Background(1, "deltacheck-collector")
            log.warning(
                "segments of %s were not collected within %.0f s; the storage may hang",
                self.store.path,
                timeout_seconds,
            )

    def _collect(self, grace_seconds: float) -> None:
        try:
            self._writer.collect(grace_seconds)
        except Exception:
            log.warning(
                "segments that are no longer needed could not be removed from %s",
                self.store.path,
                exc_info=True,
            )

    def _protected(self) -> set[str]:
        """Return the segments that any holder of this root may build on."""
        return set().union(
            # A copy of the set: this runs on the collector thread, and other threads add holders.
            *(holder.protected() for holder in list(holders) if holder.root == self.root.path)
        )

    def release(self, user: object) -> None:
        """Release the share of a user. The last release gives the root back."""
        with postponed(), _lock:
            self._users.discard(user)
            if not self._users:
                # The lease goes last: until the threads have ended, they may write and delete.
                self._collector.close()
                self.store.close()
                self._writer.release()
                _writers.pop(self._path, None)


class Guest:
    """The store of a process that saves together with process 0.

    The ``Writer`` of process 0 has the lease, numbers the saves and collects segments.
    """

    def __init__(self, path: Path, durability: Durability) -> None:
        self.store: Store = create_manager_store(path, durability=durability)

    def release(self, user: object) -> None:
        """End the threads that write."""
        self.store.close()


def writer_of(path: Path, user: object, durability: Durability = Durability.POWER) -> Writer:
    """Return the writer of a root, which ``user`` must release.

    Args:
        path: The root.
        user: The item that will write.
        durability: The durability of what it writes.

    Raises:
        RootBusy: Another process, which the message names, writes to the root.
        OSError: The root cannot be written.
        UnsupportedFormat: A newer version wrote the root.
        ValueError: Another handler of this process writes to it with another durability.
    """
    with postponed(), _lock:
        writer = _writers.get(path)
        if writer is None:
            writer = _writers[path] = Writer(path, durability)
        elif writer.store.durability is not durability:
            raise ValueError(
                f"{path} is already written with durability={writer.store.durability.value!r};"
                " handlers of one root share it"
            )
        writer._users.add(user)
        return writer


def has_store(root: Path) -> bool:
    """Return whether a manager root has a store of this package."""
    return (root / MANAGER_STORE / "zarr.json").is_file()
