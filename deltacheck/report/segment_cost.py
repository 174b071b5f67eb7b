"""Measure the files of a segment: the bytes of its tables, and of each leaf."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.files import chunk_files
from deltacheck.store.files import storage as place
from deltacheck.store.files.arrays import ArraySpec
from deltacheck.store.segment import Segment, stream_sizes


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


def cost_of(segment: Segment) -> Cost:
    """Measure the files of a segment.

    The stored size of each chunk of a stream, about a mebibyte, is known. Only within a chunk are
    bytes divided by the lengths before compression.

    Raises:
        OSError: If a file cannot be read.
        Damaged: If an index cannot be read.
    """
    path = place.local(segment.path, "a report")
    files = _file_sizes(path)
    by_leaf = _keyframe_bytes(segment, files)
    # All files but the content of keyframes and streams.
    tables_bytes = files[()] - sum(
        size for name, size in files.items() if name[:1] in ((layout.LEAVES,), (layout.PACKED,))
    )
    for number, part in enumerate(segment.table.parts):
        index = segment.part(number).index
        rows = np.zeros(index.shape[0])
        sizes_of = stream_sizes(index)
        for codec, lengths in columns.stream_arrays(part).items():
            name = columns.stream_array(number, codec)
            rows += _stored_bytes(path / name, codec, [sizes_of[name] for name in lengths])
            tables_bytes -= files.get((name,), 0)
        for leaf, entry in segment.table.leaves.items():
            for in_part, first, count in entry.delta:
                if in_part == number:
                    delta_bytes = float(rows[first : first + count].sum())
                    by_leaf[leaf] = by_leaf.get(leaf, 0.0) + delta_bytes
    return Cost(tables_bytes, by_leaf)


def _file_sizes(path: Path) -> dict[tuple[str, ...], int]:
    """Return the size of each array's files without its metadata.

    The keys are paths of arrays in the segment. ``()`` stands for all files.
    """
    sizes: dict[tuple[str, ...], int] = {(): 0}
    for folder, _, names in os.walk(path):
        place = Path(folder).relative_to(path).parts
        for name in names:
            size = (Path(folder) / name).stat().st_size
            sizes[()] += size
            # Metadata of arrays counts as tables.
            if name != "zarr.json" and place:
                sizes[place] = sizes.get(place, 0) + size
    return sizes


def _keyframe_bytes(segment: Segment, files: Mapping[tuple[str, ...], int]) -> dict[str, float]:
    """Return the bytes of each leaf that is written whole."""
    by_leaf: dict[str, float] = {}
    for path, entry in segment.table.leaves.items():
        if entry.key is None:
            continue
        if entry.key.array:
            by_leaf[path] = float(files.get((layout.LEAVES, entry.key.array), 0))
            continue
        # Small leaves share an array, and its compressed size is divided by their raw sizes.
        spec, packed_elements = entry.spec(path), segment.table.packed[entry.key.packed]
        packed_bytes = packed_elements * spec.element.item_bytes
        share = spec.raw_bytes / packed_bytes if packed_bytes else 0.0
        by_leaf[path] = files.get((layout.PACKED, entry.key.packed), 0) * share
    return by_leaf


def _stored_bytes(
    folder: Path, codec: str, sizes: Sequence[NDArray[np.uint64]]
) -> NDArray[np.float64]:
    """Return the stored bytes of each row of a part, of the streams in one array.

    Args:
        folder: The directory of the array.
        codec: The codec of the streams.
        sizes: For each stream of the array, in order, the bytes of each row before compression.
    """
    ends = np.cumsum(np.concatenate(sizes).astype(np.float64))
    # At the end of each chunk: the bytes before compression, and the stored bytes.
    spec = ArraySpec.flat(int(ends[-1]) if ends.size else 0, "uint8", codec, {})
    stored_ends = np.cumsum([0.0, *_chunk_sizes(folder, spec)])
    chunk_ends = np.minimum(np.arange(stored_ends.size) * spec.chunk[0], spec.shape[0])
    stream_rows = np.diff(np.interp(ends, chunk_ends, stored_ends), prepend=0.0)
    rows: NDArray[np.float64] = stream_rows.reshape(len(sizes), -1).sum(axis=0)
    return rows


def _chunk_sizes(folder: Path, spec: ArraySpec) -> list[float]:
    """Return the stored bytes of each chunk of a 1-D array; a missing file has none.

    The index of a file counts as a part of its chunks, so that these add up to all files.
    """
    count, cells = -(-spec.shape[0] // spec.chunk[0]), spec.cells
    sizes: list[float] = []
    for number in range(spec.file_count):
        chunks = min(cells.chunks, count - len(sizes))
        file = folder / chunk_files.name_of([number])
        file_bytes = file.stat().st_size if file.is_file() else 0
        frames = np.ones(chunks)
        if cells.sharded and file_bytes >= cells.index_bytes:
            with file.open("rb") as content:
                content.seek(-cells.index_bytes, os.SEEK_END)
                frames = np.frombuffer(content.read(), "<u8", 2 * chunks)[1::2].astype(np.float64)
        sizes += (file_bytes * frames / max(1.0, frames.sum())).tolist()
    return sizes
