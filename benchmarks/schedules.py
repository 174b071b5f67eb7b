"""Bytes of every save of whole runs under real learning-rate schedules, policy by policy.

A figure counts all files that appear between two saves: weights, codes, refreshed moments, new
lattices, keyframes, merged deltas, tables and manifests. Two runs of the same data are made: the
first is profiled, the second is saved under all policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from benchmarks import prepared, sentence_encoder
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.sentence_encoder import EncoderTraining
from benchmarks.ways import Chain, Run
from deltacheck import Policy, Profiler
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.profile import AdamRule, Profile

EXACT, MODEL_EXACT, PROFILED, BOUNDED = (
    "exact",
    "model_exact",
    "post_training",
    "post_training, weights bounded",
)
# With exact weights, and with bounded ones.
LARGEST_OVER_MEAN = 3.0
BOUNDED_SHARE = 0.5
_WARMUP_STEPS = 20

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
        start: Starts the training in a folder; called twice, with the same result.
        every: The number of steps between two saves.
        saves: The number of saves.
        limit: The promised mean of the saves after the stable start, exact weights, as a share of
            torch.save; ``None`` without a promise.
        whole_limit: The promised mean of 200 saves, the first included; ``None`` without one.
    """

    name: str
    start: Callable[[Path], Training]
    every: int
    saves: int
    limit: float | None = None
    whole_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """The saves of one course under one policy.

    Attributes:
        shares: The bytes that each save added, over torch.save of the same state.
        stable: For each save, True from the first stable save on.
    """

    shares: Sequence[float]
    stable: Sequence[bool]

    @property
    def after_start(self) -> list[float]:
        """The shares of the saves after the stable start; all but the first if there is none."""
        later = [share for share, stable in zip(self.shares, self.stable, strict=True) if stable]
        return later[1:] or list(self.shares[1:])

    def over(self, saves: int) -> float:
        """Return the mean of a run of ``saves`` saves if it goes on as after its stable start."""
        missing = max(0, saves - len(self.shares))
        return (sum(self.shares) + missing * mean(self.after_start)) / max(saves, len(self.shares))


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


class SteadyPolicyGradient:
    """A reinforcement learning run of ``prepared`` at a constant rate of 1e-6."""

    def __init__(self, size: prepared.Size) -> None:
        self._run = Run("torch", prepared.recipe_of("rl_like", size))
        prepared.settle(self._run, size)

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


def courses(settings: Settings) -> list[Course]:
    """Return the courses of a measurement."""
    if settings.quick:
        return [Course("RL, tiny", lambda folder: _tiny(), 1, 4)]
    saves = 60
    steps = 10 * saves
    small, medium = prepared.SIZES["small"], prepared.SIZES["medium"]
    twice = prepared.Size(
        medium.width,
        2 * medium.layers,
        medium.pretrain_steps,
        medium.pretrain_rate,
        medium.settle_steps,
        medium.every,
    )
    reinforcement = [
        Course(f"RL, {label}, lr 1e-6, K = 10", _reinforced(size), 10, number, 0.005, 0.0075)
        for label, size, number in (
            ("3 M", small, 200),
            ("101 M", medium, 30),
            ("202 M", twice, 12),
        )
    ]
    if not sentence_encoder.is_installed():
        return reinforcement
    tuning, falling = "SFT, 22.6 M, lr", cosine(2e-5, steps)
    return [
        *reinforcement,
        Course(f"{tuning} 2e-5 cosine to 0, K = 10", _encoder(falling), 10, saves, 0.01),
        Course(f"{tuning} 2e-5 cosine to 0, K = 1", _encoder(falling), 1, 200, 0.003),
        Course(
            "SFT, 3.3 M (46 MB), lr 2e-5 cosine to 0, K = 10",
            _encoder(falling, layers=1, vocabulary=4000),
            10,
            saves,
            0.015,
        ),
        Course(f"{tuning} 2e-5 linear to 0, K = 10", _encoder(linear(2e-5, steps)), 10, saves),
        Course(
            f"{tuning} 2e-5 WSD to 0, K = 10", _encoder(warmup_stable_decay(2e-5, steps)), 10, saves
        ),
    ]


def _tiny() -> Training:
    return SteadyPolicyGradient(prepared.SIZES["tiny"])


def _reinforced(size: prepared.Size) -> Callable[[Path], Training]:
    return lambda folder: SteadyPolicyGradient(size)


