"""The chain of a stored leaf: a keyframe and the deltas after it.

Every byte that a restore returns has been compared with a digest that the step's manifest names:
manifest -> digest of each segment's table -> digest of each leaf -> digests of its chunks -> bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import U8, U64
from deltacheck.errors import BudgetExceeded, ChainBroken, Damaged
from deltacheck.leaf.digest import leaf_digest
from deltacheck.leaf.spec import LeafSpec
from deltacheck.restore.content import Array, chunk_bytes, chunks_of_elements, machine_bytes
from deltacheck.restore.leaf_kinds import Leaf, LoadedChunks
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.manifest import LeafEntry, LeafRecord, Manifest
from deltacheck.store.root import Root, open_segments
from deltacheck.store.segment import Segment, entries_by_path

# Of what is held of a step beside its content: per chunk of a leaf digests, bounds and numbers; per
# digest and row of a segment.
_CHUNK_TABLES_BYTES, _DIGEST_BYTES, _INDEX_ROW_BYTES = 96, 16, 64
_TABLES_BYTES = 64 << 20  # of these are taken whatever the caller's budget is


@dataclass(frozen=True, slots=True)
class Chain(Leaf):
    """A leaf that is stored as a keyframe and deltas.

    A keyframe is an array, or rows like those of a delta for every chunk.

    Attributes:
        spec: The leaf.
        key: The segment and the entry of the keyframe.
        deltas: The segments and the entries of the deltas to apply, oldest first.
        digests: The digest that each chunk must have in the end, ``(chunks, 2)``.
        held: Content that the caller already has. It replaces the keyframe and all deltas before
            ``deltas``.
    """

    spec: LeafSpec
    key: tuple[Segment, LeafEntry]
    deltas: tuple[tuple[Segment, LeafEntry], ...]
    digests: U64
    held: U8 | None = None

    @property
    def encoded(self) -> tuple[tuple[Segment, LeafEntry], ...]:
        """Return the entries whose rows must be decoded, oldest first."""
        return ((self.key,) if self.held is None and self.key[1].key is None else ()) + self.deltas

    @property
    def delta_segments(self) -> list[str]:
        """Return the identifiers of the segments that hold the deltas, oldest first."""
        return [segment.id for segment, _ in self.deltas]

    @property
    def delta_bytes(self) -> list[int]:
        """Return the bytes of the streams of each delta, which a restore decodes."""
        return [
            sum(
                segment.part(part).stream_bytes(first, first + rows)
                for part, first, rows in entry.delta
            )
            for segment, entry in self.deltas
        ]

    @property
    def chunk_digests(self) -> U64 | None:
        return self.digests

    def stored_chains(self) -> Iterator[Chain]:
        yield self

    def add_needed(self, first: int, stop: int, needed: dict[str, set[int]]) -> None:
        needed[self.spec.path].update(chunks_of_elements(self.spec, first, stop))

    def computed_bytes(self, chunks: Sequence[int]) -> int:
        return 0

    def elements(self, first: int, stop: int, loaded: LoadedChunks) -> Array:
        spec = self.spec
        chunks = loaded.chunks[spec.path]
        covering = chunks_of_elements(spec, first, stop)
        before = bisect.bisect_left(chunks, covering.start)
        begin = chunk_bytes(spec, chunks[:before]) // spec.element.item_bytes
        begin += first - int(spec.element_bounds()[covering.start])
        return loaded.data[spec.path].view(spec.element.numpy)[begin : begin + stop - first]

    def chunk_values(self, chunks: list[int], loaded: LoadedChunks) -> U8:
        if loaded.chunks[self.spec.path] == chunks:
            return loaded.data[self.spec.path]
        # Named explicitly: dataclass(slots=True) makes a new class, in which super() has no cell.
        return Leaf.chunk_values(self, chunks, loaded)


class Held(NamedTuple):
    """The whole content of a leaf that the caller has already: its bytes, and the digest that it is
    known to have.
    """

    data: U8
    digest: str


class _Links(NamedTuple):
    """What is stored of a leaf, oldest first, as positions among a step's segments."""

    spec: LeafSpec
    record: LeafRecord
    entries: list[tuple[int, LeafEntry]]


