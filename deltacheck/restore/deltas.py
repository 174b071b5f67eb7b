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

# Of streams that lie apart, copied for one call of the decoder: copying more takes longer than
# another call.
_JOINED_BYTES = 256 << 10


class _Run(NamedTuple):
    """Rows ``first`` to ``stop`` of a part that belong to one leaf, and that leaf."""

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


def apply_deltas(items: Mapping[str, Filling], codec: Codec[Any]) -> None:
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
    for span, reading in start_ahead(spans, lambda span: span.start(scratch)):
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
