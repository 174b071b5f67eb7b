"""Define the jobs that the ranks of ``test_megatron.py`` run.

Their states are described by Megatron-Core's classes, or by classes with the same fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deltacheck.backends.torch import Engine
from tests.ranks.dcp_jobs import join, stored_bytes
from tests.ranks.megatron_core_jobs import prepare

LAYERS, ROWS, COLUMNS, WORDS = 4, 120, 160, 101


@dataclass
class ShardedTensor:
    """The fields of ``megatron.core.dist_checkpointing.mapping.ShardedTensor`` that say what
    it is.
    """

    key: str
    data: torch.Tensor | None
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0


@dataclass
class ShardedObject:
    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0

    @property
    def unique_key(self) -> str:
        offset = ".".join(map(str, self.global_offset))
        return f"{self.key}/shard_{offset}_{'.'.join(map(str, self.global_shape))}"


def whole(step: int) -> dict[str, torch.Tensor]:
    """The model that nobody holds whole; a step changes a few elements."""
    made = torch.Generator().manual_seed(11)
    found = {
        "layers.weight": torch.randn(LAYERS, ROWS, COLUMNS, generator=made),
        "embedding": torch.randn(WORDS, COLUMNS, generator=made).bfloat16(),
        "norm": torch.randn(COLUMNS, generator=made),
    }
    for number in range(2, step + 1):
        found["layers.weight"][:, number, number] += 1
        found["norm"][number] = number
    return found


def state(
    kind: str, rank: int, size: int, step: int, fill: bool, tensor: Any = ShardedTensor
) -> dict[str, Any]:
    """A rank's state. ``pipeline``: whole layers, numbered from 0 on each stage; ``tensor``: some
    rows of all layers.
    """
    full = whole(step)

    def part(
        key: str,
        box: tuple[slice, ...],
        shape: tuple[int, ...],
        offset: tuple[int, ...],
        **more: Any,
    ) -> Any:
        data = full[key][box].clone()
        return tensor(
            key=key,
            data=data if fill else torch.zeros_like(data),
            global_shape=shape,
            global_offset=offset,
            **more,
        )

    layers: dict[str, Any] = {}
    mine = (
        range(LAYERS * rank // size, LAYERS * (rank + 1) // size)
        if kind == "pipeline"
        else range(LAYERS)
    )
    rows = (
        slice(0, ROWS)
        if kind == "pipeline"
        else slice(ROWS * rank // size, ROWS * (rank + 1) // size)
    )
    for local, layer in enumerate(mine):
        layers[f"layers.{local}.weight"] = part(
            "layers.weight",
            (layer, rows, slice(None)),
            (LAYERS, ROWS, COLUMNS),
            (layer, rows.start, 0),
            prepend_axis_num=1,
        )
    words = (
        slice(0, WORDS)
        if kind == "pipeline"
        else slice(WORDS * rank // size, WORDS * (rank + 1) // size)
    )
    if kind == "tensor" or rank == 0:
        layers["word_embeddings"] = part(
            "embedding", (words, slice(None)), (WORDS, COLUMNS), (words.start, 0)
        )
    layers["norm"] = part("norm", (slice(None),), (COLUMNS,), (0,), replica_id=(0, 0, rank))
    return {"model": layers, "iteration": step if fill else 0, "args": {"lr": 0.1 if fill else 0.0}}


def wrong(found: dict[str, Any], step: int) -> list[str]:
    """The keys of descriptors whose data is not theirs."""
    full, bad = whole(step), []
    for one in found["model"].values():
        shape = tuple(one.data.shape)  # Megatron-Core itself may have prepended the axes
        shape = (1,) * (len(one.global_shape) - len(shape)) + shape
        box = tuple(slice(o, o + n) for o, n in zip(one.global_offset, shape, strict=True))
        if not torch.equal(full[one.key][box].reshape(one.data.shape), one.data):
            bad.append(one.key)
    return bad


def engine_save(rank: int, size: int, port: int, root: str, kind: str, steps: list[int]) -> Any:
    join(rank, size, port)
    found = []
    with Engine(root, process_group=dist.group.WORLD) as engine:
        for step in steps:
            mine = state(kind, rank, size, step, True)
            mine["rng"] = ShardedObject("rng", f"of rank {rank}", (size,), (rank,))
            engine.save(step, mine).result()
            dist.barrier()
            found.append(stored_bytes(root))
            dist.barrier()
    dist.destroy_process_group()
    return found


def engine_load(
    rank: int, size: int, port: int, root: str, kind: str, steps: list[int], with_rng: bool
) -> Any:
    """For each step: what is wrong, the numbers, and whether the state has the target's names."""
    join(rank, size, port)
    found = []
    with Engine(root, process_group=dist.group.WORLD) as engine:
        for step in steps:
            target = state(kind, rank, size, step, False)
            if with_rng:
                target["rng"] = ShardedObject("rng", "", (size,), (rank,))
            restored = engine.restore(step, into=target)
            told = (
                restored["iteration"],
                restored["args"],
                restored["rng"].data if with_rng else "",
            )
            found.append(
                (wrong(restored, step), told, restored["model"].keys() == target["model"].keys())
            )
    dist.destroy_process_group()
    return found


