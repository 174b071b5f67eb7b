"""Rebuild the table of a segment from its arrays, the manifests and the tables beside it.

A table follows from them in most cases. The manifest of the save has the digests, dtypes and shapes
of the leaves. If it was deleted, later manifests and the deltas after the segment have them. The
arrays name their leaves or have them in their rows, and the order is fixed. What remains open, such
as whether an unchanged small leaf was written again, is tried: the manifests have the digest of the
whole document, so a table that was rebuilt in another way than it was written is never used.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from deltacheck.codec import default_codec
from deltacheck.codec.base import STREAMS, U8, U32
from deltacheck.errors import Damaged
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.save.job.part_writer import PART_BYTES
from deltacheck.store import documents, layout
from deltacheck.store import segment as columns
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import ArraySpec, ReadableArray
from deltacheck.store.files.storage import Place, subdirectories
from deltacheck.store.manifest import (
    KeyframeAt,
    LeafEntry,
    LeafRecord,
    Manifest,
    Part,
    SegmentRef,
    SegmentTable,
    Stream,
)
from deltacheck.store.segment import (
    document_digest,
    index_spec,
    is_packed,
    natural_spec,
    packed_spec,
    stream_sizes,
)

# Errors of arrays whose own metadata is damaged. There is no table then.
_WRONG = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, Damaged)
# Places that packed leaves may begin at, as far as their content tells. More are not followed.
_MOST_PLACES = 4096

_Runs = Mapping[str, list[tuple[int, int, int]]]


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
    with suppress(*_WRONG):
        facts = _Facts.of(ref, sorted(manifests, key=lambda manifest: manifest.seq), tables)
        for table in _candidates(_Arrays.of(store / layout.SEGMENTS / ref.id, facts), ref, facts):
            content = layout.group_json(documents.to_attributes(table))
            if document_digest(content) == ref.digest:
                return content
    return None


# --- the rest of the root -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Facts:
    """Statements of manifests and other tables about the leaves of a segment.

    Attributes:
        records: Stored path -> the leaf after the segment; without a digest if nothing states it.
        before: Stored path -> the digest before the segment.
        orders: The paths that the rows number, in each possible order.
    """

    records: dict[str, LeafRecord]
    before: dict[str, str]
    orders: tuple[list[str], ...]

    @classmethod
    def of(
        cls, ref: SegmentRef, manifests: Sequence[Manifest], tables: Mapping[str, SegmentTable]
    ) -> _Facts:
        """Return the facts about a segment; ``manifests`` ascend."""
        seq = layout.seq_of(ref.id)
        users = [manifest for manifest in manifests if ref in manifest.segments]
        # The manifest of the save itself states everything. Later ones help if it was deleted.
        owners = [manifest for manifest in users if manifest.seq == seq]
        facts = cls({}, {}, _orders(owners or users, ref))
        for manifest in owners or users:
            facts._add(manifest, ref, tables)
        if not owners or any(r.id not in tables for r in owners[0].segments if r != ref):
            # The save before may state the digests that lost tables have.
            for manifest in [manifest for manifest in manifests if manifest.seq < seq][-1:]:
                for path, record in manifest.stored.items():
                    facts.before.setdefault(path, record.digest)
        return facts

    def _add(self, manifest: Manifest, ref: SegmentRef, tables: Mapping[str, SegmentTable]) -> None:
        seq = layout.seq_of(ref.id)
        older_ids = [r.id for r in reversed(manifest.segments) if layout.seq_of(r.id) < seq]
        newer_ids = [r.id for r in manifest.segments if layout.seq_of(r.id) > seq]
        for path in _paths_of(manifest, ref):
            record = manifest.stored[path]
            entry, is_certain = _first_entry(path, newer_ids, tables)
            # A later delta states what it goes from; a later keyframe states nothing.
            digest = record.digest if entry is None else entry.base
            if path not in self.records or not self.records[path].digest:
                self.records[path] = msgspec.structs.replace(
                    record, digest=digest if is_certain else ""
                )
            entry, is_certain = _first_entry(path, older_ids, tables)
            if entry is not None and is_certain:
                self.before.setdefault(path, entry.digest)


def _first_entry(
    path: str, names: Iterable[str], tables: Mapping[str, SegmentTable]
) -> tuple[LeafEntry | None, bool]:
    """Return the first entry of a path in some segments, and if no lost table hides another."""
    for name in names:
        if name not in tables:
            return None, False
        if path in tables[name].leaves:
            return tables[name].leaves[path], True
    return None, True


def _paths_of(manifest: Manifest, ref: SegmentRef) -> list[str]:
    """Return the stored paths that may be in a segment: those of its rank, if ranks are known."""
    position = manifest.segments.index(ref)
    lanes = {number for number, lane in enumerate(manifest.lanes) if position in lane}
    return [
        path
        for path, record in manifest.stored.items()
        if record.lane == -1 or record.lane in lanes
    ]


def _orders(users: Sequence[Manifest], ref: SegmentRef) -> tuple[list[str], ...]:
    # Rows number the leaves of the state in the order of paths. Leaves that are derived and not
    # stored have numbers, too, unless they were left out before.
    paths = sorted(_paths_of(users[0], ref))
    all_paths = sorted({*paths, *users[0].derived})
    return (all_paths,) if all_paths == paths else (all_paths, paths)


# --- the arrays of the segment --------------------------------------------------------------------


class _Natural(NamedTuple):
    """A keyframe with an array of its own: the array's name, and the leaf with its digest."""

    name: str
    record: LeafRecord


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The arrays of a segment.

    Attributes:
        folder: The segment.
        natural: Leaf path -> its array.
        packed: Storage type -> number of elements.
        indexes: The index of each part.
        streams: The streams of each part.
    """

    folder: Place
    natural: dict[str, _Natural]
    packed: dict[str, int]
    indexes: list[U32]
    streams: list[dict[str, Stream]]

    @classmethod
    def of(cls, folder: Place, facts: _Facts) -> _Arrays:
        """Read the metadata of all arrays, and the indexes."""
        result = cls(folder, {}, {}, [], [])
        for path in subdirectories(folder / layout.LEAVES):
            leaf, record = _natural(path, facts)
            result.natural[leaf] = _Natural(path.name, record)
        for path in subdirectories(folder / layout.PACKED):
            result.packed[path.name] = int(_metadata(path)["shape"][0])
        # An array that says more rows than all leaves together can have is damaged.
        most_rows = sum(record.spec(path).chunk_count for path, record in facts.records.items())
        for number in range(len(subdirectories(folder / layout.DELTA))):
            part = folder / layout.DELTA / str(number)
            rows = int(_metadata(part / "index")["shape"][0])
            if rows > most_rows:
                raise ValueError(f"{part / 'index'} has {rows} rows, more than {most_rows}")
            result.indexes.append(_content(part / "index", index_spec(rows)))
            present = {path.name for path in subdirectories(part)}
            result.streams.append(
                {name: _stream(part / name) for name in STREAMS if name in present}
            )
        return result

    def runs(self, order: Sequence[str]) -> _Runs:
        """Return the rows of each leaf; ``LookupError`` if the order has no such leaves."""
        runs: dict[str, list[tuple[int, int, int]]] = {}
        for part, index in enumerate(self.indexes):
            numbers = index[:, columns.LEAF].astype(np.int64)
            edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), index.shape[0]]
            for first, stop in itertools.pairwise(edges):
                path = order[int(numbers[first])]
                runs.setdefault(path, []).append((part, first, stop - first))
        return runs

    def parts(self, piece_bytes: int | None) -> tuple[Part, ...]:
        """Return the parts, with their streams in the order in which pieces of this size give them.

        ``None``: the whole part was one piece, as a codec on a device makes it. ``0``: each leaf
        was one.
        """
        return tuple(
            Part(index.shape[0], {name: streams[name] for name in _ordered(index, piece_bytes)})
            for index, streams in zip(self.indexes, self.streams, strict=True)
        )


def _natural(array: Place, facts: _Facts) -> tuple[str, LeafRecord]:
    """Return the leaf of an array and its record, with a digest of the content if none is known."""
    metadata = _metadata(array)
    attributes, shape = metadata["attributes"], tuple(map(int, metadata["shape"]))
    leaf, dtype = str(attributes["leaf_path"]), str(attributes["dtype"])
    record = facts.records.get(leaf)
    if record is not None and (record.dtype, record.shape) == (dtype, shape) and record.digest:
        return leaf, record
    # Shards are whole chunks; without shards, the chunks are those of the grid.
    grid = metadata["chunk_grid"]["configuration"]
    inner = metadata["codecs"][0].get("configuration", {})
    chunk = tuple(map(int, inner.get("chunk_shape", grid["chunk_shape"])))
    spec = LeafSpec(leaf, shape, dtype, chunk)
    content = _content(array, natural_spec(spec))
    return leaf, LeafRecord(
        dtype, shape, chunk, digest_of(spec, content.reshape(-1).view(np.uint8))
    )


def _stream(path: Place) -> Stream:
    metadata = _metadata(path)
    return Stream(int(metadata["shape"][0]), "stream" if "zstd" in str(metadata) else "store")


def _ordered(index: U32, piece_bytes: int | None) -> list[str]:
    """Return the names of the streams that rows have, ordered by their first piece."""
    groups = np.zeros(index.shape[0], np.int64)
    if piece_bytes is not None:
        longest = index[:, columns.WORDS].astype(np.int64) * index[:, columns.WORD_BYTES]
        # A run of chunks of one leaf is encoded by one call.
        step = (
            max(1, piece_bytes // max(1, int(longest.max(initial=1)))) if piece_bytes else 1 << 40
        )
        leaf_of, chunks = (index[:, k].astype(np.int64) for k in (columns.LEAF, columns.CHUNK))
        keys = np.column_stack([leaf_of, chunks // step])
        groups[1:] = np.cumsum((np.diff(keys, axis=0) != 0).any(axis=1))
    first = {
        name: int(groups[int(np.argmax(sizes > 0))])
        for name, sizes in stream_sizes(index).items()
        if sizes.any()
    }
    return sorted(first, key=lambda name: (first[name], STREAMS.index(name)))


def _content(path: Place, spec: ArraySpec) -> Any:
    return ReadableArray(path, spec, arrays.context(None, 0)).read()


def _metadata(path: Place) -> Any:
    return json.loads(arrays.read_file(path / "zarr.json", documents.MAX_DOCUMENT_BYTES))


# --- tables that fit both -------------------------------------------------------------------------


def _candidates(segment: _Arrays, ref: SegmentRef, facts: _Facts) -> Iterator[SegmentTable]:
    """Yield the tables that fit the arrays of a segment, the likely ones first."""
    piece_bytes = min(default_codec().run_bytes or PART_BYTES, PART_BYTES)
    for order in facts.orders:
        try:
            runs = segment.runs(order)
        except LookupError:
            continue  # the rows number other leaves
        if not runs.keys() <= facts.records.keys():
            continue
        variants = (
            [segment.parts(None), segment.parts(0), segment.parts(piece_bytes)] if runs else [()]
        )
        for packed in _packed_sets(segment, facts, runs):
            for parts in variants:
                yield _table(ref.id, segment, facts, packed, parts, runs)


def _table(
    segment_id: str,
    segment: _Arrays,
    facts: _Facts,
    packed: set[str],
    parts: Sequence[Part],
    runs: _Runs,
) -> SegmentTable:
    entries: dict[str, LeafEntry] = {}
    lengths: dict[str, int] = {}
    rows = 0
    # The order in which a save writes: keyframes by path, then the leaves in rows by path.
    for path in [*sorted({*segment.natural, *packed}), *sorted(runs)]:
        record = segment.natural[path].record if path in segment.natural else facts.records[path]
        spec = record.spec(path)
        key, base = None, ""
        count = sum(run[2] for run in runs[path]) if path in runs else spec.chunk_count
        if path in runs:
            base = facts.before.get(path, "")
        elif path in segment.natural:
            key = KeyframeAt(array=segment.natural[path].name)
        else:
            storage = spec.element.storage
            key = KeyframeAt(packed=storage, offset=lengths.get(storage, 0))
            lengths[storage] = key.offset + _elements(spec)
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


def _packed_sets(segment: _Arrays, facts: _Facts, runs: _Runs) -> Iterator[set[str]]:
    """Yield the sets of small leaves that the packed arrays may hold."""
    small = {
        path: record
        for path, record in facts.records.items()
        if path not in runs and path not in segment.natural and is_packed(record.spec(path))
    }
    changed = {path for path, record in small.items() if facts.before.get(path) != record.digest}

    def fits(paths: Iterable[str]) -> bool:
        lengths: dict[str, int] = {}
        for path in paths:
            spec = small[path].spec(path)
            lengths[spec.element.storage] = lengths.get(spec.element.storage, 0) + _elements(spec)
        return lengths == segment.packed

    # A leaf that did not change is written again only if its keyframe was due, or with all others.
    yield from (paths for paths in (changed, set(small)) if fits(paths))
    paths: set[str] = set()
    for storage, length in segment.packed.items():
        array = segment.folder / layout.PACKED / storage
        content = _content(array, packed_spec(storage, length)).view(np.uint8)
        specs = [small[path].spec(path) for path in sorted(small)]
        paths |= _placed(
            [spec for spec in specs if spec.element.storage == storage], small, changed, content
        )
    yield paths


def _placed(
    specs: Sequence[LeafSpec], small: Mapping[str, LeafRecord], changed: set[str], content: U8
) -> set[str]:
    """Return the leaves that the content of a packed array consists of, one after the other.

    Args:
        specs: The leaves of the storage type, by path.
        small: Their records.
        changed: The leaves that must be there, if their digest is known.
        content: The bytes of the array.
    """
    # Offset after the leaves so far -> the leaves, and those before: a linked list.
    places: dict[int, Any] = {0: None}
    for spec in specs:
        after: dict[int, Any] = {}
        digest = small[spec.path].digest
        for offset, path_list in places.items():
            stop = offset + spec.raw_bytes
            if stop <= content.size and digest == digest_of(spec, content[offset:stop]):
                after[stop] = (spec.path, path_list)
            if spec.path not in changed or not digest:
                after.setdefault(offset, path_list)
        if len(after) > _MOST_PLACES:
            raise ValueError("the content of a packed array fits its leaves in too many ways")
        places = after
    path_list, paths = places[content.size], set()
    while path_list is not None:
        path, path_list = path_list
        paths.add(path)
    return paths


def _elements(spec: LeafSpec) -> int:
    return spec.raw_bytes // spec.element.item_bytes
