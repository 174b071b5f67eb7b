"""Bytes and quality of checkpoints under each policy, on post-training runs in both frameworks:
fine-tuning, LoRA, reinforcement learning.

Bytes are those of all files that a save adds, over those of `torch.save` of the same state. Quality
is what a run loses that is killed, restored and trained on, beside the noise of another data order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import candidates, entropy, quality
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.ways import CLASSES, EXACT, WAYS, Chain, Run, Way
from deltacheck import Policy
from deltacheck.evaluate.workloads.recipe import Recipe, recipe, small, tiny
from deltacheck.policy.keyframes import deltas_between
from deltacheck.policy.presets import RESTORE_RATIO

DEPTH = 32  # of chains, in the amortised figures: the default of the presets
EXACT_OVER_BOUND = 1.10  # of the order-0 entropy


@dataclass(frozen=True, slots=True)
class Configuration:
    """One workload at one rate. ``limits``: (policy, steps between saves) -> promised share of
    `torch.save`, steady.
    """

    framework: str
    recipe: Recipe
    limits: Mapping[tuple[str, int], float]

    @property
    def name(self) -> str:
        return f"{self.framework} {self.recipe.task}, lr {self.recipe.rate:g}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How sizes are measured: ``saves`` by steps between saves, after ``settle_steps``.

    ``few``: saves of what costs much and changes little: keyframes, and the exact classes alone.
    """

    settle_steps: int
    saves: Mapping[int, int]
    few: int


FULL = Sizes(settle_steps=600, saves={10: 30, 1: 30}, few=8)
QUICK = Sizes(settle_steps=2, saves={2: 3}, few=3)
KILLS = quality.Plan(seeds=(1, 2, 3), settle_steps=200, saves=20, every=10, kills=10, horizon=20)
QUICK_KILLS = quality.Plan(seeds=(1,), settle_steps=2, saves=3, every=2, kills=2, horizon=2)


def configurations(make: Callable[..., Recipe]) -> list[Configuration]:
    return [
        Configuration(framework, make(task), limits)
        for framework in ("torch", "jax")
        for task, limits in (
            (
                "rl",
                {
                    ("v bounded, no m", 10): 0.0075,
                    ("m and v reused", 10): 0.005,
                    ("m and v reused", 1): 0.002,
                },
            ),
            ("sft", {("m and v reused", 10): 0.022, ("weights bounded too", 10): 0.0075}),
            ("lora", {("m and v reused", 10): 0.001}),
        )
    ]


def run(settings: Settings) -> Result:
    sizes, kills = (QUICK, QUICK_KILLS) if settings.quick else (FULL, KILLS)
    large, little = (
        configurations(make) for make in ((tiny, tiny) if settings.quick else (recipe, small))
    )
    if settings.quick:
        large, little = large[:1], little[1:2]  # JAX takes seconds to compile anything
    rows: list[list[Cell]] = []
    classes: list[list[Cell]] = []
    losses: list[list[Cell]] = []
    weights: list[list[Cell]] = []
    verdicts: list[list[Cell]] = []
    figures: list[Figure] = []
    for number, configuration in enumerate(large):
        found, bounds, more = measured(configuration, sizes, settings.folder / f"sizes-{number}")
        rows, classes, figures = rows + found, classes + bounds, figures + more
    for number, configuration in enumerate(little):
        name, folder = configuration.name, settings.folder / f"quality-{number}"
        records = quality.resumed(
            configuration.framework, configuration.recipe, WAYS, kills, folder
        )
        losses += [
            [name, *quality.loss_row(way, kept, kills.horizon)] for way, kept in records.items()
        ]
        weights += [[name, *quality.weights_row(way, kept)] for way, kept in records.items()]
        figures += promised_quality(name, records)
        run_on = Run(configuration.framework, configuration.recipe)
        verdicts += [
            [name, *row]
            for row in candidates.judged(run_on, kills.horizon, kills.settle_steps, kills.horizon)
        ]
    about = (
        "bytes of all files that a save adds, over torch.save of the same state,"
        f" {sizes.settle_steps} steps into the run; steady: mean of the saves in the policy's"
        " steady state, none of which holds keyframes; amortised: with a keyframe of each leaf at"
        f" the pace of chains of at most {DEPTH} deltas. After a resume: smaller models,"
        f" {len(kills.seeds)} seeds, {kills.horizon} steps after a restore against the"
        " uninterrupted run; lost steps: by the loss, and along the way of the weights; error at"
        " restore and element change: largest of a master weight, in learning rates; first update:"
        " its norm over the uninterrupted run's"
    )
    return Result(
        "stability",
        about,
        [
            Table("bytes a checkpoint", SIZE_COLUMNS, rows),
            Table("lossless, class by class, beside the order-0 entropy", CLASS_COLUMNS, classes),
            Table("after a resume: held-out loss", {"run": "text", **quality.LOSS_COLUMNS}, losses),
            Table("after a resume: weights", {"run": "text", **quality.WEIGHTS_COLUMNS}, weights),
            Table(
                "one class of the state replaced", {"run": "text", **candidates.COLUMNS}, verdicts
            ),
        ],
        figures,
    )


