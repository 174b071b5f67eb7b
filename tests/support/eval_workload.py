"""Runs for the tests of `deltacheck eval`, small enough for many processes: a linear model,
momentum by hand, batches drawn from a generator.
"""

from __future__ import annotations

from typing import Any

import torch

from deltacheck.backends.torch import Engine


class Linear:
    """Learns a fixed matrix. All that decides how it goes on is in its state."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.wanted = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator().manual_seed(seed)
        self.weights, self.momentum = torch.zeros(32, 32), torch.zeros(32, 32)
        print("whatever a run prints must not be taken for what it tells")

    def step(self) -> float:
        batch = torch.randn(8, 32, generator=self.generator)
        wrong = batch @ (self.weights - self.wanted)
        self.momentum = 0.9 * self.momentum + batch.T @ wrong / 8
        self.weights = self.weights - 1e-2 * self.momentum
        return float(wrong.square().mean())

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
        return float((self.weights - self.wanted).square().mean())


class Forgetful(Linear):
    """Does not put its momentum back."""

    def load(self, state: dict[str, Any]) -> None:
        super().load(state | {"momentum": self.momentum})


def make(seed: int) -> Linear:
    return Linear(seed)


def planted(seed: int) -> Linear:
    """Forgetful, in a process whose engine restores one bit of another leaf wrongly, as a defect of
    ours would.
    """
    whole = Engine.restore

    def restore(self: Engine, *arguments: Any, **options: Any) -> Any:
        state = whole(self, *arguments, **options)
        state["weights"].view(torch.int32)[3, 5] ^= 1
        return state

    Engine.restore = restore  # type: ignore[method-assign]
    return Forgetful(seed)
