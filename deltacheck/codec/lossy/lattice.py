"""Master weights as integers on a lattice: a bounded contract with an error of half a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.extension import native

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

# The bounds of section 4.5.1 of the format: the least subnormal and the largest float32.
LEAST_STEP, MOST_STEP = 2.0**-149, float(np.finfo(np.float32).max)
# The limits of section 4.5.1.
MOST_HALVINGS, MOST_SPARE_BITS = 31, 7


class CodedTensor(NamedTuple):
    """The codes of a tensor and their errors.

    Attributes:
        codes: In the shape of the values: int32 of ``lattice.codes``, uint8 or uint16 of
            ``nested.codes``.
        refused: Values without a code, because they are infinite or NaN, or too many steps from
            zero or from their weight. If there is one, the codes cannot restore the tensor.
        largest_error: Maximum of ``|x' - x|`` over the other values, float64, if ``values`` gives
            ``x'``.
    """

    codes: NDArray[Any]
    refused: int
    largest_error: float


class CastErrors(NamedTuple):
    """The errors of bfloat16 weights that are cast from the codes of their masters.

    Attributes:
        refused: Masters without a code, as in ``CodedTensor``.
        largest_error: Maximum of ``|x' - x|`` over the other masters, float64.
        sum_squared_error: Sum of ``(w' - w)^2`` over their weights, float64: ``w'`` is ``x'``
            rounded to bfloat16, to nearest, ties to even.
        sum_squared_weights: Sum of ``w^2`` over all weights, float64.
    """

    refused: int
    largest_error: float
    sum_squared_error: float
    sum_squared_weights: float


def codes(
    values: F32,
    step: float,
    seed: int,
    *,
    halvings: int = 0,
    spare_bits: int = 0,
    weights: NDArray[np.generic] | None = None,
    out: I32 | None = None,
    start: int = 0,
) -> CodedTensor:
    """Return the cells of a lattice of spacing ``step`` that float32 ``values`` lie in.

    A hash draws the phase of each element. Element ``i`` in C order has the phase
    ``u = (mix64(seed + start + i) >> 40) * 2^-24`` (splitmix64's finaliser, modulo 2^64) and the
    code ``q = floor(x / step + u)``, in float64. An element that is not finite, or whose ``q`` is
    no int32, is refused: its code is 0. The bits are the same on every processor.

    The error is bounded by ``|x' - x| <= step / 2 + ulp(x') / 2`` up to the rounding of the float64
    operations, ``2^-50 (|x| + step)``, if no weights are given or each is ``x`` rounded. Without
    weights the error is nearly independent of ``x`` and uniform (subtractive dither: L. Schuchman,
    "Dither signals and their effect on quantization noise", 1964), provided that ``x`` was not
    chosen by the hash. Weights, or a step near ``ulp(x)``, take that away.

    If the spacing was halved, each cell of a lattice was split in two (successive refinement:
    Equitz & Cover, 1991): ``q = floor((x / S + u) * 2^halvings)``, where ``S = step * 2^halvings``.
    The code is ``q * 2^spare_bits``. A halving takes the highest spare bit and keeps the others, so
    it costs at most one bit per element in a delta.

    Args:
        values: float32, C-contiguous.
        step: Spacing in the unit of the values, from 2^-149 to the largest float32. Larger: fewer
            codes change from one checkpoint to the next; smaller: a smaller error.
        seed: 0 to 2^64 - 1, one for each tensor.
        halvings: 0 (default) to ``MOST_HALVINGS``: the number of times that the spacing was halved.
            ``step * 2^halvings`` is at most the largest float32.
        spare_bits: 0 (default) to ``MOST_SPARE_BITS``: the number of halvings that are possible
            from here on, each of which takes one of these bits. More: the lattice is written anew
            less often; fewer: smaller codes.
        weights: bfloat16, or its bits as uint16, in the shape of ``values``, as ``values`` below
            will be given; they change the errors, not the codes.
        out: int32 in the shape of ``values``; ``None``: a new array.
        start: Number of the first element in its tensor, if ``values`` are a part.

    Raises:
        ValueError: The arguments do not fit.
    """
    memory.checked_array("values", values, np.float32)
    first = first_phase(step, seed, start, halvings, spare_bits)
    out = memory.checked_out(out, values, np.int32)
    cells = None if weights is None else bits_of(weights, values.shape)
    errors = native.lattice_codes(
        values.reshape(-1), cells, step, first, out.reshape(-1), halvings, spare_bits
    )
    return CodedTensor(out, *errors)


def values(
    codes: I32,
    step: float,
    seed: int,
    *,
    halvings: int = 0,
    spare_bits: int = 0,
    weights: NDArray[np.generic] | None = None,
    out: F32 | None = None,
    start: int = 0,
) -> F32:
    """Return the values of ``codes``: the middles of their cells.

    ``x' = ((q * 2^-halvings - u) + 0.5 * 2^-halvings) * S`` in float64, limited to the largest
    float32 and rounded to float32.

    Args:
        codes: int32, C-contiguous.
        step: As given to ``codes``.
        seed: As given to ``codes``.
        halvings: As given to ``codes``.
        spare_bits: As given to ``codes``.
        weights: ``x'`` is moved to the nearest value that rounds (to nearest, ties to even) to the
            weight; ``None``: it is not moved.
        out: float32 in the shape of ``codes``, whose memory it may be; ``None``: a new array.
        start: As given to ``codes``.

    Raises:
        ValueError: The arguments do not fit, or there is a code that no value has.
    """
    memory.checked_array("codes", codes, np.int32)
    first = first_phase(step, seed, start, halvings, spare_bits)
    out = memory.checked_out(out, codes, np.float32)
    cells = None if weights is None else bits_of(weights, codes.shape)
    bad = native.lattice_values(
        codes.reshape(-1), cells, step, first, out.reshape(-1), halvings, spare_bits
    )
    if bad:
        raise ValueError(
            f"{bad} of {codes.size} codes are no multiples of {2**spare_bits}, as those with"
            f" {spare_bits} spare bits are"
        )
    return out


def cast_errors(
    values: F32,
    step: float,
    seed: int,
    *,
    halvings: int = 0,
    spare_bits: int = 0,
    weights: NDArray[np.generic],
) -> CastErrors:
    """Measure the errors of weights that a restore casts from the codes of ``values``.

    Nothing is written, and each element is read once.

    Args:
        values: The masters: float32, C-contiguous.
        step: As given to ``codes``.
        seed: As given to ``codes``.
        halvings: As given to ``codes``.
        spare_bits: As given to ``codes``.
        weights: The weights: bfloat16, or its bits as uint16, in the shape of ``values``. One that
            is not finite gives sums that are not.

    Raises:
        ValueError: The arguments do not fit.
    """
    memory.checked_array("values", values, np.float32)
    first = first_phase(step, seed, 0, halvings, spare_bits)
    cells = bits_of(weights, values.shape)
    errors = native.lattice_cast_errors(
        values.reshape(-1), cells, step, first, halvings, spare_bits
    )
    return CastErrors(*errors)


def first_phase(step: float, seed: int, start: int, halvings: int = 0, spare_bits: int = 0) -> int:
    """Return the number from which the phase of the first element is hashed.

    Raises:
        ValueError: A parameter is out of its range.
    """
    if not LEAST_STEP <= step <= MOST_STEP:
        raise ValueError(f"step must be from {LEAST_STEP} to {MOST_STEP}, not {step}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be from 0 to 2^64 - 1, not {seed}")
    if start < 0:
        raise ValueError(f"start must not be negative, and is {start}")
    if not 0 <= halvings <= MOST_HALVINGS:
        raise ValueError(f"halvings must be from 0 to {MOST_HALVINGS}, not {halvings}")
    if not 0 <= spare_bits <= MOST_SPARE_BITS:
        raise ValueError(f"spare_bits must be from 0 to {MOST_SPARE_BITS}, not {spare_bits}")
    if step * 2.0**halvings > MOST_STEP:
        raise ValueError(f"a lattice of spacing {step} cannot have been halved {halvings} times")
    # The hash counts modulo 2^64, so parts of a tensor have the phases of the whole.
    return (seed + start) % (1 << 64)


def bits_of(weights: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Return the bits of weights, 1-D, after a check that they fit values of a shape."""
    if (
        # uint16 stands for the bits of a bfloat16, which are all that the codes need.
        weights.dtype.name not in ("bfloat16", "uint16")
        or weights.shape != shape
        or not weights.flags.c_contiguous
    ):
        raise ValueError(
            "weights must be a C-contiguous numpy array of bfloat16 or uint16 in the shape of"
            " values"
        )
    return weights.reshape(-1).view(np.uint16)
