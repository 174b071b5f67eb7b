"""Reconstruct damaged leaves from other data of the same root.

A chunk is identified by its digest. The bytes of a damaged file may therefore be found wherever the
same digest is recorded: in a later keyframe, in a tied leaf or a replica, or in a step that was
compacted. A leaf that ranks have stored in other tiles is assembled from those. A low-precision
copy is computed from its master. Everything is checked by the digest of the leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from deltacheck.codec import derivation
from deltacheck.codec.base import U8, U64
from deltacheck.errors import Damaged
from deltacheck.leaf import tiles
from deltacheck.leaf.digest import all_chunk_digests, digest_of, leaf_digest
from deltacheck.maintain.survey import (
    Lineage,
    Survey,
    batches,
    proven_digests,
    stored_chunks,
    tables,
)
from deltacheck.maintain.verify import BATCH_BYTES
from deltacheck.restore import read
from deltacheck.restore.chain import Chain
from deltacheck.restore.content import byte_extents
from deltacheck.restore.read import apply_entry
from deltacheck.store.manifest import Manifest

# Types of masters that low-precision leaves may be a cast of.
_MASTER_TYPES = ("float32", "float64")


# --- damage ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Damage:
    """The damage of the steps of a root.

    Attributes:
        leaves: Sequence number -> stored paths of the leaves that the step has lost.
        sound_links: ``id`` of a lineage -> number of its links, from the keyframe on, of which
            every file is whole.
        proven: ``id`` of a damaged lineage -> the links that restore all the same, with the chunk
            digests there (``survey.proven_digests``).
    """

    leaves: dict[int, list[str]]
    sound_links: dict[int, int]
    proven: dict[int, dict[int, U64]]

    def restores(self, lineage: Lineage, links: int) -> bool:
        """Return whether the first ``links`` links of a lineage give the saved bytes."""
        key = id(lineage)
        return links <= self.sound_links[key] or links in self.proven.get(key, ())

    @classmethod
    def find(cls, manifests: Iterable[Manifest], chains: Survey) -> Damage:
        """Read all chains and return the damage."""
        damage = cls({}, {}, {})
        for manifest in manifests:
            if any(ref in chains.lost for ref in manifest.segments):
                damage.leaves[manifest.seq] = []
        for broken in chains.broken:
            damage.leaves.setdefault(broken.manifest.seq, []).append(broken.path)
        # Chains are read in batches, because one walk through many chains is faster than many
        # walks.
        for batch in batches(chains.lineages, BATCH_BYTES):
            for lineage, links in _count_sound_links(batch):
                damage.sound_links[id(lineage)] = links
                if links < len(lineage.links):
                    damage.proven[id(lineage)] = proven_digests(lineage)
                for use in lineage.uses:
                    if not damage.restores(lineage, use.links):
                        damage.leaves.setdefault(use.seq, []).append(lineage.path)
        return damage


def _count_sound_links(batch: list[Lineage]) -> Iterator[tuple[Lineage, int]]:
    """Count the links of each lineage, from its keyframe on, that restore the saved bytes."""
    # Links whose tables cannot be read are not tried: without chunk digests nothing could be
    # checked.
    readable = {lineage.path: len(tables(lineage).digests) for lineage in batch}
    links = dict.fromkeys(readable, 0)
    try:
        chains = {
            lineage.path: lineage.chain(readable[lineage.path])
            for lineage in batch
            if readable[lineage.path]
        }
        for _, entries, _ in read.follow_links(chains):
            for path in entries:
                links[path] += 1
    except Damaged:
        # The walk ends at the first error of any chain, so each chain must be followed alone.
        if len(batch) > 1:
            for lineage in batch:
                yield from _count_sound_links([lineage])
            return
    yield from ((lineage, links[lineage.path]) for lineage in batch)


# --- reconstruction -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a leaf, checked by its digest.

    Attributes:
        data: The bytes.
        digests: The digests of the chunks.
        source: Description of the data that they come from.
    """

    data: U8
    digests: U64
    source: str


