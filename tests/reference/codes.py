"""The codes of derived leaves in NumPy: an executable form of format.md, section 4.5.

Like ``reference.py``, it is read beside that document and compared with the native module, and no
clarity is given up for speed. All arrays are one-dimensional and fit each other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
Codes = NDArray[Any]  # uint8 or uint16

MOST = float(np.finfo(np.float32).max)
MAGNITUDE, INFINITY = 0x7FFFFFFF, 0x7F800000
# The order in which squared errors are added: in parts of 65536 elements.
LANES, PART = 32, 65536


# Section 4.5.1 of the format: lattice codes, and those of a lattice that was halved.


def phase(seed: int, count: int) -> F64:
    """Return ``u`` of elements 0 to ``count - 1``."""
    # The finaliser of splitmix64, modulo 2^64. Its upper 24 bits are the phase.
    z = np.arange(count, dtype=np.uint64) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) * 2.0**-24


def in_cell(values: F32, weights: U16) -> F32:
    """Move values to the nearest ones that round to bfloat16 weights.

    Values round to nearest, ties to even. ``weights`` are given by their bits.
    """
    bits, weight_bits = values.view(np.uint32), weights.astype(np.uint32) << np.uint32(16)
    center, odd = weight_bits & np.uint32(MAGNITUDE), (weight_bits >> np.uint32(16)) & np.uint32(1)
    nan = center > INFINITY
    # A bfloat16 is the upper half of a float32, so half of its unit is 0x8000. The ends of a cell
    # belong to it if its weight is even. The cell of an infinity ends at the largest float32.
    low = np.where(center == 0, np.uint32(0), center - np.uint32(0x8000) + odd)
    high = np.minimum(center + np.uint32(0x8000) - odd, np.uint32(INFINITY - 1))
    clipped = np.clip(bits & np.uint32(MAGNITUDE), low, np.maximum(low, high))
    # A value of the other sign is nearest to the end that is next to zero.
    magnitude = np.where((bits ^ weight_bits) <= MAGNITUDE, clipped, low)
    return np.where(nan, bits, magnitude | (weight_bits & ~np.uint32(MAGNITUDE))).view(np.float32)


def _cells(values: F64, step: float, halvings: int, u: F64) -> F64:
    """Return the numbers of the cells that some values lie in after the halvings."""
    # Both factors are powers of two, so that each halving only shows one more bit of the same sum.
    cells: F64 = np.floor((values / (step * 2.0**halvings) + u) * 2.0**halvings)
    return cells


def lattice_values(
    codes: I32,
    weights: U16 | None,
    step: float,
    seed: int,
    halvings: int = 0,
    spare_bits: int = 0,
) -> tuple[F32, int]:
    """Return ``x'`` of lattice codes, and the number of codes that no value has.

    Values are moved into the cells of ``weights`` if there are any.
    """
    q, width = codes.astype(np.float64) * 2.0**-spare_bits, 2.0**-halvings
    with np.errstate(over="ignore", under="ignore"):
        start = q * width - phase(seed, codes.size)
        middle = (start + 0.5 * width) * (step * 2.0**halvings)
        values = np.clip(middle, -MOST, MOST).astype(np.float32)
    bad = int(np.count_nonzero(q != np.floor(q)))
    return values if weights is None else in_cell(values, weights), bad


def _coded_values(
    values: F32, step: float, seed: int, halvings: int, spare_bits: int
) -> tuple[F64, F64, NDArray[np.bool_]]:
    """Return the values, 0 for those that are not finite, their codes, and which have one."""
    finite = np.isfinite(values)
    # An overflow gives an infinity, which has no code.
    with np.errstate(over="ignore", under="ignore"):
        x = np.where(finite, values, np.float32(0)).astype(np.float64)
        codes = _cells(x, step, halvings, phase(seed, values.size)) * 2.0**spare_bits
        return x, codes, finite & (codes >= -(2.0**31)) & (codes < 2.0**31)


def lattice_codes(
    values: F32,
    weights: U16 | None,
    step: float,
    seed: int,
    halvings: int = 0,
    spare_bits: int = 0,
) -> tuple[I32, int, float]:
    """Return lattice codes and their errors.

    Returns:
        The codes, the number of elements without one, and the largest error of the others.
    """
    x, numbers, coded = _coded_values(values, step, seed, halvings, spare_bits)
    with np.errstate(over="ignore", under="ignore"):
        codes = np.where(coded, numbers, 0).astype(np.int32)
        restored, _ = lattice_values(codes, weights, step, seed, halvings, spare_bits)
        error = np.where(coded, np.abs(restored.astype(np.float64) - x), 0.0)
        return codes, int(np.count_nonzero(~coded)), float(error.max(initial=0.0))


def lattice_cast_errors(
    values: F32, weights: U16, step: float, seed: int, halvings: int = 0, spare_bits: int = 0
) -> tuple[int, float, float, float]:
    """Return the errors of bfloat16 weights that are cast from lattice codes.

    Returns:
        The number of values without a code, the largest error of the others, the sum of squared
        errors of their weights, and the sum of all squared weights.
    """
    lattice = (step, seed, halvings, spare_bits)
    codes, refused_count, largest = lattice_codes(values, None, *lattice)
    coded = _coded_values(values, *lattice)[2]
    bits = lattice_values(codes, None, *lattice)[0].view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    cast = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    live = (weights.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.where(coded, cast.view(np.float32).astype(np.float64) - live, 0.0)
        return refused_count, largest, added(difference * difference), added(live * live)


# Section 4.5.3 of the format: lattice codes relative to a weight.


def _widths(weights: U16) -> F64:
    """Return a unit in the last place of each weight."""
    exponent = np.maximum((weights >> np.uint16(7)) & np.uint16(0xFF), 1).astype(np.int64)
    widths: F64 = np.ldexp(1.0, exponent - 134)
    return widths


def _centers(weights: U16) -> F64:
    return (weights.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def nested_bits(weights: U16, step: float, halvings: int) -> I64:
    """Return ``c + n``, the number of bits of a code beside each weight; none if it is negative."""
    octave = math.frexp(step)[1] - 1 + halvings
    exponent = np.maximum((weights >> np.uint16(7)) & np.uint16(0xFF), 1).astype(np.int64)
    bits: I64 = exponent - 133 - octave + halvings
    return bits


def _nested_value(weights: U16, bits: I64, q: F64, step: float, halvings: int, u: F64) -> F32:
    """Return the middle of cell ``q``, or a point of the weight's cell without bits.

    Either is moved into the cell of its weight.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        middle = ((q + 0.5) * 2.0**-halvings - u) * (step * 2.0**halvings)
        middle = np.clip(middle, -MOST, MOST).astype(np.float32)
        point = (_centers(weights) + (u - 0.5) * _widths(weights)).astype(np.float32)
    single = (weights.astype(np.uint32) << np.uint32(16)).view(np.float32)
    inside = in_cell(np.where(bits > 0, middle, point), weights)
    return np.where((weights & np.uint16(0x7F80)) != 0x7F80, inside, single)


