"""Sensitivity of a run: the harm of restoring one class of its state inexactly.

From one live state the same few steps are trained several times: from the exact state, from the
exact state with the batches in other orders, and from each candidate. A candidate is a state with
one class of leaves replaced: rounded, older or zeroed. The other orders show the effect of chance
alone. A candidate is accepted if it stays within that noise, loses little progress, moves no single
element far away, and obeys Adam's law. The mean loss alone is not sufficient, because it can stay
flat while rows are destroyed. ``docs/lab/stability.md`` has results.

This module depends on no framework: a state is any value that the caller's functions accept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltacheck.leaf.tree import escape_key
from deltacheck.policy import adam
from deltacheck.profile.record import AdamRule

Weights: TypeAlias = Mapping[str, NDArray[np.float32]]
Moments: TypeAlias = Iterable[tuple[str, NDArray[np.float32], NDArray[np.float32]]]
State = TypeVar("State")

# Largest growth of the loss, in standard deviations of the noise.
MOST_LOSS_CHANGE = 1.0
# The share of the trained steps that may be lost. Without m about seven of ten are lost.
MOST_LOST_SHARE = 0.4
# Largest difference of any single element, in learning rates.
MOST_ELEMENT_CHANGE = 50.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run of a few steps.

    Attributes:
        losses: The loss of each step.
        weights: Path and array of the weights after the last step, masters if there are any.
        evaluation: The loss on held-out data after the last step. If it is given, verdicts are
            based on it; otherwise on the mean of ``losses``.
    """

    losses: tuple[float, ...]
    weights: Weights
    evaluation: float | None = None

    @property
    def loss(self) -> float:
        """Return the loss that verdicts are based on."""
        return self.evaluation if self.evaluation is not None else float(np.mean(self.losses))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of one candidate with the exact state.

    Attributes:
        name: The name of the candidate.
        accepted: True if there is no reason against it.
        loss_change: The loss of the candidate minus that of the exact run.
        noise_sd: The standard deviation of the loss over the orders of the data.
        element_change: The largest difference of one final weight, in learning rates.
        lost_steps: The missing progress, in steps of the exact run along its own path.
        law_violations: The number of elements of the candidate with m^2 > C v.
        reasons: The reasons against the candidate.
    """

    name: str
    accepted: bool
    loss_change: float
    noise_sd: float
    element_change: float
    lost_steps: float
    law_violations: int
    reasons: tuple[str, ...]


def measure(
    run: Callable[[State, int], Outcome],
    state: State,
    candidates: Mapping[str, State],
    *,
    lr: float,
    weights: Callable[[State], Weights],
    moments: Callable[[State], Moments],
    rule: AdamRule | None,
    orders: int = 2,
) -> tuple[Verdict, ...]:
    """Train on from the exact state and from each candidate, and return a verdict for each.

    Args:
        run: A function ``run(state, order)`` that restores a state, trains 10 to 20 steps and
            returns the outcome. Order 0 stands for the recorded batches, always the same. Other
            numbers are seeds of other orders of the data. Shuffling the recorded batches alone
            makes a stricter test than continuing with other data, which is the noise of a real
            run. The function must not change the state, nor the results of later calls.
        state: The exact state.
        candidates: The candidates by name. ``rolled_back`` and ``changed`` make them.
        lr: The learning rate of these steps.
        weights: A function from a state to its weights, as in ``Outcome``.
        moments: A function from a state to (path, m, v) of each parameter, as the run would use
            them, after any repair.
        rule: The constants of the optimizer; ``None`` if it is not Adam, so that no law is checked.
        orders: The number of other orders, at least 2. Larger: a better estimate of the noise, more
            steps to train; smaller: the opposite.

    Raises:
        ValueError: If there are fewer than two orders, if the learning rate is not positive, or if
            the weights of two runs have different paths.
    """
    if orders < 2:
        raise ValueError(f"noise needs at least 2 other orders, not {orders}")
    if not lr > 0:
        raise ValueError(f"the learning rate must be positive, not {lr}")
    exact = run(state, 0)
    reordered = [run(state, order) for order in range(1, orders + 1)]
    start = weights(state)
    # ddof=1: the mean is estimated from the same few runs.
    noise_sd = float(np.std([exact.loss, *(outcome.loss for outcome in reordered)], ddof=1))
    verdicts = []
    for name, candidate in candidates.items():
        # Candidates use the recorded order, so that their difference from the exact run is free of
        # the noise of the data.
        outcome = run(candidate, 0)
        verdict = Verdict(
            name,
            accepted=True,
            loss_change=outcome.loss - exact.loss,
            noise_sd=noise_sd,
            element_change=largest_change(outcome.weights, exact.weights) / lr,
            lost_steps=lost_steps(start, exact.weights, outcome.weights, len(exact.losses)),
            law_violations=_violations(moments(candidate), rule),
            reasons=(),
        )
        reasons = tuple(_reasons(verdict, len(exact.losses)))
        verdicts.append(dataclasses.replace(verdict, accepted=not reasons, reasons=reasons))
    return tuple(verdicts)


def _reasons(verdict: Verdict, steps: int) -> Iterable[str]:
    """Yield the reasons against a candidate after a number of steps.

    The distance to the final weights of the exact run is none: where other batches hardly move the
    weights, every bounded master ends far away without any loss.
    """
    # Each test is the negation of a comparison, so that NaN is a reason, too.
    if not verdict.loss_change <= MOST_LOSS_CHANGE * verdict.noise_sd:
        yield f"the loss grows by {verdict.loss_change:.2g}, noise is {verdict.noise_sd:.2g}"
    if not verdict.lost_steps <= MOST_LOST_SHARE * steps:
        yield f"{verdict.lost_steps:.2g} of {steps} steps are lost"
    if not verdict.element_change <= MOST_ELEMENT_CHANGE:
        yield (
            f"an element is {verdict.element_change:.3g} learning rates away, at most"
            f" {MOST_ELEMENT_CHANGE:g}"
        )
    if verdict.law_violations:
        yield (
            f"{verdict.law_violations} elements have a second moment that is too small for their"
            " first one"
        )


def _violations(moments: Moments, rule: AdamRule | None) -> int:
    if rule is None:
        return 0
    limit = adam.moment_limit(rule.beta1, rule.beta2)
    return sum(adam.law_violations(first, second, limit) for _, first, second in moments)


# --- distances ------------------------------------------------------------------------------------


def largest_change(first: Weights, second: Weights) -> float:
    """Return the largest absolute difference of an element, NaN if a difference is NaN.

    Raises:
        ValueError: If their paths differ.
    """
    return float(
        np.max(
            [np.max(np.abs(difference), initial=0.0) for difference in _differences(first, second)],
            initial=0.0,
        )
    )


def lost_steps(start: Weights, exact: Weights, outcome: Weights, steps: int) -> float:
    """Return the progress that an outcome is missing, in steps of the exact run.

    The displacement of the outcome from ``start`` is projected onto that of the exact run. Both
    runs use the same batches, so their noise cancels, and the result shows losses of progress that
    the loss does not show. It cannot tell if a detour is as good as the direct path.

    Args:
        start: The weights from which both runs started.
        exact: The final weights of the exact run.
        outcome: The final weights of the other run.
        steps: The number of steps of each run.

    Returns:
        The number of steps, 0 for the exact run itself.
    """
    squared_length = projection = 0.0
    for exact_move, move in zip(
        _differences(exact, start), _differences(outcome, start), strict=True
    ):
        squared_length += float(np.sum(exact_move * exact_move))
        projection += float(np.sum(exact_move * move))
    return steps * (1 - projection / squared_length) if squared_length else 0.0


def _differences(first: Weights, second: Weights) -> Iterable[NDArray[np.float64]]:
    if first.keys() != second.keys():
        raise ValueError(
            f"weights of other paths: {', '.join(sorted(first.keys() ^ second.keys())[:3])} are on"
            " one side only"
        )
    for path, values in first.items():
        yield values.astype(np.float64) - second[path].astype(np.float64)


# --- candidates -----------------------------------------------------------------------------------


def changed(state: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return a copy of a nested state in which ``change(path, leaf)`` replaces each leaf.

    Paths are those of checkpoints. Containers are dicts, lists, tuples and named tuples; everything
    else is a leaf. In JAX, ``jax.tree.map_with_path`` does the same for any pytree.
    """
    return _changed(state, (), change)


def rolled_back(state: Any, older: Any, select: Callable[[str], bool]) -> Any:
    """Return ``state`` with the selected leaves of ``older``.

    Args:
        state: The live state.
        older: A state of the same structure whose leaves are copies, not views.
        select: A function from a leaf path to True if the leaf is replaced.

    Raises:
        KeyError: If ``older`` does not have a selected leaf.
    """
    before: dict[str, Any] = {}
    changed(older, lambda path, leaf: before.setdefault(path, leaf))
    return changed(state, lambda path, leaf: before[path] if select(path) else leaf)


def _changed(node: Any, keys: tuple[str, ...], change: Callable[[str, Any], Any]) -> Any:
    if isinstance(node, Mapping):
        return {
            key: _changed(child, (*keys, escape_key(key)), change) for key, child in node.items()
        }
    if isinstance(node, list | tuple):
        names = getattr(node, "_fields", range(len(node)))
        children = [
            _changed(child, (*keys, escape_key(name)), change)
            for name, child in zip(names, node, strict=True)
        ]
        # Named tuples take their fields as separate arguments.
        return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
    return change("/".join(keys), node)