def _encoder(schedule: Schedule, **sizes: int) -> Callable[[Path], Training]:
    def start(folder: Path) -> Training:
        model = folder / "pretrained"
        if not model.exists():
            sentence_encoder.unpack(model)
        return EncoderTraining(model, schedule, **sizes)

    return start


def run(settings: Settings) -> Result:
    """Measure every course."""
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    chosen = [course for course in courses(settings) if (settings.only or "") in course.name]
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
                    len(saved.shares),
                    len(later),
                    saved.shares[0],
                    saved.over(len(saved.shares)),
                    saved.over(200),
                    mean(later),
                    max(later) / mean(later),
                ]
            )
        figures += promises(course, by_policy)
    about = (
        "bytes of all files that a save adds, over torch.save of the same state; whole run: the"
        " mean of all saves, first save and keyframes included; over 200: the same if the run went"
        " on to 200 saves as after its stable start; later: saves after the first stable one"
    )
    return Result("schedules", about, [Table("bytes of whole runs", COLUMNS, rows)], figures)


COLUMNS: dict[str, Unit] = {
    "run": "text",
    "policy": "text",
    "saves": "count",
    "later saves": "count",
    "first": "ratio",
    "whole run": "ratio",
    "over 200": "ratio",
    "later": "ratio",
    "largest / later": "number",
}


def promises(course: Course, by_policy: dict[str, Saved]) -> list[Figure]:
    """Return the promised figures of a course: those of the best policy with exact weights."""
    if course.limit is None:
        return []
    policy = min(
        (name for name in (MODEL_EXACT, PROFILED) if name in by_policy),
        key=lambda name: mean(by_policy[name].after_start),
    )
    best = by_policy[policy]
    later = best.after_start
    name = f"{course.name}, {policy}"
    figures = [
        Figure(f"{name}: later saves", mean(later), course.limit),
        Figure(
            f"{name}: largest over the mean", max(later) / mean(later), LARGEST_OVER_MEAN, "number"
        ),
    ]
    if course.whole_limit is not None:
        figures.append(Figure(f"{name}: over 200 saves", best.over(200), course.whole_limit))
    if BOUNDED in by_policy:
        bounded = mean(by_policy[BOUNDED].after_start)
        figures.append(
            Figure(f"{course.name}, {BOUNDED}: later saves", bounded, course.limit * BOUNDED_SHARE)
        )
    return figures


def measure(course: Course, folder: Path) -> dict[str, Saved]:
    """Profile a course, run it again, save it under each policy, and return the saves."""
    profile = _profiled(course, folder)
    policies = {
        EXACT: Policy.exact(),
        MODEL_EXACT: Policy.model_exact(),
        PROFILED: Policy.post_training(profile),
        BOUNDED: Policy.post_training(profile, weights="bounded"),
    }
    chains = {
        name: Chain("torch", folder / f"root-{number}", policy)
        for number, (name, policy) in enumerate(policies.items())
    }
    training = course.start(folder)
    peers: list[int] = []
    for _ in range(course.saves):
        loss = _train(training, course.every)
        # The rate that the last step has used is that of the state's moments; a scheduler has
        # already set the next one in the state, which a policy reads first.
        metrics = {"loss": loss, "learning_rate": training.rate}
        for chain in chains.values():
            chain.save(training.step, training.state(), metrics)
        if not peers:
            peers.append(peer_save(training.state(), folder / "peer.pt"))
    saved = {}
    for name, chain in chains.items():
        chain.close()
        started = [stage == "stable" for stage in chain.stages.values()]
        stable = [any(started[: position + 1]) for position in range(len(started))]
        saved[name] = Saved([count / peers[0] for count in chain.bytes.values()], stable)
    return saved


def _profiled(course: Course, folder: Path) -> Profile:
    """Return the profile of a run of a course, sampled at the steps that are saved."""
    training = course.start(folder)
    profiler = Profiler(
        interval_steps=course.every, optimizer=AdamRule(*sentence_encoder.BETAS, 1e-8)
    )
    for _ in range(course.saves):
        loss = _train(training, course.every)
        profiler.observe(training.step, training.state, loss=loss, learning_rate=training.rate)
    return profiler.profile()


def _train(training: Training, steps: int) -> float:
    """Train some steps, and return the mean loss."""
    return mean(training.train_step() for _ in range(steps))
