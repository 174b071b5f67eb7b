"""Processor time of exact saves, with merges behind them, beside DCP's async_save.

Successive states of a real run are saved in turns by both ways, without training in between, so
that all processor time of the process is that of a save.
"""

from __future__ import annotations

import resource
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks import states
from benchmarks.prepared import SIZES, recipe_of, settle
from benchmarks.record import Figure, Result, Settings, Table, Unit
from benchmarks.ways import Run
from deltacheck.backends.torch import Engine
from deltacheck.store.files.arrays import bytes_on_disk

STATES = ("rl_like", "adamw")
WAYS = ("DCP async_save", "exact")
_SNAPSHOTS = 4
_WARM_UP, _SAVES = 2, 8  # a save of whole leaves, one that fills caches; then measured ones

Leaves = dict[str, torch.Tensor]
Save = Callable[[int], None]


def run(settings: Settings) -> Result:
    """Measure the states of a run of reinforcement learning and of fine-tuning."""
    rows: list[list[Any]] = []
    figures: list[Figure] = []
    size = SIZES["tiny" if settings.quick else "small"]
    for name in STATES[:1] if settings.quick else STATES:
        training = Run("torch", recipe_of(name, size))
        settle(training, size)
        snapshots: list[Leaves] = []
        for _ in range(_SNAPSHOTS):
            training.train(size.every)
            leaves = states.leaves_of(training.workload.state())
            snapshots.append({path: leaf.detach().clone() for path, leaf in leaves.items()})
        del training, leaves
        folder = settings.folder / name
        folder.mkdir()
        raw_bytes = sum(leaf.nbytes for leaf in snapshots[0].values())
        samples = _samples(snapshots, folder)
        seconds = {way: mean(s[0] for s in samples[way]) for way in WAYS}
        for way in WAYS:
            rows.append(
                [
                    name,
                    way,
                    seconds[way],
                    seconds[way] / raw_bytes * 1e9,
                    mean(s[1] for s in samples[way]) / raw_bytes,
                ]
            )
        ratio = seconds["exact"] / seconds[WAYS[0]]
        figures.append(Figure(f"processor time, {name}, exact, of {WAYS[0]}", ratio, 1.0))
    columns: dict[str, Unit] = {
        "state": "text",
        "way": "text",
        "processor time": "seconds",
        "ns per byte": "number",
        "stored, of the state": "ratio",
    }
    about = (
        f"processor time (user and system) of one save of {raw_bytes / 1e6:.0f} MB until it is"
        f" durable and merges end, in turns, means of {_SAVES}"
    )
    return Result("saving", about, [Table("exact saves", columns, rows)], figures)


def _samples(snapshots: list[Leaves], folder: Path) -> dict[str, list[tuple[float, int]]]:
    """Return the processor time and the stored bytes of each save, by way."""
    live = {path: leaf.clone() for path, leaf in snapshots[0].items()}
    samples: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    with Engine(folder / "ours") as engine:

        def exact(step: int) -> None:
            engine.save(step, live).wait()
            for thread in threading.enumerate():
                if thread.name == "deltacheck-compactor":
                    thread.join()

        ways: dict[str, Save] = {
            WAYS[0]: lambda step: _dcp(live, folder / f"theirs-{step}"),
            WAYS[1]: exact,
        }
        for number in range(_WARM_UP + _SAVES):
            # Forth and back, so that each save differs from the one before by one interval.
            at = number % (2 * _SNAPSHOTS - 2)
            for path, leaf in snapshots[min(at, 2 * _SNAPSHOTS - 2 - at)].items():
                live[path].copy_(leaf)
            for way, save in ways.items():
                stored_bytes, begin = bytes_on_disk(folder), _processor_seconds()
                save(number)
                seconds = _processor_seconds() - begin
                if number >= _WARM_UP:
                    samples[way].append((seconds, bytes_on_disk(folder) - stored_bytes))
            shutil.rmtree(folder / f"theirs-{number}")
    return samples


def _dcp(live: Leaves, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(action="ignore"):
        future: Any = dcp.async_save(live, checkpoint_id=path, no_dist=True)
        # Its thread warns, too.
        future.result()


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
