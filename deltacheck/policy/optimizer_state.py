"""Readers of optimizer states: the leaves that an optimizer keeps for each parameter.

Three layouts are known: the state dicts of torch optimizers (``state/<index or name>/exp_avg``, and
the flattened ``state.<name>.exp_avg``), the states of optax (``mu/<path>``, ``nu/<path>``,
``count``), and the trees of the DeepSpeed backend (``optimizer/exp_avg/<name>``). To support
another optimizer, add a reader here and list it in ``roles.find``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import escape_key
from deltacheck.policy.parameters import Parameter

# Names, or parts of names, under which optimizers and models keep float32 masters.
MASTER_NAMES = frozenset(
    "master masters master_param master_params master_weight master_weights fp32 fp32_param"
    " fp32_params params_fp32 param_fp32".split()
)
# Prefixes that torch wrappers put into the names of parameters.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\.")


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state that an optimizer keeps for one parameter.

    Attributes:
        parameter: The parameter, without its weight.
        key: The dotted name of the parameter; empty if the optimizer only numbers it.
        shape: The shape of the parameter.
        root: The prefix of the whole optimizer's state.
        place: The group, and the position in the order of all parameters.
    """

    parameter: Parameter
    key: str
    shape: tuple[int, ...]
    root: str
    place: tuple[str, int] = ("", 0)

    def paths(self) -> list[str]:
        """Return the paths of all leaves of this state."""
        p = self.parameter
        return [
            path for path in (p.master, p.first, p.second, p.count, *p.unknown) if path is not None
        ]


def dotted(path: str) -> str:
    """Return a leaf path as the dotted name of a torch parameter, without wrappers."""
    return _WRAPPERS.sub("", path.replace("/", "."))


# --- torch ----------------------------------------------------------------------------------------


def torch_states(
    specs: Mapping[str, LeafSpec], scalars: Mapping[str, object]
) -> list[ParameterState]:
    """Return the states of torch optimizers, of all parameters that have at least one array."""
    entries = _torch_entries((*specs, *scalars))
    groups: dict[tuple[str, str], tuple[str | None, int]] = {**_torch_groups(scalars)}
    names = _torch_names(scalars)
    # Any subtree may be called "state"; that of an optimizer has groups, or Adam's moments.
    optimizers = {prefix for prefix, *_ in groups} | {
        entry[0] for entry, fields in entries.items() if {"exp_avg", "exp_avg_sq"} & fields.keys()
    }
    states: list[ParameterState] = []
    for (prefix, separator, name), fields in entries.items():
        arrays = [path for path in fields.values() if path in specs]
        if prefix not in optimizers or not arrays:
            continue
        base = f"{prefix}/" if prefix else ""
        group, position = groups.get(
            (prefix, name),
            (f"{base}param_groups.{name}" if separator == "." else None, len(states)),
        )
        group_count = f"{group}/step" if f"{group}/step" in scalars else None
        parameter = _torch_parameter(
            f"{base}state{separator}{name}", fields, group, group_count, specs
        )
        # A step count is a smaller array than the moments.
        shape = max((specs[path].shape for path in arrays), key=math.prod)
        key = names.get((prefix, name), "") if name.isdecimal() else dotted(name)
        states.append(ParameterState(parameter, key, shape, prefix, (group or prefix, position)))
    return states


def _torch_parameter(
    name: str,
    fields: Mapping[str, str],
    group: str | None,
    group_count: str | None,
    specs: Mapping[str, LeafSpec],
) -> Parameter:
    """Return the parameter of a state of torch, without its weight.

    Args:
        name: The name of the parameter.
        fields: Name of a field of the state -> its path.
        group: The path of its group.
        group_count: The step count of the group, for states without a count of their own.
        specs: The specs of all leaves.
    """
    masters = [
        field
        for field in fields
        if field in MASTER_NAMES and specs[fields[field]].dtype == "float32"
    ]
    master = masters[0] if len(masters) == 1 else None
    unknown = sorted(fields.keys() - {"exp_avg", "exp_avg_sq", "step", master})
    return Parameter(
        name,
        master=fields.get(master or ""),
        first=fields.get("exp_avg"),
        second=fields.get("exp_avg_sq"),
        count=fields.get("step", group_count),
        group=group,
        adam="exp_avg" in fields and "exp_avg_sq" in fields and not unknown,
        unknown=tuple(fields[field] for field in unknown),
    )


