"""Reads of array files by the native module, straight into the memory of the caller.

One descriptor is checked, read, decoded and compared with its checksums. It is that of a local
file, or of an anonymous one that has what a store sent of an object (``Storage.open_array_files``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from deltacheck.codec.base import U8, U64
from deltacheck.codec.extension import native
from deltacheck.errors import Damaged
from deltacheck.store.files import chunk_files
from deltacheck.store.files.background import Background, Task, carried_out
from deltacheck.store.files.chunk_files import ArrayFile, Cells, Piece
from deltacheck.store.files.storage import Place, storage_of

_THREADS = 4  # larger: more reads wait for the storage at the same time
# Files of one array that are open, and asked for, at the same time by each thread. More: an object
# store is waited for less; fewer: less memory, of up to 32 MiB for each.
_FILES_AT_ONCE = 4
# Ranges of one file that are farther apart are read as if they were of two. Larger: bytes between
# them are asked for in vain; smaller: a chunk may be decoded for each of them.
_APART_BYTES = 4 << 20


def read(path: Place, cells: Cells, codec: str, pieces: Sequence[Piece], out: U8) -> None:
    """Fill ``out`` with pieces of an array, one after the other.

    Every chunk that they touch is compared with its checksum.

    Args:
        path: The array's directory.
        cells: The cut of the array into files.
        codec: That of ``ArraySpec``.
        pieces: Byte ranges; together they have as many bytes as ``out``.
        out: uint8, 1-D.

    Raises:
        ChainBroken: A file is missing.
        Damaged: A file is not what the array's metadata implies.
    """
    position = 0
    for first in range(0, len(pieces), _FILES_AT_ONCE):
        group = pieces[first : first + _FILES_AT_ONCE]
        files = [ArrayFile(path, name, begin, begin + size, cells) for name, begin, size in group]
        with _opened(path, files) as descriptors:
            for descriptor, (name, begin, size) in zip(descriptors, group, strict=True):
                refusal = native.read_array_file(
                    descriptor,
                    cells.chunk_bytes,
                    cells.chunks,
                    cells.sharded,
                    codec,
                    begin,
                    out[position : position + size],
                )
                if refusal:
                    raise Damaged(f"array {path} is damaged: {name}: {refusal}", file=path)
                position += size


class JoinedRead:
    """Ranges of flat arrays that one call reads into one memory, one after the other.

    Each chunk is decoded once, whatever number of ranges lie in it.

    Args:
        place: The directory that the arrays lie below.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._numbers: dict[tuple[Place | str, int], int] = {}
        self._files: list[ArrayFile] = []
        self._codecs: list[str] = []
        self._pieces: list[tuple[int, int, int, int]] = []
        self.size = 0

    @property
    def file_count(self) -> int:
        """The number of files, which are open at the same time."""
        return len(self._files)

    def add(self, path: Place | str, cells: Cells, codec: str, begin: U64, size: U64) -> U64:
        """Add byte ranges of a 1-D array.

        Args:
            path: The array's directory, as text if it is a local one: a read has hundreds of them,
                and objects of paths take longer to make than small files take to read.
            cells: The cut of the array into files.
            codec: That of ``ArraySpec``.
            begin: The first byte of each range, ascending.
            size: The bytes of each range, at least 1.

        Returns:
            The offset of each range in the memory, uint64.
        """
        per_file = cells.chunk_bytes * cells.chunks
        offsets = []
        for first_byte, count in zip(begin.tolist(), size.tolist(), strict=True):
            offsets.append(self.size)
            # A range that spans several files becomes a piece of each.
            position, end = first_byte, first_byte + count
            while position < end:
                number, offset = divmod(position, per_file)
                piece = min(per_file - offset, end - position)
                file = self._numbers.get((path, number), len(self._files))
                # Of one file, all between the first and the last byte is asked for.
                if file < len(self._files) and offset > self._files[file].end + _APART_BYTES:
                    file = len(self._files)
                self._numbers[path, number] = file
                if file == len(self._files):
                    self._codecs.append(codec)
                    name = chunk_files.name_of([number])
                    self._files.append(ArrayFile(path, name, offset, offset + piece, cells))
                else:
                    first, last = self._files[file].begin, self._files[file].end
                    self._files[file] = self._files[file]._replace(
                        begin=min(first, offset), end=max(last, offset + piece)
                    )
                self._pieces.append((file, offset, piece, self.size))
                self.size += piece
                position += piece
        return np.array(offsets, np.uint64)

    def read(self, out: U8) -> None:
        """Fill ``out``, of ``size`` bytes.

        Raises:
            ChainBroken, Damaged: As ``read`` raises them.
        """
        with _opened(self._place, self._files) as descriptors:
            arguments = [
                (descriptor, cells.chunk_bytes, cells.chunks, cells.sharded, codec)
                for descriptor, (*_, cells), codec in zip(
                    descriptors, self._files, self._codecs, strict=True
                )
            ]
            pieces = np.array(self._pieces, np.uint64).reshape(-1, 4)
            refusal = native.read_array_files(arguments, pieces, out)
        if refusal is not None:
            path, name, *_ = self._files[refusal[0]]
            raise Damaged(f"array {path} is damaged: {name}: {refusal[1]}", file=path)


@contextlib.contextmanager
def _opened(place: Place, files: Sequence[ArrayFile]) -> Iterator[list[int]]:
    """Open files of arrays below a directory, after all checks; close them at the end."""
    descriptors: list[int] = []
    try:
        for descriptor in storage_of(place).open_array_files(files):
            descriptors.append(descriptor)
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def start(work: Callable[[], None]) -> Task:
    """Call ``work`` on a reader thread; return the task."""
    try:
        return _readers(os.getpid()).start(work)
    except RuntimeError:
        # From Python 3.12 on an interpreter that ends starts no threads, and saves are finished
        # then, some of them read back.
        return carried_out(work)


@cache
def _readers(process: int) -> Background:
    """Return the threads of this process: a forked child has none of its parent's."""
    return Background(_THREADS, "deltacheck-reader")
