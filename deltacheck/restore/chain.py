"""What is stored of a leaf: a keyframe and the deltas after it. Resolve -> read -> apply -> verify;
returns host bytes.

Every byte that is handed out has been compared with a digest that the step's manifest names:
manifest -> digest of each segment's table -> digest of each leaf -> digests of its chunks -> bytes.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import default_codec
from deltacheck.codec.base import CHUNK, ROW_WIDTH, U8, U32, U64, Codec, Encoded
from deltacheck.errors import BudgetExceeded, ChainBroken, Damaged, DamagedStream
from deltacheck.leaf import grid
from deltacheck.leaf.digest import chunk_digests, leaf_digest
from deltacheck.leaf.spec import LeafSpec
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.files.arrays import Reading
from deltacheck.store.files.scratch import Scratch
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import KeyframeAt, LeafEntry, LeafRecord, Manifest
from deltacheck.store.root import Root, open_segments
from deltacheck.store.segment import Segment, StreamsReading, entries_by_path

_HASH_THREADS = 4
# Leaves from this size on have memory of their own. Larger: fewer calls; whoever keeps one small
# leaf keeps its whole block.
_ALONE_BYTES = 1 << 20
_BLOCK_BYTES = 16 << 20
_PACKED_READ_BYTES = 4 << 20  # of neighbouring packed leaves in one read
# Of what is held of a step beside its content: per chunk of a leaf digests, bounds and numbers; per
# digest and row of a segment.
_CHUNK_TABLES_BYTES, _DIGEST_BYTES, _INDEX_ROW_BYTES = 96, 16, 64
_TABLES_BYTES = 64 << 20  # of these are taken whatever the caller's budget is
# Of reads that are started ahead of the decoder. Larger: more of them overlap; more memory beside
# the result.
_AHEAD_BYTES = 32 << 20
# Of streams that lie apart, copied for one call of the decoder: copying more takes longer than
# another call.
_JOINED_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Chain:
    """Where one leaf of a step comes from: a keyframe, deltas in order, and the digest that every
    chunk must have in the end.

    A keyframe is an array, or rows like those of a delta, for every chunk. ``held``: what the
    caller has of the leaf already; it stands for the keyframe and for the deltas before ``deltas``.
    """

    spec: LeafSpec
    key: tuple[Segment, LeafEntry]
    deltas: tuple[tuple[Segment, LeafEntry], ...]
    digests: U64
    held: U8 | None = None

    @property
    def encoded(self) -> tuple[tuple[Segment, LeafEntry], ...]:
        """What of it is rows that are to be applied, in order."""
        return ((self.key,) if self.held is None and self.key[1].key is None else ()) + self.deltas

    @property
    def delta_segments(self) -> list[str]:
        return [segment.id for segment, _ in self.deltas]

    @property
    def delta_bytes(self) -> list[int]:
        """Bytes of the streams of each delta, which a restore decodes."""
        return [
            sum(
                segment.part(part).stream_bytes(first, first + rows)
                for part, first, rows in entry.delta
            )
            for segment, entry in self.deltas
        ]


class Held(NamedTuple):
    """The whole content of a leaf that the caller has already: its bytes, and the digest that it is
    known to have.
    """

    data: U8
    digest: str


class _Filling(NamedTuple):
    """Chunks of a stored leaf on their way: from number ``first`` on in a block, ``data`` being
    their memory there.
    """

    chain: Chain
    chunks: list[int]
    block: _Block
    first: int
    data: U8

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) == self.chain.spec.chunk_count


@dataclass(slots=True, eq=False)
class _Block:
    """Memory that chunks of leaves share, one leaf after the other, so that one call decodes or
    hashes
    many small ones.

    ``bounds``: of its chunks, in words. ``expected``: the digests that they must have in the end.
    """

    word_bytes: int
    data: U8
    bounds: U64
    expected: U64


class _Links(NamedTuple):
    """What is stored of a leaf, oldest first, as positions among a step's segments."""

    spec: LeafSpec
    record: LeafRecord
    entries: list[tuple[int, LeafEntry]]


