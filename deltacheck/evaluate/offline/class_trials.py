"""The sensitivity analysis of a recorded run: the harm of each class of leaves that is inexact.

A candidate has the leaves of one class as ``Policy.auto`` restores them, with the codes of
the real saver, and all others exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltacheck.backends.profiler import backend_of
from deltacheck.errors import StepNotFound
from deltacheck.evaluate.offline.policy_replay import PolicyReplay, replay
from deltacheck.evaluate.offline.recorded import Recorded
from deltacheck.evaluate.offline.trials import Trials
from deltacheck.evaluate.workload import saving_module
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import Policy, roles
from deltacheck.profile.record import ClassSensitivity
from deltacheck.profile.sample import embedding_paths
from deltacheck.profile.sensitivity import rolled_back
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root

_EXACT, _LOSSY = "exact", "auto"


def class_sensitivity(
    checkpoints: Iterable[Recorded], trials: Trials, like: Any, folder: Path
) -> tuple[ClassSensitivity, ...]:
    """Measure the harm of each class of leaves that ``Policy.auto`` restores inexactly.

    Args:
        checkpoints: The recorded checkpoints, in the types that the run's ``load`` takes.
        trials: The trial of a state.
        like: A state of the run, for its types.
        folder: An empty folder for scratch roots.

    Raises:
        StepNotFound: Every checkpoint is exact under the policy.
        NoWorkload: As ``Trials.measure`` raises it.
    """
    policies = {_EXACT: Policy.exact(), _LOSSY: Policy.auto(derive=False)}
    exact, lossy = replay(checkpoints, policies, folder)
    step = hardest_step(lossy)
    backend = saving_module(backend_of(like))
    state, restored = (backend.load(result.root, step, like) for result in (exact, lossy))
    classes = classes_of(open_root(lossy.root).manifest(step))
    candidates = {
        name: rolled_back(state, copy.deepcopy(restored), paths.__contains__)
        for name, paths in classes.items()
    }
    verdicts = trials.measure(state, candidates)
    return tuple(
        ClassSensitivity(
            leaves=tuple(sorted(classes[verdict.name])),
            step=step,
            trial_steps=trials.steps,
            **asdict(verdict),
        )
        for verdict in verdicts
    )


def hardest_step(result: PolicyReplay) -> int:
    """Return the step at which reused leaves are oldest, else the newest that is not exact.

    Raises:
        StepNotFound: The policy kept every step exactly.
    """
    ages = {
        step.step: max(contract.age_steps for contract in step.held)
        for step in result.steps
        if step.held
    }
    if not ages:
        raise StepNotFound(
            "the policy keeps every recorded step exactly, so there is no harm to measure; record"
            " more steps"
        )
    return max(ages, key=lambda step: (ages[step], step))


def classes_of(manifest: Manifest) -> dict[str, set[str]]:
    """Return the classes of the leaves that a step does not promise exactly, by name."""
    specs: Mapping[str, LeafSpec] = manifest.specs
    assignment = roles.find(specs, {})
    embeddings = embedding_paths(specs, assignment)
    roles_of = assignment.of()
    classes: dict[str, set[str]] = {}
    for path in manifest.contracts:
        role = roles_of[path][0] if path in roles_of else "other"
        if role in ("first_moment", "second_moment"):
            name = "moments of embeddings" if path in embeddings else "moments"
        else:
            name = "masters"
        classes.setdefault(name, set()).add(path)
    return classes
