"""Delta encoding of leaves. ``default_codec()`` returns the codec of all host code."""

from __future__ import annotations

from functools import cache

from deltacheck.codec.native import NativeCodec

__all__ = ["NativeCodec", "default_codec"]


@cache
def default_codec() -> NativeCodec:
    """Return the codec of leaves in host memory."""
    return NativeCodec()
