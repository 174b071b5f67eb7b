"""Statements of manifests and of other tables about the leaves of a segment without a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from deltacheck.errors import Damaged
from deltacheck.leaf import sharding
from deltacheck.store import layout
from deltacheck.store.manifest import (
    LeafEntry,
    LeafRecord,
    Manifest,
    SegmentRef,
    SegmentTable,
)


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """Statements about the leaves of a segment.

    Attributes:
        records: Stored path -> the leaf after the segment; without a digest if nothing states it.
        before: Stored path -> the digest before the segment.
        orders: The paths that the rows number, in each possible order.
        tables: The tables of other segments by name.
        earlier_names: Names of the segments before it that may hold content of its leaves.
    """

    records: dict[str, LeafRecord]
    before: dict[str, str]
    orders: tuple[list[str], ...]
    tables: Mapping[str, SegmentTable]
    earlier_names: Sequence[str]

    @classmethod
    def of(
        cls, ref: SegmentRef, manifests: Sequence[Manifest], tables: Mapping[str, SegmentTable]
    ) -> SegmentFacts:
        """Return the facts about a segment; ``manifests`` ascend."""
        seq = layout.seq_of(ref.id)
        users = [manifest for manifest in manifests if ref in manifest.segments]
        # The manifest of the save itself states everything, except digests that it leaves to
        # tables. Later ones help if it was deleted.
        owner = next((manifest for manifest in users if manifest.seq == seq), None)
        first = owner or users[0]
        known = _records_in(first, ref)
        facts = cls({}, {}, _orders(first, known), tables, _earlier_names(first, ref, tables))
        facts._add(first, ref, known)
        for manifest in users:
            if owner is None:
                facts._add(manifest, ref, _records_in(manifest, ref))
            elif manifest is not owner and not all(r.digest for r in facts.records.values()):
                known = _records_in(manifest, ref)
                facts._add(manifest, ref, {p: known[p] for p in facts.records if p in known})
        if owner is None or any(r.id not in tables for r in owner.segments if r != ref):
            # The save before may state the digests that lost tables have.
            for manifest in [manifest for manifest in manifests if manifest.seq < seq][-1:]:
                facts._add_before(manifest)
        return facts

    def _add(self, manifest: Manifest, ref: SegmentRef, known: Mapping[str, LeafRecord]) -> None:
        seq = layout.seq_of(ref.id)
        for lane, paths in _by_lane(known).items():
            names = _names_in(manifest, lane)
            older = [name for name in reversed(names) if layout.seq_of(name) < seq]
            newer = [name for name in names if layout.seq_of(name) > seq]
            for path in paths:
                record = known[path]
                entry, is_certain = _first_entry(path, newer, self.tables)
                # A later delta states what it goes from; a later keyframe states nothing.
                digest = record.digest if entry is None else entry.base
                if path not in self.records or not self.records[path].digest:
                    self.records[path] = msgspec.structs.replace(
                        record, digest=digest if is_certain else ""
                    )
                entry, is_certain = _first_entry(path, older, self.tables)
                if entry is not None and is_certain:
                    self.before.setdefault(path, entry.digest)

    def _add_before(self, manifest: Manifest) -> None:
        for path in self.records:
            with suppress(KeyError, Damaged):
                self.before.setdefault(path, manifest.stored[path].digest)

    def earlier_entries(self, path: str) -> Iterator[tuple[str, LeafEntry]]:
        """Yield the entries of a path before the segment, each with its segment, oldest first."""
        for name in self.earlier_names:
            if path in self.tables[name].leaves:
                yield name, self.tables[name].leaves[path]


def _by_lane(records: Mapping[str, LeafRecord]) -> dict[int, list[str]]:
    lanes: dict[int, list[str]] = {}
    for path, record in records.items():
        lanes.setdefault(record.lane, []).append(path)
    return lanes


def _names_in(manifest: Manifest, lane: int) -> list[str]:
    """Return the names of the segments that may hold content of a lane, ascending."""
    numbers = range(len(manifest.segments)) if lane < 0 else manifest.lanes[lane]
    return [manifest.segments[number].id for number in numbers]


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


def _records_in(manifest: Manifest, ref: SegmentRef) -> dict[str, LeafRecord]:
    """Return what may be in a segment: the content of its rank, if ranks are known.

    Records of tiles have no digest if the manifest leaves it to a table that is lost.
    """
    position = manifest.segments.index(ref)
    lanes = {-1, *(number for number, lane in enumerate(manifest.lanes) if position in lane)}
    records = {path: record for path, record in manifest.leaves.items() if record.lane in lanes}
    for path, cut in manifest.tiles.items():
        unreadable = _unreadable_lanes(manifest, path, lanes & set(cut.lanes))
        numbers = [
            number
            for number, lane in enumerate(cut.lanes)
            if lane in lanes and cut.stored_dtype(number) is not None
        ]
        for name, number in zip(sharding.names_of(path, cut.cuts, numbers), numbers, strict=True):
            is_known = cut.digests or cut.lanes[number] not in unreadable
            records[name] = manifest.stored[name] if is_known else cut.record(number)
    return records


def _unreadable_lanes(manifest: Manifest, path: str, lanes: Set[int]) -> set[int]:
    """Return those lanes of a leaf whose digests are in tables that cannot be read."""
    unreadable = set[int]()
    for lane in lanes:
        try:
            manifest.require_digests(path, [manifest.tiles[path].lanes.index(lane)])
        except Damaged:
            unreadable.add(lane)
    return unreadable


def _earlier_names(
    manifest: Manifest, ref: SegmentRef, tables: Mapping[str, SegmentTable]
) -> list[str]:
    names = set(tables)
    if manifest.lane_digests:  # many ranks, of which one has written the segment
        position = manifest.segments.index(ref)
        numbers = {n for lane in manifest.lanes if position in lane for n in lane}
        names &= {manifest.segments[number].id for number in numbers}
    seq = layout.seq_of(ref.id)
    return sorted(name for name in names if layout.seq_of(name) < seq)


def _orders(manifest: Manifest, known: Iterable[str]) -> tuple[list[str], ...]:
    # Rows number the leaves of the state in the order of paths. Leaves that are derived and not
    # stored have numbers, too, unless they were left out before.
    paths = sorted(known)
    all_paths = sorted({*paths, *manifest.derived})
    return (all_paths,) if all_paths == paths else (all_paths, paths)
