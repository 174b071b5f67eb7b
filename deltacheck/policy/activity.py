"""Detection of the events that step counts show: a new optimizer, frozen and unfrozen parameters.

Every process that gets the same counts decides alike: ``activity, events =
activity.advance(...)`` is a pure fold.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from deltacheck.policy.events import Event

# A parameter is frozen, or trained again, if it behaved otherwise at this many saves in a row. An
# expert that few tokens reach stands still at random and has no such past.
STEADY_SAVES = 3
# Share of the elements whose parameters must change for an event. The guard of reuse judges each
# leaf by itself, so a few parameters need no exact saves of all others.
LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Activity:
    """The state of the fold over the step counts of all parameters.

    Attributes:
        counts: The last step count of each parameter, by name.
        streaks: The number of saves in a row at which the count advanced, negative if it stood
            still.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    streaks: Mapping[str, int] = field(default_factory=dict)

    def advance(
        self, step: int, counts: Mapping[str, int], sizes: Mapping[str, int]
    ) -> tuple[Activity, tuple[Event, ...]]:
        """Return the activity with the counts of a save added, and the events that they show.

        Args:
            step: The step that is saved.
            counts: The step count of each parameter whose optimizer keeps one, by name.
            sizes: The number of elements of each parameter, by name.
        """
        common = [name for name in counts if name in self.counts]
        if any(counts[name] < self.counts[name] for name in common):
            # Nothing that was learned about the previous optimizer describes this one.
            return Activity(dict(counts)), (Event(step, "optimizer"),)
        advanced = {name for name in common if counts[name] > self.counts[name]}
        if not advanced:
            # No update since the last save says nothing about single parameters.
            return Activity(dict(counts), self.streaks), ()
        before = {name: self.streaks.get(name, 0) for name in common}
        # Positive while updates come, negative while none do.
        streaks = {
            name: max(before[name], 0) + 1 if name in advanced else min(before[name], 0) - 1
            for name in common
        }
        total = sum(sizes.get(name, 0) for name in common)
        events = []
        for what, names in _turned(before, advanced).items():
            elements = sum(sizes.get(name, 0) for name in names)
            if elements and elements >= LEAST_SHARE * total:
                events.append(Event(step, what, elements / total))
        return Activity(dict(counts), streaks), tuple(events)


def _turned(streaks: Mapping[str, int], advanced: Container[str]) -> dict[str, list[str]]:
    """Return the parameters that now do the opposite of what they have done steadily."""
    return {
        "frozen": [n for n, s in streaks.items() if s >= STEADY_SAVES and n not in advanced],
        "unfrozen": [n for n, s in streaks.items() if s <= -STEADY_SAVES and n in advanced],
    }
