"""Define the jobs of ``test_torchtitan.py``: torchtitan's containers and checkpoint manager, on
gloo and the CPU.

Its ``Trainer`` needs a GPU, so ``Run`` has the calls of ``Trainer.train`` that concern checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deltacheck
from deltacheck import SaveOptions
from tests.ranks.dcp_jobs import digests, join, stored_bytes
from tests.support.waiting import wait_until

WIDTH, STEPS = 48, 8


class Position:
    """The place in the data, as of a data loader."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": self.batches, "world_size": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state[f"dp_rank_{dist.get_rank()}"]


class Run:
    """A training: model, optimizers, schedulers, data, and a manager.

    Args:
        dump: The dump folder.
        seed: Of the weights.
        manager: The class of the manager; default ours.
        **section: Fields of the config section.
    """

    def __init__(self, dump: str, seed: int, manager: Any = None, **section: Any) -> None:
        from torchtitan.components.optimizer import (
            LRSchedulersContainer,
            OptimizersContainer,
            ParamGroupConfig,
        )

        from deltacheck.backends.torch.dcp.torchtitan import DeltaCheckpointManager

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (self.model[0], self.model[2], self.model):
            fully_shard(part, mesh=mesh)
        adam = {"lr": 1e-2, "betas": (0.9, 0.95)}
        self.optimizers = OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adam)
            ],
            implementation="for-loop",
        ).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.data = Position()
        self.step = 0
        settings = {"enable": True, "interval": 2, "last_save_model_only": False} | section
        self.manager = (
            (manager or DeltaCheckpointManager)
            .Config(**settings)
            .build(
                dataloader=self.data,
                model_parts=[self.model],
                optimizers=self.optimizers,
                lr_schedulers=self.schedulers,
                states={"train_state": self},
                sd_adapter=None,
                base_folder=dump,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, until: int) -> None:
        while self.step < until:
            self.step += 1
            self.data.batches += 1
            # The same on every rank: the result does not depend on their number.
            generator = torch.Generator().manual_seed(self.data.batches)
            batch = torch.randn(4, WIDTH, generator=generator)
            self.optimizers.zero_grad()
            self.model(batch).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.manager.save(self.step, last_step=self.step == STEPS)

    def digest(self) -> dict[str, str]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizers.state_dict()}
        return digests({**state, "scheduler": self.schedulers.state_dict(), "step": self.step})


def killed(rank: int, size: int, port: int, folder: str) -> None:
    """Train to the end without a kill; then anew, and be killed while step 6 is saved."""
    join(rank, size, port)
    from deltacheck.backends.torch.dcp import DeltaStorageWriter

    whole = Run(f"{folder}/whole", seed=0)
    whole.train(STEPS)
    whole.manager.close()
    run = Run(f"{folder}/run", seed=0, async_mode="async")
    run.train(4)
    noted = {"4": run.digest(), "8": whole.digest()}
    Path(folder, f"noted-{rank}.json").write_text(json.dumps(noted))
    run.manager.maybe_wait_for_saving()
    dist.barrier()
    write = DeltaStorageWriter.write_data

    def write_data(*args: Any) -> Any:
        write(*args)
        # A rank that is alive would report that it lost the other.
        Path(folder, f"written-{rank}").touch()
        wait_until(lambda: all(Path(folder, f"written-{other}").exists() for other in range(size)))
        os.kill(os.getpid(), signal.SIGKILL)

    DeltaStorageWriter.write_data = write_data  # type: ignore[method-assign]
    run.train(6)
    signal.pause()


def resumed(rank: int, size: int, port: int, folder: str) -> dict[str, Any]:
    """Resume the killed run, and train to the end."""
    join(rank, size, port)
    run = Run(f"{folder}/run", seed=7, async_mode="async_with_pinned_mem", keep_latest_k=2)
    # As torchtitan's, without pinned memory, which needs a GPU.
    run.manager.stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
    )
    told: dict[str, Any] = {"loaded": run.manager.load(), "at": run.digest(), "step": run.step}
    root = Path(folder, "run/checkpoint/deltacheck")
    before = stored_bytes(str(root))
    run.train(6)
    run.manager.maybe_wait_for_saving()
    dist.barrier()
    told["bytes"] = before, stored_bytes(str(root))
    dist.barrier()
    run.train(STEPS)
    told["end"] = run.digest()
    run.manager.close()
    dist.barrier()
    told["steps"] = deltacheck.open(root).steps()
    try:
        run.manager.load(4)
    except FileNotFoundError as error:
        told["removed"] = str(error)
    told["folders"] = sorted(path.name for path in root.parent.glob("step-*"))
    dist.destroy_process_group()
    return told


def alone(rank: int, size: int, port: int, folder: str) -> dict[str, Any]:
    """Load on one rank what two have saved, and what torchtitan itself has saved."""
    join(rank, size, port)
    from torchtitan.components.checkpointer import CheckpointManager

    told: dict[str, Any] = {}
    # A rank of another number has no place in the data.
    one = Run(f"{folder}/run", seed=7, load_only=True, exclude_from_loading=["dataloader"])
    told["loaded"], told["end"] = one.manager.load(), one.digest()
    told["unsaved"] = one.manager.save(2)
    one.manager.close()

    path = str(Path(folder, "run/checkpoint/step-8").absolute())
    other = Run(
        f"{folder}/other",
        seed=7,
        initial_load_path=path,
        interval=1,
        export_dtype="bfloat16",
        last_save_model_only=True,
    )
    told["initial"] = other.manager.load(), other.step, other.digest()
    other.step = STEPS - 1
    other.train(STEPS)
    other.manager.close()
    last = deltacheck.open(f"{folder}/other/checkpoint/deltacheck").restore()
    told["last"] = {name: str(value.dtype) for name, value in last.items()}

    native = Run(f"{folder}/native", seed=0, manager=CheckpointManager)
    native.train(4)
    native.manager.close()
    moved = Run(f"{folder}/native", seed=7)
    told["native"] = moved.manager.load(), moved.digest() == native.digest()
    moved.train(6)
    moved.manager.close()
    again = Run(f"{folder}/native", seed=7)
    told["mixed"] = again.manager.load(), again.step, again.digest() == moved.digest()
    told["earlier"] = again.manager.load(4), again.digest() == native.digest()

    told["refused"] = []
    for wrong in (
        lambda: {"folder": "gs://bucket/checkpoint"},
        lambda: {"save_options": SaveOptions(shadow="nowhere")},
        lambda: {"save_options": SaveOptions(on_busy="skip")},
    ):
        try:
            Run(f"{folder}/wrong", 0, **wrong())
        except ValueError as error:
            told["refused"].append(str(error))
    told["nothing written"] = not Path(folder, "wrong").exists()
    told["missing"] = Run(f"{folder}/wrong", 0).manager.load()
    try:
        again.manager.load(5)
    except FileNotFoundError as error:
        told["no step"] = str(error)
    dist.destroy_process_group()
    return told
