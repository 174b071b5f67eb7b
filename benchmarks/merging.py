"""Bytes of a whole run, with keyframes at the limits of chains and with merged deltas.

Every save counts, the first one too, and every byte that is written behind the training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table
from deltacheck import Keep, Policy, SaveReport
from deltacheck.backends.torch import Engine
from deltacheck.leaf.spec import LeafKind
from deltacheck.report.history import leaf_states
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import open_segments

RATE = 1e-6
EVERY = (1, 10)  # steps between two saves
KEYFRAMES, MERGES = "keyframes", "merges"
POLICIES = {
    "exact": lambda merges: Policy.exact(merge_deltas=merges),
    "auto, weights stored": lambda merges: Policy.auto(derive=False, merge_deltas=merges),
}
# Merges write fewer bytes than keyframes do, or the same if keyframes take less.
LIMIT = 1.02


@dataclass(slots=True)
class Run:
    """One run of saves, and what a restore of its last step takes."""

    engine: Engine
    reports: list[SaveReport] = field(default_factory=list)
    depth: int = 0
    restore_seconds: float = 0.0

    def save(self, step: int, state: dict[str, Any]) -> None:
        report = self.engine.save(step, state).result()
        assert report is not None  # nothing is skipped: every save is waited for
        # A real run has time between two saves.
        compactor = self.engine._saver.chains.compactor
        if compactor is not None:
            compactor.wait()
        self.reports.append(report)

    @property
    def raw(self) -> int:
        """Bytes in memory."""
        return self.reports[0].raw_bytes

    @property
    def merged(self) -> int:
        return sum(report.merged_bytes for report in self.reports)

    def mean(self, first: int = 0) -> float:
        """Return the bytes for each save from number ``first`` on, merges included."""
        return fmean(report.stored_bytes + report.merged_bytes for report in self.reports[first:])

    def keyframe_saves(self) -> int:
        """Return the number of saves, without the first, that wrote a leaf whole."""
        return sum(
            any(leaf.kind is LeafKind.KEYFRAME for leaf in report.leaves)
            for report in self.reports[1:]
        )

    def measure(self) -> None:
        """Measure the newest step: the time of a restore, and the longest chain."""
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            self.engine.restore()
            seconds.append(time.perf_counter() - begin)
        self.restore_seconds = median(seconds)
        root = open_root(self.engine.root)
        manifest = root.manifest()
        leaves = leaf_states(manifest, open_segments(root, manifest)).values()
        self.depth = max(leaf.depth for leaf in leaves)


def run(settings: Settings) -> Result:
    """Save the same runs under each policy, with and without merges."""
    recipe = states.QUICK if settings.quick else states.REAL
    saves = 6 if settings.quick else 200
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    for every in EVERY:
        runs = _saved(recipe, every, saves, settings.folder / str(every), settings.quick)
        for policy in POLICIES:
            whole, merged = runs[policy, KEYFRAMES], runs[policy, MERGES]
            for name, made in ((KEYFRAMES, whole), (MERGES, merged)):
                rows.append(
                    [
                        every,
                        policy,
                        name,
                        made.mean() / made.raw,
                        made.mean(saves // 2) / made.raw,
                        made.merged / saves / made.raw,
                        median(report.stored_bytes for report in made.reports) / made.raw,
                        made.keyframe_saves(),
                        made.depth,
                        made.restore_seconds / whole.restore_seconds,
                    ]
                )
            figures.append(
                Figure(
                    f"{policy}, every {every}: bytes of the run with merges, of those with"
                    " keyframes",
                    merged.mean() / whole.mean(),
                    LIMIT,
                )
            )
    return Result(
        "merging",
        f"bytes written by {saves} saves of post-training at lr {RATE:g}, of the state in memory:"
        " mean of all saves, first save and merges included; of the second half; merges alone; the"
        " median save; restore: time, of that with keyframes",
        [
            Table(
                "whole runs",
                {
                    "every": "count",
                    "policy": "text",
                    "chains": "text",
                    "mean": "ratio",
                    "second half": "ratio",
                    "merges": "ratio",
                    "median save": "ratio",
                    "saves with keyframes": "count",
                    "longest chain": "count",
                    "restore": "ratio",
                },
                rows,
            )
        ],
        figures,
    )


def _saved(
    recipe: Any, every: int, saves: int, folder: Path, quick: bool
) -> dict[tuple[str, str], Run]:
    settle_steps = 2 if quick else states.SETTLE_STEPS
    training = states.post_trained(recipe, RATE, settle_steps)
    runs = {
        (policy, chains): Run(
            Engine(folder / f"{number}-{chains}", policy=make(chains == MERGES), keep=Keep(last=2))
        )
        for number, (policy, make) in enumerate(POLICIES.items())
        for chains in (KEYFRAMES, MERGES)
    }
    try:
        for number in range(saves):
            for _ in range(every if number else 0):
                training.train_step()
            state = training.state()
            for made in runs.values():
                made.save(training.step, state)
        for made in runs.values():
            made.measure()
    finally:
        for made in runs.values():
            made.engine.close()
    return runs
