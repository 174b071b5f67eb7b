"""Files of arrays, read by the native module: looked at, read, decoded and checked through one
descriptor, straight to where they belong.

TensorStore reads them as well, and does where there is no such module, or no file: it takes several
times as long to open an array, and makes fresh memory for what it reads and for what it decodes.
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

_THREADS = 4  # larger: more waits for the storage at a time
_EXIT_SECONDS = 5.0  # longest wait at the end of the process for reads that nobody waits for


@cache
def codecs() -> frozenset[str]:
    """Codecs of ``ArraySpec`` that the native module reads; none where there is no module of ours,
    or one without libzstd.
    """
    readable: Callable[[], list[str]] | None = getattr(extension(), "readable_codecs", None)
    return frozenset() if readable is None else frozenset(readable())


def read(path: Path, cells: Cells, codec: str, pieces: Sequence[Piece], out: U8) -> None:
    """Fill ``out`` with pieces of an array, one after the other; every chunk that they touch is
    compared with its checksum.

    REQUIRES: ``codec`` is one of ``codecs()``; the pieces have as many bytes as ``out``. Raises
    ``ChainBroken`` where a file is missing, ``Damaged``.
    """
    native = required().read_array_file
    # Its own decoder looks at the headers of frames.
    cells = cells._replace(blosc=False)
    done = 0
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
                out[done : done + size],
            )
        finally:
            os.close(descriptor)
        if refusal:
            raise Damaged(f"array {path} is damaged: {name}: {refusal}", file=path)
        done += size


def start(work: Callable[[], None]) -> Future[None]:
    """Carry out reads behind the caller; the future tells when they are done, and what they
    raised.
    """
    try:
        return _readers(os.getpid()).start(work)
    except RuntimeError:
        # From Python 3.12 on an interpreter that ends starts no threads, and saves are finished
        # then, some of them read back.
        done: Future[None] = Future()
        carry_out(done, work)
        return done


@cache
def _readers(process: int) -> _Readers:
    """The threads of this process: a forked child has none of its parent's."""
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
        """Up to Python 3.13 a thread that comes back from native code while the interpreter ends is
        unwound, which C++ answers with an abort.
        """
        if os.getpid() == self._process:
            wait(list(self._under_way), _EXIT_SECONDS)
