"""Apply the deltas of leaves: read their rows part by part and decode them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from deltacheck.codec import host_memory
from deltacheck.codec.base import U8, U32, U64
from deltacheck.codec.extension import native
from deltacheck.errors import Damaged, DamagedStream
from deltacheck.leaf import limits
from deltacheck.restore.buffers import Block, Filling
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.files.arrays import Reading, start_joined
from deltacheck.store.files.native_files import JoinedRead
from deltacheck.store.files.storage import Place
from deltacheck.store.segment import PartReader, Segment

# Streams that are decoded together, and the files that are then open at the same time. Larger: more
# work for all threads at a time; smaller: less memory, of which more stays in the cache.
_BATCH_BYTES = 32 << 20
# A read of few leaves, such as a part of a merge beside the training, takes less memory.
_LEAST_BATCH_BYTES = 8 << 20
_BATCH_FILES = 256


class _Run(NamedTuple):
    """Rows ``first`` to ``stop`` of a part, which belong to one leaf."""

    item: Filling
    first: int
    stop: int


# Runs of a part, ascending.
_PartRuns: TypeAlias = "tuple[Segment, int, list[_Run]]"


class Deltas:
    """Deltas of leaves, of which the first are read while the caller reads the keyframes.

    They are applied segment by segment and part by part. A part is read once, whatever number of
    leaves it serves. Use it in a ``with`` statement, which waits for reads that an error has left.
    """

    def __init__(self, items: Mapping[str, Filling]) -> None:
        self._items = items
        raw_bytes = sum(item.data.size for item in items.values())
        batch_bytes = min(_BATCH_BYTES, max(_LEAST_BATCH_BYTES, raw_bytes))
        self._batches = _batches(_parts_of(items.values()), batch_bytes)
        self._started: deque[_Batch] = deque()
        self._start(np.empty(0, np.uint8))

    def __enter__(self) -> Deltas:
        return self

    def __exit__(self, *_: object) -> None:
        for batch in self._started:
            batch.reading.settle()

    def apply(self) -> None:
        """Apply all deltas to the keyframes, which are in memory.

        Raises:
            Damaged: Rows or streams cannot be read, or do not follow the format; names the leaf.
        """
        memory_map = _MemoryMap.of(self._items.values())
        unused = np.empty(0, np.uint8)
        while self._started:
            limits.check_time()
            # Read while the batch before it is decoded.
            self._start(unused)
            batch = self._started.popleft()
            try:
                streams = batch.reading.result()
            except Damaged as error:
                # Its traceback leads to this frame, and such a cycle keeps files open for the
                # collector.
                error.with_traceback(None)
                _name_leaf(batch.parts)
                raise
            _decode(batch.parts, batch.offsets, streams, memory_map)
            unused = batch.memory

    def _start(self, memory: U8) -> None:
        """Begin to read the next batch, if there is one."""
        if (parts := next(self._batches, None)) is not None:
            self._started.append(_start_batch(parts, memory))


def _parts_of(items: Iterable[Filling]) -> list[_PartRuns]:
    """Return the runs of leaves by part, in the order in which they are applied."""
    by_part: dict[tuple[str, int], tuple[Segment, list[_Run]]] = {}
    for item in items:
        is_whole = item.is_whole
        for segment, entry in item.chain.encoded:
            for part, first, rows in entry.delta:
                runs = by_part.setdefault((segment.id, part), (segment, []))[1]
                if is_whole:
                    runs.append(_Run(item, first, first + rows))
                else:
                    row_ranges = _rows_of_chunks(segment.part(part).index, first, rows, item.chunks)
                    runs += [_Run(item, begin, end) for begin, end in row_ranges]
    # Names of segments ascend with the saves, so the deltas of a leaf are applied oldest first.
    return [
        (segment, part, sorted(runs, key=lambda run: run.first))
        for (_, part), (segment, runs) in sorted(by_part.items(), key=lambda item: item[0])
    ]


class _Batch(NamedTuple):
    """Runs of parts whose streams are being read into ``memory``."""

    parts: list[_PartRuns]
    offsets: U64
    memory: U8
    reading: Reading


def _start_batch(parts: list[_PartRuns], memory: U8) -> _Batch:
    """Begin to read a batch, into ``memory`` if it is large enough."""
    read = JoinedRead(parts[0][0].path)
    offsets = [_join(segment.part(part), runs, read) for segment, part, runs in parts]
    # Fresh pages take as long as decoding into them, so batches share memory.
    if memory.size < read.size:
        memory = host_memory.empty(read.size)
    reading = start_joined(read, memory[: read.size], parts[0][0].path)
    return _Batch(parts, np.concatenate(offsets), memory, reading)


def _batches(parts: Sequence[_PartRuns], batch_bytes: int) -> Iterator[list[_PartRuns]]:
    """Group the runs of parts into batches of about ``batch_bytes`` of streams."""
    batch: list[_PartRuns] = []
    size = files = 0
    for segment, number, runs in parts:
        part = segment.part(number)
        if batch and files + part.file_count > _BATCH_FILES:
            yield batch
            batch, size, files = [], 0, 0
        files += part.file_count
        part_runs: list[_Run] = []
        for item, begin, stop in runs:
            first = begin
            while first < stop:
                end = part.row_within(first, stop, batch_bytes - size)
                if end == first and not (part_runs or batch):
                    end += 1  # a single row may be larger than a batch
                if end > first:
                    part_runs.append(_Run(item, first, end))
                    size += part.stream_bytes(first, end)
                    first = end
                if first < stop:
                    yield [*batch, (segment, number, part_runs)] if part_runs else batch
                    batch, part_runs, size, files = [], [], 0, part.file_count
        if part_runs:
            batch.append((segment, number, part_runs))
    if batch:
        yield batch


def _join(part: PartReader, runs: Sequence[_Run], read: JoinedRead) -> U64:
    """Add the streams of some runs to a joined read; return the offsets of their rows."""
    stretches = np.array(_stretches(runs), np.int64)
    return part.join(read, stretches[:, 0], stretches[:, 1])


class _MemoryMap(NamedTuple):
    """The chunks of all blocks, numbered in the order of blocks and of their memory.

    Attributes:
        blocks: The memory of the blocks.
        first: The number of the first chunk of each item, by the item's path.
        targets: For each chunk its block, first byte, words, and bytes of a word.
    """

    blocks: list[U8]
    first: dict[str, int]
    targets: U64

    @classmethod
    def of(cls, items: Iterable[Filling]) -> _MemoryMap:
        """Number the chunks of some items."""
        blocks: dict[int, tuple[int, int, Block]] = {}
        first: dict[str, int] = {}
        chunks = 0
        targets = []
        for item in items:
            block = item.block
            if id(block) not in blocks:
                blocks[id(block)] = (len(blocks), chunks, block)
                bounds, width = block.bounds, np.uint64(block.word_bytes)
                table = np.empty((bounds.size - 1, 4), np.uint64)
                table[:, 0] = len(blocks) - 1
                table[:, 1] = bounds[:-1] * width
                table[:, 2] = np.diff(bounds)
                table[:, 3] = width
                targets.append(table)
                chunks += table.shape[0]
            first[item.chain.spec.path] = blocks[id(block)][1] + item.first
        empty = np.zeros((0, 4), np.uint64)
        return cls(
            [block.data for _, _, block in blocks.values()],
            first,
            np.concatenate([empty, *targets]),
        )


def _decode(
    batch: Sequence[_PartRuns],
    offsets: U64,
    streams: U8,
    memory_map: _MemoryMap,
) -> None:
    """Decode the rows of a batch, chunk by chunk, each chunk with all of its rows.

    Raises:
        Damaged: The index does not fit a leaf, or a stream does not follow the format.
    """
    owners = [(segment, part, run) for segment, part, runs in batch for run in runs]
    lengths = np.array([run.stop - run.first for _, _, run in owners])
    rows = np.concatenate(
        [
            segment.part(part).index[first:stop]
            for segment, part, runs in batch
            for first, stop in _stretches(runs)
        ]
    )
    local = rows[:, columns.CHUNK].astype(np.int64)
    row = 0
    for (_, _, run), length in zip(owners, lengths.tolist(), strict=True):
        if not run.item.is_whole:
            # Only some chunks are in memory, so the number of a chunk becomes its position.
            local[row : row + length] = np.searchsorted(
                np.asarray(run.item.chunks), local[row : row + length]
            )
        row += length
    counts = np.array([len(run.item.chunks) for _, _, run in owners])
    first_chunks = np.array([memory_map.first[run.item.chain.spec.path] for _, _, run in owners])
    is_inside = local < np.repeat(counts, lengths)
    chunks = np.where(is_inside, local, 0) + np.repeat(first_chunks, lengths)
    targets = memory_map.targets[chunks]
    # The index has no digest of its own, so it is compared with the shapes before the decoder
    # relies on it.
    fits = (
        is_inside
        & (rows[:, columns.WORDS] == targets[:, 2])
        & (rows[:, columns.WORD_BYTES] == targets[:, 3])
    )
    # A stable order: rows of one chunk stay in the order of the saves.
    order = np.argsort(chunks, kind="stable")

    def owner_of(row: int) -> tuple[str, str, str]:
        segment, part, run = owners[int(np.searchsorted(np.cumsum(lengths), row, "right"))]
        path, leaf = _path(segment, part), run.item.chain.spec.path
        return f"leaf {leaf!r}: {path}", str(path), leaf

    if not fits.all():
        location, file, leaf = owner_of(int(np.argmin(fits)))
        raise Damaged(
            f"{location}: its index does not fit the leaf's shape and dtype", file=file, leaf=leaf
        )
    refusal = native.apply_rows(
        np.ascontiguousarray(
            np.concatenate([rows[:, [columns.CHUNK]], rows[:, columns.METHOD :]], axis=1)[order]
        ),
        targets[order],
        offsets[order],
        streams,
        memory_map.blocks,
    )
    if refusal is not None:
        number, reason = refusal
        location, file, leaf = owner_of(int(order[number]))
        raise DamagedStream(f"{location}: {reason}", file=file, leaf=leaf)


def _name_leaf(parts: Sequence[_PartRuns]) -> None:
    """Read a batch run by run, and raise the error of the first that is damaged, with its leaf."""
    for segment, part, runs in parts:
        for run in runs:
            batch = _start_batch([(segment, part, [run])], np.empty(0, np.uint8))
            try:
                batch.reading.result()
            except Damaged as error:
                error.leaf = run.item.chain.spec.path
                raise


def _path(segment: Segment, part: int) -> Place:
    """Return the directory of a part."""
    return segment.path / layout.DELTA / str(part)


def _rows_of_chunks(
    index: U32, first: int, rows: int, chunks: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the maximal runs of rows that belong to some chunks."""
    matches = np.isin(index[first : first + rows, columns.CHUNK], chunks)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], matches, [False]]).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield first + begin, first + end


def _stretches(runs: Sequence[_Run]) -> list[tuple[int, int]]:
    """Return the row ranges of some runs, adjacent ones as one range."""
    stretches: list[tuple[int, int]] = []
    for run in runs:
        is_adjacent = bool(stretches) and stretches[-1][1] == run.first
        first = stretches.pop()[0] if is_adjacent else run.first
        stretches.append((first, run.stop))
    return stretches
