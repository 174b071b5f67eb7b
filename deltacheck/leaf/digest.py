"""Digests of decoded bytes, which prove that a restore returns the saved content.

They are defined in ``docs/reference/format.md``, section 5. The hash is xxh3_128 of xxHash
(https://xxhash.com).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacheck.leaf.spec import LeafSpec


def chunk_digests(
    host: NDArray[np.uint8], bounds: NDArray[np.uint64], word_bytes: int, chunks: Iterable[int]
) -> NDArray[np.uint64]:
    """Return the digests of some chunks.

    Args:
        host: The bytes of a leaf or of a block, uint8, 1-D.
        bounds: The offsets of all of its chunks in words, uint64 ``(chunks + 1,)``.
        word_bytes: Bytes of a word.
        chunks: Numbers of the chunks.

    Returns:
        The high and the low half of each digest, uint64 ``(chunks, 2)``.
    """
    offsets = (bounds * np.uint64(word_bytes)).tolist()
    # The hash reads the slices of a memoryview in place.
    view = host.data
    # The canonical form of xxh3_128 is big-endian (section 5 of the format).
    values = [xxhash.xxh3_128_digest(view[offsets[c] : offsets[c + 1]]) for c in chunks]
    return np.frombuffer(b"".join(values), ">u8").astype(np.uint64).reshape(-1, 2)


def all_chunk_digests(spec: LeafSpec, host: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the digests of all chunks of a leaf with these bytes, uint64 ``(chunks, 2)``."""
    return chunk_digests(host, spec.bounds(), spec.word_bytes, range(spec.chunk_count))


def leaf_digest(digests: NDArray[np.uint64]) -> str:
    """Return the digest of a leaf: the hash of the digests of its chunks in order, hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(digests.astype(">u8").tobytes()))


def digest_of(spec: LeafSpec, host: NDArray[np.uint8]) -> str:
    """Return the digest of a leaf with these bytes."""
    return leaf_digest(all_chunk_digests(spec, host))
