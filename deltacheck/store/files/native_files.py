"""Reads of array files by the native module, straight into the memory of the caller.

One descriptor is checked, read, decoded and compared with its checksums. It is that of a local
file, or of an anonymous one that has what a store sent of an object (``Storage.open_array_files``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import U8, U64
from deltacheck.codec.extension import native
from deltacheck.errors import Damaged
from deltacheck.store.files import chunk_files
from deltacheck.store.files.background import Background, Task, carried_out
from deltacheck.store.files.chunk_files import ArrayFile, Cells, ranges
from deltacheck.store.files.storage import Place, storage_of

_THREADS = 4  # larger: more reads wait for the storage at the same time
# Files that are open, and asked for, at the same time by each thread, and the bytes of them. More:
# an object store is waited for less, and more chunks are decoded by one call; fewer: less memory.
_FILES_AT_ONCE, _BYTES_AT_ONCE = 64, 32 << 20
# Ranges of one file that are farther apart are read as if they were of two. Larger: bytes between
# them are asked for in vain; smaller: a chunk may be decoded for each of them.
_APART_BYTES = 4 << 20


class StoredArray(NamedTuple):
    """An array as a joined read takes it.

    Attributes:
        path: Its directory, as text if it is a local one: a read has hundreds of them, and objects
            of paths take longer to make than small files take to read.
        cells: Its cut into files.
        codec: That of ``ArraySpec``.
    """

    path: Place | str
    cells: Cells
    codec: str


class JoinedRead:
    """Parts of arrays that are read together.

    Each chunk is decoded once, whatever number of ranges lie in it, and compared with its checksum.

    Args:
        place: The directory that the arrays lie below.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._files: list[ArrayFile] = []
        self._codecs: list[str] = []
        # Tables with the columns file, first byte, bytes, block, and offset in the block.
        self._pieces: list[NDArray[np.int64]] = []
        # The first one is the memory of all ranges that have no memory of their own.
        self._blocks: list[U8] = [np.empty(0, np.uint8)]
        self._is_over = False
        self.size = 0

    def add_box(self, array: StoredArray, box: Sequence[slice], out: U8) -> None:
        """Add a box of an array, which is rows of chunks, one chunk, or the whole array.

        Args:
            array: The array.
            box: The box, within the array.
            out: The memory for it, uint8, 1-D.
        """
        path, cells, codec = array
        rows, position = [], 0
        for name, begin, size in cells.pieces(box):
            rows.append((len(self._files), begin, size, len(self._blocks), position))
            self._files.append(ArrayFile(path, name, begin, begin + size, cells))
            self._codecs.append(codec)
            position += size
        self._blocks.append(out)
        self._pieces.append(np.array(rows, np.int64).reshape(-1, 5))

    def add(
        self,
        arrays: Sequence[StoredArray],
        array_numbers: NDArray[np.int64],
        begin: U64,
        size: U64,
        outs: Sequence[U8] | None = None,
    ) -> U64:
        """Add byte ranges of arrays that are cut along their first axis alone.

        Add all ranges of one array at once.

        Args:
            arrays: The arrays.
            array_numbers: The number of each range's array, ascending.
            begin: The first byte of each range, ascending in each array.
            size: The bytes of each range, at least 1.
            outs: The memory for each range; ``None``: one after the other in one memory.

        Returns:
            The offset of each range in that memory, uint64.
        """
        first_byte, count = begin.astype(np.int64), size.astype(np.int64)
        offsets = self.size + np.cumsum(count) - count
        bytes_per_file = [array.cells.chunk_bytes * array.cells.chunks for array in arrays]
        per_file = np.array(bytes_per_file, np.int64)[array_numbers]
        first_file = first_byte // per_file
        # A range that spans several files becomes a piece of each.
        parts = (first_byte + count - 1) // per_file - first_file + 1
        owner, number = np.repeat(np.arange(count.size), parts), ranges(first_file, parts)
        base = number * per_file[owner]
        low = np.maximum(first_byte[owner], base)
        high = np.minimum((first_byte + count)[owner], base + per_file[owner])
        shift = low - first_byte[owner]
        if outs is None:
            block, position = np.zeros_like(owner), offsets[owner] + shift
            self.size += int(count.sum())
        else:
            block, position = len(self._blocks) + owner, shift
            self._blocks += outs
        # Of one file, all between the first and the last byte is asked for.
        is_first = np.ones(owner.size, np.bool_)
        is_first[1:] = (np.diff(array_numbers[owner]) != 0) | (np.diff(number) != 0)
        is_first[1:] |= low[1:] - high[:-1] > _APART_BYTES
        file = len(self._files) - 1 + np.cumsum(is_first)
        starts = np.flatnonzero(is_first)
        ends = np.append(starts, owner.size)[1:] - 1
        columns = (
            array_numbers[owner[starts]],
            number[starts],
            (low - base)[starts],
            (high - base)[ends],
        )
        for array, at, first, stop in zip(*(column.tolist() for column in columns), strict=True):
            path, cells, codec = arrays[array]
            name = chunk_files.name_of([at, *[0] * (len(cells.shape) - 1)])
            self._files.append(ArrayFile(path, name, first, stop, cells))
            self._codecs.append(codec)
        self._pieces.append(np.stack([file, low - base, high - low, block, position], axis=1))
        return offsets.astype(np.uint64)

    def start(self, memory: U8) -> list[tuple[Task[None], Place | str]]:
        """Begin to read on the reader threads; return the tasks, and the first array of each.

        Args:
            memory: Of ``size`` bytes, for the ranges that have no memory of their own.

        Raises:
            ChainBroken, Damaged: A task raises them. A file is missing, or is not what the
                metadata of its array implies.
        """
        self._blocks[0] = memory
        pieces = np.concatenate([np.zeros((0, 5), np.int64), *self._pieces])
        ends = np.cumsum(np.bincount(pieces[:, 0], pieces[:, 2], len(self._files)))
        first, tasks = 0, []
        while first < len(self._files):
            limit = (ends[first - 1] if first else 0) + _BYTES_AT_ONCE
            stop = max(first + 1, int(np.searchsorted(ends, limit, "right")))
            stop = min(stop, first + _FILES_AT_ONCE, len(self._files))
            rows = pieces[slice(*np.searchsorted(pieces[:, 0], [first, stop]))]
            tasks.append((start(partial(self._read, first, stop, rows)), self._files[first].path))
            first = stop
        return tasks

    def _read(self, first: int, stop: int, rows: NDArray[np.int64]) -> None:
        """Read the pieces ``rows`` of some files."""
        if self._is_over:
            return
        blocks, block = np.unique(rows[:, 3], return_inverse=True)
        pieces = np.column_stack([rows[:, 0] - first, rows[:, 1:3], block, rows[:, 4]])
        pieces = pieces[np.lexsort((pieces[:, 4], pieces[:, 3]))].astype(np.uint64)
        files = self._files[first:stop]
        try:
            with _opened(self._place, files) as descriptors:
                arguments = [
                    (descriptor, cells.chunk_bytes, cells.chunks, cells.sharded, codec)
                    for descriptor, (*_, cells), codec in zip(
                        descriptors, files, self._codecs[first:stop], strict=True
                    )
                ]
                memory = [self._blocks[number] for number in blocks.tolist()]
                refusal = native.read_array_files(arguments, pieces, memory)
            if refusal is not None:
                path, name, *_ = files[refusal[0]]
                raise Damaged(f"array {path} is damaged: {name}: {refusal[1]}", file=path)
        except BaseException:
            # The caller cannot use the rest.
            self._is_over = True
            raise


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


def start(work: Callable[[], None]) -> Task[None]:
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
