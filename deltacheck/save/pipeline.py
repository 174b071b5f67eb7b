"""The threads that carry saves out behind the training loop, their deadlines and their failures.

Two threads serve a saver. The *encoder* captures lazy leaves, assembles parts and hands them to the
store. The *committer* waits for the disk, writes the manifest and promotes the step. It waits on a
third thread, which it leaves behind if the storage hangs. A save may be captured while the one
before it is still on its way to disk.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from deltacheck.codec import host_memory
from deltacheck.errors import SaveFailed
from deltacheck.restore import receipt
from deltacheck.save.chains.base_check import SHARE, BaseCheck
from deltacheck.save.chains.chain_state import ChainState
from deltacheck.save.job.save_job import SaveJob
from deltacheck.save.job.save_log import FailureCount, SaveLog
from deltacheck.save.progress import Progress, as_save_failed
from deltacheck.save.save_options import SaveOptions
from deltacheck.store.files.background import Background, Task
from deltacheck.store.files.storage import remove_tree
from deltacheck.store.lock.interrupts import Lock, postponed
from deltacheck.store.manifest import Manifest, SegmentRef
from deltacheck.store.roots.store import Store

log = logging.getLogger("deltacheck")

_Result = TypeVar("_Result")

_JOIN_SECONDS = 30.0  # for threads that have nothing left to do
# Times io_timeout_seconds. Storage calls that can hang have deadlines of their own if possible, and
# these give better messages. This longer one is for calls that have none, such as fsync.
_PATIENCE = 1.5
_MOST_REMOVAL_SECONDS = 5.0  # the longest wait for the removal of a failed save's files
# The longest that training waits for a look at the segments that a save goes on from. Longer: a
# slow storage blocks training; shorter: a loss is found by the commit, which fails that save.
_LOOK_SECONDS = 1.0


class _GaveUp(SaveFailed):
    """The storage did not answer in time. The awaited action may still succeed."""


class PlannedLater(NamedTuple):
    """A save that is planned on the encoder thread, where every leaf may be read.

    Args:
        plan: Return the save; ``None`` if it was given up.
        progress: Its state.
    """

    plan: Callable[[], SaveJob | None]
    progress: Progress


class Pipeline:
    """The threads of one saver.

    Args:
        options: The options of the saver.
        chains: The chains that saves go on from.
    """

    def __init__(self, options: SaveOptions, chains: ChainState) -> None:
        self.failures = FailureCount(options.on_error, options.max_failures)
        # Saves that were given up while a thread was in them. Until that thread returns nothing
        # else can be saved, since it would wait behind them.
        self.stuck: set[Progress] = set()
        self._chains = chains
        self.save_log = SaveLog()
        self._lock = Lock()
        self._stopped: Callable[[], None] | None = None
        self._to_encode: queue.SimpleQueue[SaveJob | PlannedLater | None] = queue.SimpleQueue()
        self._to_commit: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._disk = Background(1, "deltacheck-disk")
        self._base = BaseCheck()
        self._look = Background(1, "deltacheck-look")
        self._looking: Task[None] | None = None
        loops = {"deltacheck-encoder": self._encode_loop, "deltacheck-committer": self._commit_loop}
        self._threads = [
            threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()
        ]
        with ExitStack() as on_failure:
            # The committer ends with the encoder.
            on_failure.callback(self._to_encode.put, None)
            for thread in self._threads:
                thread.start()
            on_failure.pop_all()

    # --- the training thread's side ---------------------------------------------------------------

    def start(self, save: SaveJob | PlannedLater) -> None:
        """Hand a save to the encoder. Of a ``SaveJob``, all that is not lazy is captured."""
        self._to_encode.put(save)

    def missing_base(self, store: Store) -> list[str]:
        """Return the segments that the next save would go on from and that are gone, ascending.

        A storage that does not answer soon is not waited for; the commit looks again.
        """
        names = self._chains.base_segments()
        if not names or (self._looking is not None and not self._looking.done()):
            return []
        missing: list[str] = []

        def look() -> None:
            # Without time for more than the oldest data files: training waits.
            missing.extend(self._base.lost(store, names))
            if missing and isinstance(store.path, Path):
                # The directories may be gone with the segments.
                store.renew_folders()

        self._looking = self._look.start(look)
        return missing if self._looking.wait(_LOOK_SECONDS) else []

    def give_up(self, progress: Progress, error: BaseException) -> None:
        """Fail a save that makes no progress, so that training does not stop with it."""
        with self._lock:
            if progress.done():  # it has ended since the wait for it timed out
                return
            self.stuck.add(progress)
            self._chains.drop()
        failure = as_save_failed(progress.step, error)
        self._fail(progress, failure)

    def refuse_if_stuck(
        self, progress: Progress, abandon: Callable[[BaseException], None] | None = None
    ) -> bool:
        """Fail a save that is about to begin if a thread still hangs in one that was given up.

        Args:
            progress: The state of the save.
            abandon: Tells the other ranks of the save about the failure, if there are any. Without
                it, they wait for this rank until their time limit.

        Returns:
            True if it has failed, and the caller may go on without it.

        Raises:
            SaveFailed: It has failed, and ``on_error`` or ``max_failures`` demands an error.
        """
        stuck = min(self.stuck, key=lambda stuck: stuck.step, default=None)
        if stuck is None:
            return False
        failure = SaveFailed(
            f"the storage still hangs in the save of step {stuck.step}; nothing can be saved before"
            " it answers, or by another process"
        )
        if abandon is not None:
            Background(1, "deltacheck-abandon").start(partial(abandon, failure))
        self.refuse(progress, failure)
        return True

    def refuse(self, progress: Progress, failure: Exception) -> None:
        """Fail a save that has not begun; raise it if ``on_error`` or ``max_failures`` demands."""
        self._chains.drop()
        self._fail(progress, failure)
        progress.take_unseen_error()
        error = self.failures.to_raise(failure)
        if error is not None:
            raise error

    def refuse_unplanned(self, progress: Progress, error: BaseException) -> None:
        """Fail a save that has changed no chain yet."""
        self._fail(progress, as_save_failed(progress.step, error))

    def stop(self, *, join: bool) -> None:
        """Let the threads end after the saves under way. ``join``: wait for that."""
        self._to_encode.put(None)
        if join:
            # The threads have nothing left to do. A join within a join would wait for itself.
            with postponed():
                for thread in self._threads:
                    thread.join(_JOIN_SECONDS)
                if self._chains.compactor is not None:
                    self._chains.compactor.close(_JOIN_SECONDS)

    def when_stopped(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the threads have ended: now, or from the last of them.

        The caller must have called ``stop``.
        """
        with self._lock:
            if self._threads:
                self._stopped = callback
                return
        callback()

    def end_unattended(self, callback: Callable[[], None]) -> None:
        """Let the threads end after the saves under way, the last of them with ``callback``.

        A garbage collection may call this on any thread, so it takes no lock and starts no thread.
        """
        self._stopped = callback
        self._to_encode.put(None)

    # --- the threads ------------------------------------------------------------------------------

    # A thread that ended with an exception would let the training loop wait forever, so every loop
    # catches all of them.

    def _encode_loop(self) -> None:
        while (item := self._to_encode.get()) is not None:
            job = self._planned(item) if isinstance(item, PlannedLater) else item
            del item  # it holds the state
            if job is None:
                continue
            try:
                job.capture(job.lazy)
                copies = job.take_copies()
                job.progress.advance("captured")
                if copies:
                    job.capture(copies)
                job.encode()
                job.progress.advance("encoded")
            except BaseException as error:  # noqa: BLE001 - see above
                self.fail(job, error)
            else:
                self._to_commit.put(job)
            del job  # its memory must not wait for the next save
        self._to_commit.put(None)

    def _planned(self, later: PlannedLater) -> SaveJob | None:
        """Plan a save; return ``None`` if that failed, or the save was given up before."""
        try:
            job = later.plan()
        except BaseException as error:  # noqa: BLE001 - see above
            self.refuse_unplanned(later.progress, error)
            job = None
        if job is None:
            self._release(later.progress)
        return job

    def _commit_loop(self) -> None:
        while (job := self._to_commit.get()) is not None:
            try:
                self._complete(job)
            except BaseException as error:  # noqa: BLE001 - see above
                self.fail(job, error)
            del job
        self.save_log.close()
        self._disk.close()
        self._look.close()
        with self._lock:
            callback, self._threads = self._stopped, []
        # No save goes on from the shadow any more, and the owner of this object may live on.
        self._chains.drop()
        if callback is not None:
            callback()

    # --- the commit, step by step -----------------------------------------------------------------

    def _complete(self, job: SaveJob) -> None:
        """Make a save durable, then make its step exist.

        Until its step exists, a failure leaves no step, and the next save writes whole leaves.
        """
        if job.epoch != self._chains.epoch:
            raise SaveFailed(
                f"the save of step {job.request.step} stands on an earlier one that failed; the"
                " next writes whole leaves"
            )
        ref, refs = self._make_durable(job)
        failed_saves = self.failures.in_a_row
        manifest = job.manifest(refs, failed_saves, self._chains.merged_bytes())
        self._verify(job, manifest)
        self._require_base(job, refs)
        # From now on the step may exist.
        job.may_be_committed = True
        document = self._on_disk(job, partial(job.request.commit, manifest))
        # And later saves may stand on it.
        self._chains.committed(job, manifest)
        self.failures.committed(failed_saves)
        segment_bytes = 0 if ref is None else ref.stored_bytes
        report = job.report(document.stored_bytes + segment_bytes, document.digest, manifest)
        # Whoever has waited for the commit finds the line in the log.
        self.save_log.committed(job.setup.store.path, job.progress, report)
        job.progress.advance("committed", report)
        self._release(job.progress)
        if job.segment.whole_bytes >= host_memory.LEAST_FREED_BYTES:
            host_memory.return_freed()

    def _make_durable(self, job: SaveJob) -> tuple[SegmentRef | None, dict[str, SegmentRef]]:
        """Finish the segment of a save, and return it with all segments that the step needs."""
        ref = self._on_disk(job, job.finish_segment)
        refs = self._chains.durable(job, ref)
        if ref is not None:
            self._base.wrote(ref)
        job.progress.advance("durable")
        # The caller may have acted on the failure already, so the step must not appear now.
        if job.progress.done():
            raise SaveFailed(
                f"the save of step {job.request.step} was given up before it was committed"
            )
        return ref, refs

    def _verify(self, job: SaveJob, manifest: Manifest) -> None:
        """Read back what was written, if the options ask for it."""
        # Before the commit, so that no step exists whose files differ from the state.
        if job.setup.options.verify == "commit":
            store, leaves = job.setup.store, job.leaves.items()
            digests = {path: leaf.live_digest for path, leaf in leaves if leaf.live_digest}
            read_back = partial(receipt.rebuild, store, manifest, digests, job.writer.entries)
            job.progress.receipt = self._on_disk(job, read_back)
            job.progress.beat()

    def _require_base(self, job: SaveJob, refs: Collection[str]) -> None:
        """Raise ``SaveFailed`` if segments that the step needs are gone, or have lost files."""
        store, seconds = job.setup.store, SHARE * (time.perf_counter() - job.request.begin)
        # The last moment before the step is acknowledged: others, such as a purge of old files, may
        # have removed what it stands on.
        look = partial(self._base.lost, store, refs, seconds, acknowledged=job.writer.id)
        missing = self._on_disk(job, look)
        if missing:
            raise SaveFailed(
                f"the save of step {job.request.step} needs {len(missing)} segments of"
                f" {store.path} that are gone or have lost files, the first {missing[0]}:"
                " another program has removed files of the root. The next save writes whole leaves"
            )

    def _on_disk(self, job: SaveJob, action: Callable[[], _Result]) -> _Result:
        """Carry out an action that waits for the storage, on a thread that can be left behind.

        Raises:
            SaveFailed: The action takes too long. It may still go on, and end at any time; later
                saves get another thread.
        """
        seconds = _PATIENCE * job.setup.options.io_timeout_seconds
        pending = self._disk.start(action)
        if not pending.wait(seconds):
            # The old thread hangs in the call. Later saves must not wait behind it.
            self._disk = Background(1, "deltacheck-disk")
            raise _GaveUp(
                f"the save of step {job.request.step}: the storage did not answer within"
                f" {seconds:.3g} s; it may hang"
            )
        return pending.result()

    # --- failures ---------------------------------------------------------------------------------

    def fail(self, job: SaveJob, error: BaseException) -> None:
        """End a save with an error, and remove what it has written if no step can need it."""
        self._chains.failed(job)
        failure = as_save_failed(job.request.step, error)
        try:
            # Calls that hang must not block the next save.
            job.setup.store.renew()
            if job.request.abandon is not None:
                Background(1, "deltacheck-abandon").start(partial(job.request.abandon, failure))
            if not job.may_be_committed:
                removal = self._disk.start(
                    partial(remove_tree, job.setup.store.path, job.writer.path, ignore_errors=True)
                )
                removal.wait(_MOST_REMOVAL_SECONDS)
            elif isinstance(error, _GaveUp):
                self._chains.protect_uncertain(job)
            # Else the manifest may exist and need the segment; a collection decides by what it
            # finds.
        except Exception:
            # Without threads or memory nothing is cleaned up; a collection removes what is left.
            log.exception("what the save of step %d has written may be left over", job.request.step)
        finally:
            self._fail(job.progress, failure)
            self._release(job.progress)

    def _fail(self, progress: Progress, failure: Exception) -> None:
        """Log, count and record the failure of a save, unless the save was given up before."""
        # Counted first: whoever sees that the save has ended must find the new count.
        with self._lock:
            if progress.done():
                return
            log.error("%s", str(failure))
            self.save_log.failed()
            self.failures.add(failure)
            progress.fail(failure)

    def _release(self, progress: Progress) -> None:
        """Record that no thread hangs in this save, which must have ended."""
        with self._lock:
            self.stuck.discard(progress)
