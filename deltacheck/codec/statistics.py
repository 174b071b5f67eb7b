"""Statistics of the change between two arrays, on which the guard of a lossy state decides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck import _native
from deltacheck.codec import memory
from deltacheck.codec.base import U64
from deltacheck.leaf.dtypes import dtype_named

F64 = NDArray[np.float64]

NUMBERS = ("float16", "bfloat16", "float32", "float64")  # element types whose values are compared


class Statistics(NamedTuple):
    """Statistics with one entry for each chunk.

    Pairs with a value that is not finite are left out of the last three. ``nonfinite`` and the last
    three are 0 if the element type is not in ``NUMBERS``.

    Attributes:
        changed: Words whose bits differ.
        nonfinite: Infinities and NaNs in current.
        squared_difference: Sum of ``(current - base)^2``.
        squared_base: Sum of ``base^2``.
        largest_difference: Maximum of ``|current - base|``.
    """

    changed: U64
    nonfinite: U64
    squared_difference: F64
    squared_base: F64
    largest_difference: F64


def statistics(current: NDArray[Any], base: NDArray[Any], bounds: U64, dtype: str) -> Statistics:
    """Return statistics of each chunk of ``current`` against ``base``, in one pass over both.

    A difference is rounded to the element type (16-bit types: to float32) and infinite if it
    overflows that. Squares and sums are float64. Sums have a fixed order, so results are the same
    bits on every processor and any number of threads, whatever flags for subnormals the calling
    thread has set.

    Args:
        current: C-contiguous; its own dtype does not matter.
        base: C-contiguous, the same number of bytes.
        bounds: uint64 ``(chunks + 1,)``, offsets in words of the element type, ascending from 0.
        dtype: The element type as manifests name it, for example ``"bfloat16"``.

    Raises:
        ValueError: The arguments do not fit.
        UnsupportedLeaf: The dtype is unknown.
    """
    word_bytes = dtype_named(dtype).word_bytes
    now, shadow = memory.as_bytes("current", current), memory.as_bytes("base", base)
    if now.size != shadow.size:
        raise ValueError(f"base has {shadow.size} bytes, current has {now.size}")
    bounds = memory.checked_bounds(bounds, now.size, word_bytes)
    # Only the bits of other types are compared.
    elements = dtype if dtype in NUMBERS else f"bits{8 * word_bytes}"
    return Statistics(*_native.statistics(now, shadow, bounds, elements))
