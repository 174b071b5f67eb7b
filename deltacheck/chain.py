"""What is stored of a leaf: a keyframe and the deltas after it. Resolve -> read -> apply -> verify; returns host bytes.

Every byte that is handed out has been compared with a digest that the step's manifest names: manifest -> digest of each
segment's table -> digest of each leaf -> digests of its chunks -> bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from deltacheck import grid
from deltacheck.codec import default_codec
from deltacheck.codec.base import CHUNK, ROW_WIDTH, U8, U32, U64, Codec, Encoded
from deltacheck.digest import chunk_digests, leaf_digest
from deltacheck.errors import ChainBroken, Damaged, DamagedStream
from deltacheck.records import LeafSpec
from deltacheck.store import segment as columns
from deltacheck.store.arrays import Reading
from deltacheck.store.root import Root, open_segments
from deltacheck.store.schema import LeafEntry, LeafRecord, Manifest
from deltacheck.store.segment import Segment

_HASH_THREADS = 4


@dataclass(frozen=True, slots=True)
class Chain:
    """Where one leaf of a step comes from: a keyframe, deltas in order, and the digest that every chunk must have in the end.

    A keyframe is an array, or rows like those of a delta, for every chunk.
    """

    spec: LeafSpec
    key: tuple[Segment, LeafEntry]
    deltas: tuple[tuple[Segment, LeafEntry], ...]
    digests: U64

    @property
    def encoded(self) -> tuple[tuple[Segment, LeafEntry], ...]:
        """What of it is rows, in order."""
        return ((self.key,) if self.key[1].key is None else ()) + self.deltas

    @property
    def delta_segments(self) -> list[str]:
        return [segment.id for segment, _ in self.deltas]


class _Filling(NamedTuple):
    """Chunks of a stored leaf on their way."""

    chain: Chain
    chunks: list[int]
    data: U8


def resolve(root: Root, manifest: Manifest, paths: Iterable[str]) -> dict[str, Chain]:
    """The chain of every named leaf of ``manifest.leaves``, each link checked by the digests that the tables carry.

    Raises ``ChainBroken`` or ``Damaged`` naming leaf, step and segment.
    """
    segments = open_segments(root, manifest)
    return {path: _resolve_leaf(path, manifest.leaves[path], segments, manifest) for path in paths}


def _resolve_leaf(path: str, record: LeafRecord, segments: Sequence[Segment], manifest: Manifest) -> Chain:
    spec = record.spec(path)
    at = f"step {manifest.step}, leaf {path!r}"
    holding = [(segment, segment.table.leaves[path]) for segment in segments if path in segment.table.leaves]
    keys = [number for number, (_, entry) in enumerate(holding) if entry.is_whole]
    if not keys:
        raise ChainBroken(f"{at}: none of the step's segments holds its keyframe")
    key, *deltas = holding[keys[-1] :]
    for (_, before), (segment, entry) in zip([key, *deltas], deltas, strict=False):
        if entry.base != before.digest:
            raise ChainBroken(f"{at}: segment {segment.id} is a delta to {entry.base}, but the leaf is {before.digest} there")
    last = (deltas or [key])[-1][1]
    if last.digest != record.digest or any(entry.spec(path) != spec for _, entry in [key, *deltas]):
        raise ChainBroken(f"{at}: its segments give digest {last.digest}, the manifest promises {record.digest}")
    chain = Chain(spec, key, tuple(deltas), _expected_digests(spec, key, deltas))
    if leaf_digest(chain.digests) != record.digest:
        raise Damaged(
            f"{at}: the chunk digests of its segments give {leaf_digest(chain.digests)}, the manifest promises {record.digest}"
        )
    return chain


def _expected_digests(spec: LeafSpec, key: tuple[Segment, LeafEntry], deltas: Sequence[tuple[Segment, LeafEntry]]) -> U64:
    count = spec.chunk_count
    segment, entry = key
    if entry.key is not None:
        digests = segment.digests[entry.digests : entry.digests + count].copy()
    else:
        digests = np.zeros((count, 2), np.uint64)
        deltas = [key, *deltas]
    for segment, entry in deltas:
        row = entry.digests
        covered = np.zeros(count, np.bool_)
        for part, first, rows in entry.delta:
            chunks = segment.part(part).index[first : first + rows, columns.CHUNK]
            if digests.shape[0] != count or (chunks.size and int(chunks.max()) >= count):
                raise Damaged(f"segment {segment.id}: leaf {spec.path!r} has a row beyond its {count} chunks")
            digests[chunks] = segment.digests[row : row + rows]
            covered[chunks] = True
            row += rows
        if entry.is_whole and not covered.all():
            raise Damaged(f"segment {segment.id}: leaf {spec.path!r} has no row for chunk {int(np.argmin(covered))}")
    return digests


def load(chains: Mapping[str, Chain], chunks: Mapping[str, list[int]], codec: Codec[Any] | None = None) -> dict[str, U8]:
    """Read, decode and verify the named chunks of leaves: their bytes, one after the other.

    REQUIRES: the caller can hold them. Raises ``Damaged`` naming the leaf and file.
    """
    items = {}
    for path, chain in chains.items():
        items[path] = _Filling(chain, chunks[path], np.empty(bytes_of(chain.spec, chunks[path]), np.uint8))
    _read_keyframes(items)
    _apply_deltas(items, codec or default_codec())
    _verify(items)
    return {path: item.data for path, item in items.items()}


def bytes_of(spec: LeafSpec, chunks: Sequence[int]) -> int:
    """Bytes of some chunks in memory."""
    return int(np.diff(spec.bounds())[list(chunks)].sum()) * spec.word_bytes if chunks else 0


def _read_keyframes(items: Mapping[str, _Filling]) -> None:
    natural: list[Reading] = []
    packed: list[tuple[_Filling, Reading]] = []
    for item in items.values():
        segment, entry = item.chain.key
        spec, at = item.chain.spec, entry.key
        if at is None or not item.chunks:  # rows, which come first of those in _apply_deltas
            continue
        if not at.array:
            packed.append((item, segment.start_packed(spec, at)))
        elif len(item.chunks) == spec.chunk_count:
            natural.append(segment.start_natural(spec, at.array, item.data))
        else:
            all_boxes = list(grid.boxes(spec.shape, spec.chunk))
            for chunk, (begin, end) in zip(item.chunks, extents(spec, item.chunks), strict=True):
                natural.append(segment.start_natural(spec, at.array, item.data[begin:end], all_boxes[chunk]))
    for reading in natural:
        reading.result()
    for item, reading in packed:
        item.data[:] = np.ascontiguousarray(reading.result()).view(np.uint8)


def extents(spec: LeafSpec, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Byte range of each of some chunks that lie one after the other."""
    sizes = np.diff(spec.bounds())[chunks] * np.uint64(spec.word_bytes)
    ends = np.cumsum(sizes).astype(np.int64)
    return list(zip((ends - sizes.astype(np.int64)).tolist(), ends.tolist(), strict=True))


