"""Find the chains of stored leaves: their keyframes and the deltas after them.

Every byte that a restore returns has been compared with a digest that the step's manifest names:
manifest -> digest of each segment's table -> digest of each leaf -> digests of its chunks -> bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import U8, U64
from deltacheck.errors import BudgetExceeded, ChainBroken, Damaged
from deltacheck.leaf import limits
from deltacheck.leaf.digest import leaf_digest
from deltacheck.leaf.spec import LeafSpec
from deltacheck.restore.content import machine_bytes
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.store import segment as columns
from deltacheck.store.files.chunk_files import ranges
from deltacheck.store.manifest import LeafEntry, LeafRecord, Manifest, SegmentRef
from deltacheck.store.roots.root import Root, open_segments
from deltacheck.store.segment import Segment, entries_by_path, load_tables

I64: TypeAlias = NDArray[np.int64]

# Memory that a step takes beside its content: for each chunk of a leaf (digests, bounds, numbers),
# for each digest and for each index row of a segment.
_CHUNK_TABLES_BYTES, _DIGEST_BYTES, _INDEX_ROW_BYTES = 96, 16, 64
_TABLES_BYTES = 64 << 20  # allowed whatever the caller's budget is: small tables never matter


class KnownContent(NamedTuple):
    """The whole content of a leaf that the caller already has, and its digest."""

    data: U8
    digest: str


def known_content(manifest: Manifest, content: Mapping[str, U8]) -> dict[str, KnownContent]:
    """Return the content of whole stored leaves of a step, by stored path."""
    return {
        path: KnownContent(data, manifest.stored[path].digest) for path, data in content.items()
    }


class _Links(NamedTuple):
    """The stored entries of a leaf, oldest first, each with the position of its segment."""

    spec: LeafSpec
    record: LeafRecord
    entries: list[tuple[int, LeafEntry]]


def resolve_chains(
    root: Root,
    manifest: Manifest,
    paths: Iterable[str],
    max_bytes: int | None = None,
    held: Mapping[str, KnownContent] | None = None,
) -> dict[str, Chain]:
    """Find the chains of stored leaves and check each link by the digests of the tables.

    Args:
        root: The root.
        manifest: The step.
        paths: Stored paths, which must be in ``manifest.stored``.
        max_bytes: Refuse digests and indexes that take more than this and more than 64 MiB;
            ``None``: the memory of the machine.
        held: Content that the caller already has, by stored path. If a link of a chain has this
            content, only later links are read.

    Returns:
        The chains by stored path.

    Raises:
        ChainBroken: A segment is missing or does not continue a chain; names leaf and step.
        Damaged: A table is damaged.
        BudgetExceeded: The tables are too large.
    """
    paths = list(paths)
    segments = open_segments(root, manifest, paths)
    _refuse_large_tables(root, manifest, paths, segments, max_bytes)
    entries_of = entries_by_path(segments, set(paths))
    links = [
        _links(path, manifest.stored[path], entries_of.get(path, []), segments, manifest)
        for path in paths
    ]
    chains: dict[str, Chain] = {}
    for link, digests in zip(links, _expected_digests(links, segments), strict=True):
        spec, record, entries = link
        # This ties the chunk digests to the manifest: from here on they prove the bytes of each
        # chunk.
        if leaf_digest(digests) != record.digest:
            raise Damaged(
                f"step {manifest.step}, leaf {spec.path!r}: the chunk digests of its segments give"
                f" {leaf_digest(digests)}, the manifest promises {record.digest}",
                leaf=spec.path,
            )
        key, *deltas = [(segments[number], entry) for number, entry in entries]
        held_leaf = (held or {}).get(spec.path)
        covered_links = 0 if held_leaf is None else _covered_links(entries, held_leaf.digest)
        if held_leaf is None or not covered_links:
            chains[spec.path] = Chain(spec, key, tuple(deltas), digests)
        else:
            # The first covered link is the keyframe, which `deltas` does not contain.
            rest = tuple(deltas[covered_links - 1 :])
            chains[spec.path] = Chain(spec, key, rest, digests, held_leaf.data)
    return chains


def chains_at(
    root: Root,
    manifest: Manifest,
    segments: Sequence[SegmentRef],
    records: Mapping[str, LeafRecord],
) -> dict[str, Chain]:
    """Return the chains of leaves as they were after some segments of a step.

    Args:
        root: The root.
        manifest: The step.
        segments: The segments, which have the chains.
        records: What the leaves were then, by stored path.
    """
    earlier = msgspec.structs.replace(manifest.on(segments), leaves=records, tiles={})
    return resolve_chains(root, earlier, records)


def without_unneeded(root: Root, manifest: Manifest) -> Manifest:
    """Return a manifest without the segments that none of its chains has, which are checked."""
    chains = resolve_chains(root, manifest, manifest.stored).values()
    needed = {segment.id for chain in chains for segment, _ in (chain.key, *chain.deltas)}
    return manifest.on([ref for ref in manifest.segments if ref.id in needed])


def _covered_links(entries: Sequence[tuple[int, LeafEntry]], digest: str) -> int:
    """Return the largest number of links that give content with this digest; 0 if none do."""
    # A leaf may return to earlier content, so a digest may occur twice. After its last occurrence
    # the fewest links remain to be read.
    return max(
        (number for number, (_, entry) in enumerate(entries, 1) if entry.digest == digest),
        default=0,
    )


def _refuse_large_tables(
    root: Root,
    manifest: Manifest,
    paths: Iterable[str],
    segments: Sequence[Segment],
    max_bytes: int | None,
) -> None:
    """Raise ``BudgetExceeded`` if the digests and indexes of the leaves take too much memory."""
    chunks = sum(manifest.stored[path].spec(path).chunk_count for path in paths)
    digest_count = sum(segment.table.digest_count for segment in segments)
    rows = sum(part.rows for segment in segments for part in segment.table.parts)
    size = _CHUNK_TABLES_BYTES * chunks + 2 * _DIGEST_BYTES * digest_count + _INDEX_ROW_BYTES * rows
    budget = max(machine_bytes() if max_bytes is None else max_bytes, _TABLES_BYTES)
    if max_bytes is None:
        limits.check_tables(
            root.store.path,
            (segment.id for segment in segments),
            chunks,
            size,
            f"step {manifest.step}",
        )
    if size > budget:
        raise BudgetExceeded(
            f"step {manifest.step}: the digests and indexes of {chunks} chunks would take {size}"
            f" bytes, more than {budget}; raise max_bytes, or name fewer leaves"
        )


def _links(
    path: str,
    record: LeafRecord,
    stored_entries: list[tuple[int, LeafEntry]],
    segments: Sequence[Segment],
    manifest: Manifest,
) -> _Links:
    """Return the links of a leaf from its newest keyframe on, and check that they connect.

    Args:
        stored_entries: All entries of the leaf in the step's segments, oldest first.
    """
    location = f"step {manifest.step}, leaf {path!r}"
    # Section 3 of docs/reference/format.md: the last keyframe and the deltas after it make the
    # leaf.
    keyframe = next(
        (i for i in range(len(stored_entries) - 1, -1, -1) if stored_entries[i][1].is_whole), None
    )
    if keyframe is None:
        raise ChainBroken(f"{location}: none of the step's segments holds its keyframe", leaf=path)
    entries = stored_entries[keyframe:]
    expected = (record.dtype, record.shape, record.chunk)
    before = entries[0][1]
    # A leaf that changes its dtype, shape or chunks is written as a keyframe, so all links of a
    # chain have the same.
    fits = (before.dtype, before.shape, before.chunk) == expected
    for number, entry in entries[1:]:
        if entry.base != before.digest:
            raise ChainBroken(
                f"{location}: segment {segments[number].id} is a delta to {entry.base}, but the"
                f" leaf is {before.digest} there",
                leaf=path,
            )
        fits = fits and (entry.dtype, entry.shape, entry.chunk) == expected
        before = entry
    if before.digest != record.digest or not fits:
        raise ChainBroken(
            f"{location}: its segments give digest {before.digest}, the manifest promises"
            f" {record.digest}",
            leaf=path,
        )
    return _Links(record.spec(path), record, entries)


class _Runs(NamedTuple):
    """Runs of index rows, each with chunks of one leaf; a column for each field, int64 ``(runs,)``.

    Attributes:
        segment: Position of the segment. Ascending, so a later delta follows an earlier one.
        part: Number of the part of the segment.
        leaf: Position of the leaf.
        digest: Row of the first chunk digest in the segment.
        first: First row in the part.
        rows: Number of rows.
        is_key: 1 for the rows of a keyframe that is encoded, 0 for those of a delta.
    """

    segment: I64
    part: I64
    leaf: I64
    digest: I64
    first: I64
    rows: I64
    is_key: I64

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The segments and their parts that have rows, ascending."""
        return sorted(set(zip(self.segment.tolist(), self.part.tolist(), strict=True)))


