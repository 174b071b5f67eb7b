"""Apply the deltas of leaves: read their rows part by part and decode them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import host_memory
from deltacheck.codec.base import CHUNK, ROW_WIDTH, U8, U32, U64, ApplyRows, Codec, Encoded
from deltacheck.errors import Damaged, DamagedStream
from deltacheck.leaf import limits
from deltacheck.restore.buffers import Block, Filling, start_ahead
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.files.arrays import Reading, start_joined
from deltacheck.store.files.native_files import JoinedRead
from deltacheck.store.files.scratch import Scratch
from deltacheck.store.files.storage import Place
from deltacheck.store.segment import PartReader, Segment, StreamsReading

# Streams that are decoded together, and the files that are then open at the same time. Larger: more
# work for all threads at a time; smaller: less memory, of which more stays in the cache.
_BATCH_BYTES = 32 << 20
# A read of few leaves, such as a part of a merge beside the training, takes less memory.
_LEAST_BATCH_BYTES = 8 << 20
_BATCH_FILES = 256
# Streams that are not adjacent are copied together for one call of the decoder up to this size.
# Copying more takes longer than a second call.
_JOINED_BYTES = 256 << 10


class _Run(NamedTuple):
    """Rows ``first`` to ``stop`` of a part, which belong to one leaf."""

    item: Filling
    first: int
    stop: int


class _Span(NamedTuple):
    """Runs of one part, read together with the few rows between them."""

    segment: Segment
    part: int
    runs: list[_Run]

    @property
    def path(self) -> Place:
        """Return the directory of the part."""
        return self.segment.path / layout.DELTA / str(self.part)

    @property
    def first(self) -> int:
        """Return the first row to read."""
        return self.runs[0].first

    @property
    def stop(self) -> int:
        """Return the row after the last one to read."""
        return self.runs[-1].stop

    @property
    def size(self) -> int:
        """Return the bytes of its streams."""
        return self.segment.part(self.part).stream_bytes(self.first, self.stop)

    def start(self, scratch: Scratch) -> StreamsReading:
        """Start to read the streams into memory of ``scratch``."""
        return self.segment.part(self.part).start(self.first, self.stop, scratch)


# Runs of a part, ascending.
_PartRuns: TypeAlias = "tuple[Segment, int, list[_Run]]"


class Deltas:
    """Deltas of leaves, of which the first are read while the caller reads the keyframes.

    They are applied segment by segment and part by part. A part is read once, whatever number of
    leaves it serves. Use it in a ``with`` statement, which waits for reads that an error has left.
    """

    def __init__(self, items: Mapping[str, Filling], codec: Codec[Any]) -> None:
        self._items = items
        self._codec = codec
        self._parts = _parts_of(items.values())
        self._batches: Iterator[list[_PartRuns]] = iter(())
        self._started: deque[_Batch] = deque()
        self._decode: ApplyRows | None = getattr(codec, "apply_rows", None)
        if (
            self._decode is None
            or not JoinedRead.is_possible()
            or not all(segment.part(part).is_native for segment, part, _ in self._parts)
        ):
            self._decode = None
            return
        raw_bytes = sum(item.data.size for item in items.values())
        batch_bytes = min(_BATCH_BYTES, max(_LEAST_BATCH_BYTES, raw_bytes))
        self._batches = _batches(self._parts, batch_bytes)
        self._start(np.empty(0, np.uint8))

    def __enter__(self) -> Deltas:
        return self

    def __exit__(self, *_: object) -> None:
        for batch in self._started:
            batch.reading.settle()

    def apply(self) -> None:
        """Apply all deltas to the keyframes, which are in memory."""
        if self._decode is None:
            _apply_parts(self._parts, self._codec)
            return
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
                # No row of the batch was applied. Part by part, damage that no leaf needs is left
                # out, and other damage is named.
                _apply_parts(batch.parts, self._codec)
                # Threads of the failed read may still write to its memory.
                unused = np.empty(0, np.uint8)
            else:
                _decode(batch.parts, batch.offsets, streams, memory_map, self._decode)
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
    read = JoinedRead()
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
    decode: ApplyRows,
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
        span = _Span(segment, part, [run])
        return _location(span, run), str(span.path), run.item.chain.spec.path

    if not fits.all():
        location, file, leaf = owner_of(int(np.argmin(fits)))
        raise Damaged(
            f"{location}: its index does not fit the leaf's shape and dtype", file=file, leaf=leaf
        )
    refusal = decode(
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


def _apply_parts(parts: Sequence[_PartRuns], codec: Codec[Any]) -> None:
    """Apply runs part by part."""
    spans = [span for segment, part, runs in parts for span in _spans(segment, part, runs)]
    scratch = Scratch()
    for span, reading in start_ahead(spans, lambda span: span.start(scratch)):
        try:
            streams = reading.result()
        except Damaged:
            # The memory of this span does not go back to `scratch`: reads that were started with
            # the failed one may still write to it.
            _apply_alone(span, codec)
            continue
        for runs in _calls(span):
            _apply_runs(span, runs, streams, codec)
        for stream in streams.values():
            scratch.give_back(stream)


def _apply_alone(span: _Span, codec: Codec[Any]) -> None:
    """Apply a span run by run, after it could not be read at once.

    The rows between the runs may be the damaged ones, and no leaf of this restore needs them.
    """
    for run in span.runs:
        single_run = span._replace(runs=[run])
        try:
            # A pool of its own: this path is rare, and the memory is freed with the run.
            streams = single_run.start(Scratch()).result()
        except Damaged as error:
            error.leaf = run.item.chain.spec.path
            raise
        _apply_runs(single_run, [run], streams, codec)


def _rows_of_chunks(
    index: U32, first: int, rows: int, chunks: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the maximal runs of rows that belong to some chunks."""
    matches = np.isin(index[first : first + rows, columns.CHUNK], chunks)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], matches, [False]]).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield first + begin, first + end


