"""Reads of array files by the native module, straight into the memory of the caller.

One descriptor is checked, read, decoded and compared with its checksums. TensorStore reads the same
files, and does so if there is no native module or no local file. It takes several times as long to
open an array, and allocates fresh memory for the encoded and the decoded bytes.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache
from pathlib import Path

from deltacheck.codec.base import U8
from deltacheck.codec.extension import extension, required
from deltacheck.errors import ChainBroken, Damaged
from deltacheck.store.files import chunk_files
from deltacheck.store.files.background import Background, carry_out
from deltacheck.store.files.chunk_files import Cells, Piece

_THREADS = 4  # larger: more reads wait for the storage at the same time
# The longest wait without progress, at the end of the process, for reads that nobody waits for.
_EXIT_SECONDS = 5.0


@cache
def codecs() -> frozenset[str]:
    """Return the codecs of ``ArraySpec`` that the native module reads.

    There are none without the module, or if it was built without libzstd.
    """
    readable: Callable[[], list[str]] | None = getattr(extension(), "readable_codecs", None)
    return frozenset() if readable is None else frozenset(readable())


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
    # Its own decoder looks at the headers of frames.
    cells = cells._replace(blosc=False)
    position = 0
    for name, begin, size in pieces:
        try:
            descriptor = chunk_files.open_file(path / name, cells)
        except FileNotFoundError:
            raise ChainBroken(
                f"array {path} lacks data that was committed: {name} is not there", file=path
            ) from None
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


def start(work: Callable[[], None]) -> Future[None]:
    """Call ``work`` on a reader thread; return a future of its end."""
    try:
        return _readers(os.getpid()).start(work)
    except RuntimeError:
        # From Python 3.12 on an interpreter that ends starts no threads, and saves are finished
        # then, some of them read back.
        future: Future[None] = Future()
        carry_out(future, work)
        return future


@cache
def _readers(process: int) -> _Readers:
    """Return the threads of this process: a forked child has none of its parent's."""
    return _Readers(process)


class _Readers:
    def __init__(self, process: int) -> None:
        self._process = process
        self._background = Background(_THREADS, "deltacheck-reader")
        self._under_way: set[Future[None]] = set()
        atexit.register(self._finish)

    def start(self, work: Callable[[], None]) -> Future[None]:
        future = self._background.start(work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _finish(self) -> None:
        """Wait for the reads under way at the end of the process.

        Up to Python 3.13 a thread that comes back from native code while the interpreter ends is
        unwound, which C++ answers with an abort.
        """
        if os.getpid() != self._process:
            return
        # A busy machine may need long for all of them; only storage that hangs ends the wait.
        while pending := list(self._under_way):
            if not wait(pending, _EXIT_SECONDS).done:
                return
