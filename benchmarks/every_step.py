"""Time that training loses to a save at every step: memory tier, disk, and the law of Adam.

The same training continues while the ways alternate: a loop of some steps with a save after each
step follows a loop without any save, and their wall times are compared. All saves of a loop are
committed when its time ends, so no other loop pays for them. Copies from memory to the disk
continue during training. The rest of them is finished before the next loop begins.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.workloads.model import LanguageModel
from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from benchmarks.workloads.recipe import Recipe, demo, tiny_demo
from deltacheck import MemoryTier, Policy, SaveHandle
from deltacheck.backends.torch import Engine

LIMIT = 0.031  # of a step, on a GPU
RATE = 1e-6
_MEMORY = Path("/dev/shm")

MEMORY, DRAINED, DISK = "memory", "memory, all to disk", "disk"
LAW = "memory, by the law of Adam"
WAYS = (MEMORY, DRAINED, DISK, LAW)


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train on a device, with ``steps`` in each loop."""

    recipe: Recipe
    device: str
    steps: int
    rounds: int


CPU = Case(demo(seed=1, threads=1), "cpu", steps=3, rounds=5)
CUDA = Case(
    demo(seed=1, threads=4, width=2048, layers=16, heads=16, context=2048, batch=8),
    "cuda",
    steps=20,
    rounds=5,
)
QUICK = Case(tiny_demo(seed=1), "cpu", steps=1, rounds=1)


