"""Reads of array files by the native module, straight into the memory of the caller.

One descriptor is checked, read, decoded and compared with its checksums. TensorStore reads the same
files, and does so if there is no native module or no local file. It takes several times as long to
open an array, and allocates fresh memory for the encoded and the decoded bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from deltacheck.codec.base import U8, U64
from deltacheck.codec.extension import extension, required
from deltacheck.errors import ChainBroken, Damaged
from deltacheck.store.files import chunk_files
from deltacheck.store.files.background import Background, Task, carried_out
from deltacheck.store.files.chunk_files import Cells, Piece
from deltacheck.store.files.storage import Place

_THREADS = 4  # larger: more reads wait for the storage at the same time


@cache
def codecs() -> frozenset[str]:
    """Return the codecs of ``ArraySpec`` that the native module reads.

    There are none without the module, or if it was built without libzstd.
    """
    readable: Callable[[], list[str]] | None = getattr(extension(), "readable_codecs", None)
    return frozenset() if readable is None else frozenset(readable())


def reads(path: Place, codec: str) -> bool:
    """Return True if the native module reads arrays of a codec in a directory."""
    return isinstance(path, Path) and codec in codecs()


def read(path: Path, cells: Cells, codec: str, pieces: Sequence[Piece], out: U8) -> None:
    """Fill ``out`` with pieces of an array, one after the other.

    Every chunk that they touch is compared with its checksum.

    Args:
        path: The array's directory.
        cells: The cut of the array into files.
        codec: One of ``codecs()``.
        pieces: Byte ranges; together they have as many bytes as ``out``.
        out: uint8, 1-D.

    Raises:
        ChainBroken: A file is missing.
        Damaged: A file is not what the array's metadata implies.
    """
    native = required().read_array_file
    position = 0
    for name, begin, size in pieces:
        descriptor = _opened(str(path), name, cells)
        try:
            refusal = native(
                descriptor,
                cells.chunk_bytes,
                cells.chunks,
                cells.sharded,
                codec,
                begin,
                out[position : position + size],
            )
        finally:
            os.close(descriptor)
        if refusal:
            raise Damaged(f"array {path} is damaged: {name}: {refusal}", file=path)
        position += size


class JoinedRead:
    """Ranges of flat arrays that one call reads into one memory, one after the other.

    Each chunk is decoded once, whatever number of ranges lie in it.
    """

    # Directories are text here: a read has hundreds of them, and objects of paths take longer to
    # make than small files take to read.
    def __init__(self) -> None:
        self._files: dict[tuple[str, int], tuple[int, Cells, str]] = {}
        self._pieces: list[tuple[int, int, int, int]] = []
        self.size = 0

    @staticmethod
    def is_possible() -> bool:
        """Return False without the native module."""
        return extension() is not None

    @property
    def file_count(self) -> int:
        """The number of files, which are open at the same time."""
        return len(self._files)

    def add(self, path: str, cells: Cells, codec: str, begin: U64, size: U64) -> U64:
        """Add byte ranges of a 1-D array.

        Args:
            path: The array's directory.
            cells: The cut of the array into files.
            codec: One of ``codecs()``.
            begin: The first byte of each range, ascending.
            size: The bytes of each range, at least 1.

        Returns:
            The offset of each range in the memory, uint64.
        """
        per_file = cells.chunk_bytes * cells.chunks
        files: dict[int, int] = {}
        offsets = []
        for first_byte, count in zip(begin.tolist(), size.tolist(), strict=True):
            offsets.append(self.size)
            # A range that spans several files becomes a piece of each.
            position, end = first_byte, first_byte + count
            while position < end:
                number, offset = divmod(position, per_file)
                piece = min(per_file - offset, end - position)
                if number not in files:
                    entry = (len(self._files), cells, codec)
                    files[number] = self._files.setdefault((path, number), entry)[0]
                self._pieces.append((files[number], offset, piece, self.size))
                self.size += piece
                position += piece
        return np.array(offsets, np.uint64)

    def read(self, out: U8) -> None:
        """Fill ``out``, of ``size`` bytes.

        Raises:
            ChainBroken, Damaged: As ``read`` raises them.
        """
        descriptors: list[int] = []
        arguments = []
        names = [(path, chunk_files.name_of([file])) for path, file in self._files]
        try:
            for (path, name), (_, cells, codec) in zip(names, self._files.values(), strict=True):
                chunk_files.check_directory(path)
                descriptors.append(_opened(path, name, cells))
                arguments.append(
                    (descriptors[-1], cells.chunk_bytes, cells.chunks, cells.sharded, codec)
                )
            pieces = np.array(self._pieces, np.uint64).reshape(-1, 4)
            refusal = required().read_array_files(arguments, pieces, out)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if refusal is not None:
            path, name = names[refusal[0]]
            raise Damaged(f"array {path} is damaged: {name}: {refusal[1]}", file=path)


def _opened(path: str, name: str, cells: Cells) -> int:
    """Return a descriptor of a file of an array that passed all checks."""
    # The native decoder looks at the headers of frames.
    try:
        return chunk_files.open_file(f"{path}/{name}", cells._replace(blosc=False))
    except FileNotFoundError:
        raise ChainBroken(
            f"array {path} lacks data that was committed: {name} is not there", file=path
        ) from None


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
