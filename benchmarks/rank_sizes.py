"""Bytes of every save of several ranks, beside those of one process that saves the same run.

The runs are courses of ``schedules``. One process trains. After every interval it hands the state
to four ranks, which hold the rows that FSDP2 gives them and save over gloo.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks import schedules
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.schedules import Course, Saved
from benchmarks.ways import Chain
from deltacheck import Policy
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.store.files.arrays import bytes_on_disk

RANKS = 4
# The mean of four ranks over that of one process.
LIMIT = 1.1
_COURSES = ("RL, 3 M", "3.3 M (46 MB)")
_QUICK_COURSES = ("RL, tiny",)
_MEMORY = Path("/dev/shm")
_POLL_SECONDS = 5.0  # between looks at the processes
_PATIENCE_SECONDS = 120.0  # for their end


def run(settings: Settings) -> Result:
    """Measure the chosen courses."""
    names = _QUICK_COURSES if settings.quick else _COURSES
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    for number, course in enumerate(schedules.courses(settings)):
        if not (
            settings.only in course.name
            if settings.only
            else any(name in course.name for name in names)
        ):
            continue
        folder = settings.folder / str(number)
        folder.mkdir()
        saved = measure(course, folder)
        for label, of_ranks in saved.items():
            later = of_ranks.after_start
            rows.append(
                [
                    course.name,
                    label,
                    len(of_ranks.shares),
                    of_ranks.over(len(of_ranks.shares)),
                    mean(later),
                    max(later) / mean(later),
                ]
            )
        alone, together = (mean(of_ranks.after_start) for of_ranks in saved.values())
        figures.append(
            Figure(f"{course.name}: {RANKS} ranks over one", together / alone, LIMIT, "number")
        )
    columns: dict[str, Unit] = {
        "run": "text",
        "ranks": "text",
        "saves": "count",
        "whole run": "ratio",
        "later": "ratio",
        "largest / later": "number",
    }
    about = (
        "auto, weights stored; bytes of all files that a save adds, over torch.save of the same"
        " state; later: saves after the first stable one" + schedules.left_out(settings)
    )
    return Result("rank_sizes", about, [Table("bytes of whole runs", columns, rows)], figures)


def measure(course: Course, folder: Path) -> dict[str, Saved]:
    """Train a course, save it with one process and with several ranks, and return the saves."""
    training = course.start(folder)
    alone = Chain("torch", folder / "alone", Policy.auto(derive=False))
    together = _Ranks(folder / "together")
    size, peer = 0, 0
    shares: list[float] = []
    stable: list[bool] = []
    try:
        for _ in range(course.saves):
            loss = mean(training.train_step() for _ in range(course.every))
            metrics = {"loss": loss, "learning_rate": training.rate}
            state = training.state()
            alone.save(training.step, state, metrics)
            peer = peer or peer_save(state, folder / "peer.pt")
            is_stable = together.save(training.step, state, metrics)
            before, size = size, bytes_on_disk(folder / "together")
            shares.append((size - before) / peer)
            stable.append(is_stable or any(stable))
    finally:
        together.close()
        alone.close()
    started = [stage == "stable" for stage in alone.stages.values()]
    return {
        "1": Saved(
            [count / peer for count in alone.bytes.values()],
            [any(started[: number + 1]) for number in range(len(started))],
        ),
        str(RANKS): Saved(shares, stable),
    }


class _Ranks:
    """Processes that save together what they are given."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._memory = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        self._done: Any = context.Queue()
        self._tasks: list[Any] = [context.Queue() for _ in range(RANKS)]
        self._processes = [
            context.Process(target=work, args=(rank, port, root, self._tasks[rank], self._done))
            for rank in range(RANKS)
        ]
        for process in self._processes:
            process.start()

    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """Save a step, wait for it, and return whether the policy takes the run for stable."""
        path = Path(self._memory.name) / "state.pt"
        torch.save(state, path)
        for task in self._tasks:
            task.put((step, path, dict(metrics)))
        return "stable" in [self._next(step) for _ in range(RANKS)]

    def _next(self, step: int) -> str:
        """Wait for a rank that has saved, however slow the machine is, and return its stage."""
        while True:
            with suppress(queue.Empty):
                return self._done.get(timeout=_POLL_SECONDS)  # type: ignore[no-any-return]
            for rank, process in enumerate(self._processes):
                if not process.is_alive():
                    raise RuntimeError(f"rank {rank} ended without saving step {step}")

    def close(self) -> None:
        for task in self._tasks:
            task.put(None)
        for process in self._processes:
            process.join(_PATIENCE_SECONDS)
            process.kill()
        self._memory.cleanup()


def work(rank: int, port: int, root: Path, tasks: Any, done: Any) -> None:
    """Save what the queue names, as one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import deltacheck
    from deltacheck.backends.torch import Engine

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    with Engine(root, policy=Policy.auto(derive=False), process_group=dist.group.WORLD) as engine:
        while (task := tasks.get()) is not None:
            step, path, metrics = task
            whole = torch.load(path, mmap=True, weights_only=False)
            engine.save(step, _sharded(whole, mesh), metrics=metrics).result()
            stage = deltacheck.open(root).manifest(step).stage if rank == 0 else ""
            done.put(stage)
    dist.destroy_process_group()


def _sharded(value: Any, mesh: Any) -> Any:
    """Return a state whose tensors are cut by rows, as ``fully_shard`` cuts parameters."""
    from torch.distributed.tensor import Shard, distribute_tensor

    if isinstance(value, Mapping):
        return {key: _sharded(item, mesh) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_sharded(item, mesh) for item in value)
    # Step counts and the like are whole on every rank.
    if not isinstance(value, torch.Tensor) or value.numel() <= 1:
        return value
    return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
