"""Post-training runs in PyTorch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.workloads import tasks
from benchmarks.workloads.model import LanguageModel, Linear, scale_by_inputs
from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from benchmarks.workloads.recipe import Recipe
from benchmarks.workloads.text import Batches, Rows

State = dict[str, Any]


def be_deterministic(threads: int) -> None:
    """Set up the whole process so that training repeats bit for bit."""
    # Read by cuBLAS when it is first used: with its default workspace it may choose an algorithm
    # whose sums have another order, which torch refuses below.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)  # the order of floating-point sums depends on it
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only slows training: the runs read no memory that they have not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Workload:
    """One training run, on one device and from one seed.

    Dropout and sampling draw from torch's own generator, of which a process has one. If two runs
    take turns, each must ``load`` its state first.

    Args:
        recipe: Sizes and rates.
        weights: The model's weights, as ``pretrained`` returns them; ``None`` for new ones.
        rows: Training data instead of the task's own.
    """

    def __init__(
        self, recipe: Recipe, weights: State | None = None, rows: Rows | None = None
    ) -> None:
        be_deterministic(recipe.threads)
        # Before the model is created, because its initial weights are drawn from this generator.
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = _new_model(recipe)
        if weights is not None:
            self.model.load_state_dict(weights)
        if recipe.task == "lora":
            with torch.device(recipe.device):
                add_adapters(self.model, recipe.rank)
        self.optimizer = MixedPrecisionAdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=recipe.rate,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: _rate_factor(recipe, step))
        if rows is None:
            self.batches = tasks.training_batches(recipe)
            self.held_out = tasks.evaluation_rows(recipe)
        else:
            self.batches = Batches(rows, recipe.batch, recipe.seed)
            self.held_out = rows.first(tasks.EVALUATION_ROWS)
        self.step = 0

    def train_step(self, rows: Rows | None = None) -> float:
        """Train one step on ``rows``, by default on the next batch, and return its loss.

        Under "rl", the loss is 1 - mean reward.
        """
        self.model.train()  # ``evaluate`` may have switched dropout off
        rows = next(self.batches) if rows is None else rows
        if self.recipe.task == "rl":
            loss, value = self._policy_gradient(rows)
        else:
            loss = self._loss(rows)
            value = loss.item()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(list(_parameters(self.optimizer)), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return value

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss of the right answers on fixed, held-out rows."""
        self.model.eval()
        return self._loss(self.held_out).item()

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits of the held-out rows, (rows, tokens, vocabulary) float32.

        Equal bits mean equal weights.
        """
        self.model.eval()
        logits: Tensor = self.model(self._on_device(self.held_out.tokens[:, :-1]))
        return logits

    def reorder(self, seed: int) -> None:
        """Continue with other batches, and with other draws of dropout and sampling."""
        self.batches = tasks.training_batches(replace(self.recipe, seed=seed))
        torch.manual_seed(seed)

    def state(self) -> State:
        """Return everything that decides how the run continues."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
        }
        if self.recipe.device == "cuda":  # dropout and sampling draw there
            state["device_rng"] = torch.cuda.get_rng_state()
        return state

    def load(self, state: State) -> None:
        """Continue from a state that ``state`` has returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        if self.recipe.device == "cuda":
            torch.cuda.set_rng_state(state["device_rng"])
        self.step = state["step"]

    def _policy_gradient(self, rows: Rows) -> tuple[Tensor, float]:
        """Return the loss of REINFORCE (Williams, 1992) on sampled answers, and 1 - mean reward.

        Advantages are relative to the prompt's group. The run is on-policy, so there is no ratio
        to clip.
        """
        questions, answers = (
            np.repeat(part, self.recipe.group, axis=0) for part in tasks.prompts_of(rows)
        )
        prompts = self._on_device(questions)
        completions = self._sample(prompts)
        rewards = tasks.reward(completions.cpu().numpy(), answers)
        advantages = self._on_device(tasks.advantages(rewards, self.recipe.group))
        # The logits at a position predict the next token, so the last token is not an input.
        tokens = torch.cat([prompts, completions[:, :-1]], dim=1)
        logits = self.model(tokens)[:, prompts.shape[1] - 1 :]
        losses = F.cross_entropy(logits.flatten(0, 1), completions.flatten(), reduction="none")
        loss = (advantages[:, None] * losses.view_as(completions)).mean()
        return loss, 1.0 - float(rewards.mean())

    @torch.no_grad()
    def _sample(self, prompts: Tensor) -> Tensor:
        tokens = prompts
        for _ in range(tasks.DIGITS):
            chances = self.model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens[:, prompts.shape[1] :]

    def _loss(self, rows: Rows) -> Tensor:
        return self.model.loss(self._on_device(rows.tokens), self._on_device(rows.graded))

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.recipe.device)


def pretraining(recipe: Recipe, rows: Rows, weights: State | None = None) -> Workload:
    """Return the run that trains a new model before post-training.

    It has no dropout, because it sees hardly an epoch.
    """
    plain = replace(
        recipe,
        task="sft",
        rate=recipe.pretrain_rate,
        batch=recipe.pretrain_batch,
        steps=recipe.pretrain_steps,
        betas=(0.9, 0.95),
        dropout=0.0,
    )
    return Workload(plain, weights, rows)


def pretrained_model(recipe: Recipe, rows: Rows) -> LanguageModel:
    """Train a new model whose matrices are as large as in models that people fine-tune."""
    torch.manual_seed(recipe.seed)
    fresh = _new_model(recipe)
    scale_by_inputs(fresh)
    run = pretraining(recipe, rows, fresh.state_dict())
    while run.step < recipe.pretrain_steps:
        run.train_step()
    return run.model


def pretrained(recipe: Recipe) -> State:
    """Return the weights that post-training starts from."""
    return pretrained_model(recipe, tasks.pretraining_rows(recipe)).state_dict()


class Adapted(nn.Module):
    """A frozen matrix with a trained correction of low rank (LoRA; Hu et al., 2021).

    The correction begins at zero.
    """

    def __init__(self, base: Linear, rank: int) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        self.base = base
        self.down, self.up = Linear(inputs, rank, inputs**-0.5), Linear(rank, outputs, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def add_adapters(model: LanguageModel, rank: int) -> None:
    """Freeze the model, and put an adapter on the input of each attention."""
    model.requires_grad_(False)
    for block in model.layers:
        block.attn.qkv = Adapted(block.attn.qkv, rank)  # type: ignore[union-attr, arg-type]


def _new_model(recipe: Recipe) -> LanguageModel:
    with torch.device(recipe.device):
        return LanguageModel(recipe)


def _parameters(optimizer: MixedPrecisionAdamW) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _rate_factor(recipe: Recipe, step: int) -> float:
    """Return the factor on the learning rate at a step.

    With ``recipe.steps``, it rises over a tenth of them and then falls along half a cosine to 0.1.
    """
    if recipe.steps is None:
        return min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    warmup = max(1, recipe.steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, recipe.steps - warmup))
    return 0.55 + 0.45 * math.cos(math.pi * progress)
