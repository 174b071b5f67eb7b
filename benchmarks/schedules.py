"""Bytes of every save of whole runs under real learning-rate schedules, policy by policy.

A figure counts all files that appear between two saves: weights, codes, refreshed moments, new
lattices, keyframes, merged deltas, tables and manifests. The profile is that of a shorter run of
the same data, or of the steps before the first save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import torch

from benchmarks import prepared, sentence_encoder
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.sentence_encoder import EncoderTraining
from benchmarks.stream_bytes import leaf_bytes
from benchmarks.ways import CLASSES, OTHER, Chain, Run, class_of
from deltacheck import Policy, Profiler
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.policy.causes import CAUSES, MERGED, REST
from deltacheck.profile import AdamRule, Profile
from deltacheck.report import history
from deltacheck.report.cause_sizes import CauseCounter
from deltacheck.store.roots.opening import open_root
from deltacheck.store.segment import Segment

EXACT, STORED, PROFILED, BOUNDED = (
    "exact",
    "auto, weights stored",
    "auto, profile",
    "auto, profile, weights bounded",
)
# With exact weights, and with bounded ones.
LARGEST_OVER_MEAN = 3.0
BOUNDED_SHARE = 0.5
LEAST_PART = 0.02  # of the later saves; smaller parts are not shown
_WARMUP_STEPS = 20
_LEAST_SAVES = 6  # however long they take: the stable start, and some saves after it
_PROFILED_PART = 0.25  # of a run, by a run of its own before
# At this rate a tenth of the bfloat16 weights of the reinforcement learning change in ten steps, as
# in published runs. At 1e-6 it is a twenty-fifth.
DENSE_RATE = 3e-6

Schedule = Callable[[int], float]


class Training(Protocol):
    """A training run that a course saves."""

    @property
    def step(self) -> int:
        """The number of steps so far."""
        ...

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        ...

    def train_step(self) -> float:
        """Train one step, and return its loss."""
        ...

    def state(self) -> dict[str, Any]:
        """Return everything that decides how the run continues."""
        ...


@dataclass(frozen=True, slots=True)
class Course:
    """One run, and the saves of it.

    Attributes:
        name: The heading of its rows.
        start: Starts the training in a folder, each time with the same result.
        every: The number of steps between two saves.
        saves: The number of saves.
        limit: The promised mean of the saves after the stable start, exact weights, as a share of
            torch.save; ``None`` without a promise.
        wholes: The promised mean of a run, the first save included, by its number of saves.
        settle: The number of steps before the first save.
        policies: The policies that are compared.
        most_seconds: No save begins later than this after the start of the first, from the seventh
            on.
        betas: The constants of Adam.
    """

    name: str
    start: Callable[[Path], Training]
    every: int
    saves: int
    limit: float | None = None
    wholes: Mapping[int, float] = field(default_factory=dict)
    settle: int = 0
    policies: tuple[str, ...] = (EXACT, STORED, PROFILED, BOUNDED)
    most_seconds: float = math.inf
    betas: tuple[float, float] = sentence_encoder.BETAS


@dataclass(frozen=True, slots=True)
class Saved:
    """The saves of one course under one policy.

    Attributes:
        shares: The bytes that each save added, over torch.save of the same state.
        stable: For each save, True from the first stable save on.
        causes: For each save, the same shares by (cause of ``policy.causes``, class of leaves).
        density: The mean share of the bfloat16 weights of torch that change between two saves,
            ``None`` without such weights.
    """

    shares: Sequence[float]
    stable: Sequence[bool]
    causes: Sequence[Mapping[tuple[str, str], float]] = ()
    density: float | None = None

    @property
    def after_start(self) -> list[float]:
        """The shares of the saves after the stable start; all but the first if there is none."""
        later = [share for share, stable in zip(self.shares, self.stable, strict=True) if stable]
        return later[1:] or list(self.shares[1:])

    def later_causes(self) -> dict[tuple[str, str], float]:
        """Return the mean share of each cause and class in the saves after the stable start."""
        later = self.causes[-len(self.after_start) :]
        keys = dict.fromkeys(key for causes in later for key in causes)
        shares = {key: mean(causes.get(key, 0.0) for causes in later) for key in keys}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def over(self, saves: int) -> float:
        """Return the mean of the first ``saves`` saves.

        If there were fewer, the run is supposed to go on as after its stable start.
        """
        missing = max(0, saves - len(self.shares))
        return (sum(self.shares[:saves]) + missing * mean(self.after_start)) / saves


def constant(rate: float) -> Schedule:
    """Return a schedule that stays at ``rate``."""
    return lambda step: rate


def cosine(rate: float, steps: int) -> Schedule:
    """Return a linear warm-up, and half a cosine from ``rate`` to 0 at step ``steps``."""
    return lambda step: _warmup(step) * rate * (1 + math.cos(math.pi * min(1, step / steps))) / 2


def linear(rate: float, steps: int) -> Schedule:
    """Return a linear warm-up, and a line from ``rate`` to 0 at step ``steps``."""
    return lambda step: _warmup(step) * rate * max(0.0, 1 - step / steps)


def warmup_stable_decay(rate: float, steps: int) -> Schedule:
    """Return a linear warm-up, ``rate``, and a line to 0 over the last fifth of the steps."""
    return lambda step: _warmup(step) * rate * min(1.0, max(0.0, 5 * (1 - step / steps)))


def _warmup(step: int) -> float:
    return min(1.0, (step + 1) / _WARMUP_STEPS)


class RunTraining:
    """A run of ``ways`` at its constant rate.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return int(self._run.workload.step)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self._run.recipe.rate

    def train_step(self) -> float:
        """Train one step, and return its loss."""
        return self._run.train(1)

    def state(self) -> dict[str, Any]:
        """Return everything that decides how the run continues."""
        state: dict[str, Any] = self._run.workload.state()
        return state

    def torch_save(self, file: Path) -> int:
        """Save the state with ``torch.save``; return its bytes."""
        return self._run.torch_save(file)


