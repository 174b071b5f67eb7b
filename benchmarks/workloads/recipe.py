"""Recipes: every size, rate and seed of a training run, in one record for both frameworks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TASKS = ("sft", "lora", "rl")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sizes and rates of one run.

    ``rate`` is reached after ``warmup_steps`` and constant from there on. If ``steps`` is given, it
    falls along a cosine instead, over that many steps.
    """

    task: str
    rate: float
    context: int  # tokens that the model sees
    batch: int  # rows per step; under "rl", prompts per step
    seed: int = 1  # of weights, data order, dropout and sampling
    threads: int = 1  # fixed, because the order of floating-point sums depends on it
    device: str = "cpu"  # of PyTorch; JAX trains on its default device

    width: int = 256
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 10
    steps: int | None = None

    pretrain_steps: int = 300
    # High enough for the weights to grow to their natural size. Hardly trained weights are small,
    # and many more of them change per step than in a model that people fine-tune.
    pretrain_rate: float = 3e-3
    pretrain_batch: int = 4

    rank: int = 4  # of the adapters on the attention's input, under "lora"
    group: int = 8  # completions per prompt, under "rl"
    sources: int | None = None  # number of source files that are read; None: all

    @property
    def hidden(self) -> int:
        """Width inside the feed-forward layers."""
        return 64 * ((self.width * 8 // 3 + 63) // 64)

    def write(self, file: Path) -> None:
        """Write the recipe as JSON, for a process that runs it."""
        file.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, file: Path) -> Recipe:
        """Read what ``write`` has written."""
        fields = json.loads(file.read_text())
        return cls(**fields | {"betas": tuple(fields["betas"])})


_RECIPES = {
    "sft": Recipe("sft", rate=1e-5, context=256, batch=4, dropout=0.1),
    "lora": Recipe("lora", rate=1e-4, context=256, batch=4),
    "rl": Recipe("rl", rate=1e-6, context=16, batch=8, pretrain_batch=64),
}


def recipe(task: str, **changes: Any) -> Recipe:
    """Return the recipe of a task at its usual size: 3.3 M parameters, 0.3 s per step on one core.

    Args:
        task: One of ``TASKS``.
        **changes: Fields of ``Recipe`` that differ.
    """
    return replace(_RECIPES[task], **changes)


def small(task: str, **changes: Any) -> Recipe:
    """Return the same recipe with 0.4 M parameters, for runs that are repeated many times."""
    sizes = {"width": 128, "layers": 2, "context": min(128, _RECIPES[task].context)}
    return recipe(task, **(sizes | changes))


def tiny(task: str, **changes: Any) -> Recipe:
    """Return the same recipe for a run of a second; its figures have no meaning."""
    sizes = {
        "width": 64,
        "layers": 1,
        "heads": 2,
        "context": 16 if task == "rl" else 96,
        "batch": 2,
        "group": 4,
        "warmup_steps": 2,
        "pretrain_steps": 4,
        "pretrain_batch": 4,
        "sources": 60,
    }
    return recipe(task, **(sizes | changes))


def demo(seed: int, **changes: Any) -> Recipe:
    """Return the recipe of the demo, which fits two slow cores in well under four minutes.

    Its rate is a typical one of post-training, between 1e-6 and 1e-5, where few bfloat16 weights
    change per step. Dropout makes the generator's state a part of a correct resume.
    """
    run = Recipe("sft", rate=5e-6, context=256, batch=8, dropout=0.1, betas=(0.9, 0.95))
    sizes = {"threads": 2, "pretrain_steps": 100, "pretrain_rate": 1e-3, "pretrain_batch": 8}
    return replace(run, **({"seed": seed, "steps": 40} | sizes | changes))


def tiny_demo(seed: int, **changes: Any) -> Recipe:
    """Return the demo's recipe for a run of seconds, too small to say anything about sizes."""
    sizes = {"threads": 1, "width": 128, "layers": 2, "heads": 2, "context": 192, "batch": 4}
    return demo(
        seed, **(sizes | {"pretrain_steps": 10, "pretrain_batch": 4, "steps": 18} | changes)
    )
