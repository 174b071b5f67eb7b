"""Memory that consecutive reads share: touching fresh pages takes as long as decoding into them."""

from __future__ import annotations

import numpy as np

from deltacheck.codec import host_memory
from deltacheck.codec.base import U8

# Sizes are rounded up to it, so that a buffer also serves reads of about its size.
_STEP_BYTES = 64 << 10


class Scratch:
    """A pool of buffers for one thread.

    A buffer that is never given back is dropped: a read that failed may still be written to by the
    reads that were started with it.
    """

    def __init__(self) -> None:
        self._free: list[U8] = []  # by size

    def take(self, size: int) -> U8:
        """Return memory of ``size`` bytes, uint8 1-D, with undefined content."""
        fitting = next(
            (index for index, memory in enumerate(self._free) if memory.size >= size), None
        )
        memory = (
            host_memory.empty(-(-size // _STEP_BYTES) * _STEP_BYTES)
            if fitting is None
            else self._free.pop(fitting)
        )
        return memory[:size]

    def give_back(self, memory: U8) -> None:
        """Return memory to the pool. It comes from ``take``, and no thread uses it any more."""
        buffer = memory if memory.base is None else memory.base
        assert isinstance(buffer, np.ndarray)
        self._free.append(buffer)
        self._free.sort(key=len)
