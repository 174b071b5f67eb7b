"""Encode the words of an array that have changed, for versions that are sent to receivers.

The payload has the gaps between changed words, and the differences of their bits as integers. Both
are small numbers, of which zstd codes the bytes near their entropy. ``docs/how-to/publish.md`` has
the layout.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import frames
from deltacheck.codec.base import U8
from deltacheck.errors import DamagedStream

# Wider words have noise in their low bits: their bytes are coded as old XOR new.
_MAX_WORD_BYTES = 2
_XOR, _WORDS = 0, 1
# Words that are coded together. Larger: fewer headers; smaller: less memory.
_PIECE_WORDS = 1 << 22
# Of a piece: shift of the gaps, changed words; content and stored bytes of each of five streams.
_HEADER = struct.Struct("<B11I")
_ESCAPE = 255  # a byte that stands for a number of at least this size
# Mean gap from which its low byte is noise, and is split off.
_WIDE_GAP = 160
# Shorter streams are stored as they are: a frame would not be shorter.
_LEAST_FRAME = 48


def encode(before: U8, now: U8, word_bytes: int) -> bytes:
    """Return the changes between two arrays of equal size.

    Args:
        before: uint8, 1-D, contiguous.
        now: Likewise.
        word_bytes: The bytes of an element, 1, 2, 4 or 8.

    Raises:
        UnsupportedLeaf: The array is too long for a frame.
    """
    if word_bytes > _MAX_WORD_BYTES:
        return bytes([_XOR]) + frames.compress(np.bitwise_xor(before, now))
    word = np.dtype(f"<u{word_bytes}")
    old, new = before.view(word), now.view(word)
    pieces = [slice(begin, begin + _PIECE_WORDS) for begin in range(0, old.size, _PIECE_WORDS)]
    return b"".join([bytes([_WORDS]), *(_piece(old[piece], new[piece]) for piece in pieces)])


def _piece(old: NDArray[Any], new: NDArray[Any]) -> bytes:
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=-1) - 1
    difference = (new[positions] - old[positions]).view(f"<i{old.itemsize}").astype(np.int32)
    # Zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
    folded = (difference << 1) ^ (difference >> 31)
    shift = 8 if positions.size and gaps.mean() >= _WIDE_GAP else 0
    low = gaps.astype(np.uint8) if shift else np.zeros(0, np.uint8)
    streams = [low, *_escaped(gaps >> shift), *_escaped(folded)]
    encoded = [_stored(stream) for stream in streams]
    sizes = [n for s, data in zip(streams, encoded, strict=True) for n in (s.size, len(data))]
    return b"".join([_HEADER.pack(shift, positions.size, *sizes), *encoded])


def decode(payload: U8, before: U8, word_bytes: int) -> U8:
    """Return the array after the changes.

    Args:
        payload: The result of ``encode``; uint8, 1-D.
        before: The array before; uint8, 1-D, contiguous.
        word_bytes: The bytes of an element.

    Raises:
        DamagedStream: The payload is damaged, or is not of this array.
    """
    if payload.size and payload[0] == _XOR:
        return np.bitwise_xor(before, frames.decompress(payload[1:], before.size))
    if payload.size == 0 or payload[0] != _WORDS or word_bytes > _MAX_WORD_BYTES:
        raise DamagedStream("changed words have an unknown method")
    now = before.copy()
    words, rest = now.view(f"<u{word_bytes}"), payload[1:]
    for begin in range(0, words.size, _PIECE_WORDS):
        rest = rest[_apply_piece(rest, words[begin : begin + _PIECE_WORDS]) :]
    if rest.size:
        raise DamagedStream("changed words are followed by other bytes")
    return now


def _apply_piece(payload: U8, words: NDArray[Any]) -> int:
    """Change words in place; return the bytes of the payload that belong to them."""
    if payload.size < _HEADER.size:
        raise DamagedStream("changed words lack a header")
    shift, count, *sizes = _HEADER.unpack(payload[: _HEADER.size].tobytes())
    if count > words.size or shift not in (0, 8):
        raise DamagedStream("changed words do not fit their array")
    streams, begin = [], _HEADER.size
    for size, length in zip(sizes[::2], sizes[1::2], strict=True):
        if size > 4 * count or begin + length > payload.size:
            raise DamagedStream("a stream of changed words is too long")
        encoded = payload[begin : begin + length]
        streams.append(encoded if length == size else frames.decompress(encoded, size))
        begin += length
    gaps = _unescaped(streams[1], streams[2], count) << shift
    if shift:
        if streams[0].size != count:
            raise DamagedStream("changed words lack bytes of their gaps")
        gaps += streams[0]
    positions = np.cumsum(gaps + 1) - 1
    folded = _unescaped(streams[3], streams[4], count)
    if count and positions[-1] >= words.size:
        raise DamagedStream("a changed word lies beyond its array")
    words[positions] += ((folded >> 1) ^ -(folded & 1)).astype(words.dtype)
    return begin


def _escaped(numbers: NDArray[Any]) -> tuple[U8, U8]:
    """Return a byte for each number, and the numbers that do not fit, by planes of their bytes."""
    small = np.minimum(numbers, _ESCAPE).astype(np.uint8)
    large = numbers[small == _ESCAPE].astype("<u4")
    return small, np.ascontiguousarray(large.view(np.uint8).reshape(-1, 4).T).reshape(-1)


def _unescaped(small: U8, large: U8, count: int) -> NDArray[np.int64]:
    numbers = small.astype(np.int64)
    escaped = np.flatnonzero(small == _ESCAPE)
    if small.size != count or large.size != 4 * escaped.size:
        raise DamagedStream("a stream of changed words has another length than its header says")
    planes = np.ascontiguousarray(large.reshape(4, -1).T)
    numbers[escaped] = planes.reshape(-1).view("<u4")
    return numbers


def _stored(stream: U8) -> bytes:
    frame = frames.compress(stream) if stream.size >= _LEAST_FRAME else b""
    return frame if 0 < len(frame) < stream.size else stream.tobytes()
