"""Write leaves whole again from what is stored of them: behind a training, between two of its
saves,
or by a command.

Behind a training no manifest is touched. The segment that is written has a sequence number which
was set aside between two saves, and holds the leaves as the first of the two has them. Once it is
durable the next save's chains hang from it, with the deltas that came after it; until then
everything is as if there were none. So a kill at any moment leaves an unneeded segment, and nothing
else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deltacheck.errors import SaveFailed
from deltacheck.leaf.digest import leaf_digest
from deltacheck.leaf.spec import batches
from deltacheck.restore import read
from deltacheck.restore.chain import Chain, resolve_chains
from deltacheck.save.job.leaf_state import LeafState
from deltacheck.save.rewrite import WholeLeaves
from deltacheck.store.files.storage import remove_tree
from deltacheck.store.manifest import Manifest, SegmentRef
from deltacheck.store.root import Root, Store
from deltacheck.store.segment import SegmentWriter

log = logging.getLogger("deltacheck")

_BATCH_BYTES = 16 << 20  # of leaves that are read together, so that many small ones cost few calls

Links = tuple[str, tuple[str, ...]]  # the segment of a leaf's keyframe, and those of its deltas


def write_whole(
    writer: SegmentWriter,
    chains: Mapping[str, Chain],
    io_timeout_seconds: float,
    give_up: Callable[[], bool] = lambda: False,
) -> SegmentRef:
    """Write leaves as keyframes of a new segment, durably. Holds a few of them in memory at a time.

    Raises ``Damaged`` or ``ChainBroken`` where they are not whole, ``SaveFailed`` where the storage
    hangs or ``give_up`` says so.
    """
    whole = WholeLeaves(writer, [found.spec for found in chains.values()], io_timeout_seconds)
    for paths in batches(sorted(chains), lambda path: chains[path].spec.raw_bytes, _BATCH_BYTES):
        if give_up():
            raise SaveFailed("the compaction was given up")
        batch = {path: chains[path] for path in paths}
        data = read.read_chunks(
            batch, {path: list(range(found.spec.chunk_count)) for path, found in batch.items()}
        )
        for path, found in batch.items():
            whole.add(found.spec, leaf_digest(found.digests), found.digests, data[path])
    return whole.finish()


@dataclass(frozen=True, slots=True)
class Plan:
    """Leaves to write whole, and where each stands as of one save. ``seq``: set aside for it, right
    after that save's.
    """

    seq: int
    links: Mapping[str, Links]


@dataclass(frozen=True, slots=True)
class Compacted:
    """The leaves of ``links`` stand in the segment ``ref`` too, as they were at the end of these
    chains.
    """

    ref: SegmentRef
    links: Mapping[str, Links]


def due(leaves: Mapping[str, LeafState], after: int) -> dict[str, Links]:
    """The leaves whose chains have at least ``after`` deltas, and those chains."""
    return {
        path: (leaf.key_segment, tuple(leaf.delta_segments))
        for path, leaf in leaves.items()
        if leaf.base is not None and len(leaf.delta_segments) >= after
    }


def hang(leaves: Mapping[str, LeafState], done: Compacted) -> int:
    """Let the leaves' chains begin at the compacted segment, where they still begin with what was
    compacted; how many did.

    The deltas after it stay: the first of them is one to the digest that the leaf has in the
    segment. REQUIRES: no save is being encoded.
    """
    hung = 0
    for path, (key, deltas) in done.links.items():
        leaf = leaves.get(path)
        if (
            leaf is not None
            and leaf.key_segment == key
            and tuple(leaf.delta_segments[: len(deltas)]) == deltas
        ):
            leaf.key_segment, leaf.delta_segments = done.ref.id, leaf.delta_segments[len(deltas) :]
            leaf.delta_bytes = leaf.delta_bytes[len(deltas) :]
            hung += 1
    return hung


@dataclass(slots=True)
class _Running:
    """A compaction under way, or one whose result nobody has taken yet."""

    thread: threading.Thread | None = None
    segments: set[str] = field(default_factory=set)  # that it reads and writes
    result: Compacted | None = None


class Compactor:
    """Compactions of one saver, one at a time, on a thread of their own. ``after``: deltas from
    which on a leaf is due.
    """

    def __init__(self, store: Store, after: int, io_timeout_seconds: float) -> None:
        self._store = store
        self._after = after
        self._io_timeout_seconds = io_timeout_seconds
        self._lock = threading.Lock()
        self._running = _Running()
        self._stop = threading.Event()

    def plan(self, leaves: Mapping[str, LeafState], seq: int) -> Plan | None:
        """What to compact as of the save that was captured last; ``None`` where nothing is due, or
        one is under way.
        """
        with self._lock:
            if self._running.thread is not None:
                return None
        links = due(leaves, self._after)
        return Plan(seq, links) if links else None

    def start(self, plan: Plan, manifest: Manifest) -> None:
        """Begin. ``manifest``: of the save that the plan was made after, committed."""
        with self._lock:
            if self._running.thread is not None or self._stop.is_set():
                return
            segments = {name for key, deltas in plan.links.values() for name in (key, *deltas)}
            thread = threading.Thread(
                target=self._run, args=(plan, manifest), name="deltacheck-compactor", daemon=True
            )
            self._running = _Running(thread, segments)
        thread.start()

    def take(self) -> Compacted | None:
        """The result of the last compaction, once."""
        with self._lock:
            running = self._running
            if running.thread is None or running.thread.is_alive():
                return None
            self._running = _Running()
        return running.result

    def segments(self) -> set[str]:
        """Segments that must not be removed while this is under way or its result not yet taken."""
        with self._lock:
            return set(self._running.segments)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the compaction under way, if any."""
        thread = self._running.thread
        if thread is not None:
            thread.join(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Give up what is under way. More than once does nothing."""
        self._stop.set()
        self.wait(timeout)

    def _run(self, plan: Plan, manifest: Manifest) -> None:
        writer = self._store.writer(plan.seq)
        running = self._running
        running.segments = running.segments | {writer.id}
        try:
            root = Root(self._store.path, self._store).afresh()
            found = resolve_chains(
                root, manifest, [path for path in plan.links if path in manifest.stored]
            )
            chains = {
                p: c
                for p, c in found.items()
                if (c.key[0].id, tuple(c.delta_segments)) == plan.links[p]
            }
            if chains:
                ref = write_whole(writer, chains, self._io_timeout_seconds, self._stop.is_set)
                running.result = Compacted(ref, {path: plan.links[path] for path in chains})
        except BaseException as error:  # noqa: BLE001 - the training has lost nothing
            remove_tree(writer.path, ignore_errors=True)
            if not self._stop.is_set():
                log.warning(
                    "step %d was not compacted; its chains stay as they are: %s",
                    manifest.step,
                    error,
                )
