"""Master weights as lattice codes relative to the bfloat16 weights that are stored beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.extension import extension
from deltacheck.codec.lossy import lattice, reference_codes
from deltacheck.codec.lossy.lattice import F32, Coded

Codes = NDArray[Any]  # uint8 or uint16
Weights = NDArray[np.generic]

# Codes are below the largest modulus of a tensor, which section 4.5.3 of the format limits.
MOST_CELLS = 1 << 16


def most_cells(weights: Weights, step: float, *, dithered: bool = False) -> float:
    """Return the largest number of cells that a master of one of the weights can lie in.

    1 means that the weights are as close as the lattice, so that codes are needless. No codes can
    be made if the number is above ``MOST_CELLS``. Infinities and NaN do not count.

    Args:
        weights: bfloat16, or its bits as uint16.
        step: As given to ``codes``.
        dithered: As given to ``codes``.
    """
    magnitudes = np.asarray(weights).reshape(-1).view(np.uint16) & np.uint16(0x7FFF)
    largest = magnitudes.max(initial=np.uint16(0))
    if largest >= 0x7F80:
        largest = magnitudes[magnitudes < 0x7F80].max(initial=np.uint16(0))
    return float(reference_codes.cell_counts(np.array([largest], np.uint16), step, dithered)[0])


def codes(
    values: F32,
    step: float,
    seed: int,
    *,
    weights: Weights,
    dithered: bool = False,
    out: Codes | None = None,
    start: int = 0,
) -> Coded:
    """Return the cells of a lattice that ``values`` lie in, numbered modulo those of the weight.

    The lattice is that of ``lattice.codes``. A weight that is ``x`` rounded limits ``x`` to the
    ``k = ceil(width / step) + 1`` cells within half a unit in its last place, ``width``. The code
    is the number of the cell modulo ``k``. If ``width <= step``, it is 0 and stands for the weight
    itself; dithered: if ``2 width <= step``, it is 0 and stands for a point of the weight's cell
    that the seed draws (subtractive dither: Roberts, "Picture coding using pseudo-random noise",
    1962). ``k`` depends on the weight's exponent only. So a weight that moves to its neighbour
    changes no code, and codes change as often as those of ``lattice.codes``, or less (coset codes:
    Slepian & Wolf, "Noiseless coding of correlated information sources", 1973).

    A value outside of the cell of its weight is coded as the nearest one inside, and the errors
    tell. An element is refused if the value or the weight is not finite, or ``k`` is above the
    number of codes: its code is 0.

    Args:
        values: float32, C-contiguous.
        step: Spacing in the unit of the values, from 2^-149 to the largest float32. Larger: smaller
            codes, which change less often; smaller: a smaller error.
        seed: 0 to 2^64 - 1, one for each tensor.
        weights: bfloat16, or its bits as uint16, in the shape of ``values``.
        dithered: True: a value that is coded again and again, each time with another seed, keeps
            its mean, and some more values have codes; false: a value that moves by less than half a
            unit of its weight between two codings comes back as if it had not.
        out: uint8 or uint16 in the shape of ``values``; ``None``: a new array of uint8, or of
            uint16 if ``most_cells`` is above 256.
        start: Number of the first element in its tensor, if ``values`` are a part.

    Raises:
        ValueError: The arguments do not fit.
    """
    memory.checked_array("values", values, np.float32)
    first = lattice.first_phase(step, seed, start)
    weight_bits = lattice.bits_of(weights, values.shape)
    dtype: type[np.uint8] | type[np.uint16]
    if out is None:
        cells = most_cells(weight_bits, step, dithered=dithered)
        dtype = np.uint8 if cells <= 1 << 8 else np.uint16
    else:
        dtype = code_type("out", out)
    out = memory.checked_out(out, values, dtype)
    native = extension()
    if native is not None:
        errors = native.relative_codes(
            values.reshape(-1), weight_bits, step, first, memory.as_bytes("out", out), dithered
        )
        return Coded(out, *errors)
    result, refused_count, largest, squared = reference_codes.relative_codes(
        values.reshape(-1), weight_bits, step, first, np.dtype(dtype), dithered
    )
    out.reshape(-1)[:] = result
    return Coded(out, refused_count, largest, squared)


def values(
    codes: Codes,
    step: float,
    seed: int,
    *,
    weights: Weights,
    dithered: bool = False,
    out: F32 | None = None,
    start: int = 0,
) -> F32:
    """Return the values of ``codes``: the middles of their cells, within the cells of the weights.

    Args:
        codes: uint8 or uint16, C-contiguous.
        step: As given to ``codes``.
        seed: As given to ``codes``.
        weights: As given to ``codes``.
        dithered: As given to ``codes``.
        out: float32 in the shape of ``codes``; ``None``: a new array.
        start: As given to ``codes``.

    Raises:
        ValueError: The arguments do not fit, or there is a code that no value has.
    """
    memory.checked_array("codes", codes, code_type("codes", codes))
    first = lattice.first_phase(step, seed, start)
    weight_bits = lattice.bits_of(weights, codes.shape)
    out = memory.checked_out(out, codes, np.float32)
    native = extension()
    if native is not None:
        bad = native.relative_values(
            memory.as_bytes("codes", codes), weight_bits, step, first, out.reshape(-1), dithered
        )
    else:
        result, bad = reference_codes.relative_values(
            codes.reshape(-1), weight_bits, step, first, dithered
        )
        out.reshape(-1)[:] = result
    if bad:
        raise ValueError(
            f"{bad} of {codes.size} codes are no relative codes of spacing {step} beside their"
            " weights"
        )
    return out


def drawn(seed: int, *, weights: Weights, out: F32 | None = None, start: int = 0) -> F32:
    """Return a point of the cell of each weight, which the seed draws.

    These are the dithered values of a lattice that no weight is coarser than: all codes are 0.

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
        dithered=True,
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
