"""Records the series that tests/profile/test_profile.py reads: `python -m
tests.series.make_series`,
about a minute on one core.

Each run really trains the demo's small model with its mixed-precision AdamW (betas .9 and .999
unless said), profiled every 10 steps twice over: by the default sample, and with every element.
What is written is what the profilers noted, and loss and gradient norm of every step, as JSON,
compressed.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.workloads import text
from benchmarks.workloads.model import LanguageModel
from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from benchmarks.workloads.recipe import tiny_demo
from benchmarks.workloads.text import Batches
from deltacheck import Profiler
from deltacheck.profile.analyse import History

HERE = Path(__file__).parent
RECIPE = tiny_demo(seed=3, width=64, context=64, batch=8)
PRETRAIN_STEPS, STEPS, CHANGE, EVERYTHING = 500, 300, 160, 1 << 30

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slow-warmup": {"warmup": 150},
    "jump": {"jump": 5.0},
    "shift": {"shift": True},
    "restart": {"restart": True},
    "short-memory": {"betas": (0.9, 0.95), "steps": 150},
}


def record(
    warmup: int = 10,
    jump: float = 1.0,
    shift: bool = False,
    restart: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    steps: int = STEPS,
) -> dict[str, Any]:
    """One run. ``jump``, ``shift``, ``restart``: what happens at step ``CHANGE``; a restart goes
    back by 25 steps, to a checkpoint.
    """
    model = LanguageModel(RECIPE)
    model.load_state_dict(pretrained())
    optimizer = MixedPrecisionAdamW(model.parameters(), lr=2e-5, betas=betas)
    schedule = LambdaLR(optimizer, lambda step: rate(step, warmup, jump))
    sources = text.standard_library()
    home = Batches(text.pretraining_rows(sources[::7], RECIPE.context, 2048), RECIPE.batch, seed=1)
    away = Batches(
        text.pretraining_rows(
            [f"{7919 * i % 99999989:08d}\n" for i in range(20000)], RECIPE.context, 2048
        ),
        RECIPE.batch,
        seed=1,
    )
    profilers = Profiler(), Profiler(sample=EVERYTHING)
    losses, norms = [], []
    step, kept = 0, None
    while step < steps:
        if restart and step == CHANGE and kept is not None:
            step, (weights, moments, rates) = CHANGE - 25, kept
            (
                model.load_state_dict(weights),
                optimizer.load_state_dict(moments),
                schedule.load_state_dict(rates),
            )
            kept = None
        elif restart and step == CHANGE - 25:
            kept = clone((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
        batch = next(away if shift and step >= CHANGE else home)
        loss = model.loss(torch.from_numpy(batch.tokens), torch.from_numpy(batch.graded))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step(), optimizer.zero_grad(), schedule.step()
        step += 1
        losses.append(round(loss.item(), 4)), norms.append(round(norm, 4))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        for profiler in profilers:
            profiler.observe(step, state, loss=loss.item(), gradient_norm=norm)
    sampled, full = (short(profiler.history()) for profiler in profilers)
    moments = {path for path, leaf in full.leaves.items() if leaf.role == "second_moment"}
    observed = tuple(replace_leaves(o, moments) for o in full.observed)
    full = msgspec.structs.replace(full, observed=observed)
    return {
        "sampled": msgspec.to_builtins(sampled),
        "full": msgspec.to_builtins(full),
        "loss": losses,
        "gradient_norm": norms,
    }


@cache
def pretrained() -> dict[str, torch.Tensor]:
    """Weights past the first descent, where the gradients of a fresh model settle."""
    torch.manual_seed(RECIPE.seed)
    model = LanguageModel(RECIPE)
    optimizer = MixedPrecisionAdamW(model.parameters(), lr=3e-3)
    batches = Batches(
        text.pretraining_rows(text.standard_library()[1::7], RECIPE.context, 4096),
        RECIPE.batch,
        seed=2,
    )
    for step in range(PRETRAIN_STEPS):
        optimizer.param_groups[0]["lr"] = (
            3e-3 * min(1.0, (step + 1) / 20) * (1 - step / PRETRAIN_STEPS)
        )
        batch = next(batches)
        model.loss(torch.from_numpy(batch.tokens), torch.from_numpy(batch.graded)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()
    return model.state_dict()


def rate(step: int, warmup: int, jump: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return (0.6 + 0.4 * math.cos(math.pi * min(1.0, step / 400))) * (
        jump if step >= CHANGE else 1.0
    )


def clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    return type(value)(clone(item) for item in value) if isinstance(value, list | tuple) else value


def replace_leaves(observed: Any, paths: set[str]) -> Any:
    return msgspec.structs.replace(
        observed, leaves={p: m for p, m in observed.leaves.items() if p in paths}
    )


def short(history: History) -> History:
    """Four digits of each number: more only takes space."""

    def cut(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        return [cut(item) for item in value] if isinstance(value, list | tuple) else value

    return msgspec.convert(cut(msgspec.to_builtins(history)), History)


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name, options in RUNS.items():
        began = time.process_time()
        content = gzip.compress(
            json.dumps(record(**options), separators=(",", ":")).encode(), 9, mtime=0
        )
        (HERE / f"{name}.json.gz").write_bytes(content)
        print(
            f"{name}: {len(content)} bytes, {time.process_time() - began:.0f} s of processor time"
        )


if __name__ == "__main__":
    main()
