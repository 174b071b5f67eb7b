"""Time of a restore at several depths of the chain, beside torch.load of the same state."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks import restore_phases, states
from benchmarks.record import Cell, Result, Settings, Table, Unit
from benchmarks.states import State
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files.evaluation import peer_save

DEPTHS = (0, 8, 32)  # deltas on the keyframe; Policy.exact() allows at most 32
QUICK_DEPTHS = (0, 1, 3)
# The limit of each leaf is between half of this and all of it, so no leaf gets another keyframe.
_POLICY = Policy.exact(max_chain_depth=4 * max(DEPTHS), max_restore_ratio=None)


def run(settings: Settings) -> Result:
    """Measure restores at each depth."""
    size = 4 << 20 if settings.quick else 280 << 20
    repetitions = 2 if settings.quick else 5
    synthetic = states.Synthetic(size)
    synthetic.train_step()
    program = states.Synthetic(size)  # which restores, while the other goes on
    parts: dict[str, Callable[[], State]] = {
        "whole AdamW state": synthetic.state,
        "bf16 weights": lambda: {"model": synthetic.state()["model"]},
    }
    rows: list[list[Cell]] = []
    phases: list[list[Cell]] = []
    for depth in QUICK_DEPTHS if settings.quick else DEPTHS:
        roots = {name: settings.folder / name.replace(" ", "-") for name in parts}
        engines = {name: Engine(root, policy=_POLICY) for name, root in roots.items()}
        try:
            for engine in engines.values():
                if synthetic.step > 1:
                    engine.restore()  # so that the chain continues
            while synthetic.step <= depth + 1:
                for name, engine in engines.items():
                    engine.save(synthetic.step, parts[name]()).wait()
                synthetic.train_step()
        finally:
            for engine in engines.values():
                engine.close()
        for name, root in roots.items():
            file, state = settings.folder / "torch_save.pt", parts[name]()
            row = _compare(name, depth, root, state, file, repetitions)
            # Bare weights have no optimizer that could arrive later.
            has_optimizer = "optimizer" in state
            row += _overlap(program, root, file, repetitions) if has_optimizer else [None] * 4
            rows.append(row)
            if has_optimizer:
                restore = partial(_restore_into, root, program.state())
                phases += restore_phases.rows(depth, state, restore, repetitions)
    columns: dict[str, Unit] = {
        "leaves": "text",
        "in memory": "bytes",
        "deltas on the keyframe": "count",
        "restore": "seconds",
        "torch.load": "seconds",
        "of torch.load": "ratio",
        "until the first forward": "seconds",
        "until complete": "seconds",
        "torch.load into the state": "seconds",
        "first forward of it": "ratio",
    }
    about = (
        "opening a root and restoring its newest step, every byte verified, beside"
        " torch.load(weights_only=True); synthetic state, one save a step, files in the page cache"
        f" for both, median of {repetitions}. Until the first forward: an overlapped restore into"
        " the state of the program returns. Until complete: the optimizer has arrived, while"
        " nothing else runs. Beside them torch.load and a copy into the same state. Second table:"
        " medians of the processor time of all threads, for the whole AdamW state"
    )
    return Result(
        "restoring", about, [Table("restore time", columns, rows), restore_phases.table(phases)]
    )


def _restore_into(root: Path, target: State) -> None:
    with Engine(root) as engine:
        engine.restore(into=target)


def _compare(
    name: str, depth: int, root: Path, state: State, file: Path, repetitions: int
) -> list[Cell]:
    peer_save(state, file)
    restore_seconds, load_seconds = [], []

    def restore() -> None:
        with Engine(root) as engine:
            engine.restore()

    for _ in range(repetitions):
        restore_seconds.append(states.timed(restore))
        load_seconds.append(states.timed(lambda: torch.load(file, weights_only=True)))
    return [
        name,
        states.raw_bytes(state),
        depth,
        median(restore_seconds),
        median(load_seconds),
        median(restore_seconds) / median(load_seconds),
    ]


def _overlap(program: states.Synthetic, root: Path, file: Path, repetitions: int) -> list[Cell]:
    """Measure overlapped restores into a state, and loads of ``file`` into it."""
    forward_seconds, complete_seconds, load_seconds = [], [], []

    def load() -> None:
        loaded = states.leaves_of(torch.load(file, weights_only=True))
        for path, tensor in states.leaves_of(program.state()).items():
            tensor.copy_(loaded[path])

    for _ in range(repetitions):
        target = {**program.state(), "optimizer": program.optimizer}
        start = time.perf_counter()
        with Engine(root) as engine:
            handle = engine.restore(into=target, overlap=True)
            forward_seconds.append(time.perf_counter() - start)
            handle.wait()
            complete_seconds.append(time.perf_counter() - start)
        load_seconds.append(states.timed(load))
    forward, complete, loading = map(median, (forward_seconds, complete_seconds, load_seconds))
    return [forward, complete, loading, forward / loading]