SIZE_COLUMNS: dict[str, Unit] = {
    "run": "text",
    "every": "count",
    "policy": "text",
    "torch.save": "bytes",
    "steady saves": "count",
    "a steady save": "bytes",
    "steady": "ratio",
    "amortised": "ratio",
    "order-0 entropy, lossless": "ratio",
}
CLASS_COLUMNS: dict[str, Unit] = {
    "run": "text",
    "every": "count",
    "leaves": "text",
    "in memory": "bytes",
    "entropy": "ratio",
    "stored": "ratio",
    "stored over entropy": "ratio",
}


def measured(
    configuration: Configuration, sizes: Sizes, folder: Path
) -> tuple[list[list[Cell]], list[list[Cell]], list[Figure]]:
    """Rows of bytes for each policy, rows of the exact policy for each class, and what was promised
    of them.
    """
    rows: list[list[Cell]] = []
    classes: list[list[Cell]] = []
    figures: list[Figure] = []
    work = Run(configuration.framework, configuration.recipe)
    loss = work.train(sizes.settle_steps)
    baseline = work.torch_save(_made(folder) / "torch_save.pt")
    keyframes: dict[str, float] = {}
    for every, saves in sizes.saves.items():
        chains = _chains(configuration.framework, saves, not keyframes, folder / str(every))
        try:
            bounds: list[dict[str, float]] = []
            before = work.words()
            for number in range(saves):
                if number:
                    loss = work.train(every)
                state, now = work.workload.state(), work.words()
                for (_, part), chain in chains.items():
                    if part != WHOLE and number >= sizes.few:
                        continue
                    leaves = work.arrays(state) if part in CLASSES else {}
                    kept = (
                        {path: array for path, array in leaves.items() if path in now[part]}
                        if leaves
                        else state
                    )
                    chain.save(work.workload.step, kept, work.metrics(loss))
                if number:
                    bounds.append(
                        {name: entropy.bound_bytes(before[name], now[name]) for name in CLASSES}
                    )
                before = now
        finally:
            for chain in chains.values():
                chain.close()
        whole = {
            name: chain.settled() for (name, part), chain in chains.items() if part == KEYFRAMES
        }
        keyframes |= {name: mean(found) for name, found in whole.items() if found}
        bound = {name: mean(found[name] for found in bounds) for name in CLASSES}
        raw = {name: sum(words.nbytes for words in now[name].values()) for name in CLASSES}
        for way in WAYS:
            settled = chains[way.name, WHOLE].settled()
            steady, whole_bytes = mean(settled) if settled else None, keyframes.get(way.name)
            depths = _depths(
                work.arrays(), replace(way.policy(DEPTH), max_restore_ratio=RESTORE_RATIO)
            )
            long_run = (
                None
                if steady is None or whole_bytes is None
                else amortised(steady, whole_bytes, depths)
            )
            rows.append(
                [
                    configuration.name,
                    every,
                    way.name,
                    baseline,
                    len(settled),
                    steady,
                    *(None if value is None else value / baseline for value in (steady, long_run)),
                    sum(bound.values()) / baseline if way.lossless else None,
                ]
            )
            limit = configuration.limits.get((way.name, every))
            if limit is not None:
                value = float("inf") if steady is None else steady / baseline
                figures.append(
                    Figure(f"{configuration.name}, every {every}, {way.name}, steady", value, limit)
                )
        stored = {name: mean(chains[EXACT.name, name].settled()) for name in CLASSES}
        stored[WHOLE], bound[WHOLE], raw[WHOLE] = (
            mean(chains[EXACT.name, WHOLE].settled()),
            sum(bound.values()),
            sum(raw.values()),
        )
        for name in stored:
            over = stored[name] / bound[name] if bound[name] else None
            classes.append(
                [
                    configuration.name,
                    every,
                    name,
                    raw[name],
                    bound[name] / raw[name],
                    stored[name] / raw[name],
                    over,
                ]
            )
        if (
            configuration.recipe.task != "lora"
        ):  # so little is trained there that tables and files outweigh it
            over = stored[WHOLE] / bound[WHOLE]
            figures.append(
                Figure(
                    f"{configuration.name}, every {every}, exact, over the order-0 entropy",
                    over,
                    EXACT_OVER_BOUND,
                )
            )
    return rows, classes, figures


