"""The harness of the experiments in `examples/` for PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads import text
from benchmarks.workloads.model import LanguageModel
from benchmarks.workloads.recipe import Recipe
from benchmarks.workloads.text import Rows
from benchmarks.workloads.torch_workloads import be_deterministic, pretrained_model
from deltacheck.backends.torch import load
from examples.experiments import experiment
from examples.experiments.experiment import Experiment

_RECIPE, _WEIGHTS, _UNINTERRUPTED = "recipe.json", "model.pt", "uninterrupted.pt"


def argument_parser(
    description: str | None, *, lr: float, threads: int = 2
) -> argparse.ArgumentParser:
    """Create a parser with the options of every experiment in PyTorch."""
    parser = experiment.argument_parser(description, lr=lr)
    parser.add_argument(
        "--threads",
        type=int,
        default=threads,
        help="fixed, because the sums that a resume must repeat depend on it",
    )
    return parser


class TorchExperiment(Experiment):
    """An experiment whose run has a ``model``, trained on rows of tokens."""

    peer = "torch.save files"

    def recipe(self) -> Recipe:
        """Return the sizes of the small model.

        It has dropout, so that the generator's state is a part of a correct resume.
        """
        return small_recipe(self.options, context=self.options.context, dropout=0.1)

    def pretraining_rows(self) -> Rows:
        """Return the data that the small model is trained on."""
        sources = text.standard_library(experiment.files(self.options))
        return text.pretraining_rows(sources, self.options.context)

    def write_data(self) -> None:
        """Write training data and held-out data."""
        experiment.write_rows(self.options, self.folder)

    def prepare(self) -> None:
        """Write data, and the weights of a small model unless the user gives some."""
        be_deterministic(self.options.threads)
        self.write_data()
        self.recipe().write(self.folder / _RECIPE)
        if self.options.model is None:
            model = pretrained_model(self.recipe(), self.pretraining_rows())
            torch.save(model.state_dict(), self.folder / _WEIGHTS)

    def load_model(self) -> nn.Module:
        """Load the model in its first state."""
        return load_model(self.options.model, self.folder)

    @torch.no_grad()
    def held_out_loss(self, run: Any) -> float:
        """Measure the model on rows that are never trained on."""
        run.model.eval()
        return loss_of(run.model, Rows.read(self.folder / experiment.HELD_OUT_ROWS)).item()

    def parameters(self, run: Any) -> str:
        """Describe the size of the model."""
        return f"{sum(weight.numel() for weight in run.model.parameters()) / 1e6:.2f} M parameters"

    def save_plain(self, run: Any) -> int:
        """Save the final state with ``torch.save``."""
        return torch_saved_bytes(run.state(), self.folder / _UNINTERRUPTED)

    def final_state(self, run: Any) -> Any:
        """Read the state that ``save_plain`` has written."""
        return torch.load(self.folder / _UNINTERRUPTED)

    def restore(self, run: Any, policy: str) -> Any:
        """Load the model of the last checkpoint into ``run``, and return its whole state."""
        state = load(self.folder / policy)
        run.model.load_state_dict(state["model"])
        return state


def small_recipe(options: argparse.Namespace, **changes: Any) -> Recipe:
    """Return the recipe of a small model that is trained on the spot."""
    quick = {"width": 64, "layers": 1, "heads": 2, "pretrain_steps": 20} if options.quick else {}
    sizes = {"batch": 4, "seed": options.seed, "threads": options.threads} | quick
    return Recipe("sft", options.lr, **(sizes | changes))


def load_model(model: Path | None, folder: Path) -> nn.Module:
    """Load a local transformers checkpoint; without one, the small model of an experiment."""
    if model is not None:
        from transformers import AutoModelForCausalLM

        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, local_files_only=True
        )
        return loaded
    small = LanguageModel(Recipe.read(folder / _RECIPE))
    small.load_state_dict(torch.load(folder / _WEIGHTS))
    return small


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of either kind of model, float32."""
    output = model(tokens)
    logits: Tensor = getattr(output, "logits", output)  # transformers wrap them
    return logits.float()


def loss_of(model: nn.Module, rows: Rows) -> Tensor:
    """Return the mean cross-entropy of the graded tokens, each predicted from its prefix."""
    tokens, graded = torch.from_numpy(rows.tokens), torch.from_numpy(rows.graded)[:, 1:]
    logits = logits_of(model, tokens[:, :-1])
    return F.cross_entropy(logits[graded], tokens[:, 1:][graded])


def torch_saved_bytes(state: dict[str, Any], file: Path) -> int:
    """Save a state with ``torch.save``, and return the bytes of the file."""
    torch.save(state, file)
    return file.stat().st_size
