"""The analysis of a run: from its observations to its profile.

It classifies each leaf as frozen, sparse, derived, stable or active, and dates its stable stage.
``docs/lab/stability.md`` has the measurements behind the limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from deltacheck.policy import adam
from deltacheck.policy.events import Event
from deltacheck.profile.measure import Measured, Observed
from deltacheck.profile.record import FORMAT, VERSION, AdamRule, Curve, LeafProfile, Profile

# tau. With it, v became stable at steps 80 to 110 of three fine-tuning runs.
TOLERANCE_OCTAVES = 0.1
# Good windows before a leaf is stable; also a prior of bad windows in its confidence.
QUIET_WINDOWS = 3
# A stable leaf stays stable up to this multiple of tau, so that noise at the limit does not end it.
_HYSTERESIS = 1.5
# Share of the largest learning rate from which the warm-up is over.
_PAST_WARMUP = 0.95
# Share of all bytes that the smallest leaves together may have. They are exact in any case.
SMALL_SHARE = 0.01
# Share of the stable set's bytes that must be stable at the stable start.
START_SHARE = 0.9
# Density below which positions and values of the changed elements are the smaller code.
SPARSE_DENSITY = 0.25


class LeafFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The constant properties of a leaf.

    Attributes:
        shape: Its shape.
        dtype: The name of its type.
        raw_bytes: Its size.
        role: One of ``record.ROLES``.
        rule: For second moments: the constants of their Adam, ``None`` if they are unknown.
        derived_from: The leaf that it can be computed from; empty if there is none.
        how: The rule of that computation, ``cast`` or ``same``.
        embedding: True if it has a row for each token. Training may touch any row at any time.
    """

    shape: tuple[int, ...]
    dtype: str
    raw_bytes: int
    role: str
    rule: AdamRule | None = None
    derived_from: str = ""
    how: str = ""
    embedding: bool = False


class History(msgspec.Struct, frozen=True, omit_defaults=True):
    """The input of an analysis. It is small, whatever the size of the state.

    Attributes:
        leaves: The constant properties of each leaf.
        observed: The observations, ascending by step.
        events: The events of the run.
        optimizer: The constants that all parameters share, ``None`` if they differ.
        source: A name for the run.
    """

    leaves: dict[str, LeafFacts]
    observed: tuple[Observed, ...]
    events: tuple[Event, ...] = ()
    optimizer: AdamRule | None = None
    source: str = ""


def analyse(history: History, tolerance: float = TOLERANCE_OCTAVES) -> Profile:
    """Return the profile of a run.

    Only the second moments of an Adam with known betas date the stable stage. Those of embeddings
    do not, because the next batch may touch rows whose moments were never updated, and small leaves
    do not either. Policies do reuse the moments of an embedding: they compare every element of it.

    Args:
        history: The observations of the run.
        tolerance: tau, the drift of a second moment over an interval that counts as stable, in
            octaves. Larger: an earlier start and more reuse, but step sizes of a restored run that
            deviate more; smaller: the opposite.
    """
    small = _small(history.leaves)
    # Only second moments of a known Adam have a rule.
    candidates = [
        path
        for path, facts in history.leaves.items()
        if facts.rule and path not in small and not facts.embedding
    ]
    stages = {path: _stable(path, history, tolerance) for path in candidates}
    leaves = {path: _leaf(path, history, stages.get(path)) for path in sorted(history.leaves)}
    starts = [
        (leaf.stable_from, history.leaves[path].raw_bytes)
        for path, leaf in leaves.items()
        if leaf.stable_from is not None
    ]
    total = sum(
        facts.raw_bytes for facts in history.leaves.values() if facts.role == "second_moment"
    )
    # Weighted by bytes, because a stable embedding matters more than a stable norm.
    confident_bytes = sum(
        leaf.confidence * history.leaves[path].raw_bytes
        for path, leaf in leaves.items()
        if path in stages
    )
    observed = history.observed
    return Profile(
        FORMAT,
        VERSION,
        history.source,
        _interval(observed),
        leaves,
        _start_of_most(starts),
        confident_bytes / total if starts else 0.0,
        history.optimizer,
        _curve(observed, [o.rates[0] if o.rates else None for o in observed]),
        _curve(observed, [o.loss for o in observed]),
        _curve(observed, [o.gradient_norm for o in observed]),
        history.events,
    )


def _small(leaves: Mapping[str, LeafFacts]) -> set[str]:
    """Return the smallest leaves, which together have at most ``SMALL_SHARE`` of all bytes.

    These are norms, biases and counters. They are sensitive, and hardly add to a checkpoint.
    """
    total, size, small = sum(f.raw_bytes for f in leaves.values()), 0, set()
    for path in sorted(leaves, key=lambda p: (leaves[p].raw_bytes, p)):
        size += leaves[path].raw_bytes
        if size > SMALL_SHARE * total:
            break
        small.add(path)
    return small


def _start_of_most(starts: Sequence[tuple[int, int]]) -> int | None:
    """Return the step from which leaves with nine tenths of the stable set's bytes are stable.

    The last tenth is mostly late by chance, and would delay the start of all others.
    """
    threshold, stable_bytes = START_SHARE * sum(size for _, size in starts), 0
    for step, size in sorted(starts):
        stable_bytes += size
        if stable_bytes >= threshold:
            return step
    return None