def resolve(
    root: Root,
    manifest: Manifest,
    paths: Iterable[str],
    max_bytes: int | None = None,
    held: Mapping[str, Held] | None = None,
) -> dict[str, Chain]:
    """The chain of everything named of ``manifest.stored``, each link checked by the digests that
    the
    tables carry.

    ``max_bytes``: refuse (``BudgetExceeded``), before they are read, digests and indexes larger
    than this and than ``_TABLES_BYTES``. ``held``: what the caller has of some leaves: where it is
    what the chain gives at some link, only what comes after that is read. Raises ``ChainBroken`` or
    ``Damaged`` naming leaf, step and segment.
    """
    paths = list(paths)
    segments = open_segments(root, manifest, paths)
    _refuse_large_tables(manifest, paths, segments, max_bytes)
    every = entries_by_path(segments, set(paths))
    links = [
        _links(path, manifest.stored[path], every.get(path, []), segments, manifest)
        for path in paths
    ]
    chains: dict[str, Chain] = {}
    for (spec, record, entries), digests in zip(
        links, _expected_digests(links, segments), strict=True
    ):
        if leaf_digest(digests) != record.digest:
            raise Damaged(
                f"step {manifest.step}, leaf {spec.path!r}: the chunk digests of its segments give"
                f" {leaf_digest(digests)}, the manifest promises {record.digest}",
                leaf=spec.path,
            )
        key, *deltas = [(segments[number], entry) for number, entry in entries]
        mine = (held or {}).get(spec.path)
        first = 0 if mine is None else _links_of(entries, mine.digest)
        if mine is None or not first:
            chains[spec.path] = Chain(spec, key, tuple(deltas), digests)
        else:
            chains[spec.path] = Chain(spec, key, tuple(deltas[first - 1 :]), digests, mine.data)
    return chains


def _links_of(entries: Sequence[tuple[int, LeafEntry]], digest: str) -> int:
    """How many links of a chain give content with this digest, as many as possible; 0 where none
    do.
    """
    return max(
        (number for number, (_, entry) in enumerate(entries, 1) if entry.digest == digest),
        default=0,
    )


