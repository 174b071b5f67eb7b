"""Size, cost and exactness of a gradient log, beside torch.save and a direct delta.

The same training continues while the ways of saving alternate. Every logged step is restored at the
end and compared, leaf by leaf, with digests of the live state at the save.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import torch
import xxhash

from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.states import State
from benchmarks.workloads.torch_workloads import Workload
from deltacheck import SaveReport
from deltacheck.backends.torch import Engine, GradientLog
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.leaf.spec import LeafKind

RATES = (1e-6, 2e-5)
EVERY = (1, 2, 4)  # steps between two saves
LIMIT = 0.11  # of torch.save, for a step that is logged at every step
MAX_REPLAY_STEPS = 16


@dataclass(slots=True)
class Turn:
    """The saves of one way, in order."""

    reports: list[SaveReport] = field(default_factory=list)
    # Seconds by sequence number, by the benchmark's own clock
    durable: dict[int, float] = field(default_factory=dict)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)

    def logged(self) -> list[SaveReport]:
        """Return the saves that wrote gradients."""
        return [report for report in self.reports if report.replayed_steps]

    def deltas(self) -> list[SaveReport]:
        """Return the saves of the state itself without keyframes."""
        return [
            r
            for r in self.reports
            if not r.replayed_steps and all(leaf.kind is not LeafKind.KEYFRAME for leaf in r.leaves)
        ]


def run(settings: Settings) -> Result:
    """Measure sizes, times and restores at several rates and intervals."""
    recipe = states.QUICK if settings.quick else states.REAL
    replays = 4 if settings.quick else MAX_REPLAY_STEPS
    sizes: list[list[Cell]] = []
    times: list[list[Cell]] = []
    restores: list[list[Cell]] = []
    figures: list[Figure] = []
    wrong = checked = parameters = 0
    for rate in RATES[:1] if settings.quick else RATES:
        training = states.post_trained(
            recipe, rate, settle_steps=2 if settings.quick else states.SETTLE_STEPS
        )
        parameters = sum(p.numel() for p in training.model.parameters())
        file = peer_save(training.state(), settings.folder / "torch_save.pt")
        for every in EVERY[:1] if settings.quick else EVERY:
            folder = settings.folder / f"{rate:g}-{every}"
            # A save of the state itself, a cycle of logged saves, and the next of the state.
            saves = replays // every + 2
            log = _logged(training, every, saves, folder / "log", replays)
            direct = _direct(training, every, min(saves, 6), folder / "direct")
            logged = median(report.stored_bytes for report in log.logged())
            delta = median(report.stored_bytes for report in direct.deltas())
            cycle = mean(report.stored_bytes for report in (*log.logged(), *log.deltas()))
            sizes.append([f"{rate:g}", every, file, logged / file, delta / file, cycle / file])
            ways = (
                ("logged", log, log.logged()),
                ("state itself, by the log", log, log.deltas()),
                ("direct delta", direct, direct.deltas()),
            )
            for name, turn, reports in ways:
                durable = median(turn.durable[report.seq] for report in reports)
                times.append(
                    [
                        f"{rate:g}",
                        every,
                        name,
                        median(report.blocking_seconds for report in reports),
                        durable,
                    ]
                )
            wrong += _count_inexact(folder / "log", log, training)
            checked += len(log.reports)
            if every == 1:
                figures.append(
                    Figure(
                        f"a logged step of torch.save, lr {rate:g}, every step",
                        logged / file,
                        LIMIT,
                    )
                )
                restores += _restores(f"{rate:g}", folder, log, direct, training, settings)
    figures.append(Figure("logged steps that were not restored bit for bit", wrong, 0, "count"))
    about = (
        f"post-training {parameters / 1e6:.1f} M parameters (bf16 weights and gradients; fp32"
        " master and moments), clipped; all files of a save; cycle: mean over"
        f" {replays} replayed steps and the save of the state itself after them; {checked} steps"
        " restored and compared"
    )
    size_columns: dict[str, Unit] = {
        "lr": "text",
        "every": "count",
        "torch.save": "bytes",
        "a logged step": "ratio",
        "a direct delta": "ratio",
        "cycle": "ratio",
    }
    time_columns: dict[str, Unit] = {
        "lr": "text",
        "every": "count",
        "way": "text",
        "blocking": "seconds",
        "durable": "seconds",
    }
    restore_columns: dict[str, Unit] = {
        "lr": "text",
        "steps replayed": "count",
        "restore": "seconds",
        "direct delta, as many deltas": "seconds",
    }
    tables = [
        Table("stored, of torch.save of the same state", size_columns, sizes),
        Table("cost of a save that is waited for", time_columns, times),
        Table(
            "restoring, root opened and files in the page cache, every byte verified",
            restore_columns,
            restores,
        ),
    ]
    return Result("gradient_log", about, tables, figures)


def _logged(training: Workload, every: int, saves: int, folder: Path, replays: int) -> Turn:
    turn = Turn()
    with (
        Engine(folder) as engine,
        GradientLog(
            engine, training.optimizer, max_replay_steps=replays, max_steps_per_save=max(EVERY)
        ) as log,
    ):
        for number in range(saves):
            for _ in range(every if number else 0):
                training.train_step()
            state, start = training.state(), time.perf_counter()
            report = log.save(training.step, state).result()
            assert report is not None  # nothing is skipped
            turn.durable[report.seq] = time.perf_counter() - start
            turn.reports.append(report)
            turn.digests[training.step] = _digests(training.state())
    return turn


def _direct(training: Workload, every: int, saves: int, folder: Path) -> Turn:
    turn = Turn()
    with Engine(folder) as engine:
        for number in range(saves):
            for _ in range(every if number else 0):
                training.train_step()
            state, start = training.state(), time.perf_counter()
            handle = engine.save(training.step, state)
            engine.before_update()  # the wait of the next optimizer step counts as blocking
            report = handle.result()
            assert report is not None
            turn.durable[report.seq] = time.perf_counter() - start
            turn.reports.append(report)
            turn.digests[training.step] = _digests(training.state())
    return turn


def _digests(state: State) -> dict[str, str]:
    return {
        path: xxhash.xxh3_128_hexdigest(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        )
        for path, tensor in states.leaves_of(state).items()
    }


def _count_inexact(root: Path, turn: Turn, training: Workload) -> int:
    """Count the steps whose restore differs from the live state in any bit."""
    with Engine(root) as engine:
        return sum(
            _digests(engine.restore(step, optimizer=training.optimizer)) != digests
            for step, digests in turn.digests.items()
        )


def _restores(
    rate: str, folder: Path, log: Turn, direct: Turn, training: Workload, settings: Settings
) -> list[list[Cell]]:
    by_replays: Mapping[int, int] = {report.replayed_steps: report.step for report in log.reports}
    rows: list[list[Cell]] = []
    for replays in sorted({0, 1, 4, max(by_replays)} & by_replays.keys()):
        log_seconds = _time_restore(folder / "log", by_replays[replays], training, settings)
        direct_seconds = None
        if replays < len(direct.reports):
            step = direct.reports[replays].step
            direct_seconds = _time_restore(folder / "direct", step, training, settings)
        rows.append([rate, replays, log_seconds, direct_seconds])
    return rows


def _time_restore(root: Path, step: int, training: Workload, settings: Settings) -> float:
    def restore() -> None:
        with Engine(root) as engine:
            engine.restore(step, optimizer=training.optimizer)

    return median(states.timed(restore) for _ in range(2 if settings.quick else 5))
