"""Bytes on disk of lossless saves of a fine-tuning run, beside torch.save and zstd.

Each class of leaves is also saved into a root of its own, so its bytes are those of real files,
including manifest and tables, not a share of something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numcodecs import Blosc, Zstd  # type: ignore[import-untyped]

from benchmarks import optimizers, states
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.states import State
from benchmarks.workloads.leaf_classes import CLASSES
from benchmarks.workloads.torch_workloads import Workload
from deltacheck import Policy, SaveReport
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.leaf.spec import LeafKind
from deltacheck.policy.keyframes import deltas_between
from deltacheck.store.files.arrays import bytes_on_disk

RATES = (1e-6, 2e-5)
EVERY = (1, 10)  # steps between two saves
WHOLE = "whole AdamW state"
WEIGHTS = "bf16 weights"
# The other leaves are a few numbers, less than 1 % of the bytes.
_CLASSES = tuple(name for name in CLASSES if name != "other")

LIMITED_RATE = 1e-6
WEIGHTS_LIMIT, WHOLE_LIMIT = 0.03, 0.65  # of raw, at that rate


@dataclass(slots=True)
class Root:
    """The saves of one class, or of the whole state, in one directory."""

    engine: Engine
    reports: list[SaveReport] = field(default_factory=list)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save a step, and wait for it."""
        report = self.engine.save(step, state).result()
        assert report is not None  # nothing is skipped: every save is waited for
        self.reports.append(report)

    @property
    def raw(self) -> int:
        """Bytes in memory."""
        return self.reports[0].raw_bytes

    def steady(self) -> float:
        """Return the mean bytes of the saves without keyframes."""
        return mean(
            r.stored_bytes
            for r in self.reports
            if all(leaf.kind is not LeafKind.KEYFRAME for leaf in r.leaves)
        )

    def mean(self) -> float:
        """Return the bytes of all files of the root, over its saves.

        The root is young, so keyframes weigh more than in the long run.
        """
        return bytes_on_disk(self.engine.root) / len(self.reports)

    def long_run(self) -> float:
        """Return the mean bytes of a save in an endless run.

        The first save has all keyframes. Each leaf gets another one at the limit of its chain.
        """
        policy = Policy.exact()
        encoded: dict[str, list[int]] = {}  # bytes of the deltas of each leaf
        for leaf in (
            leaf for report in self.reports for leaf in report.leaves if leaf.kind is LeafKind.DELTA
        ):
            encoded.setdefault(leaf.path, []).append(leaf.encoded_bytes)
        deltas = {
            leaf: deltas_between(
                policy, leaf.path, leaf.raw_bytes, round(mean(encoded.get(leaf.path, [0])))
            )
            for leaf in self.reports[0].leaves
        }
        share = sum(leaf.raw_bytes / (deltas[leaf] + 1) for leaf in deltas) / self.raw
        return (1 - share) * self.steady() + share * self.reports[0].stored_bytes

    def changed(self) -> float:
        """Return the share of changed words in all deltas; an unchanged leaf counts as a delta."""
        leaves = [
            leaf for r in self.reports for leaf in r.leaves if leaf.kind is not LeafKind.KEYFRAME
        ]
        return sum(leaf.changed for leaf in leaves) / sum(leaf.words for leaf in leaves)


