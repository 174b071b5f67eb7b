"""A segment on disk: written once, its table last; read by its table, array by array.

``docs/reference/format.md``, section 2, defines the arrays.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorstore as ts
import xxhash
from numpy.typing import NDArray

from deltacheck.codec import base as codec_format
from deltacheck.codec.base import STREAMS, U8, U32, U64
from deltacheck.errors import ChainBroken, Damaged, SaveFailed, StorageTimeout
from deltacheck.leaf import grid
from deltacheck.leaf.spec import LeafSpec
from deltacheck.store import documents, layout
from deltacheck.store import manifest as schema
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import ArraySpec, Pending, Reading, StreamWriter
from deltacheck.store.files.chunk_files import Cells, ranges
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.native_files import JoinedRead, StoredArray
from deltacheck.store.files.storage import Place, inside, storage_of
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.manifest import KeyframeAt, LeafEntry, Part, SegmentRef, SegmentTable, Stream

# Columns of a part's index, uint32: the encoder's row, preceded by what makes it readable alone.
# Section 2 of the format fixes the columns.
INDEX = ("leaf", "chunk", "words", "word_bytes", "method", "changed", "gap_bytes", "wide_count")
LEAF, CHUNK, WORDS, WORD_BYTES, METHOD, CHANGED, GAP_BYTES, WIDE_COUNT = range(8)

_STREAM_CONTENT = (
    "bytes of each stream of encoded chunks, one stream after the other, see section 4 of"
    " docs/reference/format.md; the table is in this segment's attributes"
)
# Of a stream: an array of its own costs more than the compression of fewer bytes.
_LEAST_SAMPLE_BYTES = 64 << 10
# Order-0 entropy, of 8 bits per byte, above which a stream is stored uncompressed: zstd would save
# less than about 2 %.
_STORE_ABOVE_BITS = 7.85
# About 16 KiB of a stream, whatever its length.
_SAMPLE_RUNS, _SAMPLE_RUN_BYTES = 128, 128


def natural_attributes(spec: LeafSpec) -> dict[str, Any]:
    """Return the attributes with which plain zarr can read a keyframe array."""
    attributes: dict[str, Any] = {"leaf_path": spec.path, "dtype": spec.dtype}
    if spec.element.storage != spec.dtype:
        attributes["view"] = f"array[...].view(ml_dtypes.{spec.dtype})"
    return attributes


def natural_spec(spec: LeafSpec) -> ArraySpec:
    """Return the array of a keyframe in the leaf's own shape."""
    return ArraySpec.natural(spec.shape, spec.element.storage, spec.chunk, natural_attributes(spec))


def packed_spec(storage: str, length: int) -> ArraySpec:
    """Return the array of packed leaves of one storage type."""
    attributes = {
        "content": (
            f"leaves of storage type {storage}, one after the other; offsets are in this segment's"
            " leaf table"
        )
    }
    return ArraySpec.flat(length, storage, "values", attributes)


def stream_arrays(part: Part) -> dict[str, dict[str, int]]:
    """Return the stream arrays of a part: name -> the bytes of each stream, in their order there.

    The name of an array is the codec of its streams.
    """
    found: dict[str, dict[str, int]] = {}
    for name in STREAMS:
        if name in part.streams:
            stream = part.streams[name]
            found.setdefault(stream.codec, {})[name] = stream.length
    return found


def stream_spec(codec: str, lengths: Mapping[str, int]) -> ArraySpec:
    """Return an array of streams.

    Args:
        codec: That of the streams.
        lengths: An item of ``stream_arrays``.
    """
    attributes = {"streams": dict(lengths), "content": _STREAM_CONTENT}
    return ArraySpec.flat(sum(lengths.values()), "uint8", codec, attributes)


def stream_array(part: int, codec: str) -> str:
    """Return the name of the array of the streams of a part that have a codec."""
    return f"{layout.DELTA}.{part}.{codec}"


def stream_codec(pieces: Sequence[U8]) -> str:
    """Return the codec of a stream: ``store`` if the entropy of a sample shows no gain."""
    if sum(piece.size for piece in pieces) < _LEAST_SAMPLE_BYTES:
        return "stream"
    return "store" if entropy_bits(pieces) > _STORE_ABOVE_BITS else "stream"


