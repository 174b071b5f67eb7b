"""The checkpoint interval that wastes the least time, and the time that an interval wastes.

All durations are in seconds. Failures are a Poisson process: independent of each other, at a
constant rate. ``docs/how-to/size-an-interval.md`` compares the formulas with a simulation.
"""

from __future__ import annotations

import math


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the work between two checkpoints that wastes least, to first order: ``sqrt(2 C M)``.

    The formula holds for C much smaller than M. Source: J. W. Young, "A first order approximation
    to the optimum checkpoint interval", Communications of the ACM 17(9), 1974.

    Args:
        cost_seconds: C, the time for which a checkpoint blocks training.
        mtbf_seconds: M, the mean time between failures of the whole job.
    """
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


def daly_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the best interval to higher order.

    For C < 2M it is ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C``, else M. Source: J. T.
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006.

    Args:
        cost_seconds: C, the time for which a checkpoint blocks training.
        mtbf_seconds: M, the mean time between failures of the whole job.
    """
    ratio = cost_seconds / (2 * mtbf_seconds)
    # The series diverges here. A checkpoint that takes longer than two mean times between failures
    # is hardly ever completed, whatever the interval.
    if ratio >= 1:
        return mtbf_seconds
    return (
        young_interval(cost_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
        - cost_seconds
    )


def waste(
    interval_seconds: float,
    cost_seconds: float,
    mtbf_seconds: float,
    restart_seconds: float = 0.0,
    lag_seconds: float = 0.0,
) -> float:
    """Return the share of wall time that is not progress.

    This is Daly's model of the run time (2006): a second of work takes ``M e^(R/M) (e^((t+C)/M) -
    1) / t`` seconds.

    Args:
        interval_seconds: t, the work between two checkpoints.
        cost_seconds: C, the time for which a checkpoint blocks training.
        mtbf_seconds: M, the mean time between failures of the whole job.
        restart_seconds: R, the time from a failure until training continues.
        lag_seconds: The time for which a checkpoint is not yet durable while training continues. A
            failure loses this much more work, ``lag / M`` to first order.

    Returns:
        The share, 1 if no work would ever be completed.
    """
    attempt = (interval_seconds + cost_seconds) / mtbf_seconds
    restart = restart_seconds / mtbf_seconds
    if attempt + restart > 700:  # a float64 overflows beyond about e^709
        return 1.0
    useful = interval_seconds / (mtbf_seconds * math.exp(restart) * math.expm1(attempt))
    return min(1.0, 1 - useful + lag_seconds / mtbf_seconds)