def _spans(segment: Segment, part: int, runs: list[_Run]) -> Iterator[_Span]:
    """Group runs into spans. Rows between runs are read too if a second read would take longer."""
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


def _calls(span: _Span) -> Iterator[list[_Run]]:
    """Group the runs of a span into calls of the codec.

    A call takes runs of one block in the order of the block, and at most one run of each leaf. The
    codec requires ascending rows, and if several devices wrote a leaf, its rows ascend within each
    run only. The codec also requires contiguous streams: runs that are not adjacent are joined
    only if they are small.
    """
    # The n-th run of a leaf goes into the n-th group of its block, so that no call has two runs of
    # one leaf.
    groups: dict[tuple[int, int], list[_Run]] = {}
    runs_before: Counter[int] = Counter()
    for run in span.runs:
        groups.setdefault((id(run.item.block), runs_before[id(run.item)]), []).append(run)
        runs_before[id(run.item)] += 1
    part = span.segment.part(span.part)
    for group in groups.values():
        call: list[_Run] = []
        size = 0
        for run in sorted(group, key=lambda run: run.item.first):
            run_bytes = part.stream_bytes(run.first, run.stop)
            if call and run.first != call[-1].stop and size + run_bytes > _JOINED_BYTES:
                yield call
                call, size = [], 0
            call.append(run)
            size += run_bytes
        yield call


