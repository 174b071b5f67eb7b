"""The loss of resumed runs: killed once or many times in a row, compared with unkilled ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Cell, Unit
from benchmarks.ways import FIRST, MASTER, SECOND, Chain, Run, Way, class_of
from benchmarks.workloads.recipe import Recipe
from deltacheck import Policy
from deltacheck.profile.sensitivity import largest_change, lost_steps

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class KillPlan:
    """The saves of a run, and those that are resumed from.

    After ``settle_steps`` the run saves every ``every`` steps. Those with the given ``numbers``,
    counted from 1, are restored and trained on for ``horizon`` steps, a multiple of ``every``.
    """

    seeds: tuple[int, ...]
    settle_steps: int
    every: int
    numbers: tuple[int, ...]
    horizon: int

    @property
    def saves(self) -> int:
        """The number of saves."""
        return max(self.numbers)


@dataclass(frozen=True, slots=True)
class Resumed:
    """One resumed run against the uninterrupted one, ``horizon`` steps after the restore.

    ``loss_change``: of the evaluation loss. ``progress``: the decrease of that loss in the
    uninterrupted run. ``noise``: the change that another data order causes. ``lost_steps``: along
    the path of the uninterrupted run's weights. ``restore_error``, ``element_change``: largest
    difference of a master weight right after the restore and at the end, in learning rates.
    ``update``: L2 norm of the first update over the uninterrupted run's. ``forward_exact``: the
    forward pass after the restore has the bits of the one before.
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
class _Reference:
    """The uninterrupted run at one step."""

    loss: float
    masters: Weights
    next_masters: Weights
    logits: bytes


def resumed(
    framework: str, recipe: Recipe, ways: Sequence[Way], plan: KillPlan, folder: Path
) -> dict[str, list[Resumed]]:
    """Kill the runs of all seeds under each policy.

    Returns:
        One record for each kill, by the name of the policy.
    """
    by_policy: dict[str, list[Resumed]] = {way.name: [] for way in ways}
    for seed in plan.seeds:
        of_seed = _resume_seed(framework, recipe, seed, ways, plan, folder / str(seed))
        for name, records in of_seed.items():
            by_policy[name] += records
    return by_policy


def noise_sd(records: Sequence[Resumed]) -> float:
    """Return the standard deviation of the evaluation loss over data orders.

    Two runs differ by sqrt(2) times as much.
    """
    return _sd([record.noise for record in records])


def _sd(differences: Sequence[float]) -> float:
    """Return the standard deviation of values that differ so much in pairs."""
    return float(np.sqrt(mean(difference**2 for difference in differences) / 2))


def lost_by_loss(records: Sequence[Resumed], horizon: int) -> float | None:
    """Convert the mean change of the loss to training steps; ``None`` without any progress."""
    progress = mean(record.progress for record in records) / horizon
    return mean(record.loss_change for record in records) / progress if progress > 0 else None


