"""zarr arrays: their metadata, and how they are written and read.

A reader never trusts a stored ``zarr.json``. It reads every array as the leaf table implies, so a
forged or damaged file can neither redirect a read nor make it allocate. TensorStore writes whole
leaves and tables, the native module streams, and the native module reads all of them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from deltacheck.codec.extension import native
from deltacheck.errors import Damaged, StorageFailed
from deltacheck.leaf import grid
from deltacheck.leaf.external_errors import unreadable
from deltacheck.store.files import chunk_files
from deltacheck.store.files.background import TIMEOUT_SECONDS, Background, wait_for
from deltacheck.store.files.chunk_files import Cells
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.native_files import JoinedRead
from deltacheck.store.files.storage import Place, storage_of
from deltacheck.store.lock.deadline import Deadline

Attributes = Mapping[str, Any]

# Fixed by section 1 of the format: a reader computes the cut of an array from its length alone.
STREAM_CHUNK_BYTES = 1 << 20
# Of each thread that makes a stream's files, see xla_ffi/encoder/entropy.h.
_SCRATCH_BYTES = 4 << 20
# Of streams, whose matches beyond runs hardly exist: level 7 takes two to three times the work for
# 0.1 % less.
_ZSTD_LEVEL = 1
_PLANE_BYTES = 128 << 10  # of one Huffman code of zstd
NO_BYTES = np.empty(0, np.uint8)


class Pending(Protocol):
    """A write under way."""

    def result(self, timeout: float | None = None) -> object: ...
    def done(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """All that defines a zarr array of ours.

    Attributes:
        shape: Shape of the array.
        dtype: zarr data type name.
        chunk: Shape of an inner chunk.
        shard: Shape of a zarr shard; ``None``: one file per chunk.
        codec: ``"values"`` (blosc), ``"stream"`` (zstd) or ``"store"`` (uncompressed); every one
            ends in crc32c.
        attributes: Attributes of the array.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None
    codec: str
    attributes: Attributes = field(default_factory=dict)

    @classmethod
    def natural(
        cls, shape: tuple[int, ...], storage: str, chunk: tuple[int, ...], attributes: Attributes
    ) -> ArraySpec:
        """Return the array of a keyframe: the leaf's own shape, its chunks as zarr chunks."""
        # A shard of a single chunk is left out below: it would only add an index to the file.
        shard = grid.shard_shape(shape, chunk, np.dtype(storage).itemsize)
        return cls(shape, storage, chunk, None if shard == chunk else shard, "values", attributes)

    @classmethod
    def flat(cls, length: int, dtype: str, codec: str, attributes: Attributes) -> ArraySpec:
        """Return a 1-D array of packed leaves or of a stream. Several chunks share a shard.

        Chunks have the same size: zarr fills the last one up to the size of the others, which an
        uncompressed stream would pay for.
        """
        chunks = max(1, -(-length // (STREAM_CHUNK_BYTES // np.dtype(dtype).itemsize)))
        per_chunk = max(1, -(-length // chunks))
        # At most 32 chunks share a file (section 1 of the format).
        per_shard = per_chunk * min(chunks, grid.SHARD_BYTES // STREAM_CHUNK_BYTES)
        return cls(
            (length,), dtype, (per_chunk,), None if chunks == 1 else (per_shard,), codec, attributes
        )

    @property
    def file_count(self) -> int:
        """Number of data files of a 1-D array."""
        return -(-self.shape[0] // (self.shard or self.chunk)[0])

    def file_names(self) -> Iterator[str]:
        """Yield the names of the data files."""
        cells = self.cells
        grid_shape = grid.grid_shape(cells.shape, cells.cell)
        return map(chunk_files.name_of, itertools.product(*map(range, grid_shape)))

    @property
    def cells(self) -> Cells:
        """The cut of the array into files."""
        return chunk_files.cells(
            self.shape,
            self.chunk,
            self.shard,
            np.dtype(self.dtype).itemsize,
        )

    def document(self) -> bytes:
        """Return the content of the ``zarr.json`` of the array."""
        return json.dumps(self.metadata(), separators=(",", ":")).encode()

    def metadata(self) -> dict[str, Any]:
        """Return the ``zarr.json`` of the array."""
        # zarr v3 gives the ``bytes`` codec an endianness only if elements have several bytes.
        item = np.dtype(self.dtype).itemsize
        little = (
            {"name": "bytes", "configuration": {"endian": "little"}}
            if item > 1
            else {"name": "bytes"}
        )
        compressor: dict[str, list[dict[str, Any]]] = {
            "values": [{"name": "blosc", "configuration": self._blosc(item)}],
            "stream": [
                {"name": "zstd", "configuration": {"level": _ZSTD_LEVEL, "checksum": False}}
            ],
            "store": [],
        }
        inner: list[dict[str, Any]] = [little, *compressor[self.codec], {"name": "crc32c"}]
        if self.shard is not None:
            index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            configuration = {
                "chunk_shape": list(self.chunk),
                "codecs": inner,
                "index_codecs": index,
                # The checks in ``chunk_files`` and the native reader look for the index here.
                "index_location": "end",
            }
            inner = [{"name": "sharding_indexed", "configuration": configuration}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(self.shard or self.chunk)},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            # A missing chunk is an error for us; for other readers a float hole shows as NaN and
            # not as a plausible zero.
            "fill_value": _fill_value(self.dtype),
            "codecs": inner,
            "attributes": dict(self.attributes),
        }

    def _blosc(self, item: int) -> dict[str, Any]:
        """Return the configuration of the codec of values, of elements of ``item`` bytes.

        zstd compresses ``_PLANE_BYTES`` with one Huffman code. If blocks have as many elements,
        each of their byte planes gets a code of its own: the exponents of floats shrink, their
        mantissas are stored. Smaller chunks have no such blocks, and are smaller with lz4.
        """
        block_bytes = item * _PLANE_BYTES
        if math.prod(self.chunk) * item < block_bytes:
            coder = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle"}
            block_bytes = 0  # blosc's own choice
        else:
            coder = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle"}
        return coder | {"typesize": item, "blocksize": block_bytes}


def _fill_value(dtype: str) -> Any:
    if dtype == "bool":
        return False
    # JSON has no NaN, so zarr v3 writes it as text, once for each part of a complex value.
    if dtype.startswith("complex"):
        return ["NaN", "NaN"]
    return "NaN" if dtype.startswith("float") else 0


def context(
    durability: Durability = Durability.POWER, parent: ts.Context | None = None
) -> ts.Context:
    """Return TensorStore resources.

    Args:
        durability: Whether files are synced.
        parent: Resources that are not named here.
    """
    resources: dict[str, Any] = {
        # A cached chunk would go on referring to the source memory after its write.
        "cache_pool": {"total_bytes_limit": 0},
        "file_io_sync": durability.syncs,
    }
    return ts.Context(resources, parent)


def write(path: Place, spec: ArraySpec, values: NDArray[Any], context: ts.Context) -> Pending:
    """Begin to write a new array, its metadata and ``values``, without waiting for a disk.

    Args:
        path: A directory that does not exist.
        spec: The array.
        values: The content. TensorStore reads it in place, so it must not change until the returned
            write is done.
        context: The result of ``context``.
    """
    storage = storage_of(path)
    # The metadata is assumed: TensorStore's own create would wait until zarr.json is on the disk.
    array = {
        "driver": "zarr3",
        "kvstore": storage.kvstore(),
        "metadata": spec.metadata(),
        "store_data_equal_to_fill_value": True,
    }
    target = ts.open(array, open=True, assume_metadata=True, context=context).result()
    writes = [storage.start_write_new("zarr.json", spec.document(), context)]
    # An array without elements has no chunk files, only its metadata.
    if math.prod(spec.shape):
        # TensorStore reads ``values`` in place instead of copying them first. ``commit`` is done
        # when the data has reached the storage, which the copy future does not promise.
        write = target.write(values, can_reference_source_data_indefinitely=True)
        writes.append(storage.stored(write.commit))
    return _Writes(writes)


def write_stream_file(
    descriptor: int,
    spec: ArraySpec,
    pieces: list[NDArray[np.uint8]],
    number: int,
) -> None:
    """Write file ``number`` of a stream to an empty file.

    Args:
        descriptor: The open file.
        spec: The array.
        pieces: The stream in consecutive pieces.
        number: Number of the file.
    """
    # Level 0 stands for bytes that are stored as they are (``xla_ffi/encoder/entropy.h``).
    per_file = (spec.shard or spec.chunk)[0] // spec.chunk[0]
    error = native.write_stream_file(
        descriptor,
        pieces,
        spec.chunk[0],
        per_file,
        spec.shard is not None,
        _ZSTD_LEVEL if spec.codec == "stream" else 0,
        number,
    )
    if error:
        raise OSError(error, os.strerror(error))


class StreamWriter:
    """The writer of streams: 1-D uint8 arrays, in pieces that need not be joined.

    The native module makes the bytes of their files on the threads of the writer.

    Args:
        place: The directory that the streams lie below.
        durability: Whether files are synced.
    """

    _THREADS = 2  # while one waits for the disk, the other makes a file
    # That of the native module's helpers (`xla_ffi/encoder/thread_pool.cc`): beside them, these
    # threads do the same work.
    _NICENESS = 5

    def __init__(self, place: Place, durability: Durability = Durability.POWER) -> None:
        self._durability = durability
        self._has_files = storage_of(place).has_files
        self._background = Background(self._THREADS, "deltacheck-streams", self._NICENESS)
        self._making = threading.Lock()

    @property
    def scratch_bytes(self) -> int:
        """Memory that the encoding of files takes, whatever their size."""
        # ``threads()`` counts its caller, and every thread of this writer may be one.
        return _SCRATCH_BYTES * (native.threads() - 1 + self._THREADS)

    def held_bytes(self, size: int) -> int:
        """Return the memory that ``size`` bytes of streams take until they are written."""
        return size if self._has_files else 2 * size  # with the content of the objects

    def write(self, path: Place, spec: ArraySpec, pieces: Sequence[NDArray[np.uint8]]) -> Pending:
        """Begin to write a new array from consecutive pieces, without waiting for a disk.

        Args:
            path: A directory that does not exist.
            spec: The result of ``ArraySpec.flat``.
            pieces: The stream. They must not change until the returned write is done.
        """
        # The native module takes plain runs of bytes. Only pieces that are not contiguous are
        # copied.
        contiguous = [np.ascontiguousarray(piece) for piece in pieces]
        storage, writes = storage_of(path), list[Any]()

        def write_file(number: int) -> None:
            def make(descriptor: int) -> None:
                # One thread makes a file while another waits for the disk.
                with self._making:
                    write_stream_file(descriptor, spec, contiguous, number)

            uploads = []
            # An array without elements has no files, only its metadata.
            if number < spec.file_count:
                name = chunk_files.name_of([number])
                uploads.append(storage.start_array_file(name, make, self._durability))
            if number == 0:
                content = spec.document()
                uploads.append(storage.start_document("zarr.json", content, self._durability))
            writes.extend(upload for upload in uploads if upload is not None)

        # Each may add others while it is under way.
        writes += [
            self._background.start(partial(write_file, number))
            for number in range(max(1, spec.file_count))
        ]
        return _Writes(writes)

    def close(self) -> None:
        """End the threads. No write may be under way, and none may follow."""
        self._background.close()


class _Writes:
    """The writes of one array, done when all are.

    Args:
        writes: The writes. One that is under way may add others.
    """

    def __init__(self, writes: list[Any]) -> None:
        self._writes = writes

    def result(self, timeout: float | None = None) -> None:
        deadline = Deadline.after(timeout)
        for write in self._writes:
            write.result(timeout=deadline.left)

    def done(self) -> bool:
        return all(write.done() for write in self._writes)


class Reading:
    """A joined read under way.

    Args:
        read: The read, which begins now.
        path: A directory of the storage.
        values: The result. Ranges without memory of their own are read into it.
        size: The bytes of all parts.
    """

    def __init__(
        self, read: JoinedRead, path: Place, values: NDArray[Any], size: int | None = None
    ) -> None:
        self._values = values
        self._patience = storage_of(path).patience(read.size if size is None else size)
        self._tasks = read.start(values if read.size else NO_BYTES)

    def result(self) -> NDArray[Any]:
        """Return the values. Raises ``Damaged``, or ``StorageTimeout``."""
        for task, path in self._tasks:
            try:
                wait_for(task, path, self._patience)
            except (StorageFailed, Damaged):
                raise
            except OSError as error:
                raise unreadable(path, error) from error
        return self._values

    def settle(self) -> None:
        """Wait until the read has ended, with or without an error."""
        for task, _ in self._tasks:
            task.wait(self._patience or TIMEOUT_SECONDS)


def write_document(directory: Place, content: bytes, durability: Durability) -> None:
    """Write the ``zarr.json`` of a new directory in one atomic step.

    Args:
        directory: The directory, which is made unless it exists.
        content: The file's content.
        durability: Whether the file is synced. Its name is not.
    """
    upload = storage_of(directory).start_document("zarr.json", content, durability)
    if upload is not None:
        wait_for(upload, directory / "zarr.json")


def create_file(
    directory: Place,
    name: str,
    content: bytes,
    durability: Durability = Durability.POWER,
    timeout: float | None = None,
) -> bool:
    """Create ``directory/name`` in one atomic step; return ``False`` if it exists already.

    On an object store the result is also ``True`` if the same content exists: it may be the
    caller's own, and only the reply was lost.

    Args:
        directory: An existing directory.
        name: The file's name.
        content: The file's content.
        durability: Whether the file is synced.
        timeout: Longest wait in seconds, on an object store only.
    """
    return storage_of(directory).create_file(name, content, durability, timeout)


def replace_file(
    directory: Place, name: str, content: bytes, durability: Durability = Durability.POWER
) -> None:
    """Write ``directory/name`` in one atomic step, over an existing file too.

    Use it only for files that no step depends on.
    """
    storage_of(directory).replace_file(name, content, durability)


def read_file(path: Place, most_bytes: int) -> bytes:
    """Return a regular file's content.

    Raises:
        FileNotFoundError: There is no file.
        Damaged: The path is anything else (a link, a directory, a pipe that would block the
            reader), or the file is larger than ``most_bytes``.
    """
    return storage_of(path).read_file(most_bytes)


def bytes_on_disk(path: Place) -> int:
    """Return the bytes of all files below ``path``; 0 on an object store, which lists no sizes."""
    return storage_of(path).bytes_below() or 0
