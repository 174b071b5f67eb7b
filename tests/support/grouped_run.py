"""Training states with several optimizers, parameter groups and learning rates, in NumPy.

A course says which leaf is updated at which rate. States name their leaves as users do, so that
neither names nor the order of leaves need tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.adam_run import BFLOAT16

NUMBERED, NAMED, PARAM_NAMES = "numbered", "named", "param_names"


@dataclass
class Tensor:
    """One parameter: its values, moments, updates and the learning rate of its group.

    ``rate`` is 0 if no group has it. A parameter that is ``frozen`` for a while keeps its group.
    """

    name: str
    rate: float
    values: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]
    first: np.ndarray[Any, Any] = field(init=False)
    second: np.ndarray[Any, Any] = field(init=False)
    average: np.ndarray[Any, Any] = field(init=False)
    count: int = field(init=False)
    frozen: bool = False

    def __post_init__(self) -> None:
        self.renew()
        self.average = self.values.copy()

    def renew(self) -> None:
        """Begin with a new optimizer."""
        self.first, self.second = np.zeros_like(self.values), np.zeros_like(self.values)
        self.count = 0


@dataclass
class Network:
    """A model with an optimizer: its tensors in the order of the model, and the paths of both.

    Args:
        groups: The names of the tensors of each parameter group, in the optimizer's order.
        model: The path of the bfloat16 weights, or of float32 ones without masters.
        masters: The path of the masters; empty: there are none.
        optimizer: The path of the optimizer's state.
        average: The path of float32 averages of the weights; empty: there are none.
    """

    tensors: list[Tensor]
    groups: Sequence[Sequence[str]]
    model: str
    masters: str
    optimizer: str
    average: str = ""


class GroupedRun:
    """Networks that are trained together by Adam.

    Args:
        networks: The networks.
        states: ``NUMBERED``, ``NAMED``, or ``PARAM_NAMES``: numbered, with names in the groups.
        gradients: ``noise``; ``alike``: of every tensor of a shape the same; ``outer``: products
            of an input that all tensors share with one of their own; ``steady``: of one sign.
    """

    def __init__(
        self, networks: Sequence[Network], states: str, gradients: str = "noise", seed: int = 0
    ) -> None:
        self.networks, self.states, self.gradients = networks, states, gradients
        self.random, self.step, self.share = np.random.default_rng(seed), 0, 1.0

    def advance(self, steps: int, growth: float = 1.0) -> None:
        """Do some steps, each with gradients that are ``growth`` times those of the last."""
        b1, b2 = 0.9, 0.999
        self.step += steps
        for _ in range(steps):
            drawn: dict[tuple[int, ...], Any] = {}
            for tensor in (t for network in self.networks for t in network.tensors):
                shape = tensor.values.shape
                if self.gradients == "outer":
                    shared = drawn.setdefault(shape, self.random.normal(0.5, 1, shape[1]))
                    noise = np.outer(self.random.normal(0.5, 1, shape[0]), shared)
                elif self.gradients == "alike":
                    noise = drawn.setdefault(shape, self.random.normal(0.1, 1, shape))
                else:
                    mean, deviation = (1, 0.1) if self.gradients == "steady" else (0.1, 1)
                    noise = self.random.normal(mean, deviation, shape)
                tensor.scale *= growth
                if not tensor.rate or tensor.frozen:
                    continue
                tensor.count += 1
                g = (tensor.scale * noise).astype(np.float32)
                tensor.first += (1 - b1) * (g - tensor.first)
                tensor.second += (1 - b2) * (g * g - tensor.second)
                root = np.sqrt(tensor.second / (1 - b2**tensor.count)) + 1e-8
                update = tensor.first / (1 - b1**tensor.count) / root
                tensor.values -= np.float32(self.share * tensor.rate) * update.astype(np.float32)
                tensor.average += np.float32(0.05) * (tensor.values - tensor.average)

    def skip(self, steps: int) -> None:
        """Do some steps without an update, as micro-batches and skips of a gradient scaler do."""
        self.step += steps

    def state(self) -> dict[str, Any]:
        """Return a copy of the current state."""
        state: dict[str, Any] = {}
        for network in self.networks:
            by_name = {tensor.name: tensor for tensor in network.tensors}
            dtype = np.dtype(BFLOAT16 if network.masters else np.float32)
            _put(state, network.model, {n: t.values.astype(dtype) for n, t in by_name.items()})
            if network.masters:
                _put(state, network.masters, {n: t.values.copy() for n, t in by_name.items()})
            if network.average:
                _put(state, network.average, {n: t.average.copy() for n, t in by_name.items()})
            _put(state, network.optimizer, self._optimizer(network, by_name))
        return {**state, "step": self.step}

    def _optimizer(self, network: Network, by_name: Mapping[str, Tensor]) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for name in (name for group in network.groups for name in group):
            keys[name] = name if self.states == NAMED else len(keys)
        groups = []
        for names in network.groups:
            group = {
                "lr": self.share * by_name[names[0]].rate,
                "betas": (0.9, 0.999),
                "eps": 1e-8,
                "params": [keys[name] for name in names],
            }
            if self.states == PARAM_NAMES:
                group["param_names"] = list(names)
            groups.append(group)
        kept = {
            key: {
                "step": np.array(by_name[name].count, np.float32),
                "exp_avg": by_name[name].first.copy(),
                "exp_avg_sq": by_name[name].second.copy(),
            }
            for name, key in keys.items()
        }
        return {"state": kept, "param_groups": groups}

    def rates(self) -> dict[str, float]:
        """Return the live rate of each float32 leaf that an optimizer updates, by path."""
        return {
            f"{network.masters or network.model}/{tensor.name}": self.share * tensor.rate
            for network in self.networks
            for tensor in network.tensors
            if tensor.rate
        }

    def weight_of(self, master: str) -> str:
        """Return the path of the bfloat16 weight of a master."""
        folder, _, name = master.rpartition("/")
        return next((f"{n.model}/{name}" for n in self.networks if n.masters == folder), "")


def _put(state: dict[str, Any], path: str, value: dict[str, Any]) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        state = state.setdefault(parent, {})
    state[last] = value
