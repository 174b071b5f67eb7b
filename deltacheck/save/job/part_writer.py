"""Collect encoded chunks into parts of a segment and write these while encoding goes on.

The encoded bytes between the codec and the disk are bounded by the host cache. One part is being
filled, and the others are on their way to disk; ``make_room`` waits for the oldest of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deltacheck.codec.base import ROW_CHUNK, ROW_METHOD, U32, U64, Encoded
from deltacheck.save.job.leaf_state import LeafSave, RowRun, await_write
from deltacheck.save.progress import Progress
from deltacheck.store import segment
from deltacheck.store.files.arrays import Pending
from deltacheck.store.segment import SegmentWriter, stream_size_table

# A part is closed after this many encoded bytes. Larger: fewer files, which cost a small save most
# of its time; smaller: a disk begins to write sooner.
PART_BYTES = 64 << 20


class Span(NamedTuple):
    """Consecutive chunks of one leaf within a piece.

    Args:
        leaf: The leaf.
        start: Number of the first of these chunks within the piece.
        first_chunk: Number of the same chunk within the leaf.
    """

    leaf: LeafSave
    start: int
    first_chunk: int


@dataclass(frozen=True, slots=True)
class EncodedChunks:
    """The result of one call of the codec: chunks of one leaf or of several.

    Args:
        spans: The leaves' chunks, in order.
        encoded: Rows and streams.
        digests: Digests of the rows' chunks, uint64 ``(rows, 2)``, if the codec computed them.
    """

    spans: Sequence[Span]
    encoded: Encoded
    digests: U64 | None


class PartWriter:
    """The parts of one segment.

    Args:
        writer: The segment.
        leaves: The leaves of the save, in the order of their numbers.
        progress: Receives a beat at the end of every write.
        host_cache_bytes: Most encoded bytes in memory. Larger: a slow disk blocks later; smaller:
            less memory.
        io_timeout_seconds: Longest wait for one write.
    """

    def __init__(
        self,
        writer: SegmentWriter,
        leaves: Sequence[LeafSave],
        progress: Progress,
        host_cache_bytes: int,
        io_timeout_seconds: float,
    ) -> None:
        # A cache that holds all encoded bytes may hold them as one part. Else one part is written
        # while the next is filled.
        fits = sum(leaf.source.raw_bytes for leaf in leaves) <= host_cache_bytes
        share = host_cache_bytes if fits else host_cache_bytes // 2
        self.part_bytes = max(1, min(PART_BYTES, share))
        self._writer = writer
        self._leaves = leaves
        self._progress = progress
        self._host_cache_bytes = host_cache_bytes
        self._io_timeout_seconds = io_timeout_seconds
        # True: what is captured may exceed the cache, because training waits for it.
        self.may_exceed = False
        self._pieces: list[EncodedChunks] = []
        self._unsealed_bytes = 0
        self._in_flight: deque[tuple[int, list[Pending]]] = deque()
        self._in_flight_bytes = 0

    def add(self, piece: EncodedChunks) -> None:
        """Append a piece to the open part, and seal the part if it is full."""
        if piece.encoded.rows.shape[0] == 0:
            return
        self._pieces.append(piece)
        stream_bytes = sum(stream.size for stream in piece.encoded.streams.values())
        self._unsealed_bytes += stream_bytes + piece.encoded.rows.nbytes
        if self._unsealed_bytes >= self.part_bytes:
            self.seal()

    def add_all(self, pieces: Iterable[EncodedChunks]) -> None:
        """Append pieces in order."""
        for piece in pieces:
            self.add(piece)

    def make_room(self, raw_bytes: int) -> None:
        """Wait for the disk until ``raw_bytes`` more fit into the host cache.

        Encoding gives at most as many bytes as it reads.
        """
        self._progress.beat()
        needed_bytes = self._writer.streams.scratch_bytes + raw_bytes + self._unsealed_bytes
        limit = self._host_cache_bytes - needed_bytes
        while self._in_flight and self._in_flight_bytes > limit and not self._is_awaited():
            size, pending = self._in_flight.popleft()
            for write in pending:
                await_write(write, self._io_timeout_seconds)
                self._progress.beat()
            self._in_flight_bytes -= size

    def _is_awaited(self) -> bool:
        return self.may_exceed and not self._progress.has_reached("captured")

    def seal(self) -> None:
        """Close the open part and start to write it."""
        if not self._pieces:
            return
        # A restore needs the deltas since a leaf's keyframe. Leaves with old keyframes come first,
        # so that of the streams of an old segment it decodes only the beginnings.
        pieces, size = sorted(self._pieces, key=_key_segment), self._unsealed_bytes
        self._pieces, self._unsealed_bytes = [], 0
        rows = sum(piece.encoded.rows.shape[0] for piece in pieces)
        table = np.empty((rows, len(segment.INDEX)), np.uint32)
        row, part = 0, len(self._writer.parts)
        for piece in pieces:
            end = row + piece.encoded.rows.shape[0]
            _put_index_rows(table[row:end], piece)
            for span, first, stop in _rows_of_spans(piece):
                leaf = span.leaf
                chunks = table[row + first : row + stop, segment.CHUNK]
                digests = None if piece.digests is None else piece.digests[first:stop]
                if leaf.runs is None:
                    leaf.runs = []
                leaf.runs.append(RowRun(part, row + first, chunks, digests))
            row = end
        names = list(dict.fromkeys(name for piece in pieces for name in piece.encoded.streams))
        streams = {
            name: [p.encoded.streams[name] for p in pieces if name in p.encoded.streams]
            for name in names
        }
        # From here on only `streams` holds the encoded bytes: the writer frees them as soon as they
        # are written.
        del pieces, piece
        self._count(table)
        pending = self._writer.put_part(table, streams)
        size = self._writer.streams.held_bytes(size)
        self._in_flight.append((size, pending))
        self._in_flight_bytes += size

    def _count(self, table: U32) -> None:
        """Add a part's index to the figures of its leaves."""
        encoded_sizes = stream_size_table(table).sum(axis=1)
        # The rows of a leaf are consecutive, so sums between the changes of the number suffice.
        numbers = table[:, segment.LEAF]
        starts = np.flatnonzero(np.diff(numbers, prepend=np.uint32(0xFFFFFFFF)))
        changed = np.add.reduceat(table[:, segment.CHANGED].astype(np.uint64), starts)
        sizes = np.add.reduceat(encoded_sizes, starts)
        for number, words, size in zip(
            numbers[starts].tolist(), changed.tolist(), sizes.tolist(), strict=True
        ):
            leaf = self._leaves[number]
            leaf.changed_words += words
            leaf.encoded_bytes += size


