"""Runs for the tests of `deltacheck eval`: linear models, small enough for many processes.

They compute momentum by hand and draw batches from a generator.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

# The processes of an evaluation work in this folder.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from deltacheck.backends.torch import Engine


class Linear:
    """A run that learns a fixed matrix. Its state has all that decides how it continues."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.target = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator().manual_seed(seed)
        self.weights, self.momentum = torch.zeros(32, 32), torch.zeros(32, 32)
        print("whatever a run prints must not be read as an event")

    def step(self) -> float:
        batch = torch.randn(8, 32, generator=self.generator)
        error = batch @ (self.weights - self.target)
        self.momentum = 0.9 * self.momentum + batch.T @ error / 8
        self.weights = self.weights - 1e-2 * self.momentum
        return float(error.square().mean())

    def state(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "momentum": self.momentum,
            "generator": self.generator.get_state(),
            "note": "linear",
        }

    def load(self, state: dict[str, Any]) -> None:
        self.weights, self.momentum = state["weights"], state["momentum"]
        self.generator.set_state(state["generator"])

    def evaluate(self) -> float:
        return float((self.weights - self.target).square().mean())


class Adam:
    """A run in mixed precision, whose masters and moments a policy may weaken."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.target = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator().manual_seed(seed)
        start = torch.randn(48, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.weight = torch.nn.Parameter(start)
        self.optimizer = MixedPrecisionAdamW([self.weight], lr=1e-5, betas=(0.9, 0.999))

    def step(self) -> float:
        batch = torch.randn(8, 48, generator=self.generator)
        loss = (batch @ (self.weight.float() - self.target)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return 1.0  # without noise, in which the policy might see an event

    def state(self) -> dict[str, Any]:
        return {
            "model": {"weight": self.weight.detach()},
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.weight.copy_(state["model"]["weight"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])

    def evaluate(self) -> float:
        return float((self.weight.detach().float() - self.target).square().mean())

    def reorder(self, seed: int) -> None:
        self.generator.manual_seed(seed)


def adam(seed: int) -> Adam:
    """Create a run in mixed precision."""
    return Adam(seed)


class Forgetful(Linear):
    """A run that does not restore its momentum."""

    def load(self, state: dict[str, Any]) -> None:
        super().load(state | {"momentum": self.momentum})


def make(seed: int) -> Linear:
    """Create a correct run."""
    return Linear(seed)


def planted(seed: int) -> Linear:
    """Create a forgetful run, in a process whose engine restores a bit of another leaf wrongly."""
    original = Engine.restore

    def restore(self: Engine, *arguments: Any, **options: Any) -> Any:
        state = original(self, *arguments, **options)
        state["weights"].view(torch.int32)[3, 5] ^= 1
        return state

    Engine.restore = restore  # type: ignore[method-assign]
    return Forgetful(seed)


def broken(seed: int) -> Linear:
    """Fail."""
    raise ZeroDivisionError(f"seed {seed}")