def own(
    key: str,
    data: torch.Tensor,
    global_shape: Any,
    global_offset: Any,
    replica_id: Any = 0,
    prepend_axis_num: int = 0,
) -> Any:
    """Megatron-Core's own descriptor."""
    from megatron.core.dist_checkpointing import mapping

    cuts = tuple(
        s // (n or 1)
        for s, n in zip(global_shape, (1,) * prepend_axis_num + tuple(data.shape), strict=True)
    )
    even = all(
        o % n == 0 and s % n == 0
        for s, o, n in zip(
            global_shape, global_offset, (1,) * prepend_axis_num + tuple(data.shape), strict=True
        )
    )
    return mapping.ShardedTensor(
        key,
        data,
        data.dtype,
        tuple(data.shape),
        tuple(global_shape),
        tuple(global_offset),
        cuts if even else None,
        replica_id,
        prepend_axis_num,
    )


def megatron_save(
    rank: int, size: int, port: int, folder: str, root: str, kind: str, steps: list[int]
) -> Any:
    """By Megatron-Core's ``dist_checkpointing.save``; the last step asynchronously."""
    prepare(folder)
    from megatron.core import dist_checkpointing

    from deltacheck.backends.torch.megatron import DeltaSaveStrategy

    join(rank, size, port)
    strategy, found = DeltaSaveStrategy(str(Path(root) / "deltas")), []
    for step in steps:
        directory = Path(root) / f"iter_{step:07d}"
        directory.mkdir(exist_ok=True, parents=True)
        dist.barrier()
        mine = state(kind, rank, size, step, True, own)
        later = step == steps[-1]
        request = dist_checkpointing.save(
            mine,
            str(directory),
            strategy,
            async_sharded_save=later,
            validate_access_integrity=False,
        )
        if request is not None:
            for one in mine["model"].values():
                one.data.zero_()  # the training goes on
            request.execute_sync()
        dist.barrier()
        found.append(stored_bytes(str(Path(root) / "deltas")))
        dist.barrier()
    dist.destroy_process_group()
    return found


def megatron_load(
    rank: int, size: int, port: int, folder: str, root: str, kind: str, step: int
) -> Any:
    prepare(folder)
    from megatron.core import dist_checkpointing

    from deltacheck.backends.torch.megatron import DeltaLoadStrategy

    join(rank, size, port)
    target = state(kind, rank, size, step, False, own)
    held = {"model": dict(target["model"])}
    loaded = dist_checkpointing.load(
        target,
        str(Path(root) / f"iter_{step:07d}"),
        DeltaLoadStrategy(str(Path(root) / "deltas")),
        validate_access_integrity=False,
    )
    dist.destroy_process_group()
    told = (loaded["iteration"], loaded["args"])
    same = all(
        torch.equal(loaded["model"][name].reshape(one.data.shape), one.data)
        for name, one in held["model"].items()
    )
    return wrong(held, step), told, same
