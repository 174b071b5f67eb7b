"""Measures of the difference between live arrays and restored ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

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
    starts = np.linspace(0, values.size - SAMPLE_BLOCK, SAMPLE_BLOCKS).astype(np.int64)
    blocks: Array = values[(starts[:, None] + np.arange(SAMPLE_BLOCK)).reshape(-1)]
    return blocks


def octaves_apart(first: Array, second: Array) -> float | None:
    """Return the median ``|log2(first / second)|`` of the elements that are positive in both.

    ``None`` if there are no such elements.
    """
    mask = (first > 0) & (second > 0) & np.isfinite(first) & np.isfinite(second)
    if not mask.any():
        return None
    logs = [np.log2(values[mask].astype(np.float64)) for values in (first, second)]
    return float(np.median(np.abs(logs[0] - logs[1])))


def largest_octaves(live: Array, restored: Array, zero: float) -> float:
    """Return the largest ``|log2(restored / live)|``, infinity if a sign differs.

    Args:
        live: 1-D.
        restored: Of the same length.
        zero: Values of at most this size count as zero, and zeros as equal.
    """
    first, second = (values.astype(np.float64) for values in (live, restored))
    sizes = [np.maximum(np.abs(values), zero) for values in (first, second)]
    flipped = (first * second < 0) & (sizes[0] > zero) & (sizes[1] > zero)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum(sizes[0] / sizes[1], sizes[1] / sizes[0])
    ratios[sizes[0] == sizes[1]] = 1.0
    ratios[flipped] = math.inf
    return math.log2(float(ratios.max(initial=1.0)))


def largest_update_change(live: Array, restored: Array, second: Array) -> float:
    """Return the largest ``|restored - live| / sqrt(second)`` of first moments, NaN if one is NaN.

    Args:
        live: The first moments, 1-D.
        restored: What a restore returns of them, of the same length.
        second: The live second moments, of the same length.
    """
    errors = np.abs(restored.astype(np.float64) - live)
    has_root = second >= _ZERO_SECOND
    ignored = ~has_root & (np.maximum(np.abs(live), np.abs(restored)) < _ZERO_MEAN)
    roots = np.sqrt(np.where(has_root, second, 0.0).astype(np.float64))
    with np.errstate(divide="ignore"):
        return float(np.max(errors[~ignored] / roots[~ignored], initial=0.0))


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