class Loop:
    """A language model on random text, whose whole state is saved."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        torch.set_num_threads(recipe.threads)
        torch.manual_seed(recipe.seed)
        self._device = device
        self._shape = (recipe.batch, recipe.context)
        self.model = LanguageModel(recipe).to(device)
        self.optimizer = MixedPrecisionAdamW(self.model.parameters(), lr=RATE)
        self.step = 0

    def run(self, steps: int, save: Callable[[int, states.State], object] | None = None) -> float:
        """Return the seconds for some steps with a save after each, device work included."""
        self._synchronise()
        start = time.perf_counter()
        for _ in range(steps):
            tokens = torch.randint(0, 256, self._shape, device=self._device)
            # As GPUs train. Processors are several times faster in float32.
            with torch.autocast("cuda", torch.bfloat16, enabled=self._device == "cuda"):
                loss = self.model.loss(tokens, torch.ones_like(tokens, dtype=torch.bool))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.step += 1
            if save is not None:
                save(self.step, self.state())
            self.optimizer.zero_grad()
        self._synchronise()
        return time.perf_counter() - start

    def state(self) -> states.State:
        """Return the whole state."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }

    def _synchronise(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


@dataclass(slots=True)
class Way:
    """One way of saving.

    ``overheads``: seconds of each loop beyond those of the loop without saves before it, relative
    to the latter. ``processor``: the same for the processor time of all threads, which other
    programs disturb less.
    """

    name: str
    engine: Engine
    overheads: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    blocking: list[float] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    drained: list[float] = field(default_factory=list)


def run(settings: Settings) -> Result:
    """Measure all ways on the CUDA device if there is one, else on the CPU."""
    case = QUICK if settings.quick else CUDA if torch.cuda.is_available() else CPU
    return measure(case, settings.folder)


def measure(case: Case, folder: Path, names: Sequence[str] = WAYS) -> Result:
    """Measure some ways in one case, with the checkpoints on the disk of ``folder``."""
    memory = Path(
        tempfile.mkdtemp(
            prefix="deltacheck-every-step-",
            dir=_MEMORY if os.access(_MEMORY, os.W_OK) else folder,
        )
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(case.device == "cpu")
    try:
        loop, bare, ways = _measure(case, folder, memory, names)
    finally:
        torch.use_deterministic_algorithms(deterministic)
        shutil.rmtree(memory, ignore_errors=True)
    raw = states.raw_bytes(loop.state())
    step = median(bare) / case.steps
    rows: list[list[Cell]] = []
    for way in ways:
        stored = median(way.stored)
        spread = max(way.overheads) - min(way.overheads)
        costs = [
            median(way.overheads),
            spread,
            median(way.processor),
            median(way.blocking),
            stored,
            stored / raw,
            median(way.drained),
        ]
        rows.append([f"{raw / 1e6:,.0f} MB", case.device, way.name, step, *costs])
    columns: dict[str, Unit] = {
        "state": "text",
        "device": "text",
        "way": "text",
        "one step": "seconds",
        "of a step": "ratio",
        "spread": "ratio",
        "processor": "ratio",
        "blocking": "seconds",
        "a save stores": "bytes",
        "of the state": "ratio",
        "copied after": "seconds",
    }
    overhead = median(next(way.overheads for way in ways if way.name == LAW))
    figures = (
        [Figure("a save at every step, of a step, by the law in memory", overhead, LIMIT)]
        if case.device == "cuda"
        else []
    )
    measured_on = (
        "there is no CUDA device, so the promised figure (at most 3.1 % of a step) is not measured"
        if not figures
        else "on the device"
    )
    about = (
        f"every step saved, learning rate {RATE:g}, {case.rounds} loops of {case.steps} steps for"
        " each way, medians; memory tier in"
        f" {'/dev/shm' if memory.parent == _MEMORY else 'the folder of the disk'}; {measured_on}."
        " 'of a step': seconds of a loop beyond those of the loop without saves right before it;"
        " 'processor': the same for the processor time of all threads. 'copied after': time to copy"
        " the rest of a loop's saves to the disk"
    )
    return Result("every_step", about, [Table("a save at every step", columns, rows)], figures)


def _measure(
    case: Case, folder: Path, memory: Path, names: Sequence[str]
) -> tuple[Loop, list[float], list[Way]]:
    loop = Loop(case.recipe, case.device)
    bare: list[float] = []
    with ExitStack() as stack:
        ways = [
            _way(name, loop, folder / str(number), memory / str(number), stack)
            for number, name in enumerate(names)
        ]
        loop.run(2)
        for way in ways:
            loop.run(1, way.engine.save)
            way.engine.wait()
        for _ in range(case.rounds):
            for way in ways:
                start = time.process_time()
                bare.append(loop.run(case.steps))
                processor = time.process_time() - start
                loop.run(
                    1, way.engine.save
                )  # from the state that this way has saved last, many steps ago
                way.engine.persist()
                _loop(way, loop, case.steps, bare[-1], processor)
    return loop, bare, ways


def _loop(way: Way, loop: Loop, steps: int, bare: float, processor: float) -> None:
    handles: list[SaveHandle] = []

    def save(step: int, state: states.State) -> None:
        handles.append(way.engine.save(step, state))

    start, cpu_start = time.perf_counter(), time.process_time()
    loop.run(steps, save)
    way.engine.wait()
    way.processor.append((time.process_time() - cpu_start) / processor - 1)
    way.overheads.append((time.perf_counter() - start) / bare - 1)
    way.drained.append(states.timed(way.engine.persist))
    for handle in handles:
        report = handle.report
        assert report is not None  # the save was waited for
        way.blocking.append(report.blocking_seconds)
        way.stored.append(report.stored_bytes)


def _way(name: str, loop: Loop, folder: Path, memory: Path, stack: ExitStack) -> Way:
    # Rarely to the disk, like a run that accepts to lose one step if a process dies, and minutes in
    # a power cut.
    tier = MemoryTier(memory, persist_every=1 if name == DRAINED else 1000)
    options: dict[str, Any] = {} if name == DISK else {"memory": tier}
    if name == LAW:
        options["policy"] = Policy.exact(law=True)
    engine = stack.enter_context(Engine(folder, **options))
    engine.guard(loop.optimizer)
    return Way(name, engine)
