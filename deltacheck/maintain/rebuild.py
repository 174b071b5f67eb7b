"""Rebuild the table of a segment from the arrays of the segment and the manifest of its step.

A table follows from them in most cases: the manifest of the save that wrote the segment has the
digests, dtypes and shapes of the leaves, the arrays name their leaves or have them in their rows,
and the order is fixed. The manifest also has the digest of the whole document, so a table that was
rebuilt in another way than it was written is never used.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from deltacheck.codec.base import STREAMS
from deltacheck.errors import Damaged
from deltacheck.store import documents, layout
from deltacheck.store import segment as columns
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import ReadableArray
from deltacheck.store.files.storage import Place, subdirectories
from deltacheck.store.manifest import (
    KeyframeAt,
    LeafEntry,
    Manifest,
    Part,
    SegmentRef,
    SegmentTable,
    Stream,
)
from deltacheck.store.segment import document_digest, index_spec, is_packed

# Errors of arrays whose own metadata is damaged. There is no table then.
_WRONG = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, Damaged)

_Runs = Mapping[str, list[tuple[int, int, int]]]


def rebuilt_table(store: Place, ref: SegmentRef, manifests: Sequence[Manifest]) -> bytes | None:
    """Return the document of a segment, byte for byte as it was committed.

    Args:
        store: The directory that holds ``segments/``.
        ref: The segment, with the digest of its document.
        manifests: Manifests of the root. The one of the save that wrote the segment must be there.

    Returns:
        The content of its ``zarr.json``; ``None`` if it does not follow from the rest.
    """
    seq = layout.seq_of(ref.id)
    owner = next((m for m in manifests if m.seq == seq and ref in m.segments), None)
    if owner is None:
        return None
    earlier = max((m for m in manifests if m.seq < seq), key=lambda m: m.seq, default=None)
    before = {} if earlier is None else {p: r.digest for p, r in earlier.stored.items()}
    with suppress(*_WRONG):
        for table in _candidates(store / layout.SEGMENTS / ref.id, ref.id, owner, before):
            content = layout.group_json(documents.to_attributes(table))
            if document_digest(content) == ref.digest:
                return content
    return None


def _candidates(
    folder: Place, segment_id: str, owner: Manifest, before: Mapping[str, str]
) -> Iterator[SegmentTable]:
    """Yield the tables that fit the arrays of a segment."""
    most_rows = sum(record.spec(path).chunk_count for path, record in owner.stored.items())
    parts, runs = _parts(folder, sorted(owner.stored), most_rows)
    names = {
        str(_metadata(path)["attributes"]["leaf_path"]): path.name
        for path in subdirectories(folder / layout.LEAVES)
    }
    small = {
        path
        for path, record in owner.stored.items()
        if path not in runs and path not in names and is_packed(record.spec(path))
    }
    changed = {path for path in small if before.get(path) != owner.stored[path].digest}
    # A leaf that did not change is written again only if its keyframe was due, or with all others.
    for packed in (changed, small):
        yield _table(segment_id, owner, before, names, packed, parts, runs)


def _table(
    segment_id: str,
    owner: Manifest,
    before: Mapping[str, str],
    names: Mapping[str, str],
    packed: set[str],
    parts: Sequence[Part],
    runs: _Runs,
) -> SegmentTable:
    entries: dict[str, LeafEntry] = {}
    lengths: dict[str, int] = {}
    rows = 0
    # The order in which a save writes: keyframes by path, then the leaves in rows by path.
    for path in [*sorted({*names, *packed}), *sorted(runs)]:
        record = owner.stored[path]
        spec = record.spec(path)
        key, base = None, ""
        count = sum(run[2] for run in runs[path]) if path in runs else spec.chunk_count
        if path in runs:
            base = before.get(path, "")
        elif path in names:
            key = KeyframeAt(array=names[path])
        else:
            storage = spec.element.storage
            key = KeyframeAt(packed=storage, offset=lengths.get(storage, 0))
            lengths[storage] = key.offset + spec.raw_bytes // spec.element.item_bytes
        entries[path] = LeafEntry(
            record.dtype,
            record.shape,
            record.chunk,
            record.digest,
            rows,
            base,
            key,
            tuple(runs.get(path, ())),
        )
        rows += count
    return SegmentTable(
        format=layout.FORMAT,
        version=layout.VERSION,
        id=segment_id,
        leaves=entries,
        digests=rows,
        packed=lengths,
        parts=tuple(parts),
    )


def _parts(folder: Place, paths: Sequence[str], most_rows: int) -> tuple[list[Part], _Runs]:
    """Return the parts of a segment, and the runs of rows of each leaf.

    ``paths``: the leaves in the order that the rows number them in. ``most_rows``: the rows that
    all leaves together can have; an array that says more is damaged.
    """
    parts: list[Part] = []
    runs: dict[str, list[tuple[int, int, int]]] = {}
    where = arrays.context(None, 0)
    for number in range(len(subdirectories(folder / layout.DELTA))):
        part = folder / layout.DELTA / str(number)
        row_count = int(_metadata(part / "index")["shape"][0])
        if row_count > most_rows:
            raise ValueError(f"{part / 'index'} has {row_count} rows, more than {most_rows}")
        index = ReadableArray(part / "index", index_spec(row_count), where).read()
        present = {path.name for path in subdirectories(part)}
        streams = {name: _stream(part / name) for name in STREAMS if name in present}
        parts.append(Part(row_count, streams))
        leaf_of = index[:, columns.LEAF].astype(np.int64)
        edges = [0, *(np.flatnonzero(np.diff(leaf_of)) + 1).tolist(), row_count]
        for first, stop in itertools.pairwise(edges):
            run = (number, first, stop - first)
            runs.setdefault(paths[int(leaf_of[first])], []).append(run)
    return parts, runs


def _stream(path: Place) -> Stream:
    metadata = _metadata(path)
    return Stream(int(metadata["shape"][0]), "stream" if "zstd" in str(metadata) else "store")


def _metadata(path: Place) -> Any:
    return json.loads(arrays.read_file(path / "zarr.json", documents.MAX_DOCUMENT_BYTES))