class _Run(NamedTuple):
    """Rows ``first`` to ``stop`` of a part that belong to one leaf, and that leaf."""

    item: _Filling
    first: int
    stop: int


def _apply_deltas(items: Mapping[str, _Filling], codec: Codec[Any]) -> None:
    """Apply the deltas segment by segment, part by part: a part is read once, whatever number of leaves it serves."""
    by_part: dict[tuple[str, int], tuple[Segment, list[_Run]]] = {}
    for item in items.values():
        for segment, entry in item.chain.encoded:
            for part, first, rows in entry.delta:
                runs = by_part.setdefault((segment.id, part), (segment, []))[1]
                runs += [_Run(item, a, b) for a, b in _wanted_rows(segment.part(part).index, first, rows, item.chunks)]
    ordered = sorted(by_part.items())
    spans = [span for (_, part), (segment, runs) in ordered for span in _spans(segment, part, runs)]
    started = _ahead(spans)
    for span, readings in started:
        streams = {name: reading.result() for name, reading in readings.items()}
        _apply_span(span, streams, codec)


class _Span(NamedTuple):
    """Neighbouring runs of one part, read together."""

    segment: Segment
    part: int
    runs: list[_Run]

    @property
    def first(self) -> int:
        return self.runs[0].first

    @property
    def stop(self) -> int:
        return self.runs[-1].stop