def machine_bytes() -> int:
    """Memory of this machine: the budget of whoever names none."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _refuse_large_tables(
    manifest: Manifest, paths: Iterable[str], segments: Sequence[Segment], max_bytes: int | None
) -> None:
    chunks = sum(manifest.stored[path].spec(path).chunk_count for path in paths)
    stored = sum(segment.table.digests for segment in segments)
    rows = sum(part.rows for segment in segments for part in segment.table.parts)
    size = _CHUNK_TABLES_BYTES * chunks + 2 * _DIGEST_BYTES * stored + _INDEX_ROW_BYTES * rows
    budget = max(machine_bytes() if max_bytes is None else max_bytes, _TABLES_BYTES)
    if size > budget:
        raise BudgetExceeded(
            f"step {manifest.step}: the digests and indexes of {chunks} chunks would take {size}"
            f" bytes, more than {budget}; raise max_bytes, or name fewer leaves"
        )


def _links(
    path: str,
    record: LeafRecord,
    every: list[tuple[int, LeafEntry]],
    segments: Sequence[Segment],
    manifest: Manifest,
) -> _Links:
    """``every``: what the segments hold of the leaf, oldest first."""
    at = f"step {manifest.step}, leaf {path!r}"
    first = next((at for at in range(len(every) - 1, -1, -1) if every[at][1].is_whole), None)
    if first is None:
        raise ChainBroken(f"{at}: none of the step's segments holds its keyframe", leaf=path)
    entries = every[first:]
    what = (record.dtype, record.shape, record.chunk)
    before = entries[0][1]
    fits = (before.dtype, before.shape, before.chunk) == what
    for number, entry in entries[1:]:
        if entry.base != before.digest:
            raise ChainBroken(
                f"{at}: segment {segments[number].id} is a delta to {entry.base}, but the leaf is"
                f" {before.digest} there",
                leaf=path,
            )
        fits = fits and (entry.dtype, entry.shape, entry.chunk) == what
        before = entry
    if before.digest != record.digest or not fits:
        raise ChainBroken(
            f"{at}: its segments give digest {before.digest}, the manifest promises"
            f" {record.digest}",
            leaf=path,
        )
    return _Links(record.spec(path), record, entries)


def _expected_digests(links: Sequence[_Links], segments: Sequence[Segment]) -> list[U64]:
    """The digests that the chunks of every leaf must have in the end, as its segments say one after
    the other.
    """
    counts = np.array([link.spec.chunk_count for link in links], np.int64)
    bases = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    digests = np.zeros((int(bases[-1]), 2), np.uint64)
    keys: list[list[tuple[int, int, int]]] = [
        [] for _ in segments
    ]  # leaf, row of its first digest, chunks
    rows: list[dict[int, list[tuple[int, int, int, int]]]] = [
        {} for _ in segments
    ]  # by part: leaf, row of its digests, run
    encoded_keys: list[list[int]] = [[] for _ in segments]
    for leaf, (spec, _, entries) in enumerate(links):
        for number, entry in entries:
            if entry.key is not None:
                keys[number].append((leaf, entry.digests, spec.chunk_count))
                continue
            if entry.is_whole:
                encoded_keys[number].append(leaf)
            row = entry.digests
            for part, first, count in entry.delta:
                rows[number].setdefault(part, []).append((leaf, row, first, count))
                row += count
    for number, segment in enumerate(segments):
        segment.start_tables(rows[number], digests=bool(keys[number] or rows[number]))
    for number, segment in enumerate(segments):
        for leaf, row, count in keys[number]:
            digests[bases[leaf] : bases[leaf + 1]] = segment.digests[row : row + count]
        covered = np.zeros(digests.shape[0] if encoded_keys[number] else 0, np.bool_)
        for part, runs in rows[number].items():
            leaf_of, row_of, first_of, count_of = np.array(runs, np.int64).T
            owners = np.repeat(leaf_of, count_of)
            chunks = (
                segment.part(part)
                .index[_ranges(first_of, count_of), columns.CHUNK]
                .astype(np.int64)
            )
            beyond = np.flatnonzero(chunks >= counts[owners])
            if beyond.size:
                spec = links[owners[beyond[0]]].spec
                raise Damaged(
                    f"segment {segment.id}: leaf {spec.path!r} has a row beyond its"
                    f" {spec.chunk_count} chunks",
                    file=segment.path / layout.DELTA / str(part) / "index",
                    leaf=spec.path,
                )
            digests[bases[owners] + chunks] = segment.digests[_ranges(row_of, count_of)]
            if covered.size:
                covered[bases[owners] + chunks] = True
        for leaf in encoded_keys[number]:
            missing = np.flatnonzero(~covered[bases[leaf] : bases[leaf + 1]])
            if missing.size:
                path = links[leaf].spec.path
                message = (
                    f"segment {segment.id}: leaf {path!r} has no row for chunk {int(missing[0])}"
                )
                raise Damaged(message, file=segment.path / layout.DELTA, leaf=path)
    return [digests[bases[leaf] : bases[leaf + 1]] for leaf in range(len(links))]


def _ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of ranges that begin at ``first`` and have ``count`` numbers, one range after the
    other.
    """
    ends = np.cumsum(count)
    numbers: NDArray[np.int64] = np.arange(ends[-1] if ends.size else 0) + np.repeat(
        first - (ends - count), count
    )
    return numbers


def load(
    chains: Mapping[str, Chain], chunks: Mapping[str, list[int]], codec: Codec[Any] | None = None
) -> dict[str, U8]:
    """Read, decode and verify the named chunks of leaves: their bytes, one after the other.

    REQUIRES: the caller can hold them. Raises ``Damaged`` naming the leaf and file.
    """
    blocks = _blocks(chains, chunks)
    items = {item.chain.spec.path: item for block in blocks for item in block}
    _read_keyframes(items)
    _apply_deltas(items, codec or default_codec())
    _verify(blocks)
    return {path: items[path].data for path in chains}


def follow(
    chains: Mapping[str, Chain], codec: Codec[Any] | None = None
) -> Iterator[tuple[Segment, Mapping[str, LeafEntry], Mapping[str, U8]]]:
    """The content of leaves after each segment of their chains, oldest first: the segment, its
    entries, and the leaves' bytes by path.

    Every chunk that a segment brings is compared with the digest that this segment has for it, so
    what is wrong is found where it is, and one way through a chain proves the leaf in every step on
    it. The bytes are memory of the walk: they change when it goes on. Holds all leaves at once.
    Raises ``Damaged`` naming leaf and file.
    """
    blocks = _blocks(
        chains, {path: list(range(chain.spec.chunk_count)) for path, chain in chains.items()}
    )
    items = {item.chain.spec.path: item for block in blocks for item in block}
    links: dict[str, tuple[Segment, dict[str, LeafEntry]]] = {}
    for path, chain in chains.items():
        for segment, entry in (chain.key, *chain.deltas):
            links.setdefault(segment.id, (segment, {}))[1][path] = entry
    for _, (segment, entries) in sorted(links.items()):
        segment.start_tables(
            {run[0] for entry in entries.values() for run in entry.delta}, digests=True
        )
        # One link as a chain of its own: its rows are applied to what the memory holds.
        link = {
            path: (
                items[path]._replace(
                    chain=Chain(chains[path].spec, (segment, entry), (), chains[path].digests)
                )
            )
            for path, entry in entries.items()
        }
        _read_keyframes(link)
        _apply_deltas(link, codec or default_codec())
        for item in link.values():
            _check_link(item)
        yield segment, entries, {path: items[path].data for path in entries}


