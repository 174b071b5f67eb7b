"""The kinds of leaves that a restore meets, behind one interface.

A leaf is one stored chain (``Chain``), in tiles (``Tiled``), or computed from other leaves
(``GroupPart``, ``Formula``). A tile is stored or computed like a leaf. For any box of itself, each
kind can name the chunks of chains that it needs, and compute the values after those were read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltacheck.codec import adam_law, derivation
from deltacheck.codec.base import U8, U64
from deltacheck.codec.derivation import Derived
from deltacheck.errors import Damaged
from deltacheck.leaf import tiles
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, Cuts
from deltacheck.policy.keyframes import LEAST_WHOLE_BYTES
from deltacheck.restore.content import (
    Array,
    Loaded,
    as_array,
    box_bytes,
    chunk_bytes,
    chunks_of_box,
    cut_box,
    element_runs,
)
from deltacheck.store.manifest import LeafEntry
from deltacheck.store.segment import Segment


@dataclass(frozen=True, slots=True)
class LoadedChunks:
    """Chunks of chains that were read and verified, by stored path.

    Attributes:
        chunks: Numbers of the chunks, ascending.
        data: Their bytes, one chunk after the other.
        into: Memory for leaves that are computed whole.
        computed: Ranges that were computed already, by path, first and stop. Several leaves may be
            computed from the same one.
    """

    chunks: Mapping[str, list[int]]
    data: Mapping[str, U8]
    into: Mapping[str, U8]
    computed: dict[tuple[str, int, int], Array] = field(default_factory=dict)


class Leaf(ABC):
    """A resolved leaf: the chains that it comes from, and the way from their chunks to its values.

    Boxes are bounded and of step 1. ``chunk_numbers`` maps the stored path of each chain to the
    numbers of its chunks.
    """

    # Without it, the subclasses would have a `__dict__` in spite of their slots.
    __slots__ = ()

    spec: LeafSpec

    @property
    def tile_cuts(self) -> Cuts | None:
        """Return how the leaf is cut into tiles; ``None`` if it is not."""
        return None

    @property
    def parts(self) -> Sequence[Leaf]:
        """Return the leaves that it is stored as: its tiles in order, or itself."""
        return (self,)

    @property
    def chunk_digests(self) -> U64 | None:
        """Return the digests of its chunks, ``(chunks, 2)``; ``None`` if no segment has them."""
        return None

    @property
    def is_verified_whole(self) -> bool:
        """Return True if only the digest of the whole leaf proves the computed values."""
        return False

    @abstractmethod
    def stored_chains(self) -> Iterator[Chain]:
        """Yield the chains that the leaf is read from."""

    @abstractmethod
    def add_needed(self, box: Box, chunk_numbers: dict[str, set[int]]) -> None:
        """Add the chunks that a box comes from."""

    @abstractmethod
    def computed_bytes(self, box: Box) -> int:
        """Return the memory that a box takes beside the chunks of its chains."""

    @abstractmethod
    def values(self, box: Box, loaded: LoadedChunks) -> Array:
        """Return a box; perhaps a view of loaded memory."""

    def fill(self, box: Box, out: Array, loaded: LoadedChunks) -> None:
        """Copy a box into ``out``, which has its shape."""
        out[...] = self.values(box, loaded)

    def copied(self, box: Box, loaded: LoadedChunks) -> Array:
        """Return a box in memory of its own."""
        out = np.empty([s.stop - s.start for s in box], self.spec.element.numpy)
        self.fill(box, out, loaded)
        return out


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
        # A keyframe without `key` is in encoded form (docs/reference/format.md, section 2): its
        # rows are decoded like those of a delta.
        return ((self.key,) if self.held is None and self.key[1].key is None else ()) + self.deltas

    @property
    def is_stored_whole(self) -> bool:
        """Return True if each save stores the leaf whole, so that the next one needs no copy."""
        # Other keyframes are arrays, and those of small leaves are.
        return (
            not self.deltas and self.key[1].key is None and self.spec.raw_bytes >= LEAST_WHOLE_BYTES
        )

    @property
    def delta_segments(self) -> list[str]:
        """Return the identifiers of the segments that hold the deltas, oldest first."""
        return [segment.id for segment, _ in self.deltas]

    @property
    def delta_bytes(self) -> list[int]:
        """Return the bytes of the streams of each delta, which a restore decodes."""
        return [segment.delta_bytes(entry) for segment, entry in self.deltas]

    @property
    def chunk_digests(self) -> U64 | None:
        return self.digests

    def stored_chains(self) -> Iterator[Chain]:
        yield self

    def add_needed(self, box: Box, chunk_numbers: dict[str, set[int]]) -> None:
        chunk_numbers[self.spec.path].update(chunks_of_box(self.spec, box))

    def computed_bytes(self, box: Box) -> int:
        return 0

    def values(self, box: Box, loaded: LoadedChunks) -> Array:
        spec, data = self.spec, loaded.data[self.spec.path]
        # Chunks are runs of elements, so if the box is all that was loaded, it has the same order.
        if data.size == box_bytes(spec, box):
            return data.view(spec.element.numpy).reshape([s.stop - s.start for s in box])
        item = Loaded(spec, loaded.chunks[spec.path], data)
        # Most tiles are read whole. Indexing them is faster than a walk over their chunks.
        is_all = len(item.chunks) == spec.chunk_count
        return as_array(item)[box] if is_all else cut_box(item, box)


@dataclass(frozen=True, slots=True)
class Tiled(Leaf):
    """A leaf in tiles, each of which is stored or computed like a leaf.

    Attributes:
        spec: The leaf.
        cuts: The cuts along each axis, which are all its tiles.
        tile_leaves: Those tiles that are needed, by number: chains or formulas.
    """

    spec: LeafSpec
    cuts: Cuts
    tile_leaves: Mapping[int, Leaf]

    @property
    def tile_cuts(self) -> Cuts | None:
        return self.cuts

    @property
    def parts(self) -> Sequence[Leaf]:
        return [self.tile_leaves[number] for number in sorted(self.tile_leaves)]

    @property
    def is_verified_whole(self) -> bool:
        return any(tile.is_verified_whole for tile in self.tile_leaves.values())

    def stored_chains(self) -> Iterator[Chain]:
        for tile in self.tile_leaves.values():
            yield from tile.stored_chains()

    def add_needed(self, box: Box, chunk_numbers: dict[str, set[int]]) -> None:
        for overlap in tiles.overlaps(self.cuts, box):
            self.tile_leaves[overlap.number].add_needed(overlap.in_tile, chunk_numbers)

    def computed_bytes(self, box: Box) -> int:
        # A box is copied from the tiles, and those that are computed take memory beside it.
        return box_bytes(self.spec, box) + sum(
            self.tile_leaves[overlap.number].computed_bytes(overlap.in_tile)
            for overlap in tiles.overlaps(self.cuts, box)
        )

    def values(self, box: Box, loaded: LoadedChunks) -> Array:
        return self.copied(box, loaded)

    def fill(self, box: Box, out: Array, loaded: LoadedChunks) -> None:
        # The tiles cover the leaf without gaps, so every element is written.
        for overlap in tiles.overlaps(self.cuts, box):
            tile = self.tile_leaves[overlap.number]
            tile.fill(overlap.in_tile, out[overlap.in_box], loaded)


class _Computed(Leaf):
    """A leaf that is computed element by element, in runs of elements in C order.

    Attributes:
        derived: The rule.
    """

    __slots__ = ()

    derived: Derived

    @property
    def is_verified_whole(self) -> bool:
        return bool(self.derived.digest)

    def add_needed(self, box: Box, chunk_numbers: dict[str, set[int]]) -> None:
        for first, stop in element_runs(self.spec, chunks_of_box(self.spec, box)):
            for leaf, part in self.inputs(first, stop):
                leaf.add_needed(part, chunk_numbers)

    def computed_bytes(self, box: Box) -> int:
        return chunk_bytes(self.spec, chunks_of_box(self.spec, box))

    def values(self, box: Box, loaded: LoadedChunks) -> Array:
        spec, chunks = self.spec, chunks_of_box(self.spec, box)
        runs = [self.computed(first, stop, loaded) for first, stop in element_runs(spec, chunks)]
        # The empty array stands for a box without elements: `concatenate` refuses an empty list.
        empty = np.empty(0, spec.element.numpy)
        values = runs[0] if len(runs) == 1 else np.concatenate([empty, *runs])
        # The digest is that of the whole leaf. A part is as certain as the content that it follows
        # from.
        if self.derived.digest and len(chunks) == spec.chunk_count:
            self._check_digest(values.view(np.uint8))
        if values.nbytes == box_bytes(spec, box):
            return values.reshape([s.stop - s.start for s in box])
        return cut_box(Loaded(spec, chunks, values.view(np.uint8)), box)

    def _check_digest(self, values: U8) -> None:
        digest = digest_of(self.spec, values)
        if digest != self.derived.digest:
            origin, remedy = self.origin
            raise Damaged(
                f"leaf {self.spec.path!r} {origin} gives digest {digest} where"
                f" {self.derived.digest} was saved{remedy}",
                leaf=self.spec.path,
            )

    def out_of(self, count: int, loaded: LoadedChunks) -> Array | None:
        """Return the caller's memory, which is for the whole leaf; a part gets new memory."""
        memory = loaded.into.get(self.spec.path)
        if memory is None or memory.nbytes != count * self.spec.element.item_bytes:
            return None
        return memory.view(self.spec.element.numpy)

    @property
    @abstractmethod
    def origin(self) -> tuple[str, str]:
        """Return how it follows from others, and a remedy if it does not, for messages."""

    @abstractmethod
    def inputs(self, first: int, stop: int) -> Iterator[tuple[Leaf, Box]]:
        """Yield the leaves, and the boxes of them, that a run follows from."""

    @abstractmethod
    def computed(self, first: int, stop: int, loaded: LoadedChunks) -> Array:
        """Return the elements of a run, 1-D."""