def _runs(links: Sequence[_Links]) -> _Runs:
    """Return the runs of all links. A keyframe in an array has none."""
    runs: list[tuple[int, ...]] = []
    for leaf, link in enumerate(links):
        for number, entry in link.entries:
            if entry.key is not None:
                continue
            digest = entry.digests
            for part, first, count in entry.delta:
                runs.append((number, part, leaf, digest, first, count, entry.is_whole))
                digest += count
    table = np.array(runs, np.int64).reshape(-1, len(_Runs._fields))
    return _Runs(*table[np.argsort(table[:, 0], kind="stable")].T)


def _expected_digests(links: Sequence[_Links], segments: Sequence[Segment]) -> list[U64]:
    """Return the digests that the chunks of each leaf must have after all of its links.

    All leaves share one array, so that each part of a segment is indexed once, whatever number of
    leaves it serves.
    """
    counts = np.array([link.spec.chunk_count for link in links], np.int64)
    bases = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    digests = np.zeros((int(bases[-1]), 2), np.uint64)
    by_leaf = [digests[begin:end] for begin, end in itertools.pairwise(bases.tolist())]
    runs = _runs(links)
    load_tables(segments[number].part(part) for number, part in runs.parts)
    # A keyframe comes before the deltas to it, so they replace its digests.
    for link, leaf_digests in zip(links, by_leaf, strict=True):
        number, keyframe = link.entries[0]
        if keyframe.key is not None:
            row = keyframe.digests
            leaf_digests[:] = segments[number].digests[row : row + len(leaf_digests)]
    if runs.rows.size:
        owners = np.repeat(runs.leaf, runs.rows)
        chunks = _chunks(runs, segments)
        _refuse_chunks_beyond(chunks, counts[owners], runs, links, segments)
        positions = bases[owners] + chunks
        # The digest of a later delta replaces that of an earlier one.
        digests[positions] = _stored_digests(runs, segments)
        of_keyframes = positions[np.repeat(runs.is_key, runs.rows) == 1]
        _refuse_missing_chunks(of_keyframes, bases, links, segments)
    return by_leaf


