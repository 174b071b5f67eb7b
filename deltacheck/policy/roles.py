"""Which leaves belong to one parameter: its weight, fp32 master, Adam moments and step count, told
from leaf paths alone.

Known are the state dicts of torch optimizers (``state/<index or name>/exp_avg``, and the flattened
``state.<name>.exp_avg``) and optax's states (``mu/<path>``, ``nu/<path>``, ``count``). Whatever
else an optimizer keeps for each parameter makes it unknown: its moments are then not taken for
Adam's. Names cannot tell everything: AdaBelief's state looks like Adam's. ``adam.law_violations``
on live values does.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import escape_key

_FLOATS, _NARROW = ("float32", "bfloat16", "float16", "float64"), ("bfloat16", "float16")
_MASTER = frozenset(
    "master masters master_param master_params master_weight master_weights fp32 fp32_param"
    " fp32_params params_fp32 param_fp32".split()
)
_COPIES = frozenset(
    "ema average averaged swa teacher reference ref".split()
)  # of a model, that no optimizer steps
_WRAPPERS = re.compile(
    r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\."
)  # that torch puts into names


@dataclass(frozen=True, slots=True)
class Parameter:
    """Leaf paths of one parameter; ``None`` where there is no such leaf.

    ``name``: where the optimizer keeps it. ``count``: path of the step count, a leaf or a scalar.
    ``group``: prefix of its hyperparameters. ``proven``: ``False`` where the weight was found by
    shape and order; ``prove`` settles it by content. ``adam``: its state is a mean of gradients,
    one of their squares, and nothing else but a count and a master. ``unknown``: paths of what else
    there is.
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


