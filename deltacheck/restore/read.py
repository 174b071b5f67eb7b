"""Read, decode and verify chunks of stored leaves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.errors import Damaged
from deltacheck.leaf import grid, limits, tiles
from deltacheck.leaf.digest import chunk_digests
from deltacheck.restore.buffers import Filling, allocate_blocks, extents_of
from deltacheck.restore.content import byte_extents
from deltacheck.restore.deltas import Deltas
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.files.arrays import NO_BYTES, Reading
from deltacheck.store.files.native_files import JoinedRead, StoredArray
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import KeyframeAt, LeafEntry
from deltacheck.store.segment import Segment, load_tables

_HASH_THREADS = 4


def read_chunks(
    chains: Mapping[str, Chain], chunks: Mapping[str, list[int]] | None = None
) -> dict[str, U8]:
    """Read, decode and verify chunks of stored leaves.

    The caller must have checked that the result fits into memory.

    Args:
        chains: The leaves, by stored path.
        chunks: Numbers of the chunks to read of each leaf, ascending; ``None``: whole leaves.

    Returns:
        For each leaf the bytes of its chunks, one after the other.

    Raises:
        Damaged: Content differs from what was saved; names leaf and file.
    """
    limits.check_time()
    blocks = allocate_blocks(chains, chunks)
    items = {item.chain.spec.path: item for block in blocks for item in block}
    _fill(items)
    _verify(blocks)
    return {path: items[path].data for path in chains}


def read_across(
    before: Mapping[str, Chain], after: Mapping[str, Chain], chunks: Mapping[str, list[int]]
) -> tuple[dict[str, U8], dict[str, U8]]:
    """Read, decode and verify chunks of leaves at two links of their chains.

    Args:
        before: The leaves up to the first link, by stored path.
        after: The same leaves, with the same links and further deltas.
        chunks: Numbers of the chunks to read of each leaf, ascending.

    Returns:
        For each leaf the bytes of its chunks at the first link, and those at the last one.

    Raises:
        Damaged: Content differs from what was saved; names leaf and file.
    """
    earlier = read_chunks(before, chunks)
    runs = {
        path: dataclasses.replace(
            chain, deltas=chain.deltas[len(before[path].deltas) :], held=earlier[path]
        )
        for path, chain in after.items()
    }
    blocks = allocate_blocks(runs, chunks)
    items = {item.chain.spec.path: item for block in blocks for item in block}
    with contextlib.closing(Deltas(items)) as deltas:
        for path, item in items.items():
            item.data[:] = earlier[path]
        deltas.apply()
    _verify(blocks)
    return earlier, {path: items[path].data for path in after}


def follow_links(
    chains: Mapping[str, Chain], *, verified: bool = True
) -> Iterator[tuple[Segment, Mapping[str, LeafEntry], Mapping[str, U8]]]:
    """Walk through chains and yield the content of the leaves after each segment, oldest first.

    Each chunk of a segment is compared with the digest that this segment has for it. So damage is
    found in the segment where it is, and one walk verifies a leaf in all steps of its chain. All
    leaves are in memory at once.

    Args:
        chains: The chains by path.
        verified: If false, nothing is compared; the caller must compare.

    Yields:
        The segment, its entries, and the bytes of its leaves by path. The bytes change when the
        walk continues.

    Raises:
        Damaged: A chunk differs from its digest; names leaf and file.
    """
    blocks = allocate_blocks(chains)
    items = {item.chain.spec.path: item for block in blocks for item in block}
    links: dict[str, tuple[Segment, dict[str, LeafEntry]]] = {}
    for path, chain in chains.items():
        for segment, entry in (chain.key, *chain.deltas):
            links.setdefault(segment.id, (segment, {}))[1][path] = entry
    # Names of segments ascend with the saves, so the walk goes from the oldest link to the newest.
    for _, (segment, entries) in sorted(links.items()):
        limits.check_time()
        parts = {run[0] for entry in entries.values() for run in entry.delta}
        load_tables(map(segment.part, sorted(parts)))
        # Each link is read as a chain of its own, whose rows are applied to the current memory.
        link = {
            path: (
                items[path]._replace(
                    chain=Chain(chains[path].spec, (segment, entry), (), chains[path].digests)
                )
            )
            for path, entry in entries.items()
        }
        _fill(link)
        for item in link.values() if verified else ():
            _check_link(item)
        yield segment, entries, {path: items[path].data for path in entries}


def _check_link(item: Filling) -> None:
    """Compare the chunks of a link with the digests of its segment.

    The chain of the item must be this link alone.
    """
    (segment, entry), spec = item.chain.key, item.chain.spec
    # The keyframe in an array has a digest for each chunk, in order; an encoded entry has one for
    # each of its rows (docs/reference/format.md, section 2).
    rows = [(0, 0, spec.chunk_count)] if entry.key is not None else entry.delta
    digests = entry.digests
    for part, first, count in rows:
        index = (
            None
            if entry.key is not None
            else segment.part(part).index[first : first + count, columns.CHUNK]
        )
        chunks = np.arange(count) if index is None else index.astype(np.int64)
        digests_read = chunk_digests(
            item.block.data,
            item.block.bounds,
            item.block.word_bytes,
            (chunks + item.first).tolist(),
        )
        expected = segment.digests[digests : digests + count]
        wrong = np.flatnonzero((digests_read != expected).any(axis=1))
        digests += count
        if wrong.size:
            file = (
                segment.part(part).path if entry.key is None else _keyframe_path(segment, entry.key)
            )
            raise Damaged(
                f"leaf {spec.path!r}, chunk {int(chunks[wrong[0]])}: {file} does not give the bytes"
                " that were saved",
                file=file,
                leaf=spec.path,
            )


def _keyframe_path(segment: Segment, keyframe: KeyframeAt) -> Place:
    """Return the directory of the array that holds a keyframe."""
    return segment.path / (
        f"{layout.LEAVES}/{keyframe.array}"
        if keyframe.array
        else f"{layout.PACKED}/{keyframe.packed}"
    )


def _fill(items: Mapping[str, Filling]) -> None:
    """Read and decode keyframes and deltas of leaves into their blocks."""
    if not items:
        return
    # Read while the reads of the deltas are planned.
    keyframes = _start_keyframes(items)
    try:
        with contextlib.closing(Deltas(items)) as deltas:
            # Deltas are applied to the keyframes in place.
            keyframes.result()
            deltas.apply()
    finally:
        keyframes.settle()


def _start_keyframes(items: Mapping[str, Filling]) -> Reading:
    """Begin to read the keyframes of leaves into their blocks; copy content that the caller has."""
    # Of packed arrays: the arrays by name, and for each byte range its memory.
    arrays: dict[tuple[str, str], StoredArray] = {}
    ranges: list[tuple[tuple[str, str], int, int, U8]] = []
    place = next(iter(items.values())).chain.key[0].path
    read = JoinedRead(place)
    for item in items.values():
        segment, entry = item.chain.key
        spec, keyframe, held_bytes = item.chain.spec, entry.key, item.chain.held
        if not item.data.size:
            continue
        if held_bytes is not None:
            for first, stop, begin in extents_of(item):
                item.data[begin : begin + stop - first] = held_bytes[first:stop]
            continue
        if keyframe is None:  # the keyframe is rows, which is applied like a delta
            continue
        if keyframe.array:
            for box, begin, end in _boxes(item):
                segment.add_natural(read, spec, keyframe.array, item.data[begin:end], box)
            continue
        name = segment.id, keyframe.packed
        if name not in arrays:
            arrays[name] = segment.packed_array(keyframe.packed)
        offset = keyframe.offset * spec.element.item_bytes
        ranges += [
            (name, offset + first, stop - first, item.data[begin : begin + stop - first])
            for first, stop, begin in extents_of(item)
        ]
    if ranges:
        names, begins, sizes, outs = zip(*sorted(ranges, key=lambda r: r[:2]), strict=True)
        numbers = {name: number for number, name in enumerate(sorted(arrays))}
        of_ranges = np.array([numbers[name] for name in names])
        begin, size = np.array([begins, sizes], np.uint64)
        read.add([arrays[name] for name in numbers], of_ranges, begin, size, outs)
    return Reading(read, place, NO_BYTES, sum(item.data.size for item in items.values()))


def _boxes(item: Filling) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """Yield boxes of a leaf that hold the chunks of an item, and their bytes in its memory."""
    spec = item.chain.spec
    if item.is_whole:
        yield tiles.whole(spec.shape), 0, item.data.size
        return
    for chunk, (begin, end) in zip(item.chunks, byte_extents(spec, item.chunks), strict=True):
        yield grid.box(spec.shape, spec.chunk, chunk), begin, end


def _verify(blocks: Sequence[Sequence[Filling]]) -> None:
    """Compare each chunk with the digest that follows from the manifest."""

    def check(items: Sequence[Filling]) -> None:
        block = items[0].block
        digests = chunk_digests(
            block.data, block.bounds, block.word_bytes, range(block.expected.shape[0])
        )
        wrong = np.flatnonzero((digests != block.expected).any(axis=1))
        if wrong.size:
            number = int(wrong[0])
            item = next(item for item in items if number < item.first + len(item.chunks))
            raise Damaged(
                f"leaf {item.chain.spec.path!r}, chunk {item.chunks[number - item.first]}: the"
                " bytes read are not those that were saved",
                leaf=item.chain.spec.path,
            )

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        # The results are empty, but `map` raises an error only when its result is taken.
        for _ in pool.map(check, blocks):
            pass