def _key_segment(piece: EncodedChunks) -> str:
    """Return the name of the segment with the keyframe of a piece; names ascend with the saves."""
    state = piece.spans[0].leaf.state
    return "" if state is None else state.key_segment


def _rows_of_spans(piece: EncodedChunks) -> Iterator[tuple[Span, int, int]]:
    """Yield each span that has rows, its first row, and the row after its last one."""
    rows = piece.encoded.rows
    if len(piece.spans) == 1:
        yield piece.spans[0], 0, rows.shape[0]
        return
    edges = [
        *np.searchsorted(rows[:, ROW_CHUNK], [span.start for span in piece.spans]).tolist(),
        rows.shape[0],
    ]
    for span, first, stop in zip(piece.spans, edges, edges[1:], strict=False):
        if first < stop:
            yield span, first, stop


def _put_index_rows(table: U32, piece: EncodedChunks) -> None:
    """Write the encoder's rows as rows of a part's index, readable without the leaves' specs.

    Args:
        table: The rows of the index, uint32 ``(rows, 8)``; every column is written.
        piece: The rows, and the chunks to which they belong.
    """
    rows, spans = piece.encoded.rows, piece.spans
    states = [span.leaf.state for span in spans]
    starts = np.array([span.start for span in spans], np.int64)
    span_of = np.searchsorted(starts, rows[:, ROW_CHUNK], "right") - 1
    first_chunks = np.array([span.first_chunk for span in spans], np.int64)
    chunks = rows[:, ROW_CHUNK] + (first_chunks - starts)[span_of]
    # The bounds of all leaves, one after the other.
    bounds = [state.bounds for state in states if state is not None]
    begins = np.cumsum([0, *map(len, bounds[:-1])])[span_of] + chunks
    all_bounds = np.concatenate(bounds)
    words = [state.spec.word_bytes for state in states if state is not None]
    table[:, segment.LEAF] = np.array([span.leaf.number for span in spans])[span_of]
    table[:, segment.CHUNK] = chunks
    table[:, segment.WORDS] = all_bounds[begins + 1] - all_bounds[begins]
    table[:, segment.WORD_BYTES] = np.array(words)[span_of]
    table[:, segment.METHOD :] = rows[:, ROW_METHOD:]
