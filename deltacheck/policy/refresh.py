"""The saves at which reused moments are written again, spread over the leaves.

All pairs of moments become reusable at the same save. If each were kept until its largest age, one
save would write all of them again. In a young run, that would be every second save. A period from
one write of a pair to the next is therefore divided among the pairs by their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.decide import betas, is_treatable, reusable_steps
from deltacheck.policy.parameters import Hyperparameters, Parameter, Roles
from deltacheck.policy.presets import Policy
from deltacheck.policy.stage import STABLE


def places(sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the place of each pair in a period, from 0 to 1: equal parts have about equal bytes.

    The order is that of a hash, so that layers that drift alike are apart. It depends on names and
    sizes only: every process that knows the same pairs decides alike.

    Args:
        sizes: The number of elements of each pair, by name.
    """
    total, offset, result = sum(sizes.values()), 0, {}
    for name in sorted(sizes, key=lambda name: (xxhash.xxh3_64_intdigest(name.encode()), name)):
        result[name] = (offset + sizes[name] / 2) / total if total else 0.0
        offset += sizes[name]
    return result


def turns(roles: Roles, specs: Mapping[str, LeafSpec]) -> dict[str, float]:
    """Return the place of each pair that may be reused, by the name of its parameter.

    It hashes and sorts all names, so callers keep the result for as long as the roles stay.

    Args:
        roles: The roles of all leaves.
        specs: The specs of all leaves.
    """
    return places(
        {
            p.name: math.prod(specs[str(p.second)].shape)
            for p in roles.parameters
            if p.adam and is_treatable(specs.get(p.second or ""), "float32")
        }
    )


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock that advances by 1 in the time from one write of a pair to the next.

    Attributes:
        phase: The time.
        count: The step count of the optimizer at the last save, ``None`` before the first.
    """

    phase: float = 0.0
    count: int | None = None

    def advance(self, count: int, max_age: int) -> Clock:
        """Return the clock at a save.

        Args:
            count: The step count of the optimizer.
            max_age: The largest age of a pair, in updates. The next write is at the first save
                that may not reuse it any more.
        """
        passed = 0 if self.count is None else count - self.count
        if passed <= 0:
            return Clock(self.phase, count)
        return Clock(self.phase + 1 / (max_age // passed + 1), count)

    def passes(self, successor: Clock, place: float) -> bool:
        """Return True if a pair at this place is to be written between two times."""
        return math.floor(successor.phase - place) > math.floor(self.phase - place)


def due(
    policy: Policy,
    stage: str,
    roles: Roles,
    places_of: Mapping[str, float],
    rates: Mapping[str, Hyperparameters],
    counts: Mapping[str, int | None],
    clocks: Mapping[str, Clock],
) -> tuple[dict[str, Clock], frozenset[str]]:
    """Return the clocks at a save, and the names of the parameters whose turn it is.

    Args:
        policy: The policy of the save.
        stage: The stage of the run, a constant of ``policy.stage``.
        roles: The roles of all leaves.
        places_of: The place of each pair, as ``turns`` returns it.
        rates: The constants of each parameter group.
        counts: The step count of each parameter, by name.
        clocks: The clock of each parameter group at the last save.
    """
    hidden = policy.hidden
    if hidden is None or stage != STABLE:
        return dict(clocks), frozenset()
    if hidden.moments != "reused":
        return {}, frozenset()
    by_group: dict[str, list[Parameter]] = {}
    for p in roles.parameters:
        if p.name in places_of:
            by_group.setdefault(p.group or "", []).append(p)
    clocks_now, names = {}, set()
    for group, members in by_group.items():
        # A frozen parameter does not count; the others have the same count.
        count = max(counts.get(p.name) or 0 for p in members)
        constants = betas(hidden, rates[group])
        age = 0 if constants is None else reusable_steps(hidden, count or None, constants[1])
        clock = clocks.get(group, Clock())
        clocks_now[group] = clock.advance(count, age)
        names |= {p.name for p in members if clock.passes(clocks_now[group], places_of[p.name])}
    return clocks_now, frozenset(names)
