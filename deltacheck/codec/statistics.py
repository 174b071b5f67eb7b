"""What changed between two arrays, as numbers: what a guard looks at before it trusts a lossy or
reused state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck import _native
from deltacheck.codec import memory
from deltacheck.codec.base import U64
from deltacheck.leaf.dtypes import dtype_named

F64 = NDArray[np.float64]

NUMBERS = ("float16", "bfloat16", "float32", "float64")  # element types whose values are looked at


class Statistics(NamedTuple):
    """One entry for each chunk.

    ``changed``: words whose bits differ. ``nonfinite``: infinities and NaNs in current.
    ``squared_difference``, ``squared_base``: sums of ``(current - base)^2`` and ``base^2``.
    ``largest_difference``: of ``|current - base|``. The last three leave out a pair of which either
    value is not finite; they and ``nonfinite`` are 0 where the element type is not in ``NUMBERS``.
    """

    changed: U64
    nonfinite: U64
    squared_difference: F64
    squared_base: F64
    largest_difference: F64


def statistics(current: NDArray[Any], base: NDArray[Any], bounds: U64, dtype: str) -> Statistics:
    """Statistics of each chunk of ``current`` against ``base``, in one pass over both.

    ``current``, ``base``: C-contiguous, the same number of bytes; their own dtypes do not count.
    ``bounds``: uint64 ``(chunks + 1,)``, offsets in words of the element type, ascending from 0.
    ``dtype``: the element type as manifests name it, for example ``"bfloat16"``.

    A difference is rounded to the element type (16-bit types: to float32) and infinite where it
    overflows that; squares and sums are float64. Sums have a fixed order, so that results are the
    same bits on every processor and any number of threads, whatever flags for subnormals the
    calling thread has set. Raises ``ValueError`` where arguments do not fit, ``UnsupportedLeaf``
    for an unknown dtype.
    """
    word_bytes = dtype_named(dtype).word_bytes
    now, shadow = memory.as_bytes("current", current), memory.as_bytes("base", base)
    if now.size != shadow.size:
        raise ValueError(f"base has {shadow.size} bytes, current has {now.size}")
    bounds = memory.checked_bounds(bounds, now.size, word_bytes)
    elements = dtype if dtype in NUMBERS else f"bits{8 * word_bytes}"
    return Statistics(*_native.statistics(now, shadow, bounds, elements))
