"""Estimate from a sample how many bytes a leaf takes whole, and as a delta."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deltacheck.codec import default_codec
from deltacheck.codec.base import U8
from deltacheck.store.segment import entropy_bytes

# The sample: pieces of the leaf at equal distances. More: a better estimate; fewer: less time.
_PIECES = 4
_PIECE_BYTES = 16 << 10


class SampledSizes(NamedTuple):
    """Bytes of a sample of a leaf after entropy coding.

    Attributes:
        whole: Bytes of the content alone.
        delta: Bytes of its changes.
    """

    whole: float
    delta: float


def sampled_sizes(current: U8, base: U8, word_bytes: int) -> SampledSizes:
    """Estimate both sizes from the entropy of the bytes that the encoder gives.

    Args:
        current: The content, uint8, 1-D, at least 16 KiB.
        base: The content before; the same length. It is not changed.
        word_bytes: Bytes of a word.
    """
    codec = default_codec()
    bounds = np.array([0, _PIECE_BYTES // word_bytes], np.uint64)
    whole = delta = 0.0
    for begin in np.linspace(0, current.size - _PIECE_BYTES, _PIECES).astype(np.int64).tolist():
        first = begin // word_bytes * word_bytes
        piece = current[first : first + _PIECE_BYTES].copy()
        before = base[first : first + _PIECE_BYTES].copy()
        encoded, encoded_delta = (
            codec.encode(piece, earlier, bounds, word_bytes)[0] for earlier in (None, before)
        )
        whole += entropy_bytes(encoded.streams.values())
        delta += entropy_bytes(encoded_delta.streams.values())
    return SampledSizes(whole, delta)
