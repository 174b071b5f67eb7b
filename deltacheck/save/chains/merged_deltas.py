"""Merge the newest deltas of leaves into one delta each, in a new segment.

The content before and after the deltas is read from what is stored, and each chunk of both is
compared with its digest. The merged delta is their difference. It is decoded once more and compared
before any chain may refer to it. No existing file is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deltacheck.codec import default_codec, host_memory
from deltacheck.codec.base import ROW_CHUNK, U8, U64, Encoded
from deltacheck.errors import Damaged, SaveFailed
from deltacheck.leaf.digest import leaf_digest
from deltacheck.leaf.spec import batches
from deltacheck.restore import read
from deltacheck.restore.chain import chains_at
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save.job.leaf_state import LeafSave, LeafState
from deltacheck.save.job.part_writer import EncodedChunks, PartWriter, Span
from deltacheck.save.progress import Progress
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.manifest import LeafEntry, Manifest, SegmentRef
from deltacheck.store.roots.root import Root
from deltacheck.store.segment import Segment, SegmentWriter, entropy_bytes

# Bytes of leaves that are read together. Three copies of them are in memory.
WINDOW_BYTES = 8 << 20
# Encoded bytes in memory on their way to the storage. Smaller: less memory beside the training.
_CACHE_BYTES = 32 << 20
# Chunks of which the size of a keyframe is estimated. More: better; fewer: less time.
_SAMPLE_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Deltas of a leaf to merge.

    Args:
        before: The chain of the leaf up to the deltas.
        after: The chain with them.
        is_worth: Return false if the leaf is to stay as it is, from three estimates: the bytes of
            the merged delta, those of a keyframe, and those of one of the deltas.
    """

    before: Chain
    after: Chain
    is_worth: Callable[[float, float, float], bool]

    @property
    def first(self) -> int:
        """The number of the first delta to merge."""
        return len(self.before.deltas)

    def chunks(self) -> list[int]:
        """Return the chunks that the deltas change, ascending."""
        rows = [
            segment.part(part).index[first : first + count, columns.CHUNK]
            for segment, entry in self.after.deltas[self.first :]
            for part, first, count in entry.delta
        ]
        chunks: list[int] = np.unique(np.concatenate(rows)).astype(np.int64).tolist()
        return chunks


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge.

    Args:
        ref: The new segment; ``None``: there is none, because no leaf was merged.
        decoded_bytes: The decoded size of each merged delta, by path.
        declined: Leaves that stay as they are, because keyframes take fewer bytes.
    """

    ref: SegmentRef | None
    decoded_bytes: Mapping[str, int] = field(default_factory=dict)
    declined: frozenset[str] = frozenset()


def chains_before(
    root: Root, manifest: Manifest, chains: Mapping[str, Chain], kept_deltas: Mapping[str, int]
) -> dict[str, Chain]:
    """Return chains of a step as they are before some of their deltas.

    Args:
        root: The root.
        manifest: The step.
        chains: Its chains by stored path.
        kept_deltas: The number of deltas that stay, by path.

    Raises:
        ChainBroken: A segment is missing.
        Damaged: A table is damaged.
    """
    paths_by_seq: dict[int, list[str]] = {}
    for path, count in kept_deltas.items():
        paths_by_seq.setdefault(replaced_since(chains[path].deltas[count]), []).append(path)
    before: dict[str, Chain] = {}
    for seq, paths in paths_by_seq.items():
        earlier = [ref for ref in manifest.segments if layout.seq_of(ref.id) < seq]
        entries = {path: chains[path].deltas[kept_deltas[path]][1] for path in paths}
        records = {path: entry.record(entry.base) for path, entry in entries.items()}
        before |= chains_at(root, manifest, earlier, records)
    return before


class _Window(NamedTuple):
    """Chunks of a leaf that are merged in one call of the codec."""

    path: str
    chunks: list[int]
    size: int
    is_first: bool
    is_only: bool

    @property
    def share(self) -> int:
        """The bytes of a batch that it takes: windows of one leaf do not share a batch."""
        return self.size if self.is_only else WINDOW_BYTES


def write_merged(
    writer: SegmentWriter,
    runs: Mapping[str, Run],
    io_timeout_seconds: float,
    give_up: Callable[[], bool],
) -> Merged:
    """Write merged deltas into a new segment, durably; hold a few chunks in memory at a time.

    Args:
        writer: The segment.
        runs: The deltas of each leaf, by path.
        io_timeout_seconds: The longest wait for the storage.
        give_up: Return true to stop between two batches.

    Raises:
        Damaged: A stored chunk is damaged, or the merged delta does not give what was saved.
        ChainBroken: A segment of a chain is missing.
        SaveFailed: The storage hangs, or ``give_up`` returned true.
    """
    paths = sorted(runs)
    leaves = {path: _leaf_save(number, runs[path]) for number, path in enumerate(paths)}
    parts = PartWriter(
        writer, list(leaves.values()), Progress(-1), _CACHE_BYTES, io_timeout_seconds
    )
    declined: set[str] = set()
    windows = [window for path in paths for window in _windows(path, runs[path])]
    for batch in batches(windows, lambda window: window.share, WINDOW_BYTES):
        if give_up():
            raise SaveFailed("the merge was given up")
        chunks = {window.path: window.chunks for window in batch if window.path not in declined}
        before, after = read.read_across(
            {path: runs[path].before for path in chunks},
            {path: runs[path].after for path in chunks},
            chunks,
        )
        for window in batch:
            path = window.path
            if path in declined:
                continue
            if not _add(parts, leaves[path], runs[path], window, before[path], after[path]):
                declined.add(path)
        # The next batch is read before these names get its content.
        del before, after
    parts.seal()
    decoded_bytes: dict[str, int] = {}
    for path, leaf in leaves.items():
        # A leaf that has its earlier content again has no row, and so no entry can replace its
        # deltas.
        if leaf.runs:
            _enter(writer, runs[path], leaf)
            decoded_bytes[path] = leaf.encoded_bytes
    unmerged = frozenset(paths) - decoded_bytes.keys()
    ref = writer.finish(io_timeout_seconds) if decoded_bytes else None
    return Merged(ref, decoded_bytes, unmerged)


def _add(
    parts: PartWriter, leaf: LeafSave, run: Run, window: _Window, before: U8, after: U8
) -> bool:
    """Merge the chunks of a window, and return true, unless the leaf is to stay as it is.

    Args:
        parts: Takes the merged delta.
        leaf: The leaf.
        run: Its deltas to merge.
        window: The chunks.
        before: Their content before the deltas.
        after: Their content with the deltas.

    Raises:
        Damaged: The merged delta does not give what was saved.
        SaveFailed: The storage hangs.
    """
    bounds = _bounds(run, window.chunks)
    encoded = _encoded(run, window.chunks, before, after, bounds)
    if window.is_first and not _is_worth(run, window, encoded, after, bounds):
        return False
    parts.make_room(window.size)
    digests = run.after.digests[encoded.rows[:, ROW_CHUNK].astype(np.int64)]
    parts.add(EncodedChunks((Span(leaf, 0, 0),), encoded, digests))
    return True


def _leaf_save(number: int, run: Run) -> LeafSave:
    spec = run.after.spec
    return LeafSave(number, spec, spec, LeafState(spec, spec.bounds()))


def _windows(path: str, run: Run) -> Iterator[_Window]:
    """Cut the chunks that a run changes into windows of at most one batch."""
    sizes = np.diff(run.after.spec.bounds()).astype(np.int64) * run.after.spec.word_bytes
    groups = [*batches(run.chunks(), lambda chunk: int(sizes[chunk]), WINDOW_BYTES)]
    for number, chunks in enumerate(groups):
        yield _Window(path, chunks, int(sizes[chunks].sum()), number == 0, len(groups) == 1)


def _bounds(run: Run, chunks: list[int]) -> U64:
    words = np.diff(run.after.spec.bounds())[chunks]
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)])


def _encoded(run: Run, chunks: list[int], before: U8, after: U8, bounds: U64) -> Encoded:
    """Return the difference of some chunks, with the leaf's chunk numbers, after a proof of it.

    Raises:
        Damaged: The encoding does not give ``after``.
    """
    codec, spec = default_codec(), run.after.spec
    word_bytes = spec.word_bytes
    encoded, _ = codec.encode(
        after,
        host_memory.copied(before),
        bounds,
        word_bytes,
        ordered=spec.element.is_short_float,
    )
    codec.apply(encoded, before, bounds, word_bytes)
    # `after` has the digests that the manifest leads to.
    if not np.array_equal(before, after):
        raise Damaged(
            f"leaf {run.after.spec.path!r}: the merged delta does not give the saved content",
            leaf=run.after.spec.path,
        )
    rows = encoded.rows.copy()
    rows[:, ROW_CHUNK] = np.asarray(chunks, np.uint32)[rows[:, ROW_CHUNK]]
    return Encoded(rows, encoded.streams)


def _is_worth(run: Run, window: _Window, encoded: Encoded, after: U8, bounds: U64) -> bool:
    """Decide by the first chunks of a leaf if its deltas are to be merged."""
    spec = run.after.spec
    count = min(_SAMPLE_CHUNKS, len(window.chunks))
    sample = int(bounds[count]) * spec.word_bytes
    whole, _ = default_codec().encode(after[:sample], None, bounds[: count + 1], spec.word_bytes)
    changed = int(_bounds(run, run.chunks())[-1]) * spec.word_bytes
    merged = entropy_bytes(encoded.streams.values()) * changed / window.size
    decoded = sum(stream.size for stream in encoded.streams.values()) * changed / window.size
    run_bytes = run.after.delta_bytes[run.first :]
    # The streams of the deltas are taken to be as compressible as those of the merged one.
    delta = sum(run_bytes) / len(run_bytes) * (merged / decoded if decoded else 1.0)
    return run.is_worth(
        merged, entropy_bytes(whole.streams.values()) * spec.raw_bytes / sample, delta
    )


def _enter(writer: SegmentWriter, run: Run, leaf: LeafSave) -> None:
    """Add the entry of a merged delta.

    Raises:
        Damaged: The chunk digests do not lead to the digest of the leaf.
    """
    assert leaf.runs is not None  # the caller has looked
    chunks = np.concatenate([rows.chunks for rows in leaf.runs]).astype(np.int64)
    digests = run.before.digests.copy()
    digests[chunks] = run.after.digests[chunks]
    if not np.array_equal(digests, run.after.digests):
        raise Damaged(
            f"leaf {run.after.spec.path!r}: the deltas to merge change chunks without a row",
            leaf=run.after.spec.path,
        )
    writer.enter(
        run.after.spec,
        leaf_digest(digests),
        digests[chunks],
        base=leaf_digest(run.before.digests),
        delta=tuple((rows.part, rows.first_row, rows.chunks.size) for rows in leaf.runs),
        since=replaced_since(run.after.deltas[run.first]),
    )


def replaced_since(delta: tuple[Segment, LeafEntry]) -> int:
    """Return the sequence number of the oldest segment whose entry a delta, merged again, replaces.

    A step may still name segments that were merged before, because other leaves need them.
    """
    segment, entry = delta
    return layout.seq_of(segment.id) if entry.since < 0 else entry.since
