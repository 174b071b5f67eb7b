"""One process's right to write to a manager root, shared by its handlers: the lease, sequence
numbers, collections.
"""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Protocol

from deltacheck.save.root_writer import RootWriter
from deltacheck.store.files.background import Background
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import take_lease
from deltacheck.store.root import MANAGER_STORE, Root, Store, create_manager_store

log = logging.getLogger("deltacheck")

_writers: dict[Path, Writer] = {}
_lock = threading.Lock()


class Holder(Protocol):
    """What stands on segments of a root, whether it writes or has only restored so far."""

    root: Path

    def protected(self) -> set[str]:
        """The segments that its next save may build on."""
        ...


holders: weakref.WeakSet[Holder] = weakref.WeakSet()  # all of this process


class Writer:
    """Made by ``writer_of``, one a root and process; released by every handler that has it."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self.store: Store = create_manager_store(path, durability=durability)
        self.root = Root(path, self.store)
        self._path = path
        self._writer = RootWriter(self.root, take_lease(self.store.path))
        self._writer.protect(self._protected)
        self._next_seq = self.root.next_seq()
        self._users: set[object] = set()
        self._collector = Background(1, "deltacheck-collector")

    def take_seq(self) -> int:
        """A sequence number that no save of this root has."""
        with _lock:
            self._next_seq += 1
            return self._next_seq - 1

    def collect(self, grace_seconds: float, timeout_seconds: float) -> None:
        """Remove segments that no step, saved or under way, stands on. Never fails, nor waits for a
        hanging storage: a step is about to be committed, and garbage can wait.
        """
        if not wait(
            [self._collector.start(partial(self._collect, grace_seconds))], timeout_seconds
        ).done:
            # It may go on at any time and do no harm: what no step needs, no later one will.
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
            *(holder.protected() for holder in list(holders) if holder.root == self.root.path)
        )

    def release(self, user: object) -> None:
        """Give up a share; the last one gives the root back."""
        with _lock:
            self._users.discard(user)
            if not self._users:
                self._collector.close()
                self.store.close()
                self._writer.release()
                _writers.pop(self._path, None)


class Guest:
    """What a process has that saves together with process 0, whose ``Writer`` has the lease,
    numbers the saves and collects.
    """

    def __init__(self, path: Path, durability: Durability) -> None:
        self.store: Store = create_manager_store(path, durability=durability)

    def release(self, user: object) -> None:
        """As of ``Writer``."""
        self.store.close()


def writer_of(path: Path, user: object, durability: Durability = Durability.POWER) -> Writer:
    """The right of this process to write to the root ``path``, taken where it does not have it yet;
    ``user`` must release it.

    Raises ``RootBusy`` naming the holder where another process has it, ``OSError`` where the root
    cannot be written, ``UnsupportedFormat``, ``ValueError`` where another handler of this process
    writes to it with another ``durability``.
    """
    with _lock:
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
    """Whether a manager root has a store of ours."""
    return (root / MANAGER_STORE / "zarr.json").is_file()
