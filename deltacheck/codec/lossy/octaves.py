"""Moments on a logarithmic scale: a bounded contract with an error of a part of an octave."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.extension import native

F32 = NDArray[np.float32]
Codes = NDArray[Any]  # uint8 if fraction_bits is 0, else uint16

# The largest number of fraction bits that section 4.5.2 of the format allows.
MOST_FRACTION_BITS = 7
MOST_DEAD_BAND = 8.0


class OctaveCoded(NamedTuple):
    """The codes of a tensor.

    Attributes:
        codes: In the shape of the values.
        refused: Values without a code, because they are infinite, NaN, too large or negative. If
            there is one, the codes cannot restore the tensor.
    """

    codes: Codes
    refused: int


def codes(
    values: F32,
    *,
    fraction_bits: int = 0,
    base: Codes | None = None,
    dead_band: float = 0.5,
    out: Codes | None = None,
) -> OctaveCoded:
    """Return the cells of a logarithmic scale, ``2^fraction_bits`` per octave, of float32 values.

    The scale is the bit pattern of a float32: ``log2 x`` at powers of two and linear between them,
    over all positive float32, subnormals included (J. Mitchell, "Computer multiplication and
    division using binary logarithms", 1962). All arithmetic is on integers, so the bits are the
    same on every processor. A cell is restored as its middle, within half a cell of the value on
    this scale: ``|log2(x' / x)| <= log2(1 + 2^-(fraction_bits + 1))``, 0.585 octaves with no
    fraction bits, 0.17 with two. Zero of either sign has code 0, and no other value has it.

    Args:
        values: float32, C-contiguous. Negative values are refused.
        fraction_bits: 0 to 7. Larger: a smaller error; smaller: fewer codes change. Codes are uint8
            if it is 0, else uint16.
        base: Codes of an earlier step in the shape of ``values``. Such a code is used again if its
            value is within ``dead_band`` octaves of the new one on this scale.
        dead_band: From half a cell, ``2^-(fraction_bits + 1)``, to 8; used with ``base`` only.
            Larger: values that drift change their codes less often; smaller: a smaller error, which
            may be as large as the dead band, less than ``dead_band + 0.087`` true octaves.
        out: The result, which may be ``base``; ``None``: a new array.

    Raises:
        ValueError: The arguments do not fit.
    """
    memory.checked_array("values", values, np.float32)
    dtype = _dtype(fraction_bits)
    out = memory.checked_out(out, values, dtype)
    band = 0
    if base is not None:
        memory.checked_array("base", base, dtype)
        if base.shape != values.shape:
            raise ValueError(
                f"base must have the shape of values, {values.shape}, not {base.shape}"
            )
        half = 2.0 ** -(fraction_bits + 1)
        if not half <= dead_band <= MOST_DEAD_BAND:
            raise ValueError(
                f"dead_band must be from half a cell, {half}, to {MOST_DEAD_BAND}, not {dead_band}"
            )
        # The scale has 2^23 units per octave. An integer makes the comparison exact everywhere.
        band = math.floor(dead_band * 2**23)
    base_bytes = None if base is None else memory.as_bytes("base", base)
    refused_count = native.octave_codes(
        values.reshape(-1), base_bytes, fraction_bits, band, memory.as_bytes("out", out)
    )
    return OctaveCoded(out, refused_count)


def values(codes: Codes, *, fraction_bits: int = 0, out: F32 | None = None) -> F32:
    """Return the values of ``codes``: the middles of their cells, float32; zero for code 0.

    Args:
        codes: uint8 or uint16.
        fraction_bits: As given to ``codes``.
        out: float32 in the shape of ``codes``; ``None``: a new array.

    Raises:
        ValueError: The arguments do not fit, or there is a code that no value has.
    """
    memory.checked_array("codes", codes, _dtype(fraction_bits))
    out = memory.checked_out(out, codes, np.float32)
    bad = native.octave_values(memory.as_bytes("codes", codes), fraction_bits, out.reshape(-1))
    if bad:
        raise ValueError(
            f"{bad} of {codes.size} codes are no octave codes with {fraction_bits} fraction bits"
        )
    return out


def _dtype(fraction_bits: int) -> type[np.uint8] | type[np.uint16]:
    if fraction_bits not in range(MOST_FRACTION_BITS + 1):
        raise ValueError(
            f"fraction_bits must be from 0 to {MOST_FRACTION_BITS}, not {fraction_bits!r}"
        )
    return np.uint8 if fraction_bits == 0 else np.uint16
