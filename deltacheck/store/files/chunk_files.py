"""The layout of a zarr array in files, and the checks before TensorStore opens one.

TensorStore follows links, waits for pipes, takes whole files into memory and allocates as much as a
blosc header asks for; without enough memory the process ends. So a file must first be a regular one
of this directory, no larger than its content can be, and every header in it must ask for exactly
one chunk. A process that can swap files between this check and the read is not kept out.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltacheck.errors import Damaged
from deltacheck.leaf import grid
from deltacheck.leaf.external_errors import unreadable

# Bytes of the crc32c that ends every chunk and every index.
_CRC_BYTES = 4
_INDEX_ENTRY_BYTES = 16  # of a zarr shard's index: offset and size of a chunk, uint64
# zarr's offset of a chunk that a shard does not hold.
_ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)
# Version, codec's version, flags, item size; uint32: bytes decoded, block size, bytes encoded
_BLOSC_HEADER_BYTES = 16
# O_NOFOLLOW: a link may lead out of the root. O_NONBLOCK: opening a pipe must not wait for a
# writer.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Piece(NamedTuple):
    """A range of the decoded chunks of one file, concatenated: ``size`` bytes from ``begin`` on."""

    name: str
    begin: int
    size: int


class Cells(NamedTuple):
    """The cut of an array into files and chunks.

    Attributes:
        shape: Shape of the array.
        cell: Shape of the part in one file.
        chunk: Shape of a chunk.
        chunk_bytes: Bytes of a decoded chunk.
        chunks: Chunks in one file.
        sharded: An index of the chunks ends the file.
        blosc: Chunks are encoded with blosc.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    chunk: tuple[int, ...]
    chunk_bytes: int
    chunks: int
    sharded: bool
    blosc: bool

    @property
    def most_bytes(self) -> int:
        """A bound on the bytes of a file: chunks that do not shrink are stored in frames."""
        # Generous, since it only keeps out files that would exhaust the memory. It covers the
        # frames, the checksums and the index.
        return self.chunks * (self.chunk_bytes + self.chunk_bytes // 64 + 256) + 64

    def names(self, box: Sequence[slice]) -> Iterator[str]:
        """Yield the files in which the elements of a box (bounded, one slice per axis) lie."""
        spans = [
            range(s.start // c, -(-s.stop // c))
            for s, c in zip(box, self.cell, strict=True)
            if s.stop > s.start
        ]
        # An empty span was left out above: then no element lies in the box.
        if len(spans) == len(self.shape):
            for position in itertools.product(*spans):
                yield name_of(position)

    def pieces(self, box: Sequence[slice]) -> Sequence[Piece] | None:
        """Return the byte ranges of a box (bounded, one slice per axis) in the order of memory.

        ``None``: chunks do not follow each other in memory, or the box is a part of the array that
        is neither rows of chunks as wide as the array nor one chunk.
        """
        if not self.shape or not grid.is_contiguous(self.shape, self.chunk):
            return None
        if any(s.start == s.stop for s in box):
            return []
        if self.chunk[1:] == self.shape[1:]:
            return self._rows(box)
        if all((s.start, s.stop) == (0, size) for s, size in zip(box, self.shape, strict=True)):
            return _all_pieces(self)
        position = [s.start // c for s, c in zip(box, self.chunk, strict=True)]
        number = int(np.ravel_multi_index(position, grid.grid_shape(self.shape, self.chunk)))
        # Any other part of a chunk is no single run of the chunk's memory.
        if tuple(box) != grid.box(self.shape, self.chunk, number):
            return None
        return [
            # A chunk at the edge of the array is stored with padding. Its elements come first.
            Piece(
                *self.place(position),
                math.prod(s.stop - s.start for s in box)
                * self.chunk_bytes
                // math.prod(self.chunk),
            )
        ]

    def place(self, at: Sequence[int]) -> tuple[str, int]:
        """Return the file of the chunk at a grid position, and its first decoded byte there."""
        times = [c // k for c, k in zip(self.cell, self.chunk, strict=True)]
        number = int(np.ravel_multi_index([i % t for i, t in zip(at, times, strict=True)], times))
        return name_of([i // t for i, t in zip(at, times, strict=True)]), number * self.chunk_bytes

    def _rows(self, box: Sequence[slice]) -> list[Piece] | None:
        if any(
            (s.start, s.stop) != (0, size) for s, size in zip(box[1:], self.shape[1:], strict=True)
        ):
            return None
        # Chunks as wide as the array follow each other in memory, and so do their rows.
        row_bytes = self.chunk_bytes // self.chunk[0]
        per_file = self.chunk_bytes * self.chunks
        begin, end = box[0].start * row_bytes, box[0].stop * row_bytes
        pieces = []
        # A piece never spans two files: each has a descriptor of its own.
        while begin < end:
            number, offset = divmod(begin, per_file)
            size = min(per_file - offset, end - begin)
            pieces.append(Piece(name_of([number, *[0] * (len(self.shape) - 1)]), offset, size))
            begin += size
        return pieces


def name_of(at: Sequence[int]) -> str:
    """Return the name of the file at a position of the grid of files."""
    return ".".join(["c", *map(str, at)])


@lru_cache(256)  # leaves have few shapes
def _all_pieces(cells: Cells) -> tuple[Piece, ...]:
    """Return the pieces of a whole array, neighbouring chunks of a file merged."""
    sizes = (
        np.diff(grid.bounds(cells.shape, cells.chunk))
        * np.uint64(cells.chunk_bytes // math.prod(cells.chunk))
    ).tolist()
    pieces: list[Piece] = []
    for position, size in zip(
        np.ndindex(grid.grid_shape(cells.shape, cells.chunk)), sizes, strict=True
    ):
        name, begin = cells.place(position)
        # A chunk that the array's edge cuts short ends a piece, because padding follows it in the
        # file.
        if pieces and (pieces[-1].name, pieces[-1].begin + pieces[-1].size) == (name, begin):
            begin, size = pieces[-1].begin, pieces.pop().size + size
        pieces.append(Piece(name, begin, size))
    return tuple(pieces)


def check_directory(path: Path | str) -> None:
    """Raise ``Damaged`` if ``path`` is a link or a file. A missing path passes."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISDIR(mode):
        raise Damaged(
            f"{path} is not a directory; it leads out of the root or holds something else"
        )


def check_file(path: Path, cells: Cells) -> None:
    """Raise ``Damaged`` if TensorStore must not open this file.

    A missing file passes: TensorStore reports it itself.
    """
    try:
        descriptor = open_file(path, cells)
    except FileNotFoundError:
        return
    os.close(descriptor)


def open_file(path: Path | str, cells: Cells) -> int:
    """Return a descriptor of a file that passed all checks, for the caller to close.

    Raises:
        FileNotFoundError: There is no such file.
        Damaged: A check failed.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        _check(descriptor, path, cells)
    # The descriptor is the caller's only if all checks have passed.
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(descriptor: int, path: Path | str, cells: Cells) -> None:
    # The open file is checked and not its name, which may stand for another file a moment later.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path} is not a regular file")
    if status.st_size > cells.most_bytes:
        raise Damaged(
            f"{path} has {status.st_size} bytes, more than the {cells.most_bytes} that its chunks"
            " can take"
        )
    if cells.blosc:
        for offset in _chunk_offsets(descriptor, status.st_size, cells, path):
            header = os.pread(descriptor, _BLOSC_HEADER_BYTES, offset)
            # The size that a decoder would allocate.
            decoded = int.from_bytes(header[4:8], "little")
            if decoded != cells.chunk_bytes:
                raise Damaged(
                    f"{path}: a chunk says that it has {decoded} bytes, it must have"
                    f" {cells.chunk_bytes}"
                )


def _chunk_offsets(descriptor: int, size: int, cells: Cells, path: Path | str) -> list[int]:
    if not cells.sharded:
        return [0]
    index_bytes = cells.chunks * _INDEX_ENTRY_BYTES
    begin = size - index_bytes - _CRC_BYTES
    content = os.pread(descriptor, index_bytes, begin) if begin >= 0 else b""
    if len(content) != index_bytes:
        raise Damaged(f"{path} is too short for the index of its chunks")
    index = np.frombuffer(content, "<u8").reshape(-1, 2)
    # A missing chunk is left to the reader, for which it is an error of its own.
    offsets = index[index[:, 0] != _ABSENT, 0]
    if (offsets >= begin).any():
        raise Damaged(f"{path}: the index of its chunks leads out of it")
    return [int(offset) for offset in offsets]


def cells(
    shape: Sequence[int],
    chunk: Sequence[int],
    shard: Sequence[int] | None,
    item_bytes: int,
    *,
    blosc: bool,
) -> Cells:
    """Return the cut of an array of ``shape``; ``shard`` is ``None`` for one file per chunk."""
    cell = tuple(shard or chunk)
    chunks = math.prod(s // c for s, c in zip(cell, chunk, strict=True))
    return Cells(
        tuple(shape),
        cell,
        tuple(chunk),
        math.prod(chunk) * item_bytes,
        chunks,
        shard is not None,
        blosc,
    )
