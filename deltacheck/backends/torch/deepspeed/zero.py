"""What DeepSpeed's ZeRO optimizers hold, by parameter: which elements of which parameter lie where
in
the flat partitions of this rank.

Their layout depends on the stage, the number of ranks, the alignment and the order of the
parameters. So nothing of it is stored: each save takes the partitions of its run apart into
fragments of parameters, each load puts those of its own run together from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deltacheck.backends.torch.state.shards import Fragment
from deltacheck.leaf.tree import escape_key

MASTER, OPTIMIZER, MODULE = "master", "optimizer", "module"  # keys of the saved tree, permanent


def prefix(key: str) -> str:
    """The path of the leaves that hold the parts of flat partitions, without their names."""
    return f"{key}/" if key in (MASTER, MODULE) else f"{OPTIMIZER}/{escape_key(key)}/"


class Part(NamedTuple):
    """Elements ``begin`` to ``begin + size`` of a parameter, which lie at ``at`` in a partition;
    ``size`` is 0 where this rank has none.
    """

    name: str
    shape: tuple[int, ...]
    parameter: Any  # what DeepSpeed has made of a Parameter
    begin: int
    size: int
    at: int

    def of(self, flat: torch.Tensor) -> Fragment:
        """The fragment, of the partition's weights or of an optimizer state that lies as they
        do.
        """
        return self._cut(flat, self.at)

    def of_parameter(self) -> Fragment:
        """The same elements of the parameter itself. REQUIRES: this rank has all of it."""
        return self._cut(self.parameter.detach().reshape(-1), self.begin)

    def _cut(self, flat: torch.Tensor, at: int) -> Fragment:
        data = flat.detach().narrow(0, at if self.size else 0, self.size)
        return Fragment(
            data, (torch.Size(self.shape).numel(),), (self.begin if self.size else 0,), self.shape
        )


class Partition(NamedTuple):
    """A flat partition of this rank. ``master``: the weights that the optimizer updates, 1-D;
    ``states``: what it keeps beside them, alike.
    """

    master: torch.Tensor
    states: Mapping[str, torch.Tensor]
    parts: tuple[Part, ...]

    def flat(self, key: str) -> torch.Tensor:
        return self.master if key == MASTER else self.states[key]


def partitions(engine: Any) -> list[Partition]:
    """The flat partitions of a DeepSpeed engine on this rank; none under ZeRO 0."""
    optimizer, names = engine.optimizer, engine.param_names
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        masters = optimizer.fp32_partitioned_groups_flat
        parts = [_of_stage_3(optimizer, names, group) for group in optimizer.fp16_groups]
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        masters = optimizer.single_partition_of_fp32_groups
        parts = [
            _of_stage_2(optimizer, names, number, master.numel())
            for number, master in enumerate(masters)
        ]
    elif hasattr(optimizer, "fp32_groups_flat_partition"):
        masters = optimizer.fp32_groups_flat_partition
        parts = [_linked(names, group) for group in optimizer.bf16_groups]
    else:
        return []
    inner = optimizer.optimizer
    found = []
    for master, of in zip(masters, parts, strict=True):
        state = inner.state.get(master, {}).items()
        states = {
            key: value
            for key, value in state
            if isinstance(value, torch.Tensor) and value.shape == master.shape
        }
        found.append(Partition(master, states, tuple(of)))
    return found


def _of_stage_3(optimizer: Any, names: Mapping[Any, str], group: list[Any]) -> list[Part]:
    parts, at = [], 0
    for parameter in group:
        begin, count = _own(optimizer, parameter)
        parts.append(Part(names[parameter], tuple(parameter.ds_shape), parameter, begin, count, at))
        at += parameter.partition_numel()
    return parts


def _own(optimizer: Any, parameter: Any) -> tuple[int, int]:
    """The first element of a parameter that this rank has under ZeRO 3, and how many."""
    size = parameter.partition_numel()
    begin = size * dist.get_rank(group=optimizer._get_param_partition_group(parameter))
    return begin, max(0, min(parameter.ds_numel - begin, size))


def _of_stage_2(optimizer: Any, names: Mapping[Any, str], number: int, size: int) -> list[Part]:
    first = size * dist.get_rank(group=optimizer.real_dp_process_group[number])
    parts = []
    pairs = zip(
        optimizer.round_robin_bit16_groups[number],
        optimizer.round_robin_bit16_offsets[number],
        strict=True,
    )
    for parameter, offset in pairs:
        begin = max(0, first - offset)
        count = max(0, min(parameter.numel(), first + size - offset) - begin)
        parts.append(
            Part(
                names[parameter],
                tuple(parameter.shape),
                parameter,
                begin,
                count,
                max(0, offset - first),
            )
        )
    return parts


def _linked(names: Mapping[Any, str], group: list[Any]) -> list[Part]:
    parts = []
    for parameter in group:
        link = parameter._hp_mapping
        begin, count, at = (
            (0, 0, 0)
            if link is None
            else (
                link.lp_fragment_address.start,
                link.lp_fragment_address.numel,
                link.hp_fragment_address.start,
            )
        )
        parts.append(Part(names[parameter], tuple(parameter.shape), parameter, begin, count, at))
    return parts


def frozen(engine: Any, of: list[Partition]) -> dict[str, Part]:
    """What this rank has, under ZeRO 3, of the parameters that no optimizer updates."""
    trained = {id(part.parameter) for partition in of for part in partition.parts}
    found = {}
    for parameter, name in engine.param_names.items():
        if id(parameter) not in trained and hasattr(parameter, "ds_tensor"):
            begin, count = _own(engine.optimizer, parameter)
            found[name] = Part(name, tuple(parameter.ds_shape), parameter, begin, count, 0)
    return found


def fragments(engine: Any, of: list[Partition]) -> dict[str, Any]:
    """All that the partitions hold, by parameter: ``master``, ``optimizer`` by state, and
    ``module``,
    the weights that the model computes with.

    Under ZeRO 3 those of trained parameters follow from ``master``, and are left out.
    """
    found: dict[str, Any] = {MASTER: {}, OPTIMIZER: {}, MODULE: {}}
    for partition in of:
        for part in partition.parts:
            found[MASTER][part.name] = part.of(partition.master)
            if engine.zero_optimization_stage() < 3:
                found[MODULE][part.name] = part.of_parameter()
        for key, flat in partition.states.items():
            found[OPTIMIZER].setdefault(key, {}).update(
                {part.name: part.of(flat) for part in partition.parts}
            )
    if engine.zero_optimization_stage() == 3:
        found[MODULE] = {
            name: part.of(part.parameter.ds_tensor) for name, part in frozen(engine, of).items()
        }
    return found
