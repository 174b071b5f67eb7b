"""The recipe of one run: every size, rate and seed, in one record that both frameworks read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

TASKS = ("sft", "lora", "rl")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained and how. ``rate`` is reached after ``warmup_steps`` and then constant."""

    task: str
    rate: float
    context: int  # tokens that the model sees
    batch: int  # rows a step; under "rl", prompts a step
    seed: int = 1  # of weights, data order, dropout and sampling

    width: int = 256
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 10

    pretrain_steps: int = 300
    # Lets the weights grow to their natural size: hardly trained ones are small, and change many
    # times faster
    pretrain_rate: float = 3e-3
    pretrain_batch: int = 4

    rank: int = 4  # of the adapters on the attention's input, under "lora"
    group: int = 8  # completions a prompt, under "rl"
    sources: int | None = None  # files of text that are read; None: all

    @property
    def hidden(self) -> int:
        """Width inside the feed-forward layers."""
        return 64 * ((self.width * 8 // 3 + 63) // 64)


_RECIPES = {
    "sft": Recipe("sft", rate=1e-5, context=256, batch=4, dropout=0.1),
    "lora": Recipe("lora", rate=1e-4, context=256, batch=4),
    "rl": Recipe("rl", rate=1e-6, context=16, batch=8, pretrain_batch=64),
}


def recipe(task: str, **changes: Any) -> Recipe:
    """The recipe of a task at its usual size: 3.3 M parameters, about 0.3 s a step on one core.
    ``changes``: fields of ``Recipe``.
    """
    return replace(_RECIPES[task], **changes)


def small(task: str, **changes: Any) -> Recipe:
    """The same run with 0.4 M parameters, for what must be repeated many times."""
    return recipe(
        task, **({"width": 128, "layers": 2, "context": min(128, _RECIPES[task].context)} | changes)
    )


def tiny(task: str, **changes: Any) -> Recipe:
    """The same run in a second, with a model too small to say anything."""
    context = 16 if task == "rl" else 96
    sizes = {
        "width": 64,
        "layers": 1,
        "heads": 2,
        "context": context,
        "batch": 2,
        "group": 4,
        "warmup_steps": 2,
    }
    return recipe(
        task, **(sizes | {"pretrain_steps": 4, "pretrain_batch": 4, "sources": 60} | changes)
    )
