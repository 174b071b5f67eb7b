"""The statistics of an evaluation: spreads, bounds on rates, and a test of equivalence.

The test may also answer that there is too little data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

ALPHA = 0.05
# The margin of equivalence is the smaller of the two. No one could see such a difference.
MARGIN_SD, MARGIN_SHARE = 0.5, 0.001  # of the sd between seeds, of the loss
# The sd of fewer seeds is known to within a factor of three at best.
LEAST_NOISE_SEEDS = 5
SPIKE_SD = 5.0


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the smallest and the largest of some measurements."""

    median: float
    least: float
    most: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Summarize at least one value."""
    return Spread(median(values), min(values), max(values), len(values))


def least_rate(successes: int, trials: int) -> float:
    """Return the lower end of Clopper and Pearson's one-sided interval (1934).

    The true rate is at least this with a confidence of ``1 - ALPHA``. 300 of 300 gives 0.990, 4 of
    4 gives 0.47, 0 of any number gives 0.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is no rate")
    if successes == 0:
        return 0.0

    def tail(rate: float) -> float:  # probability of ``successes`` or more
        return sum(
            math.comb(trials, n) * rate**n * (1 - rate) ** (trials - n)
            for n in range(successes, trials + 1)
        )

    return _root(lambda rate: tail(rate) - ALPHA, 0.0, 1.0)


def student_quantile(confidence: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution.

    Args:
        confidence: The probability of a smaller value, at least one half.
        freedom: Degrees of freedom, at least 1.
    """
    if freedom < 1 or not 0.5 <= confidence < 1:
        raise ValueError(f"no quantile of {confidence} with {freedom} degrees of freedom")
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def distribution(angle: float) -> float:
        # t = sqrt(freedom) tan(angle) makes the density a power of a cosine, which Simpson's rule
        # integrates without trouble at infinity.
        width = angle / 400
        weights = (1 if n in (0, 400) else 4 if n % 2 else 2 for n in range(401))
        return 0.5 + scale * width / 3 * sum(
            weight * math.cos(n * width) ** (freedom - 1) for n, weight in enumerate(weights)
        )

    return math.sqrt(freedom) * math.tan(
        _root(lambda angle: distribution(angle) - confidence, 0.0, math.pi / 2)
    )


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Bisect until the interval is as small as float64 allows."""
    for _ in range(80):  # halves the interval below the spacing of float64
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


# --- equivalence ----------------------------------------------------------------------------------

EQUAL, WITHIN, OUTSIDE, TOO_FEW = "equal", "within", "outside", "too few"  # permanent, in JSON


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The result of two one-sided t-tests (Schuirmann, 1987) on differences paired by seed.

    The verdict is ``equal`` if every difference is 0. It is ``within`` if the 90 % interval of the
    mean lies within the margin: the runs are equivalent at the 5 % level. It is ``outside`` if the
    interval lies outside altogether. Otherwise, or without a noise floor, it is ``too few``; then
    ``needed`` seeds would decide with a power of 0.9 if the mean is 0 (``None`` if that cannot be
    estimated).

    ``mean``: resumed minus unkilled, above 0 is worse. ``low``, ``high``: the interval, infinite
    for a single seed. ``noise_sd``: over ``noise_seeds`` unkilled seeds.
    """

    verdict: str
    mean: float
    low: float
    high: float
    margin: float
    noise_sd: float
    noise_seeds: int
    seeds: int
    needed: int | None


def equivalence(
    differences: Mapping[int, Sequence[float]], unkilled: Sequence[float]
) -> Equivalence:
    """Compare final losses.

    Args:
        differences: Of each seed, resumed minus unkilled for each of its kills. The kills of a seed
            share its run, so their mean is one observation.
        unkilled: Final losses of unkilled runs, one per seed, at least one.
    """
    if not differences:
        return Equivalence(TOO_FEW, math.nan, -math.inf, math.inf, 0.0, 0.0, len(unkilled), 0, None)
    # One observation for each seed: its kills share a run and are not independent.
    means = [fmean(values) for values in differences.values()]
    mean, count = fmean(means), len(means)
    finite = all(map(math.isfinite, [*means, *unkilled]))
    noise_sd = stdev(unkilled) if len(unkilled) > 1 and finite else 0.0
    margin = min(MARGIN_SD * noise_sd, MARGIN_SHARE * abs(fmean(unkilled))) if finite else 0.0
    half_width, needed_seeds = math.inf, None
    if count > 1 and finite:
        error = stdev(means) / math.sqrt(count)
        half_width = student_quantile(1 - ALPHA, count - 1) * error
        needed_seeds = _needed(stdev(means), margin)
    # Equal bits need no statistics, not even a noise floor.
    if all(value == 0 for values in differences.values() for value in values):
        verdict, low, high = EQUAL, 0.0, 0.0
    else:
        low, high = mean - half_width, mean + half_width
        # An unkilled run does not end with NaN or infinity; if it does, nothing can be shown.
        verdict = _verdict(low, high, margin, len(unkilled)) if finite else OUTSIDE
    return Equivalence(
        verdict, mean, low, high, margin, noise_sd, len(unkilled), count, needed_seeds
    )


def _verdict(low: float, high: float, margin: float, noise_seeds: int) -> str:
    """Return the verdict on a finite interval of the mean."""
    if noise_seeds < LEAST_NOISE_SEEDS:
        return TOO_FEW
    if low > margin or high < -margin:
        return OUTSIDE
    return WITHIN if -margin < low and high < margin else TOO_FEW


def _needed(sd: float, margin: float) -> int | None:
    """Return the number of seeds for a power of 0.9 at a true difference of 0, at least 3.

    It is 10.8 (sd / margin)^2, from the normal quantiles 1.645 and 1.645.
    """
    # With two seeds, the quantile of one degree of freedom makes the interval too wide to be of
    # use.
    return max(3, math.ceil(10.8 * (sd / margin) ** 2)) if margin else None


# --- loss curves ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CurveComparison:
    """The comparison of a resumed run's losses with those of the unkilled run of its seed.

    ``equal`` of ``steps`` losses have the same bits. ``first_gap``: the first step that differs, or
    ``None``. ``largest_gap``, ``mean_gap``: of the absolute differences. ``spikes``: steps whose
    difference exceeds ``SPIKE_SD`` standard deviations of the losses between seeds at that step.
    """

    steps: int
    equal: int
    first_gap: int | None
    largest_gap: float
    mean_gap: float
    spikes: int


def curve(
    resumed: Mapping[int, float],
    unkilled: Mapping[int, float],
    seed_losses: Sequence[Mapping[int, float]],
) -> CurveComparison:
    """Compare losses step by step.

    Args:
        resumed: Losses by step.
        unkilled: Losses by step of the same seed.
        seed_losses: Losses of all unkilled seeds.

    Raises:
        KeyError: The unkilled run lacks a step of the resumed one.
    """
    differing = [step for step, loss in resumed.items() if not _same(loss, unkilled[step])]
    gaps = [abs(loss - unkilled[step]) for step, loss in resumed.items()]
    spikes = 0
    for step in differing:
        values = [losses[step] for losses in seed_losses]
        limit = SPIKE_SD * stdev(values) if len(values) > 1 else math.inf
        # ``not <=`` also counts NaN.
        spikes += not abs(resumed[step] - unkilled[step]) <= limit
    largest = math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0)
    return CurveComparison(
        len(resumed),
        len(resumed) - len(differing),
        min(differing, default=None),
        largest if differing else 0.0,
        fmean(gaps) if gaps and differing else 0.0,
        spikes,
    )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