class SteadyPolicyGradient(RunTraining):
    """A reinforcement learning run of ``prepared`` at a constant rate.

    Args:
        size: The size of the model.
        rate: The learning rate.

    Attributes:
        profile: The profile of the steps so far.
    """

    def __init__(self, size: prepared.Size, rate: float = 1e-6) -> None:
        super().__init__(Run("torch", replace(prepared.recipe_of("rl_like", size), rate=rate)))
        self.profile, _ = prepared.settle(self._run, size)


def courses(settings: Settings) -> list[Course]:
    """Return the courses of a measurement."""
    if settings.quick:
        return [Course("RL, tiny", lambda folder: _tiny(), 1, 4)]
    saves = 60
    steps = 10 * saves
    small, medium = prepared.SIZES["small"], prepared.SIZES["medium"]
    twice = replace(medium, layers=2 * medium.layers, pretrain_steps=8)
    # Each live state of the large models takes gigabytes, and so does the copy of each policy.
    every_policy = (EXACT, STORED, PROFILED, BOUNDED)
    reinforcement = [
        Course(
            f"RL, {label}, lr 1e-6, K = 10",
            _reinforced(size),
            10,
            number,
            0.006,
            {20: 0.04, 200: 0.01},
            policies=policies,
        )
        for label, size, number, policies in (
            ("3 M", small, 200, every_policy),
            ("101 M", medium, 8, (PROFILED,)),
            ("202 M", twice, 8, (PROFILED,)),
        )
    ]
    reinforcement.append(
        Course(
            f"RL at {DENSE_RATE:g}, 3 M: a tenth of the weights, K = 10",
            lambda folder: SteadyPolicyGradient(small, DENSE_RATE),
            10,
            20,
            policies=every_policy,
        )
    )
    if not sentence_encoder.is_installed():
        return reinforcement
    tuning, falling = "SFT, 22.6 M, lr", cosine(2e-5, 220)
    inexact = (STORED, PROFILED, BOUNDED)
    return [
        *reinforcement,
        Course(
            f"{tuning} 2e-5 cosine to 0, K = 10",
            encoder(falling),
            10,
            22,
            0.01,
            {22: 0.035},
            policies=inexact,
        ),
        Course(
            f"{tuning} 2e-5 cosine to 0, K = 1, in mid-run",
            encoder(falling),
            1,
            60,
            0.003,
            settle=100,
            policies=inexact,
        ),
        Course(
            "SFT, 3.3 M (46 MB), lr 2e-5 cosine to 0, K = 10",
            encoder(cosine(2e-5, steps), **SMALL_ENCODER),
            10,
            saves,
            0.015,
            {saves: 0.025},
        ),
        Course(
            f"{tuning} 2e-5 linear to 0, K = 10",
            encoder(linear(2e-5, 220)),
            10,
            22,
            policies=inexact,
        ),
        Course(
            f"{tuning} 2e-5 WSD to 0, K = 10",
            encoder(warmup_stable_decay(2e-5, 220)),
            10,
            22,
            policies=inexact,
        ),
        *(
            Course(
                f"SFT, 3.3 M (46 MB), lr 5e-5 WSD to 0, betas {betas}, K = 10",
                encoder(warmup_stable_decay(5e-5, 300), betas=betas, **SMALL_ENCODER),
                10,
                30,
                wholes={30: 0.05},
                betas=betas,
            )
            for betas in ((0.9, 0.95), (0.9, 0.98))
        ),
    ]


