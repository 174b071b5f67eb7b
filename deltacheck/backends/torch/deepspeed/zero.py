"""Map the flat partitions of DeepSpeed's ZeRO optimizers to parameters.

The layout of a partition depends on the stage, the number of ranks, the alignment and the order of
the parameters. Therefore no layout is stored. Each save splits the partitions of its run into
fragments of parameters, and each load assembles the partitions of its own run from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deltacheck.backends.torch.state.shards import Fragment
from deltacheck.leaf.tree import escape_key

MASTER, OPTIMIZER, MODULE = "master", "optimizer", "module"  # keys of the saved tree, permanent
# Constants of a parameter group that a policy needs.
_CONSTANTS = ("lr", "betas", "eps")


def prefix(key: str) -> str:
    """Return the path under which the parts of flat partitions are stored, ending in a slash."""
    return f"{key}/" if key in (MASTER, MODULE) else f"{OPTIMIZER}/{escape_key(key)}/"


def leaf_path(key: str, name: str) -> str:
    """Return the leaf path of a parameter below a key."""
    return prefix(key) + escape_key(name)


class PartitionRun(NamedTuple):
    """A run of elements of a parameter and its position in a partition.

    The elements ``begin`` to ``begin + size`` of the parameter lie at ``at`` in the partition.
    ``size`` is 0 if this rank has none of them.
    """

    name: str
    shape: tuple[int, ...]
    parameter: Any  # what DeepSpeed has made of a Parameter
    begin: int
    size: int
    at: int

    def of(self, flat: torch.Tensor) -> Fragment:
        """Return the fragment of a flat tensor that is laid out like the partition."""
        return self._cut(flat, self.at)

    def of_parameter(self) -> Fragment:
        """Return the same elements of the parameter itself, which this rank must hold whole."""
        return self._cut(self.parameter.detach().reshape(-1), self.begin)

    def _cut(self, flat: torch.Tensor, at: int) -> Fragment:
        data = flat.detach().narrow(0, at if self.size else 0, self.size)
        return Fragment(
            data, (torch.Size(self.shape).numel(),), (self.begin if self.size else 0,), self.shape
        )


class Partition(NamedTuple):
    """A flat partition of this rank.

    ``master`` holds the weights that the optimizer updates, 1-D; ``states`` holds its state tensors
    of the same layout, by key. ``group`` is the number of its parameter group, ``step`` the step
    count of the optimizer, ``None`` before the first step.
    """

    master: torch.Tensor
    states: Mapping[str, torch.Tensor]
    parts: tuple[PartitionRun, ...]
    group: int
    step: int | None


def partitions(engine: Any) -> list[Partition]:
    """Return the flat partitions of a DeepSpeed engine on this rank; none under ZeRO 0."""
    optimizer, names = engine.optimizer, engine.param_names
    # By attributes, so that no class of DeepSpeed's internal modules is imported. In this order:
    # ZeRO 3, ZeRO 1 and 2, the BF16 optimizer.
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
    # ZeRO 3 splits a parameter group, the others make one partition of each.
    group_of = getattr(optimizer, "sub_group_to_group_id", {})
    result = []
    for number, (master, own_parts) in enumerate(zip(masters, parts, strict=True)):
        state = inner.state.get(master, {})
        group = group_of.get(number, number)
        states = {
            key: value
            for key, value in state.items()
            # A step counter is not laid out like the partition; it stays a value of the optimizer's
            # file.
            if isinstance(value, torch.Tensor) and value.shape == master.shape
        }
        # Fused optimizers count in the parameter group.
        count = state.get("step", inner.param_groups[group].get("step"))
        step = None if count is None else int(count)
        result.append(Partition(master, states, tuple(own_parts), group, step))
    return result


def parameter_groups(engine: Any, partitions: list[Partition]) -> list[dict[str, Any]]:
    """Return the constants, the step count and the parameter names of each parameter group.

    The files of DeepSpeed hold these values by rank and without names. A policy needs them by name
    and alike on every rank.
    """
    if not partitions:
        return []
    groups = [
        {name: group[name] for name in _CONSTANTS if name in group}
        for group in engine.optimizer.optimizer.param_groups
    ]
    for partition in partitions:
        group = groups[partition.group]
        group.setdefault("params", []).extend(part.name for part in partition.parts)
        if partition.step is not None:
            group["step"] = partition.step
    return groups


def _of_stage_3(optimizer: Any, names: Mapping[Any, str], group: list[Any]) -> list[PartitionRun]:
    parts, position = [], 0
    for parameter in group:
        begin, count = _own(optimizer, parameter)
        parts.append(
            PartitionRun(
                names[parameter], tuple(parameter.ds_shape), parameter, begin, count, position
            )
        )
        # The padding of each parameter is a part of its place.
        position += parameter.partition_numel()
    return parts


def _own(optimizer: Any, parameter: Any) -> tuple[int, int]:
    """Return the first element of a parameter that this rank has under ZeRO 3, and the count."""
    size = parameter.partition_numel()
    begin = size * dist.get_rank(group=optimizer._get_param_partition_group(parameter))
    # The last ranks may have less than the others, or only padding.
    return begin, max(0, min(parameter.ds_numel - begin, size))


def _of_stage_2(
    optimizer: Any, names: Mapping[Any, str], number: int, size: int
) -> list[PartitionRun]:
    # A parameter may begin before the partition of this rank, or end behind it.
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
            PartitionRun(
                names[parameter],
                tuple(parameter.shape),
                parameter,
                begin,
                count,
                max(0, offset - first),
            )
        )
    return parts


def _linked(names: Mapping[Any, str], group: list[Any]) -> list[PartitionRun]:
    """Return the parts of a group of the BF16 optimizer, which links parameters to fragments."""
    parts = []
    for parameter in group:
        link = parameter._hp_mapping
        begin, count, position = (
            (0, 0, 0)
            if link is None
            else (
                link.lp_fragment_address.start,
                link.lp_fragment_address.numel,
                link.hp_fragment_address.start,
            )
        )
        parts.append(
            PartitionRun(
                names[parameter], tuple(parameter.shape), parameter, begin, count, position
            )
        )
    return parts


def frozen(engine: Any, partitions: list[Partition]) -> dict[str, PartitionRun]:
    """Return this rank's parts of parameters that no optimizer updates, under ZeRO 3."""
    trained = {id(part.parameter) for partition in partitions for part in partition.parts}
    parts = {}
    for parameter, name in engine.param_names.items():
        if id(parameter) not in trained and hasattr(parameter, "ds_tensor"):
            begin, count = _own(engine.optimizer, parameter)
            parts[name] = PartitionRun(name, tuple(parameter.ds_shape), parameter, begin, count, 0)
    return parts