@dataclass(frozen=True, slots=True)
class Irrecoverable:
    """A leaf that cannot be reconstructed.

    Attributes:
        chunks: Numbers of the missing chunks; empty if they are unknown.
        problem: The reason.
    """

    chunks: tuple[int, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class _ChunkVersion:
    """A chunk of a lineage after some of its links."""

    lineage: Lineage
    links: int
    chunk: int


class Reconstructor:
    """An index of all data of a root by digest.

    Args:
        chains: The chains of all steps.
        damage: Their damage.
        manifests: Manifests of all steps.
    """

    def __init__(self, chains: Survey, damage: Damage, manifests: list[Manifest]) -> None:
        self.damage = damage
        self._chains = chains
        self._manifests = manifests
        # Keys are identities, because a lineage is mutable and has no hash. ``chains`` keeps all of
        # them alive, so no identity is used twice.
        self._digests = {
            id(lineage): dict(enumerate(tables(lineage).digests, 1))
            | damage.proven.get(id(lineage), {})
            for lineage in chains.lineages
        }
        # Leaf digest -> a lineage, and the number of links, that restore the leaf.
        self._leaves: dict[str, tuple[Lineage, int]] = {}
        # Chunk digest -> versions of chunks with this digest, whether they can be read or not.
        self._chunks: dict[tuple[int, int], list[_ChunkVersion]] = {}
        for lineage in chains.lineages:
            for links, digests in sorted(self._digests[id(lineage)].items()):
                segment, entry = lineage.links[links - 1]
                if damage.restores(lineage, links):
                    self._leaves.setdefault(entry.digest, (lineage, links))
                for chunk in stored_chunks(segment, entry, lineage.spec_chunks).tolist():
                    high, low = digests[chunk].tolist()
                    self._chunks.setdefault((high, low), []).append(
                        _ChunkVersion(lineage, links, chunk)
                    )

    def reconstruct(self, manifest: Manifest, leaf: str) -> Content | Irrecoverable:
        """Return the content of a leaf that a step has lost.

        The cheapest source is tried first: an equal leaf, then single chunks, then other tiles and
        a master.
        """
        try:
            record = manifest.stored[leaf]
        except Damaged as error:  # its digest was in a table
            return Irrecoverable((), tiles.message_prefix(leaf) + str(error))
        equal = self._leaves.get(record.digest)
        if equal is not None:
            lineage, links = equal
            segment, _ = lineage.links[links - 1]
            source = f"{_describe(lineage.path)} after segment {segment.id}, which is equal"
            return Content(_load(lineage, links), self._digests[id(lineage)][links], source)
        missing: list[int] = []
        version = self._find_lineage(manifest, leaf)
        if version is not None:
            content, missing = self._assemble(*version)
            if content is not None:
                return content
        content = self._from_other_tiles(manifest, leaf)
        if content is None:
            with suppress(Damaged):  # the digests of other tiles were in a lost table
                content = self._from_master(manifest, leaf)
        if content is not None:
            return content
        problem = (
            "no other data has the digests of these chunks"
            if missing
            else "its tables cannot be read, and no other leaf of this root has its digest"
        )
        return Irrecoverable(tuple(missing), tiles.message_prefix(leaf) + problem)

    def needed_segments(self, manifest: Manifest, lost: list[str]) -> set[str]:
        """Return the segments that the other leaves of a step need."""
        segment_ids: set[str] = set()
        for lineage in self._chains.lineages:
            if lineage.path not in lost:
                for use in lineage.uses:
                    if use.seq == manifest.seq:
                        segment_ids |= {segment.id for segment, _ in lineage.links[: use.links]}
        return segment_ids

    def _find_lineage(self, manifest: Manifest, leaf: str) -> tuple[Lineage, int] | None:
        for lineage in self._chains.lineages:
            if lineage.path == leaf:
                for use in lineage.uses:
                    if use.seq == manifest.seq and use.links in self._digests[id(lineage)]:
                        return lineage, use.links
        return None

    def _assemble(self, lineage: Lineage, links: int) -> tuple[Content | None, list[int]]:
        """Assemble a leaf after some links, chunk by chunk.

        Returns:
            The content, or ``None`` and the numbers of the chunks that no other data has.
        """
        spec, digests = lineage.record.spec(lineage.path), self._digests[id(lineage)][links]
        data = np.empty(spec.raw_bytes, np.uint8)
        missing, sources = [], set()
        for chunk, (begin, end) in enumerate(byte_extents(spec, range(spec.chunk_count))):
            high, low = digests[chunk].tolist()
            # The chunk's own place comes first: of a damaged leaf most chunks are usually whole.
            candidates = [
                _ChunkVersion(lineage, links, chunk),
                *self._chunks.get((high, low), ()),
            ]
            for version in candidates:
                values = self._read_chunk(version, digests[chunk])
                if values is not None and values.size == end - begin:
                    data[begin:end] = values
                    if version.lineage is not lineage or version.links != links:
                        segment, _ = version.lineage.links[version.links - 1]
                        sources.add(f"{_describe(version.lineage.path)} after segment {segment.id}")
                    break
            else:
                missing.append(chunk)
        if not missing:
            source = ", ".join(sorted(sources)) or "its own chunks, each read alone"
            return Content(data, digests, source), []
        return self._apply_last_link(lineage, links), missing

    def _apply_last_link(self, lineage: Lineage, links: int) -> Content | None:
        """Apply a delta that is whole to the reconstructed leaf before it."""
        # If the link before restores, the delta itself is what is damaged.
        if self.damage.restores(lineage, links - 1) or links - 1 not in self._digests[id(lineage)]:
            return None
        before, _ = self._assemble(lineage, links - 1)
        if before is None:
            return None
        spec, (segment, entry) = lineage.record.spec(lineage.path), lineage.links[links - 1]
        try:
            data = apply_entry(spec, segment, entry, before.data)
        except Damaged:
            return None
        if digest_of(spec, data) != entry.digest:
            return None
        source = f"{before.source}, and the deltas after it"
        return Content(data, self._digests[id(lineage)][links], source)

    def _read_chunk(self, version: _ChunkVersion, expected_digest: U64) -> U8 | None:
        """Read one chunk, ``None`` if that fails or if it has another digest."""
        digests = self._digests[id(version.lineage)][version.links]
        chain = version.lineage.chain(version.links)
        # The chain gets the digests of this link, with which ``read_chunks`` compares the chunk.
        chain = Chain(chain.spec, chain.key, chain.deltas, digests)
        path = chain.spec.path
        try:
            data = read.read_chunks({path: chain}, {path: [version.chunk]})[path]
        except Damaged:
            return None
        return data if (digests[version.chunk] == expected_digest).all() else None

    def _from_other_tiles(self, manifest: Manifest, leaf: str) -> Content | None:
        """Assemble a leaf or tile from a step that has the same elements in other tiles.

        This is the case after the number of ranks has changed.
        """
        record, path = manifest.stored[leaf], tiles.leaf_of(leaf)
        spec, cuts = record.spec(leaf), _cuts(manifest, path)
        if cuts is None:
            return None
        box = tiles.box(cuts, tiles.numbered(cuts, leaf) if tiles.is_name(leaf) else 0)
        tried_digests = set()
        for other_step in reversed(self._manifests):
            other_cuts = _cuts(other_step, path)
            if (
                other_cuts is None
                or other_cuts == cuts
                or tiles.shape_of(other_cuts) != tiles.shape_of(cuts)
            ):
                continue
            try:
                tiling = other_step.tiling(path)
            except Damaged:  # its digests were in a table
                continue
            overlaps = list(tiles.overlaps(other_cuts, box))
            if tiling is not None and any(
                tiling.stored_dtype(overlap.number) != record.dtype for overlap in overlaps
            ):
                continue
            parts = [
                (
                    overlap,
                    other_step.leaves[path] if tiling is None else tiling.record(overlap.number),
                )
                for overlap in overlaps
            ]
            # Neighbouring steps often share their tiles; each combination is tried once.
            digests = tuple(part.digest for _, part in parts)
            if digests in tried_digests or any(
                part.dtype != record.dtype or part.digest not in self._leaves for _, part in parts
            ):
                continue
            tried_digests.add(digests)
            values = np.empty(record.shape, spec.element.numpy)
            for overlap, part in parts:
                tile = _load(*self._leaves[part.digest]).view(values.dtype).reshape(part.shape)
                values[overlap.in_box] = tile[overlap.in_tile]
            data = values.reshape(-1).view(np.uint8)
            chunks = all_chunk_digests(spec, data)
            if leaf_digest(chunks) == record.digest:
                source = f"leaf {path!r} of step {other_step.step}, which has it in other tiles"
                return Content(data, chunks, source)
        return None

    def _from_master(self, manifest: Manifest, leaf: str) -> Content | None:
        """Compute a leaf as the cast of another leaf of its step, as working copies are."""
        record = manifest.stored[leaf]
        spec = record.spec(leaf)
        # Only these types are working copies of a wider master.
        if record.dtype not in ("bfloat16", "float16", "float32"):
            return None
        for path, master in manifest.stored.items():
            if (
                master.dtype not in _MASTER_TYPES
                or master.dtype == record.dtype
                or master.shape != record.shape
                or master.digest not in self._leaves
            ):
                continue
            values = _load(*self._leaves[master.digest]).view(master.spec(path).element.numpy)
            data = derivation.cast(values, spec.element.numpy).view(np.uint8)
            digests = all_chunk_digests(spec, data)
            # Many leaves have the same shape. The digest alone decides whether this one is the
            # master.
            if leaf_digest(digests) == record.digest:
                source = f"{_describe(path)} of the same step, rounded to {record.dtype}"
                return Content(data, digests, source)
        return None


def _cuts(manifest: Manifest, path: str) -> tiles.Cuts | None:
    """Return the tiling of a stored leaf.

    ``None`` for a leaf that is not stored, or that has no elements or no axes.
    """
    if path in manifest.tiles:
        return manifest.tiles[path].cuts
    shape = manifest.leaves[path].shape if path in manifest.leaves else ()
    return tuple((0, size) for size in shape) if shape and 0 not in shape else None


def _describe(stored_path: str) -> str:
    """Name a leaf, and its tile if it is one."""
    tile = (
        f"{tiles.message_prefix(stored_path).removesuffix(': ')} of "
        if tiles.is_name(stored_path)
        else ""
    )
    return f"{tile}leaf {tiles.leaf_of(stored_path)!r}"


def _load(lineage: Lineage, links: int) -> U8:
    """Return the bytes after some links, which restore. The files may have changed since."""
    chain, (segment, entry) = lineage.chain(links), lineage.links[links - 1]
    data = read.read_unverified(chain)
    if digest_of(chain.spec, data) != entry.digest:
        raise Damaged(
            f"leaf {lineage.path!r} has changed in {segment.path} while it was repaired",
            file=segment.path,
            leaf=lineage.path,
        )
    return data
