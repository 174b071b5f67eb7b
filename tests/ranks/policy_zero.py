"""Define the job of DeepSpeed ranks that save under a lossy policy.

One process trains under each ZeRO stage in turn, because DeepSpeed takes long to import.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from deltacheck.errors import DeltacheckError
from tests.ranks.policy_jobs import BETAS, RATE, arm
from tests.support.promises import flat

STAGES = (1, 2, 3)
FIRST, EVERY = 70, 5  # steps before the first save, and between two saves
# A part of a leaf: path, first element, elements of the leaf, values.
Parts = list[tuple[str, int, int, Any]]


def start(rank: int, size: int) -> None:
    """Join the ranks, and let deltacheck save for DeepSpeed."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.utils import logger

    from deltacheck.backends.torch.deepspeed import install

    logger.setLevel(logging.CRITICAL)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled here
    install()
    deepspeed.init_distributed("gloo")


def made(stage: int) -> Any:
    """Return an engine with a policy that its configuration names."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(67, 131, bias=False),
        torch.nn.LayerNorm(131),
        torch.nn.Linear(131, 31, bias=False),
        torch.nn.Linear(31, 5).requires_grad_(False),
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "betas": BETAS, "torch_adam": True},
        },
        # Two partitions on one rank under ZeRO 3.
        "zero_optimization": {"stage": stage, "sub_group_size": 9000},
        "bf16": {"enabled": True},
        "deltacheck": {"policy": "auto"},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 2]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def advance(engine: Any, steps: int) -> None:
    for _ in range(steps):
        random = torch.Generator().manual_seed(1000 * engine.global_steps + engine.global_rank)
        given = torch.randn(4, 67, generator=random)
        loss = (engine(given.bfloat16()).float() * torch.randn(4, 5, generator=random)).mean()
        engine.backward(loss)
        engine.step()


def parts(engine: Any) -> Parts:
    """Return what this rank holds of the leaves that a policy treats, bfloat16 as ``ml_dtypes``."""
    from deltacheck.backends.torch.deepspeed import zero

    tree = zero.fragments(engine, zero.partitions(engine), is_exact=False)
    leaves = {
        f"{key}/{name}": part for key in ("master", "module") for name, part in tree[key].items()
    }
    for key, of_key in tree["optimizer"].items():
        leaves |= {f"optimizer/{key}/{name}": part for name, part in of_key.items()}
    return [
        (path, part.global_offset[0], part.global_shape[0], _array(part.data))
        for path, part in leaves.items()
    ]


def _array(tensor: torch.Tensor) -> Any:
    values = tensor.detach().contiguous().clone()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return values.numpy()


def gathered(engine: Any) -> dict[str, Any]:
    """Return the whole leaves by path, 1-D; a collective call."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, parts(engine))
    leaves: dict[str, Any] = {}
    for of_rank in ranks:
        for path, first, elements, values in of_rank:
            leaf = leaves.setdefault(path, np.zeros(elements, values.dtype))
            leaf[first : first + values.size] = values
    return leaves


def restored_leaves(run: Any, step: int, paths: Iterable[str]) -> dict[str, Any]:
    """Return leaves of a step as ``gathered`` does."""
    tree = flat(run.restore(step))
    return {path: np.asarray(tree[path]).reshape(-1) for path in paths if path in tree}


def weight_of(master: str) -> str:
    """Return the path of the weight of a master."""
    return master.replace("master/", "module/")


def train(
    rank: int, size: int, port: int, folder: Path, saves: int, is_killed: bool
) -> dict[int, dict[int, Any]]:
    """Load the newest step of each ZeRO stage if there is one, and train with saves.

    Rank 1 kills itself in the last save of the last stage.

    Returns:
        By stage and step what was live at each save, and under -1 what was loaded.
    """
    start(rank, size)
    live: dict[int, dict[int, Any]] = {}
    for stage in STAGES:
        engine = made(stage)
        of_stage = live[stage] = {}
        if (folder / str(stage) / "latest").exists():
            engine.load_checkpoint(str(folder / str(stage)))
            of_stage[-1] = gathered(engine)
        else:
            advance(engine, FIRST)
        for number in range(saves):
            advance(engine, EVERY)
            of_stage[engine.global_steps] = gathered(engine)
            is_last = is_killed and stage == STAGES[-1] and number == saves - 1
            if is_last and rank == 1:
                arm("durable")
            engine.save_checkpoint(str(folder / str(stage)))
            try:
                engine.checkpoint_engine.wait()
            except DeltacheckError:
                assert is_last
                return live
        engine.destroy()
    return live