def fragments(engine: Any, partitions: list[Partition], *, is_exact: bool = True) -> dict[str, Any]:
    """Return the content of the partitions, by parameter.

    The keys are ``master``, ``optimizer`` (by state), and ``module``, the weights that the model
    computes with.

    Args:
        engine: The DeepSpeed engine.
        partitions: Its partitions.
        is_exact: Every master will be stored exactly. Under ZeRO 3 the module's trained parameters
            then follow from ``master``, and are left out. If masters are bounded, narrow weights
            bound them, and are stored.
    """
    result: dict[str, Any] = {MASTER: {}, OPTIMIZER: {}, MODULE: {}}
    stage = engine.zero_optimization_stage()
    for partition in partitions:
        for part in partition.parts:
            result[MASTER][part.name] = part.of(partition.master)
            if stage < 3:
                result[MODULE][part.name] = part.of_parameter()
        for key, flat in partition.states.items():
            result[OPTIMIZER].setdefault(key, {}).update(
                {part.name: part.of(flat) for part in partition.parts}
            )
    if stage == 3:
        result[MODULE] = {
            name: part.of(part.parameter.ds_tensor)
            for name, part in frozen(engine, partitions).items()
        }
        if not is_exact:
            # The position is that in the flat partition, and each parameter has its own tensor.
            result[MODULE] |= {
                part.name: part._replace(at=0).of(part.parameter.ds_tensor)
                for partition in partitions
                for part in partition.parts
                if part.parameter.ds_tensor.dtype != partition.master.dtype
            }
    return result
