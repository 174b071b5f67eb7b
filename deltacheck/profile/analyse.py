"""From what was observed of a run to its profile: which leaves are frozen, sparse, derived or
stable, from which step, and what that allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from deltacheck.leaf.contracts import Bounded, Exact, Reused
from deltacheck.policy import adam
from deltacheck.policy.events import Event
from deltacheck.policy.presets import MASTER_ERROR_LR
from deltacheck.profile.measure import Measured, Observed
from deltacheck.profile.record import FORMAT, VERSION, AdamRule, Curve, LeafProfile, Profile

TOLERANCE_OCTAVES = 0.1  # tau; with it v became stable at steps 80 to 110 of three fine-tuning runs
QUIET_WINDOWS = 3  # good windows before a leaf is stable, and windows without an event
_HYSTERESIS = 1.5  # a stable leaf stays so up to as many tau
_PAST_WARMUP = 0.95  # of the largest learning rate
SMALL_SHARE = (
    0.01  # of all bytes: what the smallest leaves together may have to be exact, whatever they are
)
MOST = 0.9  # of the bytes of the stable set
SPARSE_DENSITY = 0.25  # below it, positions and values of what changed are the smaller code


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What does not change of a leaf. ``rule``: of the second moments of a known Adam. ``narrow``:
    of
    masters, the weight that is their cast. ``embedding``: it has a row for each token, which
    training may touch at any time.
    """

    shape: tuple[int, ...]
    dtype: str
    raw_bytes: int
    role: str
    rule: AdamRule | None = None
    derived_from: str = ""
    how: str = ""
    narrow: str = ""
    embedding: bool = False


