"""The importance of each class of the state.

One class is replaced, and some steps are trained. `deltacheck.profile.sensitivity` judges the
result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import entropy
from benchmarks.record import Cell, Unit
from benchmarks.repaired import repair
from benchmarks.ways import FIRST, MASTER, SECOND, WEIGHTS, Run, State, class_of
from deltacheck.codec.lossy import lattice
from deltacheck.leaf import tree
from deltacheck.policy import adam
from deltacheck.profile.sensitivity import Outcome, Weights, changed, measure

HORIZON = 20
STEP_LR = 16.0  # spacing of the lattice, in learning rates

COLUMNS: dict[str, Unit] = {
    "restored with": "text",
    "accepted": "text",
    "loss change": "number",
    "noise sd": "number",
    "element change": "number",
    "lost steps": "number",
    "against the law": "count",
}

F32 = NDArray[np.float32]


def measure_candidates(
    run: Run, older_steps: int, settle_steps: int, horizon: int = HORIZON
) -> list[list[Cell]]:
    """Return a row of ``COLUMNS`` for each candidate, from a settled run.

    Args:
        run: The run.
        older_steps: Age of stale values.
        settle_steps: Steps to train before.
        horizon: Steps to train after the replacement.
    """
    run.train(settle_steps)
    older = copy.deepcopy(run.workload.state())
    run.train(older_steps)
    live = copy.deepcopy(run.workload.state())
    batches = [next(run.workload.batches) for _ in range(horizon)]

    def trained(state: State, order: int) -> Outcome:
        run.workload.load(copy.deepcopy(state))
        if order:
            run.workload.reorder(order)
        losses = tuple(run.workload.train_step(None if order else batch) for batch in batches)
        return Outcome(losses, run.masters(), run.workload.evaluate())

    def weights(state: State) -> Weights:
        return run.masters(state)

    candidates = _candidates(run, live, older, older_steps)
    verdicts = measure(
        trained,
        live,
        candidates,
        lr=run.recipe.rate,
        weights=weights,
        moments=run.moments,
        rule=run.rule,
        orders=4,
    )
    return [
        [
            verdict.name,
            "yes" if verdict.accepted else "no",
            verdict.loss_change,
            verdict.noise_sd,
            verdict.element_change,
            verdict.lost_steps,
            verdict.law_violations,
        ]
        for verdict in verdicts
    ]


def _candidates(run: Run, live: State, older: State, age: int) -> dict[str, State]:
    before = {path: entropy.words_of(array) for path, array in run.arrays(older).items()}
    now = {
        path: entropy.words_of(array).view(np.float32)
        for path, array in run.arrays(live).items()
        if class_of(path) != WEIGHTS
    }
    first_of = {
        path.replace("exp_avg", "exp_avg_sq").replace("/mu/", "/nu/"): m
        for path, m, _ in run.moments(live)
    }
    older_first = {
        path.replace("exp_avg", "exp_avg_sq").replace("/mu/", "/nu/"): m
        for path, m, _ in run.moments(older)
    }
    owners = tree.array_paths(run.flat(live).skeleton)  # of tied weights
    limit = adam.moment_limit(run.rule.beta1, run.rule.beta2)
    rescale = adam.bias_rescale(run.workload.step, run.workload.step - age, run.rule.beta2)

    def with_class(classes: tuple[str, ...], change: Callable[[str], NDArray[Any]]) -> State:
        """Return the live state with the words of some classes replaced by ``change(path)``."""

        def replaced(path: str, leaf: Any) -> Any:
            return _like(leaf, change(owners[path])) if class_of(path) in classes else leaf

        return changed(live, replaced)  # type: ignore[no-any-return]

    def stale_pair(path: str) -> NDArray[Any]:
        if class_of(path) == FIRST:
            return before[path]
        return repair(before[path].view(np.float32) * np.float32(rescale), older_first[path], limit)

    def stale_repaired(path: str) -> NDArray[Any]:
        return repair(before[path].view(np.float32) * np.float32(rescale), first_of[path], limit)

    return {
        f"weights and master {age} steps old": with_class(
            (WEIGHTS, MASTER), lambda path: before[path]
        ),
        "master cut to its bf16 weight": with_class((MASTER,), lambda path: _cut(now[path])),
        f"master on a lattice of {STEP_LR:g} lr": with_class(
            (MASTER,), lambda path: _on_lattice(now[path], STEP_LR * run.recipe.rate)
        ),
        "m zero": with_class((FIRST,), lambda path: np.zeros_like(now[path])),
        "v within half an octave": with_class(
            (SECOND,), lambda path: repair(_octaves(now[path]), first_of[path], limit)
        ),
        f"v {age} steps old, m kept": with_class((SECOND,), lambda path: before[path]),
        f"v {age} steps old, m kept, repaired": with_class((SECOND,), stale_repaired),
        f"m and v {age} steps old, repaired": with_class((FIRST, SECOND), stale_pair),
        "v zero, m kept": with_class((SECOND,), lambda path: np.zeros_like(now[path])),
    }


def _cut(master: F32) -> F32:
    import ml_dtypes

    return master.astype(ml_dtypes.bfloat16).astype(np.float32)


def _on_lattice(master: F32, spacing: float) -> F32:
    import ml_dtypes

    weights = master.astype(ml_dtypes.bfloat16)
    return lattice.values(lattice.codes(master, spacing, 0).codes, spacing, 0, weights=weights)


def _octaves(second: F32) -> F32:
    with np.errstate(divide="ignore"):
        return np.exp2(np.round(np.log2(second))).astype(np.float32)


def _like(leaf: Any, words: NDArray[Any]) -> Any:
    """Convert words to an array of the leaf's framework, type and shape."""
    if hasattr(leaf, "detach"):
        import torch

        return (
            torch.from_numpy(np.ascontiguousarray(words).view(np.uint8))
            .view(leaf.dtype)
            .reshape(leaf.shape)
            .clone()
        )
    import jax.numpy as jnp

    return jnp.asarray(
        np.ascontiguousarray(words).view(np.uint8).view(leaf.dtype).reshape(leaf.shape)
    )