WHOLE, KEYFRAMES = "whole state", "whole state, keyframes only"


def _chains(
    framework: str, saves: int, keyframes: bool, folder: Path
) -> dict[tuple[str, str], Chain]:
    """(policy, part of the state) -> chain. Chains are longer than the run, so that no save holds
    keyframes; with ``keyframes``, there is one beside each of which every save does.
    """
    parts: list[tuple[Way, str, Policy]] = []
    for way in WAYS:
        parts += [
            (way, WHOLE, way.policy(4 * saves)),
            *([(way, KEYFRAMES, way.policy(0))] if keyframes else []),
        ]
    parts += [(EXACT, name, EXACT.policy(4 * saves)) for name in CLASSES]
    return {
        (way.name, part): Chain(framework, folder / str(number), policy)
        for number, (way, part, policy) in enumerate(parts)
    }


def amortised(steady: float, keyframes: float, depths: Sequence[tuple[int, int]]) -> float:
    """Mean bytes of a save in a run without end, from those of a save without keyframes and of one
    that holds nothing else.

    ``depths``: raw bytes of each leaf, and how many deltas follow its keyframe.
    """
    share = sum(size / (deltas + 1) for size, deltas in depths) / sum(size for size, _ in depths)
    return (1 - share) * steady + share * keyframes


def _depths(arrays: Mapping[str, Any], policy: Policy) -> list[tuple[int, int]]:
    """Where everything is exact, what is 4 bytes wide changes everywhere; all other deltas are
    taken to be small beside their leaf.
    """
    dense = {
        path: a.nbytes if policy.is_exact and a.itemsize == 4 else 0 for path, a in arrays.items()
    }
    return [
        (a.nbytes, deltas_between(policy, path, a.nbytes, dense[path]))
        for path, a in arrays.items()
    ]


def promised_quality(name: str, records: Mapping[str, Sequence[quality.Resumed]]) -> list[Figure]:
    """No policy loses more than the noise of another data order; what promises an exact forward
    pass gives it every time.
    """
    figures = []
    for way in WAYS:
        found = records[way.name]
        change = mean(record.loss_change for record in found)
        limit = 0.0 if way.lossless else quality.noise_sd(found)
        figures.append(Figure(f"{name}, {way.name}, loss after a resume", change, limit, "number"))
        if way.forward_exact:
            exact = mean(float(record.forward_exact) for record in found)
            figures.append(
                Figure(f"{name}, {way.name}, forward pass bit for bit", exact, 1.0, at_least=True)
            )
    return figures


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
