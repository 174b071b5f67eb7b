"""Measure the files of a segment: the bytes of its tables, and of each leaf."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.files.arrays import ArraySpec
from deltacheck.store.files.chunk_files import ArrayFile
from deltacheck.store.files.storage import Place, storage_of
from deltacheck.store.segment import Segment, stream_sizes

# Files that are open, or asked for, at the same time. More: an object store is waited for less;
# fewer: less memory, of at most a chunk for each.
_FILES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Cost:
    """The sizes of the files of a segment.

    Attributes:
        tables_bytes: Bytes of its table, indexes, digests and array metadata.
        by_leaf: Leaf path -> bytes of its values. Leaves that share a chunk of an array divide its
            stored bytes by their lengths in it.
    """

    tables_bytes: int
    by_leaf: Mapping[str, float]


class _File(NamedTuple):
    """The size of a file of an array, and the index that ends it, empty if there is none."""

    size: int
    shard_index: bytes


def cost_of(segment: Segment) -> Cost:
    """Measure the files of a segment.

    The stored size of each chunk of a stream, about a mebibyte, is known. Only within a chunk are
    bytes divided by the lengths before compression.

    Raises:
        OSError: If a file cannot be read.
        Damaged: If an index cannot be read, or a file is missing.
    """
    specs = segment.array_specs()
    files = _files_of(segment, specs)
    by_leaf = _keyframe_bytes(
        segment, {path: sum(file.size for file in files[path]) for path in specs}
    )
    for number, part in enumerate(segment.table.parts):
        index = segment.part(number).index
        rows = np.zeros(index.shape[0])
        sizes_of = stream_sizes(index)
        for codec, lengths in columns.stream_arrays(part).items():
            path = segment.path / columns.stream_array(number, codec)
            rows += _row_bytes(specs[path], files[path], [sizes_of[name] for name in lengths])
        for leaf, entry in segment.table.leaves.items():
            for in_part, first, count in entry.delta:
                if in_part == number:
                    delta_bytes = float(rows[first : first + count].sum())
                    by_leaf[leaf] = by_leaf.get(leaf, 0.0) + delta_bytes
    return Cost(segment.table_bytes + sum(map(len, segment.documents().values())), by_leaf)


def _files_of(segment: Segment, specs: Mapping[Place, ArraySpec]) -> dict[Place, list[_File]]:
    """Look at the files of each array.

    A listing of an object store has no sizes. There, a shard is as long as its index says, and a
    file of one chunk is read.
    """
    files: dict[Place, list[_File]] = {path: [] for path in specs}
    wanted = [
        ArrayFile(path, name, 0, 0, cells)  # none of the chunks
        for path, spec in specs.items()
        for cells in [spec.cells]
        for name in spec.file_names()
    ]
    storage = storage_of(segment.path)
    for begin in range(0, len(wanted), _FILES_AT_ONCE):
        batch = wanted[begin : begin + _FILES_AT_ONCE]
        for file, descriptor in zip(batch, storage.open_array_files(batch), strict=True):
            try:
                size, index_bytes = os.fstat(descriptor).st_size, file.cells.index_bytes
                offset = size - index_bytes
                index = os.pread(descriptor, index_bytes, offset) if offset >= 0 else b""
            finally:
                os.close(descriptor)
            files[file.path].append(_File(size, index))
    return files


def _keyframe_bytes(segment: Segment, sizes: Mapping[Place, int]) -> dict[str, float]:
    """Return the bytes of each leaf that is written whole, given those of each array."""
    by_leaf: dict[str, float] = {}
    for path, entry in segment.table.leaves.items():
        if entry.key is None:
            continue
        if entry.key.array:
            by_leaf[path] = float(sizes[segment.path / layout.LEAVES / entry.key.array])
            continue
        # Small leaves share an array, and its compressed size is divided by their raw sizes.
        spec, packed_elements = entry.spec(path), segment.table.packed[entry.key.packed]
        packed_bytes = packed_elements * spec.element.item_bytes
        share = spec.raw_bytes / packed_bytes if packed_bytes else 0.0
        by_leaf[path] = sizes[segment.path / layout.PACKED / entry.key.packed] * share
    return by_leaf


def _row_bytes(
    spec: ArraySpec, files: Sequence[_File], sizes: Sequence[NDArray[np.uint64]]
) -> NDArray[np.float64]:
    """Return the stored bytes of each row of a part, of the streams in one array.

    Args:
        spec: The array.
        files: Its files.
        sizes: For each stream of the array, in order, the bytes of each row before compression.
    """
    ends = np.cumsum(np.concatenate(sizes).astype(np.float64))
    # At the end of each chunk: the bytes before compression, and the stored bytes.
    stored_ends = np.cumsum([0.0, *_chunk_sizes(spec, files)])
    chunk_ends = np.minimum(np.arange(stored_ends.size) * spec.chunk[0], spec.shape[0])
    stream_rows = np.diff(np.interp(ends, chunk_ends, stored_ends), prepend=0.0)
    rows: NDArray[np.float64] = stream_rows.reshape(len(sizes), -1).sum(axis=0)
    return rows


def _chunk_sizes(spec: ArraySpec, files: Sequence[_File]) -> list[float]:
    """Return the stored bytes of each chunk of a 1-D array.

    The index of a file counts as a part of its chunks, so that these add up to all files.
    """
    count, sizes = -(-spec.shape[0] // spec.chunk[0]), list[float]()
    for file in files:
        chunks = min(spec.cells.chunks, count - len(sizes))
        frames = np.ones(chunks)
        if file.shard_index:
            frames = np.frombuffer(file.shard_index, "<u8", 2 * chunks)[1::2].astype(np.float64)
        sizes += (file.size * frames / max(1.0, frames.sum())).tolist()
    return sizes
