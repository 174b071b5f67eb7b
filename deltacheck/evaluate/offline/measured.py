"""Measure the bytes of policies on recorded checkpoints, for the planner and for profiles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from deltacheck.errors import StepNotFound
from deltacheck.evaluate.offline.policy_replay import PolicyReplay
from deltacheck.profile.rates import Rates
from deltacheck.report.data import collect
from deltacheck.report.root_rates import rates_of

# Fewer checkpoints do not show a stable stage: it begins with the fourth save at the earliest.
_LEAST_STEPS = 12


def thinned(steps: Sequence[int], interval_steps: int | None) -> Collection[int] | None:
    """Return the recorded steps that a run with another interval would have saved.

    Args:
        steps: The recorded steps, ascending.
        interval_steps: The interval, ``None`` for that of the checkpoints.

    Returns:
        The steps; ``None`` for all of them, also if too few would remain.
    """
    distances = [after - before for before, after in pairwise(steps)]
    if interval_steps is None or not distances or interval_steps <= median(distances):
        return None
    subset = {step for step in steps if (step - steps[0]) % interval_steps == 0}
    is_regular = {b - a for a, b in pairwise(sorted(subset))} == {interval_steps}
    return subset if is_regular and len(subset) >= _LEAST_STEPS else None


def rates_under(result: PolicyReplay) -> Rates:
    """Return the rates that a policy showed in a replay.

    Raises:
        StepNotFound: The policy kept every checkpoint exact, although it need not.
    """
    mean = result.sizes.steady_bytes
    if mean is None:
        raise StepNotFound(
            f"under {result.policy} the run was steady at none of the {result.sizes.saves}"
            " checkpoints, so there is no steady save to plan from; record more of them"
        )
    return replace(rates_of(collect(result.root)), measured_bytes=mean)
