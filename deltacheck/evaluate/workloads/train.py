"""The training recipe: pre-training, then supervised fine-tuning whose whole state can be saved and
put back.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from deltacheck.evaluate.workloads.model import LanguageModel, spread
from deltacheck.evaluate.workloads.optimizer import MixedPrecisionAdamW
from deltacheck.evaluate.workloads.plan import Plan
from deltacheck.evaluate.workloads.text import Batches, Rows


def be_deterministic(threads: int) -> None:
    """Settings of the whole process that make training repeat bit for bit."""
    torch.set_num_threads(threads)  # the order of floating-point sums depends on it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only slows


class Training:
    """A model, what trains it, and the number of steps done. `state()` is everything that decides
    how it goes on.
    """

    def __init__(
        self,
        plan: Plan,
        rows: Rows,
        *,
        rate: float,
        steps: int,
        weights: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(plan.seed)
        random.seed(plan.seed)
        self.model = LanguageModel(plan)
        if weights is not None:
            self.model.load_state_dict(weights)
        self.optimizer = MixedPrecisionAdamW(self.model.parameters(), lr=rate)
        self.scheduler = LambdaLR(self.optimizer, lambda step: _warmup_then_cosine(step, steps))
        self.batches = Batches(rows, plan.batch, plan.seed)
        self.step = 0

    def train_step(self) -> float:
        """One step of training; its loss."""
        batch = next(self.batches)
        loss = self.model.loss(torch.from_numpy(batch.tokens), torch.from_numpy(batch.graded))
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data": self.batches.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            },
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"]["torch"])
        python = state["rng"]["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        self.step = state["step"]


def pretraining(plan: Plan, rows: Rows) -> Training:
    """Training of a new model. Without dropout: it sees hardly an epoch."""
    training = Training(plan, rows, rate=plan.pretrain_rate, steps=plan.pretrain_steps)
    training.model.eval()
    return training


def small_model(plan: Plan, rows: Rows) -> LanguageModel:
    """A small model trained here and now, for whoever has no weights at hand, its matrices as large
    as in models that people fine-tune.
    """
    torch.manual_seed(plan.seed)
    fresh = LanguageModel(plan)
    spread(fresh)
    training = Training(
        plan, rows, rate=plan.pretrain_rate, steps=plan.pretrain_steps, weights=fresh.state_dict()
    )
    training.model.eval()  # no dropout: it sees hardly an epoch
    while training.step < plan.pretrain_steps:
        training.train_step()
    return training.model


def finetuning(plan: Plan, rows: Rows, weights: dict[str, Any]) -> Training:
    """Supervised fine-tuning from pre-trained weights, with a fresh optimizer."""
    return Training(plan, rows, rate=plan.rate, steps=plan.steps, weights=weights)


def _warmup_then_cosine(step: int, steps: int) -> float:
    """Factor on the learning rate: a tenth of the steps up to 1, then half a cosine down to 0.1."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))
