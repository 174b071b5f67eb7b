"""What the steps of a root stand on: every manifest and table read once, every chain once however
many steps share it. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deltacheck.codec.base import U64
from deltacheck.errors import ChainBroken, Damaged
from deltacheck.leaf.digest import leaf_digest
from deltacheck.restore.chain import Chain
from deltacheck.store import segment as columns
from deltacheck.store.manifest import LeafEntry, LeafRecord, Manifest, SegmentRef
from deltacheck.store.root import Root
from deltacheck.store.segment import Segment

Link = tuple[Segment, LeafEntry]


class Use(NamedTuple):
    """A step that stands on the first ``links`` of a chain."""

    seq: int
    step: int
    links: int


@dataclass(slots=True)
class Lineage:
    """A leaf's keyframe and all deltas after it that any step applies, and those steps."""

    path: str
    record: LeafRecord
    links: list[Link]
    uses: list[Use] = field(default_factory=list)

    def chain(self, links: int | None = None) -> Chain:
        """The whole chain, or its first links."""
        key, *deltas = self.links[:links]
        return Chain(
            self.record.spec(self.path),
            key,
            tuple(deltas),
            np.zeros((self.spec_chunks, 2), np.uint64),
        )

    @property
    def spec_chunks(self) -> int:
        return self.record.spec(self.path).chunk_count

    def harmed(self, segment_id: str) -> Iterator[Use]:
        """The steps that need the link in a segment."""
        at = next(
            number for number, (segment, _) in enumerate(self.links) if segment.id == segment_id
        )
        return (use for use in self.uses if use.links > at)


class Broken(NamedTuple):
    """A leaf of a step whose links do not fit together."""

    manifest: Manifest
    path: str
    error: Damaged


@dataclass(slots=True)
class Survey:
    """``lost``: segments whose table cannot be read, and why. ``broken``: leaves without a
    chain.
    """

    lineages: list[Lineage]
    segments: dict[SegmentRef, Segment]
    lost: dict[SegmentRef, Damaged]
    broken: list[Broken]


def survey(root: Root, manifests: Iterable[Manifest], *, without_lost: bool = False) -> Survey:
    """Take stock of steps, given in ascending order of their sequence numbers.

    ``without_lost``: a step that has lost segments is taken as if it never had them, so that it
    shows which leaves need them; else it is left out.
    """
    found = Survey([], {}, {}, [])
    current: dict[str, Lineage] = {}
    before: set[str] = set()
    for manifest in manifests:
        segments = [
            segment
            for ref in manifest.segments
            if (segment := _opened(root, ref, found)) is not None
        ]
        if len(segments) < len(manifest.segments) and not without_lost:
            continue
        names = {segment.id for segment in segments}
        dropped, before = before - names, names
        every = columns.entries_by_path(segments)
        for path, record in manifest.stored.items():
            links = [(segments[number], entry) for number, entry in every.get(path, ())]
            try:
                lineage = _extended(path, record, links, current.get(path), dropped, manifest)
            except ChainBroken as error:
                found.broken.append(Broken(manifest, path, error))
                continue
            if current.get(path) is not lineage:
                current[path] = lineage
                found.lineages.append(lineage)
    return found


def _opened(root: Root, ref: SegmentRef, found: Survey) -> Segment | None:
    if ref not in found.segments and ref not in found.lost:
        try:
            found.segments[ref] = root.store.segment(ref)
        except Damaged as error:
            found.lost[ref] = error
    return found.segments.get(ref)


