"""Apply the deltas of leaves: read their rows part by part and decode them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import CHUNK, ROW_WIDTH, U8, U32, Codec, Encoded
from deltacheck.errors import Damaged, DamagedStream
from deltacheck.restore.buffers import Filling, start_ahead
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.files.scratch import Scratch
from deltacheck.store.files.storage import Place
from deltacheck.store.segment import Segment, StreamsReading

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


def apply_deltas(items: Mapping[str, Filling], codec: Codec[Any]) -> None:
    """Apply deltas to leaves, segment by segment and part by part.

    A part is read once, whatever number of leaves it serves.
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
                    row_ranges = _rows_of_chunks(segment.part(part).index, first, rows, item.chunks)
                    runs += [_Run(item, begin, end) for begin, end in row_ranges]
    # Names of segments ascend with the saves, so the deltas of a leaf are applied oldest first.
    ordered = sorted(by_part.items(), key=lambda item: item[0])
    spans = [span for (_, part), (segment, runs) in ordered for span in _spans(segment, part, runs)]
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
