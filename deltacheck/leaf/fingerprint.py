"""Fingerprints of leaves, which show that the content of a leaf changed between two moments.

A fingerprint is made within ``save`` of every leaf that is read later, so it must cost much less
than a copy. It covers small leaves entirely and large leaves by a sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

# Leaves up to this size are hashed entirely. In memory that no cache has, this takes no longer than
# the blocks of a larger leaf, each of which waits for the memory.
WHOLE_BYTES = 64 << 10
# A larger leaf is cut into this number of equal strides, of which one block each is hashed. A
# contiguous write of a stride or more therefore always meets a block. Larger blocks: shorter writes
# are met more often; smaller: cheaper, down to about this size.
BLOCKS = 64
BLOCK_BYTES = 512


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
