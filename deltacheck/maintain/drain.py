"""The thread that copies committed steps from memory to the durable root, oldest first.

A step leaves memory once it is on the disk, or was never to go there, and is not among the newest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from deltacheck.errors import SaveFailed, StorageTimeout
from deltacheck.maintain.tier_bond import Pairing
from deltacheck.maintain.transfer import transfer
from deltacheck.save.root_writer import RootWriter
from deltacheck.store import collect, layout
from deltacheck.store.documents import check_place, read_manifest
from deltacheck.store.lock.deadline import Deadline, Pulse
from deltacheck.store.lock.interrupts import Condition, Lock
from deltacheck.store.manifest import Brief

log = logging.getLogger("deltacheck")

# Waiters look again after this time, in seconds: the file system tells nobody of freed memory.
_LOOK_SECONDS = 0.05


class DrainRules(NamedTuple):
    """The steps that are copied, and the number of newest steps that stay in memory."""

    persist_every: int
    keep: int


def next_due(
    briefs: Iterable[Brief], newest: int, every: int, requested: Collection[int]
) -> Brief | None:
    """Return the oldest checkpoint that is to be copied, or ``None``.

    Args:
        briefs: The checkpoints in memory.
        newest: The newest sequence number in the durable root.
        every: Steps that this number divides are copied.
        requested: Sequence numbers that are copied in any case.
    """
    return min(_due(briefs, newest, every, requested), key=lambda brief: brief.seq, default=None)


def resident(
    briefs: Collection[Brief], newest: int, every: int, requested: Collection[int], keep: int
) -> frozenset[int]:
    """Return the sequence numbers that stay in memory: the ``keep`` newest, and all that are due.

    The other arguments are those of ``next_due``.
    """
    due = {brief.seq for brief in _due(briefs, newest, every, requested)}
    return frozenset(due | set(sorted((brief.seq for brief in briefs), reverse=True)[:keep]))


def _due(
    briefs: Iterable[Brief], newest: int, every: int, requested: Collection[int]
) -> list[Brief]:
    return [
        brief
        for brief in briefs
        if brief.seq in requested or (brief.seq > newest and brief.step % every == 0)
    ]


class DrainState:
    """The state that the thread of a drain shares with its callers.

    Args:
        durable_name: The durable root, for messages.
        patience_seconds: The time without any progress after which waiters give up.
    """

    def __init__(self, durable_name: str, patience_seconds: float) -> None:
        # ``changed`` is held to write these fields, because the thread of the drain and the callers
        # of the engine both do.
        self.requested: set[int] = set()
        self.is_idle = True
        self.has_ended = False
        self.pulse = Pulse(patience_seconds)
        self.changed, self._change = Lock(), Condition()
        self._durable_name = durable_name
        self._is_woken = False
        self._error: SaveFailed | None = None
        self._on_end: Callable[[], None] | None = None
        self._notices = 0

    def wake(self) -> None:
        """Let the thread look for work."""
        with self.changed:
            # A waiter that looks at once must not see the drain idle before the thread has begun. A
            # thread that has ended never becomes busy again.
            self._is_woken, self.is_idle = True, self.has_ended
        self.notify()

    def notify(self) -> None:
        """Let waiters look again."""
        self._notices += 1
        self._change.notify()

    def stop(self, on_end: Callable[[], None]) -> None:
        """Let the thread end after its work; ``on_end`` is the last call that it makes."""
        with self.changed:
            self._on_end = on_end

    def raise_unseen(self) -> None:
        """Raise the failure of the drain that no call has raised."""
        with self.changed:
            # A failure is raised by one call only. The next round of the drain tries the same step
            # again.
            error, self._error = self._error, None
        if error is not None:
            raise error

    def await_change(self, purpose: str, seconds_left: float | None = None) -> None:
        """Wait for a change, briefly. Raises ``StorageTimeout`` if nothing happens any more."""
        if self.pulse.left <= 0:
            raise StorageTimeout(
                f"{purpose} nothing has happened in {self._durable_name} for"
                f" {self.pulse.patience_seconds:g} s; it may hang"
            )
        notices = self._notices
        self._change.wait_until(
            lambda: self._notices != notices,
            _LOOK_SECONDS if seconds_left is None else min(seconds_left, _LOOK_SECONDS),
        )

    def await_copies(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        """Wait until ``is_done``, and raise what failed the drain.

        Raises ``SaveFailed``, ``TimeoutError``, ``StorageTimeout``.
        """
        deadline = Deadline.after(timeout)
        # Waiting begins now: the time since the last copy, in which nothing was due, must not
        # count.
        self.pulse.beat()
        while not is_done():
            if deadline.left == 0:
                raise TimeoutError(
                    f"the newest steps are in memory, but not yet all in {self._durable_name}"
                    f" after {timeout} s"
                )
            self.await_change("steps wait to be copied, and", deadline.left)
        self.raise_unseen()

    # --- called by the thread ---------------------------------------------------------------------

    def await_work(self) -> bool:
        """Wait until the thread is woken, and return whether this is its last work."""
        self._change.wait_until(lambda: self._is_woken)
        with self.changed:
            # This is reset before the work, so that a step that is committed meanwhile causes
            # another round.
            self._is_woken = False
            return self._on_end is not None

    def set_error(self, error: SaveFailed | None) -> None:
        """Set the failure that the next call raises. ``None``: the failed step was copied since."""
        with self.changed:
            self._error = error

    def finish(self, is_last: bool) -> bool:
        """End a round of work, and return whether the thread ends."""
        with self.changed:
            # A step may have come since this round began. The thread does not end before it is
            # copied.
            ends = is_last and not self._is_woken
            on_end = self._on_end
        if ends and on_end is not None:
            on_end()  # before any waiter learns of the end: the roots are free then
        with self.changed:
            self.is_idle = ends or not self._is_woken
            self.has_ended = ends
        self.notify()
        return ends


class Drain:
    """The drain of one memory root.

    ``lock``: while it is held, nothing leaves memory. ``retention_lock``: while it is held, the
    retention deletes nothing from the durable root. The thread of the drain never waits for them:
    the handler of a signal may have interrupted their holder, and wait for the drain.

    Args:
        memory: The memory root. The thread needs a ``Root`` of its own.
        durable: The durable root, likewise.
        pairing: The bond of the two.
        rules: The steps to copy and to keep.
        patience_seconds: The time without any progress after which waiters give up.
    """

    def __init__(
        self,
        memory: RootWriter,
        durable: RootWriter,
        pairing: Pairing,
        rules: DrainRules,
        patience_seconds: float,
    ) -> None:
        self.lock, self.retention_lock = threading.RLock(), threading.RLock()
        self._is_trim_due = False
        self.state = DrainState(str(durable.root.path), patience_seconds)
        # The claim may discard a stale memory, so it comes before the saver can continue from it.
        self.newest = pairing.claim()
        self.is_emptying = False
        self._memory, self._durable = memory, durable
        self._pairing = pairing
        self._rules = rules

    def start(self, protected: Callable[[], set[str]]) -> None:
        """Start the thread. ``protected``: the segments that the saver builds on."""
        self._memory.protect(protected)
        threading.Thread(target=self._run, name="deltacheck-drain", daemon=True).start()
        self.state.wake()  # a killed process may have left steps that are not copied

    def request(self, seq: int) -> None:
        """Copy a checkpoint, even if the rules do not, unless the durable root is past it."""
        with self.state.changed:
            # Otherwise the durable root already has this checkpoint or a newer one.
            if seq > self.newest:
                self.state.requested.add(seq)

    def record_newest(self) -> None:
        """Record the newest checkpoint of the durable root after a deletion."""
        self.newest = max(self.newest, self._pairing.record_newest())

    def _run(self) -> None:
        ends = False
        while not ends:
            is_last = self.state.await_work()
            try:
                self._drain()
            except BaseException as error:  # noqa: BLE001 - a dead thread would fill the memory
                failure = error
                if not isinstance(failure, SaveFailed):
                    failure = SaveFailed(f"draining {self._memory.root.path} failed: {error}")
                    failure.__cause__ = error
                log.error("%s", str(failure))
                self.state.set_error(failure)
            ends = self.state.finish(is_last)

    def _drain(self) -> None:
        """Copy the due steps, oldest first, and remove from memory what need not stay."""
        state, every = self.state, self._rules.persist_every
        # Trimming first makes room also if there is nothing to copy.
        self._trim()
        while (brief := next_due(self._briefs(), self.newest, every, state.requested)) is not None:
            self._copy(brief)
            with state.changed:
                state.requested.discard(brief.seq)
            state.set_error(None)  # the failure was of this step or an earlier one
            self._retain()
            self._trim()
            state.pulse.beat()

    def _copy(self, brief: Brief) -> None:
        source, target = self._memory.root, self._durable.root
        name = layout.checkpoint_id(brief.seq)
        path = source.path / layout.CHECKPOINTS / name / "zarr.json"
        copied = target.path / layout.CHECKPOINTS / name / "zarr.json"
        try:
            # Read past the root's cache: steps come and go in memory.
            manifest = source.with_tables(check_place(path, read_manifest(path), False))
            # If the copy exists, a process was killed between it and the record below.
            if not (copied.exists() and target.read(copied).nonce == manifest.nonce):
                # The lease may have been lost while the step waited. Nothing is written to a root
                # of another writer.
                self._durable.check()
                transfer(
                    source,
                    manifest,
                    target,
                    self._durable.check,
                    beat=self.state.pulse.beat,
                    again=brief.seq < self.newest,
                )
            # An older step that a tag asked for must not set the record back.
            if brief.seq > self.newest:
                self.newest = brief.seq
                self._pairing.record(brief.seq, brief.nonce)
        except Exception as error:
            # Whatever failed, both roots are whole: a transfer commits last, and removes what it
            # copied if it fails before that.
            raise SaveFailed(
                f"step {brief.step} is in {source.path}, which a power cut would take, and could"
                f" not be copied to {target.path}; both are as they were, and the next save"
                f" tries it again. Cause: {type(error).__name__}: {error}"
            ) from error

    def _retain(self) -> None:
        # If a tag is being put, the next round deletes.
        if self._durable.keep.all_steps or not self.retention_lock.acquire(blocking=False):
            return
        try:
            self._durable.retain()
        except Exception:
            # The step is on the disk, which is what a save promises. The next round deletes again.
            log.warning(
                "older steps of %s could not be deleted", self._durable.root.path, exc_info=True
            )
        finally:
            self.retention_lock.release()

    @contextlib.contextmanager
    def without_trimming(self) -> Iterator[None]:
        """Return a context in which nothing leaves memory."""
        try:
            with self.lock:
                yield
        finally:
            if self._is_trim_due:
                self.state.wake()

    def _trim(self) -> None:
        # If a restore reads from memory, the next round removes.
        self._is_trim_due = True
        if not self.lock.acquire(blocking=False):
            return
        try:
            self._is_trim_due = False
            # The lock is held from the list to the last deletion, so a caller that holds it sees no
            # step vanish.
            briefs = self._briefs()
            keep = 0 if self.is_emptying else self._rules.keep
            stay = resident(
                briefs, self.newest, self._rules.persist_every, self.state.requested, keep
            )
            for brief in briefs:
                if brief.seq not in stay:
                    # Another process may have taken the memory root, and its steps are not ours to
                    # delete.
                    self._memory.check()
                    collect.delete_checkpoint(self._memory.root, brief.seq)
            # No grace period: memory is scarce, and readers hold a lock on the segments that they
            # have open.
            self._memory.collect(grace_seconds=0, newest=self.newest)
        finally:
            self.lock.release()
        self.state.notify()

    def _briefs(self) -> list[Brief]:
        briefs, damaged = self._memory.root.briefs()
        # An unreadable manifest may name segments of any step, so nothing is copied or deleted past
        # it.
        for error in damaged.values():
            raise error
        return sorted(briefs.values(), key=lambda brief: brief.seq)
