"""The roles of leaves: the weight, master, moments and step count of each parameter.

Roles follow from leaf paths, shapes and types alone. State that no reader knows makes the optimizer
of a parameter unknown: its moments are then not treated as Adam's. Names cannot distinguish
everything, since the state of AdaBelief looks like that of Adam. ``adam.law_violations`` on live
values does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.optimizer_state import (
    ParameterState,
    dotted,
    optax_states,
    torch_states,
    zero_states,
)
from deltacheck.policy.parameters import Parameter, Roles
from deltacheck.policy.weight_matching import match_by_name, match_by_order

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_NAMES = re.compile(r"/param(s|_names)/")  # of the parameters of torch's groups
# The least correlation that shows that a state has moved a leaf. Unrelated leaves have one of at
# most a few hundredths, or more if their gradients have a structure in common.
LEAST_CORRELATION = 0.2


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
    model = _model_paths(states, specs, order or ())
    with_name = [state for state in states if state.key]
    numbered = [state for state in states if not state.key]
    named_parameters, containers = match_by_name(with_name, specs, model)
    numbered_parameters, folders = match_by_order(numbered, specs, model)
    containers |= folders
    parameters = (*named_parameters, *numbered_parameters)
    masters = {parameter.master for parameter in parameters}
    weights = {
        path: specs[path].shape
        for path in model
        if path not in masters and any(dotted(path).startswith(c) for c in containers)
    }
    # A leaf that two states claim is that of one of them at most.
    claims = Counter(p.wide_weight for p in parameters)
    return Roles(
        tuple(replace(p, paired=p.paired and claims[p.wide_weight] == 1) for p in parameters),
        weights,
        {path: specs[path].shape for path in model} if states else {},
    )


def _model_paths(
    states: Iterable[ParameterState], specs: Mapping[str, LeafSpec], order: Iterable[str]
) -> list[str]:
    """Return the floating-point leaves outside of optimizers, those of ``order`` first."""
    optimizer_paths = {path for state in states for path in state.paths()}
    # State of an optimizer that no reader lists, such as a schedule, is no part of the model
    # either.
    roots = tuple({state.root + "/" for state in states if state.root})
    return [
        path
        for path in dict.fromkeys([*order, *specs])
        if path in specs
        and path not in optimizer_paths
        and not path.startswith(roots)
        and specs[path].dtype in _FLOATS
    ]


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
        groups = [value for path, value in scalars.items() if _NAMES.search(path)]
        key = (list(specs), list(specs.values()), list(scalars), groups)
        if self._cache is None or self._cache[0] != key:
            self._cache = (key, find(specs, scalars))
        return self._cache[1]


def pair(roles: Roles, evidence: Mapping[tuple[str, str], float]) -> Roles:
    """Pair states with the leaves that they have moved since the last save.

    States of which each has moved one leaf most, and the leaf no other state more, are those of the
    leaf. Guesses of the others stay guesses.

    Args:
        roles: The roles as ``find`` returns them.
        evidence: (name of the parameter, leaf) -> the correlation of the leaf's change with the
            update of the state, of those that are as large as the rate of the state.
    """
    mutual = _mutual(roles, evidence)
    paired_leaves, groups = set(mutual.values()), {p.name: p.group or "" for p in roles.parameters}
    parameters = []
    for p in roles.parameters:
        if p.name in mutual:
            leaf = mutual[p.name]
            least = evidence[p.name, leaf] / 2
            similar_groups = {
                groups[n] for (n, path), c in evidence.items() if path == leaf and c >= least
            }
            rivals = tuple(sorted(similar_groups - {p.group or ""}))
            p = _moving(replace(p, paired=True, rivals=rivals), leaf, roles)
        elif p.wide_weight in paired_leaves:
            p = replace(p, weight=None, master=None, proven=True, paired=False)
        parameters.append(p)
    return replace(roles, parameters=tuple(parameters))


def _mutual(roles: Roles, evidence: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """Return the leaf of each state that has moved it most, and that no other state moved more."""
    leaf_of: dict[str, str] = {}
    name_of: dict[str, str] = {}
    for (name, leaf), correlation in sorted(evidence.items(), key=lambda item: item[1]):
        if correlation >= LEAST_CORRELATION:
            leaf_of[name], name_of[leaf] = leaf, name
    mutual = {name: leaf for name, leaf in leaf_of.items() if name_of[leaf] == name}
    # A guess by order is one of all states of a shape together, so it is replaced as a whole.
    unpaired = [p for p in roles.parameters if p.rivals and p.name not in mutual]
    shapes = {roles.weights.get(p.weight or "") for p in unpaired}
    return {
        p.name: mutual[p.name]
        for p in roles.parameters
        if p.name in mutual and not (p.rivals and roles.weights.get(p.weight or "") in shapes)
    }


def _moving(parameter: Parameter, leaf: str, roles: Roles) -> Parameter:
    """Return a parameter with a leaf that its state moves, and a guess of its narrow weight."""
    if leaf == parameter.wide_weight:
        return parameter
    if leaf in roles.weights:
        return replace(parameter, weight=leaf, master=None, proven=True)
    name, shape = leaf.rpartition("/")[2], roles.others[leaf]
    twins = (path for path, s in roles.weights.items() if s == shape and path.endswith(name))
    return replace(parameter, weight=next(twins, parameter.weight), master=leaf, proven=False)


def prove(roles: Roles, is_cast: Callable[[str, str], bool]) -> Roles:
    """Settle the unproven parameters by content.

    If a guess fails, the other leaves of its shape are tried: weights for the master, and then,
    unless the state holds the master, masters for the weight. A leaf that is called a master may be
    another copy, such as an average. A parameter whose master fits no weight loses its weight, and
    is not paired. A parameter without a master stays unproven.

    Args:
        roles: The roles as ``find`` returns them.
        is_cast: A function of two paths, weight and master. It returns True if the weight is
            narrow, has the shape of the master and holds its bits, cast to the weight's type.
    """
    unproven = {p.name for p in roles.parameters if not p.proven and p.master is not None}
    confirmed = {
        p.name
        for p in roles.parameters
        if p.name in unproven and p.weight is not None and is_cast(p.weight, str(p.master))
    }
    # A weight that one parameter owns for certain is no candidate for another.
    assigned = {p.weight for p in roles.parameters if p.name in confirmed or p.name not in unproven}
    parameters = []
    for parameter in roles.parameters:
        if parameter.name in confirmed:
            parameter = replace(parameter, proven=True)
        elif parameter.name in unproven:
            parameter = _searched(parameter, roles, assigned, is_cast)
            assigned.add(parameter.weight)
        parameters.append(parameter)
    return replace(roles, parameters=tuple(parameters))


def _searched(
    parameter: Parameter,
    roles: Roles,
    assigned: set[str | None],
    is_cast: Callable[[str, str], bool],
) -> Parameter:
    """Return a parameter whose guess has failed, with the weight and master that fit, if any do."""
    masters = {p.master for p in roles.parameters}
    weight, master = _weight_of(parameter, roles, masters | assigned, is_cast), parameter.master
    is_owned = str(master).startswith(parameter.name)
    if weight is None and not is_owned:
        copies = _masters_of(parameter, roles, masters, is_cast)
        if len(copies) == 1:
            weight, master = parameter.weight, copies[0]
    return replace(
        parameter,
        master=master,
        weight=weight,
        proven=weight is not None,
        paired=parameter.paired and (weight is not None or is_owned),
    )


def _weight_of(
    parameter: Parameter,
    roles: Roles,
    excluded: Container[str | None],
    is_cast: Callable[[str, str], bool],
) -> str | None:
    """Return the first leaf of a parameter's shape that holds the bits of its master, cast."""
    shape = roles.others.get(parameter.weight or str(parameter.master))
    for path in {**roles.weights, **roles.others}:
        if (
            roles.others[path] == shape
            and path not in excluded
            and is_cast(path, str(parameter.master))
        ):
            return path
    return None


def _masters_of(
    parameter: Parameter,
    roles: Roles,
    excluded: Container[str | None],
    is_cast: Callable[[str, str], bool],
) -> list[str]:
    """Return the leaves with the name of a parameter's weight whose cast it holds."""
    name = str(parameter.weight).rpartition("/")[2]
    return [
        path
        for path in roles.others
        if path.endswith(f"/{name}")
        and path not in excluded
        and is_cast(str(parameter.weight), path)
    ]
