"""The stage of a run: warm (everything is written), stable (hidden state is bounded or reused),
degraded (everything is written again).

A fold over what each save saw: ``advance`` is pure, so every process and every replay of the same
observations decides alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

WARM, STABLE, DEGRADED = "warm", "stable", "degraded"

QUIET_WINDOWS = 3  # saves without an event, and within the drift, before anything may be reused
RISING = 1.001  # of the learning rate from save to save: a warm-up is under way


@dataclass(frozen=True, slots=True)
class Observation:
    """What one save saw. ``drift_octaves``: median ``|log2|`` change of second moments since the
    save
    before, ``None`` where there is nothing to compare with. ``events``: what the change-point
    detector found since.
    """

    step: int
    learning_rate: float | None
    drift_octaves: float | None
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """``quiet``: windows in a row that were quiet. ``learning_rate``: at the last save."""

    name: str = WARM
    quiet: int = 0
    learning_rate: float | None = None


def advance(
    stage: Stage, seen: Observation, tolerance_octaves: float, stable_from: int | None
) -> Stage:
    """The stage for the save that saw ``seen``.

    Stable begins after ``QUIET_WINDOWS`` saves in a row without an event, with a learning rate that
    does not rise, and with a drift of at most ``tolerance_octaves``, not before step
    ``stable_from``. An event ends it at once: degraded, until the same holds again. Drift does not:
    from then on what is reused is guarded leaf by leaf, and the leaves that are written exactly
    would speak for the others.
    """
    rising = (
        stage.learning_rate is not None
        and seen.learning_rate is not None
        and seen.learning_rate > RISING * stage.learning_rate
    )
    settled = seen.drift_octaves is not None and seen.drift_octaves <= tolerance_octaves
    after = replace(stage, learning_rate=seen.learning_rate)
    if seen.events:
        return replace(after, name=WARM if stage.name == WARM else DEGRADED, quiet=0)
    if stage.name == STABLE:
        return after
    quiet = stage.quiet + 1 if settled and not rising else 0
    if quiet >= QUIET_WINDOWS and (stable_from is None or seen.step >= stable_from):
        return replace(after, name=STABLE, quiet=quiet)
    return replace(after, quiet=quiet)
