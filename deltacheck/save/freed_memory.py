"""Return memory to the system that the allocator keeps after a save of whole leaves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

# Of whole leaves in a save. TensorStore compresses them in memory of many threads, of which glibc
# keeps up to the size of the leaves. Smaller: less memory; larger: fewer page faults later on.
LEAST_BYTES = 8 << 20


def return_freed_memory() -> None:
    """Let glibc return free memory of all threads; other allocators do so by themselves."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
