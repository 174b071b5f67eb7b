"""Write leaves with long chains whole, behind a training, between two of its saves.

No manifest is touched. The new segment has a sequence number that was set aside between two saves,
and it holds the leaves as the first of these saves has them. Once it is durable, the chains of the
next save begin at it and keep the deltas that came later. Until then no chain refers to it. A kill
at any moment therefore leaves an unneeded segment and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltacheck.restore.chain import resolve_chains
from deltacheck.save.chains.whole_leaves import write_whole
from deltacheck.save.job.leaf_state import LeafState
from deltacheck.store.files.containment import remove_tree
from deltacheck.store.manifest import Manifest, SegmentRef
from deltacheck.store.root import Root, Store

log = logging.getLogger("deltacheck")

# The segment of a leaf's keyframe, and the segments of its deltas, oldest first.
Links = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """Leaves to write whole.

    Args:
        seq: The sequence number of the new segment, set aside right after a save.
        links: The chain of each leaf as of that save, by path.
    """

    seq: int
    links: Mapping[str, Links]


@dataclass(frozen=True, slots=True)
class CompactedChains:
    """Leaves that were written whole.

    Args:
        ref: The new segment.
        links: The chain that the segment replaces, of each leaf by path.
    """

    ref: SegmentRef
    links: Mapping[str, Links]


def due(leaves: Mapping[str, LeafState], after: int) -> dict[str, Links]:
    """Return the chains of the leaves that have at least ``after`` deltas."""
    # A leaf without a base is written whole by the next save in any case.
    return {
        path: (leaf.key_segment, tuple(leaf.delta_segments))
        for path, leaf in leaves.items()
        if leaf.base is not None and len(leaf.delta_segments) >= after
    }


def attach(leaves: Mapping[str, LeafState], compacted: CompactedChains) -> int:
    """Let chains begin at the compacted segment, and return how many now do.

    A chain is left alone if it no longer begins with what was compacted. Later deltas stay: the
    first of them goes from the digest that the leaf has in the segment. No save may be encoding.
    """
    count = 0
    for path, (key, deltas) in compacted.links.items():
        leaf = leaves.get(path)
        if (
            leaf is not None
            and leaf.key_segment == key
            and tuple(leaf.delta_segments[: len(deltas)]) == deltas
        ):
            leaf.key_segment = compacted.ref.id
            leaf.delta_segments = leaf.delta_segments[len(deltas) :]
            leaf.delta_bytes = leaf.delta_bytes[len(deltas) :]
            count += 1
    return count


@dataclass(slots=True)
class _Running:
    """A compaction under way, or one with a result to take.

    Args:
        thread: Its thread; ``None``: there is no compaction.
        segments: The segments that it reads and writes.
        result: Its result, if it succeeded.
    """

    thread: threading.Thread | None = None
    segments: set[str] = field(default_factory=set)
    result: CompactedChains | None = None


class Compactor:
    """The compactions of one saver, one at a time, each on a thread of its own.

    Args:
        store: The segments of the root.
        after: The number of deltas from which on a leaf is due. Smaller: faster restores; larger:
            less reading and writing beside the training.
        io_timeout_seconds: The longest wait for the storage.
    """

    def __init__(self, store: Store, after: int, io_timeout_seconds: float) -> None:
        self._store = store
        self._after = after
        self._io_timeout_seconds = io_timeout_seconds
        self._lock = threading.Lock()
        self._running = _Running()
        self._stop = threading.Event()

    def plan(self, leaves: Mapping[str, LeafState], seq: int) -> CompactionPlan | None:
        """Plan a compaction as of the save that was captured last.

        ``None`` if nothing is due, or a compaction is under way.
        """
        with self._lock:
            if self._running.thread is not None:
                return None
        links = due(leaves, self._after)
        return CompactionPlan(seq, links) if links else None

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
            segments = {name for key, deltas in plan.links.values() for name in (key, *deltas)}
            thread = threading.Thread(
                target=self._run, args=(plan, manifest), name="deltacheck-compactor", daemon=True
            )
            self._running = _Running(thread, segments)
        thread.start()

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

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the compaction under way, if there is one."""
        thread = self._running.thread
        if thread is not None:
            thread.join(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Give up the compaction under way. A second call does nothing."""
        self._stop.set()
        self.wait(timeout)

    def _run(self, plan: CompactionPlan, manifest: Manifest) -> None:
        writer = self._store.writer(plan.seq)
        running = self._running
        # Replaced, not updated: `segments` may be copying the set.
        running.segments = running.segments | {writer.id}
        try:
            # A root of its own, because one `Root` serves one thread at a time.
            root = Root(self._store.path, self._store).afresh()
            stored_paths = [path for path in plan.links if path in manifest.stored]
            # The plan was made before its save was committed, so its chains may differ.
            chains = {
                path: chain
                for path, chain in resolve_chains(root, manifest, stored_paths).items()
                if (chain.key[0].id, tuple(chain.delta_segments)) == plan.links[path]
            }
            if chains:
                ref = write_whole(writer, chains, self._io_timeout_seconds, self._stop.is_set)
                running.result = CompactedChains(ref, {path: plan.links[path] for path in chains})
        except BaseException as error:  # noqa: BLE001 - training goes on with the old chains
            remove_tree(self._store.path, writer.path, ignore_errors=True)
            if not self._stop.is_set():
                log.warning(
                    "step %d was not compacted; its chains stay as they are: %s",
                    manifest.step,
                    error,
                )
