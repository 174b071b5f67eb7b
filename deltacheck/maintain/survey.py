"""Read the manifests and tables of the steps of a root, and list the chains of their leaves.

Every manifest and table is read once, and every chain is listed once, whatever number of steps
shares it. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deltacheck.codec.base import U64
from deltacheck.errors import ChainBroken, Damaged
from deltacheck.leaf import limits
from deltacheck.leaf.digest import all_chunk_digests, leaf_digest
from deltacheck.restore import read
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.store import segment as columns
from deltacheck.store.manifest import LeafEntry, LeafRecord, Manifest, SegmentRef
from deltacheck.store.roots.root import Root
from deltacheck.store.segment import Segment

Link = tuple[Segment, LeafEntry]

# Memory for each chunk of a leaf, for its digest after each link, and for each row of an index.
_CHUNK_BYTES, _DIGEST_BYTES, _ROW_BYTES = 96, 16, 64


class Use(NamedTuple):
    """A step that needs the first ``links`` links of a chain."""

    seq: int
    step: int
    links: int


@dataclass(slots=True)
class Lineage:
    """A chain of a leaf and the steps that need it.

    Attributes:
        path: Path that the chain is stored under: a leaf or a tile.
        record: The leaf's record of the first step.
        links: The keyframe, then all deltas that any step applies, oldest first.
        uses: The steps, in ascending order of their sequence numbers.
    """

    path: str
    record: LeafRecord
    links: list[Link]
    uses: list[Use] = field(default_factory=list)

    def chain(self, links: int | None = None) -> Chain:
        """Return the whole chain, or its first ``links`` links."""
        key, *deltas = self.links[:links]
        return Chain(
            self.record.spec(self.path),
            key,
            tuple(deltas),
            np.zeros((self.spec_chunks, 2), np.uint64),
        )

    @property
    def spec_chunks(self) -> int:
        """The number of chunks of the leaf."""
        return self.record.spec(self.path).chunk_count

    def harmed(self, segment_id: str) -> Iterator[Use]:
        """Return the steps that need the link in a segment."""
        position = next(
            number for number, (segment, _) in enumerate(self.links) if segment.id == segment_id
        )
        return (use for use in self.uses if use.links > position)


class Broken(NamedTuple):
    """A leaf of a step whose links do not form a chain."""

    manifest: Manifest
    path: str
    error: Damaged


@dataclass(slots=True)
class Survey:
    """The chains of some steps.

    Attributes:
        lineages: The chains, in the order of the steps that began them.
        segments: The segments whose tables were read.
        lost: Segments whose table cannot be read, with the error.
        broken: Leaves without a chain.
    """

    lineages: list[Lineage]
    segments: dict[SegmentRef, Segment]
    lost: dict[SegmentRef, Damaged]
    broken: list[Broken]


def survey(root: Root, manifests: Iterable[Manifest]) -> Survey:
    """List the chains of steps. Steps that have lost segments are left out.

    Args:
        root: Root to read.
        manifests: Manifests of the steps, in ascending order of their sequence numbers.

    Returns:
        Chains, segments and problems.
    """
    result = Survey([], {}, {}, [])
    current: dict[str, Lineage] = {}
    before: set[str] = set()
    for manifest in manifests:
        segments = [
            segment
            for ref in manifest.segments
            if (segment := _open_segment(root, ref, result)) is not None
        ]
        # The missing links would make sound chains look broken.
        if len(segments) < len(manifest.segments):
            continue
        names = {segment.id for segment in segments}
        # A step that no longer names a segment has its leaves from elsewhere, so chains through
        # that segment begin anew.
        dropped_ids = before - names
        # A merged delta, or a keyframe written behind the training, is older than the newest
        # segments of the step before, and stands in place of links that other leaves may still
        # need.
        inserted_ids = {name for name in names - before if before and name < max(before)}
        before = names
        entries = columns.entries_by_path(segments)
        for path, record in _records(manifest, result):
            links = [(segments[number], entry) for number, entry in entries.get(path, ())]
            try:
                previous = current.get(path)
                if inserted_ids and any(segment.id in inserted_ids for segment, _ in links):
                    previous = None
                lineage = _extend(path, record, links, previous, dropped_ids, manifest)
            except ChainBroken as error:
                result.broken.append(Broken(manifest, path, error))
                continue
            if current.get(path) is not lineage:
                current[path] = lineage
                result.lineages.append(lineage)
    for lineage in result.lineages:
        _refuse_large(root, lineage)
    return result


def _refuse_large(root: Root, lineage: Lineage) -> None:
    """Raise ``BudgetExceeded`` if the digests of a chain take too much memory."""
    limits.check_tables(
        root.store.path,
        (segment.id for segment, _ in lineage.links),
        lineage.spec_chunks,
        lineage.spec_chunks * (_CHUNK_BYTES + _DIGEST_BYTES * len(lineage.links)),
        f"leaf {lineage.path!r} of step {lineage.uses[0].step}",
    )


def _records(manifest: Manifest, result: Survey) -> Iterator[tuple[str, LeafRecord]]:
    """Yield the stored leaves and tiles of a step. Leaves without digests are ``broken``."""
    yield from manifest.leaves.items()
    for path, cut in manifest.tiles.items():
        try:
            complete = manifest.tiling(path)
        except Damaged as error:
            result.broken.append(Broken(manifest, path, error))
            continue
        assert complete is not None
        for name, record in zip(cut.names(path), complete.records(), strict=True):
            if record is not None:
                yield name, record


def _open_segment(root: Root, ref: SegmentRef, result: Survey) -> Segment | None:
    if ref not in result.segments and ref not in result.lost:
        try:
            segment = root.store.segment(ref)
        except Damaged as error:
            result.lost[ref] = error
        else:
            rows = sum(part.rows for part in segment.table.parts)
            limits.check_tables(
                root.store.path,
                (ref.id,),
                segment.table.digest_count,
                _DIGEST_BYTES * segment.table.digest_count + _ROW_BYTES * rows,
                f"segment {ref.id}",
            )
            result.segments[ref] = segment
    return result.segments.get(ref)


def _extend(
    path: str,
    record: LeafRecord,
    links: Sequence[Link],
    previous: Lineage | None,
    dropped_ids: set[str],
    manifest: Manifest,
) -> Lineage:
    """Return the lineage of a leaf of a step: the previous step's, extended, or a new one.

    Args:
        path: Path that the leaf is stored under.
        record: The leaf's record of the step.
        links: All links that the step's segments hold for the leaf, oldest first.
        previous: The lineage of the leaf in the step before.
        dropped_ids: Segments that the step before needed and this step does not.
        manifest: Manifest of the step.

    Raises:
        ChainBroken: If the links do not lead from a keyframe to the digest of the record.
    """
    if (
        previous is not None
        and dropped_ids
        and not dropped_ids.isdisjoint(segment.id for segment, _ in previous.links)
    ):
        previous = None
    new_links = _links_after(None if previous is None else previous.links[-1][0].id, links)
    if new_links and new_links[0][1].is_whole:
        previous = None
    lineage = Lineage(path, record, []) if previous is None else previous
    place = f"step {manifest.step}, leaf {path!r}"
    if previous is None and not (new_links and new_links[0][1].is_whole):
        raise ChainBroken(f"{place}: none of the step's segments holds its keyframe", leaf=path)
    # A keyframe has no base, so the comparison holds for the first link as well.
    digest = lineage.links[-1][1].digest if lineage.links else new_links[0][1].base
    _require_connected(place, path, record, new_links, digest)
    lineage.links += new_links
    lineage.uses.append(Use(manifest.seq, manifest.step, len(lineage.links)))
    return lineage


def _require_connected(
    place: str, path: str, record: LeafRecord, links: Sequence[Link], digest: str
) -> None:
    """Raise ``ChainBroken`` unless links lead from a digest to that of the record."""
    layout = (record.dtype, record.shape, record.chunk)
    for segment, entry in links:
        if entry.base != digest or (entry.dtype, entry.shape, entry.chunk) != layout:
            raise ChainBroken(
                f"{place}: segment {segment.id} is a delta to {entry.base or 'nothing'}, but the"
                f" leaf has digest {digest} there",
                file=segment.path / "zarr.json",
                leaf=path,
            )
        digest = entry.digest
    if digest != record.digest:
        raise ChainBroken(
            f"{place}: its segments give digest {digest}, but the manifest has {record.digest}",
            leaf=path,
        )


def _links_after(last_segment: str | None, links: Sequence[Link]) -> list[Link]:
    """Return the links after one in a segment, but from the newest keyframe on if there is one."""
    new_links: list[Link] = []
    for segment, entry in reversed(links):
        if segment.id == last_segment:
            break
        new_links.append((segment, entry))
        if entry.is_whole:
            break
    return new_links[::-1]


class Tables(NamedTuple):
    """The chunk digests after each link of a lineage.

    Attributes:
        digests: One array of shape (chunks, 2), uint64, for each link whose tables can be read.
        error: The error at the first link whose tables cannot be read, if there is one.
    """

    digests: list[U64]
    error: Damaged | None


def tables(lineage: Lineage) -> Tables:
    """Read the chunk digests after each link, and check them by the leaf's digest there."""
    digests: list[U64] = []
    count = lineage.spec_chunks
    current = np.zeros((count, 2), np.uint64)
    try:
        for segment, entry in lineage.links:
            # Each link keeps its own array. Without the copy all of them would show the last
            # digests.
            current = current.copy()
            chunks = stored_chunks(segment, entry, count)
            rows = segment.digests[entry.digests : entry.digests + chunks.size]
            # Row numbers come from the disk and are not trusted as indexes.
            if chunks.size and int(chunks.max()) >= count:
                raise Damaged(
                    f"leaf {lineage.path!r} has a row beyond its {count} chunks in {segment.path}",
                    file=segment.path / "zarr.json",
                    leaf=lineage.path,
                )
            current[chunks] = rows
            if leaf_digest(current) != entry.digest:
                raise Damaged(
                    f"leaf {lineage.path!r}: the chunk digests in {segment.path} give"
                    f" {leaf_digest(current)}, its table has {entry.digest}",
                    file=segment.path / "zarr.json",
                    leaf=lineage.path,
                )
            digests.append(current)
    except Damaged as error:
        return Tables(digests, error)
    return Tables(digests, None)


