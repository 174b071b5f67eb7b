"""What a resumed run loses: killed at many steps, restored, trained on, and compared with the run
that was never killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Cell, Unit
from benchmarks.ways import Chain, Run, Way
from deltacheck.evaluate.workloads.recipe import Recipe
from deltacheck.profile.sensitivity import distance, largest_change, lost_steps

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Plan:
    """``settle_steps`` before the first save, one every ``every`` steps. The last ``kills`` of the
    saves are resumed from, each for ``horizon`` steps, a multiple of ``every``.
    """

    seeds: tuple[int, ...]
    settle_steps: int
    saves: int
    every: int
    kills: int
    horizon: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """One resumed run against the uninterrupted one, ``horizon`` steps after the restore.

    ``loss_change``: of the evaluation loss. ``progress``: by how much the uninterrupted one lowered
    it in these steps. ``noise``: how far another data order moves it. ``lost_steps``: along the way
    of the uninterrupted run's weights. ``restore_error``, ``element_change``: largest difference of
    a master weight right after the restore and at the end, in learning rates. ``update``: L2 norm
    of the first update over the uninterrupted run's. ``forward_exact``: whether the forward pass
    after the restore has the bits of the one before.
    """

    step: int
    stage: str
    loss_change: float
    progress: float
    noise: float
    lost_steps: float
    restore_error: float
    element_change: float
    update: float
    forward_exact: bool


@dataclass(frozen=True, slots=True)
class _Lived:
    """The uninterrupted run at one step."""

    loss: float
    masters: Weights
    next_masters: Weights
    logits: bytes


def resumed(
    framework: str, recipe: Recipe, ways: Sequence[Way], plan: Plan, folder: Path
) -> dict[str, list[Resumed]]:
    """Kill the runs of all seeds under each policy; by the policy's name, one record for each
    kill.
    """
    found: dict[str, list[Resumed]] = {way.name: [] for way in ways}
    for seed in plan.seeds:
        for name, records in _one_seed(
            framework, recipe, seed, ways, plan, folder / str(seed)
        ).items():
            found[name] += records
    return found


def noise_sd(records: Sequence[Resumed]) -> float:
    """Standard deviation of the evaluation loss over data orders: two runs differ by sqrt(2)
    of it.
    """
    return float(np.sqrt(mean(record.noise**2 for record in records) / 2))


def lost_by_loss(records: Sequence[Resumed], horizon: int) -> float | None:
    """Steps of training that the mean change of the loss is worth; ``None`` where the run made no
    progress to compare with.
    """
    progress = mean(record.progress for record in records) / horizon
    return mean(record.loss_change for record in records) / progress if progress > 0 else None


def _one_seed(
    framework: str, recipe: Recipe, seed: int, ways: Sequence[Way], plan: Plan, folder: Path
) -> dict[str, list[Resumed]]:
    run = Run(framework, replace(recipe, seed=seed))
    chains = {
        way.name: Chain(framework, folder / str(number), way.policy(4 * plan.saves))
        for number, way in enumerate(ways)
    }
    lived: dict[int, _Lived] = {}
    try:
        loss = run.train(plan.settle_steps)
        for number in range(plan.saves + plan.horizon // plan.every):
            if number < plan.saves:
                for chain in chains.values():
                    chain.save(run.workload.step, run.workload.state(), run.metrics(loss))
            step, before, logits, now = (
                run.workload.step,
                run.workload.evaluate(),
                run.logits(),
                run.masters(),
            )
            loss = run.train(1)
            lived[step] = _Lived(before, now, run.masters(), logits)
            loss = run.train(plan.every - 1) if plan.every > 1 else loss
        lived[run.workload.step] = _Lived(run.workload.evaluate(), run.masters(), {}, b"")
        exact = next(chains[way.name] for way in ways if way.lossless)
        kills = list(exact.bytes)[-plan.kills :]
        found: dict[str, list[Resumed]] = {name: [] for name in chains}
        for kill in kills:
            run.workload.load(exact.restore(kill, run.workload.state()))
            run.workload.reorder(1000 * seed + kill)
            run.train(plan.horizon)
            noise = run.workload.evaluate() - lived[kill + plan.horizon].loss
            for name, chain in chains.items():
                found[name].append(_resume(run, chain, kill, lived, plan.horizon, noise))
    finally:
        for chain in chains.values():
            chain.close()
    return found


def _resume(
    run: Run, chain: Chain, kill: int, lived: dict[int, _Lived], horizon: int, noise: float
) -> Resumed:
    then, end = lived[kill], lived[kill + horizon]
    run.workload.load(chain.restore(kill, run.workload.state()))
    restored, logits = run.masters(), run.logits()
    run.train(1)
    update = distance(run.masters(), restored) / (distance(then.next_masters, then.masters) or 1.0)
    run.train(horizon - 1)
    reached = run.masters()
    rate = run.recipe.rate
    return Resumed(
        step=kill,
        stage=chain.stages[kill],
        loss_change=run.workload.evaluate() - end.loss,
        progress=then.loss - end.loss,
        noise=noise,
        lost_steps=lost_steps(then.masters, end.masters, reached, horizon),
        restore_error=largest_change(restored, then.masters) / rate,
        element_change=largest_change(reached, end.masters) / rate,
        update=update,
        forward_exact=logits == then.logits,
    )


LOSS_COLUMNS: dict[str, Unit] = {
    "policy": "text",
    "kills": "count",
    "stable": "count",
    "loss change": "number",
    "worst": "number",
    "noise sd": "number",
    "lost steps": "number",
}
WEIGHTS_COLUMNS: dict[str, Unit] = {
    "policy": "text",
    "lost steps": "number",
    "error at restore": "number",
    "element change": "number",
    "first update": "number",
    "forward exact": "ratio",
}


def loss_row(name: str, records: Sequence[Resumed], horizon: int) -> list[Cell]:
    """The cells of ``LOSS_COLUMNS``: mean change of the evaluation loss and the largest one, and
    what the mean is worth in steps.
    """
    changes = [record.loss_change for record in records]
    stable = sum(record.stage == "stable" for record in records)
    lost = lost_by_loss(records, horizon)
    return [
        name,
        len(records),
        stable,
        mean(changes),
        max(map(abs, changes)),
        noise_sd(records),
        lost,
    ]


def weights_row(name: str, records: Sequence[Resumed]) -> list[Cell]:
    """The cells of ``WEIGHTS_COLUMNS``: lost steps and forward passes are means, the others the
    worst of all kills.
    """
    return [
        name,
        mean(record.lost_steps for record in records),
        max(record.restore_error for record in records),
        max(record.element_change for record in records),
        max(record.update for record in records),
        mean(float(record.forward_exact) for record in records),
    ]