def run(settings: Settings) -> Result:
    """Measure the saves of real and synthetic states, or those of optimizers."""
    if settings.optimizers:
        return optimizers.run(settings)
    recipe = states.QUICK if settings.quick else states.REAL
    saves = {1: 3, 10: 2} if settings.quick else {1: 34, 10: 12}
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    context: list[list[Cell]] = []
    parameters = 0
    for rate in RATES[:1] if settings.quick else RATES:
        training = states.post_trained(
            recipe, rate, settle_steps=2 if settings.quick else states.SETTLE_STEPS
        )
        parameters = sum(p.numel() for p in training.model.parameters())
        for every in EVERY:
            roots = _train_and_save(
                training, every, saves[every], settings.folder / f"{rate}-{every}"
            )
            rows += [
                [f"{rate:g}", every, saves[every], *_cells(name, root)]
                for name, root in roots.items()
            ]
            if rate == LIMITED_RATE:
                figures += _figures(roots, every)
        if rate == LIMITED_RATE:
            context = _context(training.state(), settings.folder)
    roots = _train_and_save(
        states.Synthetic(4 << 20 if settings.quick else 48 << 20),
        1,
        4,
        settings.folder / "synthetic",
    )
    columns: dict[str, Unit] = {
        "leaves": "text",
        "in memory": "bytes",
        "words changed": "ratio",
        "a delta save": "bytes",
        "steady": "ratio",
        "first save": "ratio",
        "mean of these": "ratio",
        "long run": "ratio",
    }
    return Result(
        "size",
        f"bytes of all files of lossless saves while post-training {parameters / 1e6:.1f} M"
        " parameters, of raw bytes; steady: mean of the saves without keyframes; mean of these:"
        " all files of the root; long run: keyframes at the pace of Policy.exact()",
        [
            Table(
                "deltacheck", {"lr": "text", "every": "count", "saves": "count", **columns}, rows
            ),
            Table(
                f"the same state at lr {LIMITED_RATE:g} without deltas",
                {
                    "leaves": "text",
                    "in memory": "bytes",
                    "torch.save": "ratio",
                    "zstd-3": "ratio",
                    "byte planes, zstd-3": "ratio",
                },
                context,
            ),
            Table(
                "synthetic states, saved every step",
                columns,
                [_cells(name, root) for name, root in roots.items()],
            ),
        ],
        figures,
    )


def _cells(name: str, root: Root) -> list[Cell]:
    sizes = (root.steady(), root.reports[0].stored_bytes, root.mean(), root.long_run())
    return [name, root.raw, root.changed(), root.steady(), *(size / root.raw for size in sizes)]


def _figures(roots: Mapping[str, Root], every: int) -> list[Figure]:
    weights, whole = roots[WEIGHTS], roots[WHOLE]
    case = f"lr {LIMITED_RATE:g}, every {every}"
    return [
        Figure(
            f"bf16 weights alone, {case}, steady", weights.steady() / weights.raw, WEIGHTS_LIMIT
        ),
        Figure(f"{WHOLE}, {case}, steady", whole.steady() / whole.raw, WHOLE_LIMIT),
        Figure(f"{WHOLE}, {case}, long run", whole.long_run() / whole.raw, WHOLE_LIMIT),
    ]


def _train_and_save(
    training: Workload | states.Synthetic, every: int, saves: int, folder: Path
) -> dict[str, Root]:
    """Save every ``every`` steps: the whole state, and each class alone."""
    roots = {
        name: Root(Engine(folder / str(number))) for number, name in enumerate((*_CLASSES, WHOLE))
    }
    try:
        for number in range(saves):
            for _ in range(every if number else 0):
                training.train_step()
            state = training.state()
            classes = states.by_class(state)
            for name, root in roots.items():
                root.save(training.step, state if name == WHOLE else classes[name])
    finally:
        for root in roots.values():
            root.engine.close()
    return roots


def _context(state: State, folder: Path) -> list[list[Cell]]:
    """Compress each class without deltas: torch.save and general compressors."""
    rows: list[list[Cell]] = []
    for name, leaves in {
        **{name: states.by_class(state)[name] for name in _CLASSES},
        WHOLE: state,
    }.items():
        raw = states.raw_bytes(leaves)
        arrays = [_words(tensor) for tensor in states.leaves_of(leaves).values()]
        plain = sum(len(Zstd(level=3).encode(array)) for array in arrays)
        planes = sum(
            len(Blosc("zstd", clevel=3, shuffle=Blosc.SHUFFLE).encode(array)) for array in arrays
        )
        rows.append(
            [name, raw, peer_save(leaves, folder / "context.pt") / raw, plain / raw, planes / raw]
        )
    return rows


def _words(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as words of its element size, which numcodecs needs for byte planes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"u{tensor.element_size()}")
