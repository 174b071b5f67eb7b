"""Bytes and quality of checkpoints under each policy, on post-training runs in both frameworks.

The runs are fine-tuning, LoRA and reinforcement learning. Bytes are those of all files that a save
adds, over those of `torch.save` of the same state. Quality is the loss of a run that is killed,
restored and trained on, beside the noise of another data order. ``--only`` selects a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import candidates, entropy, quality
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.ways import AUTO, CLASSES, EXACT, WAYS, Chain, Run, Way
from benchmarks.workloads.recipe import Recipe, recipe, small, tiny
from deltacheck import Policy
from deltacheck.policy.keyframes import deltas_between
from deltacheck.policy.presets import RESTORE_RATIO

DEPTH = 32  # of chains, in the amortised figures: the default of the presets
EXACT_OVER_BOUND = 1.10  # of the order-0 entropy


@dataclass(frozen=True, slots=True)
class Configuration:
    """One workload at one rate.

    ``limits``: promised share of `torch.save` in the steady state, by policy and steps between
    saves.
    """

    framework: str
    recipe: Recipe
    limits: Mapping[tuple[str, int], float]

    @property
    def name(self) -> str:
        """Framework, task and rate."""
        return f"{self.framework} {self.recipe.task}, lr {self.recipe.rate:g}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The course of a measurement of sizes.

    ``saves``: the number of saves, by steps between saves, after ``settle_steps``. ``few``: the
    number of saves of expensive measurements that vary little: keyframes, and single classes.
    """

    settle_steps: int
    saves: Mapping[int, int]
    few: int


FULL = Sizes(settle_steps=600, saves={10: 30, 1: 30}, few=8)
QUICK = Sizes(settle_steps=2, saves={2: 3}, few=3)
SEEDS = (1, 2, 3, 4, 5)
KILLS = quality.KillPlan(
    seeds=SEEDS, settle_steps=200, every=10, numbers=tuple(range(11, 21)), horizon=20
)
QUICK_KILLS = quality.KillPlan(seeds=(1,), settle_steps=2, every=2, numbers=(2, 3), horizon=2)
# From the first saves of a run on, whose optimizer is new
EARLY = quality.KillPlan(
    seeds=SEEDS, settle_steps=10, every=10, numbers=(1, 2, 3, 5, 10, 20), horizon=20
)
QUICK_EARLY = quality.KillPlan(seeds=(1, 2), settle_steps=2, every=2, numbers=(1, 2), horizon=2)
LOST_STEPS = {"": 0.5, "stable": 3.0}  # promised, by the stage; stable: moments are reused
CHAIN = quality.ChainPlan(seeds=SEEDS, steps=420, every=4, first_kill=76, apart=20, kills=10)
QUICK_CHAIN = quality.ChainPlan(seeds=(1,), steps=12, every=2, first_kill=8, apart=2, kills=1)
CHAIN_TEXT = {"pretrain_steps": 100, "sources": 200}  # as `builtin.sft`
SIZE_PART, RESUME_PART, EARLY_PART, CHAIN_PART = PARTS = (
    "sizes",
    "resumes",
    "early saves",
    "chained kills",
)