@dataclass(frozen=True, slots=True)
class Roles:
    """``parameters``: those that an optimizer steps. ``weights``: path -> shape of every leaf of
    the model, frozen ones and buffers too.
    """

    parameters: tuple[Parameter, ...] = ()
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self) -> dict[str, tuple[str, Parameter]]:
        """Leaf path -> its role, as ``profile.record.ROLES`` names them, and its parameter; leaves
        that are not here have role ``other``.

        A weight without an optimizer is a parameter by itself. A leaf that several parameters share
        (a count) is told with the first.
        """
        found: dict[str, tuple[str, Parameter]] = {}
        for parameter in self.parameters:
            for path, role in (
                (parameter.weight, "weight"),
                (parameter.master, "master"),
                (parameter.first, "first_moment"),
                (parameter.second, "second_moment"),
                (parameter.count, "count"),
            ):
                if path is not None:
                    found.setdefault(path, (role, parameter))
        for path in self.weights:
            found.setdefault(path, ("weight", Parameter(path, weight=path)))
        return found


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Of one parameter group; ``None`` where the state does not tell."""

    lr: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None


def hyperparameters(roles: Roles, scalars: Mapping[str, object]) -> dict[str, Hyperparameters]:
    """What the state says of each parameter group: its prefix (``Parameter.group``) -> values.

    ``scalars``: path -> value of the tree's Python scalars *and* of its leaves of one element:
    capturable torch optimizers and optax's ``inject_hyperparams`` keep rates as arrays. optax
    without ``inject_hyperparams`` tells nothing.
    """

    def value(group: str, *names: str) -> float | None:
        for name in names:
            for path in (f"{group}/{name}", f"{group}.{name}"):
                found = scalars.get(path)
                if isinstance(found, int | float) or (
                    found is not None and hasattr(found, "__float__")
                ):
                    return float(found)
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


def find(
    specs: Mapping[str, LeafSpec], scalars: Mapping[str, object], order: Iterable[str] | None = None
) -> Roles:
    """The parameters of a state.

    ``specs``: all leaves, ties once. ``scalars``: its Python scalars, as ``tree.scalars`` gives
    them; torch's parameter groups are there. ``order``: leaf paths in the order of the tree (the
    values of ``tree.array_paths``); without it, that of ``specs``. Only torch states with integer
    indexes need it: their weights are found by shape, along the order of the groups' parameters;
    see ``prove``.
    """
    states = [*_torch_states(specs, scalars), *_optax_states(specs)]
    held = {path for state in states for path in state.paths()}
    roots = tuple({state.root + "/" for state in states if state.root})
    model = [
        p
        for p in dict.fromkeys([*(order or ()), *specs])
        if p in specs and p not in held and not p.startswith(roots)
    ]
    model = [path for path in model if specs[path].dtype in _FLOATS]
    named, indexed = [s for s in states if s.key], [s for s in states if not s.key]
    parameters, containers = _by_name(named, specs, model)
    more, container = _by_order(indexed, specs, model) if indexed else ([], None)
    containers |= {container} if container is not None else set()
    weights = {
        path: specs[path].shape
        for path in model
        if any(_dotted(path).startswith(c) for c in containers)
    }
    masters = {parameter.master for parameter in (*parameters, *more)}
    return Roles(
        (*parameters, *more),
        {path: shape for path, shape in weights.items() if path not in masters},
    )


class Finder:
    """``find`` for save after save: looks again where leaves, names of scalars, or whose parameters
    a group has are others than before.
    """

    def __init__(self) -> None:
        self._found: tuple[tuple[object, ...], Roles] | None = None

    def __call__(self, specs: Mapping[str, LeafSpec], scalars: Mapping[str, object]) -> Roles:
        groups = [
            value for path, value in scalars.items() if "/params/" in path
        ]  # all values that `find` reads
        asked = (list(specs), list(specs.values()), list(scalars), groups)
        if self._found is None or self._found[0] != asked:
            self._found = (asked, find(specs, scalars))
        return self._found[1]


def prove(roles: Roles, is_cast: Callable[[str, str], bool]) -> Roles:
    """Settle the unproven parameters by content.

    ``is_cast(weight, master)``: whether the leaf ``weight`` holds the bits of the leaf ``master``,
    which has its shape, cast to its type. Where a guess fails, the other weights of its shape are
    tried; a parameter that none fits loses its weight. One without a master stays unproven.
    """
    unproven = {
        p.name: p
        for p in roles.parameters
        if not p.proven and p.master is not None and p.weight is not None
    }
    right = {name for name, p in unproven.items() if is_cast(str(p.weight), str(p.master))}
    taken = {p.weight for p in roles.parameters if p.name in right or p.name not in unproven}
    settled = []
    for parameter in roles.parameters:
        if parameter.name in unproven:
            weight = parameter.weight if parameter.name in right else None
            if weight is None:
                shape = roles.weights.get(str(parameter.weight))
                others = (
                    path for path, s in roles.weights.items() if s == shape and path not in taken
                )
                weight = next(
                    (path for path in others if is_cast(path, str(parameter.master))), None
                )
            taken.add(weight)
            parameter = replace(parameter, weight=weight, proven=weight is not None)
        settled.append(parameter)
    return replace(roles, parameters=tuple(settled))


# --- what optimizers keep -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _State:
    """What an optimizer keeps for one parameter. ``key``: the parameter's name, dotted; empty where
    it
    has only a number.

    ``root``: prefix of the whole optimizer's state. ``place``: group and place in it, in the order
    of the parameters.
    """

    parameter: Parameter
    key: str
    shape: tuple[int, ...]
    root: str
    place: tuple[str, int] = ("", 0)

    def paths(self) -> list[str]:
        p = self.parameter
        return [
            path for path in (p.master, p.first, p.second, p.count, *p.unknown) if path is not None
        ]


def _torch_states(specs: Mapping[str, LeafSpec], scalars: Mapping[str, object]) -> list[_State]:
    entries: dict[
        tuple[str, str, str], dict[str, str]
    ] = {}  # (prefix, separator, name) -> field -> path
    for path in (*specs, *scalars):
        *above, last = path.split("/")
        if len(above) >= 2 and above[-2] == "state":
            entries.setdefault(("/".join(above[:-2]), "/", above[-1]), {})[last] = path
        elif last.startswith("state.") and last.count(".") >= 2:
            _, _, rest = last.partition(".")
            name, _, what = rest.rpartition(".")
            entries.setdefault(("/".join(above), ".", name), {})[what] = path
    groups: dict[tuple[str, str], tuple[str | None, int]] = {**_torch_groups(scalars)}
    optimizers = {prefix for prefix, *_ in groups} | {
        e[0] for e, kept in entries.items() if {"exp_avg", "exp_avg_sq"} & kept.keys()
    }
    states: list[_State] = []
    for (prefix, separator, name), kept in entries.items():
        if prefix not in optimizers:
            continue
        at = f"{prefix}/" if prefix else ""
        group, place = groups.get(
            (prefix, name), (f"{at}param_groups.{name}" if separator == "." else None, len(states))
        )
        count = kept.get("step", f"{group}/step" if f"{group}/step" in scalars else None)
        masters = [
            field for field in kept if field in _MASTER and specs[kept[field]].dtype == "float32"
        ]
        master = masters[0] if len(masters) == 1 else None
        unknown = sorted(kept.keys() - {"exp_avg", "exp_avg_sq", "step", master})
        arrays = [path for path in kept.values() if path in specs]
        if not arrays:
            continue
        parameter = Parameter(
            f"{at}state{separator}{name}",
            master=kept.get(master or ""),
            first=kept.get("exp_avg"),
            second=kept.get("exp_avg_sq"),
            count=count,
            group=group,
            adam="exp_avg" in kept and "exp_avg_sq" in kept and not unknown,
            unknown=tuple(kept[field] for field in unknown),
        )
        shape = max((specs[path].shape for path in arrays), key=math.prod)
        states.append(
            _State(
                parameter,
                "" if name.isdecimal() else _dotted(name),
                shape,
                prefix,
                (group or prefix, place),
            )
        )
    return states


def _torch_groups(scalars: Mapping[str, object]) -> dict[tuple[str, str], tuple[str, int]]:
    """(prefix of the optimizer, name of a parameter) -> (prefix of its group, place in all
    groups).
    """
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for path, value in scalars.items():
        parts = path.split("/")
        if (
            len(parts) >= 4
            and parts[-4] == "param_groups"
            and parts[-2] == "params"
            and isinstance(value, int | str)
        ):
            found["/".join(parts[:-4]), escape_key(value)] = ("/".join(parts[:-2]), len(found))
    return found


def _optax_states(specs: Mapping[str, LeafSpec]) -> list[_State]:
    found: dict[
        tuple[str, str], dict[str, str]
    ] = {}  # (prefix, path of the parameter) -> field -> path
    prefixes = {
        "/".join(parts[:i])
        for parts in (path.split("/") for path in specs)
        for i, part in enumerate(parts)
        if part == "mu"
        and ("/".join([*parts[:i], "count"]) in specs or any("opt" in above for above in parts[:i]))
    }
    # A layer called "mu" is below a state, and no state.
    prefixes = {
        p
        for p in prefixes
        if not any(p != other and p.startswith(_below(other)) for other in prefixes)
    }
    for path in specs:
        for prefix in prefixes:
            if path.startswith(_below(prefix)):
                what, _, name = path[len(_below(prefix)) :].partition("/")
                found.setdefault((prefix, name), {})[what] = path
    groups = {prefix: _injected(prefix, specs) for prefix in prefixes}
    states: list[_State] = []
    for (prefix, name), kept in found.items():
        if "mu" not in kept:
            continue
        unknown = sorted(kept.keys() - {"mu", "nu"} - (set() if name else {"count"}))
        parameter = Parameter(
            _below(prefix) + name,
            first=kept["mu"],
            second=kept.get("nu"),
            count=path if (path := _below(prefix) + "count") in specs else None,
            group=groups[prefix],
            adam="nu" in kept and not unknown,
            unknown=tuple(kept[field] for field in unknown),
        )
        states.append(
            _State(
                parameter, _dotted(name) or prefix, specs[kept["mu"]].shape, _optimizer_root(prefix)
            )
        )
    return states


def _below(prefix: str) -> str:
    return f"{prefix}/" if prefix else ""


def _injected(prefix: str, specs: Mapping[str, LeafSpec]) -> str | None:
    """The nearest ``hyperparams`` of optax's ``inject_hyperparams`` above a state."""
    there = {path.rpartition("/")[0] for path in specs}
    parts = prefix.split("/")
    above = ("/".join([*parts[:i], "hyperparams"]) for i in range(len(parts), -1, -1))
    return next((group for group in above if group in there), None)


