"""The roles of leaves: the weight, master, moments and step count of each parameter.

Roles follow from leaf paths, shapes and types alone. State that no reader knows makes the optimizer
of a parameter unknown: its moments are then not treated as Adam's. Names cannot distinguish
everything, since the state of AdaBelief looks like that of Adam. ``adam.law_violations`` on live
values does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.optimizer_state import dotted, optax_states, torch_states, zero_states
from deltacheck.policy.parameters import Roles
from deltacheck.policy.weight_matching import match_by_name, match_by_order

_FLOATS = ("float32", "bfloat16", "float16", "float64")


def find(
    specs: Mapping[str, LeafSpec], scalars: Mapping[str, object], order: Iterable[str] | None = None
) -> Roles:
    """Return the roles of the leaves of a state.

    Args:
        specs: The specs of all leaves; tied leaves appear once.
        scalars: The Python scalars of the tree, as ``tree.scalars`` returns them. They include
            torch's parameter groups.
        order: Leaf paths in the order of the tree (the values of ``tree.array_paths``); that of
            ``specs`` by default. Only torch states with integer keys depend on it: their weights
            are matched by shape, along the order of the groups' parameters, see ``prove``.
    """
    # The files in the tree of DeepSpeed look like states of torch, without the moments.
    states = zero_states(specs, scalars) or [*torch_states(specs, scalars), *optax_states(specs)]
    optimizer_paths = {path for state in states for path in state.paths()}
    # State of an optimizer that no reader lists, such as a schedule, is no part of the model
    # either.
    roots = tuple({state.root + "/" for state in states if state.root})
    model = [
        path
        for path in dict.fromkeys([*(order or ()), *specs])
        if path in specs
        and path not in optimizer_paths
        and not path.startswith(roots)
        and specs[path].dtype in _FLOATS
    ]
    with_name = [state for state in states if state.key]
    numbered = [state for state in states if not state.key]
    named_parameters, containers = match_by_name(with_name, specs, model)
    numbered_parameters, container = (
        match_by_order(numbered, specs, model) if numbered else ([], None)
    )
    # The container of numbered weights may be the root, whose name is empty, so None stands for no
    # container.
    containers |= {container} if container is not None else set()
    parameters = (*named_parameters, *numbered_parameters)
    masters = {parameter.master for parameter in parameters}
    weights = {
        path: specs[path].shape
        for path in model
        if path not in masters and any(dotted(path).startswith(c) for c in containers)
    }
    return Roles(parameters, weights)


def settle_alike(roles: Roles) -> Roles:
    """Settle parameters without a master whose weights can only be exchanged with equal ones.

    If every weight of a shape is trained in one group, the assignment by order may be a
    permutation, but each weight has the hyperparameters of its group.
    """
    trained = Counter(roles.weights.get(p.weight or "") for p in roles.parameters)
    weights = Counter(roles.weights.values())
    groups: dict[tuple[int, ...] | None, set[str | None]] = {}
    for p in roles.parameters:
        groups.setdefault(roles.weights.get(p.weight or ""), set()).add(p.group)
    alike = {
        shape
        for shape, names in groups.items()
        if shape is not None and len(names) == 1 and trained[shape] == weights[shape]
    }
    return replace(
        roles,
        parameters=tuple(
            replace(p, proven=True)
            if p.master is None and roles.weights.get(p.weight or "") in alike
            else p
            for p in roles.parameters
        ),
    )


class Finder:
    """A cache of ``find`` for successive saves of one run.

    It searches again if the leaves, the names of scalars or the parameters of a group differ from
    those of the previous save.
    """

    def __init__(self) -> None:
        self._cache: tuple[tuple[object, ...], Roles] | None = None

    def __call__(self, specs: Mapping[str, LeafSpec], scalars: Mapping[str, object]) -> Roles:
        """Return the roles of the leaves of a state."""
        # These are the only values of scalars that `find` reads; the others change at every step.
        groups = [value for path, value in scalars.items() if "/params/" in path]
        key = (list(specs), list(specs.values()), list(scalars), groups)
        if self._cache is None or self._cache[0] != key:
            self._cache = (key, settle_alike(find(specs, scalars)))
        return self._cache[1]


def prove(roles: Roles, is_cast: Callable[[str, str], bool]) -> Roles:
    """Settle the unproven parameters by content.

    If a guess fails, the other weights of its shape are tried. A parameter whose master fits no
    weight loses its weight. A parameter without a master stays unproven.

    Args:
        roles: The roles as ``find`` returns them.
        is_cast: A function of two paths, weight and master. It returns True if the weight has the
            shape of the master and holds its bits, cast to the type of the weight.
    """
    unproven = {
        p.name: p
        for p in roles.parameters
        if not p.proven and p.master is not None and p.weight is not None
    }
    confirmed = {name for name, p in unproven.items() if is_cast(str(p.weight), str(p.master))}
    # A weight that one parameter owns for certain is no candidate for another.
    assigned = {p.weight for p in roles.parameters if p.name in confirmed or p.name not in unproven}
    parameters = []
    for parameter in roles.parameters:
        if parameter.name in unproven:
            weight = parameter.weight if parameter.name in confirmed else None
            if weight is None:
                shape = roles.weights.get(str(parameter.weight))
                candidates = (
                    path for path, s in roles.weights.items() if s == shape and path not in assigned
                )
                weight = next(
                    (path for path in candidates if is_cast(path, str(parameter.master))), None
                )
            assigned.add(weight)
            parameter = replace(parameter, weight=weight, proven=weight is not None)
        parameters.append(parameter)
    return replace(roles, parameters=tuple(parameters))