class _Stage(msgspec.Struct, frozen=True):
    """The stable stage of a leaf.

    Attributes:
        start: Its first step.
        good: The number of windows since then within the tolerance.
        windows: The number of all windows since then.
    """

    start: int
    good: int
    windows: int

    @property
    def confidence(self) -> float:
        """Return the share of good windows; a short stage counts as less certain."""
        return self.good / (self.windows + QUIET_WINDOWS)


def _stable(path: str, history: History, tolerance: float) -> _Stage | None:
    """Return the stable stage in which the run ends for a second moment, ``None`` without one.

    The stage begins with the last of three quiet windows. In a quiet window the drift is at most
    tau, the update changes by at most 2 tau, no element violates Adam's law, no row is touched for
    the first time, the warm-up is over, and there is no event. The stage ends with an event, or
    with a drift above 1.5 tau.
    """
    rule = history.leaves[path].rule
    assert rule is not None  # the caller selects leaves with a rule
    warm = _warm(history.observed, history.events)
    stage: _Stage | None = None
    good = 0
    for previous, now in pairwise(history.observed):
        measured = now.leaves.get(path)
        disturbed = any(previous.step < event.step <= now.step for event in history.events)
        updates = now.count - previous.count if previous.count else now.step - previous.step
        if (
            measured is None
            or disturbed
            or now.step not in warm
            or measured.violations
            or not rule_permits(rule, updates, tolerance)
        ):
            # Nothing that was observed before a disturbance describes the run after it.
            stage, good = None, 0
            continue
        quiet = (
            measured.drift <= tolerance
            and measured.update_change <= 2 * tolerance
            and not _unseen_rows(measured)
        )
        good = good + 1 if quiet else 0
        if stage is not None:
            stage = _Stage(stage.start, stage.good + quiet, stage.windows + 1)
            if measured.drift > _HYSTERESIS * tolerance or _unseen_rows(measured):
                stage = None
        elif good >= QUIET_WINDOWS:
            stage = _Stage(now.step, 1, 1)
    return stage


def rule_permits(rule: AdamRule, updates: int, tolerance: float) -> bool:
    """Return True if the memory of v, once it is full, permits reuse over so many updates."""
    memory = math.ceil(1 / (1 - rule.beta2))
    return adam.permitted_staleness(tolerance, memory, rule.beta2) >= min(
        updates, adam.LEAST_REUSE_STEPS
    )


def _unseen_rows(measured: Measured) -> bool:
    """Return True if rows are touched for the first time, or if some are not touched at all."""
    return measured.fresh > 0 or measured.touched < 1


def _warm(observed: Sequence[Observed], events: Sequence[Event]) -> set[int]:
    """Return the steps at which the learning rate is past its warm-up.

    It has been near its largest value since the last change outside of the schedule.
    """
    breaks = sorted(e.step for e in events if e.what in ("learning-rate", "resume", "optimizer"))
    warm: set[int] = set()
    for low, high in zip([-1, *breaks], [*breaks, math.inf], strict=True):
        part = [o for o in observed if low <= o.step < high]
        peak = max((o.rates[0] for o in part if o.rates), default=0.0)
        arrived = next(
            (o.step for o in part if not o.rates or o.rates[0] >= _PAST_WARMUP * peak), None
        )
        warm |= {o.step for o in part if arrived is not None and o.step >= arrived}
    return warm


def _leaf(path: str, history: History, stage: _Stage | None) -> LeafProfile:
    """Return the profile of one leaf.

    Args:
        path: The leaf path.
        history: The observations of the run.
        stage: Its stable stage, ``None`` without one.
    """
    facts = history.leaves[path]
    series = [(o.step, o.leaves[path]) for o in history.observed if path in o.leaves]
    steps = tuple(step for step, _ in series)
    densities = tuple(m.density for _, m in series)
    late = [m for step, m in series if stage is None or step >= stage.start]
    # Without a stable stage, the second half of the run stands for its present behaviour.
    late = late[len(late) // 2 if stage is None else 0 :]
    kind = _kind(facts, densities, stage)
    return LeafProfile(
        path,
        facts.shape,
        facts.dtype,
        facts.role,
        kind,
        Curve(steps, densities),
        Curve(steps, tuple(m.drift for _, m in series)),
        unit_of(facts.role, bool(history.observed and history.observed[-1].rates)),
        0.0 if kind == "derived" else _mean([m.exact_bytes for m in late]),
        facts.derived_from,
        facts.how,
        stage.start if stage else None,
        stage.confidence if stage else 0.0,
    )


def unit_of(role: str, rates_known: bool) -> str:
    """Return the unit in which the drift of leaves of this role is measured."""
    if role in ("weight", "master") and rates_known:
        return "lr"
    return "octaves" if role == "second_moment" else "relative"


def _kind(facts: LeafFacts, densities: Sequence[float], stage: _Stage | None) -> str:
    """Return the kind of a leaf, one of ``record.KINDS``."""
    if facts.derived_from:
        return "derived"
    if densities and max(densities) == 0:
        return "frozen"
    if stage is not None:
        return "stable-changing"
    return "sparse" if densities and median(densities) <= SPARSE_DENSITY else "active"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _interval(observed: Sequence[Observed]) -> int:
    """Return the median number of steps between two observations, 0 for fewer than two."""
    distances = [now.step - previous.step for previous, now in pairwise(observed)]
    return int(median(distances)) if distances else 0


def _curve(observed: Sequence[Observed], values: Sequence[float | None]) -> Curve:
    """Return the curve of the finite values; JSON has no infinities."""
    finite = [
        (o.step, value)
        for o, value in zip(observed, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    return Curve(tuple(step for step, _ in finite), tuple(value for _, value in finite))