def configurations(make: Callable[..., Recipe]) -> list[Configuration]:
    """Return all configurations, at the size of a function of ``recipe``."""
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
    """Measure sizes with large models, and quality with small ones.

    Raises:
        ValueError: If ``settings.only`` is in the name of no part.
    """
    parts = [part for part in PARTS if (settings.only or "") in part]
    if not parts:
        raise ValueError(f"stability has the parts {', '.join(PARTS)}, not {settings.only}")
    sizes, kills = (QUICK, QUICK_KILLS) if settings.quick else (FULL, KILLS)
    large, small_runs = (
        configurations(make) for make in ((tiny, tiny) if settings.quick else (recipe, small))
    )
    if settings.quick:
        large, small_runs = large[:1], small_runs[1:2]  # JAX takes seconds to compile anything
    rows: list[list[Cell]] = []
    classes: list[list[Cell]] = []
    losses: list[list[Cell]] = []
    weights: list[list[Cell]] = []
    verdicts: list[list[Cell]] = []
    figures: list[Figure] = []
    for number, configuration in enumerate(large if SIZE_PART in parts else ()):
        folder = settings.folder / f"sizes-{number}"
        size_rows, class_rows, size_figures = measure_sizes(configuration, sizes, folder)
        rows, classes, figures = rows + size_rows, classes + class_rows, figures + size_figures
    for number, configuration in enumerate(small_runs if RESUME_PART in parts else ()):
        name, folder = configuration.name, settings.folder / f"quality-{number}"
        records = quality.resumed(
            configuration.framework, configuration.recipe, WAYS, kills, folder
        )
        losses += [
            [name, *quality.loss_row(way, resumes, kills.horizon)]
            for way, resumes in records.items()
        ]
        weights += [[name, *quality.weights_row(way, resumes)] for way, resumes in records.items()]
        figures += promised_quality(name, records)
        workload = Run(configuration.framework, configuration.recipe)
        verdicts += [
            [name, *row]
            for row in candidates.measure_candidates(
                workload, kills.horizon, kills.settle_steps, kills.horizon
            )
        ]
    early: list[list[Cell]] = []
    plan = QUICK_EARLY if settings.quick else EARLY
    for number, configuration in enumerate(small_runs if EARLY_PART in parts else ()):
        name, folder = configuration.name, settings.folder / f"early-{number}"
        records = quality.resumed(
            configuration.framework, configuration.recipe, (EXACT, AUTO), plan, folder
        )
        for way, resumes in records.items():
            early += [[name, *row] for row in quality.early_rows(way, resumes, plan)]
        figures += promised_early(name, records[AUTO.name], plan)
    chains: list[list[Cell]] = []
    if CHAIN_PART in parts:
        chains = quality.chained(
            (tiny if settings.quick else small)("sft", **({} if settings.quick else CHAIN_TEXT)),
            QUICK_CHAIN if settings.quick else CHAIN,
            settings.folder / "chains",
        )
        figures.append(promised_chain(chains))
    about = (
        "bytes of all files that a save adds, over torch.save of the same state,"
        f" {sizes.settle_steps} steps into the run; steady: mean of the saves in the policy's"
        " steady state, none of which contains keyframes; amortised: with a keyframe of each leaf"
        f" after at most {DEPTH} deltas. After a resume: smaller models, {len(kills.seeds)} seeds,"
        f" {kills.horizon} steps after a restore against the uninterrupted run; lost steps: by the"
        " loss, and along the path of the weights; error at restore and element change: largest of"
        " a master weight, in learning rates; first update: its norm over the uninterrupted run's"
    )
    tables = [
        Table("bytes a checkpoint", SIZE_COLUMNS, rows),
        Table("lossless, class by class, beside the order-0 entropy", CLASS_COLUMNS, classes),
        Table("after a resume: held-out loss", {"run": "text", **quality.LOSS_COLUMNS}, losses),
        Table("after a resume: weights", {"run": "text", **quality.WEIGHTS_COLUMNS}, weights),
        Table("one class of the state replaced", {"run": "text", **candidates.COLUMNS}, verdicts),
        Table("resumes from early saves", {"run": "text", **quality.EARLY_COLUMNS}, early),
        Table("torch sft, many kills in a row", quality.CHAIN_COLUMNS, chains),
    ]
    return Result("stability", about, [table for table in tables if table.rows], figures)


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


