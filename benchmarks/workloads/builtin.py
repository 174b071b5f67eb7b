"""Small runs of `benchmarks.workloads` for `deltacheck eval` and the demo, in PyTorch.

Each function is a factory as ``deltacheck.evaluate.Workload`` describes it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import tasks
from benchmarks.workloads.recipe import Recipe, small, tiny
from benchmarks.workloads.recipe import demo as demo_recipe
from benchmarks.workloads.recipe import tiny_demo as tiny_demo_recipe
from benchmarks.workloads.text import Rows
from benchmarks.workloads.torch_workloads import Workload, pretrained
from deltacheck.evaluate.workload import FOLDER

# Files in the folder that the processes of an evaluation share.
ROWS, PRETRAINED = "finetune.npz", "pretrained.pt"
# PyTorch's default betas. The rate is constant, as in the middle of a long run.
_DEMO: dict[str, Any] = {"betas": (0.9, 0.999), "steps": None, "warmup_steps": 0}


class ProtocolWorkload:
    """An adapter from a run to the protocol ``deltacheck.evaluate.Workload``."""

    def __init__(self, run: Workload) -> None:
        self._run = run

    def step(self) -> float:
        return self._run.train_step()

    def state(self) -> Any:
        return self._run.state()

    def load(self, state: Any) -> None:
        self._run.load(state)

    def evaluate(self) -> float:
        return self._run.evaluate()

    def reorder(self, seed: int) -> None:
        self._run.reorder(seed)


def sft(seed: int) -> ProtocolWorkload:
    """Create a supervised fine-tuning at 1e-5, with dropout. 0.4 M parameters."""
    return create(_small("sft"), seed)


def rl_like(seed: int) -> ProtocolWorkload:
    """Create a reinforcement learning with checked answers at 1e-6. 0.4 M parameters."""
    return create(_small("rl"), seed)


def lora(seed: int) -> ProtocolWorkload:
    """Create a fine-tuning of low-rank adapters at 1e-4, the base frozen. 0.4 M parameters."""
    return create(_small("lora"), seed)


def tiny_sft(seed: int) -> ProtocolWorkload:
    """Create ``sft`` in its tiny size."""
    return create(tiny("sft"), seed)


def tiny_rl_like(seed: int) -> ProtocolWorkload:
    """Create ``rl_like`` in its tiny size."""
    return create(tiny("rl"), seed)


def tiny_lora(seed: int) -> ProtocolWorkload:
    """Create ``lora`` in its tiny size."""
    return create(tiny("lora"), seed)


def demo(seed: int) -> ProtocolWorkload:
    """Create the fine-tuning of the demo. 3.3 M parameters."""
    return create(demo_recipe(seed, batch=4, pretrain_rate=3e-3, **_DEMO), seed)


def tiny_demo(seed: int) -> ProtocolWorkload:
    """Create ``demo`` in its tiny size."""
    return create(tiny_demo_recipe(seed, **_DEMO), seed)


def _small(task: str) -> Recipe:
    return small(task, pretrain_steps=100, sources=200)


def create(recipe: Recipe, seed: int) -> ProtocolWorkload:
    """Create a run from pre-trained weights that are the same for every seed.

    This is how people fine-tune. The noise between seeds is that of data order, dropout and
    sampling.
    """
    folder = Path(os.environ[FOLDER])
    weights, rows = folder / PRETRAINED, folder / ROWS
    if not weights.exists():
        torch.save(pretrained(recipe), weights)
    if recipe.task != "rl":
        if rows.exists():
            tasks.take_function_rows(recipe, Rows.read(rows))
        else:
            tasks.function_rows(recipe).write(rows)
    run = Workload(replace(recipe, seed=seed), torch.load(weights, weights_only=True))
    return ProtocolWorkload(run)
