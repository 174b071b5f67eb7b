"""One writer a root on an object store: a lease that its holder renews, taken and renewed by
compare-and-swap on one object.

No clock is compared with another. Who finds a lease taken watches it: if it changes, its holder
lives; if it stays as it is for as long as the holder has promised at most, the holder is taken for
dead. The holder counts the same time from before its last renewal, so that it stops committing
before anyone may take over. What holds even where all this fails is the conditional creation of the
next manifest (``root.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from deltacheck.errors import RootBusy, StorageFailed
from deltacheck.store import layout

if TYPE_CHECKING:
    from deltacheck.store.files.object_path import ObjectPath

log = logging.getLogger("deltacheck")

_LONGEST_SECONDS = 3600.0  # that a lease is waited for, whatever its object says
_held: weakref.WeakValueDictionary[str, ObjectLease] = weakref.WeakValueDictionary()


class ObjectLease:
    """The right to write to a root. A thread renews it until it is released.

    Raises ``RootBusy``, naming the holder, where another has it; that takes until the holder is
    next heard of, at most ``lease_seconds`` of its store. Where it is not heard of for so long, the
    lease is taken over, with the next epoch. A holder of this machine whose process is gone is not
    waited for.
    """

    def __init__(self, root: ObjectPath) -> None:
        self._root = root
        self._object = root / layout.CONTROL / "zarr.json"
        self._seconds = root.store.lease_seconds
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._beat = 0
        self._lost = ""
        self._released = threading.Event()
        known = _held.get(str(root))
        if known is not None and known.holds():
            raise _busy(root, f"process {os.getpid()}, this one")
        generation, epoch = self._wait_until_free()
        self.epoch = epoch + 1
        self._said: dict[str, Any] = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "machine": _machine(),
            "process": os.getpid(),
            "nonce": secrets.token_hex(8),
            "epoch": self.epoch,
            "seconds": self._seconds,
        }
        begin = time.monotonic()
        taken = self._object.swap(self._content(), generation)
        if taken is None:
            raise _busy(root, _holder(_parsed(self._object.read()[0])))
        self._generation, self._renewed = taken, begin
        _held[str(root)] = self
        threading.Thread(
            target=_renew,
            args=(weakref.ref(self), self._released, self._seconds / 3),
            name="deltacheck-lease",
            daemon=True,
        ).start()

    def holds(self) -> bool:
        """Whether the lease is neither released nor known as lost."""
        return not (self._released.is_set() or self._lost or os.getpid() != self._owner)

    def check(self) -> None:
        """Raise ``RootBusy`` if the right has been lost. Raises what ``seconds_left`` raises."""
        self.seconds_left()

    def seconds_left(self) -> float:
        """Make sure that nobody else may write; the seconds for which that holds.

        Raises ``RootBusy`` where the lease was lost, ``StorageFailed`` where it could not be
        renewed in time.
        """
        if self._released.is_set() or os.getpid() != self._owner:
            raise _busy(
                self._root, "nobody: the lease of this writer was given back. Open the root anew"
            )
        if not self._lost and self._left() < self._seconds / 2:
            try:
                self.renew()
            except StorageFailed as error:
                if self._left() <= 0:
                    raise StorageFailed(
                        f"{self._root}: the lease could not be renewed for {self._seconds:g} s, so"
                        f" another may write by now: {error}"
                    ) from error
        if self._lost:
            raise _busy(self._root, f"{self._lost}, which took over from this process")
        return max(0.0, self._left())

    def renew(self) -> None:
        """Say that the holder lives. Raises ``StorageFailed``; a lease that another has taken is
        noted for ``check``.
        """
        with self._lock:
            if not self.holds():
                return
            begin = time.monotonic()
            self._beat += 1
            generation = self._object.swap(
                self._content(), self._generation, timeout=max(1.0, self._seconds / 3)
            )
            if generation is None:
                generation = self._settle()
            if generation is not None:
                self._generation, self._renewed = generation, begin

    def release(self) -> None:
        """Give the root back; more than once does nothing. Where the store does not answer, the
        next writer waits until the lease is over.
        """
        if not self.holds():
            self._released.set()
            return
        with self._lock:
            self._released.set()
            with contextlib.suppress(StorageFailed):
                self._object.swap(
                    layout.group_json({layout.ATTRIBUTE: {**self._said, "released": True}}),
                    self._generation,
                )

    def _settle(self) -> bytes | None:
        """After a renewal that found another content: an earlier one of ours whose reply was lost,
        or another's lease.
        """
        content, generation = self._object.read()
        found = _parsed(content)
        if found.get("nonce") == self._said["nonce"]:
            return generation
        self._lost = _holder(found)
        log.error(
            "%s is written by %s by now; nothing more is committed from here",
            self._root,
            self._lost,
        )
        return None

    def _left(self) -> float:
        return self._renewed + self._seconds - time.monotonic()

    def _content(self) -> bytes:
        return layout.group_json({layout.ATTRIBUTE: {**self._said, "beat": self._beat}})

    def _wait_until_free(self) -> tuple[bytes, int]:
        """The generation to take the lease from, and its epoch."""
        content, generation = self._object.read()
        found = _parsed(content)
        epoch = found.get("epoch", 0)
        epoch = epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else 0
        if not found or found.get("released") is True or _is_dead(found):
            return generation, epoch
        seconds = found.get("seconds")
        seconds = (
            min(float(seconds), _LONGEST_SECONDS)
            if isinstance(seconds, int | float) and seconds > 0
            else self._seconds
        )
        log.warning(
            "%s is held by %s; waiting up to %g s for a sign of life",
            self._root,
            _holder(found),
            seconds,
        )
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            time.sleep(seconds / 20)
            content, now = self._object.read(unless=generation)
            if now != generation:
                if _parsed(content).get("released") is True:
                    return now, epoch
                raise _busy(self._root, _holder(found))
        return generation, epoch


def seconds_left(root: ObjectPath) -> float | None:
    """Before a commit: what this process's lease on a root says, see ``ObjectLease.seconds_left``;
    ``None`` where it has none.
    """
    lease = _held.get(str(root))
    return None if lease is None else lease.seconds_left()


def _renew(reference: weakref.ref[ObjectLease], released: threading.Event, every: float) -> None:
    # The thread keeps no lease alive: one that nobody refers to any more runs out.
    while not released.wait(every):
        lease = reference()
        if lease is None or not lease.holds():
            return
        try:
            lease.renew()
        except StorageFailed as error:
            log.warning("the lease could not be renewed: %s", error)
        del lease


def _busy(root: ObjectPath, holder: str) -> RootBusy:
    return RootBusy(
        f"{root} is being written by {holder}. Wait for it to close, or write to another prefix"
    )


def _parsed(content: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(content or b"")["attributes"][layout.ATTRIBUTE]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _holder(found: dict[str, Any]) -> str:
    return str(found.get("holder", "another writer"))[:200]


def _machine() -> str:
    """What this process shares with those whose numbers mean the same here: host, boot, process
    namespace. Empty where it cannot be told.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return (
                f"{socket.gethostname()}/{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
            )
    except OSError:
        return ""


def _is_dead(found: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that is gone."""
    number = found.get("process")
    if (
        not found.get("machine")
        or found["machine"] != _machine()
        or not isinstance(number, int)
        or number <= 0
    ):
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