def _apply_runs(
    span: _Span, runs: Sequence[_Run], streams: Mapping[str, U8], codec: Codec[Any]
) -> None:
    """Decode some runs of one block into its memory.

    Raises:
        Damaged: The index does not fit a leaf, or a stream does not follow the format.
    """
    block = runs[0].item.block
    rows = _rows(span, runs)
    lengths = [run.stop - run.first for run in runs]
    local = rows[:, columns.CHUNK].astype(np.int64)
    row = 0
    for run, length in zip(runs, lengths, strict=True):
        if not run.item.is_whole:
            # Only some chunks are in memory, so the number of a chunk becomes its position among
            # them.
            local[row : row + length] = np.searchsorted(
                np.asarray(run.item.chunks), local[row : row + length]
            )
        row += length
    # The codec counts the chunks of the block, the index those of the leaf.
    local += np.repeat(np.array([run.item.first for run in runs], np.int64), lengths)
    words = np.diff(block.bounds)
    # The index has no digest of its own, so it is compared with the shapes before the decoder
    # relies on it.
    wrong = np.flatnonzero(
        (rows[:, columns.WORDS] != words[local]) | (rows[:, columns.WORD_BYTES] != block.word_bytes)
    )
    if wrong.size:
        run = runs[int(np.searchsorted(np.cumsum(lengths), wrong[0], "right"))]
        spec = run.item.chain.spec
        raise Damaged(
            f"{_location(span, run)}: its index does not fit the leaf's shape {spec.shape} and"
            f" dtype {spec.dtype}",
            file=span.path,
            leaf=spec.path,
        )
    try:
        codec.apply(
            _encoded(span, runs, local, streams), block.data, block.bounds, block.word_bytes
        )
    except DamagedStream as error:
        # The decoder does not tell which leaf is damaged. If none fails alone, the joint error is
        # raised.
        _name_damage(span, runs, local, streams, codec)
        raise DamagedStream(
            f"{_location(span, runs[0])} or one of the {len(runs) - 1} after it: {error}",
            file=span.path,
        ) from error


def _rows(span: _Span, runs: Sequence[_Run]) -> U32:
    """Return the index rows of some runs."""
    index = span.segment.part(span.part).index
    pieces = [index[first:stop] for first, stop in _stretches(runs)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _stretches(runs: Sequence[_Run]) -> list[tuple[int, int]]:
    """Return the row ranges of some runs, adjacent ones as one range."""
    stretches: list[tuple[int, int]] = []
    for run in runs:
        is_adjacent = bool(stretches) and stretches[-1][1] == run.first
        first = stretches.pop()[0] if is_adjacent else run.first
        stretches.append((first, run.stop))
    return stretches


def _encoded(
    span: _Span, runs: Sequence[_Run], local: NDArray[np.int64], streams: Mapping[str, U8]
) -> Encoded:
    """Return some runs of a span as input for the codec.

    Args:
        local: The chunk number of each row in the codec's buffer.
    """
    rows = _rows(span, runs)
    encoded = np.empty((rows.shape[0], ROW_WIDTH), np.uint32)
    # A row of the codec lacks the leaf, the words and their size, which the block implies.
    encoded[:, CHUNK] = local
    encoded[:, CHUNK + 1 :] = rows[:, columns.METHOD :]
    edges = np.array(_stretches(runs))
    # Runs of one stretch are contiguous in each stream and are passed without a copy.
    joined = {}
    for name, stream in streams.items():
        offsets = span.segment.part(span.part).offsets[name]
        ends = (offsets[edges] - offsets[span.first]).tolist()
        pieces = [stream[begin:end] for begin, end in ends if end > begin]
        if pieces:
            joined[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return Encoded(encoded, joined)


def _name_damage(
    span: _Span,
    runs: Sequence[_Run],
    local: NDArray[np.int64],
    streams: Mapping[str, U8],
    codec: Codec[Any],
) -> None:
    """Decode leaf by leaf after a joint call failed, and raise for the leaf at fault."""
    row = 0
    for run in runs:
        # The failed call may have changed the memory already. That is harmless, since the restore
        # fails in any case.
        item = run.item
        begin, row = row, row + run.stop - run.first
        encoded = _encoded(span, [run], local[begin:row] - item.first, streams)
        bounds = item.block.bounds[item.first : item.first + len(item.chunks) + 1]
        try:
            codec.apply(encoded, item.data, bounds - bounds[0], item.block.word_bytes)
        except DamagedStream as error:
            raise DamagedStream(
                f"{_location(span, run)}: {error}", file=span.path, leaf=item.chain.spec.path
            ) from error


def _location(span: _Span, run: _Run) -> str:
    """Return the leaf and the directory of a run, for error messages."""
    return f"leaf {run.item.chain.spec.path!r}: {span.path}"
