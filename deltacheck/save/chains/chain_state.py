"""The chains that the next save goes on from: leaves, segments, sequence numbers and compactions.

The shadow (``LeafState.base``) is the decoded content of the newest captured save. It is updated
while a save is encoded. If that save fails afterwards, the shadow is dropped and the epoch
advances: the next save writes keyframes, and saves already encoded on top of the failed one cannot
be committed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deltacheck.leaf.digest import leaf_digest
from deltacheck.policy.keyframes import saves_until_estimate
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save.chains.compactor import CompactionPlan, Compactor, attach
from deltacheck.save.job.leaf_state import LeafState
from deltacheck.save.job.save_job import ChainTurn, SaveJob
from deltacheck.store.lock.interrupts import Lock
from deltacheck.store.manifest import Manifest, SegmentRef


class Numbers:
    """The sequence numbers of one saver. No two segments of a store may have the same one.

    Args:
        next_seq: The next number.
        shared: The numbers of a store that several savers share. ``None``: the saver is alone.

    Attributes:
        next: The next number, as far as this saver knows.
        spare: The number of the next compaction, if ranks have set one aside.
    """

    def __init__(self, next_seq: int, shared: Numbers | None = None) -> None:
        self.next = next_seq
        self.spare: int | None = None
        self._shared = shared or self
        self._lock = Lock()

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Return a context that advances ``next`` by the numbers taken, alone of all savers."""
        with self._shared._lock:
            self.next = max(self.next, self._shared.next)
            yield
            self._shared.next = self.next

    def take(self, count: int = 1) -> int:
        """Return the last of the next ``count`` numbers, which no other save then has."""
        with self.taking():
            self.next += count
            return self.next - 1