def _wanted_rows(index: U32, first: int, rows: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of rows whose chunks are wanted."""
    wanted = np.isin(index[first : first + rows, columns.CHUNK], chunks)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield first + begin, first + end


def _spans(segment: Segment, part: int, runs: list[_Run]) -> Iterator[_Span]:
    runs = sorted(runs, key=lambda run: run.first)
    current: list[_Run] = []
    for run in runs:
        if current and run.first != current[-1].stop:
            yield _Span(segment, part, current)
            current = []
        current.append(run)
    if current:
        yield _Span(segment, part, current)


def _ahead(spans: Sequence[_Span]) -> Iterator[tuple[_Span, dict[str, Reading]]]:
    """The spans with their reads started one span ahead, so that the disk works while the decoder does."""
    following = spans[0].segment.part(spans[0].part).start(spans[0].first, spans[0].stop) if spans else {}
    for number, span in enumerate(spans):
        readings = following
        if number + 1 < len(spans):
            after = spans[number + 1]
            following = after.segment.part(after.part).start(after.first, after.stop)
        yield span, readings


def _apply_span(span: _Span, streams: Mapping[str, U8], codec: Codec[Any]) -> None:
    index = span.segment.part(span.part).index
    taken = dict.fromkeys(streams, 0)
    for run in span.runs:
        rows = index[run.first : run.stop]
        sizes = {name: int(size.sum()) for name, size in columns.stream_sizes(rows).items() if name in streams}
        mine = {name: streams[name][taken[name] : taken[name] + size] for name, size in sizes.items() if size}
        for name, size in sizes.items():
            taken[name] += size
        _apply_run(span, run, rows, mine, codec)


def _apply_run(span: _Span, run: _Run, rows: U32, streams: Mapping[str, U8], codec: Codec[Any]) -> None:
    item, spec = run.item, run.item.chain.spec
    at = f"segment {span.segment.id}, part {span.part}, leaf {spec.path!r}"
    local = np.searchsorted(np.asarray(item.chunks), rows[:, columns.CHUNK])
    words = np.diff(spec.bounds())[item.chunks]
    if not np.array_equal(rows[:, columns.WORDS], words[local]) or np.any(rows[:, columns.WORD_BYTES] != spec.word_bytes):
        raise Damaged(f"{at}: its index does not fit the leaf's shape {spec.shape} and dtype {spec.dtype}")
    encoded_rows = np.empty((rows.shape[0], ROW_WIDTH), np.uint32)
    encoded_rows[:, CHUNK] = local
    encoded_rows[:, CHUNK + 1 :] = rows[:, columns.METHOD :]
    bounds = np.concatenate([np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)])
    try:
        codec.apply(Encoded(encoded_rows, streams), item.data, bounds, spec.word_bytes)
    except DamagedStream as error:
        raise DamagedStream(f"{at}: {error}") from error


def _verify(items: Mapping[str, _Filling]) -> None:
    """Compare every loaded chunk with the digest that its manifest leads to."""

    def check(item: _Filling) -> None:
        spec = item.chain.spec
        words = np.diff(spec.bounds())[item.chunks]
        bounds = np.concatenate([np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)])
        found = chunk_digests(item.data, bounds, spec.word_bytes, range(len(item.chunks)))
        wrong = np.flatnonzero((found != item.chain.digests[item.chunks]).any(axis=1))
        if wrong.size:
            chunk = item.chunks[int(wrong[0])]
            involved = ", ".join([item.chain.key[0].id, *item.chain.delta_segments])
            raise Damaged(
                f"leaf {spec.path!r}, chunk {chunk}: the bytes read are not those that were saved (segments {involved})"
            )

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        for _ in pool.map(check, items.values()):
            pass
