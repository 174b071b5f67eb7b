"""Matching of optimizer states and weights, by name or by shape and order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    candidates = _candidates(states, specs, model)
    ranks = _Ranks(states)
    for state, paths in zip(states, candidates, strict=True):
        for container in paths:
            ranks.matches[state.root, container] += 1
    parameters, containers = [], set[str]()
    for state, paths in zip(states, candidates, strict=True):
        parameter, used = _named(state, paths, specs, ranks)
        parameters.append(parameter)
        containers |= used
    return parameters, containers


def _candidates(
    states: list[ParameterState], specs: Mapping[str, LeafSpec], model: list[str]
) -> list[dict[str, str]]:
    """Return the leaves of each state's name and shape, by their container."""
    lengths = {state.key.count(".") + 1 for state in states}
    # The last names of a path -> (container, path). Indexed by ending, because a comparison of each
    # state with each path would take quadratic time.
    endings: dict[str, list[tuple[str, str]]] = {}
    for path in model:
        names = dotted(path).split(".")
        for length in (length for length in lengths if length <= len(names)):
            container = "".join(f"{name}." for name in names[:-length])
            endings.setdefault(".".join(names[-length:]), []).append((container, path))
    return [
        {
            container: path
            for container, path in endings.get(state.key, ())
            if specs[path].shape == state.shape
        }
        for state in states
    ]


def _named(
    state: ParameterState, paths: Mapping[str, str], specs: Mapping[str, LeafSpec], ranks: _Ranks
) -> tuple[Parameter, set[str]]:
    """Return the parameter of a state whose weight and master are among some paths.

    Args:
        state: The state.
        paths: Container -> the path in it that ends with the name of the parameter.
        specs: The specs of all leaves.
        ranks: The order of the containers.

    Returns:
        The parameter, and the container of its weight.
    """
    weights, masters = _best_copies(state.root, paths, specs, ranks)
    narrow = [c for c in weights if specs[paths[c]].dtype in _NARROW]
    # A wide copy of equal rank may be a master or an average, whatever it is called.
    weights = [*narrow, *(c for c in weights if c not in narrow)]
    master = state.parameter.master or (paths[masters[0]] if masters else None)
    is_owned = state.parameter.master is not None
    proven = len(weights) == 1 and (is_owned or master is None)
    paired = is_owned or len(masters or weights) == 1
    # Two copies of equal rank, one of them narrow: the float32 copy is the master.
    if master is None and len(weights) == 2 and len(narrow) == 1:
        wide = weights[1]
        if specs[paths[wide]].dtype == "float32":
            master, weights = paths[wide], narrow
    weight = paths[weights[0]] if weights else None
    proven = proven or weight is None
    parameter = replace(state.parameter, weight=weight, master=master, proven=proven, paired=paired)
    return parameter, set(weights[:1])


def _best_copies(
    root: str, paths: Mapping[str, str], specs: Mapping[str, LeafSpec], ranks: _Ranks
) -> tuple[list[str], list[str]]:
    """Return the containers of weights and of masters that suit an optimizer best."""
    models = [c for c in paths if not _words(c) & _COPIES]
    masters = [c for c in models if _words(c) & MASTER_NAMES and specs[paths[c]].dtype == "float32"]
    weights = [c for c in models if c not in masters]
    return ranks.best(root, weights), ranks.best(root, masters)


class _Ranks:
    """The order in which containers are considered for the states of an optimizer.

    The model is the container that matches all states, else the nearest one, else the one that
    matches the most. A single layer elsewhere may have a matching name by chance, and two models of
    one architecture match the states of both optimizers.
    """

    def __init__(self, states: list[ParameterState]) -> None:
        self._states = Counter(state.root for state in states)
        words = {root: _words(dotted(root)) for root in self._states}
        common = Counter(word for names in words.values() for word in names)
        # Words that tell optimizers apart, as in "actor_optimizer" and "critic_optimizer".
        self._marks = {
            root: {word for word in names if common[word] < len(words)}
            for root, names in words.items()
        }
        # (root, container) -> the number of states that it matches
        self.matches: Counter[tuple[str, str]] = Counter()

    def rank(self, root: str, container: str) -> tuple[bool, int, int, int]:
        """Return the rank of a container for the states of an optimizer; the largest is best."""
        names, prefix = container.removesuffix(".").split("."), dotted(root).split(".")
        shared = next(
            (i for i, pair in enumerate(zip(names, prefix, strict=False)) if pair[0] != pair[1]),
            min(len(names), len(prefix)),
        )
        words, matches = _words(container), self.matches[root, container]
        foreign_marks = set().union(*self._marks.values()) - self._marks[root]
        marks = len(words & self._marks[root]) - len(words & foreign_marks)
        return matches == self._states[root], shared, marks, matches

    def best(self, root: str, containers: Iterable[str]) -> list[str]:
        """Return the containers of the highest rank, sorted by name."""
        ranked = {container: self.rank(root, container) for container in containers}
        highest = max(ranked.values(), default=None)
        return sorted(container for container, rank in ranked.items() if rank == highest)


def _words(container: str) -> set[str]:
    """Return the names in a dotted path, whole and in parts.

    So ``ema_params.`` is recognised as a copy, and ``master_params.`` as a container of masters.
    """
    names = [name for name in container.split(".") if name]
    return {*names, *(word for name in names for word in re.split(r"[_-]", name))}


