"""Define the jobs that the ranks of ``test_dcp.py`` run.

Every rank imports this module, so it does not import pytest.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import deltacheck
from deltacheck import Keep, Policy, SaveOptions
from deltacheck.backends.torch import DeltaStorageReader, DeltaStorageWriter
from deltacheck.backends.torch.dcp.stream import stream_of
from tests.ranks.jobs import merged_content


def join(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )


def stored_bytes(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


def digests(state: Any, prefix: str = "") -> dict[str, str]:
    """Of every leaf, whole: the same on any number of ranks."""
    if isinstance(state, dict):
        return {
            name: one
            for key, value in state.items()
            for name, one in digests(value, f"{prefix}{key}.").items()
        }
    if not isinstance(state, torch.Tensor):
        return {prefix: repr(state)}
    whole = state.full_tensor() if isinstance(state, DTensor) else state
    content = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {prefix: hashlib.sha256(content).hexdigest()}


def state(size: int) -> dict[str, Any]:
    """Sharded evenly, unevenly and not at all, and what is no tensor; the same content on any
    number of ranks.
    """
    mesh = init_device_mesh("cpu", (size,))
    made = torch.Generator().manual_seed(7)
    return {
        "rows": distribute_tensor(torch.randn(600, 500, generator=made), mesh, [Shard(0)]),
        "columns": distribute_tensor(
            torch.randn(9, 301, generator=made).bfloat16(), mesh, [Shard(1)]
        ),
        "two rows": distribute_tensor(torch.randn(2, 5, generator=made), mesh, [Shard(0)]),
        "replica": distribute_tensor(torch.randn(50, 40, generator=made), mesh, [Replicate()]),
        "plain": torch.arange(5),
        "nested": {"step": 1, "names": ["a", "b"], "scalar": torch.tensor(0.5)},
    }


def blank(size: int) -> dict[str, Any]:
    empty = state(size)
    for name in ("rows", "columns", "two rows", "replica", "plain"):
        empty[name].zero_()
    empty["nested"] = {"step": 0, "names": [], "scalar": torch.tensor(0.0)}
    return empty


def change(state: dict[str, Any], step: int) -> None:
    """A few elements of every rank's part."""
    local = state["rows"]._local_tensor
    local[: 3 * step : 3, step] += 1.0
    state["plain"] += step
    state["nested"]["step"] = step


def save_two(rank: int, size: int, port: int, root: str) -> Any:
    """Steps 1, 2 (a writer of its own) and 3 (asynchronous); what each has and takes on disk."""
    join(rank, size, port)
    mine, found, bytes_before = state(size), [], 0
    for step in (1, 2, 3):
        change(mine, step)
        writer = DeltaStorageWriter(root)
        if step == 3:
            future = dcp.async_save(
                mine, checkpoint_id=str(Path("run") / f"step-{step}"), storage_writer=writer
            )
            future.result()
        else:
            dcp.save(mine, checkpoint_id=step, storage_writer=writer)
        dist.barrier()
        total = stored_bytes(root)
        found.append((digests(mine), total - bytes_before))
        bytes_before = total
        dist.barrier()
    dist.destroy_process_group()
    return found


def load(rank: int, size: int, port: int, root: str, steps: list[int | None]) -> Any:
    join(rank, size, port)
    found = []
    for step in steps:
        target = blank(size)
        dcp.load(target, storage_reader=DeltaStorageReader(root, step))
        found.append(digests(target))
    dist.destroy_process_group()
    return found


class Failing(DeltaStorageWriter):
    """Fails, or is killed, on rank 1 when its part is durable."""

    kill = False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        done = super().write_data(plan, planner)
        if dist.get_rank() == 1:
            if self.kill:
                os._exit(9)
            raise OSError("the disk of rank 1 is full")
        return done


