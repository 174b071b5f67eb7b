"""Bytes of saves by the layout of the training state and the policy, and from when a policy pays.

One fine-tuning in each layout, from pre-trained weights and a new optimizer. Every state is saved
under all policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks import prepared
from benchmarks.record import Cell, Result, Settings, Table, Unit, format_cell
from benchmarks.schedules import (
    DENSE_RATE,
    Course,
    RunTraining,
    Saved,
    Training,
    profiled,
    saved_under,
)
from benchmarks.ways import Run
from benchmarks.workloads.recipe import Recipe
from deltacheck import Policy
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.profile import Profile

EXACT = "exact"
EVERY, SAVES = 10, 40
LEAST_GAIN = 0.02
_BATCH = 4
# The policies that are compared. The argument is the profile of the first quarter of the run.
POLICIES: dict[str, Callable[[Profile], Policy]] = {
    EXACT: lambda profile: Policy.exact(),
    "exact(derive=True)": lambda profile: Policy.exact(derive=True),
    "exact(max_restore_ratio=1)": lambda profile: Policy.exact(max_restore_ratio=1),
    "auto, weights stored": lambda profile: Policy.auto(derive=False),
    "auto": lambda profile: Policy.auto(),
    'auto(profile, float32_weights="bounded")': lambda profile: Policy.auto(
        profile, float32_weights="bounded"
    ),
}


class Sized(Training, Protocol):
    """A training run that can save itself with ``torch.save``."""

    def torch_save(self, file: Path) -> int:
        """Save the state with ``torch.save``; return its bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of a training state.

    Attributes:
        name: Its name in the table.
        start: Starts the training with a recipe, each time with the same result.
        task: The state of ``prepared`` whose recipe is used.
        framework: ``torch`` or ``jax``.
    """

    name: str
    start: Callable[[Recipe], Sized]
    task: str = "adamw"
    framework: str = "torch"


class PlainTraining:
    """A fine-tuning with torch's own AdamW, whose moments have the dtype of the weights.

    Args:
        recipe: Sizes and rates.
        dtype: The dtype of weights and moments.
        autocast: Compute matrix products in bfloat16, as mixed precision does.
    """

    def __init__(self, recipe: Recipe, dtype: torch.dtype, *, autocast: bool = False) -> None:
        workload = Run("torch", recipe).workload
        self.step, self.rate = 0, recipe.rate
        self._model, self._batches = workload.model.to(dtype), workload.batches
        self._autocast = autocast
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), recipe.rate, recipe.betas, weight_decay=recipe.weight_decay
        )

    def train_step(self) -> float:
        """Train one step, and return its loss."""
        rows = next(self._batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss = self._model.loss(torch.from_numpy(rows.tokens), torch.from_numpy(rows.graded))
        loss.backward()
        clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        """Return everything that decides how the run continues."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "data": self._batches.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
        }

    def torch_save(self, file: Path) -> int:
        """Save the state with ``torch.save``; return its bytes."""
        return peer_save(self.state(), file)


LAYOUTS = (
    Layout("bfloat16 weights, float32 masters", lambda recipe: RunTraining(Run("torch", recipe))),
    Layout(
        "the same in JAX with optax",
        lambda recipe: RunTraining(Run("jax", recipe)),
        framework="jax",
    ),
    Layout(
        "float32 weights, autocast",
        lambda recipe: PlainTraining(recipe, torch.float32, autocast=True),
    ),
    Layout("float32 weights", lambda recipe: PlainTraining(recipe, torch.float32)),
    Layout("bfloat16 weights and moments", lambda recipe: PlainTraining(recipe, torch.bfloat16)),
    Layout(
        f"bfloat16 weights, float32 masters, RL at {DENSE_RATE:g}",
        lambda recipe: RunTraining(Run("torch", replace(recipe, rate=DENSE_RATE))),
        "rl_like",
    ),
    Layout(
        "LoRA on frozen bfloat16 weights", lambda recipe: RunTraining(Run("torch", recipe)), "lora"
    ),
)


COLUMNS: dict[str, Unit] = {
    "policy": "text",
    "all": "ratio",
    "later": "ratio",
    "over 200": "ratio",
    "stable": "count",
    "pays from": "count",
}


def run(settings: Settings) -> Result:
    """Save one fine-tuning in every layout under every policy."""
    size = prepared.SIZES["tiny" if settings.quick else "small"]
    every, saves = (1, 4) if settings.quick else (EVERY, settings.saves or SAVES)
    tables: list[Table] = []
    for number, layout in enumerate(LAYOUTS):
        if (settings.only or "") not in layout.name:
            continue
        folder = settings.folder / str(number)
        folder.mkdir()
        state_bytes, by_policy = _measure(layout, size, (every, saves), folder)
        rows: list[list[Cell]] = [
            [
                policy,
                saved.over(len(saved.shares)),
                mean(saved.after_start),
                saved.over(200),
                saved.stable.index(True) + 1 if any(saved.stable) else None,
                pays_from(saved.shares, by_policy[EXACT].shares),
            ]
            for policy, saved in by_policy.items()
        ]
        density = by_policy[EXACT].density
        title = f"{layout.name}; torch.save: {format_cell(state_bytes, 'bytes')}" + (
            ""
            if density is None
            else f"; {format_cell(density, 'ratio')} of the bfloat16 weights change between saves"
        )
        tables.append(Table(title, COLUMNS, rows))
    return Result(
        "layouts",
        f"{saves} saves, one every {every} steps, from a new optimizer; bytes of all files that a"
        " save adds, over torch.save of the same state; all: the mean of all saves, the first"
        " included; later: of the saves after the first stable one, without stages of those after"
        " the first; over 200: all, if the run goes on like that to 200 saves; stable: the number"
        f" of the first stable save; pays from: the save from which on all files so far take"
        f" {LEAST_GAIN:.0%} less than under {EXACT}",
        tables,
    )


def pays_from(shares: Sequence[float], exact: Sequence[float]) -> int | None:
    """Return the number of the first save from which on a policy has stored less than another.

    Less means by ``LEAST_GAIN`` at least: smaller differences are noise.

    Args:
        shares: Bytes of each save of the policy.
        exact: Bytes of each save of the other policy.

    Returns:
        The number, from 1. ``None``: the policy has not stored less after the last save.
    """
    sums = zip(accumulate(shares), accumulate(exact), strict=True)
    smaller = [ours < (1 - LEAST_GAIN) * theirs for ours, theirs in sums]
    if not smaller[-1]:
        return None
    return len(smaller) - smaller[::-1].index(False) + 1 if False in smaller else 1


def _measure(
    layout: Layout, size: prepared.Size, pace: tuple[int, int], folder: Path
) -> tuple[int, dict[str, Saved]]:
    """Return the bytes of torch.save, and the saves of a layout under each policy."""
    recipe = prepared.recipe_of(layout.task, size)
    recipe = replace(recipe, batch=max(recipe.batch, _BATCH))
    course = Course(layout.name, lambda folder: layout.start(recipe), *pace)
    profile = profiled(layout.start(recipe), course)
    training = layout.start(recipe)
    policies = {name: policy(profile) for name, policy in POLICIES.items()}
    saved = saved_under(
        training, course, policies, folder, framework=layout.framework, peer=training.torch_save
    )
    return training.torch_save(folder / "peer.pt"), saved