def left_out(settings: Settings) -> str:
    """Return a sentence for the description of a result: the runs that cannot be measured."""
    if settings.quick or sentence_encoder.is_installed():
        return ""
    return f". Without {sentence_encoder.PACKAGE}, which is not installed, there are no SFT runs"


SMALL_ENCODER = {"layers": 1, "vocabulary": 4000}


def _tiny() -> Training:
    return SteadyPolicyGradient(prepared.SIZES["tiny"])


def _reinforced(size: prepared.Size) -> Callable[[Path], Training]:
    return lambda folder: SteadyPolicyGradient(size)


def encoder(schedule: Schedule, **options: Any) -> Callable[[Path], Training]:
    """Return a start of the fine-tuning of the encoder, see ``EncoderTraining``."""

    def start(folder: Path) -> Training:
        model = folder / "pretrained"
        if not model.exists():
            sentence_encoder.unpack(model)
        return EncoderTraining(model, schedule, **options)

    return start


def run(settings: Settings) -> Result:
    """Measure every course."""
    rows: list[list[Cell]] = []
    parts: list[list[Cell]] = []
    figures: list[Figure] = []
    chosen = [
        replace(
            course,
            saves=settings.saves or course.saves,
            most_seconds=settings.most_seconds or course.most_seconds,
        )
        for course in courses(settings)
        if (settings.only or "") in course.name
    ]
    for number, course in enumerate(chosen):
        folder = settings.folder / str(number)
        folder.mkdir()
        by_policy = measure(course, folder)
        for policy, saved in by_policy.items():
            later = saved.after_start
            rows.append(
                [
                    course.name,
                    policy,
                    saved.density,
                    len(saved.shares),
                    len(later),
                    saved.shares[0],
                    saved.over(len(saved.shares)),
                    saved.over(200),
                    mean(later),
                    max(later) / mean(later),
                ]
            )
            parts += [
                [course.name, policy, cause, leaves, share, share / mean(later)]
                for (cause, leaves), share in saved.later_causes().items()
                if share >= LEAST_PART * mean(later)
            ]
        figures += promises(course, by_policy)
    about = (
        "changed: the mean share of the bfloat16 weights that change between two saves; bytes of"
        " all files that a save adds, over torch.save of the same state; whole run: the"
        " mean of all saves, first save and keyframes included; over 200: the same if the run went"
        " on to 200 saves as after its stable start; later: saves after the first stable one"
        + left_out(settings)
    )
    tables = [
        Table("bytes of whole runs", COLUMNS, rows),
        Table("later saves, by the cause of their bytes", PARTS, parts),
    ]
    return Result("schedules", about, tables, figures)


COLUMNS: dict[str, Unit] = {
    "run": "text",
    "policy": "text",
    "changed": "ratio",
    "saves": "count",
    "later saves": "count",
    "first": "ratio",
    "whole run": "ratio",
    "over 200": "ratio",
    "later": "ratio",
    "largest / later": "number",
}
PARTS: dict[str, Unit] = {
    "run": "text",
    "policy": "text",
    "cause": "text",
    "leaves": "text",
    "later": "ratio",
    "of later": "ratio",
}


def promises(course: Course, by_policy: dict[str, Saved]) -> list[Figure]:
    """Return the promised figures of a course: those of the best policy with exact weights."""
    policy = min(
        (name for name in (STORED, PROFILED) if name in by_policy),
        key=lambda name: mean(by_policy[name].after_start),
    )
    best = by_policy[policy]
    later = best.after_start
    name = f"{course.name}, {policy}"
    figures = [
        Figure(f"{name}: mean of {saves} saves", best.over(saves), limit)
        for saves, limit in course.wholes.items()
    ]
    if course.limit is None:
        return figures
    figures += [
        Figure(f"{name}: later saves", mean(later), course.limit),
        Figure(
            f"{name}: largest over the mean", max(later) / mean(later), LARGEST_OVER_MEAN, "number"
        ),
    ]
    if BOUNDED in by_policy:
        bounded = mean(by_policy[BOUNDED].after_start)
        figures.append(
            Figure(f"{course.name}, {BOUNDED}: later saves", bounded, course.limit * BOUNDED_SHARE)
        )
    return figures


def measure(course: Course, folder: Path) -> dict[str, Saved]:
    """Run a course, save it under each of its policies, and return the saves."""
    training = course.start(folder)
    profile: Profile | None = getattr(training, "profile", None)
    if profile is None:
        profile = profiled(training, course)
        training = course.start(folder)
    policies = {
        EXACT: Policy.exact(),
        STORED: Policy.auto(derive=False),
        PROFILED: Policy.auto(profile),
        BOUNDED: Policy.auto(profile, weights="bounded"),
    }
    return saved_under(training, course, {name: policies[name] for name in course.policies}, folder)


