"""One save under way: its capture, its segment and its manifest.

``saver.py`` calls these steps on the right threads, in this order: ``capture`` (training thread,
then encoder thread), ``take_copies``, ``encode`` (encoder thread), ``finish_segment``, ``manifest``
and ``report`` (committer thread).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from deltacheck.leaf.spec import SaveReport
from deltacheck.policy.causes import cause_of
from deltacheck.save.job.leaf_capture import LeafCapture
from deltacheck.save.job.leaf_state import LeafSave, LeafState
from deltacheck.save.job.manifest_builder import SaveRequest, Terms, build_manifest, leaf_report
from deltacheck.save.job.part_writer import PartWriter
from deltacheck.save.job.segment_builder import SegmentBuilder
from deltacheck.save.job.setup import Setup
from deltacheck.save.job.source import EarlyCopies, LeafSource
from deltacheck.save.progress import Progress
from deltacheck.save.save_options import cache_bytes_of
from deltacheck.store.manifest import Manifest, SegmentRef


@dataclass(frozen=True, slots=True)
class ChainTurn:
    """The state of a saver's chains when a save begins.

    Args:
        seq: The sequence number of the save.
        epoch: Counts how often the shadow was dropped or replaced. A save of an older epoch cannot
            be committed.
        states: The chains by path; the save updates them.
    """

    seq: int
    epoch: int
    states: dict[str, LeafState]


class SaveJob:
    """One save under way.

    Args:
        setup: The options of the saver.
        request: The step to save.
        sources: The leaves to store, by path. Lazy ones are held until they are captured.
        terms: Return what the manifest says of leaves that are not stored exactly; called after
            every source was captured.
        progress: The state that the caller's handle shows.
        turn: The saver's chains.

    Attributes:
        segment: The table of its segment: what the save writes, and what its step needs.
    """

    def __init__(
        self,
        setup: Setup,
        request: SaveRequest,
        sources: Mapping[str, LeafSource],
        terms: Callable[[], Terms],
        progress: Progress,
        turn: ChainTurn,
    ) -> None:
        self.setup = setup
        self.request = request
        self.seq, self.epoch = turn.seq, turn.epoch
        self.progress = progress
        # From the first attempt to commit on, the manifest may exist even if the commit fails.
        self.may_be_committed = False
        # Queues, so that each source is released when it is captured.
        self.eager = deque(source for source in sources.values() if not source.lazy)
        self.lazy = deque(source for source in sources.values() if source.lazy)
        self.writer = setup.store.writer(turn.seq)
        self.leaves = {
            path: LeafSave(number, source.spec)
            for number, (path, source) in enumerate(sources.items())
        }
        self._terms = terms
        state_bytes = sum(source.spec.raw_bytes for source in sources.values())
        cache_bytes = cache_bytes_of(state_bytes, setup.options)
        self._parts = PartWriter(
            self.writer,
            list(self.leaves.values()),
            progress,
            cache_bytes,
            setup.options.io_timeout_seconds,
        )
        self._capture = LeafCapture(setup, progress, self.leaves, turn.states, self._parts)
        self._copies = EarlyCopies(self.lazy, cache_bytes)
        progress.while_awaited = self._hasten
        self.segment = SegmentBuilder(setup, self.writer, progress, cache_bytes)

    def capture(self, sources: deque[LeafSource]) -> None:
        """Bring the shadow to the present content of ``sources``, and empty them."""
        self._capture.capture(sources)

    def capture_eager(self) -> None:
        """Capture what must be read before ``save`` returns."""
        is_own = all(source.is_own for source in (*self.eager, *self.lazy))
        self.capture(self.eager)
        if is_own:
            self.progress.mark_own()
        # An eager capture may have enqueued a read on a device, which the training's writes follow.
        elif all(source.is_own for source in self.lazy):
            self.progress.mark_reads_enqueued()

    def _hasten(self) -> None:
        """Shorten the wait of the calling thread for the capture."""
        # The leaf at hand, too, must not wait for the disk.
        self._parts.may_exceed = True
        self._copies.make()
        # The rest does not fit into memory.
        if self.lazy:
            self._parts.may_exceed = False

    def take_copies(self) -> deque[LeafSource]:
        """Return the leaves that a waiting thread has copied; all other leaves are captured.

        From here on the save reads none of the caller's memory.
        """
        self.progress.while_awaited = None
        copies = self._copies.take()
        # The last leaf may have been copied and captured.
        return deque(copy for copy in copies if not self.leaves[copy.spec.path].is_captured)

    def encode(self) -> None:
        """Hand everything that was captured to the disk, and make the segment's table."""
        # The last part first: it is written while keyframes are hashed.
        self._parts.seal()
        self.segment.put_keyframes(self._capture.keyframes)
        self.segment.put_rows(self.leaves.values())
        self.segment.record(self.leaves.values())

    def finish_segment(self) -> SegmentRef | None:
        """Make the segment durable; return ``None`` if no leaf changed and there is none."""
        return self.segment.finish()

    def manifest(
        self, refs: Mapping[str, SegmentRef], failed_saves: int, merged_bytes: int
    ) -> Manifest:
        """Return the manifest of the step.

        Args:
            refs: The segments by name.
            failed_saves: The saves that failed since the last commit.
            merged_bytes: The bytes that were written to shorten chains since the last commit.
        """
        terms = self._terms()
        terms.check(self.segment.records)
        # Segments of a manifest ascend by name (docs/reference/format.md, section 3).
        manifest = build_manifest(
            self.request,
            self.seq,
            terms,
            tuple(refs[name] for name in sorted(self.segment.segments)),
            self.segment.records,
            self.setup.store.durability.value,
        )
        return msgspec.structs.replace(
            manifest, failed_saves=failed_saves, merged_bytes=merged_bytes
        )

    def explain(
        self, manifest: Manifest, before: Manifest | None, promised: Collection[str]
    ) -> None:
        """Record for the report why each leaf was written.

        Args:
            manifest: The manifest of the step.
            before: That of the step before it, ``None`` for the first one.
            promised: The leaves that were not exact in an earlier step.
        """
        for path, leaf in self.leaves.items():
            if leaf.entry is not None:
                leaf.cause = cause_of(
                    path,
                    is_array=leaf.entry.key is not None,
                    before=before,
                    manifest=manifest,
                    promised=promised,
                )

    def report(self, stored_bytes: int, digest: str, manifest: Manifest) -> SaveReport:
        """Return the cost of the committed save.

        Args:
            stored_bytes: Bytes on disk, of the segment and the checkpoint's documents.
            digest: The digest of the manifest.
            manifest: The manifest.
        """
        leaves = tuple(leaf_report(leaf) for leaf in self.leaves.values())
        return SaveReport(
            step=self.request.step,
            seq=self.seq,
            raw_bytes=sum(leaf.raw_bytes for leaf in leaves),
            stored_bytes=stored_bytes,
            blocking_seconds=self.progress.blocking_seconds,
            durable_seconds=time.perf_counter() - self.request.begin,
            leaves=leaves,
            metrics=dict(self.request.metrics),
            note=self.request.note,
            durability=self.setup.store.durability.value,
            digest=digest,
            failed_saves=manifest.failed_saves,
            merged_bytes=manifest.merged_bytes,
        )
