"""Encode the words of an array that have changed, for versions that are sent to receivers.

``xla_ffi/encoder/changes.h`` codes words of one or two bytes, near the entropy of their changes
given the words before. ``docs/how-to/publish.md`` has the layout.
"""

from __future__ import annotations

import numpy as np

from deltacheck.codec import frames
from deltacheck.codec.base import U8
from deltacheck.codec.extension import native
from deltacheck.errors import DamagedStream

# Wider words have noise in their low bits: their bytes are coded as old XOR new.
_MAX_WORD_BYTES = 2


def encode(before: U8, now: U8, word_bytes: int) -> U8:
    """Return the changes between two arrays of equal size.

    Args:
        before: uint8, 1-D, contiguous, of one word at least.
        now: Likewise.
        word_bytes: The bytes of an element, 1, 2, 4 or 8.

    Raises:
        UnsupportedLeaf: The array is too long for a frame.
    """
    if word_bytes > _MAX_WORD_BYTES:
        return np.frombuffer(frames.compress(np.bitwise_xor(before, now)), np.uint8)
    changes = native.encode_changes(before, now, word_bytes)
    assert changes is not None  # there are words
    return changes


def decode(payload: U8, before: U8, word_bytes: int) -> U8:
    """Return the array after the changes.

    Args:
        payload: The result of ``encode``; uint8, 1-D, contiguous.
        before: The array before; uint8, 1-D, contiguous.
        word_bytes: The bytes of an element.

    Raises:
        DamagedStream: The payload is damaged, or is not of this array. Some damage gives another
            array instead, so the caller must compare digests.
    """
    if word_bytes > _MAX_WORD_BYTES:
        return np.bitwise_xor(before, frames.decompress(payload, before.size))
    now = before.copy()
    if refusal := native.apply_changes(payload, now, word_bytes):
        raise DamagedStream(f"changed words are damaged: {refusal}")
    return now
