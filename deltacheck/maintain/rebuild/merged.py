"""Find the table of a segment of merged deltas.

Its rows number the leaves that were to be merged, of which no document has a list. But the chunk
digests of a merged delta, put in the place of those before it, give the digest of the leaf after
it, and no other leaf has this digest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from deltacheck.codec.base import U32, U64
from deltacheck.leaf.spec import LeafSpec
from deltacheck.maintain.rebuild.facts import SegmentFacts
from deltacheck.maintain.rebuild.segment_arrays import ChunkDigests, SegmentArrays, digest_after
from deltacheck.store import layout
from deltacheck.store.manifest import LeafEntry, SegmentTable, segment_features

# Most combinations of what the deltas of the leaves may replace that are tried.
_MOST_TRIED = 256


class _NumberedRows(NamedTuple):
    """The rows of a leaf, by their number only."""

    chunks: np.ndarray[tuple[int], np.dtype[np.int64]]
    words: U32
    digests: U64


class _Place(NamedTuple):
    """A place in the chain of a leaf that a merged delta may have.

    Args:
        digest: The digest of the leaf after it.
        base: The digest before.
        since: The sequence number of the oldest segment that it replaces.
    """

    digest: str
    base: str
    since: int


def merged_tables(
    segment_id: str, arrays: SegmentArrays, facts: SegmentFacts, chunk_digests: ChunkDigests
) -> Iterator[SegmentTable]:
    """Yield the tables of merged deltas that fit the arrays of a segment."""
    if arrays.natural or arrays.packed or arrays.digests is None or not arrays.indexes:
        return
    entries: dict[str, LeafEntry] = {}
    places: dict[str, list[_Place]] = {}
    paths, first = iter(sorted(facts.records)), 0
    # Numbers ascend with the paths.
    for runs in arrays.runs().values():
        chunks = arrays.chunks(runs)
        digests = arrays.digests[first : first + chunks.size]
        rows = _NumberedRows(chunks, arrays.words(runs), digests)
        for path in paths:
            places[path] = _places(path, rows, facts, chunk_digests)
            if places[path]:
                break
        else:
            return
        record = facts.records[path]
        entries[path] = LeafEntry(
            record.dtype,
            record.shape,
            record.chunk,
            record.digest,
            first,
            delta=tuple(runs),
        )
        first += chunks.size
    for choice in _choices({path: places[path] for path in entries}):
        leaves = {
            path: msgspec.structs.replace(entry, **choice[path]._asdict())
            for path, entry in entries.items()
        }
        yield SegmentTable(
            layout.FORMAT,
            layout.VERSION,
            segment_id,
            leaves,
            first,
            parts=tuple(arrays.parts),
            must_understand=segment_features(leaves, arrays.features),
        )


def _places(
    path: str, rows: _NumberedRows, facts: SegmentFacts, chunk_digests: ChunkDigests
) -> list[_Place]:
    """Return the places where rows may be a delta of a leaf; none: they are of another leaf."""
    record = facts.records[path]
    spec = record.spec(path)
    if not _has_words(spec, rows):
        return []
    states = chunk_digests.by_leaf_digest(path)
    links = [*facts.earlier_entries(path)]
    # A chain begins at the newest keyframe. The last link is what is replaced.
    key = max((n for n, (_, entry) in enumerate(links) if entry.is_whole), default=len(links))
    # Nothing states the digest of a leaf that was written whole soon after.
    expected = {record.digest} if record.digest else {entry.digest for _, entry in links[key:]}
    places: list[_Place] = []
    for number, (name, entry) in enumerate(links[key:], key + 1):
        before = states.get(entry.digest)
        if before is None:
            continue
        digest = digest_after(before, spec.chunk_count, rows.chunks, rows.digests)
        if digest == entry.digest or digest not in expected:
            continue
        after = next(
            (
                layout.seq_of(next_name) if next_entry.since < 0 else next_entry.since
                for next_name, next_entry in links[number:]
                if next_entry.base == entry.digest
            ),
            # What was replaced has been collected. Most saves change all leaves.
            layout.seq_of(name) + 1,
        )
        places.append(_Place(digest, entry.digest, after))
    return places


def _choices(places: Mapping[str, Sequence[_Place]]) -> Iterator[Mapping[str, _Place]]:
    """Yield one place for each leaf, the likely ones first."""
    # One merge usually replaces the same number of deltas in all leaves.
    for number in range(max(map(len, places.values()))):
        yield {path: each[min(number, len(each) - 1)] for path, each in places.items()}
    for combination in itertools.islice(itertools.product(*places.values()), _MOST_TRIED):
        yield dict(zip(places, combination, strict=True))


def _has_words(spec: LeafSpec, rows: _NumberedRows) -> bool:
    """Return whether a leaf has chunks of the sizes that rows say."""
    if int(rows.chunks.max()) >= spec.chunk_count:
        return False
    words = np.diff(spec.bounds())[rows.chunks]
    return bool((rows.words[:, 0] == words).all() and (rows.words[:, 1] == spec.word_bytes).all())
