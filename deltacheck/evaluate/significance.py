"""The statistics of an evaluation: spreads, bounds on rates, and a test of equivalence that may say
that it cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

ALPHA = 0.05
# The margin of equivalence: what is smaller than both is no difference that anybody could see in a
# model.
MARGIN_SD, MARGIN_SHARE = 0.5, 0.001  # of the sd between seeds, of the loss
# Of a noise floor that can be judged by: the sd of fewer is known to within a factor of three at
# best
LEAST_NOISE_SEEDS = 5
SPIKE_SD = 5.0


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some measurements, and the smallest and the largest of them."""

    median: float
    least: float
    most: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """REQUIRES: at least one value."""
    return Spread(median(values), min(values), max(values), len(values))


def least_rate(held: int, trials: int, alpha: float = ALPHA) -> float:
    """The lower end of Clopper and Pearson's interval (1934), one-sided: the rate is at least this
    with a confidence of ``1 - alpha``.

    300 of 300 gives 0.990; 4 of 4 gives 0.47. 0 where nothing held.
    """
    if not 0 <= held <= trials:
        raise ValueError(f"{held} of {trials} is no rate")
    if held == 0:
        return 0.0

    def as_many(rate: float) -> float:  # chance of so many or more
        return sum(
            math.comb(trials, n) * rate**n * (1 - rate) ** (trials - n)
            for n in range(held, trials + 1)
        )

    return _root(lambda rate: as_many(rate) - alpha, 0.0, 1.0)


def student_quantile(confidence: float, freedom: int) -> float:
    """The value that Student's t with ``freedom`` degrees of freedom (at least 1) stays below with
    this probability, at least one half.
    """
    if freedom < 1 or not 0.5 <= confidence < 1:
        raise ValueError(f"no quantile of {confidence} with {freedom} degrees of freedom")
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def inside(
        angle: float,
    ) -> (
        float
    ):  # t = sqrt(freedom) tan(angle) makes the density a power of a cosine; Simpson's rule
        width = angle / 400
        weights = (1 if n in (0, 400) else 4 if n % 2 else 2 for n in range(401))
        return 0.5 + scale * width / 3 * sum(
            weight * math.cos(n * width) ** (freedom - 1) for n, weight in enumerate(weights)
        )

    return math.sqrt(freedom) * math.tan(
        _root(lambda angle: inside(angle) - confidence, 0.0, math.pi / 2)
    )


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


# --- equivalence ----------------------------------------------------------------------------------

EQUAL, WITHIN, OUTSIDE, TOO_FEW = "equal", "within", "outside", "too few"  # permanent, in JSON


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Whether resumed runs end where unkilled ones do, by two one-sided t-tests (Schuirmann, 1987)
    on
    differences paired by seed.

    ``verdict``: ``equal``: every difference is 0. ``within``: the 90 % interval of the mean lies
    within the margin: equivalent at the 5 % level. ``outside``: it lies outside altogether. ``too
    few``: neither, or no noise floor to judge by; then ``needed`` seeds would tell with a power of
    0.9, if the mean is 0 (``None`` where that cannot be estimated). ``mean``: resumed minus
    unkilled, above 0 is worse. ``low``, ``high``: the interval, infinite where one seed is all
    there is. ``noise_sd``: over ``noise_seeds`` unkilled seeds.
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
    """Judge final losses.

    ``differences``: seed -> resumed minus unkilled of each of its kills; the kills of a seed share
    its run, so their mean is one observation. ``unkilled``: final losses of unkilled runs, one a
    seed, at least one.
    """
    if not differences:
        return Equivalence(TOO_FEW, math.nan, -math.inf, math.inf, 0.0, 0.0, len(unkilled), 0, None)
    means = [fmean(found) for found in differences.values()]
    mean, count = fmean(means), len(means)
    known = all(map(math.isfinite, [*means, *unkilled]))
    noise_sd = stdev(unkilled) if len(unkilled) > 1 and known else 0.0
    margin = min(MARGIN_SD * noise_sd, MARGIN_SHARE * abs(fmean(unkilled))) if known else 0.0
    reach, needed = math.inf, None
    if count > 1 and known:
        error = stdev(means) / math.sqrt(count)
        reach = student_quantile(1 - ALPHA, count - 1) * error
        needed = _needed(stdev(means), margin)
    low, high = mean - reach, mean + reach
    if all(value == 0 for found in differences.values() for value in found):
        verdict, low, high = EQUAL, 0.0, 0.0
    elif not known:
        # NaN or infinite is not where an unkilled run ends; where that does too, nothing can be
        # shown
        verdict = OUTSIDE
    elif low > margin or high < -margin:
        verdict = OUTSIDE if len(unkilled) >= LEAST_NOISE_SEEDS else TOO_FEW
    elif -margin < low and high < margin and len(unkilled) >= LEAST_NOISE_SEEDS:
        verdict = WITHIN
    else:
        verdict = TOO_FEW
    return Equivalence(verdict, mean, low, high, margin, noise_sd, len(unkilled), count, needed)


def _needed(sd: float, margin: float) -> int | None:
    """Seeds for a power of 0.9 at a true difference of 0: 10.8 (sd / margin)^2, from the normal
    quantiles 1.645 and 1.645; at least 3.
    """
    return max(3, math.ceil(10.8 * (sd / margin) ** 2)) if margin else None


# --- loss curves ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses of a resumed run beside those of the unkilled run of its seed. ``equal``: steps
    whose
    losses have the same bits, of ``steps``.

    ``first_gap``: the first step that differs, ``None`` where none does. ``largest_gap``,
    ``mean_gap``: of the absolute differences; ``spikes``: steps whose difference is above
    ``SPIKE_SD`` standard deviations of the losses between seeds at that step.
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
    others: Sequence[Mapping[int, float]],
) -> Curve:
    """Compare step by step. ``others``: losses of all unkilled seeds. Raises ``KeyError`` for a
    step that the unkilled run has not.
    """
    differing = [step for step, loss in resumed.items() if not _same(loss, unkilled[step])]
    gaps = [abs(loss - unkilled[step]) for step, loss in resumed.items()]
    spikes = 0
    for step in differing:
        seen = [losses[step] for losses in others]
        limit = SPIKE_SD * stdev(seen) if len(seen) > 1 else math.inf
        spikes += not abs(resumed[step] - unkilled[step]) <= limit
    largest = math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0)
    return Curve(
        len(resumed),
        len(resumed) - len(differing),
        min(differing, default=None),
        largest if differing else 0.0,
        fmean(gaps) if gaps and differing else 0.0,
        spikes,
    )


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