@dataclass(frozen=True, slots=True)
class GroupPart(_Computed):
    """A leaf that is stored as a part of a group (``format.md``, section 4.6).

    Attributes:
        spec: The leaf.
        derived: The rule.
        group: The chain of the group, of which each chunk is a block of three parts.
    """

    spec: LeafSpec
    derived: Derived
    group: Chain

    @property
    def origin(self) -> tuple[str, str]:
        return f"is part {self.derived.part} of the group {self.group.spec.path!r}, which", ""

    def stored_chains(self) -> Iterator[Chain]:
        yield self.group

    def inputs(self, first: int, stop: int) -> Iterator[tuple[Leaf, Box]]:
        _, parts, size = self.group.spec.shape
        blocks = slice(first // size, -(-stop // size))
        yield self.group, (blocks, slice(0, parts), slice(0, size))

    def computed(self, first: int, stop: int, loaded: LoadedChunks) -> Array:
        ((group, box),) = self.inputs(first, stop)
        base = box[0].start * box[2].stop
        content, out = group.values(box, loaded), self.out_of(stop - first, loaded)
        part: Array = adam_law.part_of(content, self.derived.part, first - base, stop - base, out)
        return part


@dataclass(frozen=True, slots=True)
class Formula(_Computed):
    """A leaf that is computed.

    Attributes:
        spec: The leaf.
        derived: The formula.
        codes: The chain of codes that is stored under the leaf's own path, if the formula has any.
        source: The other leaf of the step that the formula reads, if there is one.
    """

    spec: LeafSpec
    derived: Derived
    codes: Chain | None
    source: Leaf | None

    @property
    def origin(self) -> tuple[str, str]:
        return (
            f"follows from {self.derived.of!r} by {self.derived.how}, but that",
            ": this machine computes other bits than the machine that saved it. Restore on a"
            " machine of that kind",
        )

    def stored_chains(self) -> Iterator[Chain]:
        for leaf in (self.codes, self.source):
            if leaf is not None:
                yield from leaf.stored_chains()

    def inputs(self, first: int, stop: int) -> Iterator[tuple[Leaf, Box]]:
        # Formulas work element by element, so the run is the same in all of their inputs.
        for leaf in (self.codes, self.source):
            if leaf is not None:
                for box in tiles.boxes_of_range(leaf.spec.shape, first, stop):
                    yield leaf, box

    def computed(self, first: int, stop: int, loaded: LoadedChunks) -> Array:
        key = (self.spec.path, first, stop)
        if key in loaded.computed:
            return loaded.computed[key]
        boxes = list(self.inputs(first, stop))

        def run_of(leaf: Leaf | None) -> Array | None:
            runs = [leaf.values(box, loaded).reshape(-1) for owner, box in boxes if owner is leaf]
            return None if leaf is None else runs[0] if len(runs) == 1 else np.concatenate(runs)

        codes, source = run_of(self.codes), run_of(self.source)
        out = self.out_of(stop - first, loaded)
        try:
            values = derivation.compute(self.derived, codes, source, first, out)
        except ValueError as error:  # a code that stands for no value
            raise Damaged(
                f"leaf {self.spec.path!r}: its stored codes do not follow the format: {error}"
            ) from error
        loaded.computed[key] = values
        return values
