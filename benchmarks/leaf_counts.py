"""Time of the training thread in a save, by the number of leaves.

The leaves are small, so that the work for each leaf counts and not their bytes. It is measured as
processor time of the calling thread, in turns: waits and other programs do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from deltacheck import Policy
from deltacheck.backends.torch import Engine

COUNTS, QUICK_COUNTS = (104, 1_000, 10_000), (40,)
_ROUNDS = 7
TORCH_SAVE, CHECKPOINTING = "torch.save", "torch_checkpointing"
POLICIES: dict[str, Callable[[], Policy]] = {
    "exact": Policy.exact,
    "auto, weights stored": partial(Policy.auto, derive=False),
}
# torch_checkpointing passes descriptors of each tensor to another process; with more leaves it ran
# out of 20,000 of them.
_CHECKPOINTING_LEAVES = 1_000
# The largest ratios. torch_checkpointing copies the state on another thread, too.
MOST = {TORCH_SAVE: 0.3, CHECKPOINTING: 1.0}

Save = Callable[[int, dict[str, Any]], Callable[[], object]]


def run(settings: Settings) -> Result:
    """Measure states of several numbers of leaves."""
    columns: dict[str, Unit] = {
        "leaves": "count",
        "way": "text",
        "processor time": "seconds",
        "of torch.save": "ratio",
    }
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    for count in QUICK_COUNTS if settings.quick else COUNTS:
        seconds = _seconds(settings.folder / str(count), count)
        base = median(seconds[TORCH_SAVE])
        rows += [
            [count, name, median(values), median(values) / base] for name, values in seconds.items()
        ]
        for name in POLICIES:
            for peer, most in MOST.items():
                if peer in seconds:
                    ratio = median(seconds[name]) / median(seconds[peer])
                    figures.append(Figure(f"{count:,} leaves, {name}, of {peer}", ratio, most))
    about = (
        "processor time of the training thread in one save of a state of AdamW, whose matrices of"
        f" 16 x 16 are so small that the number of leaves counts; in turns, medians of {_ROUNDS}"
    )
    return Result("leaf_counts", about, [Table("by the number of leaves", columns, rows)], figures)


def _seconds(folder: Path, count: int) -> dict[str, list[float]]:
    """Return the processor time of the calling thread in each save, by way."""
    parameters = [torch.nn.Parameter(torch.randn(16, 16) / 50) for _ in range(count // 4)]
    names = [f"layers.{n // 10}.{n % 10}.weight" for n in range(len(parameters))]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.randn(16, 16) / 1000
        optimizer.step()

    step()
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ways = _ways(folder, optimizer, stack)
        for number in range(_ROUNDS + 2):
            for name, save in ways.items():
                state = {
                    "model": {n: p.detach() for n, p in zip(names, parameters, strict=True)},
                    "optimizer": optimizer.state_dict(),
                    "step": number,
                }
                begin = time.thread_time()
                wait = save(number, state)
                elapsed = time.thread_time() - begin
                wait()
                # The first saves create what the later ones use.
                if number >= 2:
                    seconds.setdefault(name, []).append(elapsed)
            step()
    return seconds


def _ways(folder: Path, optimizer: torch.optim.Optimizer, stack: ExitStack) -> dict[str, Save]:
    folder.mkdir()

    def plain(step: int, state: dict[str, Any]) -> Callable[[], object]:
        torch.save(state, folder / "state.pt")
        return lambda: None

    def ours(engine: Engine) -> Save:
        return lambda step, state: engine.save(step, state).wait

    ways: dict[str, Save] = {TORCH_SAVE: plain}
    if find_spec(CHECKPOINTING) is not None and len(optimizer.state) * 4 <= _CHECKPOINTING_LEAVES:
        ways[CHECKPOINTING] = _checkpointing(folder, stack)
    for name, policy in POLICIES.items():
        engine = stack.enter_context(Engine(folder / name, policy=policy()))
        engine.guard(optimizer)
        ways[name] = ours(engine)
    return ways


def _checkpointing(folder: Path, stack: ExitStack) -> Save:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    stack.callback(manager.close)

    def save(step: int, state: dict[str, Any]) -> Callable[[], object]:
        result: Any = manager.save(str(folder / f"theirs-{step}"), {"state": state})
        return result.result  # type: ignore[no-any-return]

    return save