def resolve_chains(
    root: Root,
    manifest: Manifest,
    paths: Iterable[str],
    max_bytes: int | None = None,
    held: Mapping[str, Held] | None = None,
) -> dict[str, Chain]:
    """The chain of everything named of ``manifest.stored``, each link checked by the digests that
    the
    tables carry.

    ``max_bytes``: refuse (``BudgetExceeded``), before they are read, digests and indexes larger
    than this and than ``_TABLES_BYTES``. ``held``: what the caller has of some leaves: where it is
    what the chain gives at some link, only what comes after that is read. Raises ``ChainBroken`` or
    ``Damaged`` naming leaf, step and segment.
    """
    paths = list(paths)
    segments = open_segments(root, manifest, paths)
    _refuse_large_tables(manifest, paths, segments, max_bytes)
    every = entries_by_path(segments, set(paths))
    links = [
        _links(path, manifest.stored[path], every.get(path, []), segments, manifest)
        for path in paths
    ]
    chains: dict[str, Chain] = {}
    for (spec, record, entries), digests in zip(
        links, _expected_digests(links, segments), strict=True
    ):
        if leaf_digest(digests) != record.digest:
            raise Damaged(
                f"step {manifest.step}, leaf {spec.path!r}: the chunk digests of its segments give"
                f" {leaf_digest(digests)}, the manifest promises {record.digest}",
                leaf=spec.path,
            )
        key, *deltas = [(segments[number], entry) for number, entry in entries]
        mine = (held or {}).get(spec.path)
        first = 0 if mine is None else _links_of(entries, mine.digest)
        if mine is None or not first:
            chains[spec.path] = Chain(spec, key, tuple(deltas), digests)
        else:
            chains[spec.path] = Chain(spec, key, tuple(deltas[first - 1 :]), digests, mine.data)
    return chains


def _links_of(entries: Sequence[tuple[int, LeafEntry]], digest: str) -> int:
    """How many links of a chain give content with this digest, as many as possible; 0 where none
    do.
    """
    return max(
        (number for number, (_, entry) in enumerate(entries, 1) if entry.digest == digest),
        default=0,
    )


def _refuse_large_tables(
    manifest: Manifest, paths: Iterable[str], segments: Sequence[Segment], max_bytes: int | None
) -> None:
    chunks = sum(manifest.stored[path].spec(path).chunk_count for path in paths)
    stored = sum(segment.table.digests for segment in segments)
    rows = sum(part.rows for segment in segments for part in segment.table.parts)
    size = _CHUNK_TABLES_BYTES * chunks + 2 * _DIGEST_BYTES * stored + _INDEX_ROW_BYTES * rows
    budget = max(machine_bytes() if max_bytes is None else max_bytes, _TABLES_BYTES)
    if size > budget:
        raise BudgetExceeded(
            f"step {manifest.step}: the digests and indexes of {chunks} chunks would take {size}"
            f" bytes, more than {budget}; raise max_bytes, or name fewer leaves"
        )


