"""Reinforcement learning at lr 1e-6, followed live by an inference worker.

The run is killed, resumed, and compared with an uninterrupted one. A small model that adds two
numbers, trained on the spot:

    python -m examples.experiments.rl_like

A local transformers checkpoint, and your prompts with their answers:

    python -m examples.experiments.rl_like --model PATH --data FILE.jsonl

Answers are sampled in groups, a checker rewards right tokens, and each answer is compared with its
group (GRPO; Shao et al., 2024). Weights are bfloat16, with AdamW and masters in float32. At this
rate few bfloat16 weights change from step to step, and a worker receives only those. The worker is
`follower.py`, a process of its own. While the run continues, you can start more of them:

    python -m examples.experiments.follower FOLDER exact

The course of the experiment is in `examples/experiments/experiment.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from benchmarks.workloads.recipe import Recipe
from benchmarks.workloads.text import Rows
from benchmarks.workloads.torch_workloads import be_deterministic
from deltacheck.backends.torch import Engine
from examples.experiments import experiment, pairs
from examples.experiments.pairs import Coding, Pair
from examples.experiments.torch_experiment import (
    TorchExperiment,
    argument_parser,
    logits_of,
    small_recipe,
)

arguments = argument_parser(__doc__, lr=1e-6, threads=1)
arguments.add_argument("--prompts", type=int, default=4, help="prompts per step")
arguments.add_argument("--group", type=int, default=8, help="answers to each prompt")


# --- Prompts, answers and weights -----------------------------------------------------------------


def sums(wrong: float) -> list[Pair]:
    """Return all sums of two numbers below 100, in a fixed order.

    Args:
        wrong: The share of wrong digits in the answers.
    """
    dice = random.Random(0)
    numbers = [(left, right) for left in range(100) for right in range(100)]
    data = []
    for left, right in dice.sample(numbers, len(numbers)):
        digits = [
            dice.choice("0123456789") if dice.random() < wrong else digit
            for digit in f"{left + right:03d}"
        ]
        data.append(Pair(f"{left:02d}+{right:02d}=", "".join(digits)))
    return data


def encode(pair: Pair, coding: Coding) -> tuple[Tensor, Tensor]:
    """Return the tokens of a prompt (length,) and of its right answer (length of the answer,)."""
    prompt = torch.tensor([coding.begin, *coding.encode(pair.prompt)])
    return prompt, torch.tensor(coding.encode(pair.answer))


def weights_sha256(model: nn.Module) -> Tensor:
    """Return a digest of every bit of the weights, uint8 (32,).

    It is a leaf of each checkpoint, so that a follower can check its copy.
    """
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        values = weight.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + values.numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


# --- The run --------------------------------------------------------------------------------------


class Run:
    """A training run. ``state()`` is everything that decides how it continues."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, folder: Path) -> None:
        self.model, self.coding = model, experiment.coding_of(options.model)
        self.optimizer = MixedPrecisionAdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.999))
        self.pairs = pairs.read(folder / "train.jsonl")
        self.prompts, self.group, self.step = options.prompts, options.group, 0

    def train_step(self) -> dict[str, float]:
        """Train one step on the next prompts; its loss is 1 - mean reward."""
        self.model.train()
        rewards = []
        for number in range(self.step * self.prompts, (self.step + 1) * self.prompts):
            prompt, right = encode(self.pairs[number % len(self.pairs)], self.coding)
            answers = self.sample(prompt, len(right))
            reward = (answers == right).float().mean(dim=1)
            advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 1e-4)
            tokens = torch.cat([prompt.expand(self.group, -1), answers], dim=1)
            logits = logits_of(self.model, tokens[:, :-1])[:, len(prompt) - 1 :]
            losses = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
            loss = (advantage[:, None] * losses.view_as(answers)).mean()
            (loss / self.prompts).backward()
            rewards.append(reward.mean().item())
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"loss": 1 - sum(rewards) / len(rewards), "gradient_norm": norm.item()}

    @torch.no_grad()
    def sample(self, prompt: Tensor, length: int) -> Tensor:
        tokens = prompt.expand(self.group, -1)
        for _ in range(length):
            chances = logits_of(self.model, tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens[:, len(prompt) :]

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "weights_sha256": weights_sha256(self.model),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,  # also decides which prompts are next
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]


class ReinforcementLearning(TorchExperiment):
    """The training with checked answers, and a follower beside it."""

    name = "rl"

    def create_run(self) -> Run:
        be_deterministic(self.options.threads)
        torch.manual_seed(self.options.seed)  # of the sampling, too
        return Run(self.load_model(), self.options, self.folder)

    def train_with_checkpoints(self, policy: str, kill_in: int | None) -> None:
        run, printer = self.create_run(), experiment.SavePrinter()
        chosen = experiment.policy_of(policy, self.folder)
        with Engine(self.folder / policy, policy=chosen) as engine:
            if engine.steps():
                run.load(engine.restore())
                experiment.say(f"  resumed from step {run.step}")
            for metrics in experiment.train_to_checkpoints(run, self.options, kill_in):
                printer.add(engine.save(run.step, run.state(), metrics=metrics))
            printer.finish()

    @contextmanager
    def companion(self, policy: str) -> Iterator[None]:
        """Start a worker that follows the run to its last step, unaware of the kill."""
        options = self.options
        command = [sys.executable, "-m", "examples.experiments.follower", self.folder, policy]
        command += ["--until", str(options.steps)]
        command += ["--model", options.model] if options.model else []
        follower = subprocess.Popen(command)
        try:
            yield
            if follower.wait(timeout=600) != 0:
                sys.exit("the follower failed")
        finally:
            follower.kill()  # if it has not ended by itself

    # --- Data ---

    def write_data(self) -> None:
        path = self.options.data
        data = pairs.read(path) if path else sums(wrong=0)
        if not all(pair.prompt and pair.answer for pair in data):
            sys.exit(f"{path} has a line without a prompt or without a completion to check by")
        for name, part in zip(("train", "held_out"), experiment.split(data), strict=True):
            lines = [
                json.dumps({"prompt": pair.prompt, "completion": pair.answer}) for pair in part
            ]
            (self.folder / f"{name}.jsonl").write_text("\n".join(lines))

    def recipe(self) -> Recipe:
        quick = {"pretrain_steps": 30} if self.options.quick else {}
        return small_recipe(self.options, context=32, pretrain_batch=64, **quick)

    def pretraining_rows(self) -> Rows:
        # From sums with mistakes, so that reinforcement learning has something to do.
        return pairs.rows(sums(wrong=0.3), pairs.BYTES, context=10)

    @torch.no_grad()
    def held_out_loss(self, run: Run) -> float:
        """Return the mean cross-entropy of right answers to prompts that are never trained on."""
        run.model.eval()
        losses = []
        for pair in pairs.read(self.folder / "held_out.jsonl"):
            prompt, right = encode(pair, run.coding)
            logits = logits_of(run.model, torch.cat([prompt, right])[None, :-1])
            losses.append(F.cross_entropy(logits[0, len(prompt) - 1 :], right).item())
        return sum(losses) / len(losses)


if __name__ == "__main__":
    experiment.main(arguments, ReinforcementLearning, steps=120, prompts=2, group=4)