def nested_values(
    codes: Codes, weights: U16, step: float, seed: int, halvings: int, spare_bits: int
) -> tuple[F32, int]:
    """Return ``x'`` of nested codes, and the number of codes that no value has."""
    u, bits = phase(seed, codes.size), nested_bits(weights, step, halvings)
    number, rest = np.divmod(codes.astype(np.float64), 2.0**spare_bits)
    valid = ((weights & np.uint16(0x7F80)) != 0x7F80) & (rest == 0)
    valid &= bits + spare_bits <= 8 * codes.dtype.itemsize
    valid &= number < np.ldexp(1.0, np.where(valid, np.maximum(bits, 0), 0))
    bits = np.where(valid, bits, 0)
    count = np.ldexp(1.0, np.maximum(bits, 0))
    bounded_weights = np.where(valid, weights, np.uint16(0))
    lowest = _cells(_centers(bounded_weights) - 0.5 * _widths(bounded_weights), step, halvings, u)
    distance = number - lowest
    q = lowest + (distance - count * np.floor(distance / count))
    restored = _nested_value(weights, bits, q, step, halvings, u)
    return restored, int(np.count_nonzero(~valid))


def nested_codes(
    values: F32,
    weights: U16,
    step: float,
    seed: int,
    halvings: int,
    spare_bits: int,
    dtype: np.dtype[Any],
) -> tuple[Codes, int, float]:
    """Return nested codes of type ``dtype`` and their errors, as ``lattice_codes``."""
    finite = np.isfinite(values) & ((weights & np.uint16(0x7F80)) != 0x7F80)
    weights = np.where(finite, weights, np.uint16(0))
    x = np.where(finite, values, np.float32(0)).astype(np.float64)
    u, bits = phase(seed, values.size), nested_bits(weights, step, halvings)
    coded = finite & (bits + spare_bits <= 8 * dtype.itemsize)
    bits = np.where(coded, bits, 0)
    count = np.ldexp(1.0, np.maximum(bits, 0))
    lowest = _cells(_centers(weights) - 0.5 * _widths(weights), step, halvings, u)
    # A value outside of the cell of its weight is coded as the nearest one inside.
    q = np.clip(_cells(x, step, halvings, u), lowest, lowest + (count - 1))
    number = np.where(coded, q - count * np.floor(q / count), 0)
    restored = _nested_value(weights, bits, q, step, halvings, u).astype(np.float64)
    error = np.where(coded, np.abs(restored - x), 0.0)
    return (
        (number * 2.0**spare_bits).astype(dtype),
        int(np.count_nonzero(~coded)),
        float(error.max(initial=0.0)),
    )