def _optimizer_root(prefix: str) -> str:
    """The outermost container that is called an optimizer, or else the state itself."""
    parts = prefix.split("/")
    return next(("/".join(parts[: i + 1]) for i, part in enumerate(parts) if "opt" in part), prefix)


# --- whose it is ----------------------------------------------------------------------------------


def _dotted(path: str) -> str:
    return _WRAPPERS.sub("", path.replace("/", "."))


def _by_name(
    states: list[_State], specs: Mapping[str, LeafSpec], model: list[str]
) -> tuple[list[Parameter], set[str]]:
    """Weights and masters whose path ends with what the optimizer calls the parameter; the
    containers in which weights were found.
    """
    lengths = {state.key.count(".") + 1 for state in states}
    endings: dict[str, list[tuple[str, str]]] = {}  # the last names of a path -> (container, path)
    for path in model:
        names = _dotted(path).split(".")
        for length in (length for length in lengths if length <= len(names)):
            container = "".join(f"{name}." for name in names[:-length])
            endings.setdefault(".".join(names[-length:]), []).append((container, path))
    candidates = [
        {c: p for c, p in endings.get(s.key, ()) if specs[p].shape == s.shape} for s in states
    ]
    votes = Counter(container for found in candidates for container in found)
    parameters, containers = [], set()
    for state, found in zip(states, candidates, strict=True):
        ranked = sorted(found, key=lambda c: (-votes[c], c))
        masters = [c for c in ranked if _words(c) & _MASTER and specs[found[c]].dtype == "float32"]
        weights = [c for c in ranked if c not in masters and not _words(c) & _COPIES]
        weights = [c for c in weights if votes[c] == votes[weights[0]]]
        narrow = [c for c in weights if specs[found[c]].dtype in _NARROW]
        master = state.parameter.master or (found[masters[0]] if masters else None)
        proven = len(weights) == 1
        if master is None and len(weights) == 2 and len(narrow) == 1 and narrow != weights:
            wide = next(c for c in weights if c not in narrow)
            if specs[found[wide]].dtype == "float32":
                master, weights = found[wide], narrow
        weight = found[weights[0]] if weights else None
        containers |= set(weights[:1])
        parameters.append(
            replace(state.parameter, weight=weight, master=master, proven=proven or weight is None)
        )
    return parameters, containers


