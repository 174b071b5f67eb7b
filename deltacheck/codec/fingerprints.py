"""Fingerprints of many leaves of host memory in one call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import U64
from deltacheck.codec.extension import native
from deltacheck.leaf import fingerprint


class Memory:
    """Bytes of host memory as NumPy reads them, by ``numpy.asarray``.

    Args:
        address: The first byte.
        size: The number of bytes, at least 1.
        owner: The object that keeps the memory alive. The array keeps it.
    """

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def fingerprints(addresses: U64, sizes: U64, seed: int) -> U64:
    """Return the fingerprint of each leaf.

    They can be compared with others of this process only. They cover what ``fingerprint.sampled``
    returns.

    Args:
        addresses: The first byte of each leaf, uint64. The caller keeps the memory alive.
        sizes: The bytes of each leaf, uint64.
        seed: Any integer of at least 0, less than 2^64.
    """
    out = np.empty(addresses.size, np.uint64)
    sampling = (fingerprint.WHOLE_BYTES, fingerprint.BLOCKS, fingerprint.BLOCK_BYTES, seed)
    native.fingerprints(addresses, sizes, sampling, out)
    return out


def fingerprint_of(content: NDArray[np.uint8], seed: int) -> int:
    """Return the fingerprint of one leaf.

    Args:
        content: Its bytes, uint8, 1-D, contiguous.
        seed: As for ``fingerprints``.
    """
    address = content.__array_interface__["data"][0]
    return int(
        fingerprints(np.array([address], np.uint64), np.array([content.size], np.uint64), seed)[0]
    )