def match_by_order(
    states: list[ParameterState], specs: Mapping[str, LeafSpec], model: list[str]
) -> tuple[list[Parameter], set[str]]:
    """Match the weights of numbered parameters, shape by shape, in the order of both lists.

    The leaves of the model are compared with the parameters of the groups. The result is a guess
    that ``roles.pair`` and ``roles.prove`` settle by content.

    Args:
        states: The states of parameters without a name.
        specs: The specs of all leaves.
        model: The paths of all leaves outside of optimizers, in the order of the tree.

    Returns:
        The parameters with their weights, and the containers of these weights. The container of the
        root is empty.
    """
    containers: dict[str, list[str]] = {}
    for path in model:
        containers.setdefault(path.rpartition("/")[0], []).append(path)
    words = {container: _words(dotted(container)) for container in containers}
    models = [c for c in containers if not words[c] & _COPIES]
    masters = [c for c in models if words[c] & MASTER_NAMES]
    ranks = _Ranks(states)
    pools = _pools(states, specs, containers, models, masters, ranks)
    parameters: dict[str, Parameter] = {}
    for pool, members in pools.items():
        if pool is None:
            parameters |= {s.parameter.name: replace(s.parameter, paired=False) for s in members}
            continue
        weights = _assign_in_order(members, specs, containers[pool])
        for state in members:
            weight, master = weights.get(state.parameter.name), state.parameter.master
            paired = master is not None
            if master is None and weight is not None:
                master = _twin(state, weight, masters, specs, ranks)
            parameters[state.parameter.name] = replace(
                state.parameter,
                weight=weight,
                master=master,
                proven=weight is None,
                paired=paired,
            )
        parameters |= _with_rivals(members, parameters, specs, containers)
    used = {f"{dotted(pool)}." if pool else "" for pool in pools if pool is not None}
    return [parameters[state.parameter.name] for state in states], used


def _pools(
    states: list[ParameterState],
    specs: Mapping[str, LeafSpec],
    containers: Mapping[str, list[str]],
    models: list[str],
    masters: list[str],
    ranks: _Ranks,
) -> dict[str | None, list[ParameterState]]:
    """Return the states by the container of weights that suits their optimizer best.

    Args:
        states: The states of parameters without a name.
        specs: The specs of all leaves.
        containers: Container -> the leaves in it.
        models: The containers that are no copies.
        masters: Those of them that have the name of masters.
        ranks: The order of the containers; the matches of these states are added.
    """
    roots: dict[str, list[ParameterState]] = {}
    for state in states:
        roots.setdefault(state.root, []).append(state)
    pools: dict[str | None, list[ParameterState]] = {}
    for root, members in roots.items():
        shapes = Counter(state.shape for state in members)
        for container, paths in containers.items():
            matches = Counter(specs[path].shape for path in paths) & shapes
            ranks.matches[root, dotted(container)] = matches.total()
        fitting = [c for c in containers if c not in masters and ranks.matches[root, dotted(c)]]

        def rank(container: str, root: str = root) -> tuple[bool, tuple[bool, int, int, int], bool]:
            is_narrow = any(specs[path].dtype in _NARROW for path in containers[container])
            return container in models, ranks.rank(root, dotted(container)), is_narrow

        pools.setdefault(max(fitting, key=rank, default=None), []).extend(members)
    return pools


def _twin(
    state: ParameterState,
    weight: str,
    masters: Iterable[str],
    specs: Mapping[str, LeafSpec],
    ranks: _Ranks,
) -> str | None:
    """Return the float32 leaf with the name of a weight in the best container of masters."""
    twins: dict[str, str] = {}
    for container in masters:
        twin = f"{container}/{weight.rpartition('/')[2]}"
        spec = specs.get(twin)
        if spec is not None and (spec.shape, spec.dtype) == (state.shape, "float32"):
            twins[dotted(container)] = twin
    best = ranks.best(state.root, twins)
    return twins[best[0]] if len(best) == 1 else None


def _with_rivals(
    states: list[ParameterState],
    parameters: Mapping[str, Parameter],
    specs: Mapping[str, LeafSpec],
    containers: Mapping[str, list[str]],
) -> dict[str, Parameter]:
    """Pair the states of each shape with its leaves, if every leaf is that of one of the states.

    Which leaf is whose is a guess, but each has the rate of one of the groups. If a leaf may be
    frozen, no state is paired with one.
    """
    shapes: dict[tuple[int, ...], list[Parameter]] = {}
    for state in states:
        parameter = parameters[state.parameter.name]
        if not parameter.paired:
            shapes.setdefault(state.shape, []).append(parameter)
    result: dict[str, Parameter] = {}
    for shape, members in shapes.items():
        if not _are_all_leaves(members, shape, specs, containers):
            continue
        groups = {parameter.group for parameter in members}
        for p in members:
            rivals = tuple(sorted(group or "" for group in groups - {p.group}))
            result[p.name] = replace(p, paired=True, rivals=rivals)
    return result


def _are_all_leaves(
    parameters: Sequence[Parameter],
    shape: tuple[int, ...],
    specs: Mapping[str, LeafSpec],
    containers: Mapping[str, list[str]],
) -> bool:
    """Return True if the leaves of some parameters are all leaves of their shape beside them."""
    leaves = {parameter.wide_weight for parameter in parameters}
    if None in leaves or not all(parameter.adam for parameter in parameters):
        return False
    folders = {leaf.rpartition("/")[0] for leaf in leaves if leaf is not None}
    candidates = sum(specs[path].shape == shape for c in folders for path in containers[c])
    return len(leaves) == candidates


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
