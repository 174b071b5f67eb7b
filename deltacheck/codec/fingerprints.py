"""Fingerprints of leaves, which show that the content of a leaf changed between two moments.

A fingerprint is made within ``save`` of every leaf that is read later, so it must cost much less
than a copy. It covers small leaves entirely and large leaves by a sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacheck.codec.base import U64
from deltacheck.codec.extension import native

# Leaves up to this size are hashed entirely. In memory that no cache has, this takes no longer than
# the blocks of a larger leaf, each of which waits for the memory.
WHOLE_BYTES = 64 << 10
# A larger leaf is cut into this number of equal strides, of which one block each is hashed. A
# contiguous write of a stride or more therefore always meets a block. Larger blocks: shorter writes
# are met more often; smaller: cheaper, down to about this size.
BLOCKS = 64
BLOCK_BYTES = 512


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

    They can be compared with others of this process only. They cover what ``sampled``
    returns.

    Args:
        addresses: The first byte of each leaf, uint64. The caller keeps the memory alive.
        sizes: The bytes of each leaf, uint64.
        seed: Any integer of at least 0, less than 2^64.
    """
    out = np.empty(addresses.size, np.uint64)
    sampling = (WHOLE_BYTES, BLOCKS, BLOCK_BYTES, seed)
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


def sampled(data: Any, seed: int) -> Any:
    """Return the bytes of a leaf that its fingerprint covers.

    Args:
        data: The leaf, uint8, 1-D: a NumPy array or a tensor.
        seed: Any integer of at least 0. It chooses the places of the blocks, so that a write which
            one save misses is met by another.

    Returns:
        ``data`` or a view of it, uint8.
    """
    size = int(data.shape[0])
    if size <= WHOLE_BYTES:
        return data
    stride = size // BLOCKS
    start = seed % (stride - BLOCK_BYTES + 1)
    return data[: BLOCKS * stride].reshape(BLOCKS, stride)[:, start : start + BLOCK_BYTES]


def digest(sample: np.ndarray) -> str:
    """Return the digest of sampled bytes in host memory, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(sample).data)
