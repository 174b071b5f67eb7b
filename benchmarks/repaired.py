"""Raise second moments to the law of Adam, as candidates of experiments do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def repair(second: F32, first: F32, limit: float) -> F32:
    """Return max(v, m^2 / C): v, raised to the least value that obeys the law m^2 <= C v.

    A v that is too small for its m, because it is stale or coarsely rounded, would multiply updates
    by up to 10^5. A live state stays as it is, up to rounding. NaN stays NaN.

    Args:
        second: v, float32.
        first: m, float32 of the same shape.
        limit: C of ``adam.moment_limit``.
    """
    # The square of a float32 overflows or vanishes for elements that are valid themselves.
    wide = np.square(first, dtype=np.float64)
    wide /= limit
    return np.maximum(second, wide.astype(np.float32))
