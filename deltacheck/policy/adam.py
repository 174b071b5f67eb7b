"""Adam's own arithmetic: how fast its second moment drifts, how it may be reused, and the law that
ties it to the first.

All of it follows from the two recursions m <- b1 m + (1 - b1) g and v <- b2 v + (1 - b2) g^2 from
zero (Kingma & Ba, "Adam", 2015), and holds for AdamW and whatever else keeps these two means,
provided that both see the same gradients. It says nothing of others.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]

# Half of 1 / ln 2; measured in fine-tuning, where a stationary run with white noise would drift
# less
DRIFT_OCTAVES = 0.72
LEAST_REUSE_STEPS = 10  # below that a reused moment is written again before it has saved anything
ROUNDING = 1e-3  # of m^2 / (C v): thousands of float32 steps add up to 1e-4 of it at most


def moment_limit(beta1: float, beta2: float) -> float:
    """C, with m^2 <= C v for every element of every Adam state that began at zero: 52.9 for (.9,
    .999).

    C = (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2)), by the Cauchy-Schwarz inequality on the two sums,
    in the limit of many steps and a gradient that grows by b2 / b1 a step. Raises ``ValueError``
    unless 0 <= b1, b1^2 < b2 < 1: there is no limit then.
    """
    if not (0 <= beta1 < 1 and beta1 * beta1 < beta2 < 1):
        raise ValueError(
            "the moments of Adam are bounded only where beta1^2 < beta2 < 1, not for betas"
            f" ({beta1}, {beta2})"
        )
    return (1 - beta1) ** 2 / ((1 - beta2) * (1 - beta1 * beta1 / beta2))


def memory_steps(step: int, beta2: float) -> float:
    """Steps that the second moment averages over after ``step`` steps: all of them, up to 1 / (1 -
    b2).
    """
    return min(float(step), 1 / (1 - beta2))


def expected_drift(step: int, steps_apart: int, beta2: float) -> float:
    """Median ``|log2(v_t / v_(t-K))|`` to expect of a stationary run, in octaves: 0.72 K / min(t, 1
    /
    (1 - b2)).

    Measured on fine-tuning runs; holds for K well below the memory. ``step``: at least 1.
    """
    return DRIFT_OCTAVES * steps_apart / memory_steps(step, beta2)


def permitted_staleness(tolerance: float, step: int, beta2: float) -> int:
    """For how many steps v stays within ``tolerance`` octaves (the median): 1.4 tau min(t, 1 / (1 -
    b2)), rounded down.

    0 where that is under ``LEAST_REUSE_STEPS``: with b2 = .95 v is stale after 3 steps, and there
    is no point in reuse. Larger tolerance: v is written less often, a restored run takes an older
    one.
    """
    steps = math.floor(tolerance / DRIFT_OCTAVES * memory_steps(step, beta2))
    return steps if steps >= LEAST_REUSE_STEPS else 0


def bias_correction(step: int, beta2: float) -> float:
    """1 - b2^t, the share of the gradients' mean square that a v from zero has after ``step``
    steps, counted from 1.
    """
    if step < 1:
        raise ValueError(f"step must be at least 1, not {step}")
    return -math.expm1(step * math.log(beta2))


def bias_rescale(step: int, stored_step: int, beta2: float) -> float:
    """What a v of ``stored_step`` is multiplied by to stand for v at ``step``: (1 - b2^t) / (1 -
    b2^s). Both count from 1, t >= s.

    Keeps v / (1 - b2^t), which the optimizer divides by, as it was when v was stored.
    """
    if not 1 <= stored_step <= step:
        raise ValueError(f"steps must be 1 <= stored_step <= step, not {stored_step} and {step}")
    return math.expm1(step * math.log(beta2)) / math.expm1(stored_step * math.log(beta2))


def repair(second: F32, first: F32, limit: float, *, out: F32 | None = None) -> F32:
    """v where it obeys m^2 <= C v, and the least that does elsewhere: max(v, m^2 / C); in ``out``,
    which may be ``second``, or a new array.

    ``second``, ``first``: float32 of one shape. ``limit``: C, of ``moment_limit``. A v that is too
    small for its m, stale or coarsely rounded, would multiply updates by up to 10^5; a live state
    is left as it is, up to rounding. NaN stays NaN.
    """
    wide = np.square(first, dtype=np.float64)
    wide /= limit
    return np.maximum(second, wide.astype(np.float32), out=out)


def law_violations(first: F32, second: F32, limit: float, tolerance: float = ROUNDING) -> int:
    """Elements with m^2 > C v (1 + tolerance), or with v that is negative or NaN: none in a live
    state
    of Adam.

    Elements whose least v is below the normal numbers of float32 are left out: there v has lost its
    precision, and may be 0.
    """
    square = np.square(first, dtype=np.float64)
    bound = limit * (1 + tolerance) * second.astype(np.float64)
    visible = square / limit > 2.0**-126
    return int(np.count_nonzero(((square > bound) & visible) | ~(second >= 0)))


def update(
    first: F32,
    second: F32,
    eps: float,
    step: int | None = None,
    betas: tuple[float, float] | None = None,
) -> F64:
    """The direction of an Adam step, m / (sqrt(v) + eps), float64. With ``step`` and ``betas``:
    after correction of both biases.
    """
    m, v = first.astype(np.float64), second.astype(np.float64)
    if step is not None and betas is not None:
        m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    found: F64 = m / (np.sqrt(v) + eps)
    return found


def update_change(
    first: F32,
    second: F32,
    other: F32,
    eps: float,
    step: int | None = None,
    betas: tuple[float, float] | None = None,
) -> float:
    """||u(m, v') - u(m, v)|| / ||u(m, v)||: how much the update changes where ``other`` stands for
    ``second``. L2, 0 where nothing is updated.

    Infinite or NaN elements of u make it infinite: such a state must not be reused.
    """
    with np.errstate(all="ignore"):
        live = update(first, second, eps, step, betas)
        difference = float(np.linalg.norm(update(first, other, eps, step, betas) - live))
        size = float(np.linalg.norm(live))
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / size if size else (0.0 if difference == 0 else math.inf)