def added(squares: F64) -> float:
    """Return the sum of squared errors, added in a fixed order."""
    total = 0.0
    for start in range(0, squares.size, PART):
        lanes = np.zeros(LANES)
        for first in range(start, min(start + PART, squares.size), LANES):
            row = squares[first : first + LANES]
            lanes[: row.size] += row
        # By halves, as the native module adds its lanes, so that sums have the same bits.
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += float(lanes[0])
    return total


# Section 4.5.2 of the format: octave codes.


LEAST_OCTAVE, END = -149, 128  # positive finite float32 are from 2^-149 to below 2^128


class OctaveForm(NamedTuple):
    """The layout of codes for a number of fraction bits.

    Attributes:
        dtype: Type of a code.
        shift: Bits of the float32 pattern below a cell.
        lowest: The first cell that has a code.
        most: The largest code.
    """

    dtype: type[np.uint8] | type[np.uint16]
    shift: int
    lowest: int
    most: int


def octave_form(fraction_bits: int) -> OctaveForm:
    """Return the layout of codes with so many fraction bits."""
    largest = 255 if fraction_bits == 0 else (END - LEAST_OCTAVE) << fraction_bits
    dtype = np.uint8 if fraction_bits == 0 else np.uint16
    return OctaveForm(dtype, 23 - fraction_bits, LEAST_OCTAVE << fraction_bits, largest)


def octave(magnitude: U32) -> I64:
    """Return ``L`` of positive finite floats, given by their bits."""
    # A subnormal is a whole number of 2^-149, and that number has an exact float32.
    scaled = magnitude.astype(np.float32).view(np.uint32).astype(np.int64)
    return np.where(
        magnitude < 1 << 23, scaled - (276 << 23), magnitude.astype(np.int64) - (127 << 23)
    )


def magnitude_of(places: I64) -> U32:
    """Return the bits of the largest floats whose ``L`` is not above ``places``."""
    low = places < -126 << 23
    scaled = (
        np.where(low, places + (276 << 23), 0).astype(np.uint32).view(np.float32).astype(np.uint32)
    )
    return np.where(low, scaled, places + (127 << 23)).astype(np.uint32)