def apply(spec: LeafSpec, segment: Segment, entry: LeafEntry, base: U8 | None) -> U8:
    """A leaf's bytes after one segment, from those before it (``None``: of an entry that needs
    none). Raises ``Damaged``.
    """
    link = Chain(spec, (segment, entry), (), np.zeros((spec.chunk_count, 2), np.uint64))
    ((item,),) = _blocks({spec.path: link}, {spec.path: list(range(spec.chunk_count))})
    if base is not None:
        item.data[:] = base
    _read_keyframes({spec.path: item})
    _apply_deltas({spec.path: item}, default_codec())
    _check_link(item)
    return item.data


def _check_link(item: _Filling) -> None:
    """Compare the chunks that a link brings with its segment's digests. REQUIRES: the item's chain
    is that link alone.
    """
    (segment, entry), spec = item.chain.key, item.chain.spec
    rows = [(0, 0, spec.chunk_count)] if entry.key is not None else entry.delta
    digests = entry.digests
    for part, first, count in rows:
        index = (
            None
            if entry.key is not None
            else segment.part(part).index[first : first + count, columns.CHUNK]
        )
        chunks = np.arange(count) if index is None else index.astype(np.int64)
        found = chunk_digests(
            item.block.data,
            item.block.bounds,
            item.block.word_bytes,
            (chunks + item.first).tolist(),
        )
        wrong = np.flatnonzero((found != segment.digests[digests : digests + count]).any(axis=1))
        digests += count
        if wrong.size:
            file = (
                segment.path / layout.DELTA / str(part)
                if entry.key is None
                else _keyframe_path(segment, entry.key)
            )
            raise Damaged(
                f"leaf {spec.path!r}, chunk {int(chunks[wrong[0]])}: {file} does not give the bytes"
                " that were saved",
                file=file,
                leaf=spec.path,
            )


def _keyframe_path(segment: Segment, at: KeyframeAt) -> Place:
    return segment.path / (
        f"{layout.LEAVES}/{at.array}" if at.array else f"{layout.PACKED}/{at.packed}"
    )


def bytes_of(spec: LeafSpec, chunks: Sequence[int]) -> int:
    """Bytes of some chunks in memory. REQUIRES: none is named twice."""
    if len(chunks) == spec.chunk_count:
        return spec.raw_bytes
    return int(np.diff(spec.bounds())[list(chunks)].sum()) * spec.word_bytes if chunks else 0


def _blocks(chains: Mapping[str, Chain], chunks: Mapping[str, list[int]]) -> list[list[_Filling]]:
    """Memory for the named chunks, block by block. Small leaves of one element size share it, in
    the order in which they are stored.
    """
    groups: list[list[str]] = []
    filling: dict[tuple[int, int], tuple[list[str], int]] = {}
    for path in sorted(chains, key=lambda path: _place(chains[path])):
        chain = chains[path]
        size = bytes_of(chain.spec, chunks[path])
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


def _block(leaves: Sequence[tuple[Chain, list[int]]]) -> list[_Filling]:
    sizes = [_sizes(chain.spec, numbers) for chain, numbers in leaves]
    bounds = np.concatenate(
        [np.zeros(1, np.uint64), np.cumsum(np.concatenate(sizes), dtype=np.uint64)]
    )
    expected = [c.digests if len(n) == c.spec.chunk_count else c.digests[n] for c, n in leaves]
    word_bytes = leaves[0][0].spec.word_bytes
    block = _Block(
        word_bytes,
        np.empty(int(bounds[-1]) * word_bytes, np.uint8),
        bounds,
        np.concatenate(expected),
    )
    items, first = [], 0
    for chain, numbers in leaves:
        begin, end = int(bounds[first]) * word_bytes, int(bounds[first + len(numbers)]) * word_bytes
        items.append(_Filling(chain, numbers, block, first, block.data[begin:end]))
        first += len(numbers)
    return items