def saved_under(
    training: Training,
    course: Course,
    policies: Mapping[str, Policy],
    folder: Path,
    *,
    framework: str = "torch",
    peer: Callable[[Path], int] | None = None,
) -> dict[str, Saved]:
    """Save a training under several policies, and return the saves by their names.

    Args:
        training: The training.
        course: The number of its saves, and their distance.
        policies: The policies by name.
        folder: For the roots.
        framework: ``torch`` or ``jax``.
        peer: Saves the state with ``torch.save`` and returns its bytes, if it has no tensors of
            torch.
    """
    chains = {
        name: Chain(framework, folder / f"root-{number}", policy)
        for number, (name, policy) in enumerate(policies.items())
    }
    peers: list[int] = []
    densities: list[float] = []
    _train(training, course.settle)
    end = time.monotonic() + course.most_seconds
    for number in range(course.saves):
        if number >= _LEAST_SAVES and time.monotonic() > end:
            break
        before = _narrow_weights(training.state())
        loss = _train(training, course.every)
        if before and number:
            densities.append(_changed(before, _narrow_weights(training.state())))
        # The rate that the last step has used is that of the state's moments; a scheduler has
        # already set the next one in the state, which a policy reads first.
        metrics = {"loss": loss, "learning_rate": training.rate}
        for chain in chains.values():
            chain.save(training.step, training.state(), metrics)
        if not peers:
            file = folder / "peer.pt"
            peers.append(peer_save(training.state(), file) if peer is None else peer(file))
    saved = {}
    for name, chain in chains.items():
        chain.close()
        started = [stage == "stable" for stage in chain.stages.values()]
        stable = [any(started[: position + 1]) for position in range(len(started))]
        shares = [count / peers[0] for count in chain.bytes.values()]
        density = mean(densities) if densities else None
        saved[name] = Saved(shares, stable, _causes(chain.root, peers[0]), density)
    return saved


def _narrow_weights(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return copies of the bfloat16 weights of torch in a state."""
    model = state.get("model")
    values = model.values() if isinstance(model, Mapping) else ()
    return [
        value.detach().clone()
        for value in values
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    ]


def _changed(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """Return the share of the elements whose bits differ."""
    words = [[tensor.view(torch.int16) for tensor in tensors] for tensors in (before, after)]
    changed = sum(int((old != new).sum()) for old, new in zip(*words, strict=True))
    return changed / sum(tensor.numel() for tensor in before)


def _causes(root: Path, peer: int) -> list[dict[tuple[str, str], float]]:
    """Return the bytes of each save by cause and class of leaves, as shares of ``peer``."""
    opened = open_root(root)
    cost = cache(lambda segment: leaf_bytes(opened_segments[segment]))
    opened_segments: dict[str, Segment] = {}

    def cost_of_class(segment: Segment, name: str) -> _Part:
        opened_segments[segment.id] = segment
        sizes = cost(segment.id)
        return _Part({path: size for path, size in sizes.items() if class_of(path) == name})

    counters = {name: CauseCounter(partial(cost_of_class, name=name)) for name in (*CLASSES, OTHER)}
    saves: list[dict[tuple[str, str], float]] = []
    for step in history.steps(opened, history.committed(opened, [])):
        by_class = {name: counter.count(step) for name, counter in counters.items()}
        parts = {
            (cause, name): size / peer
            for name, sizes in by_class.items()
            for cause, size in sizes.items()
            if cause in CAUSES and size
        }
        merged = by_class[OTHER][MERGED] / peer
        whole = (step.manifest.stored_bytes + step.manifest_bytes) / peer
        saves.append(parts | {(MERGED, ""): merged, (REST, ""): whole - sum(parts.values())})
    return saves


@dataclass(frozen=True, slots=True)
class _Part:
    by_leaf: Mapping[str, float]


def profiled(training: Training, course: Course) -> Profile:
    """Train the first part of a course, and return its profile, sampled as it will be saved."""
    profiler = Profiler(interval_steps=course.every, optimizer=AdamRule(*course.betas, 1e-8))
    _train(training, course.settle)
    for _ in range(math.ceil(course.saves * _PROFILED_PART)):
        loss = _train(training, course.every)
        profiler.observe(training.step, training.state, loss=loss, learning_rate=training.rate)
    return profiler.profile()


def _train(training: Training, steps: int) -> float:
    """Train some steps, and return the mean loss, 0 without a step."""
    return sum(training.train_step() for _ in range(steps)) / max(1, steps)
