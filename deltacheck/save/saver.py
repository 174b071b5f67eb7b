"""Carry out saves behind the training loop, one after the other: which thread does what, and what a
failure means for the next.

Two threads serve a saver. The *encoder* captures what the caller left lazy, assembles parts and
hands them to the store; the *committer* waits for the disk, writes the manifest and promotes the
step; what it waits for goes on on a third thread, which it leaves behind where the storage hangs. A
save may be captured while the one before it is still on its way to disk. ``save_job.py`` has
the steps.

The shadow (``LeafState.base``) is the decoded content of the newest captured save. It is updated
while encoding, so a save that fails after that leaves no shadow: the next save writes keyframes
(``Saver._fail``), and saves already encoded on top of the failed one fail too.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, TypeVar

from deltacheck.codec.base import Codec
from deltacheck.errors import ReceiptFailed, SaveFailed, StorageTimeout
from deltacheck.leaf.digest import leaf_digest
from deltacheck.leaf.tree import Node
from deltacheck.policy.keyframes import due_for_reads
from deltacheck.restore import receipt
from deltacheck.restore.chain import Chain
from deltacheck.restore.receipt import Receipt
from deltacheck.save.adaptive_effort import Timing, next_effort
from deltacheck.save.compactor import Compactor, Plan, hang
from deltacheck.save.exits import undisturbed
from deltacheck.save.handle import SaveHandle, progress_of, skipped
from deltacheck.save.job.leaf_state import LeafState
from deltacheck.save.job.manifest_builder import SaveRequest
from deltacheck.save.job.save_job import ChainTurn, SaveJob
from deltacheck.save.job.setup import Setup
from deltacheck.save.job.source import LeafSource
from deltacheck.save.options import SaveOptions
from deltacheck.save.progress import Progress, as_save_failed
from deltacheck.save.treatment.run_state import Shadow
from deltacheck.save.treatment.treatment import Treatment
from deltacheck.store.deadline import Deadline, Pulse
from deltacheck.store.documents import Written
from deltacheck.store.files.background import Background
from deltacheck.store.files.effort import Effort
from deltacheck.store.files.storage import remove_tree
from deltacheck.store.manifest import Manifest, Replay, SegmentRef
from deltacheck.store.root import Store

__all__ = ["LeafSource", "Saver"]

log = logging.getLogger("deltacheck")

_Result = TypeVar("_Result")

_JOIN_SECONDS = 30.0  # for threads that have nothing left to do
# What may hang has deadlines of its own where it can, which say more. This is for what has none,
# such as fsync.
_PATIENCE = 1.5  # times io_timeout_seconds
_MOST_REMOVAL_SECONDS = 5.0  # waited for, of a failed save's files


class _GivenUp(SaveFailed):
    """What the save waited for may still happen."""


class Saver:
    """The saves of one root in one process, one after the other. A backend makes it.

    If nothing at all has happened for twice ``io_timeout_seconds``, whoever waits for a save gives
    it up, even if a thread still hangs in it. After a failed receipt the next save writes whole
    leaves.

    Args:
        store: The segments of the root.
        codec: The codec of the backend's memory.
        options: The options of all saves.
        next_seq: The sequence number of the first save.
    """

    def __init__(
        self,
        store: Store,
        codec: Codec[Any],
        options: SaveOptions,
        *,
        next_seq: int,
    ) -> None:
        self._adapts = options.effort == "auto"
        self._effort = Effort.NORMAL if self._adapts else Effort(options.effort)
        self._last_begin: float | None = None
        self.codec = codec
        self._setup = Setup(store, codec, options)
        self._treatment = Treatment(options.policy, codec.host, self._shadow)
        self._compactor = (
            None
            if options.compact_after is None
            else Compactor(store, options.compact_after, options.io_timeout_seconds)
        )
        self._compacted: dict[
            str, SegmentRef
        ] = {}  # the newest compacted segment: no save may have used it yet
        self._newest: Manifest | None = (
            None  # of the last step that was committed, or restored since
        )
        self.epoch = 0
        self.leaves: dict[str, LeafState] = {}
        self._refs: dict[str, SegmentRef] = {}
        self._reads: dict[str, int] = {}  # arrays of deltas in each segment
        self._plans: dict[
            int, Plan
        ] = {}  # what to compact once the save of a sequence number is committed
        self._writing: set[str] = set()  # segments of saves under way
        self._next_seq = next_seq
        self._handles: list[SaveHandle] = []
        self._owner = os.getpid()
        self._closed = False
        self._lock = (
            threading.RLock()
        )  # a signal's handler may interrupt its holder, and look at what is pending
        self._pulse = Pulse(2 * options.io_timeout_seconds)
        self._stuck: set[Progress] = set()  # given up, but a thread is still in them
        self._when_stopped: Callable[[], None] | None = None
        self._to_encode: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._to_commit: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._disk = Background(1, "deltacheck-disk")
        self._uncertain: set[str] = (
            set()
        )  # segments of saves that were given up while they were being committed
        self._threads = [
            threading.Thread(target=self._encode_loop, name="deltacheck-encoder", daemon=True),
            threading.Thread(target=self._commit_loop, name="deltacheck-committer", daemon=True),
        ]
        self._to_check: queue.SimpleQueue[tuple[SaveJob, Manifest] | None] = queue.SimpleQueue()
        self._unchecked: dict[int, Manifest] = {}  # by sequence number
        if options.verify == "receipt":
            self._threads.append(
                threading.Thread(target=self._receipt_loop, name="deltacheck-receipts", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def save(
        self,
        step: int,
        tree: Node,
        sources: Mapping[str, LeafSource],
        commit: Callable[[Manifest], Written],
        *,
        metrics: Mapping[str, float] | None = None,
        replay: Replay | None = None,
        note: str = "",
        abandon: Callable[[BaseException], None] | None = None,
    ) -> SaveHandle:
        """Begin to save. Returns once everything not lazy is captured.

        ``commit(manifest)`` makes the step exist; it runs on the committer thread.
        ``abandon(error)``: called once, behind the training, where the save fails, also in
        ``commit``. ``replay``: how the tree's leaves are computed from those of ``sources``, where
        they are not simply stored (REQUIRES: an exact policy). ``note``: for the report. Raises
        ``SaveFailed`` for an earlier save's failure that nobody has been told of yet (this step is
        then not saved).
        """
        self.check_usable()
        with undisturbed():
            return self._save(step, tree, sources, commit, metrics or {}, replay, note, abandon)

    def _save(
        self,
        step: int,
        tree: Node,
        sources: Mapping[str, LeafSource],
        commit: Callable[[Manifest], Written],
        metrics: Mapping[str, float],
        replay: Replay | None,
        note: str,
        abandon: Callable[[BaseException], None] | None,
    ) -> SaveHandle:
        begin = time.perf_counter()
        self.raise_unseen()
        self._raise_stuck()
        pending = self.pending()
        if len(pending) >= self.options.max_pending and self.options.on_busy == "skip":
            return skipped(step)
        while len(pending) >= self.options.max_pending:
            self._settle(pending[0], "committed")
            pending = self.pending()
        for earlier in pending:
            self._settle(earlier, "encoded")  # the shadow is free from here on
        if self._stuck:
            self.raise_unseen()
            self._raise_stuck()
        handle = SaveHandle(step, self._pulse)
        sources, terms = self._treatment.plan(step, sources, tree, metrics)
        with self._lock:
            for path in self.leaves.keys() - sources.keys():
                del self.leaves[path]
            compaction = self._compaction()
            chains = {path: leaf.delta_segments for path, leaf in self.leaves.items()}
            work = SaveJob(
                self._setup,
                SaveRequest(step, tree, commit, metrics, replay, note, abandon),
                ChainTurn(
                    self._next_seq,
                    self.epoch,
                    self.leaves,
                    due_for_reads(
                        chains, self._reads, self._setup.options.policy.max_restore_reads
                    ),
                    self._effort,
                ),
                sources,
                terms,
                progress_of(handle),
            )
            if compaction is not None:
                self._plans[work.seq] = compaction
            self._writing.add(work.writer.id)
            self._next_seq += 1
        try:
            self._handles.append(handle)
            work.capture(deque(source for source in sources.values() if not source.lazy))
            self._to_encode.put(work)
        except Exception as error:  # noqa: BLE001 - training goes on: the failure is on the handle
            self._fail(work, error)
        except (
            BaseException
        ) as error:  # Ctrl-C: nobody may wait for this save any more, and no later one stand on it
            self._fail(work, error)
            raise
        work.progress.add_blocking(time.perf_counter() - begin)
        return handle

    def _compaction(self) -> Plan | None:
        """Hang the chains from what has been compacted, and plan the next compaction. REQUIRES:
        every save before is encoded.
        """
        if self._compactor is None:
            return None
        done = self._compactor.take()
        if done is not None and hang(self.leaves, done):
            self._compacted = {done.ref.id: done.ref}
        plan = self._compactor.plan(self.leaves, self._next_seq)
        if plan is not None:
            self._next_seq += 1  # it comes between the save before and this one
        return plan

    @property
    def options(self) -> SaveOptions:
        """The options of all saves."""
        return self._setup.options

    @property
    def is_exact(self) -> bool:
        """Whether every leaf is stored as it is."""
        return self._setup.options.policy.is_exact

    def standing(self) -> tuple[int, int]:
        """What changes with every save that is begun and whenever the shadow is dropped or
        replaced.
        """
        with self._lock:
            return self.epoch, self._next_seq

    def number_from(self, seq: int) -> None:
        """Give the next save at least this sequence number: savers that share a store must not use
        one twice.
        """
        with self._lock:
            self._next_seq = max(self._next_seq, seq)

    def adopt(
        self, chains: Mapping[str, Chain], bases: Mapping[str, Any], manifest: Manifest
    ) -> None:
        """Take a restored step as the shadow, so that its chains go on without new keyframes.

        ``bases``: what the chains gave, in the codec's form, owned from now on. REQUIRES: no save
        is pending.
        """
        with self._lock:
            self.epoch += 1
            self._refs = {ref.id: ref for ref in manifest.segments}
            self._newest, self._compacted = manifest, {}
            self._reads = {
                s.id: s.table.delta_arrays for chain in chains.values() for s, _ in chain.deltas
            }
            self.leaves = {
                path: self._adopted(chain, bases[path]) for path, chain in chains.items()
            }
        self._treatment.resumed()

    def _adopted(self, chain: Chain, base: Any) -> LeafState:
        kept, spec, digests = (
            base if self._setup.options.keeps_shadow else None,
            chain.spec,
            chain.digests,
        )
        digest, key = leaf_digest(digests), chain.key[0].id
        return LeafState(
            spec, spec.bounds(), kept, digests, digest, key, chain.delta_segments, chain.delta_bytes
        )

    def _shadow(self, path: str) -> Shadow | None:
        leaf = self.leaves.get(path)
        return (
            None
            if leaf is None or leaf.base is None
            else Shadow(leaf.spec, self.codec.host(leaf.base))
        )

    def forget(self) -> None:
        """Drop the shadow: the next save writes keyframes."""
        self._drop_shadow()

    def start_over(self) -> None:
        """``forget``, and need nothing that is stored any more. REQUIRES: no save is under way."""
        with self._lock:
            self._drop_shadow()
            self._refs, self._compacted = {}, {}

    def pending(self) -> list[SaveHandle]:
        """The saves under way, oldest first."""
        with self._lock:
            self._handles = [
                handle
                for handle in self._handles
                if not handle.done()
                or progress_of(handle).error is not None
                or progress_of(handle).awaits_receipt
            ]
            return [handle for handle in self._handles if not handle.done()]

    def protected_segments(self) -> set[str]:
        """Segments that a save under way, or the shadow, stands on."""
        with self._lock:
            found = self._refs.keys() | self._uncertain | self._compacted.keys() | self._writing
            found |= {ref.id for manifest in self._unchecked.values() for ref in manifest.segments}
            if self._compactor is not None:
                found |= self._compactor.segments()
            for leaf in list(self.leaves.values()):
                found |= {leaf.key_segment, *leaf.delta_segments}
            return found

    def settle(self) -> None:
        """Let the training thread wait until no save is under way; what failed them is raised by
        the next call.
        """
        for handle in self.pending():
            self._settle(handle, "committed")

    def settle_reads(self) -> None:
        """Let the training thread wait until every save under way has read the state, or enqueued
        all
        that reads it on a device: the caller then holds that device's writes back. Counts as
        blocking time.
        """
        if not self.is_ours():  # a forked child trains on a copy: nobody reads its state
            return
        for handle in self.pending():
            self._settle(handle, "captured", or_enqueued=True)

    def _settle(self, handle: SaveHandle, state: str, or_enqueued: bool = False) -> None:
        """Let the training thread wait for a save; one that gets on no more is given up, so that
        training does not stop with it.
        """
        try:
            progress_of(handle).block_until(state, or_enqueued)
        except StorageTimeout as error:
            with self._lock:
                if handle.done():  # at the last moment
                    return
                self._stuck.add(progress_of(handle))
                self._drop_shadow()
            failure = as_save_failed(handle.step, error)
            log.error("%s", failure)
            progress_of(handle).fail(failure)

    def _raise_stuck(self) -> None:
        stuck = min(self._stuck, key=lambda progress: progress.step, default=None)
        if stuck is not None:
            raise SaveFailed(
                f"the storage still hangs in the save of step {stuck.step}; nothing can be saved"
                " before it answers, or by another process"
            )

    def _drop_shadow(self) -> None:
        with self._lock:
            self.epoch += 1
            self.leaves = {}

    def raise_unseen(self) -> None:
        """Raise the oldest failure that nobody has been told of."""
        with self._lock:
            failed = [p for p in map(progress_of, self._handles) if p.error is not None]
            self._handles = [
                handle
                for handle in self._handles
                if not handle.done() or progress_of(handle).awaits_receipt
            ]
        for progress in failed:
            error = progress.take_unseen_error()
            if error is not None:
                raise error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save under way is committed, and read back where ``verify`` asks for it;
        raises the first failure, ``TimeoutError`` where time ran out, ``StorageTimeout`` (one, too)
        where there is no ``timeout`` and nothing has happened for twice ``io_timeout_seconds``.
        """
        self._check_owner()
        deadline = Deadline.after(timeout)
        self.pending()
        with self._lock:
            handles = list(self._handles)
        for handle in handles:
            progress = progress_of(handle)
            if progress.error is None:
                progress.wait_for_end(deadline.left)
        self.raise_unseen()

    def check_usable(self) -> None:
        """Refuse a closed saver and a forked child (threads and locks did not survive the fork)."""
        if self._closed:
            raise SaveFailed("this saver is closed; open a new one")
        self._check_owner()

    def is_ours(self) -> bool:
        """Whether this process made it; a forked child has neither its threads nor a right to its
        root.
        """
        return os.getpid() == self._owner

    def _check_owner(self) -> None:
        if not self.is_ours():
            raise SaveFailed(
                f"this saver belongs to process {self._owner}; a forked child must open its own"
                " root"
            )

    def close(self, timeout: float | None = None) -> None:
        """Finish the saves under way and stop; raises what ``wait`` raises. More than once does
        nothing.

        Where time ran out, the threads go on with them as long as the process lives; see
        ``when_stopped``.
        """
        if self._closed or not self.is_ours():
            return
        try:
            self.wait(timeout)
        finally:
            self._closed = True
            self._to_encode.put(None)
            if not self._stuck and not self.pending():  # else the threads may hang
                for thread in self._threads:
                    thread.join(_JOIN_SECONDS)
                if self._compactor is not None:
                    self._compactor.close(_JOIN_SECONDS)

    def when_stopped(self, callback: Callable[[], None]) -> None:
        """Call this once the threads have ended: at once, or by the last of them. REQUIRES:
        ``close`` was called.
        """
        with self._lock:
            if self._threads:
                self._when_stopped = callback
                return
        callback()

    # --- the two threads --------------------------------------------------------------------------

    def _encode_loop(self) -> None:
        while (work := self._to_encode.get()) is not None:
            try:
                work.capture(work.lazy)  # from here on the save holds none of the caller's memory
                work.progress.advance("captured")
                work.encode()
                self._reads[work.writer.id] = work.writer.delta_arrays
                work.progress.advance("encoded")
            except BaseException as error:  # noqa: BLE001 - a thread that dies silently would hang the training loop
                self._fail(work, error)
            else:
                self._to_commit.put(work)
            del work
        self._to_commit.put(None)

    def _commit_loop(self) -> None:
        while (work := self._to_commit.get()) is not None:
            try:
                if work.epoch != self.epoch:
                    raise SaveFailed(
                        f"the save of step {work.request.step} stands on an earlier one that"
                        " failed; the next writes whole leaves"
                    )
                ref = self._on_disk(work, work.finish_segment)
                self._adapt(work)
                with self._lock:
                    known = self._refs | self._compacted | ({} if ref is None else {ref.id: ref})
                    self._refs = {name: known[name] for name in known if name in work.segments}
                work.progress.advance("durable")
                self._reads = {
                    name: count
                    for name, count in list(self._reads.items())
                    if name >= min(work.segments, default="")
                }
                if work.progress.done():
                    raise SaveFailed(
                        f"the save of step {work.request.step} was given up before it was committed"
                    )
                manifest = work.manifest(self._refs)
                if self._setup.options.verify == "commit":
                    again = partial(
                        receipt.rebuild,
                        self._setup.store,
                        manifest,
                        work.live_digests,
                        work.entries,
                    )
                    work.progress.give_receipt(self._on_disk(work, again))
                work.may_be_committed = True
                if self._setup.options.verify == "receipt":
                    with self._lock:
                        self._unchecked[work.seq] = manifest
                    work.progress.awaits_receipt = True
                written = self._on_disk(work, partial(work.request.commit, manifest))
                before, self._newest = self._newest, manifest
                plan = self._plans.pop(work.seq, None)
                if plan is not None and before is not None and self._compactor is not None:
                    self._compactor.start(plan, before)
                self._writing.discard(work.writer.id)
                stored = written.stored_bytes + (0 if ref is None else ref.stored_bytes)
                work.progress.advance("committed", work.report(stored, written.digest))
                self._release(work)
                if self._setup.options.verify == "receipt":
                    self._to_check.put((work, manifest))
            except BaseException as error:  # noqa: BLE001 - as above
                self._fail(work, error)
                with self._lock:
                    self._unchecked.pop(work.seq, None)
            del work
        self._disk.close()
        self._to_check.put(None)
        with self._lock:
            stopped, self._threads = self._when_stopped, []
        if stopped is not None:
            stopped()

    def _on_disk(self, work: SaveJob, action: Callable[[], _Result]) -> _Result:
        """Do what waits for the storage, on a thread that is given up where that hangs: the saves
        after this one get a new one.

        Raises what ``action`` raises, ``SaveFailed`` where it takes too long. It may then still go
        on, and end at any time.
        """
        results: list[_Result] = []
        seconds = _PATIENCE * self._setup.options.io_timeout_seconds
        done = self._disk.start(lambda: results.append(action()))
        if not wait_for([done], seconds).done:
            self._disk = Background(1, "deltacheck-disk")
            raise _GivenUp(
                f"the save of step {work.request.step}: the storage did not answer within"
                f" {seconds:.3g} s; it may hang"
            )
        done.result()
        return results[0]

    def _receipt_loop(self) -> None:
        while (job := self._to_check.get()) is not None:
            work, manifest = job
            try:
                given: Receipt | Exception = receipt.rebuild(
                    self._setup.store, manifest, work.live_digests, manifest.leaves
                )
            except ReceiptFailed as error:
                given = error
            except BaseException as error:  # noqa: BLE001 - as above
                given = ReceiptFailed(
                    f"step {manifest.step} could not be read back: {type(error).__name__}: {error}"
                )
                given.__cause__ = error
            if isinstance(given, Exception):
                log.error("%s", given)
                self.forget()  # nothing may stand on it, and a save under way that does fails
            with self._lock:
                self._unchecked.pop(work.seq, None)
            work.progress.give_receipt(given)
            del job, work

    def _adapt(self, work: SaveJob) -> None:
        """Choose the effort of the next save by what this one took."""
        spent, before = self._setup.store.take_spent(), self._last_begin
        self._last_begin = work.begin
        if self._adapts and before is not None:
            self._effort = next_effort(self._effort, Timing(work.begin - before, *spent))

    def _fail(self, work: SaveJob, error: BaseException) -> None:
        with self._lock:
            if work.epoch == self.epoch:
                self._drop_shadow()
            self._writing.discard(work.writer.id)
            self._plans.pop(work.seq, None)
        failure = as_save_failed(work.request.step, error)
        try:
            if not work.progress.done():  # else this was told when it was given up
                log.error("%s", failure)
            self._setup.store.renew()  # what hangs must not stand in the way of the next save
            if work.request.abandon is not None:
                Background(1, "deltacheck-abandon").start(partial(work.request.abandon, failure))
            if not work.may_be_committed:
                removal = self._disk.start(
                    partial(remove_tree, work.writer.path, ignore_errors=True)
                )
                wait_for([removal], _MOST_REMOVAL_SECONDS)
            elif isinstance(error, _GivenUp):  # the manifest may appear yet, and need them
                with self._lock:
                    self._uncertain |= work.segments
            # else the manifest may exist, and need the segment: gc will know
        finally:
            work.progress.fail(failure)
            self._release(work)

    def _release(self, work: SaveJob) -> None:
        """No thread hangs in this save any more. REQUIRES: its handle is done."""
        with self._lock:
            self._stuck.discard(work.progress)
