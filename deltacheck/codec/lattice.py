"""Master weights on a lattice: the bounded contract, in which values are kept to within half a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck import _native

F32 = NDArray[np.float32]

LEAST_STEP, MOST_STEP = 2.0**-149, float(np.finfo(np.float32).max)


class Quantised(NamedTuple):
    """``values``: float32, in the shape of the input. ``nonfinite``: values that are infinite or NaN and stayed as they were, bit for
    bit. ``largest_error``: of ``|x' - x|`` of the others.
    """

    values: F32
    nonfinite: int
    largest_error: float


def quantise(
    values: F32, step: float, seed: int, weights: NDArray[np.generic] | None = None, out: F32 | None = None
) -> Quantised:
    """Put float32 ``values`` on a lattice of spacing ``step``, whose phase is drawn for each element by a hash.

    Element ``i`` in C order has the phase ``u = (mix64(seed + i) >> 40) * 2^-24`` (splitmix64's finaliser, modulo 2^64) and becomes
    ``x' = (floor(x / step + u) - u + 0.5) * step``, in float64, then rounded to float32. So a part of a tensor from element ``i`` on is
    quantised alike with ``seed + i``. The bits are the same on every processor.

    ``step``: in the unit of the values, from 2^-149 to the largest float32. ``seed``: 0 to 2^64 - 1, one for each tensor. ``weights``:
    bfloat16, or its bits as uint16, in the shape of ``values``: ``x'`` is then moved to the nearest value that rounds (to nearest,
    ties to even) to the weight. ``out``: where to write, float32 in the shape of ``values``, which it may be; else a new array.

    What holds: ``|x' - x| <= step / 2 + ulp(x') / 2`` up to the rounding of the float64 operations, ``2^-50 (|x| + step)``, where no
    weights are given or each is ``x`` rounded; the error that there was is returned. Quantising ``x'`` again with the same arguments
    gives ``x'`` where ``|x| <= 2^22 step``: below that float32 can tell the cells apart. Without weights the error is as good as
    independent of ``x`` and uniform (subtractive dither: L. Schuchman, "Dither signals and their effect on quantization noise", 1964),
    provided that ``x`` was not chosen by the hash; a weight that is given, and a step near ``ulp(x)``, take that away.

    Raises ``ValueError`` where arguments do not fit.
    """
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or not values.flags.c_contiguous:
        raise ValueError("values must be a C-contiguous numpy array of float32")
    if not LEAST_STEP <= step <= MOST_STEP:
        raise ValueError(f"step must be from {LEAST_STEP} to {MOST_STEP}, not {step}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be from 0 to 2^64 - 1, not {seed}")
    if out is None:
        out = np.empty_like(values, order="C", subok=False)
    elif out.dtype != np.float32 or out.shape != values.shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("out must be a writable, C-contiguous numpy array of float32 in the shape of values")
    elif np.may_share_memory(out, values) and out.ctypes.data != values.ctypes.data:
        raise ValueError("out must be values itself, or share no memory with it")
    cells = None if weights is None else _cells(weights, values.shape)
    found = _native.quantise(values.reshape(-1), cells, step, seed, out.reshape(-1))
    return Quantised(out, *found)


def _cells(weights: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.uint16]:
    if weights.dtype.name not in ("bfloat16", "uint16") or weights.shape != shape or not weights.flags.c_contiguous:
        raise ValueError("weights must be a C-contiguous numpy array of bfloat16 or uint16 in the shape of values")
    return weights.reshape(-1).view(np.uint16)
