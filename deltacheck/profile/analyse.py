"""The analysis of a run: from its observations to its profile.

It classifies each leaf as frozen, sparse, derived, stable or active. The stable stage is dated by
the decisions that ``Policy.auto`` makes at each save, ``policy.stage.advance``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from deltacheck.policy.decide import is_reusable
from deltacheck.policy.events import Event
from deltacheck.policy.presets import Hidden, Policy
from deltacheck.policy.stage import QUIET_WINDOWS, SaveObservation, Stage, advance, stable_start
from deltacheck.profile.measure import Observed
from deltacheck.profile.record import FORMAT, VERSION, AdamRule, Curve, LeafProfile, Profile

# tau, as in ``Policy.auto``. With it, v became stable at steps 80 to 110 of three fine-tuning runs.
TOLERANCE_OCTAVES = 0.1
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
    """

    shape: tuple[int, ...]
    dtype: str
    raw_bytes: int
    role: str
    rule: AdamRule | None = None
    derived_from: str = ""
    how: str = ""


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

    Only the second moments of an Adam with known betas date the stable stage.

    Args:
        history: The observations of the run.
        tolerance: tau, the drift of a second moment over an interval that counts as stable, in
            octaves. Larger: an earlier start and more reuse, but step sizes of a restored run that
            deviate more; smaller: the opposite.
    """
    # Only second moments of a known Adam have a rule.
    dated = [path for path, facts in history.leaves.items() if facts.rule]
    start, confidence = _stable(dated, history, tolerance)
    leaves = {}
    for path in sorted(history.leaves):
        dating = (
            _stable([path], history, tolerance, breaks_law=True) if path in dated else (None, 0.0)
        )
        leaves[path] = _leaf(path, history, *dating)
    observed = history.observed
    return Profile(
        FORMAT,
        VERSION,
        history.source,
        _interval(observed),
        leaves,
        start,
        confidence,
        history.optimizer,
        _curve(observed, [o.rates[0] if o.rates else None for o in observed]),
        _curve(observed, [o.loss for o in observed]),
        _curve(observed, [o.gradient_norm for o in observed]),
        history.events,
    )


def _stable(
    paths: Iterable[str], history: History, tolerance: float, *, breaks_law: bool = False
) -> tuple[int | None, float]:
    """Return the stable start of second moments, and the confidence in it.

    Each observation counts as a save. A save decides before it reads the state, so it knows the
    drift up to the save before.

    Args:
        paths: The second moments whose median drift decides.
        history: The observations of the run.
        tolerance: The largest drift of a quiet save.
        breaks_law: If True, a violation of Adam's law is an event.

    Returns:
        The first step at which ``Policy.auto`` may reuse moments, ``None`` if there is none; and
        the share of the intervals since then whose drift was within the tolerance. Few intervals
        count as less certain.
    """
    hidden = Policy.auto(max_drift_octaves=tolerance).hidden
    assert hidden is not None
    paths = tuple(paths)
    stage, drift, previous = Stage(), None, None
    stages: list[tuple[int, str]] = []
    drifts: list[tuple[int, float]] = []
    for now in history.observed:
        last = -1 if previous is None else previous.step
        events = tuple(e.what for e in history.events if last < e.step <= now.step)
        if breaks_law and any(now.leaves[path].violations for path in paths if path in now.leaves):
            events += ("law",)
        observation = SaveObservation(now.step, max(now.rates, default=None), drift, events)
        stage = advance(stage, observation, tolerance, hidden.stable_from)
        stages.append((now.step, stage.name))
        drift = None if previous is None else _drift(paths, history, previous, now, hidden)
        drifts += [] if drift is None else [(now.step, drift)]
        previous = now
    start = stable_start(stages)
    if start is None:
        return None, 0.0
    is_quiet = [drift <= tolerance for step, drift in drifts if step >= start]
    return start, sum(is_quiet) / (len(is_quiet) + QUIET_WINDOWS)


def _drift(
    paths: Iterable[str], history: History, previous: Observed, now: Observed, hidden: Hidden
) -> float | None:
    """Return the median drift of the second moments that law 7 permits to be reused."""
    # Without a count, the step is the best estimate of the number of updates.
    updates = (now.count or now.step) - (previous.count or previous.step)
    rules = {path: history.leaves[path].rule for path in paths if path in now.leaves}
    drifts = [
        now.leaves[path].drift
        for path, rule in rules.items()
        if rule is not None and is_reusable(hidden, updates, rule.beta2)
    ]
    return median(drifts) if drifts else None


def _leaf(path: str, history: History, start: int | None, confidence: float) -> LeafProfile:
    """Return the profile of one leaf.

    Args:
        path: The leaf path.
        history: The observations of the run.
        start: Its stable start, ``None`` without one.
        confidence: The confidence in it.
    """
    facts = history.leaves[path]
    series = [(o.step, o.leaves[path]) for o in history.observed if path in o.leaves]
    steps = tuple(step for step, _ in series)
    densities = tuple(m.density for _, m in series)
    kind = _kind(facts, densities, start)
    return LeafProfile(
        path,
        facts.shape,
        facts.dtype,
        facts.role,
        kind,
        Curve(steps, densities),
        Curve(steps, tuple(m.drift for _, m in series)),
        unit_of(facts.role, bool(history.observed and history.observed[-1].rates)),
        facts.derived_from,
        facts.how,
        start,
        confidence,
    )


def unit_of(role: str, rates_known: bool) -> str:
    """Return the unit in which the drift of leaves of this role is measured."""
    if role in ("weight", "master") and rates_known:
        return "lr"
    return "octaves" if role == "second_moment" else "relative"


def _kind(facts: LeafFacts, densities: Sequence[float], start: int | None) -> str:
    """Return the kind of a leaf, one of ``record.KINDS``."""
    if facts.derived_from:
        return "derived"
    if densities and max(densities) == 0:
        return "frozen"
    if start is not None:
        return "stable-changing"
    return "sparse" if densities and median(densities) <= SPARSE_DENSITY else "active"


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
