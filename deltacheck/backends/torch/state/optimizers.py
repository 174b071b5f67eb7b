"""Optimizers in a restore target: their state dicts, tensors of their own, and the values to set.

A restore that overlaps with training fills the tensors that the optimizer uses. So the target has
the optimizer itself in the place of its state dict. An optimizer that has not stepped yet has no
state; it gets tensors as the step describes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.classes import build
from deltacheck.errors import TreeMismatch
from deltacheck.leaf import tree
from deltacheck.leaf.tree import ArrayNode, Flat, escape_key
from deltacheck.store.manifest import Manifest

# Smaller tensors are loaded at once: step counts, rates, biases. Larger: less of the state arrives
# late; smaller: more leaves are handled apart for little time.
LATE_BYTES = 1 << 14


class OptimizerPlace(NamedTuple):
    """An optimizer in a restore target, and the keys that lead to it."""

    keys: tuple[Any, ...]
    optimizer: torch.optim.Optimizer

    @property
    def name(self) -> str:
        """The path of the optimizer."""
        return "/".join(map(escape_key, self.keys))

    @property
    def prefix(self) -> str:
        """The prefix of the paths of its state."""
        return "/".join([*map(escape_key, self.keys), "state", ""])

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Its parameters, in the order of torch's numbers for them."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def state_dict(self, state: Mapping[Any, Any] | None = None) -> dict[str, Any]:
        """Return what ``optimizer.state_dict()`` returns, without its hooks and copies.

        Args:
            state: The state, by torch's numbers; ``None``: that of the optimizer.
        """
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        if state is None:
            state = {
                numbers.get(id(key), key): dict(fields)
                for key, fields in self.optimizer.state.items()
            }
        groups = [
            {**group, "params": [numbers[id(parameter)] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set groups and state to a restored state dict, whose tensors the optimizer uses from now.

        Nothing is cast or copied, unlike in ``optimizer.load_state_dict``.
        """
        for group, values in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        parameters = dict(enumerate(self.parameters))
        for number, fields in saved["state"].items():
            self.optimizer.state[parameters.get(number, number)] = dict(fields)


def places_in(target: object) -> list[OptimizerPlace]:
    """Return the torch optimizers in nested dicts, lists and tuples."""
    return list(_places(target, ()))


def _places(node: object, keys: tuple[Any, ...]) -> Iterator[OptimizerPlace]:
    if isinstance(node, torch.optim.Optimizer):
        yield OptimizerPlace(keys, node)
    elif isinstance(node, dict | list | tuple):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _places(item, (*keys, key))


def expanded(target: object, places: Iterable[OptimizerPlace], manifest: Manifest) -> object:
    """Return a target with state dicts in the places of its optimizers.

    An optimizer without state gets new tensors, to which it refers from ``load`` on.

    Raises:
        TreeMismatch: The step has other parameter groups than an optimizer.
    """
    for place in places:
        saved = _saved_at(manifest, place)
        state = None
        if isinstance(saved, dict) and isinstance(saved.get("param_groups"), list):
            _require_groups(manifest, place, saved["param_groups"])
            state = None if place.optimizer.state else saved.get("state")
        target = with_value(target, place.keys, place.state_dict(state))
    return target


def with_value(node: Any, keys: tuple[Any, ...], value: object) -> Any:
    """Return nested containers with another value at some keys. The given ones stay as they are."""
    if not keys:
        return value
    key, *rest = keys
    if isinstance(node, dict):
        copy = node.copy()
        copy[key] = with_value(node[key], tuple(rest), value)
        return copy
    items = list(node)
    items[key] = with_value(items[key], tuple(rest), value)
    # A named tuple takes its fields one by one.
    return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)


def late_paths(
    flat: Flat, places: Iterable[OptimizerPlace], arrays: Mapping[str, ArrayNode]
) -> set[str]:
    """Return the leaves that nothing but a step of the optimizers reads or writes.

    These are the tensors of their state, without small ones and those that share memory with
    anything else, such as a weight.
    """
    places = list(places)
    prefixes = tuple(place.prefix for place in places)
    parts = {
        path: leaves.local_of(value)
        for path, value in flat.arrays.items()
        if path.startswith(prefixes)
        and isinstance(value, torch.Tensor)
        and value.nbytes >= LATE_BYTES
    }
    # A tie makes one leaf of several paths, some of which may be of the model.
    others = {node.owner for path, node in arrays.items() if not path.startswith(prefixes)}
    rest = [value for path, value in flat.arrays.items() if path not in parts or path in others]
    rest += [parameter for place in places for parameter in place.parameters]
    storages = {
        value.untyped_storage().data_ptr() for value in rest if isinstance(value, torch.Tensor)
    }
    return {
        path
        for path, value in parts.items()
        if path not in others
        and isinstance(value, torch.Tensor)
        and value.untyped_storage().data_ptr() not in storages
    }


def _saved_at(manifest: Manifest, place: OptimizerPlace) -> Any:
    """Return the tree of the step at the place of an optimizer, with new tensors.

    Return ``None`` if it has none there.
    """
    parameters, specs = place.parameters, manifest.specs
    # As torch places step counts: on the host, unless the step is one kernel on the device.
    counted_on_device = {
        id(parameter)
        for group in place.optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for parameter in group["params"]
    }

    def put(path: str, owner: str, tag: str | None) -> object:
        if not path.startswith(place.prefix):
            return None
        number = path.removeprefix(place.prefix).partition("/")[0]
        if not number.isdecimal() or int(number) >= len(parameters):
            return None
        parameter, spec = parameters[int(number)], specs[owner]
        on_host = not spec.shape and id(parameter) not in counted_on_device
        return leaves.empty(spec, tag, torch.device("cpu") if on_host else parameter.device)

    node: Any = tree.unflatten(manifest.tree, put, build)
    for key in place.keys:
        try:
            node = node[key]
        # The comparison of the trees names what is missing.
        except (LookupError, TypeError):
            return None
    return node


def _require_groups(manifest: Manifest, place: OptimizerPlace, saved: list[Any]) -> None:
    own = [len(group["params"]) for group in place.optimizer.param_groups]
    stored = [len(group["params"]) for group in saved]
    if own != stored:
        raise TreeMismatch(
            f"the optimizer at {place.name!r} has groups of {own} parameters, that of step"
            f" {manifest.step} groups of {stored}. Make it as it was when the step was saved"
        )