def measure_sizes(
    configuration: Configuration, sizes: Sizes, folder: Path
) -> tuple[list[list[Cell]], list[list[Cell]], list[Figure]]:
    """Return rows for each policy, rows of the exact policy for each class, and figures."""
    rows: list[list[Cell]] = []
    classes: list[list[Cell]] = []
    figures: list[Figure] = []
    work = Run(configuration.framework, configuration.recipe)
    loss = work.train(sizes.settle_steps)
    baseline = work.torch_save(_created(folder) / "torch_save.pt")
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
                    in_part = {path: leaf for path, leaf in leaves.items() if path in now[part]}
                    saved_state = in_part if leaves else state
                    chain.save(work.workload.step, saved_state, work.metrics(loss))
                if number:
                    bounds.append(
                        {name: entropy.bound_bytes(before[name], now[name]) for name in CLASSES}
                    )
                before = now
        finally:
            for chain in chains.values():
                chain.close()
        keyframe_saves = {
            name: chain.settled() for (name, part), chain in chains.items() if part == KEYFRAMES
        }
        keyframes |= {name: mean(sizes) for name, sizes in keyframe_saves.items() if sizes}
        bound = {name: mean(of_step[name] for of_step in bounds) for name in CLASSES}
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
        # LoRA trains so little that tables and files outweigh it.
        if configuration.recipe.task != "lora":
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
    """Return chains by policy and part of the state.

    They are longer than the run, so that no later save contains keyframes. With ``keyframes``,
    there is also a chain for each policy whose every save consists of keyframes.
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
    """Return the mean bytes of a save in an endless run.

    Args:
        steady: Bytes of a save without keyframes.
        keyframes: Bytes of a save of keyframes alone.
        depths: Raw bytes of each leaf, and the number of deltas that follow its keyframe.
    """
    share = sum(size / (deltas + 1) for size, deltas in depths) / sum(size for size, _ in depths)
    return (1 - share) * steady + share * keyframes


def _depths(arrays: Mapping[str, Any], policy: Policy) -> list[tuple[int, int]]:
    """Return raw bytes and deltas per keyframe of each leaf.

    Under an exact policy, leaves of 4-byte elements are assumed to change everywhere. All other
    deltas are assumed to be small beside their leaf.
    """
    dense = {
        path: a.nbytes if policy.is_exact and a.itemsize == 4 else 0 for path, a in arrays.items()
    }
    return [
        (a.nbytes, deltas_between(policy, path, a.nbytes, dense[path]))
        for path, a in arrays.items()
    ]


def promised_quality(name: str, records: Mapping[str, Sequence[quality.Resumed]]) -> list[Figure]:
    """Return the promised figures of quality.

    No policy loses more than the noise of another data order. A policy that promises an exact
    forward pass gives it every time.
    """
    figures = []
    for way in WAYS:
        resumes = records[way.name]
        change = mean(record.loss_change for record in resumes)
        limit = 0.0 if way.lossless else quality.noise_sd(resumes)
        figures.append(Figure(f"{name}, {way.name}, loss after a resume", change, limit, "number"))
        if way.forward_exact:
            exact = mean(float(record.forward_exact) for record in resumes)
            figures.append(
                Figure(f"{name}, {way.name}, forward pass bit for bit", exact, 1.0, at_least=True)
            )
    return figures


def promised_early(
    name: str, records: Sequence[quality.Resumed], plan: quality.KillPlan
) -> list[Figure]:
    """Return the promised figures of resumes from early saves under ``Policy.auto()``."""
    figures = []
    for number, of_save in quality.by_save(records, plan).items():
        case = f"{name}, auto, resumed from save {number}"
        change = mean(record.loss_change for record in of_save)
        figures.append(Figure(f"{case}, loss", change, quality.noise_sd(of_save), "number"))
        stage = "stable" if any(record.stage == "stable" for record in of_save) else ""
        lost = mean(record.lost_steps for record in of_save)
        figures.append(Figure(f"{case}, lost steps", lost, LOST_STEPS[stage], "number"))
    return figures


def promised_chain(rows: Sequence[Sequence[Cell]]) -> Figure:
    """Return the promised figure of kills in a row under ``Policy.auto()``: within the noise."""
    (row,) = (
        dict(zip(quality.CHAIN_COLUMNS, row, strict=True))
        for row in rows
        if row[0] == quality.AUTO_CHAIN
    )
    change, noise = row["loss change"], row["noise sd"]
    assert isinstance(change, float)
    assert isinstance(noise, float)
    return Figure(f"torch sft, {row['kills']} kills in a row, auto, loss", change, noise, "number")


def _created(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