def _torch_entries(paths: Iterable[str]) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the states of parameters in state dicts of torch, nested and flattened.

    Returns:
        (prefix, separator, name of the parameter) -> field of its state -> path.
    """
    entries: dict[tuple[str, str, str], dict[str, str]] = {}
    for path in paths:
        *parents, last = path.split("/")
        if len(parents) >= 2 and parents[-2] == "state":
            entries.setdefault(("/".join(parents[:-2]), "/", parents[-1]), {})[last] = path
        elif last.startswith("state.") and last.count(".") >= 2:
            # Flattened state dicts have dots, and dots in the names of parameters as well.
            _, _, rest = last.partition(".")
            name, _, field = rest.rpartition(".")
            entries.setdefault(("/".join(parents), ".", name), {})[field] = path
    return entries


def _torch_groups(scalars: Mapping[str, object]) -> dict[tuple[str, str], tuple[str, int]]:
    """Return group and position of each parameter of torch's parameter groups.

    The keys are (prefix of the optimizer, name of the parameter). The values are (prefix of its
    group, position in all groups).
    """
    groups: dict[tuple[str, str], tuple[str, int]] = {}
    for path, value in scalars.items():
        parts = path.split("/")
        if (
            len(parts) >= 4
            and parts[-4] == "param_groups"
            and parts[-2] == "params"
            and isinstance(value, int | str)
        ):
            groups["/".join(parts[:-4]), escape_key(value)] = ("/".join(parts[:-2]), len(groups))
    return groups


def _torch_names(scalars: Mapping[str, object]) -> dict[tuple[str, str], str]:
    """Return the dotted names of numbered parameters, if the groups have ``param_names``.

    torch keeps them in its groups if the optimizer was made from ``model.named_parameters()``. The
    keys are those of ``_torch_groups``.
    """
    names: dict[tuple[str, str], str] = {}
    for path, value in scalars.items():
        parts = path.split("/")
        if len(parts) >= 4 and parts[-4] == "param_groups" and parts[-2] == "param_names":
            number = scalars.get("/".join([*parts[:-2], "params", parts[-1]]))
            if isinstance(value, str) and isinstance(number, int):
                names["/".join(parts[:-4]), str(number)] = dotted(value)
    return names


# --- DeepSpeed ------------------------------------------------------------------------------------

# Names of the DeepSpeed backend's tree, permanent.
_ZERO_HEADER, _ZERO_MASTERS, _ZERO_STATES, _ZERO_FILES = "deepspeed", "master", "optimizer", "files"


def zero_states(
    specs: Mapping[str, LeafSpec], scalars: Mapping[str, object]
) -> list[ParameterState]:
    """Return the states of DeepSpeed's ZeRO optimizers, saved by parameter; none in other trees."""
    if f"{_ZERO_HEADER}/zero_stage" not in scalars:
        return []
    groups = {
        name: group
        for (prefix, name), group in _torch_groups(scalars).items()
        if prefix == _ZERO_HEADER
    }
    # Name of the parameter -> key of its state -> path
    entries: dict[str, dict[str, str]] = {name: {} for name in groups}
    for path in specs:
        keys = path.split("/")
        if len(keys) == 3 and keys[0] == _ZERO_STATES and keys[2] in entries:
            entries[keys[2]][keys[1]] = path
    states: list[ParameterState] = []
    for name, fields in entries.items():
        group, position = groups[name]
        master = f"{_ZERO_MASTERS}/{name}"
        if master not in specs:
            continue
        unknown = sorted(fields.keys() - {"exp_avg", "exp_avg_sq"})
        parameter = Parameter(
            f"{_ZERO_STATES}/{name}",
            master=master,
            first=fields.get("exp_avg"),
            second=fields.get("exp_avg_sq"),
            count=path if (path := f"{group}/step") in scalars else None,
            group=group,
            adam="exp_avg" in fields and "exp_avg_sq" in fields and not unknown,
            unknown=tuple(fields[key] for key in unknown),
        )
        # The files hold the rest of the optimizer's state, and no weights of the model.
        states.append(
            ParameterState(
                parameter, dotted(name), specs[master].shape, _ZERO_FILES, (group, position)
            )
        )
    return states


# --- optax ----------------------------------------------------------------------------------------


def optax_states(specs: Mapping[str, LeafSpec]) -> list[ParameterState]:
    """Return the states of optax transformations that keep a mean ``mu`` of gradients."""
    prefixes = _optax_prefixes(specs)
    # (prefix, path of the parameter) -> field of its state -> path
    entries: dict[tuple[str, str], dict[str, str]] = {}
    for path in specs:
        for prefix in prefixes:
            if path.startswith(_below(prefix)):
                field, _, name = path[len(_below(prefix)) :].partition("/")
                entries.setdefault((prefix, name), {})[field] = path
    groups = {prefix: _injected(prefix, specs) for prefix in prefixes}
    states: list[ParameterState] = []
    for (prefix, name), fields in entries.items():
        if "mu" not in fields:
            continue
        unknown = sorted(fields.keys() - {"mu", "nu"} - (set() if name else {"count"}))
        parameter = Parameter(
            _below(prefix) + name,
            first=fields["mu"],
            second=fields.get("nu"),
            count=path if (path := _below(prefix) + "count") in specs else None,
            group=groups[prefix],
            adam="nu" in fields and not unknown,
            unknown=tuple(fields[field] for field in unknown),
        )
        states.append(
            ParameterState(
                parameter,
                dotted(name) or prefix,
                specs[fields["mu"]].shape,
                _optimizer_root(prefix),
            )
        )
    return states


def _optax_prefixes(specs: Mapping[str, LeafSpec]) -> set[str]:
    """Return the prefixes that have a ``mu`` and a ``count``, or lie in a container named "opt"."""
    prefixes = {
        "/".join(parts[:i])
        for parts in (path.split("/") for path in specs)
        for i, part in enumerate(parts)
        if part == "mu"
        and ("/".join([*parts[:i], "count"]) in specs or any("opt" in name for name in parts[:i]))
    }
    # A layer that is itself called "mu" lies below a state and is not a state.
    return {
        prefix
        for prefix in prefixes
        if not any(prefix != outer and prefix.startswith(_below(outer)) for outer in prefixes)
    }


def _below(prefix: str) -> str:
    return f"{prefix}/" if prefix else ""


def _injected(prefix: str, specs: Mapping[str, LeafSpec]) -> str | None:
    """Return the nearest ``hyperparams`` of optax's ``inject_hyperparams`` above a state."""
    containers = {path.rpartition("/")[0] for path in specs}
    parts = prefix.split("/")
    candidates = ("/".join([*parts[:i], "hyperparams"]) for i in range(len(parts), -1, -1))
    return next((group for group in candidates if group in containers), None)


def _optimizer_root(prefix: str) -> str:
    """Return the outermost container whose name contains "opt", or else the state itself."""
    parts = prefix.split("/")
    return next(("/".join(parts[: i + 1]) for i, part in enumerate(parts) if "opt" in part), prefix)
