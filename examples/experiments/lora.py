"""LoRA in PyTorch: whole checkpoints that cost as much as the adapters.

The run is killed, resumed, and compared with an uninterrupted one. A small model, trained on the
spot:

    python -m examples.experiments.lora

A local transformers checkpoint and your data:

    python -m examples.experiments.lora --model PATH --data FILE.jsonl

The base is bfloat16 and frozen; the adapters are float32, trained by torch's own AdamW. A
checkpoint contains all of it: a resume needs nothing else. The course of the experiment is in
`examples/experiments/experiment.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from benchmarks.workloads.text import Batches, Rows
from benchmarks.workloads.torch_workloads import be_deterministic
from deltacheck import LeafSpec, Profile
from deltacheck.backends.torch import Engine
from examples.experiments import experiment
from examples.experiments.torch_experiment import (
    TorchExperiment,
    argument_parser,
    loss_of,
    torch_saved_bytes,
)

arguments = argument_parser(__doc__, lr=1e-4)
experiment.add_row_arguments(arguments)
arguments.add_argument(
    "--adapt",
    nargs="+",
    default=["qkv", "q_proj", "v_proj"],
    help="names of the matrices with adapters",
)
arguments.add_argument("--rank", type=int, default=4, help="higher: more to train and to store")


# --- Adapters -------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen matrix with a trained correction of low rank (LoRA; Hu et al., 2021).

    The correction begins at zero.
    """

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + F.linear(F.linear(x.float(), self.down), self.up).to(y.dtype)


def add_adapters(model: nn.Module, names: list[str], rank: int) -> None:
    """Freeze the model, and put an adapter on every matrix with one of these names."""
    model.requires_grad_(False)
    matrices = [
        (parent, name)
        for parent in model.modules()
        for name, _ in parent.named_children()
        if name in names
    ]
    if not matrices:
        sys.exit(f"the model has no matrices called {', '.join(names)}: name its own with --adapt")
    for parent, name in matrices:
        setattr(parent, name, Adapted(getattr(parent, name), rank))


# --- The run --------------------------------------------------------------------------------------


class Run:
    """A training run. ``state()`` is everything that decides how it continues."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, folder: Path) -> None:
        self.model = model
        self.adapters = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=options.lr)
        rows = Rows.read(folder / experiment.TRAINING_ROWS)
        self.batches = Batches(rows, options.batch, options.seed)
        self.step = 0

    def train_step(self) -> dict[str, float]:
        self.model.train()
        loss = loss_of(self.model, next(self.batches))
        loss.backward()
        norm = clip_grad_norm_(self.adapters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"loss": loss.item(), "gradient_norm": norm.item()}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]


class LoRA(TorchExperiment):
    """The fine-tuning of adapters."""

    name = "lora"

    def create_run(self) -> Run:
        be_deterministic(self.options.threads)
        model = self.load_model()
        torch.manual_seed(self.options.seed)
        add_adapters(model, self.options.adapt, self.options.rank)
        return Run(model, self.options, self.folder)

    def train_with_checkpoints(self, policy: str, kill_in: int | None) -> None:
        run, printer = self.create_run(), experiment.SavePrinter()
        chosen = experiment.policy_of(policy, self.folder)
        with Engine(self.folder / policy, policy=chosen) as engine:
            if engine.steps():
                run.load(engine.restore())
                experiment.say(f"  resumed from step {run.step}")
            # The optimizer does not own the frozen weights. Guarded, they too are read while
            # training continues.
            engine.guard(run.model)
            for metrics in experiment.train_to_checkpoints(run, self.options, kill_in):
                printer.add(engine.save(run.step, run.state(), metrics=metrics))
            printer.finish()

    # --- What is printed ---

    def parameters(self, run: Run) -> str:
        frozen = sum(w.numel() for w in run.model.parameters() if not w.requires_grad)
        trained = sum(weight.numel() for weight in run.adapters)
        return f"{frozen / 1e6:.2f} M frozen parameters, {trained / 1e6:.3f} M in adapters"

    def describe_profile(self, profile: Profile) -> list[str]:
        sizes = {
            path: LeafSpec.of(path, leaf.shape, leaf.dtype).raw_bytes
            for path, leaf in profile.leaves.items()
        }
        lines = []
        for kind in dict.fromkeys(leaf.kind for leaf in profile.leaves.values()):
            paths = [path for path, leaf in profile.leaves.items() if leaf.kind == kind]
            share = sum(sizes[path] for path in paths) / sum(sizes.values())
            lines.append(f"{kind}: {len(paths)} of {len(sizes)} leaves, {share:.1%} of the bytes")
        return lines

    def save_plain(self, run: Run) -> int:
        trained = {name: w for name, w in run.model.named_parameters() if w.requires_grad}
        state = {**run.state(), "model": trained}
        self.adapter_bytes = torch_saved_bytes(state, self.folder / "adapters.pt")
        return super().save_plain(run)

    def size_note(self, checkpoints: int) -> str:
        return f", or without the base {checkpoints * self.adapter_bytes / 1e6:.2f} MB"


if __name__ == "__main__":
    experiment.main(arguments, LoRA, steps=120, context=96, batch=2, threads=1)