def octave_values(codes: Codes, form: OctaveForm) -> F32:
    """Return ``x'`` of octave codes; 0 for a code that no value has."""
    code = codes.astype(np.int64)
    valid = (code >= 1) & (code <= form.most)
    cell = np.where(valid, code - 1 + form.lowest, 0)
    magnitude = magnitude_of((cell << form.shift) + (1 << (form.shift - 1)))
    return np.where(valid, magnitude, np.uint32(0)).view(np.float32)


def octave_codes(values: F32, form: OctaveForm, base: Codes | None, band: int) -> tuple[Codes, int]:
    """Return octave codes.

    Args:
        values: The values.
        form: The layout of the codes.
        base: Codes of an earlier step, which are used again within the dead band.
        band: The dead band in units of ``L``.

    Returns:
        The codes, and the number of values without one.
    """
    bits = values.view(np.uint32)
    magnitude, minus = bits & np.uint32(MAGNITUDE), bits > MAGNITUDE
    zero = magnitude == 0
    cell = octave(magnitude) >> form.shift
    # Infinities and NaN lie above the cells of every form.
    coded = ~zero & ~minus & (cell < form.lowest + form.most)
    codes = np.where(coded, cell - form.lowest + 1, 0).astype(form.dtype)
    if base is not None:
        base_bits = octave_values(base, form).view(np.uint32)
        is_near = base_bits != 0
        is_near &= np.abs(octave(base_bits) - octave(magnitude)) <= band
        # A code of the base that no value has, or zero, is never used again.
        codes = np.where(coded & is_near, base, codes)
    return codes, int(np.count_nonzero(~zero & ~coded))


# Section 4.5.4 of the format: ratio codes.


LEAST_VARIANCE, MOST_RATIO, LEAST_MOMENT = 2.0**-126, 127, 2.0**-60


def _roots(variances: F32) -> tuple[NDArray[np.bool_], F64]:
    """Return the second moments that have codes, and their roots; 1 for the others."""
    with np.errstate(invalid="ignore"):
        visible = (variances >= np.float32(LEAST_VARIANCE)) & np.isfinite(variances)
    return visible, np.sqrt(np.where(visible, variances, np.float32(1)).astype(np.float64))


def _ratio_value(codes: F64, roots: F64, step: float, limit: float) -> F32:
    bound = np.sqrt(limit) * roots if limit else np.inf
    return np.clip((codes * step) * roots, -bound, bound).astype(np.float32)


def ratio_values(codes: Codes, variances: F32, step: float, limit: float) -> tuple[F32, int]:
    """Return ``x'`` of ratio codes, and the number of codes that no value has; these give 0."""
    visible, roots = _roots(variances)
    valid = visible & (codes != -128)
    valid_codes = np.where(valid, codes, 0).astype(np.float64)
    restored = _ratio_value(valid_codes, roots, step, limit) + np.float32(0)
    return restored, int(np.count_nonzero(~valid & (codes != 0)))


def ratio_codes(values: F32, variances: F32, step: float, limit: float) -> tuple[Codes, int, float]:
    """Return ratio codes, the number of values without one, and the largest error in roots."""
    finite, (visible, roots) = np.isfinite(values), _roots(variances)
    x = np.where(finite, values, np.float32(0)).astype(np.float64)
    nearest = np.rint(x / (step * roots))
    coded = finite & np.where(visible, np.abs(nearest) <= MOST_RATIO, np.abs(x) < LEAST_MOMENT)
    rounded = np.where(coded & visible, nearest, 0.0)
    error = np.abs(_ratio_value(rounded, roots, step, limit).astype(np.float64) - x) / roots
    largest = float(error[coded & visible].max(initial=0.0))
    return rounded.astype(np.int8), int(np.count_nonzero(~coded)), largest