def entropy_bits(pieces: Sequence[U8]) -> float:
    """Return the order-0 entropy of a sample of a stream, in bits per byte; 0 without bytes."""
    size = sum(piece.size for piece in pieces)
    if not size:
        return 0.0
    counts = np.bincount(np.concatenate(list(_sample(pieces, size))), minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def entropy_bytes(streams: Iterable[U8]) -> float:
    """Estimate the bytes that streams take in a file, from a sample of each."""
    return math.fsum(stream.size * entropy_bits([stream]) / 8 for stream in streams)


def _sample(pieces: Sequence[U8], size: int) -> Iterator[U8]:
    """Yield runs of bytes, evenly spread over the pieces.

    Single bytes would cost a cache miss each.
    """
    step = max(_SAMPLE_RUN_BYTES, size // _SAMPLE_RUNS)
    begin, run = 0, 0  # offsets of the piece and of the next run from the start of the stream
    for piece in pieces:
        while run < begin + piece.size:
            yield piece[run - begin : run - begin + _SAMPLE_RUN_BYTES]
            run += step
        begin += piece.size


class SegmentWriter:
    """The writer of one segment. No reader sees the segment before a manifest names it.

    Calls must come from one thread at a time. ``streams`` writes the streams of its parts.
    """

    def __init__(
        self,
        root: Place,
        segment_id: str,
        context: ts.Context,
        streams: StreamWriter,
        durability: Durability = Durability.POWER,
    ) -> None:
        self._durability = durability
        self.id = segment_id
        self._root, self.path = root, root / layout.SEGMENTS / segment_id
        self._context = context
        self.parts: list[Part] = []
        self._packed: dict[str, list[NDArray[Any]]] = {}
        self._packed_length: dict[str, int] = {}
        self._pending: list[Pending] = []
        self.streams = streams
        self._has_natural = False
        self._features: set[str] = set()
        self.entries: dict[str, LeafEntry] = {}
        self._digest_tables: list[U64] = []
        self._digest_rows = 0

    def put_natural(self, spec: LeafSpec, name: str, host: U8) -> Pending:
        """Write a whole leaf from ``host`` memory.

        The memory must not change until the returned write is done.
        """
        values = host.view(spec.element.storage).reshape(spec.shape)
        self._has_natural = True
        return self._write(self.path / layout.LEAVES / name, natural_spec(spec), values)

    def put_packed(self, spec: LeafSpec, host: U8) -> KeyframeAt:
        """Keep a copy of a small leaf for this segment's packed arrays."""
        storage = spec.element.storage
        offset = self._packed_length.get(storage, 0)
        # Copied, because packed arrays are written last, when the host memory may hold other
        # content.
        self._packed.setdefault(storage, []).append(host.copy().view(storage))
        self._packed_length[storage] = offset + host.size // spec.element.item_bytes
        return KeyframeAt(packed=storage, offset=offset)

    def put_part(self, index: U32, streams: dict[str, list[U8]]) -> list[Pending]:
        """Begin to write a part; return the writes under way.

        Args:
            index: uint32 ``(rows, 8)``.
            streams: Name -> pieces, which must not change until the writes are done. The dictionary
                is emptied, so that the memory of each array is freed as soon as it is written.
        """
        sizes = {name: sum(piece.size for piece in streams[name]) for name in streams}
        part = Part(
            index.astype("<u4", copy=False).tobytes(),
            {
                name: Stream(sizes[name], stream_codec(streams[name]))
                for name in STREAMS
                if sizes.get(name)
            },
        )
        pending: list[Pending] = []
        self._check_place()
        for codec, lengths in stream_arrays(part).items():
            pieces = [piece for name in lengths for piece in streams.pop(name)]
            path = self.path / stream_array(len(self.parts), codec)
            pending.append(self.streams.write(path, stream_spec(codec, lengths), pieces))
        self.parts.append(part)
        self._features |= schema.method_features(index[:, METHOD])
        self._pending += pending
        return pending

    def _check_place(self) -> None:
        """Check the way to the segment before the first write of all, which makes it."""
        if not self._pending:
            inside(self._root, self.path)

    def _write(self, path: Place, spec: ArraySpec, values: NDArray[Any]) -> Pending:
        self._check_place()
        pending = arrays.write(path, spec, values, self._context)
        self._pending.append(pending)
        return pending

    def enter(
        self,
        spec: LeafSpec,
        digest: str,
        digests: U64,
        *,
        base: str = "",
        key: KeyframeAt | None = None,
        delta: tuple[tuple[int, int, int], ...] = (),
        since: int = -1,
    ) -> LeafEntry:
        """Enter a leaf into the table, and return its entry.

        Args:
            spec: The leaf.
            digest: The leaf digest.
            digests: The digests of the chunks that this segment has of it, uint64 ``(rows, 2)``.
            base: The leaf digest before a delta.
            key: The place of a keyframe in an array.
            delta: The runs of rows.
            since: Of a merged delta, the sequence number of the oldest segment that it replaces.
        """
        entry = self.entries[spec.path] = LeafEntry(
            spec.dtype, spec.shape, spec.chunk, digest, self._digest_rows, base, key, delta, since
        )
        self._digest_tables.append(digests)
        self._digest_rows += digests.shape[0]
        return entry

    def finish(self, timeout_seconds: float) -> SegmentRef:
        """Wait for every write, write the groups and then the table, and sync the directories.

        Args:
            timeout_seconds: The longest wait for the writes.

        Raises:
            SaveFailed: They have not ended in time. A failed write raises the error of TensorStore.
        """
        # Only now are the lengths of the packed arrays known.
        packed = {storage: np.concatenate(pieces) for storage, pieces in self._packed.items()}
        for storage, values in packed.items():
            self._write(
                self.path / layout.PACKED / storage, packed_spec(storage, values.size), values
            )
        self._check_place()
        deadline = Deadline.after(timeout_seconds)
        # The table may name only what the storage has.
        for pending in self._pending:
            try:
                pending.result(timeout=deadline.left)
            except TimeoutError:
                raise StorageTimeout(
                    f"segment {self.id}: writing took longer than the deadline; the storage may"
                    " hang"
                ) from None
        # The writes hold references to the memory that they were given.
        self._pending.clear()
        table = SegmentTable(
            format=layout.FORMAT,
            version=layout.VERSION,
            id=self.id,
            leaves=self.entries,
            digests=np.concatenate(self._digest_tables).astype("<u8", copy=False).tobytes(),
            packed={storage: int(values.size) for storage, values in packed.items()},
            parts=tuple(self.parts),
            must_understand=schema.segment_features(self.entries, self._features),
        )
        content = layout.group_json(documents.to_attributes(table))
        if documents.bound_table(content, "the table about to be written") != table:
            raise SaveFailed(
                f"segment {self.id}: its table does not decode to itself; this is a defect, please"
                " report it"
            )
        # The table comes last: a segment without it is garbage that the collector removes.
        groups = {layout.LEAVES: self._has_natural, layout.PACKED: self._packed}
        folders = [self.path / name for name, anything in groups.items() if anything]
        documents_of = dict.fromkeys(folders, layout.group_json({})) | {self.path: content}
        for folder, document in documents_of.items():
            arrays.write_document(folder, document, self._durability)
        # Files were synced as they were written. Their names survive only from here on.
        self._durability.sync_tree(self.path)
        stored_bytes = storage_of(self.path).bytes_written()
        return SegmentRef(self.id, document_digest(content), stored_bytes)


# Waits for the content of a segment's table, and returns it with the version of its file.
TableRead: TypeAlias = Callable[[], tuple[bytes | None, object]]


def document_digest(content: bytes) -> str:
    """Return the xxh3_128 of a whole file, hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(content))


def start_table(root: Place, ref: SegmentRef) -> TableRead:
    """Begin to read the table of a segment; a local file is read when the result is asked for."""
    file = root / layout.SEGMENTS / ref.id / "zarr.json"
    return storage_of(file).start_read(documents.MAX_DOCUMENT_BYTES)


class Segment:
    """A committed segment, opened for reading.

    Args:
        root: The store. No link may lead from it to the segment (``storage.inside``).
        ref: The segment's reference in a checked manifest.
        table: The result of ``start_table``; ``None``: the table is read now.

    Raises:
        ChainBroken: The segment is missing.
        Damaged: Its table is not the committed one.
    """

    def __init__(self, root: Place, ref: SegmentRef, table: TableRead | None = None) -> None:
        self.id = ref.id
        self.path = root / layout.SEGMENTS / ref.id
        try:
            content = (table or start_table(root, ref))()[0] or b""
        except FileNotFoundError:
            raise ChainBroken(
                f"segment {ref.id} is not in {root}", file=self.path / "zarr.json"
            ) from None
        # Compared before the content is parsed, so only committed bytes reach the parser.
        if document_digest(content) != ref.digest:
            raise Damaged(
                f"{self.path / 'zarr.json'} is not the file that was committed: digest"
                f" {document_digest(content)}, recorded {ref.digest}",
                file=self.path / "zarr.json",
            )
        self.table = documents.bound_table(content, str(self.path / "zarr.json"))
        self.table_bytes = len(content)
        # Section 2 of the format requires this, although the digest has bound the content already.
        if self.table.id != ref.id:
            raise Damaged(
                f"{self.path / 'zarr.json'} says that it is segment {self.table.id}",
                file=self.path / "zarr.json",
            )
        self._parts: dict[int, PartReader] = {}
        self._folders: dict[tuple[str, ...], Place] = {}
        # The pin lives as long as the segment and keeps its files from being removed.
        self.pin: object = None

    @cached_property
    def digests(self) -> U64:
        """Chunk digests, uint64 ``(rows, 2)``."""
        return np.frombuffer(self.table.digests, "<u8").reshape(-1, 2)

    def add_natural(
        self, read: JoinedRead, spec: LeafSpec, name: str, out: U8, box: Sequence[slice]
    ) -> None:
        """Add a keyframe's box to a read into ``out`` (uint8, the box's bytes in C order)."""
        cells = _natural_cells(spec.shape, spec.element.storage, spec.chunk)
        path = _array(self._folder(layout.LEAVES), name)
        read.add_box(StoredArray(path, cells, "values"), box, out)

    def packed_array(self, storage: str) -> StoredArray:
        """Return the array of the packed leaves of a storage type."""
        cells = packed_spec(storage, self.table.packed[storage]).cells
        return StoredArray(_array(self._folder(layout.PACKED), storage), cells, "values")

    def part(self, number: int) -> PartReader:
        """Return the reader of a part."""
        if number not in self._parts:
            self._parts[number] = PartReader(
                self.path,
                number,
                self.table.parts[number],
                frozenset(self.table.must_understand),
            )
        return self._parts[number]

    def delta_bytes(self, entry: LeafEntry) -> int:
        """Return the bytes of the streams of a delta, which a restore decodes."""
        return sum(
            self.part(part).stream_bytes(first, first + rows) for part, first, rows in entry.delta
        )

    def _folder(self, *names: str) -> Place:
        """Return a directory of the segment; ``Damaged`` if the way to it leaves the root."""
        if names not in self._folders:
            path = (self._folder(*names[:-1]) if names[1:] else self.path) / names[-1]
            storage_of(path).check_directory()
            self._folders[names] = path
        return self._folders[names]

    def group_paths(self) -> list[Place]:
        """Return the groups below the segment's own."""
        keys = [entry.key for entry in self.table.leaves.values() if entry.key is not None]
        present = {
            layout.LEAVES: any(key.array for key in keys),
            layout.PACKED: self.table.packed,
        }
        return [self.path / name for name, holds in present.items() if holds]

    def leaves_in(self, file: str) -> list[str]:
        """Return the leaves that need an array of this segment, or a file of it.

        All leaves need its table.
        """
        names = file.removeprefix(f"{self.path}/").split("/")
        match [*names[0].split(".")[:2], *names[1:]][:2]:
            case (layout.LEAVES, name):
                return [
                    path
                    for path, entry in self.table.leaves.items()
                    if entry.key is not None and entry.key.array == name
                ]
            case (layout.PACKED, storage):
                return [
                    path
                    for path, entry in self.table.leaves.items()
                    if entry.key is not None and entry.key.packed == storage
                ]
            case (layout.DELTA, number):
                return [
                    path
                    for path, entry in self.table.leaves.items()
                    if any(str(run[0]) == number for run in entry.delta)
                ]
        return list(self.table.leaves)

    def documents(self) -> dict[Place, bytes]:
        """Return the ``zarr.json`` of every directory below the segment's own."""
        groups = dict.fromkeys(self.group_paths(), layout.group_json({}))
        return groups | {path: spec.document() for path, spec in self.array_specs().items()}

    def array_specs(self) -> dict[Place, ArraySpec]:
        """Return every array of the segment and the metadata that it must have."""
        specs: dict[Place, ArraySpec] = {}
        for path, entry in self.table.leaves.items():
            if entry.key is not None and entry.key.array:
                specs[self.path / layout.LEAVES / entry.key.array] = natural_spec(entry.spec(path))
        for storage, length in self.table.packed.items():
            specs[self.path / layout.PACKED / storage] = packed_spec(storage, length)
        for number, part in enumerate(self.table.parts):
            specs |= {
                self.path / stream_array(number, codec): stream_spec(codec, lengths)
                for codec, lengths in stream_arrays(part).items()
            }
        return specs


def load_tables(parts: Iterable[PartReader]) -> None:
    """Check the indexes of some parts, all of those that were not checked yet by one call.

    Raises:
        Damaged: A row of an index describes no chunk: sizes are computed from all rows.
    """
    parts = [part for part in parts if part.stored_table is None]
    if not parts:
        return
    ends = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    index = np.frombuffer(b"".join(part.stored_index for part in parts), "<u4").reshape(
        -1, len(INDEX)
    )
    _check_indexes(parts, ends, index)
    offsets = np.zeros((ends[-1] + 1, len(STREAMS)), np.uint64)
    np.cumsum(stream_size_table(index), axis=0, out=offsets[1:])
    totals = offsets.sum(axis=1)
    for part, begin, end in zip(parts, ends, ends[1:], strict=False):
        of_part = slice(begin, end + 1)
        table = _PartTable(
            index[begin:end], offsets[of_part] - offsets[begin], totals[of_part].tolist()
        )
        part.check_lengths(table.offsets[-1])
        part.stored_table = table


def _check_indexes(parts: Sequence[PartReader], ends: Sequence[int], index: U32) -> None:
    """Raise ``Damaged`` if a row of an index describes no chunk."""
    # Method 0, unchanged, is never stored.
    is_known = (
        np.isin(index[:, WORD_BYTES], (1, 2, 4, 8))
        & (index[:, METHOD] > 0)
        & (index[:, METHOD] < len(codec_format.METHOD_NAMES))
    )
    if not is_known.all():
        row = int(np.argmin(is_known))
        number = bisect.bisect_right(ends, row) - 1
        raise Damaged(
            f"{parts[number].path}: row {row - ends[number]} of its index has an unknown method"
            " or word size"
        )
    needed = schema.method_features(index[:, METHOD])
    for part, begin, end in zip(parts, ends, ends[1:], strict=False):
        if needed <= part.features:
            continue
        if missing := schema.method_features(index[begin:end, METHOD]) - part.features:
            raise Damaged(
                f"{part.path}: its index has chunks of the feature {min(missing)!r}, which the"
                " segment's table does not list"
            )


def _array(folder: Place, name: str) -> Place | str:
    """Return an array's directory as ``JoinedRead`` takes it: as text if it is a local one."""
    return f"{folder}/{name}" if isinstance(folder, Path) else folder / name


@lru_cache(256)  # leaves have few shapes
def _natural_cells(shape: tuple[int, ...], storage: str, chunk: tuple[int, ...]) -> Cells:
    return ArraySpec.natural(shape, storage, chunk, {}).cells


class _PartTable(NamedTuple):
    """The rows of a part.

    Attributes:
        rows: uint32 ``(rows, 8)``, with the columns ``INDEX``.
        offsets: The offsets of the rows' bytes in each of ``STREAMS``, uint64
            ``(rows + 1, streams)``.
        ends: Bytes of all streams before each row and after the last one.
    """

    rows: U32
    offsets: U64
    ends: list[int]


class PartReader:
    """The rows of one part and their streams.

    Attributes:
        path: The common beginning of the paths of its arrays.
        folder: The directory of the segment.
        features: Those that the table of the segment lists.
        rows: The number of rows.
        stored_index: The bytes of the index.
        stored_table: The rows, once they were checked.
    """

    def __init__(self, folder: Place, number: int, part: Part, features: frozenset[str]) -> None:
        self.path = folder / f"{layout.DELTA}.{number}"
        self.folder = folder
        self.features = features
        self.rows = part.rows
        self.stored_index = part.index
        self.stored_table: _PartTable | None = None
        self._number, self._part = number, part

    @property
    def index(self) -> U32:
        """The index of the part, uint32 ``(rows, 8)``, with the columns ``INDEX``.

        ``Damaged`` if a row describes no chunk.
        """
        return self.table.rows

    @property
    def table(self) -> _PartTable:
        """The rows of the part; ``Damaged`` as for ``index``."""
        if self.stored_table is None:
            load_tables([self])
            assert self.stored_table is not None
        return self.stored_table

    def check_lengths(self, sizes: U64) -> None:
        """Raise ``Damaged`` unless the streams have the bytes that the index asks for.

        From here on, offsets of the index cannot lead out of a stream.
        """
        for name, end in zip(STREAMS, sizes.tolist(), strict=True):
            length = self._part.streams[name].length if name in self._part.streams else 0
            if end != length:
                raise Damaged(
                    f"{self.path}: stream {name} has {length} bytes, its index asks for {end}",
                    file=self.path,
                )

    @cached_property
    def stream_arrays(self) -> tuple[list[StoredArray], NDArray[np.int64], U64]:
        """The arrays of streams; for each of ``STREAMS`` its array, and its first byte there."""
        arrays: list[StoredArray] = []
        number, first_byte = np.zeros(len(STREAMS), np.int64), np.zeros(len(STREAMS), np.uint64)
        for codec, lengths in stream_arrays(self._part).items():
            columns = [STREAMS.index(name) for name in lengths]
            number[columns] = len(arrays)
            first_byte[columns] = np.cumsum([0, *lengths.values()])[:-1]
            cells = ArraySpec.flat(sum(lengths.values()), "uint8", codec, {}).cells
            arrays.append(
                StoredArray(_array(self.folder, stream_array(self._number, codec)), cells, codec)
            )
        return arrays, number, first_byte

    def stream_bytes(self, first: int, stop: int) -> int:
        """Return the bytes of the streams of rows ``first`` to ``stop``."""
        return self.table.ends[stop] - self.table.ends[first]

    def streams(self, first: int, stop: int) -> Mapping[str, U8]:
        """Read the streams of rows ``first`` to ``stop``; those without bytes are left out."""
        read = JoinedRead(self.folder)
        begins = join_rows(read, [self], np.array([0]), np.array([first]), np.array([stop]))[0]
        sizes = (self.table.offsets[stop] - self.table.offsets[first]).tolist()
        data = np.empty(read.size, np.uint8)
        Reading(read, self.folder, data).result()
        return {
            name: data[begin : begin + size]
            for name, begin, size in zip(STREAMS, begins.tolist(), sizes, strict=True)
            if size
        }


def join_rows(
    read: JoinedRead,
    parts: Sequence[PartReader],
    part_numbers: NDArray[np.int64],
    first: NDArray[np.int64],
    stop: NDArray[np.int64],
) -> U64:
    """Add the streams of ranges of rows to a joined read.

    Args:
        read: The read.
        parts: The parts.
        part_numbers: The number of each range's part, ascending.
        first: The first row of each range; the ranges of a part ascend.
        stop: The row after the last one of each range.

    Returns:
        The offset in the memory of each row's bytes in each stream, uint64
        ``(rows of all ranges, streams)``; undefined if a row has no bytes in a stream.
    """
    tables = [part.table.offsets for part in parts]
    offsets, bases = np.concatenate(tables), np.cumsum([0, *map(len, tables)])[part_numbers]
    begin = offsets[bases + first]
    sizes = offsets[bases + stop] - begin
    arrays, numbers, first_bytes = zip(*(part.stream_arrays for part in parts), strict=True)
    first_array = np.cumsum([0, *map(len, arrays)])[:-1, None]
    # One stream after the other, and so ascending in each array.
    present = np.nonzero(sizes)
    array = (np.stack(numbers) + first_array)[part_numbers][present]
    first_byte = (np.stack(first_bytes)[part_numbers] + begin)[present]
    order = np.lexsort((first_byte, array))
    memory = np.zeros(sizes.shape, np.uint64)
    memory[tuple(axis[order] for axis in present)] = read.add(
        list(itertools.chain(*arrays)), array[order], first_byte[order], sizes[present][order]
    )
    # Differences of unsigned numbers wrap, and so does the sum.
    shifts = np.repeat(memory - begin, stop - first, axis=0)
    joined: U64 = offsets[ranges(bases + first, stop - first)] + shifts
    return joined


def stream_sizes(index: U32) -> dict[str, U64]:
    """Return the bytes of each row in each stream (format.md 4.2), uint64 ``(rows,)`` each."""
    return dict(zip(STREAMS, stream_size_table(index).T, strict=True))


def stream_size_table(index: U32) -> U64:
    """Return the bytes of each row in each stream, uint64 ``(rows, streams)``."""
    # In uint64: the bytes of a chunk may exceed 32 bits.
    words, width = index[:, WORDS].astype(np.uint64), index[:, WORD_BYTES].astype(np.uint64)
    method = index[:, METHOD].copy()
    for plain, ordered in codec_format.ORDERED.items():
        method[method == ordered] = plain
    law = method.copy()
    method[(law == codec_format.GRADIENT_LAW) | (law == codec_format.MEAN_LAW)] = (
        codec_format.SPARSE
    )
    positions = (method == codec_format.SPARSE) | (method == codec_format.BITMAP)
    tile_words = np.uint64(codec_format.TILE_BYTES) // np.maximum(width, np.uint64(1))
    tiles = (words + tile_words - np.uint64(1)) // np.maximum(tile_words, np.uint64(1))
    sizes = np.zeros((index.shape[0], len(STREAMS)), np.uint64)

    def fill(name: str, condition: NDArray[np.bool_], size: U64) -> None:
        np.copyto(sizes[:, STREAMS.index(name)], size, where=condition)

    fill("tiles", positions, tiles * np.uint64(6))
    fill("gaps", method == codec_format.SPARSE, index[:, GAP_BYTES].astype(np.uint64))
    fill("bitmap", method == codec_format.BITMAP, (words + np.uint64(7)) // np.uint64(8))
    fill("values", positions, index[:, CHANGED].astype(np.uint64))
    fill("wide", positions, index[:, WIDE_COUNT].astype(np.uint64) * width)
    fill("raw", method == codec_format.RAW, words * width)
    for name, number in (("diff", codec_format.DIFF), ("plane", codec_format.PLANES)):
        if (method == number).any():
            for k in range(8):
                fill(f"{name}{k}", (method == number) & (width > k), words)
    if (is_law := np.isin(law, codec_format.LAWS)).any():
        part = words // np.uint64(codec_format.LAW_PARTS)
        fill("law", is_law, np.full_like(words, codec_format.LAW_BYTES))
        for k in range(2):
            fill(f"plane{k}", law == codec_format.GRADIENT_LAW, part)
        for k in range(4):
            fill(f"diff{k}", law == codec_format.MEAN_LAW, part)
            fill(f"diff{k}", law == codec_format.STEPS_LAW, words)
    return sizes


def is_packed(spec: LeafSpec) -> bool:
    """Return whether a keyframe of this leaf shares an array with other small ones."""
    return spec.raw_bytes < grid.PACK_BELOW_BYTES


def entries_by_path(
    segments: Sequence[Segment], paths: Set[str] | None = None
) -> dict[str, list[tuple[int, LeafEntry]]]:
    """Return the entries of some segments by path, with the segment's position, oldest first.

    Entries that a merged delta of a later segment replaces are left out.

    Args:
        segments: The segments in order.
        paths: Paths to look for; ``None``: all.
    """
    entries: dict[str, list[tuple[int, LeafEntry]]] = {}
    for number, segment in enumerate(segments):
        for path, entry in segment.table.leaves.items():
            if paths is not None and path not in paths:
                continue
            earlier = entries.setdefault(path, [])
            # Segments ascend, so what a merged delta replaces stands at the end.
            while (
                entry.since >= 0
                and earlier
                and layout.seq_of(segments[earlier[-1][0]].id) >= entry.since
            ):
                earlier.pop()
            earlier.append((number, entry))
    return entries
