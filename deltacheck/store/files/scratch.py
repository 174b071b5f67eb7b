"""Memory that reads use one after the other: making fresh pages takes as long as decoding into
them.
"""

from __future__ import annotations

import numpy as np

from deltacheck.codec.base import U8

_STEP_BYTES = (
    64 << 10
)  # sizes are rounded up to it, so that memory serves reads of about its size, too


class Scratch:
    """Gives memory, and takes it back. For one thread.

    What is never given back is forgotten: a read that failed may still be written to by its
    companions.
    """

    def __init__(self) -> None:
        self._free: list[U8] = []  # by size

    def take(self, size: int) -> U8:
        """Memory of ``size`` bytes, uint8 1-D, with whatever is in it."""
        fitting = next((at for at, memory in enumerate(self._free) if memory.size >= size), None)
        memory = (
            np.empty(-(-size // _STEP_BYTES) * _STEP_BYTES, np.uint8)
            if fitting is None
            else self._free.pop(fitting)
        )
        return memory[:size]

    def give_back(self, taken: U8) -> None:
        """REQUIRES: ``take`` gave it, and nothing reads or writes it any more."""
        whole = taken if taken.base is None else taken.base
        assert isinstance(whole, np.ndarray)
        self._free.append(whole)
        self._free.sort(key=len)
