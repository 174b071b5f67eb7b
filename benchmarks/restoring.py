"""Time of a restore at several depths of the chain, beside torch.load of the same state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks import states
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
    parts: dict[str, Callable[[], State]] = {
        "whole AdamW state": synthetic.state,
        "bf16 weights": lambda: {"model": synthetic.state()["model"]},
    }
    rows: list[list[Cell]] = []
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
            rows.append(
                _compare(
                    name, depth, root, parts[name](), settings.folder / "torch_save.pt", repetitions
                )
            )
    columns: dict[str, Unit] = {
        "leaves": "text",
        "in memory": "bytes",
        "deltas on the keyframe": "count",
        "restore": "seconds",
        "torch.load": "seconds",
        "of torch.load": "ratio",
    }
    about = (
        "opening a root and restoring its newest step, every byte verified, beside"
        " torch.load(weights_only=True); synthetic state, one save a step, files in the page cache"
        f" for both, median of {repetitions}"
    )
    return Result("restoring", about, [Table("restore time", columns, rows)])


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
