"""The kinds of leaves that a restore meets, behind one interface.

A leaf is one stored chain (``chain.Chain``), in tiles (``Tiled``), or computed from other leaves
(``Formula``). A tile is stored or computed like a leaf. Each kind can name the chunks of chains
that it needs, and compute its content after those chunks were read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deltacheck.codec import adam_law, derivation
from deltacheck.codec.base import U8, U64
from deltacheck.codec.derivation import Derived
from deltacheck.errors import Damaged
from deltacheck.leaf import tiles
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, Cuts
from deltacheck.restore.content import (
    Array,
    Loaded,
    box_bytes,
    chunk_bytes,
    chunks_of_box,
    cut_box,
    element_runs,
)

# `chain` imports this module, so an import at run time would be a cycle.
if TYPE_CHECKING:
    from deltacheck.restore.chain import Chain


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

    Ranges count the elements of the leaf in C order. ``chunk_numbers`` maps the stored path of
    each chain to the numbers of its chunks.
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
    def add_needed(self, first: int, stop: int, chunk_numbers: dict[str, set[int]]) -> None:
        """Add the chunks that elements ``first`` to ``stop`` come from."""

    def add_needed_box(self, box: Box, chunk_numbers: dict[str, set[int]]) -> None:
        """Add the chunks that a box comes from."""
        for first, stop in element_runs(self.spec, chunks_of_box(self.spec, box)):
            self.add_needed(first, stop, chunk_numbers)

    def computed_bytes(self, chunks: Sequence[int]) -> int:
        """Return the memory that chunks of the leaf take beside the chunks of its chains."""
        return chunk_bytes(self.spec, chunks)

    def computed_box_bytes(self, box: Box) -> int:
        """Return the memory that the chunks of a box take beside the chunks of its chains."""
        return self.computed_bytes(chunks_of_box(self.spec, box))

    @abstractmethod
    def elements(self, first: int, stop: int, loaded: LoadedChunks) -> Array:
        """Return elements ``first`` to ``stop``, 1-D; perhaps a view of loaded memory."""

    def chunk_values(self, chunks: list[int], loaded: LoadedChunks) -> U8:
        """Return the bytes of some chunks, one after the other."""
        runs = [
            self.elements(first, stop, loaded).view(np.uint8)
            for first, stop in element_runs(self.spec, chunks)
        ]
        # The empty array stands for a leaf without elements: `concatenate` refuses an empty list.
        return runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.uint8), *runs])

    def box_values(self, box: Box, loaded: LoadedChunks) -> Array:
        """Return a box."""
        chunks = chunks_of_box(self.spec, box)
        return cut_box(Loaded(self.spec, chunks, self.chunk_values(chunks, loaded)), box)

    def fill_box(self, box: Box, out: Array, loaded: LoadedChunks) -> None:
        """Copy a box into ``out``, which has its shape."""
        out[...] = self.box_values(box, loaded)


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

    def add_needed(self, first: int, stop: int, chunk_numbers: dict[str, set[int]]) -> None:
        for box in tiles.boxes_of_range(self.spec.shape, first, stop):
            self.add_needed_box(box, chunk_numbers)

    def add_needed_box(self, box: Box, chunk_numbers: dict[str, set[int]]) -> None:
        for overlap in tiles.overlaps(self.cuts, box):
            self.tile_leaves[overlap.number].add_needed_box(overlap.in_tile, chunk_numbers)

    def computed_bytes(self, chunks: Sequence[int]) -> int:
        # A tile that is computed takes memory beside that of the leaf; it is computed whole.
        return chunk_bytes(self.spec, chunks) + sum(
            tile.computed_bytes(range(tile.spec.chunk_count)) for tile in self.tile_leaves.values()
        )

    def computed_box_bytes(self, box: Box) -> int:
        # A box is copied from the tiles directly, so it takes no whole chunks of the leaf.
        return box_bytes(self.spec, box) + sum(
            self.tile_leaves[overlap.number].computed_box_bytes(overlap.in_tile)
            for overlap in tiles.overlaps(self.cuts, box)
        )

    def elements(self, first: int, stop: int, loaded: LoadedChunks) -> Array:
        # The tiles cover the leaf without gaps, so every element is written.
        values = np.empty(stop - first, self.spec.element.numpy)
        begin = 0
        for box in tiles.boxes_of_range(self.spec.shape, first, stop):
            shape = [s.stop - s.start for s in box]
            end = begin + math.prod(shape)
            self._fill(box, values[begin:end].reshape(shape), loaded)
            begin = end
        return values

    def box_values(self, box: Box, loaded: LoadedChunks) -> Array:
        values = np.empty([s.stop - s.start for s in box], self.spec.element.numpy)
        self._fill(box, values, loaded)
        return values

    def _fill(self, box: Box, out: Array, loaded: LoadedChunks) -> None:
        """Copy a box from the tiles that it touches into ``out``, which has its shape."""
        for overlap in tiles.overlaps(self.cuts, box):
            tile = self.tile_leaves[overlap.number]
            tile.fill_box(overlap.in_tile, out[overlap.in_box], loaded)


@dataclass(frozen=True, slots=True)
class GroupPart(Leaf):
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
    def is_verified_whole(self) -> bool:
        return bool(self.derived.digest)

    def stored_chains(self) -> Iterator[Chain]:
        yield self.group

    def _blocks(self, first: int, stop: int) -> range:
        """Return the blocks that a range of elements lies in."""
        size = self.group.spec.shape[2]
        return range(first // size, -(-stop // size)) if stop > first else range(0)

    def add_needed(self, first: int, stop: int, chunk_numbers: dict[str, set[int]]) -> None:
        blocks, stride = self._blocks(first, stop), math.prod(self.group.spec.shape[1:])
        if blocks:
            self.group.add_needed(blocks.start * stride, blocks.stop * stride, chunk_numbers)

    def elements(self, first: int, stop: int, loaded: LoadedChunks) -> Array:
        shape = self.group.spec.shape
        blocks, stride = self._blocks(first, stop), math.prod(shape[1:])
        memory = loaded.into.get(self.spec.path)
        size = (stop - first) * self.spec.element.item_bytes
        out = None if memory is None or memory.nbytes != size else memory.view(np.float32)
        if not blocks:
            return np.empty(0, np.float32)
        content = self.group.elements(blocks.start * stride, blocks.stop * stride, loaded)
        base = blocks.start * shape[2]
        values: Array = adam_law.part_of(
            content.reshape(-1, *shape[1:]), self.derived.part, first - base, stop - base, out
        )
        return values

    def chunk_values(self, chunks: list[int], loaded: LoadedChunks) -> U8:
        # Named explicitly: dataclass(slots=True) makes a new class, in which super() has no cell.
        values = Leaf.chunk_values(self, chunks, loaded)
        if self.derived.digest and len(chunks) == self.spec.chunk_count:
            digest = digest_of(self.spec, values)
            if digest != self.derived.digest:
                raise Damaged(
                    f"leaf {self.spec.path!r} is part {self.derived.part} of the group"
                    f" {self.group.spec.path!r}, which gives digest {digest} where"
                    f" {self.derived.digest} was saved",
                    leaf=self.spec.path,
                )
        return values


@dataclass(frozen=True, slots=True)
class Formula(Leaf):
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
    def is_verified_whole(self) -> bool:
        return bool(self.derived.digest)

    def stored_chains(self) -> Iterator[Chain]:
        for part in (self.codes, self.source):
            if part is not None:
                yield from part.stored_chains()

    def add_needed(self, first: int, stop: int, chunk_numbers: dict[str, set[int]]) -> None:
        # Formulas work element by element, so the range is the same in all of their inputs.
        for part in (self.codes, self.source):
            if part is not None:
                part.add_needed(first, stop, chunk_numbers)

    def elements(self, first: int, stop: int, loaded: LoadedChunks) -> Array:
        spec = self.spec
        key = (spec.path, first, stop)
        if key in loaded.computed:
            return loaded.computed[key]
        codes, source = (
            None if part is None else part.elements(first, stop, loaded)
            for part in (self.codes, self.source)
        )
        memory = loaded.into.get(spec.path)
        size = (stop - first) * spec.element.item_bytes
        # The caller's memory is for the whole leaf; a part of it gets new memory.
        out = None if memory is None or memory.nbytes != size else memory.view(spec.element.numpy)
        try:
            values = derivation.compute(self.derived, codes, source, first, out)
        except ValueError as error:  # a code that stands for no value
            raise Damaged(
                f"leaf {spec.path!r}: its stored codes do not follow the format: {error}"
            ) from error
        loaded.computed[key] = values
        return values

    def chunk_values(self, chunks: list[int], loaded: LoadedChunks) -> U8:
        # Named explicitly: dataclass(slots=True) makes a new class, in which super() has no cell.
        values = Leaf.chunk_values(self, chunks, loaded)
        # The digest is that of the whole leaf. A part is as certain as the content that it follows
        # from.
        if self.derived.digest and len(chunks) == self.spec.chunk_count:
            self._check_digest(values)
        return values

    def _check_digest(self, values: U8) -> None:
        digest = digest_of(self.spec, values)
        if digest != self.derived.digest:
            raise Damaged(
                f"leaf {self.spec.path!r} follows from {self.derived.of!r} by {self.derived.how},"
                f" but that gives digest {digest} where {self.derived.digest} was saved: this"
                " machine computes other bits than the machine that saved it. Restore on a machine"
                " of that kind",
                leaf=self.spec.path,
            )
