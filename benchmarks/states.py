"""The states that benchmarks save.

*Real* states come from post-training the demo's model. *Synthetic* states have any size: the
demo's optimizer with random gradients. They change at about the real pace (`size` prints it), but
their compressed size says little. They are for time and memory only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.workloads import text
from benchmarks.workloads.leaf_classes import leaf_class
from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from benchmarks.workloads.recipe import Recipe, demo, tiny_demo
from benchmarks.workloads.torch_workloads import Workload, pretraining

State = dict[str, Any]

# The rates let the weights grow to their natural size and leave little but noise in the gradients,
# as in models that people post-train. A hardly trained model has small weights and steady
# gradients, and changes many times faster.
REAL = demo(
    seed=1,
    threads=1,
    batch=4,
    pretrain_steps=300,
    pretrain_rate=3e-3,
    pretrain_batch=4,
    steps=150,
    rate=1e-3,
)
QUICK = tiny_demo(seed=1, steps=4)

# Twice the memory of AdamW's second moment (beta 0.95), which begins at zero and makes the first
# updates too large
SETTLE_STEPS = 40


def post_trained(recipe: Recipe, rate: float, settle_steps: int = SETTLE_STEPS) -> Workload:
    """Return a post-training of the recipe's fine-tuned model at a constant learning rate.

    It is past its first steps, and deterministic.
    """
    constant = replace(recipe, rate=rate)
    weights, rows = _finetuned(recipe), _finetuning_rows(recipe.context)
    training = _at_constant_rate(Workload(constant, weights, rows))
    _train(training, settle_steps)
    return training


def untrained(recipe: Recipe, rate: float = 1e-6) -> Workload:
    """Return a run from random weights, for models too large to train here: for time only."""
    slow = replace(recipe, pretrain_rate=rate, pretrain_batch=recipe.batch)
    return _at_constant_rate(pretraining(slow, _finetuning_rows(recipe.context)))


def _at_constant_rate(training: Workload) -> Workload:
    training.scheduler = LambdaLR(training.optimizer, lambda step: 1.0)
    return training


@cache
def _finetuned(recipe: Recipe) -> State:
    base = pretraining(recipe, text.pretraining_rows(_sources(), recipe.context))
    _train(base, recipe.pretrain_steps)
    rows = _finetuning_rows(recipe.context)
    tuned = Workload(recipe, base.model.state_dict(), rows)
    _train(tuned, recipe.steps or 0)
    return tuned.model.state_dict()


def _train(training: Workload, steps: int) -> None:
    for _ in range(steps):
        training.train_step()


@cache
def _finetuning_rows(context: int) -> text.Rows:
    return text.finetuning_rows(_sources(), context)


@cache
def _sources() -> list[str]:
    return text.standard_library()


class Synthetic:
    """A training state of about ``size`` bytes.

    It consists of matrices of 2 Mi elements, each with a bias as a small leaf.
    """

    def __init__(self, size: int, rate: float = 1e-6, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        rows = max(1, min(2048, size // 14 // 1024))
        self.weights: dict[str, torch.Tensor] = {}
        for layer in range(max(1, size // (14 * 1024 * rows))):
            for name, shape in (("weight", (rows, 1024)), ("bias", (1024,))):
                values = torch.randn(shape, generator=self._random) * 0.02
                self.weights[f"layers.{layer}.{name}"] = torch.nn.Parameter(values.bfloat16())
        self.optimizer = MixedPrecisionAdamW(self.weights.values(), lr=rate)
        self.step = 0

    def seed_gradients(self, seed: int) -> None:
        """Let the next steps have other gradients than those of another seed."""
        self._random.manual_seed(seed)

    def train_step(self) -> None:
        for weight in self.weights.values():
            weight.grad = torch.randn(weight.shape, generator=self._random).mul_(1e-3).bfloat16()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def state(self) -> State:
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return {"model": weights, "optimizer": self.optimizer.state_dict(), "step": self.step}


def leaves_of(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by path, tied ones once."""
    leaves: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()

    def walk(node: object, path: str) -> None:
        if isinstance(node, torch.Tensor):
            if node.data_ptr() not in addresses:
                leaves[path] = node
            addresses.add(node.data_ptr())
        elif isinstance(node, dict | list | tuple):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk(child, f"{path}/{key}" if path else str(key))

    walk(state, "")
    return leaves


def by_class(state: State) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of a state by class and path."""
    classes: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in leaves_of(state).items():
        classes.setdefault(leaf_class(path), {})[path] = tensor
    return classes


def raw_bytes(state: State) -> int:
    """Return the bytes of a state in memory."""
    return sum(tensor.nbytes for tensor in leaves_of(state).values())


def timed(work: Callable[[], object]) -> float:
    """Return the wall time of a call in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
