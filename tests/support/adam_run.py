"""A training state like that of torch, updated in NumPy with the arithmetic of Adam.

Tests choose the gradients.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class AdamRun:
    """Matrices and a vector: bfloat16 weights with float32 masters, AdamW without decay.

    Args:
        parameters: The number of matrices.
        shape: Their shape.
        weights: The type of the weights. With ``float32`` there are no masters.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (64, 96),
        parameters: int = 2,
        *,
        rate: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        seed: int = 0,
        weights: str = "bfloat16",
    ) -> None:
        self.weights = np.dtype(BFLOAT16 if weights == "bfloat16" else weights)
        self.random = np.random.default_rng(seed)
        self.rate, self.betas, self.step = rate, betas, 0
        self.frozen: set[int] = set()  # numbers of matrices that are not updated
        self.frozen_steps: dict[int, int] = {}
        self.counted_from = 0  # the step at which the optimizer was made
        shapes = [shape] * parameters + [(shape[-1],)]
        self.masters = [self.random.normal(0, 0.02, s).astype(np.float32) for s in shapes]
        self.first = [np.zeros(s, np.float32) for s in shapes]
        self.second = [np.zeros(s, np.float32) for s in shapes]
        self.scale = [
            np.exp(self.random.normal(0, 1, s)) * 1e-3 for s in shapes
        ]  # of each element's gradients

    def advance(self, steps: int = 1, size: float = 1.0) -> None:
        """Do some steps with noise of this size as gradients."""
        b1, b2 = self.betas
        for _ in range(steps):
            self.step += 1
            count = self.step - self.counted_from
            for number, master in enumerate(self.masters):
                if number in self.frozen:
                    self.frozen_steps[number] = self.frozen_steps.get(number, 0) + 1
                    continue
                g = self.gradient(number, size)
                m, v = self.first[number], self.second[number]
                m += (1 - b1) * (g - m)
                v += (1 - b2) * (g * g - v)
                hat = m / (1 - b1**count) / (np.sqrt(v / (1 - b2**count)) + 1e-8)
                master -= np.float32(self.rate) * hat.astype(np.float32)

    def gradient(self, number: int, size: float) -> np.ndarray[Any, Any]:
        return (
            size * self.scale[number] * self.random.normal(0.1, 1, self.masters[number].shape)
        ).astype(np.float32)

    def count(self, number: int) -> int:
        """Return the number of updates that the optimizer has made of a matrix."""
        return self.step - self.counted_from - self.frozen_steps.get(number, 0)

    def state(self) -> dict[str, Any]:
        """Return a copy of the current state."""
        kept = {
            n: {
                "master": self.masters[n].copy(),
                "exp_avg": self.first[n].copy(),
                "exp_avg_sq": self.second[n].copy(),
                "step": np.array(self.count(n), np.float32),
            }
            for n in range(len(self.masters))
        }
        for entry in kept.values() if self.weights == np.float32 else ():
            del entry["master"]
        group = {
            "lr": self.rate,
            "betas": self.betas,
            "eps": 1e-8,
            "params": list(range(len(self.masters))),
        }
        return {
            "model": {
                f"w{n}": master.astype(self.weights) for n, master in enumerate(self.masters)
            },
            "optimizer": {"state": kept, "param_groups": [group]},
            "step": self.step,
        }
