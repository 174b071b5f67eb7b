"""What a gradient log stores of a step, beside torch.save and a direct delta; what its saves and
restores cost; whether they are exact.

The same training goes on while each way of saving has its turn. Every logged step is restored at
the end and compared, leaf by leaf, with the digests that were taken of the live state beside the
save.
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
from benchmarks.record import Cell, Figure, Result, Settings, Table
from benchmarks.states import State
from deltacheck import SaveReport
from deltacheck.backends.torch import Engine, GradientLog
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.evaluate.workloads.torch_workloads import Workload
from deltacheck.leaf.spec import LeafKind

RATES = (1e-6, 2e-5)
EVERY = (1, 2, 4)  # steps between two saves
LIMIT = 0.11  # of torch.save, for a step that is logged at every step
MAX_REPLAY_STEPS = 16


@dataclass(slots=True)
class Turn:
    """One way's saves, one after the other."""

    reports: list[SaveReport] = field(default_factory=list)
    durable: dict[int, float] = field(
        default_factory=dict
    )  # by sequence number, in seconds, by our own clock
    digests: dict[int, dict[str, str]] = field(default_factory=dict)

    def logged(self) -> list[SaveReport]:
        return [report for report in self.reports if report.replayed_steps]

    def deltas(self) -> list[SaveReport]:
        """Saves of the state itself without keyframes."""
        return [
            r
            for r in self.reports
            if not r.replayed_steps and all(leaf.kind is not LeafKind.KEYFRAME for leaf in r.leaves)
        ]


def run(settings: Settings) -> Result:
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
            saves = (
                replays // every + 2
            )  # a save of the state itself, one cycle of logged ones, and the next of the state
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
            bad = _not_exact(folder / "log", log, training)
            wrong, checked = wrong + bad, checked + len(log.reports)
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
    return Result(
        "gradient_log",
        f"post-training {parameters / 1e6:.1f} M parameters (bf16 weights and gradients; fp32 master and moments), clipped; all files of a save; "
        f"cycle: mean over {replays} replayed steps and the save of the state itself after them; {checked} steps restored and compared",
        [
            Table(
                "stored, of torch.save of the same state",
                {"lr": "text", "every": "count", "torch.save": "bytes", "a logged step": "ratio", "a direct delta": "ratio", "cycle": "ratio"},
                sizes,
            ),
            Table(
                "what a save costs the training, and until it is durable; each was waited for",
                {"lr": "text", "every": "count", "way": "text", "blocking": "seconds", "durable": "seconds"},
                times,
            ),
            Table(
                "restoring, root opened and files in the page cache, every byte verified",
                {"lr": "text", "steps replayed": "count", "restore": "seconds", "direct delta, as many deltas": "seconds"},
                restores,
            ),
        ],
        figures,
    )  # fmt: skip


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
            state, began = training.state(), time.perf_counter()
            report = log.save(training.step, state).result()
            assert report is not None  # nothing is skipped
            turn.durable[report.seq] = time.perf_counter() - began
            turn.reports.append(report)
            turn.digests[training.step] = _digests(training.state())
    return turn


def _direct(training: Workload, every: int, saves: int, folder: Path) -> Turn:
    turn = Turn()
    with Engine(folder) as engine:
        for number in range(saves):
            for _ in range(every if number else 0):
                training.train_step()
            state, began = training.state(), time.perf_counter()
            handle = engine.save(training.step, state)
            engine.before_update()  # what the next optimizer step would wait for counts as blocking
            report = handle.result()
            assert report is not None
            turn.durable[report.seq] = time.perf_counter() - began
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


def _not_exact(root: Path, turn: Turn, training: Workload) -> int:
    """Steps whose restore differs from the live state of then in a single bit."""
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
        ours = _timed(folder / "log", by_replays[replays], training, settings)
        theirs = None
        if replays < len(direct.reports):
            theirs = _timed(folder / "direct", direct.reports[replays].step, training, settings)
        rows.append([rate, replays, ours, theirs])
    return rows


def _timed(root: Path, step: int, training: Workload, settings: Settings) -> float:
    def restore() -> None:
        with Engine(root) as engine:
            engine.restore(step, optimizer=training.optimizer)

    return median(states.timed(restore) for _ in range(2 if settings.quick else 5))
