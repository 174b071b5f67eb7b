"""Records of the leaves and the hyperparameters that belong to one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        proven: False if the weight was matched by shape and order only. ``roles.prove`` settles it
            by content.
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
    adam: bool = False
    unknown: tuple[str, ...] = ()

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
    """

    parameters: tuple[Parameter, ...] = ()
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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
