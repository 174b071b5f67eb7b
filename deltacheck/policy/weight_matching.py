"""Matching of optimizer states and weights, by name or by shape and order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.optimizer_state import MASTER_NAMES, ParameterState, dotted
from deltacheck.policy.parameters import Parameter

_NARROW = ("bfloat16", "float16")
# Copies of a model that no optimizer updates.
_COPIES = frozenset("ema average averaged swa teacher reference ref".split())


def match_by_name(
    states: list[ParameterState], specs: Mapping[str, LeafSpec], model: list[str]
) -> tuple[list[Parameter], set[str]]:
    """Match weights and masters whose path ends with the optimizer's name of the parameter.

    Args:
        states: The states of parameters with a name.
        specs: The specs of all leaves.
        model: The paths of all leaves outside of optimizers.

    Returns:
        The parameters with their weights, and the containers of these weights.
    """
    lengths = {state.key.count(".") + 1 for state in states}
    # The last names of a path -> (container, path). Indexed by ending, because a comparison of each
    # state with each path would take quadratic time.
    endings: dict[str, list[tuple[str, str]]] = {}
    for path in model:
        names = dotted(path).split(".")
        for length in (length for length in lengths if length <= len(names)):
            container = "".join(f"{name}." for name in names[:-length])
            endings.setdefault(".".join(names[-length:]), []).append((container, path))
    candidates = [
        {
            container: path
            for container, path in endings.get(state.key, ())
            if specs[path].shape == state.shape
        }
        for state in states
    ]
    # The model is the container that matches the most parameters. A single layer elsewhere may have
    # a matching name by chance.
    votes = Counter(container for paths in candidates for container in paths)
    parameters, containers = [], set()
    for state, paths in zip(states, candidates, strict=True):
        ranked = sorted(paths, key=lambda container: (-votes[container], container))
        masters = [
            c for c in ranked if _words(c) & MASTER_NAMES and specs[paths[c]].dtype == "float32"
        ]
        weights = [c for c in ranked if c not in masters and not _words(c) & _COPIES]
        weights = [c for c in weights if votes[c] == votes[weights[0]]]
        narrow = [c for c in weights if specs[paths[c]].dtype in _NARROW]
        master = state.parameter.master or (paths[masters[0]] if masters else None)
        proven = len(weights) == 1
        # Two copies of equal rank, one of them narrow: the float32 copy is the master.
        if master is None and len(weights) == 2 and len(narrow) == 1 and narrow != weights:
            wide = next(c for c in weights if c not in narrow)
            if specs[paths[wide]].dtype == "float32":
                master, weights = paths[wide], narrow
        weight = paths[weights[0]] if weights else None
        containers |= set(weights[:1])
        parameters.append(
            replace(state.parameter, weight=weight, master=master, proven=proven or weight is None)
        )
    return parameters, containers


def _words(container: str) -> set[str]:
    """Return the names in a dotted path, whole and in parts.

    So ``ema_params.`` is recognised as a copy, and ``master_params.`` as a container of masters.
    """
    names = [name for name in container.split(".") if name]
    return {*names, *(word for name in names for word in re.split(r"[_-]", name))}


def match_by_order(
    states: list[ParameterState], specs: Mapping[str, LeafSpec], model: list[str]
) -> tuple[list[Parameter], str | None]:
    """Match the weights of numbered parameters, shape by shape, in the order of both lists.

    The leaves of the model are compared with the parameters of the groups. The result is a guess
    that ``roles.prove`` settles by content.

    Args:
        states: The states of parameters without a name.
        specs: The specs of all leaves.
        model: The paths of all leaves outside of optimizers, in the order of the tree.

    Returns:
        The parameters with their weights, and the container of these weights, ``None`` if no
        container fits.
    """
    shapes = Counter(state.shape for state in states)
    containers: dict[str, list[str]] = {}
    for path in model:
        containers.setdefault(path.rpartition("/")[0], []).append(path)
    masters = {c for c in containers if _words(dotted(c)) & MASTER_NAMES}

    def fit(container: str) -> tuple[bool, int]:
        matches = Counter(specs[path].shape for path in containers[container]) & shapes
        return not _words(dotted(container)) & _COPIES, matches.total()

    model_container = max(
        (c for c in containers if c not in masters and fit(c)[1]), key=fit, default=None
    )
    if model_container is None:
        return [state.parameter for state in states], None
    weights = _assign_in_order(states, specs, containers[model_container])
    parameters = []
    for state in states:
        parameter, weight = state.parameter, weights.get(state.parameter.name)
        master = parameter.master
        if master is None and weight is not None:
            twins = (f"{c}/{weight.rpartition('/')[2]}" for c in masters)
            master = next(
                (
                    twin
                    for twin in twins
                    if twin in specs
                    and specs[twin].shape == state.shape
                    and specs[twin].dtype == "float32"
                ),
                None,
            )
        parameters.append(replace(parameter, weight=weight, master=master, proven=weight is None))
    return parameters, dotted(model_container) + "." if model_container else ""


def _assign_in_order(
    states: list[ParameterState], specs: Mapping[str, LeafSpec], leaves: list[str]
) -> dict[str, str]:
    """Return a weight for each parameter name: the next leaf of its shape, group by group."""
    queues: dict[tuple[str, str], list[ParameterState]] = {}
    for state in sorted(states, key=lambda state: state.place[1]):
        queues.setdefault((state.root, state.place[0]), []).append(state)
    weights: dict[str, str] = {}
    for path in leaves:
        # Only the head of each queue may match: groups keep the order of the model.
        queue = next((q for q in queues.values() if q and q[0].shape == specs[path].shape), None)
        if queue:
            weights[queue.pop(0).parameter.name] = path
    spare = [path for path in leaves if path not in weights.values()]
    # The orders differ for the rest, so any leaf of the right shape is as good a guess as another.
    for state in (state for queue in queues.values() for state in queue):
        fitting = [path for path in spare if specs[path].shape == state.shape]
        if fitting:
            weights[state.parameter.name] = fitting[0]
            spare.remove(fitting[0])
    return weights
