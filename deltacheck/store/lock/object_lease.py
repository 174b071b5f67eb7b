"""One writer per root on an object store: a lease that its holder renews by compare-and-swap.

No clock is compared with another (compare C. Gray and D. Cheriton, "Leases: an efficient
fault-tolerant mechanism for distributed file cache consistency", 1989). A process that finds a
lease watches its object. If the object changes, the holder lives. If it stays the same for the time
that the holder has promised at most, the holder counts as dead. The holder counts the same time
from before its last renewal, so it stops committing before another process may take over. If all
this fails, the conditional creation of the next manifest is the fence (``commit.py``).
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
from deltacheck.store.lock.holding import Holding
from deltacheck.store.lock.interrupts import postponed

if TYPE_CHECKING:
    from deltacheck.store.files.object_path import ObjectPath

log = logging.getLogger("deltacheck")

_LONGEST_SECONDS = 3600.0  # longest wait for a lease, whatever its object claims
# By the root's address. Weak references let a lease without users run out.
_held: weakref.WeakValueDictionary[str, ObjectLease] = weakref.WeakValueDictionary()
# Of this process, by the nonce of their claims: all leases, and those that somebody refers to.
_nonces: set[str] = set()
_leases: weakref.WeakValueDictionary[str, ObjectLease] = weakref.WeakValueDictionary()


class ObjectLease:
    """The right to write to a root. A thread renews it until it is released.

    If another writer holds the lease, the constructor waits for a renewal by that writer, at most
    the ``lease_seconds`` of its store. A lease that is not renewed for so long is taken over, with
    the next epoch. A holder on this machine whose process has ended is not waited for.

    Args:
        root: The root.

    Raises:
        RootBusy: Another writer has the root; the message names it.
    """

    def __init__(self, root: ObjectPath) -> None:
        self.holding = Holding()
        self._root = root
        self._object = root / layout.CONTROL / "zarr.json"
        self._seconds = root.store.lease_seconds
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._beat = 0
        self._lost = ""
        self._released = threading.Event()
        lease = _held.get(str(root))
        # Also of one whose release is under way: its last write would meet the first of this lease.
        own = None if lease is None or not lease._is_own() else lease.holding
        del lease
        # Without this check, the process would wait for a sign of life from itself.
        if own is not None and not own.await_release(root):
            raise _busy(root, str(own))
        generation, epoch = self._wait_until_free()
        self.epoch = epoch + 1
        self._claim: dict[str, Any] = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "machine": _machine(),
            "process": os.getpid(),
            "nonce": secrets.token_hex(8),
            "epoch": self.epoch,
            "seconds": self._seconds,
        }
        # Known before the request: another thread may read the claim as soon as it is stored.
        _nonces.add(self._claim["nonce"])
        _leases[self._claim["nonce"]] = self
        # Taken before the request, so that this process never trusts its lease longer than others
        # do.
        begin = time.monotonic()
        try:
            new_generation = self._object.swap(self._content(), generation)
        except BaseException:
            self._released.set()
            raise
        if new_generation is None:
            self._released.set()
            raise _busy(root, _holder(_parsed(self._object.read()[0])))
        self._generation, self._renewed = new_generation, begin
        _held[str(root)] = self
        # A third of the time: a renewal may fail, and the next one still comes early enough.
        threading.Thread(
            target=_renew,
            args=(weakref.ref(self), self._released, self._seconds / 3),
            name="deltacheck-lease",
            daemon=True,
        ).start()

    def holds(self) -> bool:
        """Return whether the lease is neither released nor known as lost."""
        return self._is_own() and not self._released.is_set()

    def _is_own(self) -> bool:
        """Return whether no other process has taken the lease over, and it is not a parent's."""
        return not self._lost and os.getpid() == self._owner

    def check(self) -> None:
        """Raise ``RootBusy`` if the right has been lost. Raises what ``seconds_left`` raises."""
        self.seconds_left()

    def seconds_left(self) -> float:
        """Make sure that no other process may write; return the seconds for which that holds.

        Raises:
            RootBusy: The lease was lost.
            StorageFailed: The lease could not be renewed in time.
        """
        if self._released.is_set() or os.getpid() != self._owner:
            raise _busy(
                self._root, "nobody: the lease of this writer was given back. Open the root anew"
            )
        # The thread renews earlier than this. A smaller rest means that it was late or had no
        # success.
        if not self._lost and self._left() < self._seconds / 2:
            try:
                self.renew()
            except StorageFailed as error:
                # Until it has run out, the lease holds in spite of the failed renewal.
                if self._left() <= 0:
                    raise StorageFailed(
                        f"{self._root}: the lease could not be renewed for {self._seconds:g} s, so"
                        f" another may write by now: {error}"
                    ) from error
        if self._lost:
            raise _busy(self._root, f"{self._lost}, which took over from this process")
        return max(0.0, self._left())

    def renew(self) -> None:
        """Renew the lease. Raises ``StorageFailed``.

        If another writer has taken the lease, this is noted for ``check``.
        """
        # The thread and ``seconds_left`` may renew at the same moment.
        with postponed(), self._lock:
            if not self.holds():
                return
            begin = time.monotonic()
            # No two renewals have the same content, so watchers see a change and ``swap`` knows its
            # own write.
            self._beat += 1
            generation = self._object.swap(
                self._content(), self._generation, timeout=max(1.0, self._seconds / 3)
            )
            if generation is None:
                generation = self._settle()
            if generation is not None:
                self._generation, self._renewed = generation, begin

    def release(self) -> None:
        """Give the root back; more than once does nothing.

        If the store does not answer, the next writer waits until the lease has run out.
        """
        # A lost lease is another writer's, and that of a parent process stays the parent's.
        if not self.holds():
            self._released.set()
            self.holding.released.set()
            return
        with postponed(), self._lock:
            self.holding.is_abandoned = True
            self._released.set()
            # Marked and not deleted, so that the epochs go on counting.
            content = layout.group_json({layout.ATTRIBUTE: {**self._claim, "released": True}})
            try:
                with contextlib.suppress(StorageFailed):
                    self._object.swap(content, self._generation)
            finally:
                self.holding.released.set()

    def _settle(self) -> bytes | None:
        """Resolve a renewal that met other content.

        The content is of an earlier renewal whose reply was lost, or of another writer's lease.

        Returns:
            The generation to renew from; ``None`` if the lease is lost.
        """
        content, generation = self._object.read()
        claim = _parsed(content)
        if claim.get("nonce") == self._claim["nonce"]:
            return generation
        self._lost = _holder(claim)
        log.error(
            "%s is written by %s by now; nothing more is committed from here",
            self._root,
            self._lost,
        )
        return None

    def _left(self) -> float:
        return self._renewed + self._seconds - time.monotonic()

    def _content(self) -> bytes:
        return layout.group_json({layout.ATTRIBUTE: {**self._claim, "beat": self._beat}})

    def _wait_until_free(self) -> tuple[bytes, int]:
        """Return the generation to take the lease from, and the epoch of the last holder."""
        content, generation = self._object.read()
        claim = _parsed(content)
        epoch = claim.get("epoch", 0)
        # The object may be damaged, so no field of it is trusted. A bool would pass as an integer.
        epoch = epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else 0
        # Without an epoch it is the lock of a local directory that was copied here.
        if "epoch" not in claim or claim.get("released") is True or _is_dead(claim):
            return generation, epoch
        if (nonce := str(claim.get("nonce"))) in _nonces:
            lease = _leases.get(nonce)
            # A dropped owner gives nothing back.
            if lease is None or not lease.holds():
                return generation, epoch
            raise _busy(self._root, str(lease.holding))
        seconds = claim.get("seconds")
        seconds = (
            min(float(seconds), _LONGEST_SECONDS)
            if isinstance(seconds, int | float) and seconds > 0
            else self._seconds
        )
        log.warning(
            "%s is held by %s; waiting up to %g s for a sign of life",
            self._root,
            _holder(claim),
            seconds,
        )
        begin = time.monotonic()
        # The holder renews several times in this period, so a live one is noticed long before its
        # end.
        while time.monotonic() - begin < seconds:
            time.sleep(seconds / 20)
            content, now = self._object.read(unless=generation)
            if now != generation:
                if _parsed(content).get("released") is True:
                    return now, epoch
                raise _busy(self._root, _holder(claim))
        return generation, epoch


