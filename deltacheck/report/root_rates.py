"""The rates at which the state of a root changes, from the files of its saves."""

from __future__ import annotations

import itertools
import statistics

from deltacheck.errors import StepNotFound
from deltacheck.profile.rates import LeafRate, Rates
from deltacheck.report.data import Record


def rates_of(record: Record) -> Rates:
    """Return the cost of the saves of a root.

    Leaves that were always written whole count as changed altogether, because a keyframe does not
    show what changed.
    """
    # Damaged steps lack some of their sizes and would make saves look too cheap.
    steps = [step for step in record.steps if step.problem is None]
    # A resumed run goes back to an earlier step. Such a pair is no interval.
    intervals = [b.step - a.step for a, b in itertools.pairwise(steps) if b.step > a.step]
    if not intervals:
        raise StepNotFound(
            f"{record.root} has fewer than two steps that can be compared; save twice"
        )
    leaves = tuple(
        LeafRate(
            leaf.raw_bytes,
            leaf.word_bytes,
            leaf.density / leaf.saves if leaf.saves else 1.0,
            leaf.delta_bytes / leaf.saves if leaf.saves else leaf.key_bytes,
            leaf.key_bytes,
        )
        for leaf in record.leaves.values()
    )
    # The rest of the state is computed at a restore, or stored as smaller codes.
    computed_bytes = steps[-1].raw_bytes - sum(leaf.raw_bytes for leaf in leaves)
    if computed_bytes > 0:
        leaves += (LeafRate(computed_bytes, 1, 0.0, 0.0, 0.0),)
    # The table of the first save describes all leaves, and later ones only those that changed.
    tables = statistics.fmean(step.tables_bytes for step in steps[1:])
    return Rates(statistics.median(intervals), leaves, tables)


def step_seconds_of(record: Record) -> float | None:
    """Return the median time of a training step, from the times of neighbouring saves.

    The median ignores pauses between two runs, which take far longer than any step.
    """
    durations = [
        (b.time - a.time) / (b.step - a.step)
        for a, b in itertools.pairwise(record.steps)
        if b.step > a.step and b.time > a.time
    ]
    return statistics.median(durations) if durations else None
