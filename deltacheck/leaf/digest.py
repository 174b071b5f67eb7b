"""Digests of decoded bytes: what binds a restore to the step that was saved
(``docs/reference/format.md``, section 5).
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
    """xxh3_128 (high, low) of the named chunks of a leaf's bytes, uint64 ``(chunks, 2)``."""
    offsets = (bounds * np.uint64(word_bytes)).tolist()
    view = host.data
    values = [xxhash.xxh3_128_digest(view[offsets[c] : offsets[c + 1]]) for c in chunks]
    return np.frombuffer(b"".join(values), ">u8").astype(np.uint64).reshape(-1, 2)


def leaf_digest(digests: NDArray[np.uint64]) -> str:
    """The digest of a leaf: xxh3_128 of its chunks' digests in order, hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(digests.astype(">u8").tobytes()))


def digest_of(spec: LeafSpec, host: NDArray[np.uint8]) -> str:
    """The digest of a leaf whose bytes these are."""
    return leaf_digest(chunk_digests(host, spec.bounds(), spec.word_bytes, range(spec.chunk_count)))