def seconds_left(root: ObjectPath) -> float | None:
    """Return the seconds left of this process's lease of a root; ``None`` if it has none."""
    lease = _held.get(str(root))
    return None if lease is None else lease.seconds_left()


def _renew(reference: weakref.ref[ObjectLease], released: threading.Event, every: float) -> None:
    # The weak reference lets a lease without users run out.
    while not released.wait(every):
        lease = reference()
        if lease is None or not lease.holds():
            return
        try:
            lease.renew()
        except StorageFailed as error:
            log.warning("the lease could not be renewed: %s", str(error))
        del lease


def _busy(root: ObjectPath, holder: str) -> RootBusy:
    return RootBusy(
        f"{root} is being written by {holder}. Wait for it to close, or write to another prefix"
    )


def _parsed(content: bytes | None) -> dict[str, Any]:
    try:
        claim = json.loads(content or b"")["attributes"][layout.ATTRIBUTE]
    except (ValueError, KeyError, TypeError):
        return {}
    return claim if isinstance(claim, dict) else {}


def _holder(claim: dict[str, Any]) -> str:
    return str(claim.get("holder", "another writer"))[:200]


def _machine() -> str:
    """Return an identity within which process numbers mean the same; empty if unknown.

    It consists of the host, the boot and the process namespace.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return (
                f"{socket.gethostname()}/{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
            )
    except OSError:
        return ""


def _is_dead(claim: dict[str, Any]) -> bool:
    """Return whether the holder was a process of this machine that has ended."""
    number = claim.get("process")
    if (
        not claim.get("machine")
        or claim["machine"] != _machine()
        or not isinstance(number, int)
        or number <= 0
    ):
        return False
    try:
        # Signal 0 only asks if the process exists.
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    # The process exists and belongs to another user.
    except OSError:
        return False
    return False