class History(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that an analysis needs of a run; small, whatever the size of the state."""

    leaves: dict[str, Facts]
    observed: tuple[Observed, ...]
    events: tuple[Event, ...] = ()
    optimizer: AdamRule | None = None
    source: str = ""


def analyse(history: History, tolerance: float = TOLERANCE_OCTAVES) -> Profile:
    """The profile of a run.

    ``tolerance``: tau, in octaves: how far a second moment may drift over an interval and count as
    stable. Larger: an earlier start, more reuse, a restored run that takes larger or smaller steps.
    Only second moments can be stable, of an Adam with known betas; embeddings never are, as the
    next batch may touch rows whose moments have not been seen; nor is what is small.
    """
    small = _small(history.leaves)
    judged = [
        path
        for path, facts in history.leaves.items()
        if facts.rule and path not in small and not facts.embedding
    ]
    stages = {path: _stable(path, history, tolerance) for path in judged}
    leaves = {
        path: _leaf(path, history, stages.get(path), path in small, tolerance)
        for path in sorted(history.leaves)
    }
    starts = [
        (leaf.stable_from, history.leaves[path].raw_bytes)
        for path, leaf in leaves.items()
        if leaf.stable_from is not None
    ]
    total = sum(
        facts.raw_bytes for facts in history.leaves.values() if facts.role == "second_moment"
    )
    held = sum(
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
        held / total if starts else 0.0,
        history.optimizer,
        _curve(observed, [o.rates[0] if o.rates else None for o in observed]),
        _curve(observed, [o.loss for o in observed]),
        _curve(observed, [o.gradient_norm for o in observed]),
        history.events,
    )


def _small(leaves: Mapping[str, Facts]) -> set[str]:
    """The smallest leaves, as many as together have no more than a hundredth of all bytes: norms,
    biases, counters.
    """
    total, taken, small = sum(f.raw_bytes for f in leaves.values()), 0, set()
    for path in sorted(leaves, key=lambda p: (leaves[p].raw_bytes, p)):
        taken += leaves[path].raw_bytes
        if taken > SMALL_SHARE * total:
            break
        small.add(path)
    return small


def _start_of_most(starts: Sequence[tuple[int, int]]) -> int | None:
    """The step from which leaves with nine tenths of the stable set's bytes are stable: the last of
    them is mostly late by chance.
    """
    needed, held = MOST * sum(size for _, size in starts), 0
    for step, size in sorted(starts):
        held += size
        if held >= needed:
            return step
    return None


class _Stage(msgspec.Struct, frozen=True):
    """Since when a leaf is stable, and in which share of how many windows since then it was within
    the tolerance.
    """

    start: int
    good: int
    windows: int

    @property
    def confidence(self) -> float:
        return self.good / (self.windows + QUIET_WINDOWS)


def _stable(path: str, history: History, tolerance: float) -> _Stage | None:
    """The stage that a second moment is in at the end: the first step of it, or ``None``.

    It begins with the last of three windows in which the drift over the window is at most tau, the
    update changes by at most 2 tau, no element breaks Adam's law, no row is seen for the first
    time, the warm-up is over and nothing happened. It ends with an event, and where the drift
    exceeds 1.5 tau.
    """
    rule = history.leaves[path].rule
    assert rule is not None  # asked of second moments only
    warm = _warm(history.observed, history.events)
    stage: _Stage | None = None
    good = 0
    for previous, now in pairwise(history.observed):
        measured = now.leaves.get(path)
        disturbed = any(previous.step < event.step <= now.step for event in history.events)
        apart = now.step - previous.step
        if (
            measured is None
            or disturbed
            or now.step not in warm
            or measured.violations
            or not rule_permits(rule, now, apart, tolerance)
        ):
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


def rule_permits(rule: AdamRule, now: Observed, apart: int, tolerance: float) -> bool:
    """Whether the optimizer's memory is long enough for any reuse at all, and for one over this
    interval once it is full.
    """
    memory = math.ceil(1 / (1 - rule.beta2))
    return adam.permitted_staleness(tolerance, memory, rule.beta2) >= min(
        apart, adam.LEAST_REUSE_STEPS
    )


def _unseen_rows(measured: Measured) -> bool:
    """Rows of an embedding: some are seen for the first time, or most are not touched at all."""
    return measured.fresh > 0 or measured.touched < 1


def _warm(observed: Sequence[Observed], events: Sequence[Event]) -> set[int]:
    """The steps at which the learning rate is past its warm-up: it was near its largest since the
    last change outside the schedule.
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


def _leaf(
    path: str, history: History, stage: _Stage | None, small: bool, tolerance: float
) -> LeafProfile:
    facts = history.leaves[path]
    seen = [(o.step, o.leaves[path]) for o in history.observed if path in o.leaves]
    steps = tuple(step for step, _ in seen)
    densities = tuple(m.density for _, m in seen)
    late = [m for step, m in seen if stage is None or step >= stage.start]
    late = late[len(late) // 2 if stage is None else 0 :]
    kind = _kind(facts, densities, stage)
    recommended: Exact | Bounded | Reused = Exact()
    refresh = 0
    if stage is not None and facts.rule is not None:
        refresh = max(
            adam.permitted_staleness(tolerance, stage.start, facts.rule.beta2),
            _interval(history.observed),
        )
        recommended = Reused(refresh, tolerance)
    elif (
        facts.role == "master"
        and facts.narrow
        and not small
        and history.optimizer is not None
        and any(o.rates for o in history.observed)
    ):
        recommended = Bounded(MASTER_ERROR_LR, "lr")
    return LeafProfile(
        path,
        facts.shape,
        facts.dtype,
        facts.role,
        kind,
        Curve(steps, densities),
        Curve(steps, tuple(m.drift for _, m in seen)),
        unit_of(facts.role, bool(history.observed and history.observed[-1].rates)),
        0.0 if kind == "derived" else _mean([m.exact_bytes for m in late]),
        facts.derived_from,
        facts.how,
        stage.start if stage else None,
        stage.confidence if stage else 0.0,
        recommended,
        refresh,
    )


def unit_of(role: str, rates_known: bool) -> str:
    """What the drift of leaves of this role is told in."""
    if role in ("weight", "master") and rates_known:
        return "lr"
    return "octaves" if role == "second_moment" else "relative"


def _kind(facts: Facts, densities: Sequence[float], stage: _Stage | None) -> str:
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
    apart = [now.step - then.step for then, now in pairwise(observed)]
    return int(median(apart)) if apart else 0


def _curve(observed: Sequence[Observed], values: Sequence[float | None]) -> Curve:
    known = [
        (o.step, value)
        for o, value in zip(observed, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    return Curve(tuple(step for step, _ in known), tuple(value for _, value in known))
