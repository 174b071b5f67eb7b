"""Find the small leaves that the packed arrays of a segment without a table hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deltacheck.codec.base import U8
from deltacheck.leaf.digest import all_chunk_digests, leaf_digest
from deltacheck.leaf.spec import LeafSpec
from deltacheck.maintain.rebuild.facts import SegmentFacts
from deltacheck.maintain.rebuild.segment_arrays import SegmentArrays
from deltacheck.store.manifest import LeafRecord
from deltacheck.store.segment import is_packed

# Places that packed leaves may begin at, as far as their content tells. More are not followed.
_MOST_PLACES = 4096


def packed_sets(arrays: SegmentArrays, facts: SegmentFacts, others: Set[str]) -> Iterator[set[str]]:
    """Yield the sets of small leaves that the packed arrays may hold, the likely ones first.

    Args:
        arrays: The arrays of the segment.
        facts: The facts about its leaves.
        others: Leaves that the segment has in rows.
    """
    small = {
        path: record
        for path, record in facts.records.items()
        if path not in others and path not in arrays.natural and is_packed(record.spec(path))
    }
    changed = {path for path, record in small.items() if facts.before.get(path) != record.digest}
    # Saves write the same leaves again and again.
    neighbours = [
        {path for path, entry in facts.tables[name].leaves.items() if entry.key is not None}
        & small.keys()
        for name in facts.earlier_names[-1:]
    ]
    # A leaf that did not change is written again only if its keyframe was due, or with all others.
    yield from (paths for paths in (changed, set(small), *neighbours) if _fit(paths, small, arrays))
    # A leaf that has its content of before was hardly written, but a compaction writes such leaves.
    for before in (facts.before, {}):
        with suppress(LookupError):
            yield _Search(arrays, small, changed, before).paths()


def _fit(paths: Iterable[str], small: Mapping[str, LeafRecord], arrays: SegmentArrays) -> bool:
    lengths: dict[str, int] = {}
    for path in paths:
        spec = small[path].spec(path)
        count = spec.raw_bytes // spec.element.item_bytes
        lengths[spec.element.storage] = lengths.get(spec.element.storage, 0) + count
    return lengths == arrays.packed


@dataclass(frozen=True, slots=True)
class _Search:
    """A search for the leaves of packed arrays by their content.

    Attributes:
        arrays: The arrays.
        small: The leaves that may be there.
        changed: Those that must be there, if their digest is known.
        before: Digests of content that leaves without a known digest do not have.
    """

    arrays: SegmentArrays
    small: Mapping[str, LeafRecord]
    changed: Set[str]
    before: Mapping[str, str]

    def paths(self) -> set[str]:
        """Return the leaves of all packed arrays.

        Raises:
            LookupError: No leaves have the content.
            ValueError: Too many may have.
        """
        known = set(map(tuple, [] if self.arrays.digests is None else self.arrays.digests.tolist()))
        specs = [self.small[path].spec(path) for path in sorted(self.small)]
        found: set[str] = set()
        for storage in self.arrays.packed:
            content = self.arrays.packed_content(storage)
            of_type = [spec for spec in specs if spec.element.storage == storage]
            found |= self._placed(of_type, content, known)
        return found

    def _placed(
        self, specs: Sequence[LeafSpec], content: U8, known: Set[tuple[int, ...]]
    ) -> set[str]:
        """Return the leaves that an array consists of, one after the other, by path."""
        # Offset after the leaves so far -> the leaves, and those before: a linked list.
        places: dict[int, Any] = {0: None}
        for spec in specs:
            after: dict[int, Any] = {}
            for offset, path_list in places.items():
                stop = offset + spec.raw_bytes
                if stop <= content.size and self._may_be(spec, content[offset:stop], known):
                    after[stop] = (spec.path, path_list)
                if spec.path not in self.changed or not self.small[spec.path].digest:
                    after.setdefault(offset, path_list)
            if len(after) > _MOST_PLACES:
                raise ValueError("the content of a packed array fits its leaves in too many ways")
            places = after
        path_list, paths = places[content.size], set()
        while path_list is not None:
            path, path_list = path_list
            paths.add(path)
        return paths

    def _may_be(self, spec: LeafSpec, content: U8, known: Set[tuple[int, ...]]) -> bool:
        chunks = all_chunk_digests(spec, content)
        digest, expected = leaf_digest(chunks), self.small[spec.path].digest
        if expected:
            return digest == expected
        return digest != self.before.get(spec.path) and all(
            tuple(chunk) in known for chunk in chunks.tolist()
        )