def _resume_seed(
    framework: str, recipe: Recipe, seed: int, ways: Sequence[Way], plan: KillPlan, folder: Path
) -> dict[str, list[Resumed]]:
    run = Run(framework, replace(recipe, seed=seed))
    chains = {
        way.name: Chain(framework, folder / str(number), way.policy(4 * plan.saves))
        for number, way in enumerate(ways)
    }
    references: dict[int, _Reference] = {}
    try:
        loss = run.train(plan.settle_steps)
        for number in range(plan.saves + plan.horizon // plan.every):
            if number < plan.saves:
                for chain in chains.values():
                    chain.save(run.workload.step, run.workload.state(), run.metrics(loss))
            step, loss_before = run.workload.step, run.workload.evaluate()
            logits, masters = run.logits(), run.masters()
            loss = run.train(1)
            references[step] = _Reference(loss_before, masters, run.masters(), logits)
            loss = run.train(plan.every - 1) if plan.every > 1 else loss
        references[run.workload.step] = _Reference(run.workload.evaluate(), run.masters(), {}, b"")
        exact = next(chains[way.name] for way in ways if way.lossless)
        steps = list(exact.bytes)
        records: dict[str, list[Resumed]] = {name: [] for name in chains}
        for kill in (steps[number - 1] for number in plan.numbers):
            run.workload.load(exact.restore(kill, run.workload.state()))
            run.workload.reorder(1000 * seed + kill)
            run.train(plan.horizon)
            noise = run.workload.evaluate() - references[kill + plan.horizon].loss
            for name, chain in chains.items():
                records[name].append(_resume(run, chain, kill, references, plan.horizon, noise))
    finally:
        for chain in chains.values():
            chain.close()
    return records


def _resume(
    run: Run, chain: Chain, kill: int, references: dict[int, _Reference], horizon: int, noise: float
) -> Resumed:
    reference, end = references[kill], references[kill + horizon]
    run.workload.load(chain.restore(kill, run.workload.state()))
    restored, logits = run.masters(), run.logits()
    run.train(1)
    update = _distance(run.masters(), restored) / (
        _distance(reference.next_masters, reference.masters) or 1.0
    )
    run.train(horizon - 1)
    final_masters = run.masters()
    rate = run.recipe.rate
    return Resumed(
        step=kill,
        stage=chain.stages[kill],
        loss_change=run.workload.evaluate() - end.loss,
        progress=reference.loss - end.loss,
        noise=noise,
        lost_steps=lost_steps(reference.masters, end.masters, final_masters, horizon),
        restore_error=largest_change(restored, reference.masters) / rate,
        element_change=largest_change(final_masters, end.masters) / rate,
        update=update,
        forward_exact=logits == reference.logits,
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
    """Return the cells of ``LOSS_COLUMNS``, among them mean and largest change of the loss."""
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
    """Return the cells of ``WEIGHTS_COLUMNS``.

    Lost steps and forward passes are means. The others are the worst of all kills.
    """
    return [
        name,
        mean(record.lost_steps for record in records),
        max(record.restore_error for record in records),
        max(record.element_change for record in records),
        max(record.update for record in records),
        mean(float(record.forward_exact) for record in records),
    ]


EARLY_COLUMNS: dict[str, Unit] = {
    "policy": "text",
    "save": "count",
    "stable": "count",
    "loss change": "number",
    "noise sd": "number",
    "lost steps by loss": "number",
    "lost steps": "number",
}


def early_rows(name: str, records: Sequence[Resumed], plan: KillPlan) -> list[list[Cell]]:
    """Return a row of ``EARLY_COLUMNS`` for each save, of the means over the seeds."""
    rows: list[list[Cell]] = []
    for number, of_save in by_save(records, plan).items():
        rows.append(
            [
                name,
                number,
                sum(record.stage == "stable" for record in of_save),
                mean(record.loss_change for record in of_save),
                noise_sd(of_save),
                lost_by_loss(of_save, plan.horizon),
                mean(record.lost_steps for record in of_save),
            ]
        )
    return rows


def by_save(records: Sequence[Resumed], plan: KillPlan) -> dict[int, list[Resumed]]:
    """Return the records of all seeds by the number of the save."""
    count = len(plan.numbers)
    return {number: list(records[place::count]) for place, number in enumerate(plan.numbers)}


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A run that is killed many times in a row, with each of some seeds.

    It trains ``steps`` steps, saves every ``every`` steps, and is killed at ``kills`` saves from
    ``first_kill`` on, ``apart`` steps apart.
    """

    seeds: tuple[int, ...]
    steps: int
    every: int
    first_kill: int
    apart: int
    kills: int


Put = Callable[[dict[str, Any], dict[str, Any]], None]


def _inexact(*classes: str) -> Put:
    """Return a function that puts the exact values of all but some classes into a state."""

    def put(entry: dict[str, Any], live: dict[str, Any]) -> None:
        for field in ("master", "exp_avg", "exp_avg_sq"):
            if class_of(field) not in classes:
                entry[field] = live[field].clone()

    return put


AUTO_CHAIN = "all of these: `auto`"
# What is inexact at each resume -> the policy, and the rest of each parameter's state put back.
CHAINED: dict[str, tuple[Policy, Put]] = {
    "nothing": (Policy.auto(derive=False), _inexact()),
    "masters": (Policy.auto(derive=False), _inexact(MASTER)),
    AUTO_CHAIN: (Policy.auto(), _inexact(MASTER, FIRST, SECOND)),
}
CHAIN_COLUMNS: dict[str, Unit] = {
    "inexact at each resume": "text",
    "kills": "count",
    "lost steps": "number",
    "loss change": "number",
    "worst": "number",
    "noise sd": "number",
}


def chained(recipe: Recipe, plan: ChainPlan, folder: Path) -> list[list[Cell]]:
    """Return a row of ``CHAIN_COLUMNS`` for each of ``CHAINED``, of the means over the seeds.

    Lost steps are the change of the loss over the progress per step at the end of the run that is
    not killed. The noise is the change that another data order causes from the first kill on.
    """
    changes: dict[str, list[float]] = {name: [] for name in CHAINED}
    noise, progress = [], []
    last = plan.apart * 2
    for seed in plan.seeds:
        run = Run("torch", replace(recipe, seed=seed))
        start = copy.deepcopy(run.workload.state())
        run.train(plan.steps - last)
        before = run.workload.evaluate()
        run.train(last)
        end = run.workload.evaluate()
        progress.append((before - end) / last)
        run.workload.load(copy.deepcopy(start))
        run.train(plan.first_kill)
        run.workload.reorder(1000 * seed)
        run.train(plan.steps - plan.first_kill)
        noise.append(run.workload.evaluate() - end)
        for number, (name, (policy, put)) in enumerate(CHAINED.items()):
            run.workload.load(copy.deepcopy(start))
            _train_killed(run, plan, policy, put, folder / f"{seed}-{number}")
            changes[name].append(run.workload.evaluate() - end)
    return [
        [
            name,
            plan.kills,
            mean(of_seeds) / mean(progress),
            mean(of_seeds),
            max(map(abs, of_seeds)),
            _sd(noise),
        ]
        for name, of_seeds in changes.items()
    ]


def _train_killed(run: Run, plan: ChainPlan, policy: Policy, put: Put, root: Path) -> None:
    kills = range(plan.first_kill, plan.first_kill + plan.kills * plan.apart, plan.apart)
    chain = Chain("torch", root, policy)
    while run.workload.step < plan.steps:
        loss = run.train(plan.every)
        step, state = run.workload.step, run.workload.state()
        chain.save(step, state, run.metrics(loss))
        if step in kills:
            chain.close()
            chain = Chain("torch", root, policy)  # as a new process would
            restored, live = chain.restore(step, state), state["optimizer"]["state"]
            for key, entry in restored["optimizer"]["state"].items():
                put(entry, live[key])
            run.workload.load(restored)
    chain.close()


def _distance(first: Weights, second: Weights) -> float:
    """Return the L2 distance of two sets of weights."""
    squares = (
        np.sum((values.astype(np.float64) - second[path]) ** 2) for path, values in first.items()
    )
    return float(np.sqrt(sum(squares)))