def stored_chunks(
    segment: Segment, entry: LeafEntry, count: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the numbers of the chunks that an entry stores, in the order of its digests."""
    # A keyframe owns one digest row for each chunk, in order (format.md, section 2).
    if entry.key is not None:
        return np.arange(count)
    runs = [
        segment.part(part).index[first : first + rows, columns.CHUNK]
        for part, first, rows in entry.delta
    ]
    return np.concatenate(runs).astype(np.int64)


def proven_digests(lineage: Lineage) -> dict[int, U64]:
    """Return the chunk digests after each link, from the content alone.

    The chunk digests of the tables are not used: the digest of the leaf, which the table has, too,
    proves the content. So these are the links at which a restore gives the saved bytes. A link that
    is damaged may be followed by others that restore, if later deltas replace what it gave.

    Returns:
        Number of links, counted from 1 -> digests of all chunks, uint64 ``(chunks, 2)``.
    """
    proven: dict[int, U64] = {}
    spec = lineage.record.spec(lineage.path)
    links = _count_fitting_links(lineage)
    chains = {lineage.path: lineage.chain(links)} if links else {}
    with suppress(Damaged):  # no later link can be read either
        walk = read.follow_links(chains, verified=False)
        for number, (_, entries, content) in enumerate(walk, 1):
            digests = all_chunk_digests(spec, content[lineage.path])
            if leaf_digest(digests) == entries[lineage.path].digest:
                proven[number] = digests
    return proven


def _count_fitting_links(lineage: Lineage) -> int:
    """Count the links, from the keyframe on, whose rows are of chunks that the leaf has."""
    for number, (segment, entry) in enumerate(lineage.links):
        try:
            chunks = stored_chunks(segment, entry, lineage.spec_chunks)
        except Damaged:
            return number
        if chunks.size and int(chunks.max()) >= lineage.spec_chunks:
            return number
    return len(lineage.links)


def batches(lineages: Iterable[Lineage], batch_bytes: int) -> Iterator[list[Lineage]]:
    """Group lineages to be read together.

    The lineages of a batch are of different leaves. They decode to at most ``batch_bytes``, or
    there is only one.
    """
    batch: dict[str, Lineage] = {}
    size = 0
    for lineage in lineages:
        raw_bytes = lineage.record.spec(lineage.path).raw_bytes
        # A walk holds one array for each path, so two lineages of one leaf cannot share a walk.
        if batch and (lineage.path in batch or size + raw_bytes > batch_bytes):
            yield list(batch.values())
            batch, size = {}, 0
        batch[lineage.path] = lineage
        size += raw_bytes
    if batch:
        yield list(batch.values())


def cost_bytes(lineage: Lineage) -> int:
    """Return the decoded bytes that a check of a lineage reads.

    These are the leaf, and the chunks that each delta stores.
    """
    chunk = lineage.record.spec(lineage.path).raw_bytes / max(1, lineage.spec_chunks)
    rows = sum(count for _, entry in lineage.links[1:] for _, _, count in entry.delta)
    return int(chunk * (lineage.spec_chunks + rows))
