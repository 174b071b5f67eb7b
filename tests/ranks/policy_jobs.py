"""Define the jobs of the torch ranks that save under a lossy policy: FSDP2 weights in bfloat16, and
an AdamW that keeps float32 masters.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import deltacheck
from deltacheck import Policy, Profile, Profiler, SaveOptions
from deltacheck.backends.torch import DeltaStorageReader, DeltaStorageWriter, Engine
from deltacheck.errors import SaveFailed
from tests.ranks.jobs import world

WIDTH = 131  # no number of ranks divides it
RATE, BETAS = 1e-5, (0.9, 0.999)


class MasterRun:
    """A training whose gradients depend on the step alone."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        made = torch.nn.Sequential(
            torch.nn.Linear(67, WIDTH, bias=False),
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, WIDTH, bias=False),
        ).to(torch.bfloat16)
        fully_shard(made, mesh=init_device_mesh("cpu", (size,)))
        self.model, self.step = made, 0
        self.parameters = list(made.parameters())
        self.kept = {
            number: {
                "master": parameter.detach().float(),
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
                "step": torch.zeros(()),
            }
            for number, parameter in enumerate(self.parameters)
        }

    def advance(self, steps: int) -> None:
        b1, b2 = BETAS
        for _ in range(steps):
            self.step += 1
            for number, parameter in enumerate(self.parameters):
                kept = self.kept[number]
                kept["step"] += 1
                count = float(kept["step"])
                generator = torch.Generator().manual_seed(1000 * self.step + number)
                whole = torch.randn(parameter.shape, generator=generator) * 1e-3
                mesh, placements = parameter.device_mesh, parameter.placements
                g = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                master, m, v = (kept[n].to_local() for n in ("master", "exp_avg", "exp_avg_sq"))
                m.lerp_(g, 1 - b1)
                v.lerp_(g * g, 1 - b2)
                hat = m / (1 - b1**count) / ((v / (1 - b2**count)).sqrt() + 1e-8)
                master.sub_(RATE * hat)
                parameter.to_local().data.copy_(master)

    def state(self, *, is_named: bool) -> dict[str, Any]:
        """Return the state; the optimizer names its parameters or numbers them."""
        names = {number: f"w{number}" for number in self.kept}
        kept = {names[n]: kept for n, kept in self.kept.items()} if is_named else self.kept
        group = {"lr": RATE, "betas": BETAS, "eps": 1e-8, "params": list(kept)}
        return {
            "model": {names[number]: p.detach() for number, p in enumerate(self.parameters)},
            "optimizer": {"state": kept, "param_groups": [group]},
            "step": self.step,
        }


class DcpEngine:
    """The calls of ``Engine`` that ``train`` makes, carried out by DCP."""

    def __init__(self, root: Path, *, is_async: bool) -> None:
        self.root, self.is_async = root, is_async
        self.policy, self.loss = Policy.auto(derive=False), 1.0

    def __enter__(self) -> DcpEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer().close()

    def writer(self) -> DeltaStorageWriter:
        return DeltaStorageWriter(self.root, policy=self.policy, metrics={"loss": self.loss})

    def steps(self) -> list[int]:
        return deltacheck.open(self.root).steps() if self.root.exists() else []

    def restore(self, into: dict[str, Any]) -> dict[str, Any]:
        dcp.load(into, storage_reader=DeltaStorageReader(self.root, resume=True))
        return into

    def save(self, step: int, state: dict[str, Any]) -> DcpEngine:
        try:
            if self.is_async:
                dcp.async_save(state, checkpoint_id=step, storage_writer=self.writer()).result()
            else:
                dcp.save(state, checkpoint_id=step, storage_writer=self.writer())
        except (CheckpointException, RuntimeError) as error:
            raise SaveFailed(str(error)) from None
        return self

    def result(self, timeout: float) -> None:
        """Do nothing: ``save`` has waited."""


def gathered(value: Any) -> Any:
    """Return a state with whole NumPy arrays, bfloat16 as ``ml_dtypes``; a collective call."""
    if isinstance(value, Mapping):
        return {key: gathered(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [gathered(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    import ml_dtypes

    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return tensor.numpy().copy()


def tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a state."""
    return {"model": state["model"], "optimizer": {"state": state["optimizer"]["state"]}}


def train(
    rank: int, size: int, port: int, root: Path, saves: int, killed_at: str, through: str
) -> dict[int, Any]:
    """Restore the newest step if there is one, and train with a save every ten steps.

    ``through``: ``engine``, ``profile``, which is an engine that knows a profile, or ``dcp``,
    which four ranks call asynchronously. Under DCP, the last of four ranks reports a loss that is
    NaN at their last save.

    Rank 1 kills itself in the last save: ``durable`` when its segment is, ``capture`` before.

    Returns:
        What was live at each save, and what this rank restored, under the key -1.
    """
    live: dict[int, Any] = {}
    is_named = through == "dcp"
    with (
        world(rank, size) as group,
        DcpEngine(root, is_async=size == 4)
        if through == "dcp"
        else Engine(
            root,
            process_group=group,
            policy=policy_of(through, root, size),
            options=SaveOptions(on_error="log"),
        ) as engine,
    ):
        run = MasterRun(size)
        if engine.steps():
            restored = engine.restore(into=run.state(is_named=is_named))
            run.step = restored["step"]
            live[-1] = gathered(restored)
        else:
            run.advance(100)
        for number in range(saves):
            run.advance(10)
            state = run.state(is_named=is_named)
            live[run.step] = gathered(state)
            if killed_at and number == saves - 1 and rank == 1:
                arm(killed_at)
            if isinstance(engine, DcpEngine) and number == saves - 1 and rank == 3:
                engine.loss = math.nan
            try:
                engine.save(run.step, state).result(240)
            except SaveFailed:
                assert killed_at
                assert number == saves - 1
    return live


def policy_of(through: str, root: Path, size: int) -> Policy:
    """Return the policy of a run; the first ranks of a run with a profile profile it."""
    if through != "profile":
        return Policy.auto(derive=False)
    path = root.with_suffix(".json")
    if not path.exists():
        run, profiler = MasterRun(size), Profiler(interval_steps=10)
        for _ in range(25):
            run.advance(10)
            profiler.observe(run.step, gathered(run.state(is_named=False)))
        dist.barrier()
        if dist.get_rank() == 0:
            profiler.write(path)
        dist.barrier()
    return Policy.auto(Profile.read(path))


def arm(killed_at: str) -> None:
    """Let this process kill itself at a point of its next save."""
    from deltacheck.save.job.segment_builder import SegmentBuilder

    def kill(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if killed_at == "capture":
        SegmentBuilder.put_keyframes = kill  # type: ignore[method-assign]
        return
    finish = SegmentBuilder.finish

    def finish_and_kill(builder: Any) -> None:
        finish(builder)
        kill()

    SegmentBuilder.finish = finish_and_kill  # type: ignore[method-assign, assignment]


def equal(one: Any, other: Any) -> bool:
    """Return true if two states of NumPy arrays have the same bits."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "tobytes"):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return bool(one == other)
