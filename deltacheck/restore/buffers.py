"""Memory that receives the chunks of leaves, and reads that are started ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from deltacheck.codec.base import U8, U64
from deltacheck.leaf.spec import LeafSpec
from deltacheck.restore.chain import Chain
from deltacheck.restore.content import byte_extents, chunk_bytes

# Leaves from this size on have memory of their own. Larger: fewer calls; whoever keeps one small
# leaf keeps its whole block.
_ALONE_BYTES = 1 << 20
_BLOCK_BYTES = 16 << 20
# Of reads that are started ahead of the decoder. Larger: more of them overlap; more memory beside
# the result.
_AHEAD_BYTES = 32 << 20


class Filling(NamedTuple):
    """Chunks of a stored leaf on their way: from number ``first`` on in a block, ``data`` being
    their memory there.
    """

    chain: Chain
    chunks: list[int]
    block: Block
    first: int
    data: U8

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) == self.chain.spec.chunk_count


@dataclass(slots=True, eq=False)
class Block:
    """Memory that chunks of leaves share, one leaf after the other, so that one call decodes or
    hashes
    many small ones.

    ``bounds``: of its chunks, in words. ``expected``: the digests that they must have in the end.
    """

    word_bytes: int
    data: U8
    bounds: U64
    expected: U64


def allocate_blocks(
    chains: Mapping[str, Chain], chunks: Mapping[str, list[int]]
) -> list[list[Filling]]:
    """Memory for the named chunks, block by block. Small leaves of one element size share it, in
    the order in which they are stored.
    """
    groups: list[list[str]] = []
    filling: dict[tuple[int, int], tuple[list[str], int]] = {}
    for path in sorted(chains, key=lambda path: _place(chains[path])):
        chain = chains[path]
        size = chunk_bytes(chain.spec, chunks[path])
        if size >= _ALONE_BYTES:
            groups.append([path])
            continue
        kind = (
            chain.spec.element.item_bytes,
            chain.spec.word_bytes,
        )  # no other: each leaf then begins at a whole element
        group, filled = filling.get(kind, ([], 0))
        if not group or filled + size > _BLOCK_BYTES:
            group, filled = [], 0
            groups.append(group)
        group.append(path)
        filling[kind] = group, filled + size
    return [_block([(chains[path], chunks[path]) for path in group]) for group in groups]


def _place(chain: Chain) -> tuple[int, int]:
    """Sorts leaves as their newest rows lie; saves write them in much the same order every time."""
    return chain.encoded[-1][1].delta[0][:2] if chain.encoded else (-1, 0)


def _block(leaves: Sequence[tuple[Chain, list[int]]]) -> list[Filling]:
    sizes = [_sizes(chain.spec, numbers) for chain, numbers in leaves]
    bounds = np.concatenate(
        [np.zeros(1, np.uint64), np.cumsum(np.concatenate(sizes), dtype=np.uint64)]
    )
    expected = [c.digests if len(n) == c.spec.chunk_count else c.digests[n] for c, n in leaves]
    word_bytes = leaves[0][0].spec.word_bytes
    block = Block(
        word_bytes,
        np.empty(int(bounds[-1]) * word_bytes, np.uint8),
        bounds,
        np.concatenate(expected),
    )
    items, first = [], 0
    for chain, numbers in leaves:
        begin, end = int(bounds[first]) * word_bytes, int(bounds[first + len(numbers)]) * word_bytes
        items.append(Filling(chain, numbers, block, first, block.data[begin:end]))
        first += len(numbers)
    return items


def _sizes(spec: LeafSpec, chunks: list[int]) -> U64:
    """Words of some chunks."""
    words: U64 = np.diff(spec.bounds())
    return words if len(chunks) == spec.chunk_count else words[chunks]


def chosen_bytes(item: Filling, whole: U8) -> U8:
    """The wanted chunks of a leaf, one after the other, from its whole bytes."""
    if item.is_whole:
        return whole
    every = byte_extents(item.chain.spec, range(item.chain.spec.chunk_count))
    return np.concatenate([whole[every[chunk][0] : every[chunk][1]] for chunk in item.chunks])


class _Read(Protocol):
    """A read that knows its size."""

    @property
    def size(self) -> int:
        """Return the bytes that it will hold."""


_ReadT = TypeVar("_ReadT", bound=_Read)
_Begun = TypeVar("_Begun")


def start_ahead(
    reads: Sequence[_ReadT], start: Callable[[_ReadT], _Begun]
) -> Iterator[tuple[_ReadT, _Begun]]:
    """What to read, each with what ``start`` gave: started ahead, at least one and as many as fit,
    so
    that the disk works while the decoder does.
    """
    started: deque[tuple[_ReadT, _Begun, int]] = deque()
    held = following = 0
    while following < len(reads) or started:
        while following < len(reads) and (
            len(started) < 2 or held + reads[following].size <= _AHEAD_BYTES
        ):
            read = reads[following]
            started.append((read, start(read), read.size))
            held += read.size
            following += 1
        read, begun, size = started.popleft()
        yield read, begun
        held -= size
