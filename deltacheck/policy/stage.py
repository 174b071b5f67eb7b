"""The stages of a run: warm, stable and degraded.

In the warm stage the hidden state is bounded: its error is measured at every save, which needs no
stability. In the stable stage moments may also be reused. A degraded save follows an event and is
exact. ``advance`` is a pure fold over the observations of the saves, so every process and every
replay of the same observations decides alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

WARM, STABLE, DEGRADED = "warm", "stable", "degraded"

# Saves in a row without an event and within the drift before anything may be reused. A single quiet
# save happens by chance in the middle of a warm-up.
QUIET_WINDOWS = 3
# Growth of the learning rate from save to save above which a warm-up is under way.
RISING = 1.001


@dataclass(frozen=True, slots=True)
class SaveObservation:
    """The signals of a run at one save.

    Attributes:
        step: The step that is saved.
        learning_rate: The largest rate of all groups, ``None`` if it is unknown.
        drift_octaves: Median ``|log2|`` change of the second moments between the two saves before,
            ``None`` if none of them was compared, or none may be reused for so long (law 7).
        events: The names of the events that the change-point detector raised since then.
    """

    step: int
    learning_rate: float | None
    drift_octaves: float | None
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """The state of the fold.

    Attributes:
        name: ``WARM``, ``STABLE`` or ``DEGRADED``.
        quiet: The number of quiet saves in a row.
        learning_rate: The rate at the last save.
        is_undisturbed: True until the first event. After it, a profile of another run says nothing
            about this one.
    """

    name: str = WARM
    quiet: int = 0
    learning_rate: float | None = None
    is_undisturbed: bool = True


def stable_start(stages: Iterable[tuple[int, str]]) -> int | None:
    """Return the first step in the stable stage, ``None`` if there is none.

    Args:
        stages: The step and the name of the stage of each save.
    """
    return min((step for step, name in stages if name == STABLE), default=None)


def advance(
    stage: Stage,
    observation: SaveObservation,
    tolerance_octaves: float,
    stable_from: int | None,
    steady_from: int | None = None,
) -> Stage:
    """Return the stage of the save that made ``observation``.

    The stable stage begins after ``QUIET_WINDOWS`` saves in a row without an event, with a learning
    rate that does not rise and with a drift within the tolerance. A save with an event is degraded,
    and the next one without is warm.

    Args:
        stage: The stage of the previous save.
        observation: The signals of this save.
        tolerance_octaves: The largest drift of a quiet save. Larger: the stable stage begins
            earlier; smaller: later or never.
        stable_from: The first step that may be stable, ``None`` for any.
        steady_from: The step from which the drift is known to be within the tolerance until the
            first event, as a profile found, ``None`` if that is unknown.
    """
    rising = (
        stage.learning_rate is not None
        and observation.learning_rate is not None
        and observation.learning_rate > RISING * stage.learning_rate
    )
    within_drift = (
        observation.drift_octaves is not None and observation.drift_octaves <= tolerance_octaves
    ) or (steady_from is not None and stage.is_undisturbed and observation.step >= steady_from)
    successor = replace(stage, learning_rate=observation.learning_rate)
    if observation.events:
        return replace(successor, name=DEGRADED, quiet=0, is_undisturbed=False)
    if stage.name == STABLE:
        # Drift does not end the stable stage. From then on each reused leaf is guarded by itself,
        # and the leaves that are still written exactly would speak for the others.
        return successor
    quiet = stage.quiet + 1 if within_drift and not rising else 0
    if quiet >= QUIET_WINDOWS and (stable_from is None or observation.step >= stable_from):
        return replace(successor, name=STABLE, quiet=quiet)
    return replace(successor, name=WARM, quiet=quiet)


def explain(
    before: Stage,
    after: Stage,
    observation: SaveObservation,
    tolerance_octaves: float,
    stable_from: int | None,
) -> str:
    """Return the reason for the stage of a save, in one sentence for people.

    Args:
        before: The stage of the previous save.
        after: The stage that ``advance`` has returned.
        observation: The signals of the save.
        tolerance_octaves: As in ``advance``.
        stable_from: As in ``advance``.
    """
    if observation.events:
        return f"exact: {', '.join(observation.events)}"
    if after.name == STABLE:
        beginning = (
            "" if before.name == STABLE else f", from this save on ({after.quiet} quiet saves)"
        )
        return f"stable: moments may be reused, each under its guard{beginning}"
    rate, last = observation.learning_rate, before.learning_rate
    drift = observation.drift_octaves
    if after.quiet >= QUIET_WINDOWS:
        return f"bounded: moments may be reused from step {stable_from} on"
    if after.quiet:
        return f"bounded: {after.quiet} of {QUIET_WINDOWS} quiet saves"
    if rate is not None and last is not None and rate > RISING * last:
        return f"bounded: the learning rate rises, from {last:.3g} to {rate:.3g}"
    if drift is None:
        return "bounded: no second moment that may be reused was compared with the save before yet"
    return f"bounded: second moments drift by {drift:.2g} octaves, at most {tolerance_octaves:g}"