def _words(container: str) -> set[str]:
    """The names in a path, whole and in parts: ``ema_params.`` is a copy, ``master_params.`` a
    master.
    """
    names = [name for name in container.split(".") if name]
    return {*names, *(word for name in names for word in re.split(r"[_-]", name))}


def _by_order(
    states: list[_State], specs: Mapping[str, LeafSpec], model: list[str]
) -> tuple[list[Parameter], str | None]:
    """Weights of numbered parameters: the model's leaves in order against the groups' parameters in
    order, shape by shape.
    """
    shapes = Counter(state.shape for state in states)
    containers: dict[str, list[str]] = {}
    for path in model:
        containers.setdefault(path.rpartition("/")[0], []).append(path)
    masters = {c for c in containers if _words(_dotted(c)) & _MASTER}

    def fit(container: str) -> tuple[bool, int]:
        matched = Counter(specs[path].shape for path in containers[container]) & shapes
        return not _words(_dotted(container)) & _COPIES, matched.total()

    chosen = max((c for c in containers if c not in masters and fit(c)[1]), key=fit, default=None)
    if chosen is None:
        return [state.parameter for state in states], None
    queues: dict[tuple[str, str], list[_State]] = {}
    for state in sorted(states, key=lambda s: s.place[1]):
        queues.setdefault((state.root, state.place[0]), []).append(state)
    weights: dict[str, str] = {}
    for path in containers[chosen]:
        queue = next((q for q in queues.values() if q and q[0].shape == specs[path].shape), None)
        if queue:
            weights[queue.pop(0).parameter.name] = path
    spare = [path for path in containers[chosen] if path not in weights.values()]
    for state in (
        state for queue in queues.values() for state in queue
    ):  # orders that do not fit: only content can tell
        fitting = [path for path in spare if specs[path].shape == state.shape]
        if fitting:
            weights[state.parameter.name] = fitting[0]
            spare.remove(fitting[0])
    parameters = []
    for state in states:
        parameter, weight = state.parameter, weights.get(state.parameter.name)
        master = parameter.master
        if master is None and weight is not None:
            twins = (f"{c}/{weight.rpartition('/')[2]}" for c in masters)
            master = next(
                (
                    t
                    for t in twins
                    if t in specs and specs[t].shape == state.shape and specs[t].dtype == "float32"
                ),
                None,
            )
        parameters.append(replace(parameter, weight=weight, master=master, proven=weight is None))
    return parameters, _dotted(chosen) + "." if chosen else ""
