"""One save under way: capture -> encode -> write, and what its manifest will say. ``save.py`` runs
it on the right threads.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from deltacheck.codec import default_codec
from deltacheck.codec.base import CHUNK, METHOD, U8, U32, U64, Codec, Encoded, GroupCodec, GroupJob
from deltacheck.errors import SaveFailed, StorageTimeout
from deltacheck.leaf.contracts import RANK, Promise, name_of
from deltacheck.leaf.digest import chunk_digests, digest_of, leaf_digest
from deltacheck.leaf.spec import LeafKind, LeafReport, LeafSpec, SaveReport
from deltacheck.leaf.tree import Node
from deltacheck.policy import Policy
from deltacheck.policy.keyframes import needs_keyframe
from deltacheck.save.handle import SaveHandle
from deltacheck.save.options import SaveOptions
from deltacheck.store import layout, segment
from deltacheck.store.documents import Written
from deltacheck.store.files.arrays import Pending
from deltacheck.store.files.effort import Effort
from deltacheck.store.manifest import (
    DERIVED,
    REPLAY,
    TILES,
    Derived,
    KeyframeAt,
    LeafEntry,
    LeafRecord,
    Manifest,
    Replay,
    SegmentRef,
)
from deltacheck.store.root import Store
from deltacheck.store.segment import SegmentWriter, is_packed, stream_sizes

# Encoded bytes after which a part is closed and written, and its share of the host cache where that
# is less: one part is being made, one run of the codec at work, and the others on their way to
# disk.
PART_BYTES = 64 << 20
PARTS_PER_CACHE = 8
KEYFRAME_WINDOW_BYTES = (
    32 << 20
)  # of keyframes that TensorStore holds encoded at a time; no more than the host cache


class Coded(NamedTuple):
    """What is stored in place of a leaf's bytes: ``data``, in the form that the codec takes, of
    which
    ``spec`` says what it is.

    Without ``data`` what is stored already stays; without ``spec`` nothing is stored.
    """

    spec: LeafSpec | None
    data: Any


@dataclass(frozen=True, slots=True)
class Terms:
    """What a manifest says beside what is stored: of leaves that are derived or not exact, and the
    stage of the policy.
    """

    derived: Mapping[str, Derived] = field(default_factory=dict)
    contracts: Mapping[str, Promise] = field(default_factory=dict)
    stage: str = ""


@dataclass(frozen=True, slots=True)
class LeafSource:
    """One leaf of a save. ``current()`` gives its bytes as they are now, in the form that the codec
    takes, or what is stored instead.

    ``lazy``: the caller promises that the bytes stay as they are until the handle is captured; else
    they are read before ``save`` returns. ``recheck()``, called after the capture, raises
    ``SnapshotTorn`` where that promise was broken. ``whole``: the leaf has nothing to do with what
    was saved before: it is written whole, encoded, and no shadow of it is kept; ``current()`` then
    gives host memory.
    """

    spec: LeafSpec
    current: Callable[[], Any]
    lazy: bool = False
    recheck: Callable[[], None] | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts that all saves of a saver share."""

    store: Store
    codec: Codec[Any]
    options: SaveOptions

    @property
    def policy(self) -> Policy:
        """The policy of every save."""
        return self.options.policy

    @property
    def host_cache_bytes(self) -> int:
        """The most encoded bytes in memory."""
        return self.options.host_cache_bytes

    @property
    def io_timeout_seconds(self) -> float:
        """The longest wait for the storage."""
        return self.options.io_timeout_seconds

    @property
    def keep_shadow(self) -> bool:
        """True if a copy of each leaf is held to compare with."""
        return self.options.keeps_shadow

    @property
    def verify(self) -> str:
        """The time at which a save is read back."""
        return self.options.verify


