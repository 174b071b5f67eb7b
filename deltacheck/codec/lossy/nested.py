"""Master weights as lattice codes relative to the bfloat16 weights that are stored beside them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.extension import native
from deltacheck.codec.lossy import lattice
from deltacheck.codec.lossy.lattice import F32, CodedTensor

Codes = NDArray[Any]  # uint8 or uint16
Weights = NDArray[np.generic]

MOST_BITS = 16  # of a code with its spare bits, by section 4.5.3 of the format


def most_bits(weights: Weights, step: float, halvings: int) -> int:
    """Return the largest number of bits that the code of a master of one of the weights has.

    0 means that codes are needless. No codes can be made if the number and that of the spare bits
    are together above ``MOST_BITS``. Infinities and NaN do not count.

    Args:
        weights: bfloat16, or its bits as uint16.
        step: As given to ``codes``.
        halvings: As given to ``codes``.
    """
    magnitudes = np.asarray(weights).reshape(-1).view(np.uint16) & np.uint16(0x7FFF)
    largest = magnitudes.max(initial=np.uint16(0))
    if largest >= 0x7F80:
        largest = magnitudes[magnitudes < 0x7F80].max(initial=np.uint16(0))
    # Section 4.5.3 of the format, "c + n". A subnormal weight has the unit of the least normal one.
    exponent = max(int(largest) >> 7, 1)
    octave = math.frexp(step)[1] - 1 + halvings
    return max(0, exponent - 133 - octave + halvings)


def codes(
    values: F32,
    step: float,
    seed: int,
    *,
    weights: Weights,
    halvings: int = 0,
    spare_bits: int = 0,
    out: Codes | None = None,
    start: int = 0,
) -> CodedTensor:
    """Return the cells of a lattice that ``values`` lie in, as many bits as the weights need.

    The lattice is that of ``lattice.codes``. A weight that is ``x`` rounded limits ``x`` to the
    cells within half a unit in its last place. The code is the number of the cell modulo a power of
    two that is at least their number, and that depends on the weight's exponent only. So a weight
    that moves to its neighbour changes no code, and codes change as often as those of
    ``lattice.codes``, or less (coset codes: Slepian & Wolf, "Noiseless coding of correlated
    information sources", 1973). A weight that is fine enough needs no bits: the value is a point of
    its cell that the seed draws (subtractive dither: Roberts, "Picture coding using pseudo-random
    noise", 1962). So a value that is coded again and again, each time with another seed, keeps its
    mean.

    The spacing was ``step * 2^halvings`` and has been halved so many times since. Each halving
    splits every cell in two. A code then has one more bit, which was a spare one, and keeps its
    other bits (successive refinement: Equitz & Cover, 1991). So a lattice that is halved costs at
    most one bit per element in a delta.

    A value outside of the cell of its weight is coded as the nearest one inside, and the errors
    tell.

    Args:
        values: float32, C-contiguous.
        step: Spacing in the unit of the values, from 2^-149 to the largest float32.
        seed: 0 to 2^64 - 1, one for each tensor.
        halvings: 0 to ``lattice.MOST_HALVINGS``. ``step * 2^halvings`` is at most the largest
            float32.
        spare_bits: 0 to ``lattice.MOST_SPARE_BITS``: the number of halvings that are possible from
            here on, each of which takes one of these bits. More: the lattice is written anew less
            often; fewer: codes of one byte in place of two.
        weights: bfloat16, or its bits as uint16, in the shape of ``values``.
        out: uint8 or uint16 in the shape of ``values``; ``None``: a new array of uint8, or of
            uint16 if ``most_bits`` and ``spare_bits`` are together above 8.
        start: Number of the first element in its tensor, if ``values`` are a part.

    Returns:
        The codes and their errors. An element is refused if the value or the weight is not finite,
        or if it needs more bits than a code has: its code is 0.

    Raises:
        ValueError: The arguments do not fit.
    """
    memory.checked_array("values", values, np.float32)
    first = lattice.first_phase(step, seed, start, halvings, spare_bits)
    weight_bits = lattice.bits_of(weights, values.shape)
    if out is None:
        bits = most_bits(weight_bits, step, halvings)
        dtype = np.uint8 if bits + spare_bits <= 8 else np.uint16
    else:
        dtype = code_type("out", out)
    out = memory.checked_out(out, values, dtype)
    errors = native.nested_codes(
        values.reshape(-1),
        weight_bits,
        step,
        first,
        memory.as_bytes("out", out),
        halvings,
        spare_bits,
    )
    return CodedTensor(out, *errors)


def values(
    codes: Codes,
    step: float,
    seed: int,
    *,
    weights: Weights,
    halvings: int = 0,
    spare_bits: int = 0,
    out: F32 | None = None,
    start: int = 0,
) -> F32:
    """Return the values of ``codes``: the middles of their cells, within the cells of the weights.

    Args:
        codes: uint8 or uint16, C-contiguous.
        step: As given to ``codes``.
        seed: As given to ``codes``.
        halvings: As given to ``codes``.
        spare_bits: As given to ``codes``.
        weights: As given to ``codes``.
        out: float32 in the shape of ``codes``; ``None``: a new array.
        start: As given to ``codes``.

    Returns:
        The values. A value without a bit of code is drawn from the cell of its weight.

    Raises:
        ValueError: The arguments do not fit, or there is a code that no value has.
    """
    memory.checked_array("codes", codes, code_type("codes", codes))
    first = lattice.first_phase(step, seed, start, halvings, spare_bits)
    weight_bits = lattice.bits_of(weights, codes.shape)
    out = memory.checked_out(out, codes, np.float32)
    bad = native.nested_values(
        memory.as_bytes("codes", codes),
        weight_bits,
        step,
        first,
        out.reshape(-1),
        halvings,
        spare_bits,
    )
    if bad:
        raise ValueError(
            f"{bad} of {codes.size} codes are no relative codes of spacing {step} after {halvings}"
            " halvings beside their weights"
        )
    return out


def drawn(seed: int, *, weights: Weights, out: F32 | None = None, start: int = 0) -> F32:
    """Return a point of the cell of each weight, which the seed draws.

    These are the values of a lattice that no weight is coarser than: all codes are 0.

    Args:
        seed: As given to ``codes``.
        weights: As given to ``codes``.
        out: As given to ``values``.
        start: As given to ``codes``.

    Raises:
        ValueError: A weight is not finite, or the arguments do not fit.
    """
    return values(
        np.zeros(weights.shape, np.uint8),
        lattice.MOST_STEP,
        seed,
        weights=weights,
        out=out,
        start=start,
    )


def code_type(name: str, array: Any) -> type[np.uint8] | type[np.uint16]:
    """Return the type of an array of codes.

    Args:
        name: The name of the array, for an error.
        array: The array.

    Returns:
        ``np.uint8`` or ``np.uint16``.

    Raises:
        ValueError: The array has another type.
    """
    dtype = getattr(array, "dtype", None)
    if dtype == np.uint8:
        return np.uint8
    if dtype == np.uint16:
        return np.uint16
    raise ValueError(f"{name} must be a numpy array of uint8 or uint16, not of {dtype}")
