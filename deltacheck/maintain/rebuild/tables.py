"""Rebuild the table of a segment from its arrays, the manifests and the tables beside it.

A table follows from them in most cases. The manifest of the save has the digests, dtypes and shapes
of the leaves. If it was deleted, later manifests and the deltas after the segment have them.
Digests that nothing states, such as those of tiles in the compact form, follow from the chunk
digests. The arrays name their leaves or have them in their rows, and the order is fixed. What
remains open, such as whether an unchanged small leaf was written again, is tried: the manifests
have the digest of the whole document, so a table that was rebuilt in another way than it was
written is never used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress

from deltacheck.leaf.digest import digest_of
from deltacheck.maintain.rebuild.facts import SegmentFacts
from deltacheck.maintain.rebuild.merged import merged_tables
from deltacheck.maintain.rebuild.packed import packed_sets
from deltacheck.maintain.rebuild.segment_arrays import (
    WRONG,
    ChunkDigests,
    Runs,
    SegmentArrays,
    digest_after,
)
from deltacheck.policy.keyframes import LEAST_WHOLE_BYTES
from deltacheck.store import documents, layout
from deltacheck.store.files.storage import Place, subdirectories
from deltacheck.store.manifest import (
    KeyframeAt,
    LeafEntry,
    Manifest,
    SegmentRef,
    SegmentTable,
    segment_features,
)
from deltacheck.store.segment import document_digest


def rebuilt_table(
    store: Place,
    ref: SegmentRef,
    manifests: Iterable[Manifest],
    tables: Mapping[str, SegmentTable],
) -> bytes | None:
    """Return the document of a segment, byte for byte as it was committed.

    Args:
        store: The directory that holds ``segments/``.
        ref: The segment, with the digest of its document.
        manifests: Manifests of the root.
        tables: The tables of other segments by name, as far as they can be read.

    Returns:
        The content of its ``zarr.json``; ``None`` if it does not follow from the rest.
    """
    segments = store / layout.SEGMENTS
    # The whole segment is missing. Nothing is computed for it, whatever the manifest says of it.
    if not subdirectories(segments / ref.id):
        return None
    with suppress(*WRONG):
        facts = SegmentFacts.of(ref, sorted(manifests, key=lambda manifest: manifest.seq), tables)
        arrays = SegmentArrays.of(segments / ref.id, facts)
        chunk_digests = ChunkDigests(segments, facts)
        for table in itertools.chain(
            _saved_tables(ref.id, arrays, facts, chunk_digests),
            merged_tables(ref.id, arrays, facts, chunk_digests),
        ):
            content = layout.group_json(documents.to_attributes(table))
            if document_digest(content) == ref.digest:
                return content
    return None


def _saved_tables(
    segment_id: str, arrays: SegmentArrays, facts: SegmentFacts, chunk_digests: ChunkDigests
) -> Iterator[SegmentTable]:
    """Yield the tables of a save or a compaction that fit the arrays, the likely ones first."""
    numbered_runs = arrays.runs()
    for order in facts.orders:
        try:
            runs = {order[number]: rows for number, rows in numbered_runs.items()}
        except LookupError:
            continue  # the rows number other leaves
        if not runs.keys() <= facts.records.keys():
            continue
        # Such rows are an encoded keyframe or a delta; the index does not say which.
        whole = {
            path
            for path, rows in runs.items()
            if arrays.needs_no_base(rows, facts.records[path].spec(path).chunk_count)
        }
        large = {p for p in whole if facts.records[p].spec(p).raw_bytes >= LEAST_WHOLE_BYTES}
        # The codes of first moments.
        codes = {p for p in whole if facts.records[p].dtype == "int8"}
        # A save stores such leaves in this way. Each different choice is tried once.
        choices = {frozenset(paths) for paths in (whole, large, codes, ())}
        for packed in packed_sets(arrays, facts, runs.keys()):
            for keyframes in sorted(choices, key=len, reverse=True):
                yield _table(segment_id, arrays, facts, packed, runs, keyframes, chunk_digests)


def _table(
    segment_id: str,
    arrays: SegmentArrays,
    facts: SegmentFacts,
    packed: set[str],
    runs: Mapping[str, Runs],
    keyframes: Set[str],
    chunk_digests: ChunkDigests,
) -> SegmentTable:
    """Return the table of a segment with these small leaves.

    ``keyframes``: the leaves whose rows are an encoded keyframe.
    """
    entries: dict[str, LeafEntry] = {}
    lengths: dict[str, int] = {}
    rows = 0
    # The order in which a save writes: keyframes by path, then the leaves in rows by path.
    for path in [*sorted({*arrays.natural, *packed}), *sorted(runs)]:
        record = arrays.natural[path].record if path in arrays.natural else facts.records[path]
        spec = record.spec(path)
        key, base, digest = None, "", record.digest
        count = sum(run[2] for run in runs[path]) if path in runs else spec.chunk_count
        if path in runs:
            base = "" if path in keyframes else facts.before.get(path, "")
            if not digest and arrays.digests is not None:
                before = chunk_digests.by_leaf_digest(path).get(base) if base else None
                new_digests = arrays.digests[rows : rows + count]
                chunks = arrays.chunks(runs[path])
                digest = digest_after(before, spec.chunk_count, chunks, new_digests)
        elif path in arrays.natural:
            key = KeyframeAt(array=arrays.natural[path].name)
        else:
            storage = spec.element.storage
            key = KeyframeAt(packed=storage, offset=lengths.get(storage, 0))
            lengths[storage] = key.offset + spec.raw_bytes // spec.element.item_bytes
            if not digest:
                begin = key.offset * spec.element.item_bytes
                content = arrays.packed_content(storage)[begin : begin + spec.raw_bytes]
                digest = digest_of(spec, content)
        delta = tuple(runs.get(path, ()))
        entries[path] = LeafEntry(
            record.dtype, record.shape, record.chunk, digest, rows, base, key, delta
        )
        rows += count
    return SegmentTable(
        layout.FORMAT,
        layout.VERSION,
        segment_id,
        entries,
        rows,
        packed=lengths,
        parts=tuple(arrays.parts),
        must_understand=segment_features(entries, arrays.features),
    )