def _links(
    path: str,
    record: LeafRecord,
    every: list[tuple[int, LeafEntry]],
    segments: Sequence[Segment],
    manifest: Manifest,
) -> _Links:
    """``every``: what the segments hold of the leaf, oldest first."""
    at = f"step {manifest.step}, leaf {path!r}"
    first = next((at for at in range(len(every) - 1, -1, -1) if every[at][1].is_whole), None)
    if first is None:
        raise ChainBroken(f"{at}: none of the step's segments holds its keyframe", leaf=path)
    entries = every[first:]
    what = (record.dtype, record.shape, record.chunk)
    before = entries[0][1]
    fits = (before.dtype, before.shape, before.chunk) == what
    for number, entry in entries[1:]:
        if entry.base != before.digest:
            raise ChainBroken(
                f"{at}: segment {segments[number].id} is a delta to {entry.base}, but the leaf is"
                f" {before.digest} there",
                leaf=path,
            )
        fits = fits and (entry.dtype, entry.shape, entry.chunk) == what
        before = entry
    if before.digest != record.digest or not fits:
        raise ChainBroken(
            f"{at}: its segments give digest {before.digest}, the manifest promises"
            f" {record.digest}",
            leaf=path,
        )
    return _Links(record.spec(path), record, entries)


def _expected_digests(links: Sequence[_Links], segments: Sequence[Segment]) -> list[U64]:
    """The digests that the chunks of every leaf must have in the end, as its segments say one after
    the other.
    """
    counts = np.array([link.spec.chunk_count for link in links], np.int64)
    bases = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    digests = np.zeros((int(bases[-1]), 2), np.uint64)
    keys: list[list[tuple[int, int, int]]] = [
        [] for _ in segments
    ]  # leaf, row of its first digest, chunks
    rows: list[dict[int, list[tuple[int, int, int, int]]]] = [
        {} for _ in segments
    ]  # by part: leaf, row of its digests, run
    encoded_keys: list[list[int]] = [[] for _ in segments]
    for leaf, (spec, _, entries) in enumerate(links):
        for number, entry in entries:
            if entry.key is not None:
                keys[number].append((leaf, entry.digests, spec.chunk_count))
                continue
            if entry.is_whole:
                encoded_keys[number].append(leaf)
            row = entry.digests
            for part, first, count in entry.delta:
                rows[number].setdefault(part, []).append((leaf, row, first, count))
                row += count
    for number, segment in enumerate(segments):
        segment.start_tables(rows[number], digests=bool(keys[number] or rows[number]))
    for number, segment in enumerate(segments):
        for leaf, row, count in keys[number]:
            digests[bases[leaf] : bases[leaf + 1]] = segment.digests[row : row + count]
        covered = np.zeros(digests.shape[0] if encoded_keys[number] else 0, np.bool_)
        for part, runs in rows[number].items():
            leaf_of, row_of, first_of, count_of = np.array(runs, np.int64).T
            owners = np.repeat(leaf_of, count_of)
            chunks = (
                segment.part(part)
                .index[_ranges(first_of, count_of), columns.CHUNK]
                .astype(np.int64)
            )
            beyond = np.flatnonzero(chunks >= counts[owners])
            if beyond.size:
                spec = links[owners[beyond[0]]].spec
                raise Damaged(
                    f"segment {segment.id}: leaf {spec.path!r} has a row beyond its"
                    f" {spec.chunk_count} chunks",
                    file=segment.path / layout.DELTA / str(part) / "index",
                    leaf=spec.path,
                )
            digests[bases[owners] + chunks] = segment.digests[_ranges(row_of, count_of)]
            if covered.size:
                covered[bases[owners] + chunks] = True
        for leaf in encoded_keys[number]:
            missing = np.flatnonzero(~covered[bases[leaf] : bases[leaf + 1]])
            if missing.size:
                path = links[leaf].spec.path
                message = (
                    f"segment {segment.id}: leaf {path!r} has no row for chunk {int(missing[0])}"
                )
                raise Damaged(message, file=segment.path / layout.DELTA, leaf=path)
    return [digests[bases[leaf] : bases[leaf + 1]] for leaf in range(len(links))]


def _ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of ranges that begin at ``first`` and have ``count`` numbers, one range after the
    other.
    """
    ends = np.cumsum(count)
    numbers: NDArray[np.int64] = np.arange(ends[-1] if ends.size else 0) + np.repeat(
        first - (ends - count), count
    )
    return numbers
