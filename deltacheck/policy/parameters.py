"""Records of the leaves and the hyperparameters that belong to one parameter."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from deltacheck.leaf.contracts import PeakRate

# Events after which the largest learning rate so far says nothing of the run that goes on.
_NEW_SCHEDULE = frozenset({"learning-rate", "optimizer"})
# After a resume, a rate that fell by more than this factor, and by more than this share of the
# peak, belongs to another schedule. The end of a cosine falls by less than the share.
_RESUMED_FACTOR, _RESUMED_SHARE = 2.0, 1 / 20


@dataclass(frozen=True, slots=True)
class Parameter:
    """The leaf paths of one parameter; ``None`` stands for a leaf that does not exist.

    Attributes:
        name: The place at which the optimizer keeps its state for this parameter.
        weight: The weight of the model.
        master: The float32 master of the weight.
        first: Adam's m.
        second: Adam's v.
        count: The step count, a leaf or a scalar.
        group: The prefix of its hyperparameters.
        proven: False if the weight was matched by shape and order, or to a master elsewhere.
            ``roles.prove`` settles it by content.
        paired: True if the state is that of ``wide_weight``: it holds it, or names it, or its law
            shows it (``roles.pair``). False: it is a guess, and no rate is that of the leaf.
        rivals: Other groups that may be the one of ``wide_weight``. The unit of its error is the
            smallest rate of all.
        adam: True if its state is a mean of gradients, a mean of their squares, and nothing else
            but a count and a master.
        unknown: The paths of any other state.
    """

    name: str
    weight: str | None = None
    master: str | None = None
    first: str | None = None
    second: str | None = None
    count: str | None = None
    group: str | None = None
    proven: bool = True
    paired: bool = True
    rivals: tuple[str, ...] = ()
    adam: bool = False
    unknown: tuple[str, ...] = ()

    @property
    def wide_weight(self) -> str | None:
        """The leaf that the optimizer updates: the master, or the weight if there is none."""
        return self.weight if self.master is None else self.master

    @property
    def leaves(self) -> list[str]:
        """The weight, the master and the moments, those that exist."""
        paths = (self.weight, self.master, self.first, self.second)
        return [path for path in paths if path is not None]


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of all leaves of a state.

    Attributes:
        parameters: The parameters that an optimizer updates.
        weights: Path and shape of every leaf of the model, frozen leaves and buffers included.
        others: Path and shape of every leaf outside of optimizers.
    """

    parameters: tuple[Parameter, ...] = ()
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self) -> dict[str, tuple[str, Parameter]]:
        """Return the role and the parameter of each leaf path.

        Roles are named as in ``profile.record.ROLES``. Leaves that are not in the result have the
        role ``other``. A weight without an optimizer is a parameter by itself. A leaf that several
        parameters share, such as a count, belongs to the first of them.
        """
        by_path: dict[str, tuple[str, Parameter]] = {}
        for parameter in self.parameters:
            for path, role in (
                (parameter.weight, "weight"),
                (parameter.master, "master"),
                (parameter.first, "first_moment"),
                (parameter.second, "second_moment"),
                (parameter.count, "count"),
            ):
                if path is not None:
                    by_path.setdefault(path, (role, parameter))
        # Frozen weights and buffers: they have a role, but no optimizer.
        for path in self.weights:
            by_path.setdefault(path, ("weight", Parameter(path, weight=path)))
        return by_path


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The constants of one parameter group; ``None`` if the state does not hold a value."""

    lr: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None


def hyperparameters(roles: Roles, scalars: Mapping[str, object]) -> dict[str, Hyperparameters]:
    """Return the hyperparameters of each parameter group, by the prefix ``Parameter.group``.

    Args:
        roles: The roles of the state.
        scalars: Path and value of the tree's Python scalars *and* of its leaves of one element.
            Capturable torch optimizers and optax's ``inject_hyperparams`` keep rates as arrays. A
            state of optax without ``inject_hyperparams`` holds no rates.
    """

    def value(group: str, *names: str) -> float | None:
        for name in names:
            # Nested state dicts have slashes, flattened ones have dots.
            for path in (f"{group}/{name}", f"{group}.{name}"):
                number = scalars.get(path)
                if isinstance(number, int | float) or (
                    number is not None and hasattr(number, "__float__")
                ):
                    return float(number)
        return None

    groups = sorted({p.group for p in roles.parameters if p.group is not None})
    return {
        group: Hyperparameters(
            value(group, "lr", "learning_rate"),
            value(group, "betas/0", "b1"),
            value(group, "betas/1", "b2"),
            value(group, "eps"),
        )
        for group in groups
    }


def peak_rates(
    peaks: Mapping[str, PeakRate],
    rates: Mapping[str, float],
    counts: Mapping[str, int],
    events: Collection[str],
    *,
    is_resumed: bool,
) -> dict[str, PeakRate]:
    """Return the course of each group's learning rate at a save: a pure fold.

    A rising rate raises the peak. A new optimizer, or a rate that leaves its schedule, begins a new
    one, so that an earlier peak does not coarsen what follows at a small rate.

    Args:
        peaks: The course at the previous save, or in the manifest of the restored step.
        rates: The rate of each group, of those that have one.
        counts: The largest count of updates in each group, else the step.
        events: The names of the events at this save.
        is_resumed: True at the first save of a process. No event can be seen at it.
    """
    earlier = {} if _NEW_SCHEDULE & set(events) else peaks
    # This process may hold a part of the groups only.
    course = dict(earlier)
    for group, rate in rates.items():
        if not 0 <= rate < math.inf:
            continue
        count = counts.get(group, 0)
        before = earlier.get(group)
        if before is None or count < before.count or (is_resumed and _has_left(before, rate)):
            course[group] = PeakRate(rate, rate, count)
        else:
            course[group] = PeakRate(max(before.peak, rate), rate, count)
    return course


def _has_left(before: PeakRate, rate: float) -> bool:
    """Return True if a rate is too far below that of the restored step to be of its schedule."""
    least = before.newest / _RESUMED_FACTOR
    return least - rate > _RESUMED_SHARE * before.peak
