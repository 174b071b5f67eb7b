"""Share of a training step that the profiler takes, at its default interval."""

from __future__ import annotations

from statistics import median

from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.workloads.recipe import Recipe
from deltacheck import Profiler

PROFILER_AT_MOST = 0.02  # of the step


def run(settings: Settings) -> Result:
    """Measure training steps and calls of the profiler."""
    if settings.quick:
        return measure(states.QUICK, looks=2)
    return measure(states.REAL, looks=6)


def measure(recipe: Recipe, looks: int) -> Result:
    """Measure the training that a recipe describes, with some looks of the profiler."""
    training = states.untrained(recipe)
    profiler = Profiler()
    interval = profiler.interval_steps
    steps: list[float] = []
    calls: dict[bool, list[float]] = {True: [], False: []}
    losses: list[float] = [0.0]

    def train() -> None:
        losses[0] = training.train_step()

    def observe() -> None:
        was_look[0] = profiler.observe(training.step, training.state, loss=losses[0])

    was_look = [False]
    train()  # fills torch's caches, and is not measured
    first = states.timed(observe)
    for _ in range(looks * interval):
        steps.append(states.timed(train))
        seconds = states.timed(observe)
        calls[was_look[0]].append(seconds)
    step, look, note = median(steps), median(calls[True]), median(calls[False])
    share = (look + (interval - 1) * note) / interval / step
    columns: dict[str, Unit] = {
        "state": "bytes",
        "training step": "seconds",
        "a look": "seconds",
        "first look": "seconds",
        "between looks": "seconds",
        "interval": "count",
        "of the step": "ratio",
    }
    row: list[Cell] = [states.raw_bytes(training.state()), step, look, first, note, interval, share]
    return Result(
        "profiling",
        f"deltacheck.Profiler beside training on {_place(recipe)}, looking at every"
        f" {interval}th step; wall time, medians of {looks * interval} steps and {looks} looks,"
        " gathering the state included; the first look, which also plans the sample, is separate",
        [Table("profiler", columns, [row])],
        [Figure("profiler, share of the step time", share, PROFILER_AT_MOST)],
    )


def _place(recipe: Recipe) -> str:
    return f"{recipe.threads} threads" if recipe.device == "cpu" else recipe.device