def _extended(
    path: str,
    record: LeafRecord,
    links: Sequence[Link],
    known: Lineage | None,
    dropped: set[str],
    manifest: Manifest,
) -> Lineage:
    """The lineage that a step's leaf stands on: the known one, grown where the step has newer
    links,
    or another. ``links``: all that the step has of the leaf, oldest first.
    """
    if (
        known is not None
        and dropped
        and not dropped.isdisjoint(segment.id for segment, _ in known.links)
    ):
        known = None
    last = None if known is None else known.links[-1][0].id
    fresh: list[Link] = []
    for segment, entry in reversed(links):
        if segment.id == last:
            break
        fresh.append((segment, entry))
        if entry.is_whole:
            known = None
            break
    fresh.reverse()
    lineage = Lineage(path, record, []) if known is None else known
    at = f"step {manifest.step}, leaf {path!r}"
    if known is None and not (fresh and fresh[0][1].is_whole):
        raise ChainBroken(f"{at}: none of the step's segments holds its keyframe", leaf=path)
    content = lineage.links[-1][1].digest if lineage.links else fresh[0][1].base
    what = (record.dtype, record.shape, record.chunk)
    for segment, entry in fresh:
        if entry.base != content or (entry.dtype, entry.shape, entry.chunk) != what:
            raise ChainBroken(
                f"{at}: segment {segment.id} is a delta to {entry.base or 'nothing'}, but the leaf"
                f" is {content} there",
                file=segment.path / "zarr.json",
                leaf=path,
            )
        content = entry.digest
    if content != record.digest:
        raise ChainBroken(
            f"{at}: its segments give digest {content}, the manifest promises {record.digest}",
            leaf=path,
        )
    lineage.links += fresh
    lineage.uses.append(Use(manifest.seq, manifest.step, len(lineage.links)))
    return lineage


class Tables(NamedTuple):
    """The chunk digests after each link of a lineage, as far as the tables can be read, and why not
    further.
    """

    digests: list[U64]
    error: Damaged | None


def tables(lineage: Lineage) -> Tables:
    """What the tables say of every chunk after each link, each link's proven by the digest of the
    leaf there.
    """
    digests: list[U64] = []
    count = lineage.spec_chunks
    current = np.zeros((count, 2), np.uint64)
    try:
        for segment, entry in lineage.links:
            current = current.copy()
            chunks = stored_chunks(segment, entry, count)
            rows = segment.digests[entry.digests : entry.digests + chunks.size]
            if chunks.size and int(chunks.max()) >= count:
                raise Damaged(
                    f"leaf {lineage.path!r} has a row beyond its {count} chunks in {segment.path}",
                    file=segment.path / "delta",
                    leaf=lineage.path,
                )
            current[chunks] = rows
            if leaf_digest(current) != entry.digest:
                raise Damaged(
                    f"leaf {lineage.path!r}: the chunk digests in {segment.path} give"
                    f" {leaf_digest(current)}, its table says {entry.digest}",
                    file=segment.path / "digests",
                    leaf=lineage.path,
                )
            digests.append(current)
    except Damaged as error:
        return Tables(digests, error)
    return Tables(digests, None)


def stored_chunks(
    segment: Segment, entry: LeafEntry, count: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The numbers of the chunks that an entry brings, in the order of its digests."""
    if entry.key is not None:
        return np.arange(count)
    runs = [
        segment.part(part).index[first : first + rows, columns.CHUNK]
        for part, first, rows in entry.delta
    ]
    return np.concatenate(runs).astype(np.int64)


def batches(lineages: Iterable[Lineage], batch_bytes: int) -> Iterator[list[Lineage]]:
    """Lineages in groups that are read together: of different leaves, at most ``batch_bytes`` of
    them or one.
    """
    batch: dict[str, Lineage] = {}
    size = 0
    for lineage in lineages:
        more = lineage.record.spec(lineage.path).raw_bytes
        if batch and (lineage.path in batch or size + more > batch_bytes):
            yield list(batch.values())
            batch, size = {}, 0
        batch[lineage.path] = lineage
        size += more
    if batch:
        yield list(batch.values())


def cost_bytes(lineage: Lineage) -> int:
    """Decoded bytes that checking a lineage goes through: the leaf, and the chunks that each delta
    brings.
    """
    chunk = lineage.record.spec(lineage.path).raw_bytes / max(1, lineage.spec_chunks)
    rows = sum(count for _, entry in lineage.links[1:] for _, _, count in entry.delta)
    return int(chunk * (lineage.spec_chunks + rows))