def _sizes(spec: LeafSpec, chunks: list[int]) -> U64:
    """Words of some chunks."""
    words: U64 = np.diff(spec.bounds())
    return words if len(chunks) == spec.chunk_count else words[chunks]


def _read_keyframes(items: Mapping[str, _Filling]) -> None:
    natural: list[Reading] = []
    packed: dict[tuple[str, str], list[_Filling]] = {}
    for item in items.values():
        segment, entry = item.chain.key
        spec, at, held = item.chain.spec, entry.key, item.chain.held
        if not item.chunks:
            continue
        if held is not None:
            item.data[:] = _chosen(item, held)
            continue
        if at is None:  # rows, which come first of those in _apply_deltas
            continue
        if not at.array:
            packed.setdefault((segment.id, at.packed), []).append(item)
        elif item.is_whole:
            natural.append(segment.start_natural(spec, at.array, item.data))
        else:
            for chunk, (begin, end) in zip(item.chunks, extents(spec, item.chunks), strict=True):
                box = grid.box(spec.shape, spec.chunk, chunk)
                natural.append(segment.start_natural(spec, at.array, item.data[begin:end], box))
    reads = [read for (_, storage), of in packed.items() for read in _packed_reads(storage, of)]
    for read, reading in _ahead(reads, _PackedRead.start):
        values = np.ascontiguousarray(reading.result()).view(np.uint8)
        for item, begin in read.leaves:
            item.data[:] = _chosen(item, values[begin : begin + item.chain.spec.raw_bytes])
    for reading in natural:
        reading.result()


class _PackedRead(NamedTuple):
    """Neighbouring packed leaves, read together; each with the byte at which it begins among
    them.
    """

    segment: Segment
    storage: str
    offset: int
    elements: int
    leaves: list[tuple[_Filling, int]]
    size: int

    def start(self) -> Reading:
        return self.segment.start_packed(self.storage, self.offset, self.elements)


def _packed_reads(storage: str, items: Sequence[_Filling]) -> Iterator[_PackedRead]:
    """REQUIRES: the leaves lie in one segment."""
    segment = items[0].chain.key[0]
    placed = sorted(
        ((at.offset, item) for item in items if (at := item.chain.key[1].key) is not None),
        key=lambda one: one[0],
    )
    begin = end = 0
    leaves: list[tuple[_Filling, int]] = []
    for offset, item in placed:
        spec = item.chain.spec
        width = spec.element.item_bytes
        if leaves and (offset != end or (end - begin) * width >= _PACKED_READ_BYTES):
            yield _PackedRead(segment, storage, begin, end - begin, leaves, (end - begin) * width)
            leaves = []
        if not leaves:
            begin = offset
        leaves.append((item, (offset - begin) * width))
        end = offset + spec.raw_bytes // width
    yield _PackedRead(
        segment,
        storage,
        begin,
        end - begin,
        leaves,
        (end - begin) * placed[0][1].chain.spec.element.item_bytes,
    )


