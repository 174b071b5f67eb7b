"""The runs that `deltacheck eval` knows by itself, in PyTorch: each a factory as
``deltacheck.evaluate.Workload`` describes it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deltacheck.evaluate.workload import FOLDER
from deltacheck.evaluate.workloads import data
from deltacheck.evaluate.workloads.recipe import Recipe, small, tiny
from deltacheck.evaluate.workloads.text import Rows
from deltacheck.evaluate.workloads.torch_workloads import Workload, pretrained


class Judged:
    """A workload behind the protocol."""

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


def sft(seed: int) -> Judged:
    """Supervised fine-tuning at 1e-5, with dropout. 0.4 M parameters."""
    return _made(_small("sft"), seed)


def rl_like(seed: int) -> Judged:
    """Reinforcement learning with checked answers at 1e-6. 0.4 M parameters."""
    return _made(_small("rl"), seed)


def lora(seed: int) -> Judged:
    """Fine-tuning of low-rank adapters at 1e-4, the base frozen. 0.4 M parameters."""
    return _made(_small("lora"), seed)


def tiny_sft(seed: int) -> Judged:
    return _made(tiny("sft"), seed)


def tiny_rl_like(seed: int) -> Judged:
    return _made(tiny("rl"), seed)


def tiny_lora(seed: int) -> Judged:
    return _made(tiny("lora"), seed)


def _small(task: str) -> Recipe:
    return small(task, pretrain_steps=100, sources=200)


def _made(recipe: Recipe, seed: int) -> Judged:
    """Every seed goes on from the same pre-trained weights, as people who fine-tune do: the noise
    is that of data order, dropout and sampling.
    """
    folder = Path(os.environ[FOLDER])
    weights, rows = folder / "weights.pt", folder / "rows.npz"
    if not weights.exists():
        torch.save(pretrained(recipe), weights)
    if recipe.task != "rl":
        if rows.exists():
            data.take_function_rows(recipe, Rows.read(rows))
        else:
            data.function_rows(recipe).write(rows)
    return Judged(Workload(replace(recipe, seed=seed), torch.load(weights, weights_only=True)))
