"""The layout of a zarr array in files, and the checks of a file before it is read.

It must be a regular one of its directory, and no larger than its content can be. The open file is
checked, so no other can take its place afterwards. The native decoder checks the headers in it.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.errors import ChainBroken, Damaged
from deltacheck.leaf import grid
from deltacheck.leaf.external_errors import unreadable

# Bytes of the crc32c that ends every chunk and every index.
_CRC_BYTES = 4
_INDEX_ENTRY_BYTES = 16  # of a zarr shard's index: offset and size of a chunk, uint64
# zarr's offset of a chunk that a shard does not hold.
_ABSENT = 0xFFFFFFFFFFFFFFFF
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
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    chunk: tuple[int, ...]
    chunk_bytes: int
    chunks: int
    sharded: bool

    @property
    def most_bytes(self) -> int:
        """A bound on the bytes of a file: chunks that do not shrink are stored in frames."""
        # Generous, since it only keeps out files that would exhaust the memory. It covers the
        # frames, the checksums and the index.
        return self.chunks * (self.chunk_bytes + self.chunk_bytes // 64 + 256) + 64

    @property
    def index_bytes(self) -> int:
        """The bytes of the index that ends a file; 0 without one."""
        return self.chunks * _INDEX_ENTRY_BYTES + _CRC_BYTES if self.sharded else 0

    def pieces(self, box: Sequence[slice]) -> Sequence[Piece]:
        """Return the byte ranges of a box (bounded, one slice per axis) in the order of memory.

        The chunks of every array of ours follow each other in memory.

        Raises:
            ValueError: The box is a part of the array that is neither rows of chunks as wide as the
                array nor one chunk.
        """
        if not self.shape:
            return [Piece(name_of([]), 0, self.chunk_bytes)]
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
            raise _no_run(self, box)
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

    def _rows(self, box: Sequence[slice]) -> list[Piece]:
        if any(
            (s.start, s.stop) != (0, size) for s, size in zip(box[1:], self.shape[1:], strict=True)
        ):
            raise _no_run(self, box)
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


class ArrayFile(NamedTuple):
    """A file of an array, and the bytes of its decoded chunks that are wanted.

    Attributes:
        path: The directory of the array.
        name: The name of the file.
        begin: The first byte.
        end: The byte after the last one.
        cells: The cut of the array into files.
    """

    path: Any
    name: str
    begin: int
    end: int
    cells: Cells


def _no_run(cells: Cells, box: Sequence[slice]) -> ValueError:
    return ValueError(
        f"{[(s.start, s.stop) for s in box]} of an array of shape {cells.shape} and chunks of shape"
        f" {cells.chunk} is neither rows of chunks nor one chunk"
    )


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


def ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of several ranges, one range after the other, as one array.

    Args:
        first: The first number of each range.
        count: The length of each range.
    """
    before = np.cumsum(count) - count
    numbers: NDArray[np.int64] = np.arange(int(count.sum())) + np.repeat(first - before, count)
    return numbers


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
        # The open file is checked and not its name, which may stand for another file a moment
        # later.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{path} is not a regular file")
        check_size(path, status.st_size, cells)
    # The descriptor is the caller's only if all checks have passed.
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_size(path: object, size: int, cells: Cells) -> None:
    """Raise ``Damaged`` if a file of an array has more bytes than its chunks can take."""
    if size > cells.most_bytes:
        raise Damaged(
            f"{path} has {size} bytes, more than the {cells.most_bytes} that its chunks can take"
        )


def missing(path: object, name: str) -> ChainBroken:
    """Return the error of a file of an array that is not there."""
    return ChainBroken(
        f"array {path} lacks data that was committed: {name} is not there", file=path
    )


class Extent(NamedTuple):
    """Ranges of the bytes of a shard.

    Attributes:
        begin: The first byte of the wanted chunks.
        end: The byte after the last one of them.
        index_begin: The first byte of the index.
    """

    begin: int
    end: int
    index_begin: int


def extent(index: bytes, file: ArrayFile) -> Extent:
    """Return the range of a shard's bytes that holds the wanted ones.

    The native reader checks the index. A range is empty here if no wanted chunk is there, for which
    the reader has an error of its own.

    Args:
        index: The index that ends the shard.
        file: The shard.

    Raises:
        Damaged: The index is too short, or leads out of every file that the chunks can take.
    """
    cells = file.cells
    where = f"{file.path}/{file.name}"
    if len(index) != cells.index_bytes:
        raise Damaged(f"{where} is too short for the index of its chunks")
    entries = np.frombuffer(index, "<u8", 2 * cells.chunks).reshape(-1, 2).tolist()
    ranges = [(offset, offset + size) for offset, size in entries]
    present = [entry for entry in ranges if entry[0] != _ABSENT]
    last = max((end for _, end in present), default=0)
    check_size(where, last, cells)
    first, stop = file.begin // cells.chunk_bytes, -(-file.end // cells.chunk_bytes)
    wanted = [entry for entry in ranges[first:stop] if entry[0] != _ABSENT]
    begin = min((begin for begin, _ in wanted), default=0)
    return Extent(begin, max((end for _, end in wanted), default=0), last)


def cells(
    shape: Sequence[int],
    chunk: Sequence[int],
    shard: Sequence[int] | None,
    item_bytes: int,
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
    )
