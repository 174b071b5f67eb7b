"""Supervised fine-tuning in PyTorch: profile, checkpoint, kill, resume, and compare.

A small model, trained on the spot:

    python -m examples.experiments.sft_torch

A local transformers checkpoint and your data:

    python -m examples.experiments.sft_torch --model PATH --data FILE.jsonl

Weights are bfloat16, with AdamW and masters in float32: 14 bytes per parameter, all of them in
every checkpoint. This file contains the training and its checkpoints; the course of the experiment
is in `examples/experiments/experiment.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from benchmarks.workloads.text import Batches, Rows
from benchmarks.workloads.torch_workloads import be_deterministic
from deltacheck.backends.torch import Engine
from examples.experiments import experiment
from examples.experiments.torch_experiment import (
    TorchExperiment,
    argument_parser,
    loss_of,
)

arguments = argument_parser(__doc__, lr=1e-5)
experiment.add_row_arguments(arguments)


class Run:
    """A training run. ``state()`` is everything that decides how it continues."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, folder: Path) -> None:
        self.model = model
        self.optimizer = MixedPrecisionAdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.999))
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        rows = Rows.read(folder / experiment.TRAINING_ROWS)
        self.batches = Batches(rows, options.batch, options.seed)
        self.step = 0

    def train_step(self) -> dict[str, float]:
        self.model.train()
        loss = loss_of(self.model, next(self.batches))
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return {"loss": loss.item(), "gradient_norm": norm.item()}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]


class FineTuning(TorchExperiment):
    """The fine-tuning of all weights."""

    name = "sft"

    def create_run(self) -> Run:
        be_deterministic(self.options.threads)
        torch.manual_seed(self.options.seed)
        return Run(self.load_model(), self.options, self.folder)

    def train_with_checkpoints(self, policy: str, kill_in: int | None) -> None:
        run, printer = self.create_run(), experiment.SavePrinter()
        chosen = experiment.policy_of(policy, self.folder)
        with Engine(self.folder / policy, policy=chosen) as engine:
            if engine.steps():
                run.load(engine.restore())
                experiment.say(f"  resumed from step {run.step}")
            for metrics in experiment.train_to_checkpoints(run, self.options, kill_in):
                printer.add(engine.save(run.step, run.state(), metrics=metrics))
            printer.finish()


if __name__ == "__main__":
    experiment.main(arguments, FineTuning, steps=120, context=96, batch=2, threads=1)