class Stubborn(DefaultSavePlanner):
    """Fails on rank 0 before anything is written there."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 0:
            raise MemoryError("no memory on rank 0")
        return super().resolve_data(write_item)


def fail_between(rank: int, size: int, port: int, root: str) -> Any:
    """Step 1, a step 2 that fails on rank 1, step 3: what 1 has, what step 2 has said on each rank,
    and whether 3 comes back.
    """
    join(rank, size, port)
    mine = state(size)
    change(mine, 1)
    dcp.save(mine, checkpoint_id=1, storage_writer=DeltaStorageWriter(root))
    first = digests(mine)
    change(mine, 2)
    try:
        dcp.save(mine, checkpoint_id=2, storage_writer=Failing(root))
        told = ""
    except CheckpointException as error:
        told = str(error)
    after = {"steps": DeltaStorageReader(root)._root.steps(), "told": told}
    target = blank(size)
    dcp.load(target, storage_reader=DeltaStorageReader(root))
    after["newest"] = digests(target)
    try:  # rank 1 writes, rank 0 does not come to it
        dcp.save(mine, checkpoint_id=2, storage_writer=DeltaStorageWriter(root), planner=Stubborn())
        after["stubborn"] = ""
    except CheckpointException as error:
        after["stubborn"] = str(error)
    change(mine, 3)
    dcp.save(mine, checkpoint_id=3, storage_writer=DeltaStorageWriter(root))
    dcp.load(target, storage_reader=DeltaStorageReader(root))
    after["third"] = digests(target) == digests(mine)
    dist.destroy_process_group()
    return first, after


def kill_between(rank: int, size: int, port: int, root: str) -> Any:
    """Step 1, then a step 2 in which rank 1 is killed before the coordinator commits."""
    join(rank, size, port)
    mine = state(size)
    change(mine, 1)
    dcp.save(mine, checkpoint_id=1, storage_writer=DeltaStorageWriter(root))
    first = digests(mine)
    change(mine, 2)
    writer = Failing(root)
    writer.kill = True
    try:
        dcp.save(mine, checkpoint_id=2, storage_writer=writer)
    except (CheckpointException, RuntimeError) as error:
        return first, type(error).__name__
    return first, ""


def go_on(rank: int, size: int, port: int, root: str) -> Any:
    """Save a step 2 after the newest step.

    Return the content of the newest step, if the new step restores, and its bytes on disk.
    """
    join(rank, size, port)
    mine = blank(size)
    before = stored_bytes(root)
    dcp.load(mine, storage_reader=DeltaStorageReader(root, resume=True))
    found = digests(mine)
    change(mine, 2)
    dcp.save(mine, checkpoint_id=2, storage_writer=DeltaStorageWriter(root))
    dist.barrier()
    taken = stored_bytes(root) - before
    target = blank(size)
    dcp.load(target, storage_reader=DeltaStorageReader(root, 2))
    again = digests(target) == digests(mine)
    dist.destroy_process_group()
    return found, again, taken


def fsdp(
    rank: int, size: int, port: int, root: str, source: str | None, first: int, last: int
) -> Any:
    """Train a model under FSDP2 and save every step, from step ``first`` of the root ``source``, if
    there is one. What it has at the end.
    """
    join(rank, size, port)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(33, 70), nn.ReLU(), nn.Linear(70, 11))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(8, 33, generator=torch.Generator().manual_seed(1))
    if source is not None:
        weights, moments = get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(held, checkpoint_id=first, storage_reader=DeltaStorageReader(source))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        assert held["step"] == first
    for step in range(first + 1, last + 1):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, moments = get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": moments, "step": step}
        dcp.save(held, checkpoint_id=step, storage_writer=DeltaStorageWriter(root))
    found = digests(held)
    dist.destroy_process_group()
    return found


def merge(
    rank: int, size: int, port: int, root: str, saves: int, fails_at: int | None = None
) -> Any:
    """Save a leaf of which little changes, with short chains and the newest two steps kept.

    The save number ``fails_at`` fails on rank 1 after its part is durable. Return the first
    segment's number that each step needs, and the bytes of merges that steps state.
    """
    join(rank, size, port)
    options: dict[str, Any] = {
        "policy": Policy.exact(max_chain_depth=6),
        "keep": Keep(last=2),
        "options": SaveOptions(grace_seconds=0),
    }
    oldest, merged_bytes = [], 0
    mesh = init_device_mesh("cpu", (size,))
    opened = deltacheck.open(root) if Path(root).exists() else None
    first = 0 if opened is None else max(opened.steps())
    dist.barrier()
    if opened is not None:
        target = {"w": distribute_tensor(merged_content(0), mesh, [Shard(0)])}
        dcp.load(target, storage_reader=DeltaStorageReader(root, resume=True))
    for step in range(first + 1, first + saves + 1):
        held = {"w": distribute_tensor(merged_content(step), mesh, [Shard(0)])}
        writer = DeltaStorageWriter(root, **options)
        # The merge that was planned with the save is taken by the next one.
        if step - first == fails_at:
            with contextlib.suppress(CheckpointException):
                dcp.save(held, checkpoint_id=step, storage_writer=Failing(root, **options))
        dcp.save(held, checkpoint_id=step, storage_writer=writer)
        saver = stream_of(writer._path, writer.settings).follow()
        compactor = saver.chains.compactor
        assert compactor is not None
        compactor.wait()
        manifest = deltacheck.open(root).manifest(step)
        oldest.append(min(ref.id for ref in manifest.segments).split("-")[0])
        merged_bytes += manifest.merged_bytes
        dist.barrier()
    dist.destroy_process_group()
    return oldest, merged_bytes


def strided(rank: int, size: int, port: int, root: str, save: bool) -> Any:
    """FSDP over tensor parallel, both along the first axis (``_StridedShard``), on 2 x 2 ranks;
    loaded on others as plain shards.
    """
    join(rank, size, port)
    torch.manual_seed(5)
    model = nn.Linear(12, 22, bias=False)
    if save:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model.weight = nn.Parameter(
            distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
        )
        fully_shard(model, mesh=mesh["dp"])
        placed = str(model.weight.placements)
        held = {"weight": model.weight.detach()}
        dcp.save(held, checkpoint_id=1, storage_writer=DeltaStorageWriter(root))
    else:
        placed = ""
        held = {
            "weight": distribute_tensor(
                torch.zeros(22, 12), init_device_mesh("cpu", (size,)), [Shard(1)]
            )
        }
        dcp.load(held, storage_reader=DeltaStorageReader(root))
    found = digests(held)
    dist.destroy_process_group()
    return placed, found


class FailsInLoad(DefaultLoadPlanner):
    """Fails, or is killed, on rank 1 when it places a tensor."""

    kill = False

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if dist.get_rank() == 1:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no place on rank 1")
        return super().resolve_tensor(read_item)


def storages(folder: str, kind: str) -> tuple[Any, Any]:
    """Return functions that make a writer and a reader of DCP's file storage or of ours."""
    if kind == "files":
        return partial(FileSystemWriter, folder), partial(FileSystemReader, folder)
    root = str(Path(folder) / "root")
    return partial(DeltaStorageWriter, root), partial(DeltaStorageReader, root)