def _chunks(runs: _Runs, segments: Sequence[Segment]) -> I64:
    """Return the chunk number of each row."""
    parts = runs.parts
    columns_of = [segments[number].part(part).index[:, columns.CHUNK] for number, part in parts]
    starts = dict(zip(parts, np.cumsum([0, *map(len, columns_of)]).tolist(), strict=False))
    begins = [starts[key] for key in zip(runs.segment.tolist(), runs.part.tolist(), strict=True)]
    rows = ranges(begins + runs.first, runs.rows)
    return np.concatenate(columns_of)[rows].astype(np.int64)


def _stored_digests(runs: _Runs, segments: Sequence[Segment]) -> U64:
    """Return the chunk digest of each row."""
    numbers = sorted(set(runs.segment.tolist()))
    tables = [segments[number].digests for number in numbers]
    begins = np.zeros(len(segments), np.int64)
    begins[numbers] = np.cumsum([0, *map(len, tables)])[:-1]
    rows = ranges(begins[runs.segment] + runs.digest, runs.rows)
    row_digests: U64 = np.concatenate(tables)[rows]
    return row_digests


def _refuse_chunks_beyond(
    chunks: I64, limits_of: I64, runs: _Runs, links: Sequence[_Links], segments: Sequence[Segment]
) -> None:
    """Raise ``Damaged`` if a row is of a chunk that its leaf does not have.

    All leaves share one array of digests: such a row would replace a digest of another leaf.
    """
    beyond = np.flatnonzero(chunks >= limits_of)
    if not beyond.size:
        return
    run = int(np.searchsorted(np.cumsum(runs.rows), beyond[0], "right"))
    spec, segment = links[runs.leaf[run]].spec, segments[runs.segment[run]]
    raise Damaged(
        f"segment {segment.id}: leaf {spec.path!r} has a row beyond its {spec.chunk_count} chunks",
        file=segment.part(int(runs.part[run])).path,
        leaf=spec.path,
    )


def _refuse_missing_chunks(
    positions: I64, bases: I64, links: Sequence[_Links], segments: Sequence[Segment]
) -> None:
    """Raise ``Damaged`` if an encoded keyframe lacks a chunk.

    A delta may leave out chunks, but nothing else gives a chunk without a row its content.

    Args:
        positions: The chunks of encoded keyframes, counted over all leaves.
        bases: The position of each leaf's first chunk, and the number of all chunks.
    """
    is_covered = np.ones(int(bases[-1]), np.bool_)
    for leaf, link in enumerate(links):
        if link.entries[0][1].key is None:
            is_covered[bases[leaf] : bases[leaf + 1]] = False
    is_covered[positions] = True
    missing = np.flatnonzero(~is_covered)
    if not missing.size:
        return
    leaf = int(np.searchsorted(bases, missing[0], "right")) - 1
    segment, path = segments[links[leaf].entries[0][0]], links[leaf].spec.path
    raise Damaged(
        f"segment {segment.id}: leaf {path!r} has no row for chunk {int(missing[0] - bases[leaf])}",
        file=segment.path / "zarr.json",
        leaf=path,
    )
