"""Files of arrays, read by the native module: looked at, read, decoded and checked through one descriptor, straight to where they belong.

TensorStore reads them as well, and does where there is no such module, or no file: it takes several times as long to open an array, and
makes fresh memory for what it reads and for what it decodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from deltacheck.codec.base import U8
from deltacheck.codec.extension import extension, required
from deltacheck.errors import ChainBroken, Damaged
from deltacheck.store import chunk_files
from deltacheck.store.background import Background, carry_out
from deltacheck.store.chunk_files import Cells, Piece

_THREADS = 4  # larger: more waits for the storage at a time


@cache
def codecs() -> frozenset[str]:
    """Codecs of ``ArraySpec`` that the native module reads; none where there is no module of ours, or one without libzstd."""
    readable: Callable[[], list[str]] | None = getattr(extension(), "readable_codecs", None)
    return frozenset() if readable is None else frozenset(readable())


def read(path: Path, cells: Cells, codec: str, pieces: Sequence[Piece], out: U8) -> None:
    """Fill ``out`` with pieces of an array, one after the other; every chunk that they touch is compared with its checksum.

    REQUIRES: ``codec`` is one of ``codecs()``; the pieces have as many bytes as ``out``. Raises ``ChainBroken`` where a file is missing,
    ``Damaged``.
    """
    native = required().read_array_file
    # Its own decoder looks at the headers of frames.
    cells = cells._replace(blosc=False)
    done = 0
    for name, begin, size in pieces:
        try:
            descriptor = chunk_files.open_file(path / name, cells)
        except FileNotFoundError:
            raise ChainBroken(f"array {path} lacks data that was committed: {name} is not there", file=path) from None
        try:
            refusal = native(descriptor, cells.chunk_bytes, cells.chunks, cells.sharded, codec, begin, out[done : done + size])
        finally:
            os.close(descriptor)
        if refusal:
            raise Damaged(f"array {path} is damaged: {name}: {refusal}", file=path)
        done += size


def start(work: Callable[[], None]) -> Future[None]:
    """Carry out reads behind the caller; the future tells when they are done, and what they raised."""
    try:
        return _background(os.getpid()).start(work)
    except RuntimeError:
        # From Python 3.12 on an interpreter that ends starts no threads, and saves are finished then, some of them read back.
        done: Future[None] = Future()
        carry_out(done, work)
        return done


@cache
def _background(process: int) -> Background:
    """The threads of this process: a forked child has none of its parent's."""
    return Background(_THREADS, "deltacheck-reader")
