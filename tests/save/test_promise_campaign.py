"""Whole runs from the first save on, with everything that happens to runs: no promise is broken.

A run combines parameter groups, a schedule and incidents at random. The independent checker of
``tests/support/promises.py`` compares every element of each step with the live state.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from tests.save.test_rates import COURSES
from tests.support.grouped_run import NAMED, NUMBERED, PARAM_NAMES, GroupedRun, Tensor
from tests.support.promises import broken

# DELTACHECK_PROMISE_RUNS=28 makes about 4,000 lossy saves.
RUNS = int(os.environ.get("DELTACHECK_PROMISE_RUNS", "1"))
SAVES = 24

# Of the learning rate, by the part of the run that is over. Each begins with a warm-up.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda part: 1.0,
    "cosine": lambda part: 0.5 * (1 + np.cos(np.pi * part)),
    "linear": lambda part: 1 - part,
    "warm-up, stable, decay": lambda part: min(1.0, 5 * (1 - part)),
    "restarts": lambda part: 0.5 * (1 + np.cos(np.pi * (3 * part % 1))),
    "sawtooth": lambda part: 1 - 0.9 * (6 * part % 1),
}
WARMUP = 0.1  # of a run


def accumulation(run: GroupedRun, random: Any) -> None:
    """Save between two micro-batches."""
    run.skip(int(random.integers(1, 4)))


def scaler_skip(run: GroupedRun, random: Any) -> None:
    """Skip an update, and go on."""
    run.skip(1)
    run.advance(1)


def freeze(run: GroupedRun, random: Any) -> None:
    """Freeze the first parameters, or train them again."""
    tensors = tensors_of(run)
    for tensor in tensors[: max(1, len(tensors) // 2)]:
        tensor.frozen = not tensor.frozen


def new_optimizer(run: GroupedRun, random: Any) -> None:
    """Give one network a new optimizer."""
    network = run.networks[int(random.integers(len(run.networks)))]
    for tensor in network.tensors:
        tensor.renew()
    run.advance(1)


def spike(run: GroupedRun, random: Any) -> None:
    """Do a step with large gradients."""
    run.advance(1, 1e3)
    for tensor in tensors_of(run):
        tensor.scale /= 1e3


INCIDENTS = (accumulation, scaler_skip, freeze, new_optimizer, spike)


def tensors_of(run: GroupedRun) -> list[Tensor]:
    return [tensor for network in run.networks for tensor in network.tensors]


def policy_of(random: Any) -> Policy:
    """Return the policy, or one of its variants."""
    moments = ("reused", "reused", "bounded")[random.integers(3)]
    weights = ("exact", "exact", "bounded")[random.integers(3)]
    return Policy.auto(derive=False, moments=moments, float32_weights=weights, max_chain_depth=8)


@pytest.mark.parametrize("course", COURSES)
def test_no_promise_is_broken_from_the_first_save_on(course: str) -> None:
    count: Counter[str] = Counter()
    for seed in range(RUNS):
        random = np.random.default_rng([seed, *course.encode()])
        schedule = sorted(SCHEDULES)[(seed + len(course)) % len(SCHEDULES)]
        states = (NUMBERED, NAMED, PARAM_NAMES)[random.integers(3)]
        gradients = ("noise", "outer", "alike", "steady")[random.integers(4)]
        run = GroupedRun(COURSES[course](random), states, gradients, seed)
        count += saved(run, SCHEDULES[schedule], random)
        count[f"runs with {schedule}"] += 1
    print(f"{course}: {dict(count)}")
    assert count["broken"] == 0, count
    assert count["lossy"] >= RUNS * SAVES / 2


def saved(run: GroupedRun, schedule: Callable[[float], float], random: Any) -> Counter[str]:
    """Save a run; count its lossy saves, reused moments, incidents, and broken promises."""
    count: Counter[str] = Counter()
    every, peak, states = int(random.integers(1, 11)), dict[str, float](), dict[int, Any]()
    incidents = {int(random.integers(2, SAVES)): random.choice(INCIDENTS) for _ in range(4)}
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=policy_of(random)) as engine:
        for save in range(SAVES):
            part = save / (SAVES - 1)
            run.share = schedule(part) * min(1.0, (save + 1) / (WARMUP * SAVES))
            run.advance(every)
            if save in incidents:
                incidents[save](run, random)
                count[incidents[save].__name__] += 1
            state = states[run.step] = run.state()
            peak = {path: max(rate, peak.get(path, 0.0)) for path, rate in run.rates().items()}
            engine.save(run.step, state).result()
            opened = deltacheck.open(root)
            manifest = opened.manifest(run.step)
            found = broken(
                state,
                opened.restore(run.step),
                manifest,
                states.__getitem__,
                run.rates(),
                run.weight_of,
                peak,
            )
            count["broken"] += len(found)
            count["lossy"] += bool(manifest.contracts)
            count["reused"] += any(
                p.from_step not in (None, run.step) for p in manifest.contracts.values()
            )
            count.update(found)
    return count
