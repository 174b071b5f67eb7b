"""How long a save keeps a real training loop waiting, beside torch.save + fsync of the same state
on
the same disk.

Loops of a few training steps follow each other in rounds: one without a save, one that begins with
torch.save, one for each way of saving with the engine. What a save costs is told three times: by
the handle, by clocks of our own around `save` and the optimizer hook (these count), and by the wall
time of the whole loop against the one without a save, which holds what training loses to the work
behind it as well.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from deltacheck import Policy, SaveHandle
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.evaluate.workloads.recipe import Recipe, demo, tiny_demo
from deltacheck.evaluate.workloads.torch_workloads import Workload

LIMIT = 0.10  # of torch.save + fsync

AUTO, EAGER, KEYFRAME = "auto, delta", "eager, delta", "auto, keyframe"


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train, the steps between two saves, and the ways to save it. Forward and backward
    take longer than a capture.
    """

    recipe: Recipe
    every: int
    rounds: int = 5
    ways: tuple[str, ...] = (AUTO, EAGER, KEYFRAME)


# One thread, as where an accelerator computes and the host has cores to spare; the second case has
# none to spare.
_BASE = demo(seed=1, threads=1, batch=4)
CASES = (
    Case(_BASE, every=4, rounds=9),
    Case(replace(_BASE, threads=2), every=4, rounds=9, ways=(AUTO,)),
    Case(replace(_BASE, width=640, layers=6, heads=10), every=1),
    Case(replace(_BASE, width=1024, layers=8, heads=16), every=1, ways=(AUTO,)),
)
QUICK_CASES = (Case(tiny_demo(seed=1), every=2, rounds=3),)


@dataclass(slots=True)
class Way:
    """One way of saving, and what its saves cost, in seconds a save."""

    name: str
    engine: Engine | None  # None: torch.save
    told: list[float] = field(default_factory=list)  # by the handle, and the wait at the end
    witnessed: list[float] = field(default_factory=list)  # by our own clocks
    durable: list[float] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)
    idle_captured: list[float] = field(
        default_factory=list
    )  # the worst case: no training beside the save
    idle_durable: list[float] = field(default_factory=list)


class Clock:
    """Time that passes between two optimizer hooks, one registered before the engines' and one
    after.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before = 0.0
        self._hooks = [register_optimizer_step_pre_hook(self._begin)]

    def enclose(self) -> None:
        """Call this once the engines exist: what their hooks take is measured from now on."""
        self._hooks.append(register_optimizer_step_pre_hook(self._end))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: object) -> None:
        self._before = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._before


def run(settings: Settings) -> Result:
    rows: list[list[Cell]] = []
    worst: list[list[Cell]] = []
    figures: list[Figure] = []
    for number, case in enumerate(QUICK_CASES if settings.quick else CASES):
        training = states.untrained(case.recipe)
        size = f"{states.raw_bytes(training.state()) / 1e6:,.0f} MB"
        bare, theirs, ways = _measure(training, case, settings.folder / str(number))
        about: list[Cell] = [size, case.recipe.threads, case.every, median(bare) / case.every]
        base = median(theirs.witnessed)
        for way in (theirs, *ways):
            told, witnessed, lost = (
                median(way.told),
                median(way.witnessed),
                median(_lost(way.loops, bare)),
            )
            rows.append(
                [
                    *about,
                    way.name,
                    told,
                    witnessed,
                    witnessed / base,
                    median(way.durable),
                    lost,
                    lost / (median(bare) / case.every),
                ]
            )
        for way in ways:
            captured, durable = median(way.idle_captured), median(way.idle_durable)
            worst.append([size, way.name, captured, captured / base, durable, durable / base])
            if way.name == AUTO:
                figures.append(
                    Figure(
                        f"blocking, {size}, training on {case.recipe.threads} threads",
                        median(way.witnessed) / base,
                        LIMIT,
                    )
                )
    loop: dict[str, Unit] = {
        "state": "text",
        "threads": "count",
        "steps between": "count",
        "one step": "seconds",
        "way": "text",
        "told by the handle": "seconds",
        "blocking": "seconds",
        "of torch.save": "ratio",
        "until durable": "seconds",
        "loop loses": "seconds",
        "of a step": "ratio",
    }
    idle: dict[str, Unit] = {
        "state": "text",
        "way": "text",
        "until captured": "seconds",
        "captured, of torch.save": "ratio",
        "until durable": "seconds",
        "durable, of torch.save": "ratio",
    }
    return Result(
        "blocking",
        "wall time that a real training loop loses to a save of its whole state, medians of 5 to 9"
        " rounds; the first save of an engine, which makes the shadow, is not counted",
        [
            Table("in a training loop", loop, rows),
            Table("worst case: no training beside the save", idle, worst),
        ],
        figures,
    )


def _measure(training: Workload, case: Case, folder: Path) -> tuple[list[float], Way, list[Way]]:
    """Seconds of loops without a save, with torch.save, and with each way of the case, all in
    turns.
    """
    folder.mkdir()
    clock = Clock()
    ways = [Way(name, _engine(name, folder)) for name in case.ways]
    clock.enclose()
    theirs = Way("torch.save + fsync", None)
    bare: list[float] = []

    def loop() -> None:
        for _ in range(case.every):
            training.train_step()

    def save_and_loop(way: Way, engine: Engine) -> None:
        clock.seconds = 0.0
        began = time.perf_counter()
        handle = engine.save(training.step, training.state())
        called = time.perf_counter() - began
        loop()
        # In a longer run the next save would wait here for this one, so what is left of it is
        # charged to it.
        waited = states.timed(engine.wait)
        way.loops.append(time.perf_counter() - began)
        way.told.append(handle.blocking_seconds + waited)
        way.witnessed.append(called + clock.seconds + waited)
        way.durable.append(_durable_seconds(handle))

    def torch_and_loop() -> None:
        began = time.perf_counter()
        peer_save(training.state(), folder / "torch_save.pt")
        seconds = time.perf_counter() - began
        loop()
        theirs.loops.append(time.perf_counter() - began)
        for what in (theirs.told, theirs.witnessed, theirs.durable):
            what.append(seconds)

    def idle(way: Way, engine: Engine) -> None:
        began = time.perf_counter()
        handle = engine.save(training.step, training.state())
        handle.wait("captured")
        way.idle_captured.append(time.perf_counter() - began)
        handle.wait()
        way.idle_durable.append(time.perf_counter() - began)

    with ExitStack() as stack:
        stack.callback(clock.close)
        engines = [(way, stack.enter_context(way.engine)) for way in ways if way.engine is not None]
        loop()
        for _, engine in engines:
            engine.guard(training.optimizer)
            engine.save(training.step, training.state()).wait()
        for _ in range(case.rounds):
            bare.append(states.timed(loop))
            torch_and_loop()
            for way, engine in engines:
                save_and_loop(way, engine)
        for _ in range(max(3, case.rounds // 2)):
            training.train_step()
            for way, engine in engines:
                idle(way, engine)
    return bare, theirs, ways


def _engine(name: str, folder: Path) -> Engine:
    policy = Policy.exact(max_chain_depth=0) if name == KEYFRAME else Policy.exact()
    return Engine(
        folder / name.replace(", ", "-"),
        policy=policy,
        capture="eager" if name == EAGER else "auto",
    )


def _lost(loops: list[float], bare: list[float]) -> list[float]:
    """What each loop took longer than the one without a save of the same round."""
    return [with_save - without for with_save, without in zip(loops, bare, strict=True)]


def _durable_seconds(handle: SaveHandle) -> float:
    report = handle.report
    assert report is not None  # it was waited for
    return report.durable_seconds
