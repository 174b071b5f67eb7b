"""The runs in PyTorch, with the model and the optimizer of `deltacheck.evaluate.demo`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from deltacheck.evaluate.workloads.model import LanguageModel, Linear, spread
from deltacheck.evaluate.workloads.optimizer import MixedPrecisionAdamW
from deltacheck.evaluate.workloads.plan import Plan
from deltacheck.evaluate.workloads.text import Rows
from deltacheck.evaluate.workloads.train import be_deterministic

from . import data
from .recipe import Recipe

State = dict[str, Any]


def pretrained(recipe: Recipe) -> State:
    """The weights that post-training starts from: a new model after ``recipe.pretrain_steps`` of
    plain training.
    """
    be_deterministic(1)
    torch.manual_seed(recipe.seed)
    model = LanguageModel(_plan(replace(recipe, dropout=0.0)))
    spread(model)
    optimizer = MixedPrecisionAdamW(model.parameters(), lr=recipe.pretrain_rate)
    scheduler = LambdaLR(optimizer, lambda step: _warmup_then_cosine(step, recipe.pretrain_steps))
    batches = data.pretraining_batches(recipe)
    for _ in range(recipe.pretrain_steps):
        _loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        _update(optimizer, scheduler)
    return model.state_dict()


class Workload:
    """One post-training run. ``state()`` is everything that decides how it goes on; ``load`` puts
    it
    back.

    ``weights``: of ``pretrained()``, or ``None`` for a run whose state is loaded before its first
    step. Dropout and sampling draw from torch's own generator, of which a process has one: where
    two runs take turns, each must ``load`` its state first.
    """

    def __init__(self, recipe: Recipe, weights: State | None = None) -> None:
        be_deterministic(1)
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = LanguageModel(_plan(recipe))
        if weights is not None:
            self.model.load_state_dict(weights)
        if recipe.task == "lora":
            add_adapters(self.model, recipe.rank)
        self.optimizer = MixedPrecisionAdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=recipe.rate,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
        )
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / max(1, recipe.warmup_steps))
        )
        self.batches = data.training_batches(recipe)
        self.held_out = data.evaluation_rows(recipe)
        self.step = 0

    def train_step(self, rows: Rows | None = None) -> float:
        """One step of training, on the next batch or on ``rows``; its loss (under "rl": 1 - mean
        reward).
        """
        self.model.train()
        rows = next(self.batches) if rows is None else rows
        if self.recipe.task == "rl":
            loss, told = self._policy_gradient(rows)
        else:
            loss = _loss(self.model, rows)
            told = loss.item()
        loss.backward()  # type: ignore[no-untyped-call]
        _update(self.optimizer, self.scheduler)
        self.step += 1
        return told

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss of right answers on held-out rows, always the same."""
        self.model.eval()
        return _loss(self.model, self.held_out).item()

    @torch.no_grad()
    def logits(self) -> Tensor:
        """What the model says of the held-out rows, (rows, tokens, vocabulary) float32: equal bits
        mean equal weights.
        """
        self.model.eval()
        return self.model(torch.from_numpy(self.held_out.tokens[:, :-1]))  # type: ignore[no-any-return]

    def reorder(self, seed: int) -> None:
        """Go on with other batches, and other draws of dropout and sampling."""
        self.batches = data.training_batches(replace(self.recipe, seed=seed))
        torch.manual_seed(seed)

    def state(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
        }

    def load(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]

    def _policy_gradient(self, rows: Rows) -> tuple[Tensor, float]:
        """REINFORCE with advantages relative to a prompt's group; on-policy, so there is no ratio
        to clip.
        """
        asked, right = (
            np.repeat(part, self.recipe.group, axis=0) for part in data.prompts_of(rows)
        )
        prompts = torch.from_numpy(asked)
        completions = self._sample(prompts)
        rewards = data.reward(completions.numpy(), right)
        advantages = torch.from_numpy(data.advantages(rewards, self.recipe.group))
        logits = self.model(torch.cat([prompts, completions[:, :-1]], dim=1))[
            :, prompts.shape[1] - 1 :
        ]
        chosen = -F.cross_entropy(
            logits.flatten(0, 1), completions.flatten(), reduction="none"
        ).view_as(completions)
        return -(advantages[:, None] * chosen).mean(), 1.0 - float(rewards.mean())

    @torch.no_grad()
    def _sample(self, prompts: Tensor) -> Tensor:
        tokens = prompts
        for _ in range(data.DIGITS):
            chances = self.model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens[:, prompts.shape[1] :]


class Adapted(nn.Module):
    """A frozen matrix with a trained correction of low rank (LoRA; Hu et al., 2021), which begins
    at zero.
    """

    def __init__(self, base: Linear, rank: int) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        self.base, self.down, self.up = (
            base,
            Linear(inputs, rank, inputs**-0.5),
            Linear(rank, outputs, 0.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def add_adapters(model: LanguageModel, rank: int) -> None:
    """Freeze the model, and put an adapter on the input of each attention."""
    model.requires_grad_(False)
    for block in model.layers:
        block.attn.qkv = Adapted(block.attn.qkv, rank)  # type: ignore[union-attr, arg-type]


def _plan(recipe: Recipe) -> Plan:
    return Plan(
        recipe.seed, 1, recipe.width, recipe.layers, recipe.heads, recipe.context, recipe.dropout
    )


def _loss(model: LanguageModel, rows: Rows) -> Tensor:
    return model.loss(torch.from_numpy(rows.tokens), torch.from_numpy(rows.graded))


def _update(optimizer: MixedPrecisionAdamW, scheduler: LambdaLR) -> None:
    clip_grad_norm_(list(_parameters(optimizer)), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def _parameters(optimizer: MixedPrecisionAdamW) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _warmup_then_cosine(step: int, steps: int) -> float:
    """Factor on the learning rate: a tenth of the steps up to 1, then half a cosine down to 0.1."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))
