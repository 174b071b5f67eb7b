"""Apply the deltas of leaves: read their rows and streams, and decode them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import host_memory
from deltacheck.codec.base import U8, U32, U64
from deltacheck.codec.extension import native
from deltacheck.errors import Damaged, DamagedStream
from deltacheck.leaf import limits
from deltacheck.restore.buffers import Block, Filling
from deltacheck.store import segment as columns
from deltacheck.store.files.arrays import NO_BYTES, Reading
from deltacheck.store.files.chunk_files import ranges
from deltacheck.store.files.native_files import JoinedRead
from deltacheck.store.segment import PartReader, load_tables

# Streams that are decoded together; a read of few leaves, such as a part of a merge beside the
# training, takes less. Larger: more work for all threads at a time, and fewer chunks at the ends
# of batches, which are decoded twice; smaller: less memory.
_BATCH_BYTES, _LEAST_BATCH_BYTES = 32 << 20, 8 << 20
# Parts whose files are open at the same time.
_BATCH_PARTS = 64


class Deltas:
    """Deltas of leaves, of which the first are read while the caller reads the keyframes.

    They are applied segment by segment and part by part. A part is read once, whatever number of
    leaves it serves.
    """

    def __init__(self, items: Mapping[str, Filling]) -> None:
        self._rows = _Rows(list(items.values()))
        self._batches = self._rows.batches()
        self._started: deque[_Batch] = deque()
        self._start(NO_BYTES)

    def close(self) -> None:
        """Wait for reads that an error has left."""
        for batch in self._started:
            batch.reading.settle()

    def apply(self) -> None:
        """Apply all deltas to the keyframes, which are in memory.

        Raises:
            Damaged: Rows or streams cannot be read, or do not follow the format; names the leaf.
        """
        unused = NO_BYTES
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
                self._rows.name_leaf(batch.first, batch.stop)
                raise
            _decode(self._rows, batch, streams)
            unused = batch.memory

    def _start(self, memory: U8) -> None:
        """Begin to read the next batch, if there is one."""
        if (batch := next(self._batches, None)) is not None:
            self._started.append(self._rows.start(*batch, memory))


class _Batch(NamedTuple):
    """Rows ``first`` to ``stop`` of all rows, whose streams are being read into ``memory``."""

    first: int
    stop: int
    offsets: U64
    memory: U8
    reading: Reading


class _Rows:
    """All rows to apply, in the order in which they are applied.

    Attributes:
        index: Their rows of the indexes of their parts.
        chunks: The number of each row's chunk among all chunks of the memory.
        targets: For each row its block, first byte, words, and bytes of a word.
        blocks: The memory of the blocks.
        is_inside: False for a row whose chunk its leaf does not have.
    """

    index: U32
    chunks: NDArray[np.int64]
    targets: U64
    blocks: list[U8]
    is_inside: NDArray[np.bool_]

    def __init__(self, items: list[Filling]) -> None:
        self._items = items
        # For each run of rows of a part that belongs to an item: part, item, first row, rows.
        runs: list[tuple[int, int, int, int]] = []
        parts_of = {
            (segment.id, number): segment
            for item in items
            for segment, entry in item.chain.encoded
            for number, _, _ in entry.delta
        }
        # Names of segments ascend with the saves, so the deltas of a leaf are applied oldest first.
        order = sorted(parts_of)
        numbers = {key: position for position, key in enumerate(order)}
        self._parts: list[PartReader] = [parts_of[key].part(key[1]) for key in order]
        load_tables(self._parts)
        for position, item in enumerate(items):
            runs += [
                (numbers[segment.id, part], position, first, rows)
                for segment, entry in item.chain.encoded
                for part, first, rows in entry.delta
            ]
        runs.sort(key=lambda run: (run[0], run[2]))
        part_of, item_of, first_of, count_of = np.array(runs, np.int64).reshape(-1, 4).T
        self._part = np.repeat(part_of, count_of)
        self._item = np.repeat(item_of, count_of)
        self._row = ranges(first_of, count_of)  # of its part
        bases = np.cumsum([0, *(part.rows for part in self._parts)])
        rows = self._row + bases[self._part]
        # The empty tables stand for items without deltas: `concatenate` refuses an empty list.
        no_rows = np.zeros((0, len(columns.INDEX)), np.uint32)
        self.index = np.concatenate([no_rows, *(part.index for part in self._parts)])[rows]
        ends = [part.table.ends for part in self._parts]
        sizes = np.concatenate([np.zeros(0, np.int64), *map(np.diff, ends)])[rows]
        self._place(sizes)

    def _place(self, sizes: NDArray[np.int64]) -> None:
        """Find the memory of each row's chunk, and leave out rows of chunks that nobody wants."""
        local = self.index[:, columns.CHUNK].astype(np.int64)
        is_wanted = np.ones(local.size, np.bool_)
        for number, item in enumerate(self._items):
            if not item.is_whole:
                # Only some chunks are in memory, so the number of a chunk becomes its position.
                rows = np.flatnonzero(self._item == number)
                chunks = np.array(item.chunks, np.int64)
                is_wanted[rows] = np.isin(local[rows], chunks)
                local[rows] = np.searchsorted(chunks, local[rows])
        self._part, self._item, self._row = (
            column[is_wanted] for column in (self._part, self._item, self._row)
        )
        self.index, local = self.index[is_wanted], local[is_wanted]
        self._ends = np.cumsum(sizes[is_wanted])
        self.blocks, first, targets = _numbered(self._items)
        counts = np.array([len(item.chunks) for item in self._items], np.int64)
        self.is_inside = local < counts[self._item]
        self.chunks = np.where(self.is_inside, local, 0) + first[self._item]
        self.targets = targets[self.chunks]

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows whose streams have about ``_BATCH_BYTES``."""
        raw_bytes = sum(item.data.size for item in self._items)
        size = min(_BATCH_BYTES, max(_LEAST_BATCH_BYTES, raw_bytes))
        first, count = 0, self._row.size
        while first < count:
            before = int(self._ends[first - 1]) if first else 0
            # A single row may be larger than a batch.
            stop = max(first + 1, int(np.searchsorted(self._ends, before + size, "right")))
            stop = min(stop, int(np.searchsorted(self._part, self._part[first] + _BATCH_PARTS)))
            yield first, stop
            first = stop

    def start(self, first: int, stop: int, memory: U8) -> _Batch:
        """Begin to read the streams of some rows, into ``memory`` if it is large enough."""
        part, row = self._part[first:stop], self._row[first:stop]
        parts = self._parts[part[0] : part[-1] + 1]
        place = parts[0].folder
        read = JoinedRead(place)
        # Neighbouring rows of a part are one range.
        begins = np.flatnonzero(np.append(True, (np.diff(part) != 0) | (np.diff(row) != 1)))
        ends = np.append(begins[1:], row.size)
        numbers = part[begins] - part[0]
        offsets = columns.join_rows(read, parts, numbers, row[begins], row[ends - 1] + 1)
        # Fresh pages take as long as decoding into them, so batches share memory.
        if memory.size < read.size:
            memory = host_memory.empty(read.size)
        reading = Reading(read, place, memory[: read.size])
        return _Batch(first, stop, offsets, memory, reading)

    def owner_of(self, row: int) -> tuple[PartReader, str]:
        """Return the part and the leaf of a row."""
        return self._parts[self._part[row]], self._items[self._item[row]].chain.spec.path

    def name_leaf(self, first: int, stop: int) -> None:
        """Read some rows leaf by leaf, and raise the error of the first damage, with its leaf."""
        changes = np.diff(self._item[first:stop]) | np.diff(self._part[first:stop])
        edges = [first, *(np.flatnonzero(changes) + first + 1).tolist(), stop]
        for begin, end in itertools.pairwise(edges):
            try:
                self.start(begin, end, NO_BYTES).reading.result()
            except Damaged as error:
                error.leaf = self.owner_of(begin)[1]
                raise


def _numbered(items: list[Filling]) -> tuple[list[U8], NDArray[np.int64], U64]:
    """Number the chunks of all blocks, in the order of blocks and of their memory.

    Returns:
        The memory of the blocks; the number of the first chunk of each item; and for each chunk
        its block, first byte, words, and bytes of a word.
    """
    blocks: dict[int, tuple[int, Block]] = {}
    first, tables, chunks = [], [np.zeros((0, 4), np.uint64)], 0
    for item in items:
        block = item.block
        if id(block) not in blocks:
            table = np.empty((block.bounds.size - 1, 4), np.uint64)
            table[:, 0] = len(blocks)
            table[:, 1] = block.bounds[:-1] * np.uint64(block.word_bytes)
            table[:, 2] = np.diff(block.bounds)
            table[:, 3] = block.word_bytes
            tables.append(table)
            blocks[id(block)] = chunks, block
            chunks += table.shape[0]
        first.append(blocks[id(block)][0] + item.first)
    memory = [block.data for _, block in blocks.values()]
    return memory, np.array(first, np.int64), np.concatenate(tables)


def _decode(rows: _Rows, batch: _Batch, streams: U8) -> None:
    """Decode the rows of a batch, chunk by chunk, each chunk with all of its rows.

    Raises:
        Damaged: The index does not fit a leaf, or a stream does not follow the format.
    """
    numbers = slice(batch.first, batch.stop)
    index, targets = rows.index[numbers], rows.targets[numbers]
    # The index has no digest of its own, so it is compared with the shapes before the decoder
    # relies on it.
    fits = (
        rows.is_inside[numbers]
        & (index[:, columns.WORDS] == targets[:, 2])
        & (index[:, columns.WORD_BYTES] == targets[:, 3])
    )

    def error(kind: type[Damaged], row: int, reason: str) -> Damaged:
        part, leaf = rows.owner_of(batch.first + row)
        return kind(f"leaf {leaf!r}: {part.path}: {reason}", file=part.path, leaf=leaf)

    if not fits.all():
        raise error(
            Damaged, int(np.argmin(fits)), "its index does not fit the leaf's shape and dtype"
        )
    # A stable order: rows of one chunk stay in the order of the saves.
    order = np.argsort(rows.chunks[numbers], kind="stable")
    refusal = native.apply_rows(
        np.concatenate([index[:, [columns.CHUNK]], index[:, columns.METHOD :]], axis=1)[order],
        targets[order],
        batch.offsets[order],
        streams,
        rows.blocks,
    )
    if refusal is not None:
        number, reason = refusal
        raise error(DamagedStream, int(order[number]), reason)
