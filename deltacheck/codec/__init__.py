"""Delta encoding of leaves. ``default_codec()`` returns the codec of all host code."""

from __future__ import annotations

from functools import cache

from deltacheck.codec.base import (
    BITMAP,
    CHANGED,
    CHUNK,
    DIFF,
    GAP_BYTES,
    METHOD,
    METHOD_NAMES,
    ORDERED_BITMAP,
    ORDERED_SPARSE,
    PLANES,
    RAW,
    ROW_WIDTH,
    SPARSE,
    STREAMS,
    TILE_BYTES,
    U8,
    U32,
    U64,
    UNCHANGED,
    WIDE_COUNT,
    Codec,
    Encoded,
    EncodedGroup,
    GroupCodec,
    GroupJob,
    GroupSpan,
)
from deltacheck.codec.native import NativeCodec

__all__ = [
    "BITMAP",
    "CHANGED",
    "CHUNK",
    "DIFF",
    "GAP_BYTES",
    "METHOD",
    "METHOD_NAMES",
    "ORDERED_BITMAP",
    "ORDERED_SPARSE",
    "PLANES",
    "RAW",
    "ROW_WIDTH",
    "SPARSE",
    "STREAMS",
    "TILE_BYTES",
    "U8",
    "U32",
    "U64",
    "UNCHANGED",
    "WIDE_COUNT",
    "Codec",
    "Encoded",
    "EncodedGroup",
    "GroupCodec",
    "GroupJob",
    "GroupSpan",
    "NativeCodec",
    "default_codec",
]


@cache
def default_codec() -> NativeCodec:
    """Return the codec of leaves in host memory."""
    return NativeCodec()
