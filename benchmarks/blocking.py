"""Time that a training loop waits for a save, beside torch.save + fsync of the same state.

Loops of a few training steps alternate in rounds: one without a save, one that begins with
torch.save, and one for each way of saving with the engine. The cost of a save is measured three
times: by the handle, by clocks around `save` and the optimizer hook (these count), and by the wall
time of the whole loop against the one without a save. The last includes the slowdown of training by
background work.
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
from benchmarks.workloads.recipe import Recipe, demo, tiny_demo
from benchmarks.workloads.torch_workloads import Workload
from deltacheck import Policy, SaveHandle, SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files.evaluation import peer_save

LIMIT = 0.10  # of torch.save + fsync

AUTO, EAGER, KEYFRAME = "auto, delta", "eager, delta", "auto, keyframe"


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train, the steps between two saves, and the ways to save it.

    Forward and backward pass take longer than a capture.
    """

    recipe: Recipe
    every: int
    rounds: int = 5
    ways: tuple[str, ...] = (AUTO, EAGER, KEYFRAME)


# One thread, as if an accelerator computed and the host had spare cores. The second case has none.
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
    """One way of saving, and the costs of its saves in seconds per save."""

    name: str
    engine: Engine | None  # None: torch.save
    # By the handle, with the wait at the end
    reported: list[float] = field(default_factory=list)
    clocked: list[float] = field(default_factory=list)  # by the benchmark's own clocks
    durable: list[float] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)
    # The worst case: no training beside the save
    idle_captured: list[float] = field(default_factory=list)
    idle_durable: list[float] = field(default_factory=list)


class Clock:
    """The time between two optimizer hooks, registered before and after those of the engines."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before = 0.0
        self._hooks = [register_optimizer_step_pre_hook(self._begin)]

    def enclose(self) -> None:
        """Measure the engines' hooks from now on. Call this once, after their creation."""
        self._hooks.append(register_optimizer_step_pre_hook(self._end))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: object) -> None:
        self._before = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._before


def run(settings: Settings) -> Result:
    """Measure every case."""
    rows: list[list[Cell]] = []
    worst: list[list[Cell]] = []
    figures: list[Figure] = []
    for number, case in enumerate(QUICK_CASES if settings.quick else CASES):
        training = states.untrained(case.recipe)
        size = f"{states.raw_bytes(training.state()) / 1e6:,.0f} MB"
        bare, peer, ways = _measure(training, case, settings.folder / str(number))
        case_cells: list[Cell] = [size, case.recipe.threads, case.every, median(bare) / case.every]
        base = median(peer.clocked)
        for way in (peer, *ways):
            reported, clocked = median(way.reported), median(way.clocked)
            lost = median(_lost(way.loops, bare))
            rows.append(
                [
                    *case_cells,
                    way.name,
                    reported,
                    clocked,
                    clocked / base,
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
                        median(way.clocked) / base,
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
        " rounds; the first save of an engine, which creates the shadow, is not counted",
        [
            Table("in a training loop", loop, rows),
            Table("worst case: no training beside the save", idle, worst),
        ],
        figures,
    )


def _measure(training: Workload, case: Case, folder: Path) -> tuple[list[float], Way, list[Way]]:
    """Measure loops without a save, with torch.save, and with each way of the case, in turn."""
    folder.mkdir()
    clock = Clock()
    ways = [Way(name, _engine(name, folder)) for name in case.ways]
    clock.enclose()
    peer = Way("torch.save + fsync", None)
    bare: list[float] = []

    def loop() -> None:
        for _ in range(case.every):
            training.train_step()

    def save_and_loop(way: Way, engine: Engine) -> None:
        clock.seconds = 0.0
        start = time.perf_counter()
        handle = engine.save(training.step, training.state())
        call_seconds = time.perf_counter() - start
        loop()
        # In a longer run the next save would wait here for this one, so the rest of it is charged
        # to it.
        wait_seconds = states.timed(engine.wait)
        way.loops.append(time.perf_counter() - start)
        way.reported.append(handle.blocking_seconds + wait_seconds)
        way.clocked.append(call_seconds + clock.seconds + wait_seconds)
        way.durable.append(_durable_seconds(handle))

    def torch_and_loop() -> None:
        start = time.perf_counter()
        peer_save(training.state(), folder / "torch_save.pt")
        seconds = time.perf_counter() - start
        loop()
        peer.loops.append(time.perf_counter() - start)
        for values in (peer.reported, peer.clocked, peer.durable):
            values.append(seconds)

    def idle(way: Way, engine: Engine) -> None:
        start = time.perf_counter()
        handle = engine.save(training.step, training.state())
        handle.wait("captured")
        way.idle_captured.append(time.perf_counter() - start)
        handle.wait()
        way.idle_durable.append(time.perf_counter() - start)

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
    return bare, peer, ways


def _engine(name: str, folder: Path) -> Engine:
    policy = Policy.exact(max_chain_depth=0) if name == KEYFRAME else Policy.exact()
    return Engine(
        folder / name.replace(", ", "-"),
        policy=policy,
        options=SaveOptions(capture="eager" if name == EAGER else "auto"),
    )


def _lost(loops: list[float], bare: list[float]) -> list[float]:
    """Return the seconds of each loop beyond the one without a save of the same round."""
    return [with_save - without_save for with_save, without_save in zip(loops, bare, strict=True)]


def _durable_seconds(handle: SaveHandle) -> float:
    report = handle.report
    assert report is not None  # the save was waited for
    return report.durable_seconds
