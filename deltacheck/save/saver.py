"""Begin saves on the training thread, one after the other, and wait for them.

The chains that a save goes on from are in ``chains/chain_state.py``, the threads that finish it in
``pipeline.py``, and its steps in ``job/save_job.py``.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from deltacheck.codec.base import Codec
from deltacheck.errors import SaveFailed, StorageTimeout
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Node
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save.chains.chain_state import ChainState, Numbers
from deltacheck.save.chains.compactor import Compactor
from deltacheck.save.handle import SaveHandle, progress_of
from deltacheck.save.job.manifest_builder import SaveRequest, Terms
from deltacheck.save.job.save_job import SaveJob
from deltacheck.save.job.setup import Setup
from deltacheck.save.job.shadow_file import ShadowFile
from deltacheck.save.job.source import LaterSources, LeafSource, Sources
from deltacheck.save.pipeline import Pipeline, PlannedLater
from deltacheck.save.progress import Progress, as_save_failed
from deltacheck.save.save_options import Settings
from deltacheck.save.treatment.run_state import Shadow
from deltacheck.save.treatment.signals import Agreed, HeldState, Signals
from deltacheck.save.treatment.treatment import Treatment, leaf_groups
from deltacheck.store.documents import Written
from deltacheck.store.lock.deadline import Deadline, Pulse
from deltacheck.store.lock.interrupts import Flag, postponed, shielded
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.store import Store

__all__ = ["LeafSource", "Saver"]

log = logging.getLogger("deltacheck")


class Saver:
    """The saves of one root in one process, one after the other. A backend makes it.

    If nothing at all has happened for twice ``io_timeout_seconds``, whoever waits for a save gives
    it up, even if a thread still hangs in it.

    Args:
        store: The segments of the root.
        codec: The codec of the backend's memory.
        settings: The policy and the options of all saves.
        numbers: The sequence numbers of the saves.

    Attributes:
        settings, options: Those of all saves.
        is_exact: True if every leaf is stored as it is.
        chains: The chains that the next save goes on from.
        pipeline: The threads, the failures and the log of the saves.
    """

    def __init__(
        self, store: Store, codec: Codec[Any], settings: Settings, numbers: Numbers
    ) -> None:
        self.codec = codec
        if not settings.merges:
            settings = settings.without_merges()
        policy, options = settings.policy, settings.options
        self.settings, self.options = settings, options  # of all saves
        self.is_exact = policy.is_exact
        shadow_file = ShadowFile() if options.shadow == "mapped" else None
        self._setup = Setup(store, codec, policy, options, shadow_file)
        self._treatment = Treatment(policy, codec, self._shadow)
        compactor = (
            Compactor(store, policy, options.io_timeout_seconds) if settings.merges else None
        )
        self.chains = ChainState(numbers, compactor)
        # The saves under way, and those whose failure nobody has seen, in order. No lock guards it:
        # each change is one operation of the dictionary.
        self._saves: dict[Progress, None] = {}
        # Longer than the deadlines of storage calls, so that a hanging save fails by itself first.
        self._pulse = Pulse(2 * options.io_timeout_seconds)
        self._owner = os.getpid()
        self._closed = False
        # Clear while a save is planned on the encoder thread.
        self._planned = Flag()
        self._planned.set()
        # A remark on a lost base, for the report of the next save.
        self._loss = ""
        self.pipeline = Pipeline(options, self.chains)
        # Called with the course of each restored step.
        self.on_resume: Callable[[str], None] | None = None

    # --- saving -----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tree: Node,
        sources: Sources,
        commit: Callable[[Manifest], Written],
        *,
        metrics: Mapping[str, float] | None = None,
        note: str = "",
        agreed: Agreed | None = None,
    ) -> SaveHandle:
        """Begin to save. Return once every leaf that is not lazy is captured.

        Args:
            step: The training step.
            tree: The structure of the state.
            sources: The leaves by path. ``LaterSources``: the save is planned behind the training
                loop, too. A failure of the plan is then on the handle.
            commit: Makes the step exist; called with the manifest on the committer thread.
            metrics: Values for the manifest and the report.
            note: A remark for the report.
            agreed: The agreement of the ranks that save together; ``None``: there are none.

        Returns:
            The handle. A failure of this save is on it, in the log, and raised by the next call.

        Raises:
            SaveFailed: An earlier save failed and nobody has seen the error yet (this step is then
                not saved), or the saver is closed.
        """
        self.check_usable()
        abandon = None if agreed is None else agreed.abandon
        request = SaveRequest(step, tree, commit, metrics or {}, note, abandon)
        # The handler of a signal may wait for saves, and would not find one that is half begun.
        with postponed():
            # Made before the waits: a new handle starts the patience of its pulse anew.
            handle = SaveHandle(step, self._pulse)
            self._begin(progress_of(handle), request, sources, agreed)
            return handle

    def _begin(
        self, progress: Progress, request: SaveRequest, sources: Sources, agreed: Agreed | None
    ) -> None:
        # A caller that ignores its handles learns of an earlier failure here.
        if self._is_refused(progress, request):
            return
        pending = self.pending()
        if len(pending) >= self.options.max_pending and self.options.on_busy == "skip":
            progress.advance("skipped")
            return
        while len(pending) >= self.options.max_pending:
            self._block_until(pending[0], "committed")
            pending = self.pending()
        # The capture updates the shadow, which an earlier save may still be reading.
        for earlier in pending:
            self._block_until(earlier, "encoded")
        # A save may have been given up during the waits above.
        if self._is_refused(progress, request):
            return
        # Before the save is known: if a thread cannot start, nobody may wait for it.
        self._setup.store.start_threads()
        self._saves[progress] = None
        if isinstance(sources, LaterSources):
            self._start_later(request, sources, progress)
        else:
            self._start(request, sources, agreed, progress)
        progress.blocking_seconds += time.perf_counter() - request.begin

    def _start(
        self,
        request: SaveRequest,
        sources: Mapping[str, LeafSource],
        agreed: Agreed | None,
        progress: Progress,
    ) -> None:
        """Plan a save, capture the leaves that are not lazy, and leave the rest to the threads."""
        try:
            job = self._plan(request, sources, agreed, progress)
        except BaseException:
            # The caller gets the error and no handle.
            self._saves.pop(progress, None)
            raise
        try:
            job.capture_eager()
            self.pipeline.start(job)
        except Exception as error:  # noqa: BLE001 - training goes on: the failure is on the handle
            self.pipeline.fail(job, error)
        except BaseException as error:
            # Ctrl-C: nobody may wait for this save any more, and no later one may go on from it.
            self.pipeline.fail(job, error)
            raise

    def _start_later(self, request: SaveRequest, sources: LaterSources, progress: Progress) -> None:
        """Leave a save to the threads, its plan included."""
        self._planned.clear()
        if sources.is_own:
            progress.mark_own()
        try:
            plan = partial(self._plan_later, request, sources, progress)
            self.pipeline.start(PlannedLater(plan, progress))
        except BaseException as error:
            # Ctrl-C: nobody may wait for this save any more.
            self.pipeline.refuse_unplanned(progress, error)
            self._planned.set()
            raise

    def _plan_later(
        self, request: SaveRequest, sources: LaterSources, progress: Progress
    ) -> SaveJob | None:
        """Plan a save on the encoder thread; return ``None`` if it was given up before."""
        try:
            if progress.done():
                return None
            return self._plan(request, sources.make(), None, progress)
        finally:
            self._planned.set()

    def _plan(
        self,
        request: SaveRequest,
        sources: Mapping[str, LeafSource],
        agreed: Agreed | None,
        progress: Progress,
    ) -> SaveJob:
        """Decide how each leaf is kept, and begin the save on the chains."""
        self._renew_lost_base(progress)
        remarks = [remark for remark in (self._loss, request.note) if remark]
        request, self._loss = dataclasses.replace(request, note="; ".join(remarks)), ""
        terms: Callable[[], Terms] = Terms
        # The common case must not read a single leaf on the training thread.
        if not self.is_exact:
            sources, terms = self._treatment.plan(
                request.step, sources, request.tree, request.metrics, agreed
            )
        job = partial(SaveJob, self._setup, request, sources, terms, progress)
        return self.chains.begin(sources.keys(), job)

    def groups(self, specs: Mapping[str, LeafSpec], tree: Node) -> list[list[str]]:
        """Return the leaves that one rank should write, of all leaves of the ranks of a save."""
        return [] if self.is_exact else leaf_groups(specs, tree)

    def signals(self, step: int, held: HeldState) -> Signals | None:
        """Return the signals that the ranks of a save agree on; ``None`` if there are none."""
        # The captures of the last save measure what these tell.
        for earlier in self.pending():
            self._block_until(earlier, "encoded")
        return self._treatment.signals(step, held)

    def measured(self, state: HeldState) -> Signals | None:
        """Return what the last save has shown, for ranks that agree before the next one."""
        return self._treatment.measured(state)

    def resumed(self, manifest: Manifest) -> None:
        """Forget the course of the run, because a step was restored.

        Args:
            manifest: The manifest of the step.
        """
        if not self.is_exact:
            self._treatment.resumed(manifest.rates)
        if self.on_resume is not None:
            self.on_resume(manifest.course)

    def fail(self, step: int, error: BaseException) -> SaveHandle:
        """Return the handle of a save that failed before it began, such as for want of memory.

        Raises:
            SaveFailed: ``on_error`` does not leave the failure to the log.
        """
        handle = SaveHandle(step, self._pulse)
        self.pipeline.refuse(progress_of(handle), as_save_failed(step, error))
        return handle

    def _shadow(self, path: str) -> Shadow | None:
        leaf = self.chains.leaves.get(path)
        if leaf is None or leaf.base is None:
            return None
        return Shadow(leaf.spec, leaf.base)

    # --- chains -----------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return the sequence number of the next save."""
        # A save that is planned behind the training loop gets its number there.
        if self.is_ours():  # a forked child has no such thread
            self._planned.wait()
        return self.chains.next_number()

    def proposed_number(self) -> int:
        """Return the lowest sequence number that ranks may give to the next save of this saver."""
        return self.next_number() + self.settings.numbers_of_save - 1

    def number_from(self, seq: int) -> None:
        """Give the next save at least the sequence number that ranks have agreed on.

        Savers that share a store must not use a number twice. If deltas are merged, a merge that
        begins with this save has the number below, which no save may have.
        """
        self.chains.number_from(seq, seq - 1 if self.settings.merges else None)

    def adopt(
        self, chains: Mapping[str, Chain], bases: Mapping[str, Any], manifest: Manifest
    ) -> None:
        """Go on from a restored step without new keyframes. No save may be pending.

        Args:
            chains: The chains of the step's leaves.
            bases: Their decoded content in the codec's form, owned by the saver from now on.
            manifest: The manifest of the step.
        """
        # Even without a shadow the chains are adopted: a leaf that equals its keyframe is not
        # written again.
        if self._setup.shadow_file is not None:
            bases = self._setup.shadow_file.moved(bases)
        self.chains.adopt(chains, bases if self.options.keeps_shadow else None, manifest)
        self.resumed(manifest)

    def move_shadow(self, move: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Wait until the saves under way are encoded, and keep the shadow in other memory.

        Args:
            move: Return the same content in other memory, for some of the leaves of the shadow, by
                path.

        Raises:
            SaveFailed: The saver is closed, or a thread hangs in a save and may read the state.
        """
        self.check_usable()
        for progress in self.pending():
            self._block_until(progress, "encoded")
        if self.pipeline.stuck:
            raise SaveFailed(
                "the storage hangs in a save that may still read the state; repeat the call when"
                " it answers"
            )
        self.chains.move_shadow(move)

    def _renew_lost_base(self, beginning: Progress) -> None:
        """Let the next save write whole leaves if stored segments are gone that it would need.

        Another program may have removed them: a purge of old files, or a disk that was replaced.
        The log and the report of the save state it. Saves under way are waited for; those that
        need the lost segments fail.

        Args:
            beginning: The save that begins and is not waited for.
        """
        missing = self.pipeline.missing_base(self._setup.store)
        if not missing:
            return
        for progress in self.pending():
            if progress is not beginning:
                self._block_until(progress, "committed")
        self.chains.start_over()
        self._loss = (
            f"whole leaves are written: {len(missing)} segments that the save would have gone on"
            f" from are gone or have lost files, the first {missing[0]}"
        )
        log.warning(
            "%s: %s. Another program has removed files of the root; earlier steps that need them"
            " cannot be restored",
            self._setup.store.path,
            self._loss,
        )

    # --- waiting ----------------------------------------------------------------------------------

    def pending(self) -> list[Progress]:
        """Return the saves under way, oldest first."""
        saves = list(self._saves)
        for progress in saves:
            # Failed saves stay until `raise_unseen` reports them.
            if progress.done() and progress.error is None:
                self._saves.pop(progress, None)
        return [progress for progress in saves if not progress.done()]

    def settle(self) -> None:
        """Block the training thread until no save is under way; the next call raises failures."""
        for progress in self.pending():
            self._block_until(progress, "committed")

    def settle_reads(self) -> bool:
        """Block the training thread until every save under way has read the state.

        On a device it is enough that the reads are enqueued. The time counts as blocking time.

        Returns:
            True: the caller must enqueue its writes behind the reads of the devices; false: the
            saves read copies of their own.
        """
        if not self.is_ours():  # a forked child trains on a copy that no save reads
            return False
        read: set[Progress] = set()
        # The handler of a signal may begin another save during the waits.
        while pending := [progress for progress in self.pending() if progress not in read]:
            newest = pending[-1]
            if not self._planned.is_set() and not newest.reads_enqueued:
                begin = time.perf_counter()
                # The wait for a save that is planned can be shortened (``while_awaited``).
                self._planned.wait(self.options.io_timeout_seconds)
                newest.blocking_seconds += time.perf_counter() - begin
            for progress in pending:
                self._block_until(progress, "captured", or_enqueued=True)
            read.update(pending)
        return not all(progress.is_own for progress in read)

    def _block_until(self, progress: Progress, state: str, or_enqueued: bool = False) -> None:
        """Block the training thread for a save; give the save up if it makes no progress."""
        try:
            progress.block_until(state, or_enqueued)
        except StorageTimeout as error:
            self.pipeline.give_up(progress, error)

    def raise_unseen(self) -> None:
        """Raise the oldest unseen failure, unless ``on_error`` leaves it to the log."""
        saves = list(self._saves)
        failed = [progress for progress in saves if progress.error is not None]
        for progress in saves:
            if progress.done():
                self._saves.pop(progress, None)
        for progress in failed:
            unseen = progress.take_unseen_error()
            error = None if unseen is None else self.pipeline.failures.to_raise(unseen)
            if error is not None:
                raise error

    def _is_refused(self, progress: Progress, request: SaveRequest) -> bool:
        """Raise earlier failures; return true if the save itself has failed before it began."""
        self.raise_unseen()
        return self.pipeline.refuse_if_stuck(progress, request.abandon)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save under way is committed.

        Args:
            timeout: Seconds. ``None``: wait as long as saves make progress.

        Raises:
            SaveFailed: The first failure that nobody has seen.
            TimeoutError: ``timeout`` has passed.
            StorageTimeout: Without a timeout, nothing has happened for twice
                ``io_timeout_seconds``. It is a ``TimeoutError``, too.
        """
        self._check_owner()
        deadline = Deadline.after(timeout)
        for progress in list(self._saves):
            if progress.error is None:
                progress.wait_for_end(deadline.left)
        self.raise_unseen()

    # --- end --------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise ``SaveFailed`` if the saver is closed, or this process is a forked child.

        Threads and locks do not survive a fork.
        """
        if self._closed:
            raise SaveFailed("this saver is closed; open a new one")
        self._check_owner()

    def is_ours(self) -> bool:
        """Return true if this process made the saver.

        A forked child has neither its threads nor a right to its root.
        """
        return os.getpid() == self._owner

    def _check_owner(self) -> None:
        if not self.is_ours():
            raise SaveFailed(
                f"this saver belongs to process {self._owner}; a forked child must open its own"
                " root"
            )

    def close(self, timeout: float | None = None) -> None:
        """Finish the saves under way and stop. A second call does nothing.

        If time runs out, the threads go on as long as the process lives: ``Pipeline.when_stopped``.
        Raises what ``wait`` raises.
        """
        if self._closed or not self.is_ours():
            return
        try:
            # Else the error of a handler would end this wait.
            with shielded() as errors:
                self.wait(timeout)
        except Exception:
            self._stop()
            raise
        # After Ctrl-C or ``sys.exit`` in a handler, the saver stays open: the exit finishes saves.
        self._stop()
        if errors:
            raise errors[0]

    def _stop(self) -> None:
        self._closed = True
        # If a save is stuck or still pending, its thread may hang, and so would a join.
        self.pipeline.stop(join=not self.pipeline.stuck and not self.pending())

    def end_unattended(self, callback: Callable[[], None]) -> None:
        """Finish the saves under way and call ``callback``, which closes this saver, on a thread.

        For an owner that nobody refers to. A garbage collection may call this on any thread.
        """
        if not self._closed and self.is_ours():
            self.pipeline.end_unattended(callback)