def extents(spec: LeafSpec, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Byte range of each of some chunks that lie one after the other."""
    sizes = np.diff(spec.bounds())[chunks] * np.uint64(spec.word_bytes)
    ends = np.cumsum(sizes).astype(np.int64)
    return list(zip((ends - sizes.astype(np.int64)).tolist(), ends.tolist(), strict=True))


def _chosen(item: _Filling, whole: U8) -> U8:
    """The wanted chunks of a leaf, one after the other, from its whole bytes."""
    if item.is_whole:
        return whole
    every = extents(item.chain.spec, range(item.chain.spec.chunk_count))
    return np.concatenate([whole[every[chunk][0] : every[chunk][1]] for chunk in item.chunks])


class _Run(NamedTuple):
    """Rows ``first`` to ``stop`` of a part that belong to one leaf, and that leaf."""

    item: _Filling
    first: int
    stop: int


def _apply_deltas(items: Mapping[str, _Filling], codec: Codec[Any]) -> None:
    """Apply the deltas segment by segment, part by part: a part is read once, whatever number of
    leaves it serves.
    """
    by_part: dict[tuple[str, int], tuple[Segment, list[_Run]]] = {}
    for item in items.values():
        is_whole = item.is_whole
        for segment, entry in item.chain.encoded:
            for part, first, rows in entry.delta:
                runs = by_part.setdefault((segment.id, part), (segment, []))[1]
                if is_whole:
                    runs.append(_Run(item, first, first + rows))
                else:
                    wanted = _wanted_rows(segment.part(part).index, first, rows, item.chunks)
                    runs += [_Run(item, begin, end) for begin, end in wanted]
    ordered = sorted(by_part.items(), key=lambda one: one[0])
    spans = [span for (_, part), (segment, runs) in ordered for span in _spans(segment, part, runs)]
    scratch = Scratch()
    for span, reading in _ahead(spans, lambda span: span.start(scratch)):
        try:
            streams = reading.result()
        except Damaged:
            _apply_alone(span, codec)
            continue
        for runs in _calls(span):
            _apply_runs(span, runs, streams, codec)
        for stream in streams.values():
            scratch.give_back(stream)


def _apply_alone(span: _Span, codec: Codec[Any]) -> None:
    """Apply what could not be read together, run by run: what lies between the runs may be damaged,
    and nobody needs it.
    """
    for run in span.runs:
        alone = span._replace(runs=[run])
        try:
            streams = alone.start(Scratch()).result()
        except Damaged as error:
            error.leaf = run.item.chain.spec.path
            raise
        _apply_runs(alone, [run], streams, codec)


class _Span(NamedTuple):
    """Runs of one part, read together with the few rows between them."""

    segment: Segment
    part: int
    runs: list[_Run]

    @property
    def path(self) -> Place:
        return self.segment.path / layout.DELTA / str(self.part)

    @property
    def first(self) -> int:
        return self.runs[0].first

    @property
    def stop(self) -> int:
        return self.runs[-1].stop

    @property
    def size(self) -> int:
        """Bytes of its streams."""
        return self.segment.part(self.part).stream_bytes(self.first, self.stop)

    def start(self, scratch: Scratch) -> StreamsReading:
        return self.segment.part(self.part).start(self.first, self.stop, scratch)


_Read = TypeVar("_Read", _PackedRead, _Span)
_Begun = TypeVar("_Begun")


def _wanted_rows(
    index: U32, first: int, rows: int, chunks: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Maximal runs of rows whose chunks are wanted."""
    wanted = np.isin(index[first : first + rows, columns.CHUNK], chunks)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield first + begin, first + end


def _spans(segment: Segment, part: int, runs: list[_Run]) -> Iterator[_Span]:
    runs = sorted(runs, key=lambda run: run.first)
    current: list[_Run] = []
    for run in runs:
        if (
            current
            and run.first != current[-1].stop
            and not segment.part(part).is_small(current[-1].stop, run.first)
        ):
            yield _Span(segment, part, current)
            current = []
        current.append(run)
    if current:
        yield _Span(segment, part, current)


def _ahead(
    reads: Sequence[_Read], start: Callable[[_Read], _Begun]
) -> Iterator[tuple[_Read, _Begun]]:
    """What to read, each with what ``start`` gave: started ahead, at least one and as many as fit,
    so
    that the disk works while the decoder does.
    """
    started: deque[tuple[_Read, _Begun, int]] = deque()
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


def _calls(span: _Span) -> Iterator[list[_Run]]:
    """Runs that one call of the codec takes: those of one block in its order, of each leaf at most
    one.

    The codec wants ascending rows, and those of a leaf that several devices have written ascend in
    each run only. It also wants the streams of a call in one piece: what does not lie together is
    joined where that is little.
    """
    found: dict[tuple[int, int], list[_Run]] = {}
    before: Counter[int] = Counter()
    for run in span.runs:
        found.setdefault((id(run.item.block), before[id(run.item)]), []).append(run)
        before[id(run.item)] += 1
    part = span.segment.part(span.part)
    for of in found.values():
        call: list[_Run] = []
        size = 0
        for run in sorted(of, key=lambda run: run.item.first):
            held = part.stream_bytes(run.first, run.stop)
            if call and run.first != call[-1].stop and size + held > _JOINED_BYTES:
                yield call
                call, size = [], 0
            call.append(run)
            size += held
        yield call


def _apply_runs(
    span: _Span, runs: Sequence[_Run], streams: Mapping[str, U8], codec: Codec[Any]
) -> None:
    block = runs[0].item.block
    rows = _rows(span, runs)
    lengths = [run.stop - run.first for run in runs]
    local = rows[:, columns.CHUNK].astype(np.int64)
    at = 0
    for run, length in zip(runs, lengths, strict=True):
        if not run.item.is_whole:
            local[at : at + length] = np.searchsorted(
                np.asarray(run.item.chunks), local[at : at + length]
            )
        at += length
    local += np.repeat(np.array([run.item.first for run in runs], np.int64), lengths)
    words = np.diff(block.bounds)
    wrong = np.flatnonzero(
        (rows[:, columns.WORDS] != words[local]) | (rows[:, columns.WORD_BYTES] != block.word_bytes)
    )
    if wrong.size:
        run = runs[int(np.searchsorted(np.cumsum(lengths), wrong[0], "right"))]
        spec = run.item.chain.spec
        raise Damaged(
            f"{_at(span, run)}: its index does not fit the leaf's shape {spec.shape} and dtype"
            f" {spec.dtype}",
            file=span.path,
            leaf=spec.path,
        )
    try:
        codec.apply(
            _encoded(span, runs, local, streams), block.data, block.bounds, block.word_bytes
        )
    except DamagedStream as error:
        _name_damage(span, runs, local, streams, codec)
        raise DamagedStream(
            f"{_at(span, runs[0])} or one of the {len(runs) - 1} after it: {error}", file=span.path
        ) from error


def _rows(span: _Span, runs: Sequence[_Run]) -> U32:
    index = span.segment.part(span.part).index
    pieces = [index[first:stop] for first, stop in _stretches(runs)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _stretches(runs: Sequence[_Run]) -> list[tuple[int, int]]:
    """The rows of some runs, neighbours as one."""
    found: list[tuple[int, int]] = []
    for run in runs:
        first = found.pop()[0] if found and found[-1][1] == run.first else run.first
        found.append((first, run.stop))
    return found


def _encoded(
    span: _Span, runs: Sequence[_Run], local: NDArray[np.int64], streams: Mapping[str, U8]
) -> Encoded:
    """Some runs of a span with their bytes. ``local``: the chunk numbers of their rows for the
    codec.
    """
    rows = _rows(span, runs)
    encoded = np.empty((rows.shape[0], ROW_WIDTH), np.uint32)
    encoded[:, CHUNK] = local
    encoded[:, CHUNK + 1 :] = rows[:, columns.METHOD :]
    edges = np.array(_stretches(runs))
    mine = {}
    for name, stream in streams.items():
        offsets = span.segment.part(span.part).offsets[name]
        ends = (offsets[edges] - offsets[span.first]).tolist()
        pieces = [stream[begin:end] for begin, end in ends if end > begin]
        if pieces:
            mine[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return Encoded(encoded, mine)


def _name_damage(
    span: _Span,
    runs: Sequence[_Run],
    local: NDArray[np.int64],
    streams: Mapping[str, U8],
    codec: Codec[Any],
) -> None:
    """Decode leaf by leaf what could not be decoded at once; raises for the leaf that cannot be."""
    at = 0
    for run in runs:
        item = run.item
        begin, at = at, at + run.stop - run.first
        encoded = _encoded(span, [run], local[begin:at] - item.first, streams)
        bounds = item.block.bounds[item.first : item.first + len(item.chunks) + 1]
        try:
            codec.apply(encoded, item.data, bounds - bounds[0], item.block.word_bytes)
        except DamagedStream as error:
            raise DamagedStream(
                f"{_at(span, run)}: {error}", file=span.path, leaf=item.chain.spec.path
            ) from error


def _at(span: _Span, run: _Run) -> str:
    return f"leaf {run.item.chain.spec.path!r}: {span.path}"


def _verify(blocks: Sequence[Sequence[_Filling]]) -> None:
    """Compare every loaded chunk with the digest that its manifest leads to."""

    def check(items: Sequence[_Filling]) -> None:
        block = items[0].block
        found = chunk_digests(
            block.data, block.bounds, block.word_bytes, range(block.expected.shape[0])
        )
        wrong = np.flatnonzero((found != block.expected).any(axis=1))
        if wrong.size:
            number = int(wrong[0])
            item = next(item for item in items if number < item.first + len(item.chunks))
            raise Damaged(
                f"leaf {item.chain.spec.path!r}, chunk {item.chunks[number - item.first]}: the"
                " bytes read are not those that were saved",
                leaf=item.chain.spec.path,
            )

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        for _ in pool.map(check, blocks):
            pass
