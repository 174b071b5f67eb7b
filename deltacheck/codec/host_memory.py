"""Allocate large buffers in memory of their own, which returns to the system when it is freed.

An allocator keeps freed memory of a thread for later requests of that thread. A save allocates on
threads that the training never uses, so what it frees would be kept for it alone.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

from deltacheck.codec.base import U8

# As for the encoder's blocks (``xla_ffi/encoder/blocks.cc``). Larger: fewer calls of the system;
# smaller: less memory stays with the allocator.
LEAST_MAPPED_BYTES = 1 << 20
# NumPy asks for large pages from this size on, too.
_LEAST_HUGE_BYTES = 4 << 20
# Of whole leaves in a save. TensorStore compresses them in memory of many threads, of which glibc
# keeps up to the size of the leaves. Smaller: less memory; larger: fewer page faults later on.
LEAST_FREED_BYTES = 8 << 20


def empty(size: int) -> U8:
    """Return memory of ``size`` bytes, uint8 1-D, with undefined content.

    Raises:
        MemoryError: The system has not enough of it.
    """
    # Elsewhere an anonymous mapping has other flags, and allocators keep less.
    if size < LEAST_MAPPED_BYTES or sys.platform != "linux":
        return np.empty(size, np.uint8)
    try:
        # Private: the default is shared with forked children, whose writes we would see.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes: {error}") from error
    if size >= _LEAST_HUGE_BYTES:
        _ask_for_large_pages(memory)
    return np.frombuffer(memory, np.uint8)


def copied(source: U8) -> U8:
    """Return a copy of ``source`` (uint8 1-D)."""
    out = empty(source.size)
    np.copyto(out, source)
    return out


def _ask_for_large_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # the kernel was built without them
        return


def return_freed() -> None:
    """Let glibc return free memory of all threads; other allocators do so by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