class ChainState:
    """The chains of one saver. Its methods may be called from any thread.

    Args:
        numbers: The sequence numbers of its saves.
        compactor: Shortens long chains behind the saves. ``None``: nothing does.
    """

    def __init__(self, numbers: Numbers, compactor: Compactor | None) -> None:
        self.epoch = 0
        self.leaves: dict[str, LeafState] = {}
        self.compactor = compactor
        self._numbers = numbers
        # The segments of the newest durable save.
        self._refs: dict[str, SegmentRef] = {}
        # The newest step that was committed, or restored since.
        self._newest: Manifest | None = None
        # The leaves that were not exact in one of these steps.
        self._promised: set[str] = set()
        # The newest compacted segment. It is no step's yet until the next save is committed.
        self._compacted: dict[str, SegmentRef] = {}
        # Compactions to start when the save of a sequence number is committed.
        self._plans: dict[int, CompactionPlan] = {}
        # Of the bytes that compactions have written, those that a manifest states.
        self._stated_bytes = 0
        # Segments of saves under way, and of saves that were given up while they were committed.
        self._segments_under_way: set[str] = set()
        self._uncertain: set[str] = set()
        self._lock = Lock()

    # --- between saves ----------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return the sequence number of the next save."""
        with self._lock:
            return self._numbers.next

    def number_from(self, seq: int, spare_seq: int | None = None) -> None:
        """Give the next save at least this sequence number.

        ``spare_seq``: the number of a compaction that is planned with this save; ``None``: the
        compaction gets the number of the save, and the save the next one.
        """
        with self._lock:
            self._numbers.next = max(self._numbers.next, seq)
            self._numbers.spare = spare_seq

    def compactions(self) -> tuple[set[str], set[int]]:
        """Return the segments and the numbers of compactions that no step has yet."""
        with self._lock:
            seqs = {plan.seq for plan in self._plans.values()}
        if self.compactor is None:
            return set(), seqs
        running_seq = self.compactor.seq()
        return self.compactor.segments() | self._compacted.keys(), seqs | (
            set() if running_seq is None else {running_seq}
        )

    def adopt(
        self, chains: Mapping[str, Chain], bases: Mapping[str, Any] | None, manifest: Manifest
    ) -> None:
        """Go on from a restored step.

        Args:
            chains: The chains of the step's leaves.
            bases: Their decoded content in the codec's form, owned from now on, without that of
                leaves that each save stores whole. ``None``: no shadow is kept.
            manifest: The manifest of the step.
        """
        with self._lock:
            self.epoch += 1
            # Without locks, another writer may have committed the step since this one has begun.
            self._numbers.next = max(self._numbers.next, manifest.seq + 1)
            self._refs = {ref.id: ref for ref in manifest.segments}
            self._newest, self._compacted = manifest, {}
            self._promised |= manifest.contracts.keys()
            self.leaves = {
                path: _leaf_state(chain, None if bases is None else bases.get(path))
                for path, chain in chains.items()
            }

    def drop(self) -> None:
        """Drop the shadow, so that the next save writes keyframes."""
        with self._lock:
            self.epoch += 1
            self.leaves = {}

    def move_shadow(self, move: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Keep the shadow in other memory; see ``Saver.move_shadow``."""
        # No lock: a failure replaces the dictionary, and nothing else changes it meanwhile.
        states = self.leaves
        shadow = {path: leaf.base for path, leaf in states.items() if leaf.base is not None}
        for path, base in move(shadow).items():
            states[path].base = base

    def start_over(self) -> None:
        """Drop the shadow, and need no stored segment any more. No save may be under way."""
        with self._lock:
            self.drop()
            self._refs, self._compacted = {}, {}

    def base_segments(self) -> set[str]:
        """Return the stored segments that the next save may go on from, without a look at leaves.

        Segments of saves under way are left out: each of these saves looks for its own.
        """
        with self._lock:
            return {*self._refs, *self._compacted} if self.leaves else set()

    def protected_segments(self) -> set[str]:
        """Return the segments that the shadow or a save under way needs."""
        with self._lock:
            names = (
                self._refs.keys()
                | self._uncertain
                | self._compacted.keys()
                | self._segments_under_way
            )
            if self.compactor is not None:
                names |= self.compactor.segments()
            # A copy, because a capture changes the dictionary without the lock.
            for leaf in list(self.leaves.values()):
                names |= {leaf.key_segment, *leaf.delta_segments}
            return names

    # --- during a save, in this order -------------------------------------------------------------

    def begin(self, paths: Collection[str], make_job: Callable[[ChainTurn], SaveJob]) -> SaveJob:
        """Begin a save on these chains. Every earlier save must be encoded.

        Args:
            paths: The leaves of the save. Chains of others end here.
            make_job: Return the save. If it raises, its sequence number is not used.
        """
        with self._lock, self._numbers.taking():
            for path in self.leaves.keys() - paths:
                del self.leaves[path]
            compaction = self._take_compaction()
            job = make_job(ChainTurn(self._numbers.next, self.epoch, self.leaves))
            if compaction is not None:
                self._plans[job.seq] = compaction
            self._segments_under_way.add(job.writer.id)
            self._numbers.next += 1
            return job

    def _take_compaction(self) -> CompactionPlan | None:
        """Attach the chains to what has been compacted, and plan the next compaction."""
        if self.compactor is None:
            return None
        compacted = self.compactor.take()
        # Chains of an earlier epoch, such as those before a restore of another step, may have a
        # part in common with the present ones. Their segment does not fit all of these.
        if (
            compacted is not None
            and compacted.epoch == self.epoch
            and attach(self.leaves, compacted)
            and compacted.ref is not None
        ):
            self._compacted = {compacted.ref.id: compacted.ref}
        spare_seq, self._numbers.spare = self._numbers.spare, None
        seq = self._numbers.next if spare_seq is None else spare_seq
        plan = self.compactor.plan(self.leaves, seq, self.epoch)
        if plan is not None and spare_seq is None:
            # The compacted segment is numbered between the last save and the one that begins.
            self._numbers.next += 1
        return plan

    def merged_bytes(self) -> int:
        """Return the bytes of compactions that no manifest states yet."""
        written_bytes = 0 if self.compactor is None else self.compactor.written_bytes
        return written_bytes - self._stated_bytes

    def durable(self, job: SaveJob, ref: SegmentRef | None) -> dict[str, SegmentRef]:
        """Record that a save is durable, and return the segments that its step needs.

        Args:
            job: The save.
            ref: Its own segment, if it has one.
        """
        with self._lock:
            refs = self._refs | self._compacted | ({} if ref is None else {ref.id: ref})
            self._refs = {name: refs[name] for name in refs if name in job.segment.segments}
            return self._refs

    def committed(self, job: SaveJob, manifest: Manifest) -> None:
        """Record that the step exists, and start the compaction that was planned with it."""
        previous, self._newest = self._newest, manifest
        job.explain(manifest, previous, frozenset(self._promised))
        self._promised |= manifest.contracts.keys()
        self._stated_bytes += manifest.merged_bytes
        plan = self._plans.pop(job.seq, None)
        if plan is not None and previous is not None and self.compactor is not None:
            self.compactor.start(plan, previous)
        self._segments_under_way.discard(job.writer.id)

    def failed(self, job: SaveJob) -> None:
        """Drop the shadow if the failed save has updated it."""
        with self._lock:
            # A save of an earlier epoch has not updated the present shadow.
            if job.epoch == self.epoch:
                self.drop()
            self._segments_under_way.discard(job.writer.id)
            self._plans.pop(job.seq, None)

    def protect_uncertain(self, job: SaveJob) -> None:
        """Protect the segments of a save whose manifest may still appear."""
        with self._lock:
            self._uncertain |= job.segment.segments


def _leaf_state(chain: Chain, base: Any) -> LeafState:
    is_whole = base is None and chain.is_stored_whole
    return LeafState(
        chain.spec,
        chain.spec.bounds(),
        base,
        chain.digests,
        leaf_digest(chain.digests),
        chain.key[0].id,
        chain.delta_segments,
        chain.delta_bytes,
        sum(entry.since >= 0 for _, entry in chain.deltas),
        is_whole=is_whole,
        saves_until_estimate=saves_until_estimate(chain.spec.path) if is_whole else 0,
    )
