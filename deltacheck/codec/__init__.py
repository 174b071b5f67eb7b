"""Delta encoding of leaves. ``default_codec()`` returns the codec of all host code."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

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
from deltacheck.codec.reference import ReferenceCodec

if TYPE_CHECKING:
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
    "ReferenceCodec",
    "default_codec",
]


@cache
def default_codec() -> Codec[Any]:
    """Return the native codec, or the reference codec without a fitting extension.

    The reference gives the same bytes, many times slower.
    """
    try:
        from deltacheck.codec.native import NativeCodec
    except ImportError as error:
        # Once in a process, because the result is cached.
        logging.getLogger("deltacheck").warning(
            "The NumPy codec is in use, which is many times slower: %s", error
        )
        return ReferenceCodec()
    return NativeCodec()


def __getattr__(name: str) -> Any:
    if name == "NativeCodec":  # on first use: the extension may be missing
        from deltacheck.codec.native import NativeCodec

        return NativeCodec
    raise AttributeError(f"module 'deltacheck.codec' has no attribute {name!r}")
