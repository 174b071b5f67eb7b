"""Measures of the difference between live arrays and restored ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# First moments below the first count as zero beside second moments below the second
# (``deltacheck.leaf.contracts``).
_ZERO_MEAN, _ZERO_SECOND = 2.0**-60, 2.0**-126
# Drift is measured on this many blocks of a leaf, evenly spread, of this many elements each.
SAMPLE_BLOCKS, SAMPLE_BLOCK = 64, 64


def sample(values: Array) -> Array:
    """Return evenly spread blocks of a 1-D array; all of it if it is no larger than the sample."""
    if values.size <= SAMPLE_BLOCKS * SAMPLE_BLOCK:
        return values
    blocks: Array = values[places_of_sample(values.size)]
    return blocks


def places_of_sample(size: int) -> NDArray[np.intp]:
    """Return the places of ``sample`` in an array of so many elements."""
    if size <= SAMPLE_BLOCKS * SAMPLE_BLOCK:
        return np.arange(size)
    starts = np.linspace(0, size - SAMPLE_BLOCK, SAMPLE_BLOCKS).astype(np.intp)
    return (starts[:, None] + np.arange(SAMPLE_BLOCK)).reshape(-1)


def octaves_apart(first: Array, second: Array) -> float | None:
    """Return the median ``|log2(first / second)|`` of the elements that are positive in both.

    ``None`` if there are no such elements.
    """
    mask = (first > 0) & (second > 0) & np.isfinite(first) & np.isfinite(second)
    if not mask.any():
        return None
    logs = [np.log2(values[mask].astype(np.float64)) for values in (first, second)]
    return float(np.median(np.abs(logs[0] - logs[1])))


def largest_octaves(live: Array, restored: Array) -> float:
    """Return the largest ``|log2(restored / live)|`` of second moments.

    Zeros are equal. It is infinite if an element is negative, NaN, or zero on one side only.

    Args:
        live: float32, 1-D.
        restored: Of the same length.
    """
    with np.errstate(all="ignore"):
        ratios = restored / live
    # Few passes, because this runs over every element of every save.
    if np.isnan(ratios).any():
        ratios = ratios[(live != 0) | (restored != 0)]
    least, most = (float(f(ratios, initial=1.0)) for f in (np.min, np.max))
    # A NaN is not above 0.
    return max(math.log2(most), -math.log2(least)) if least > 0 and most < math.inf else math.inf


def largest_update_change(live: Array, restored: Array, second: Array) -> float:
    """Return the largest ``|restored - live| / sqrt(second)`` of first moments.

    It is infinite if an element is NaN, or has no such quotient and does not count as zero.

    Args:
        live: The first moments, float32, 1-D.
        restored: What a restore returns of them, of the same length.
        second: The live second moments, of the same length.
    """
    if not second.min(initial=np.float32(np.inf)) >= _ZERO_SECOND:
        has_root = second >= _ZERO_SECOND
        sizes = np.maximum(np.abs(live[~has_root]), np.abs(restored[~has_root]))
        if not (sizes < _ZERO_MEAN).all():
            return math.inf
        live, restored, second = live[has_root], restored[has_root], second[has_root]
    errors = np.abs(restored - live)
    errors /= np.sqrt(second)
    largest = float(errors.max(initial=0.0))
    return math.inf if math.isnan(largest) else largest


@dataclass(slots=True)
class RelativeError:
    """``||restored - live|| / ||live||`` of arrays that come in parts, in float64.

    It is 0 if both norms are zero, and infinite or NaN if elements are.
    """

    _live_squares: float = 0.0
    _error_squares: float = 0.0

    def add(self, live: Array, restored: Array) -> None:
        """Add a part. ``live``, ``restored``: 1-D, of the same length."""
        # In float64, because squares in float32 overflow or vanish for values that are valid.
        wide = live.astype(np.float64)
        self._live_squares += float(np.vdot(wide, wide))
        wide -= restored.astype(np.float64)
        self._error_squares += float(np.vdot(wide, wide))

    @property
    def l2(self) -> float:
        """The relative error of the parts so far."""
        return relative_error(self._error_squares, self._live_squares)


def relative_error(error_squares: float, live_squares: float) -> float:
    """Return ``||restored - live|| / ||live||`` from the squares of both norms."""
    if live_squares:
        return math.sqrt(error_squares / live_squares)
    return 0.0 if error_squares == 0 else math.inf
