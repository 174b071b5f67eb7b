"""Memory that receives the chunks of leaves, and reads that are started ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deltacheck.codec import host_memory
from deltacheck.codec.base import U8, U64
from deltacheck.leaf.spec import batches
from deltacheck.restore.content import byte_extents, chunk_bytes
from deltacheck.restore.leaf_kinds import Chain

# Leaves of this size and above have their own memory. Larger: fewer calls of the decoder, but a
# caller that keeps one small leaf keeps the whole block that it lies in.
_ALONE_BYTES = 1 << 20
# The largest block that small leaves share. Larger: fewer calls of the decoder and of the hash;
# smaller: less memory that one kept leaf holds.
_BLOCK_BYTES = 16 << 20
# Copies of about this size together are one task of a thread.
_COPIED_BYTES = 4 << 20
_COPY_THREADS = 4  # more would wait for the memory


class Filling(NamedTuple):
    """Chunks of a stored leaf while they are read into a block.

    Attributes:
        chain: The leaf.
        chunks: Numbers of its chunks to read, ascending.
        block: The block that receives them.
        first: The number of the first of them in the block.
        data: Their memory in the block.
    """

    chain: Chain
    chunks: list[int]
    block: Block
    first: int
    data: U8

    @property
    def is_whole(self) -> bool:
        """Return True if all chunks of the leaf are read."""
        return len(self.chunks) == self.chain.spec.chunk_count


# Compared by identity: a comparison of two arrays has no truth value.
@dataclass(slots=True, eq=False)
class Block:
    """Memory that several leaves share, so that one call decodes or hashes many small ones.

    Attributes:
        word_bytes: Bytes of a word, the same for all of its leaves.
        data: The bytes, one leaf after the other.
        bounds: The offsets of the chunks in words, ``(chunks + 1,)``.
        expected: The digests that the chunks must have in the end, ``(chunks, 2)``.
    """

    word_bytes: int
    data: U8
    bounds: U64
    expected: U64


def allocate_blocks(
    chains: Mapping[str, Chain], chunks: Mapping[str, list[int]] | None = None
) -> list[list[Filling]]:
    """Allocate memory for some or all chunks of leaves, and group small leaves into shared blocks.

    Leaves of a block have the same element size and follow each other as they are stored, so that
    neighbours on disk are also neighbours in memory.
    """
    if chunks is None:
        chunks = {path: list(range(chain.spec.chunk_count)) for path, chain in chains.items()}
    groups: list[list[str]] = []
    filling: dict[tuple[int, int], tuple[list[str], int]] = {}

    def stored_position(path: str) -> tuple[int, int]:
        """Return the part and the row of the newest delta: saves write leaves in similar orders."""
        encoded = chains[path].encoded
        return encoded[-1][1].delta[0][:2] if encoded else (-1, 0)

    for path in sorted(chains, key=stored_position):
        chain = chains[path]
        size = chunk_bytes(chain.spec, chunks[path])
        if size >= _ALONE_BYTES:
            groups.append([path])
            continue
        # Only leaves of one element size share a block: each then begins at a whole element.
        kind = (chain.spec.element.item_bytes, chain.spec.word_bytes)
        group, filled_bytes = filling.get(kind, ([], 0))
        if not group or filled_bytes + size > _BLOCK_BYTES:
            group, filled_bytes = [], 0
            groups.append(group)
        group.append(path)
        filling[kind] = group, filled_bytes + size
    return [_block([(chains[path], chunks[path]) for path in group]) for group in groups]


def _block(leaves: Sequence[tuple[Chain, list[int]]]) -> list[Filling]:
    """Allocate a block for some chunks of leaves."""
    sizes, expected = [], []
    for chain, numbers in leaves:
        # The common case needs no selection, which is slow for a large leaf.
        rows = slice(None) if len(numbers) == chain.spec.chunk_count else numbers
        sizes.append(np.diff(chain.spec.bounds())[rows])
        expected.append(chain.digests[rows])
    bounds = np.concatenate(
        [np.zeros(1, np.uint64), np.cumsum(np.concatenate(sizes), dtype=np.uint64)]
    )
    word_bytes = leaves[0][0].spec.word_bytes
    # The memory is not cleared: keyframes fill it, and every chunk is verified before a caller gets
    # it.
    block = Block(
        word_bytes,
        host_memory.empty(int(bounds[-1]) * word_bytes),
        bounds,
        np.concatenate(expected),
    )
    items, first = [], 0
    for chain, numbers in leaves:
        begin, end = int(bounds[first]) * word_bytes, int(bounds[first + len(numbers)]) * word_bytes
        items.append(Filling(chain, numbers, block, first, block.data[begin:end]))
        first += len(numbers)
    return items


def extents_of(item: Filling) -> list[tuple[int, int, int]]:
    """Return the byte ranges of a leaf that an item has, and the offset of each in its memory."""
    spec = item.chain.spec
    # The common case needs no list of extents, which is long for a large leaf.
    if item.is_whole:
        return [(0, spec.raw_bytes, 0)]
    of_leaf = byte_extents(spec, range(spec.chunk_count))
    of_item = byte_extents(spec, item.chunks)
    return [
        (*of_leaf[chunk], begin) for chunk, (begin, _) in zip(item.chunks, of_item, strict=True)
    ]


def copy_all(copies: Sequence[tuple[U8, U8]]) -> None:
    """Copy bytes into other memory, on several threads if there are many.

    Args:
        copies: Targets and sources, uint8, 1-D, pairwise of equal size.
    """
    pieces = [
        (target[begin : begin + _COPIED_BYTES], source[begin : begin + _COPIED_BYTES])
        for target, source in copies
        for begin in range(0, target.size, _COPIED_BYTES)
    ]

    def copy(batch: Sequence[tuple[U8, U8]]) -> None:
        for target, source in batch:
            np.copyto(target, source)

    with ThreadPoolExecutor(_COPY_THREADS) as pool:
        # NumPy lets other threads run while it copies.
        list(pool.map(copy, batches(pieces, lambda piece: piece[0].size, _COPIED_BYTES)))
