"""First moments as multiples of a part of the root of their second moments."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.extension import native

F32 = NDArray[np.float32]
Codes = NDArray[np.int8]

# The spacings that section 4.5.4 of the format allows.
LEAST_STEP, MOST_STEP = 2.0**-32, 2.0**32


class RatioCoded(NamedTuple):
    """The codes of a first moment and their errors.

    Attributes:
        codes: int8, in the shape of the values.
        refused: Values without a code, because they are infinite, NaN, or too large beside their
            second moment. If there is one, the codes cannot restore the tensor.
        largest_error: Maximum of ``|m' - m| / sqrt(v)`` over the values whose ``v`` is a normal
            number, if ``values`` gives ``m'``.
    """

    codes: Codes
    refused: int
    largest_error: float


def codes(
    values: F32, second: F32, step: float, *, limit: float = 0.0, out: Codes | None = None
) -> RatioCoded:
    """Return the nearest multiples of ``step * sqrt(v)`` of first moments ``m``.

    An optimizer of the Adam family moves a weight by ``m / sqrt(v)`` learning rates, so the codes
    are uniform in what an update does. A first moment that moves its weight by less than half a
    step has code 0. So has one below 2^-60 whose ``v`` is below 2^-126.

    Args:
        values: m, float32, C-contiguous.
        second: v as a restore returns it, float32 in the shape of ``values``.
        step: Spacing in units of ``sqrt(v)``, from 2^-32 to 2^32. Larger: fewer bytes; smaller: a
            smaller error, which is at most half of it.
        limit: C of the law ``m^2 <= C v`` (``policy.adam.moment_limit``), which values of codes
            obey, too. 0: no limit.
        out: int8 in the shape of ``values``; ``None``: a new array.

    Raises:
        ValueError: The arguments do not fit.
    """
    _check("values", values, second, step, limit)
    memory.checked_array("values", values, np.float32)
    out = memory.checked_out(out, values, np.int8)
    errors = native.ratio_codes(
        values.reshape(-1), second.reshape(-1), step, limit, memory.as_bytes("out", out)
    )
    return RatioCoded(out, *errors)


def values(
    codes: Codes, second: F32, step: float, *, limit: float = 0.0, out: F32 | None = None
) -> F32:
    """Return the first moments of ``codes``.

    Args:
        codes: int8, C-contiguous.
        second: As given to ``codes``.
        step: As given to ``codes``.
        limit: As given to ``codes``.
        out: float32 in the shape of ``codes``; ``None``: a new array.

    Raises:
        ValueError: The arguments do not fit, or there is a code that no value has.
    """
    _check("codes", codes, second, step, limit)
    memory.checked_array("codes", codes, np.int8)
    out = memory.checked_out(out, codes, np.float32)
    bad = native.ratio_values(
        memory.as_bytes("codes", codes), second.reshape(-1), step, limit, out.reshape(-1)
    )
    if bad:
        raise ValueError(
            f"{bad} of {codes.size} codes are no ratio codes beside their second moments"
        )
    return out


def _check(name: str, array: NDArray[Any], second: F32, step: float, limit: float) -> None:
    memory.checked_array("second", second, np.float32)
    if second.shape != array.shape:
        raise ValueError(f"second must have the shape of {name}, {array.shape}, not {second.shape}")
    if not LEAST_STEP <= step <= MOST_STEP:
        raise ValueError(f"step must be from 2^-32 to 2^32, not {step}")
    if not limit >= 0:
        raise ValueError(f"limit must be at least 0, not {limit}")