@dataclass(slots=True)
class Leaf:
    """What the saver remembers of a leaf between saves."""

    spec: LeafSpec
    bounds: U64
    base: Any = None
    digests: U64 = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    digest: str = ""
    key_segment: str = ""
    delta_segments: list[str] = field(default_factory=list)
    delta_bytes: list[int] = field(default_factory=list)  # what a restore decodes of each
    reading: Any = None  # the write that still reads ``base`` where it lies

    def is_due(self, policy: Policy) -> bool:
        """Whether it is written whole."""
        return needs_keyframe(
            policy,
            self.spec.path,
            self.spec.raw_bytes,
            None if self.base is None else self.delta_bytes,
        )

    def free_base(self, timeout: float) -> None:
        """Wait until no write reads the base any more."""
        if self.reading is not None:
            await_write(self.reading, timeout)
            self.reading = None


def await_write(pending: Pending, timeout: float) -> None:
    """Wait for a write; raises what failed it, or ``StorageTimeout``."""
    try:
        pending.result(timeout=timeout)
    except TimeoutError:
        raise StorageTimeout(
            f"the storage did not finish a write within {timeout:g} s; it may hang"
        ) from None


class _Span(NamedTuple):
    """Chunks of one leaf in a piece: those that the piece numbers from ``start`` on are the leaf's
    from ``first_chunk`` on.
    """

    path: str
    start: int
    first_chunk: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one call of the codec made: chunks of one leaf or of several, as the spans say (in
    order).
    """

    spans: tuple[_Span, ...]
    encoded: Encoded
    digests: U64 | None  # of the rows, where the codec made them

    @property
    def stored_bytes(self) -> int:
        return (
            sum(stream.size for stream in self.encoded.streams.values()) + self.encoded.rows.nbytes
        )


class Work:
    """One save under way."""

    def __init__(
        self,
        setup: Setup,
        epoch: int,
        shadow: dict[str, Leaf],
        handle: SaveHandle,
        seq: int,
        tree: Node,
        sources: Mapping[str, LeafSource],
        metrics: Mapping[str, float],
        commit: Callable[[Manifest], Written],
        terms: Callable[[], Terms],
        effort: Effort,
        due: frozenset[str],
        replay: Replay | None = None,
        note: str = "",
        abandon: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.setup = setup
        self.epoch, self.leaves = epoch, shadow
        self.handle = handle
        self.seq = seq
        self.tree = tree
        self.paths = list(sources)
        self.sources = {path: source.spec for path, source in sources.items()}
        self.specs: dict[str, LeafSpec] = {}  # of what is stored
        self.lazy = deque(source for source in sources.values() if source.lazy)
        self.metrics = metrics
        self.commit, self.abandon = commit, abandon
        self.terms = terms
        self.due = due
        self.replay, self.note = replay, note
        self.order = {path: number for number, path in enumerate(sources)}
        self.may_be_committed = False
        self.begin = time.perf_counter()
        self.writer: SegmentWriter = setup.store.writer(seq, effort)
        self.keyframes: list[str] = []
        self.pieces: list[_Piece] = []
        self.unsealed_bytes = 0
        self.part_bytes = max(1, min(PART_BYTES, setup.host_cache_bytes // PARTS_PER_CACHE))
        self.in_flight: deque[tuple[int, list[Any]]] = deque()
        self.in_flight_bytes = 0
        self.delta_rows: dict[str, list[tuple[int, int, int]]] = {}
        self.row_chunks: dict[str, list[U32]] = {}
        self.row_digests: dict[str, list[U64]] = {}
        self.changed: dict[str, int] = {}
        self.encoded_bytes: dict[str, int] = {}
        self.entries: dict[str, LeafEntry] = {}
        self.digest_tables: list[U64] = []
        self.segments: set[str] = set()
        self.records: dict[str, LeafRecord] = {}
        self.live: dict[
            str, str
        ] = {}  # digest of each leaf as the training had it, where the save is read back

    # --- capture: memory work only, from the training thread or the encoder thread ----------------

    def capture(self, sources: deque[LeafSource]) -> None:
        """Bring the shadow to the leaves' present content, keeping what changed. Takes what it
        captures out of ``sources``: a leaf that only the save still holds is then freed before the
        next one is read.
        """
        codec, policy = self.setup.codec, self.setup.policy
        grouped: list[tuple[Leaf, LeafSource, Any]] = []
        while sources:
            source = sources.popleft()
            self.handle._beat()
            known = self.leaves.get(source.spec.path)
            if known is not None:
                known.free_base(self.setup.io_timeout_seconds)
            current, spec = source.current(), source.spec
            if isinstance(current, Coded):
                if current.spec is None:
                    self.leaves.pop(spec.path, None)
                    continue
                spec, current = current.spec, current.data
            self.specs[spec.path] = spec
            if current is None and (known is None or known.spec != spec):
                raise SaveFailed(
                    f"leaf {spec.path!r} was to stay as it is, but an earlier save that failed took"
                    " it along"
                )
            if current is not None and self.setup.verify != "none":
                host = codec.host(current)
                self.live[spec.path] = digest_of(spec, host)
            if source.whole and spec.raw_bytes:
                self._encode_whole(spec, current)
                continue
            if known is None or known.spec != spec:
                leaf = self.leaves[spec.path] = Leaf(spec, spec.bounds())
            else:
                leaf = known
            if current is None:
                pass
            elif spec.path in self.due or leaf.is_due(policy):
                leaf.base = codec.copy(current, leaf.base)
                self.keyframes.append(spec.path)
            elif isinstance(codec, GroupCodec) and codec.grouped(current, leaf.base):
                grouped.append((leaf, source, current))
                continue
            else:
                self._encode(leaf, current)
            if source.recheck is not None:
                source.recheck()
        if grouped:
            self._encode_grouped(grouped)

    def _encode(self, leaf: Leaf, current: Any) -> None:
        codec, word_bytes, bounds = self.setup.codec, leaf.spec.word_bytes, leaf.bounds
        chunks = bounds.size - 1
        longest = max(1, int(np.diff(bounds).max(initial=1)) * word_bytes)
        step = (
            chunks
            if codec.run_bytes is None
            else max(1, min(codec.run_bytes, self.part_bytes) // longest)
        )
        for first in range(0, chunks, max(1, step)):
            stop = min(chunks, first + step)
            low, high = int(bounds[first]) * word_bytes, int(bounds[stop]) * word_bytes
            self._make_room(high - low)
            if (low, high) == (0, leaf.spec.raw_bytes):
                encoded, leaf.base = codec.encode(current, leaf.base, bounds, word_bytes)
            else:
                encoded, _ = codec.encode(
                    current[low:high],
                    leaf.base[low:high],
                    bounds[first : stop + 1] - bounds[first],
                    word_bytes,
                )
            self._keep(_Piece((_Span(leaf.spec.path, 0, first),), encoded, None))

    def _encode_whole(self, spec: LeafSpec, current: U8) -> None:
        """Encode a leaf without a base, each of its chunks."""
        codec, word_bytes = default_codec(), spec.word_bytes
        leaf = self.leaves[spec.path] = Leaf(spec, spec.bounds())
        bounds, chunks = leaf.bounds, spec.chunk_count
        leaf.digests = np.zeros((chunks, 2), np.uint64)
        longest = int(np.diff(bounds).max()) * word_bytes
        step = (
            chunks
            if codec.run_bytes is None
            else max(1, min(codec.run_bytes, self.part_bytes) // longest)
        )
        for first in range(0, chunks, step):
            stop = min(chunks, first + step)
            low, high = int(bounds[first]) * word_bytes, int(bounds[stop]) * word_bytes
            self._make_room(high - low)
            window = bounds[first : stop + 1] - bounds[first]
            encoded, _ = codec.encode(current[low:high], None, window, word_bytes)
            digests = chunk_digests(current[low:high], window, word_bytes, range(stop - first))
            self._keep(_Piece((_Span(spec.path, 0, first),), encoded, digests))

    def _encode_grouped(self, grouped: Sequence[tuple[Leaf, LeafSource, Any]]) -> None:
        codec = self.setup.codec
        assert isinstance(codec, GroupCodec)

        def all_read() -> None:
            for _, source, _ in grouped:
                if source.recheck is not None:
                    source.recheck()
            self.handle._mark_reads_enqueued()

        jobs = [
            GroupJob(current, leaf.base, leaf.bounds, leaf.spec.word_bytes)
            for leaf, _, current in grouped
        ]
        for made in codec.encode_group(jobs, self._make_room, all_read):
            for job, base in made.bases.items():
                grouped[job][0].base = base
            starts = np.cumsum([0] + [span.chunks for span in made.spans]).tolist()
            spans = [
                _Span(grouped[span.job][0].spec.path, start, span.first_chunk)
                for span, start in zip(made.spans, starts, strict=False)
            ]
            self._keep(_Piece(tuple(spans), made.encoded, made.digests))

    def _keep(self, piece: _Piece) -> None:
        if piece.encoded.rows.shape[0] == 0:
            return
        self.pieces.append(piece)
        self.unsealed_bytes += piece.stored_bytes
        if self.unsealed_bytes >= self.part_bytes:
            self.seal()

    def _make_room(self, wanted: int) -> None:
        """Wait for the disk where ``wanted`` more bytes (the most that encoding as many gives)
        would not fit the host cache.
        """
        self.handle._beat()
        limit = (
            self.setup.host_cache_bytes - self.writer.scratch_bytes - wanted - self.unsealed_bytes
        )
        while self.in_flight and self.in_flight_bytes > limit:
            size, pending = self.in_flight.popleft()
            for write in pending:
                await_write(write, self.setup.io_timeout_seconds)
                self.handle._beat()
            self.in_flight_bytes -= size

    # --- encode: from the encoder thread (and from the training thread where host_cache_bytes is
    # used up)

    def seal(self) -> None:
        """Close the pieces at hand as a part and start to write it."""
        if not self.pieces:
            return
        pieces, size = self.pieces, self.unsealed_bytes
        self.pieces, self.unsealed_bytes = [], 0
        index, row = [], 0
        part = len(self.writer.parts)
        for piece in pieces:
            for span, first, rows in _rows_of_spans(piece):
                leaf, path = self.leaves[span.path], span.path
                index.append(_index_rows(rows, self.order[path], leaf))
                self.delta_rows.setdefault(path, []).append((part, row, rows.shape[0]))
                self.row_chunks.setdefault(path, []).append(rows[:, CHUNK])
                if piece.digests is not None:
                    self.row_digests.setdefault(path, []).append(
                        piece.digests[first : first + rows.shape[0]]
                    )
                row += rows.shape[0]
        names = list(dict.fromkeys(name for piece in pieces for name in piece.encoded.streams))
        streams = {
            name: [p.encoded.streams[name] for p in pieces if name in p.encoded.streams]
            for name in names
        }
        del pieces, piece  # each stream's memory goes when it is written
        table = np.concatenate(index)
        self._count(table)
        pending = self.writer.put_part(table, streams)
        size = self.writer.held_bytes(size)
        self.in_flight.append((size, pending))
        self.in_flight_bytes += size

    def _count(self, table: U32) -> None:
        """Add a part's rows to what is told of their leaves."""
        stored = np.sum(list(stream_sizes(table).values()), axis=0)
        # The rows of a leaf are consecutive.
        starts = np.flatnonzero(np.diff(table[:, segment.LEAF], prepend=np.uint32(0xFFFFFFFF)))
        changed = np.add.reduceat(table[:, segment.CHANGED].astype(np.uint64), starts)
        for start, words, size in zip(
            starts.tolist(), changed.tolist(), np.add.reduceat(stored, starts).tolist(), strict=True
        ):
            path = self.paths[table[start, segment.LEAF]]
            self.changed[path] = self.changed.get(path, 0) + words
            self.encoded_bytes[path] = self.encoded_bytes.get(path, 0) + size

    def encode(self) -> None:
        """Everything between capture and the disk: parts, keyframe writes, digests, and what the
        manifest will say.
        """
        self.seal()
        leaves = self.leaves
        names = layout.array_names(
            [path for path in self.keyframes if not is_packed(leaves[path].spec)]
        )
        window_bytes = min(KEYFRAME_WINDOW_BYTES, self.setup.host_cache_bytes)
        window: deque[tuple[int, Any]] = deque()
        for path in sorted(self.keyframes):
            self.handle._beat()
            leaf = leaves[path]
            host = self.setup.codec.host(leaf.base)
            digests = chunk_digests(
                host, leaf.bounds, leaf.spec.word_bytes, range(leaf.bounds.size - 1)
            )
            if not self.setup.keep_shadow:
                leaf.base = None
                if leaf.key_segment and np.array_equal(digests, leaf.digests):
                    continue  # it stands in an earlier segment
            leaf.digests = digests
            if is_packed(leaf.spec):
                key = self.writer.put_packed(leaf.spec, host)
            else:
                writing = self.writer.put_natural(leaf.spec, names[path], host)
                leaf.reading = writing if self.setup.keep_shadow else None
                key = KeyframeAt(array=names[path])
                window.append((host.nbytes, writing))
                while len(window) > 1 and sum(size for size, _ in window) > window_bytes:
                    await_write(window.popleft()[1], self.setup.io_timeout_seconds)
            self.changed[path] = int(leaf.bounds[-1])
            self.encoded_bytes[path] = host.nbytes
            leaf.key_segment, leaf.delta_segments, leaf.delta_bytes = self.writer.id, [], []
            self._enter(leaf, leaf.digests, key=key)
        for path, chunks in sorted(self.row_chunks.items()):
            leaf = leaves[path]
            stored = np.concatenate(chunks).astype(np.int64)
            made = self.row_digests.get(path)
            fresh = (
                np.concatenate(made)
                if made
                else chunk_digests(
                    self.setup.codec.host(leaf.base),
                    leaf.bounds,
                    leaf.spec.word_bytes,
                    stored.tolist(),
                )
            )
            leaf.digests = leaf.digests.copy()
            leaf.digests[stored] = fresh
            if leaf.digest:
                leaf.delta_segments = [*leaf.delta_segments, self.writer.id]
                leaf.delta_bytes = [*leaf.delta_bytes, self.encoded_bytes[path]]
            else:  # whole, encoded
                leaf.key_segment = self.writer.id
            self._enter(leaf, fresh, delta=tuple(self.delta_rows[path]))
        for path in filter(self.specs.__contains__, self.paths):
            leaf, spec = leaves[path], self.specs[path]
            self.segments |= {leaf.key_segment, *leaf.delta_segments}
            self.records[path] = LeafRecord(spec.dtype, spec.shape, spec.chunk, leaf.digest)

    def _enter(
        self,
        leaf: Leaf,
        digests: U64,
        key: KeyframeAt | None = None,
        delta: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        before, leaf.digest = leaf.digest, leaf_digest(leaf.digests)
        start = sum(table.shape[0] for table in self.digest_tables)
        self.digest_tables.append(digests)
        spec = leaf.spec
        base = before if key is None else ""
        self.entries[spec.path] = LeafEntry(
            spec.dtype, spec.shape, spec.chunk, leaf.digest, start, base, key, delta
        )

    # --- commit: from the committer thread --------------------------------------------------------

    def finish_segment(self) -> SegmentRef | None:
        """Make the segment durable; ``None`` where nothing changed and there is none."""
        if not self.entries:
            return None
        deadline = time.monotonic() + self.setup.io_timeout_seconds
        return self.writer.finish(self.entries, np.concatenate(self.digest_tables), deadline)

    def manifest(self, refs: Mapping[str, SegmentRef]) -> Manifest:
        terms = self.terms()
        segments = tuple(refs[name] for name in sorted(self.segments))
        several = len({layout.seq_of(ref.id) for ref in segments}) < len(
            segments
        )  # goes on from what ranks have written together
        features = {
            DERIVED: terms.derived or terms.contracts,
            REPLAY: self.replay is not None,
            TILES: several,
        }
        weakest = max(
            (name_of(promise.terms) for promise in terms.contracts.values()),
            key=RANK.index,
            default="exact",
        )
        return Manifest(
            format=layout.FORMAT,
            version=layout.VERSION,
            seq=self.seq,
            step=self.handle.step,
            nonce=secrets.token_hex(8),
            time=time.time(),
            writer=f"process {os.getpid()} on {socket.gethostname()}",
            contract=weakest,
            segments=segments,
            lanes=(tuple(range(len(segments))),) if several else (),
            tree=self.tree,
            leaves=self.records,
            metrics={
                name: value if math.isfinite(value) else str(value)
                for name, value in self.metrics.items()
            },
            must_understand=tuple(name for name, there in features.items() if there),
            derived=dict(terms.derived),
            contracts=dict(terms.contracts),
            stage=terms.stage,
            replay=self.replay,
            durability=self.setup.store.durability.value,
        )

    def report(self, stored_bytes: int, digest: str) -> SaveReport:
        leaves = tuple(self._leaf_report(spec) for spec in self.sources.values())
        inputs = set() if self.replay is None else self.replay.inputs
        return SaveReport(
            step=self.handle.step,
            seq=self.seq,
            raw_bytes=sum(leaf.raw_bytes for leaf in leaves if leaf.path not in inputs),
            stored_bytes=stored_bytes,
            blocking_seconds=self.handle.blocking_seconds,
            durable_seconds=time.perf_counter() - self.begin,
            leaves=leaves,
            metrics=dict(self.metrics),
            replayed_steps=0 if self.replay is None else len(self.replay.steps),
            note=self.note,
            durability=self.setup.store.durability.value,
            digest=digest,
        )

    def _leaf_report(self, spec: LeafSpec) -> LeafReport:
        entry = self.entries.get(spec.path)
        kind = (
            LeafKind.UNCHANGED
            if entry is None
            else LeafKind.KEYFRAME
            if entry.is_whole
            else LeafKind.DELTA
        )
        stored = self.specs.get(spec.path)
        if stored is None:
            kind, stored = LeafKind.DERIVED, spec
        words = stored.raw_bytes // stored.word_bytes
        return LeafReport(
            spec.path,
            kind,
            spec.raw_bytes,
            self.encoded_bytes.get(spec.path, 0),
            words,
            self.changed.get(spec.path, 0),
        )


def _rows_of_spans(piece: _Piece) -> Iterator[tuple[_Span, int, U32]]:
    """Per span of a piece that has rows: the span, its first row, and its rows with the leaf's own
    chunk numbers.
    """
    rows = piece.encoded.rows
    edges = [
        *np.searchsorted(rows[:, CHUNK], [span.start for span in piece.spans]).tolist(),
        rows.shape[0],
    ]
    for span, first, stop in zip(piece.spans, edges, edges[1:], strict=False):
        if first < stop:
            own = rows[first:stop].copy()
            own[:, CHUNK] -= np.uint32(span.start)
            own[:, CHUNK] += np.uint32(span.first_chunk)
            yield span, first, own


def _index_rows(rows: U32, leaf_number: int, leaf: Leaf) -> U32:
    """The encoder's rows as rows of a part's index."""
    words = np.diff(leaf.bounds)[rows[:, CHUNK]].astype(np.uint32)
    about = [np.full(rows.shape[0], leaf_number, np.uint32), rows[:, CHUNK], words]
    return np.column_stack(
        [*about, np.full(rows.shape[0], leaf.spec.word_bytes, np.uint32), rows[:, METHOD:]]
    ).astype(np.uint32)
