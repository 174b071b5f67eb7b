"""The arithmetic of Adam: drift and reuse of the second moment, and the law between both moments.

Everything here follows from the two recursions m <- b1 m + (1 - b1) g and v <- b2 v + (1 - b2) g^2
that start at zero (Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015). It holds
for AdamW and for every other optimizer that keeps these two means of the same gradients, and for no
other optimizer. ``docs/explanation/policy.md`` explains how the policy applies it.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]

# Half of 1 / ln 2. Fitted to fine-tuning runs; a stationary run whose gradients are white noise
# would drift less, so the permitted age is conservative there.
DRIFT_OCTAVES = 0.72
# A pair that is reused for fewer steps is written again before it has saved any bytes.
LEAST_REUSE_STEPS = 10
# Relative to C v. Thousands of float32 steps accumulate an error of at most 1e-4 of it, so a live
# state of Adam never exceeds this tolerance.
ROUNDING = 1e-3


def moment_limit(beta1: float, beta2: float) -> float:
    """Return the constant C of the law m^2 <= C v, 52.9 for the betas (0.9, 0.999).

    The law holds for every element of every Adam state that started at zero. By the Cauchy-Schwarz
    inequality on the two sums, C = (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2)), in the limit of many
    steps and of a gradient that grows by b2 / b1 per step.

    Raises:
        ValueError: Unless 0 <= b1 and b1^2 < b2 < 1. Otherwise no such limit exists.
    """
    if not (0 <= beta1 < 1 and beta1 * beta1 < beta2 < 1):
        raise ValueError(
            "the moments of Adam are bounded only if beta1^2 < beta2 < 1, not for betas"
            f" ({beta1}, {beta2})"
        )
    return (1 - beta1) ** 2 / ((1 - beta2) * (1 - beta1 * beta1 / beta2))


def memory_steps(step: int, beta2: float) -> float:
    """Return the number of steps that v averages over: all ``step`` steps, up to 1 / (1 - b2)."""
    return min(float(step), 1 / (1 - beta2))


def permitted_staleness(tolerance: float, step: int, beta2: float) -> int:
    """Return the number of steps for which the median drift of v stays within ``tolerance``.

    The drift of v over K steps is the median ``|log2(v_t / v_(t-K))|``. In a stationary run it is
    0.72 K / min(t, 1 / (1 - b2)) octaves, measured on fine-tuning runs, for K well below the memory
    of v. So the number is 1.4 tau min(t, 1 / (1 - b2)), rounded down.

    Args:
        tolerance: tau, in octaves. Larger: v is written less often, and a restored run gets an
            older v; smaller: the opposite.
        step: The step t, at least 1.
        beta2: The decay rate of v. With b2 = 0.95, v is stale after 3 steps.

    Returns:
        The number of steps, or 0 if it is below ``LEAST_REUSE_STEPS`` and reuse would save nothing.
    """
    steps = math.floor(tolerance / DRIFT_OCTAVES * memory_steps(step, beta2))
    return steps if steps >= LEAST_REUSE_STEPS else 0


def bias_correction(step: int, beta2: float) -> float:
    """Return 1 - b2^t, the share of the mean squared gradient that v holds after ``step`` steps.

    Raises:
        ValueError: If ``step`` is below 1.
    """
    if step < 1:
        raise ValueError(f"step must be at least 1, not {step}")
    # expm1 keeps the precision that 1 - b2^t loses for b2 close to 1.
    return -math.expm1(step * math.log(beta2))


def update_unit(step: int, beta1: float, beta2: float) -> float:
    """Return the change of m, in units of sqrt(v), that changes an update by one learning rate.

    An update is m / (1 - b1^t) / sqrt(v / (1 - b2^t)), so this is (1 - b1^t) / sqrt(1 - b2^t).

    Raises:
        ValueError: If ``step`` is below 1.
    """
    share_of_mean = bias_correction(step, beta1) if beta1 else 1.0
    return share_of_mean / math.sqrt(bias_correction(step, beta2))


def bias_rescale(step: int, stored_step: int, beta2: float) -> float:
    """Return the factor (1 - b2^t) / (1 - b2^s) that scales a v of ``stored_step`` to ``step``.

    The optimizer divides by v / (1 - b2^t). The factor keeps this quotient as it was when v was
    stored.

    Raises:
        ValueError: Unless 1 <= ``stored_step`` <= ``step``.
    """
    if not 1 <= stored_step <= step:
        raise ValueError(f"steps must be 1 <= stored_step <= step, not {stored_step} and {step}")
    return math.expm1(step * math.log(beta2)) / math.expm1(stored_step * math.log(beta2))


def law_violations(first: F32, second: F32, limit: float) -> int:
    """Return the number of elements with m^2 > C v (1 + ROUNDING), or with a negative or NaN v.

    A live state of Adam has none. Elements whose least v is below the normal numbers of float32 do
    not count: v has lost its precision there, and may be 0.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN
        square = np.square(first, dtype=np.float64)
        bound = limit * (1 + ROUNDING) * second.astype(np.float64)
    visible = square / limit > 2.0**-126
    return int(np.count_nonzero(((square > bound) & visible) | ~(second >= 0)))


def update(
    first: F32,
    second: F32,
    eps: float,
    step: int | None = None,
    betas: tuple[float, float] | None = None,
) -> F64:
    """Return the direction of an Adam step, m / (sqrt(v) + eps), in float64.

    Both biases are corrected if ``step`` and ``betas`` are given.
    """
    m, v = first.astype(np.float64), second.astype(np.float64)
    if step is not None and betas is not None:
        m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    direction: F64 = m / (np.sqrt(v) + eps)
    return direction


def update_change(first: F32, second: F32, stale_second: F32, eps: float) -> float:
    """Return ||u(m, v') - u(m, v)|| / ||u(m, v)||, the L2 change of the update if v' replaces v.

    Args:
        first: m, float32.
        second: The live v, float32 of the same shape.
        stale_second: v', the moment that a restore would give.
        eps: The constant of the optimizer.

    Returns:
        The relative change, 0 if nothing is updated. It is infinite if u has an infinite or NaN
        element, because such a state must not be reused.
    """
    with np.errstate(all="ignore"):
        live = update(first, second, eps)
        difference = float(np.linalg.norm(update(first, stale_second, eps) - live))
        size = float(np.linalg.norm(live))
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / size if size else (0.0 if difference == 0 else math.inf)
