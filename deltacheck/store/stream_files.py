"""Files of streams and tables, read by the native module: looked at, read and checked through one descriptor.

TensorStore reads them as well, and does where there is no such module, or no file: it takes several times as long to open an array, and
makes fresh memory for what it reads and for what it decodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from deltacheck.codec.base import U8
from deltacheck.codec.extension import extension
from deltacheck.errors import ChainBroken, Damaged
from deltacheck.store import chunk_files
from deltacheck.store.background import Background, carry_out
from deltacheck.store.chunk_files import Cells

_THREADS = 4  # larger: more waits for the storage at a time


@cache
def native_reader() -> Callable[..., str] | None:
    """``read_stream_file`` of the native module; ``None`` where there is no module of ours, or one without libzstd."""
    return getattr(extension(), "read_stream_file", None)


def read(path: Path, cells: Cells, *, compressed: bool, first: int, out: U8) -> None:
    """Fill ``out`` with the bytes of an array from byte ``first`` on, each chunk of which is compared with its checksum.

    ``compressed``: whether chunks are zstd frames. REQUIRES: there is a native reader; the array is cut along its first axis alone, so that
    its chunks follow each other, and has these bytes. Raises ``ChainBroken`` where a file is missing, ``Damaged``.
    """
    native = native_reader()
    assert native is not None
    per_file = cells.chunk_bytes * cells.chunks
    number, begin = divmod(first, per_file)
    done = 0
    while done < out.size:
        size = min(per_file - begin, out.size - done)
        name = ".".join(["c", str(number), *["0"] * (len(cells.shape) - 1)])
        try:
            descriptor = chunk_files.open_file(path / name, cells)
        except FileNotFoundError:
            raise ChainBroken(f"array {path} lacks data that was committed: {name} is not there", file=path) from None
        try:
            into = out[done : done + size]
            refusal = native(descriptor, cells.chunk_bytes, cells.chunks, cells.sharded, compressed, begin, into)
        finally:
            os.close(descriptor)
        if refusal:
            raise Damaged(f"array {path} is damaged: {name}: {refusal}", file=path)
        number, begin, done = number + 1, 0, done + size


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
