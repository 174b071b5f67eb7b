"""Write some leaves of a segment into a new one, deltas as they are.

The rows of a delta and their streams are copied without being decoded, so a history of small deltas
stays small. The copy is read back and compared before any manifest may refer to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deltacheck.codec.base import U8, U32
from deltacheck.errors import SaveFailed
from deltacheck.leaf.spec import batches
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save.chains.whole_leaves import IO_TIMEOUT_SECONDS, put_chains
from deltacheck.save.job.leaf_state import await_write
from deltacheck.store import segment as columns
from deltacheck.store.manifest import LeafEntry, SegmentRef
from deltacheck.store.roots.store import Store
from deltacheck.store.segment import Segment

# Bytes of streams in memory. Larger: fewer files; smaller: less memory.
_BATCH_BYTES = 16 << 20


class _Rows(NamedTuple):
    """A run of rows of a delta.

    Attributes:
        leaf: The number of the leaf in the new segment.
        path: The path of the leaf.
        part: The part of the old segment.
        first: The first row.
        stop: The row after the last one.
        size: The bytes of their streams.
    """

    leaf: int
    path: str
    part: int
    first: int
    stop: int
    size: int


def write_kept(
    store: Store,
    segment: Segment,
    seq: int,
    entries: Mapping[str, LeafEntry],
    keyframes: Mapping[str, Chain],
) -> SegmentRef:
    """Write leaves of a segment as a new segment, durably.

    Args:
        store: The store of both segments.
        segment: The segment.
        seq: The sequence number of the new one.
        entries: The entries of the deltas to copy, by path.
        keyframes: The chains of the leaves to write whole, by path.

    Raises:
        Damaged: The old segment is damaged.
        SaveFailed: The copy differs from the original, or the storage hangs.
    """
    writer = store.writer(seq)
    put_chains(writer, keyframes)
    runs = [
        _Rows(number, path, part, first, first + count, size)
        for number, (path, entry) in enumerate(sorted(entries.items()))
        for part, first, count in entry.delta
        for size in [segment.part(part).stream_bytes(first, first + count)]
    ]
    parts = [list(group) for group in batches(runs, lambda run: run.size, _BATCH_BYTES)]
    places: dict[str, list[tuple[int, int, int]]] = {path: [] for path in entries}
    for number, group in enumerate(parts):
        index, streams = _content(segment, group)
        row = 0
        for run in group:
            places[run.path].append((number, row, run.stop - run.first))
            row += run.stop - run.first
        for write in writer.put_part(index, {name: [data] for name, data in streams.items()}):
            await_write(write, IO_TIMEOUT_SECONDS)
    for path, entry in sorted(entries.items()):
        count = sum(rows for _, _, rows in entry.delta)
        writer.enter(
            entry.spec(path),
            entry.digest,
            segment.digests[entry.digests : entry.digests + count],
            base=entry.base,
            delta=tuple(places[path]),
            since=entry.since,
        )
    ref = writer.finish(IO_TIMEOUT_SECONDS)
    _compare(store.segment(ref), segment, parts)
    return ref


def _content(segment: Segment, group: list[_Rows]) -> tuple[U32, dict[str, U8]]:
    """Return the index and the streams of a part that has some runs of rows."""
    indexes: list[U32] = []
    pieces: dict[str, list[U8]] = {}
    for run in group:
        part = segment.part(run.part)
        index = part.index[run.first : run.stop].copy()
        index[:, columns.LEAF] = run.leaf
        indexes.append(index)
        for name, data in part.streams(run.first, run.stop).items():
            pieces.setdefault(name, []).append(data)
    streams = {name: np.concatenate(data) for name, data in pieces.items()}
    return np.concatenate(indexes), streams


def _compare(copy: Segment, segment: Segment, parts: list[list[_Rows]]) -> None:
    """Read a copy, and compare it with the original.

    Raises:
        SaveFailed: They differ. The hardware or the storage changes data silently.
    """
    for number, group in enumerate(parts):
        expected_index, expected = _content(segment, group)
        part = copy.part(number)
        found = part.streams(0, expected_index.shape[0])
        if not np.array_equal(part.index, expected_index) or any(
            name not in found or not np.array_equal(found[name], data)
            for name, data in expected.items()
        ):
            raise SaveFailed(f"{copy.path} differs from {segment.path}, of which it is a copy")