def load_failures(rank: int, size: int, port: int, folder: str, kind: str) -> Any:
    """A load that fails on rank 1, one after it, and a save by another process."""
    join(rank, size, port)
    writer, reader = storages(folder, kind)
    saved = state(size)
    change(saved, 1)
    first = str(Path(folder) / "step-1")
    dcp.save(saved, checkpoint_id=first, storage_writer=writer())
    results: dict[str, Any] = {}
    target = blank(size)
    try:
        dcp.load(target, checkpoint_id=first, storage_reader=reader(), planner=FailsInLoad())
    except CheckpointException as error:
        results["failed"] = {
            number: type(failure[0]).__name__ for number, failure in error.failures.items()
        }
    dcp.load(target, checkpoint_id=first, storage_reader=reader())
    results["after"] = digests(target) == digests(saved)
    if kind != "files":
        # The process that saves has to get the root.
        writer().close()
        dist.barrier()
    change(saved, 2)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # That of ``launch``, which ends with its parent, may otherwise start no process.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    second = str(Path(folder) / "step-2")
    dcp.async_save(
        saved,
        checkpoint_id=second,
        storage_writer=writer(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    ).result()
    dcp.load(target, checkpoint_id=second, storage_reader=reader())
    results["by a process"] = digests(target) == digests(saved)
    dist.barrier()
    dist.destroy_process_group()
    return results


def killed_load(rank: int, size: int, port: int, folder: str, kind: str) -> Any:
    """A load in which rank 1 is killed: the error of the other."""
    join(rank, size, port)
    writer, reader = storages(folder, kind)
    first = str(Path(folder) / "step-1")
    dcp.save(state(size), checkpoint_id=first, storage_writer=writer())
    planner = FailsInLoad()
    planner.kill = True
    try:
        dcp.load(blank(size), checkpoint_id=first, storage_reader=reader(), planner=planner)
    except (CheckpointException, RuntimeError) as error:
        return type(error).__name__
    return ""
