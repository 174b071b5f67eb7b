"""Shorten long chains behind a training, between two of its saves.

Deltas of a leaf are merged into one. No manifest is touched. The new segment has a sequence number
that was set aside between two saves, and it holds the leaves as the first of these saves has them.
Once it is durable, the chains of the next save use it and keep the deltas that came later. Until
then no chain refers to it. A kill at any moment therefore leaves an unneeded segment and nothing
else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from deltacheck.policy import Policy
from deltacheck.policy.keyframes import deltas_between
from deltacheck.policy.merging import depth_limit, first_merged, is_due, pays
from deltacheck.restore.chain import resolve_chains
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save.chains.merged_deltas import Merged, Run, chains_before, write_merged
from deltacheck.save.job.leaf_state import LeafState
from deltacheck.store.files.background import lower_priority
from deltacheck.store.files.storage import remove_tree
from deltacheck.store.lock.interrupts import Lock, join
from deltacheck.store.manifest import Manifest, SegmentRef
from deltacheck.store.roots.root import Root
from deltacheck.store.roots.store import Store

log = logging.getLogger("deltacheck")

# Added to the niceness of the process. Larger: the training loses less; smaller: chains are short
# sooner.
_NICENESS = 10


class Links(NamedTuple):
    """A part of a chain that one entry is to replace.

    Args:
        key: The segment of the keyframe.
        deltas: The segments of all deltas, oldest first.
        kept_deltas: The number of deltas that stay; the rest are merged.
        saves: Saves until the leaf is due again.
        raw_bytes: The size of the leaf.
    """

    key: str
    deltas: tuple[str, ...]
    kept_deltas: int
    saves: float
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """Leaves of which deltas are to be merged.

    Args:
        seq: The sequence number of the new segment, set aside right after a save.
        epoch: The epoch of the chains. Chains of another epoch do not take the result.
        links: The chain of each leaf as of that save, by path.
    """

    seq: int
    epoch: int
    links: Mapping[str, Links]


@dataclass(frozen=True, slots=True)
class CompactedChains:
    """Leaves of which deltas were merged.

    Args:
        epoch: The epoch of the plan.
        ref: The new segment; ``None``: no leaf was written.
        links: What the segment replaces, of each leaf by path.
        decoded_bytes: The decoded size of each merged delta, by path.
        declined: Leaves of which keyframes are to be written at the limits of their chains.
    """

    epoch: int
    ref: SegmentRef | None
    links: Mapping[str, Links]
    decoded_bytes: Mapping[str, int]
    declined: frozenset[str]


def deltas_to_merge(leaves: Mapping[str, LeafState], policy: Policy) -> dict[str, Links]:
    """Return the chains of the leaves of which deltas are to be merged.

    Args:
        leaves: The chains.
        policy: The policy that limits them.
    """
    links: dict[str, Links] = {}
    state_bytes = sum(leaf.spec.raw_bytes for leaf in leaves.values())
    for path, leaf in leaves.items():
        if leaf.base is None or not leaf.delta_segments or not leaf.may_merge:
            continue
        depth, deltas = depth_limit(policy, path, state_bytes), leaf.deltas
        if is_due(policy, depth, deltas):
            choice = first_merged(policy, depth, deltas)
            if choice is not None:
                links[path] = Links(
                    leaf.key_segment, tuple(leaf.delta_segments), *choice, leaf.spec.raw_bytes
                )
    return links


def attach(leaves: Mapping[str, LeafState], compacted: CompactedChains) -> int:
    """Let chains use the new segment, and return how many now do.

    A chain is left alone if it no longer begins with what was replaced. Later deltas stay: the
    first of them goes from the digest that the leaf has in the segment. No save may be encoding.
    """
    count = 0
    for path, (key, deltas, kept_deltas, _, _) in compacted.links.items():
        leaf = leaves.get(path)
        if (
            leaf is None
            or leaf.key_segment != key
            or tuple(leaf.delta_segments[: len(deltas)]) != deltas
        ):
            continue
        if path in compacted.declined:
            leaf.is_merged = False
            continue
        if compacted.ref is None:
            continue
        count += 1
        later_segments = leaf.delta_segments[len(deltas) :]
        later_bytes = leaf.delta_bytes[len(deltas) :]
        leaf.merged_deltas = kept_deltas + 1
        leaf.delta_segments = [*deltas[:kept_deltas], compacted.ref.id, *later_segments]
        leaf.delta_bytes = [
            *leaf.delta_bytes[:kept_deltas],
            compacted.decoded_bytes[path],
            *later_bytes,
        ]
    return count


@dataclass(slots=True)
class _Running:
    """A compaction under way, or one with a result to take.

    Args:
        thread: Its thread; ``None``: there is no compaction.
        segments: The segments that it reads and writes.
        seq: The number of the segment that it writes.
        result: Its result, if it succeeded.
    """

    thread: threading.Thread | None = None
    segments: set[str] = field(default_factory=set)
    seq: int | None = None
    result: CompactedChains | None = None


class Compactor:
    """The compactions of one saver, one at a time, each on a thread of its own.

    Args:
        store: The segments of the root.
        policy: The policy that limits the chains.
        io_timeout_seconds: The longest wait for the storage.

    Attributes:
        written_bytes: The bytes of all segments that compactions have written so far.
    """

    def __init__(self, store: Store, policy: Policy, io_timeout_seconds: float) -> None:
        self._store = store
        self._policy = policy
        self._io_timeout_seconds = io_timeout_seconds
        self._lock = Lock()
        self._running = _Running()
        self.written_bytes = 0
        self._stop = threading.Event()

    def plan(self, leaves: Mapping[str, LeafState], seq: int, epoch: int) -> CompactionPlan | None:
        """Plan a compaction as of the save that was captured last.

        ``None`` if nothing is due, or a compaction is under way.

        Args:
            leaves: The chains.
            seq: The sequence number of the new segment.
            epoch: The epoch of the chains.
        """
        with self._lock:
            if self._running.thread is not None:
                return None
        links = deltas_to_merge(leaves, self._policy)
        return CompactionPlan(seq, epoch, links) if links else None

    def start(self, plan: CompactionPlan, manifest: Manifest) -> None:
        """Begin a compaction.

        Args:
            plan: The leaves.
            manifest: The committed manifest of the save after which the plan was made.
        """
        with self._lock:
            # The last result may not be taken yet, and its segments must stay protected.
            if self._running.thread is not None or self._stop.is_set():
                return
            # All of the step: its segments are opened together, whatever the leaves.
            segments = {ref.id for ref in manifest.segments}
            thread = threading.Thread(
                target=self._run, args=(plan, manifest), name="deltacheck-compactor", daemon=True
            )
            self._running = _Running(thread, segments, plan.seq)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and no later save needs the result
            with self._lock:
                self._running = _Running()

    def take(self) -> CompactedChains | None:
        """Return the result of the last compaction, once."""
        with self._lock:
            running = self._running
            if running.thread is None or running.thread.is_alive():
                return None
            self._running = _Running()
        return running.result

    def segments(self) -> set[str]:
        """Return the segments to keep until the result of the compaction is taken."""
        with self._lock:
            return set(self._running.segments)

    def seq(self) -> int | None:
        """Return the number of the compaction whose result is not taken; ``None`` if none is."""
        with self._lock:
            return self._running.seq

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the compaction under way, if there is one."""
        thread = self._running.thread
        if thread is not None:
            join(thread, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Give up the compaction under way. A second call does nothing."""
        self._stop.set()
        self.wait(timeout)

    def _run(self, plan: CompactionPlan, manifest: Manifest) -> None:
        lower_priority(_NICENESS)
        # A root of its own, because one `Root` serves one thread at a time, and so that the files
        # of a save do not wait for those of the compaction.
        root = Root(self._store.path, self._store).afresh()
        writer = root.store.writer(plan.seq)
        running = self._running
        # Replaced, not updated: `segments` may be copying the set.
        running.segments = running.segments | {writer.id}
        try:
            # Held, so that their tables are read once for all that follows.
            held = root.store.segments(manifest.segments)
            stored_paths = [path for path in plan.links if path in manifest.stored]
            # The plan was made before its save was committed, so its chains may differ.
            chains = {
                path: chain
                for path, chain in resolve_chains(root, manifest, stored_paths).items()
                if (chain.key[0].id, tuple(chain.delta_segments)) == plan.links[path][:2]
            }
            links = {path: plan.links[path] for path in chains}
            runs = self._runs(root, manifest, chains, links)
            merged = (
                write_merged(writer, runs, self._io_timeout_seconds, self._stop.is_set)
                if runs
                else Merged(None)
            )
            del held
            result = CompactedChains(
                plan.epoch, merged.ref, links, merged.decoded_bytes, merged.declined
            )
            with self._lock:
                self.written_bytes += 0 if result.ref is None else result.ref.stored_bytes
            if result.ref is None:
                # Parts of leaves that were declined later.
                remove_tree(self._store.path, writer.path, ignore_errors=True)
            running.result = result
        except BaseException as error:  # noqa: BLE001 - training goes on with the old chains
            remove_tree(self._store.path, writer.path, ignore_errors=True)
            if not self._stop.is_set():
                log.warning(
                    "step %d was not compacted; its chains stay as they are: %s",
                    manifest.step,
                    str(error),
                )

    def _runs(
        self,
        root: Root,
        manifest: Manifest,
        chains: Mapping[str, Chain],
        links: Mapping[str, Links],
    ) -> dict[str, Run]:
        """Return the deltas to merge, each with the decision about its price."""
        before = chains_before(root, manifest, chains, {p: links[p].kept_deltas for p in chains})
        runs: dict[str, Run] = {}
        for path, chain in chains.items():
            recent_bytes = chain.delta_bytes[-1]
            chain_length = deltas_between(self._policy, path, links[path].raw_bytes, recent_bytes)
            is_worth = partial(_is_worth, links[path].saves, chain_length)
            runs[path] = Run(before[path], chain, is_worth)
        return runs


def _is_worth(
    saves: float, chain_length: int, merged: float, keyframe: float, delta: float
) -> bool:
    return pays(merged, saves, keyframe, delta, chain_length)
