"""What a run loses where a class of its state is restored as something else than it was: measured
by
training on from both.

From one live state the same few steps are trained several times: as it is; as it is, on the batches
in other orders, which tells how much chance alone moves the result; and from each candidate, a
state with one class of leaves replaced (rounded, older, zeroed). A candidate is accepted where it
stays within that noise *and* no single element is torn away *and* it obeys Adam's law: the mean
loss alone can stay flat while rows are destroyed.

Knows no framework: states are whatever the caller's functions take.
"""

from __future__ import annotations

import dataclasses
import math
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

MOST_LOSS_CHANGE = 1.0  # in standard deviations of the noise
MOST_DISTANCE = 1.2  # in distances that another order makes
MOST_ELEMENT_CHANGE = 50.0  # in learning rates, of any one element


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a few steps gave. ``losses``: of each step. ``weights``: after the last one,
    path
    -> array (masters where there are any).

    ``evaluation``: loss on held-out data after the last step; where it is given, it is what losses
    are judged by.
    """

    losses: tuple[float, ...]
    weights: Weights
    evaluation: float | None = None

    @property
    def loss(self) -> float:
        return self.evaluation if self.evaluation is not None else float(np.mean(self.losses))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate against the exact state.

    ``loss_change``: of the mean loss (or of the evaluation loss), candidate less exact;
    ``noise_sd``: standard deviation of the loss over orders. ``distance``: between the weights at
    the end of both runs, L2, over the mean distance that another order makes. ``element_change``:
    the largest difference of one element there, in learning rates. ``lost_steps``: progress that is
    missing, in steps of the exact run, along its own path. ``law_violations``: elements of the
    candidate with m^2 > C v. ``reasons``: why it is not accepted.
    """

    name: str
    accepted: bool
    loss_change: float
    noise_sd: float
    distance: float
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
    """Train on from ``state``, from ``state`` in ``orders`` other orders, and from each candidate;
    a
    verdict for each candidate.

    ``run(state, order)``: restore ``state``, train 10 to 20 steps, return the outcome; order 0: on
    recorded batches, always the same; other numbers: with the data in another order, drawn with
    that seed. Shuffling the recorded batches alone makes a stricter judge than going on with
    others, which is the noise that a run has anyway. It must change neither the state that it is
    given nor what a later call gives. ``candidates``: by name; ``rolled_back``, ``rounded`` and
    ``changed`` make them. ``lr``: the learning rate of these steps. ``weights(state)``: as in
    ``Outcome``. ``moments(state)``: (path, m, v) of each parameter, as the run would take them,
    after any repair. ``rule``: of the optimizer, ``None`` where it is not Adam: no law is checked
    then. More ``orders``: a better noise estimate, more steps.

    Raises ``ValueError`` for fewer than two orders, for a rate that is not positive, and where two
    runs disagree about their weights.
    """
    if orders < 2:
        raise ValueError(f"noise needs at least 2 other orders, not {orders}")
    if not lr > 0:
        raise ValueError(f"the learning rate must be positive, not {lr}")
    exact = run(state, 0)
    others = [run(state, order) for order in range(1, orders + 1)]
    start = weights(state)
    noise_sd = float(np.std([exact.loss, *(other.loss for other in others)], ddof=1))
    noise_distance = float(np.mean([distance(other.weights, exact.weights) for other in others]))
    found = []
    for name, candidate in candidates.items():
        outcome = run(candidate, 0)
        away = distance(outcome.weights, exact.weights)
        verdict = Verdict(
            name,
            accepted=True,
            loss_change=outcome.loss - exact.loss,
            noise_sd=noise_sd,
            distance=away / noise_distance if noise_distance else (math.inf if away else 0.0),
            element_change=largest_change(outcome.weights, exact.weights) / lr,
            lost_steps=lost_steps(start, exact.weights, outcome.weights, len(exact.losses)),
            law_violations=_violations(moments(candidate), rule),
            reasons=(),
        )
        reasons = tuple(_reasons(verdict))
        found.append(dataclasses.replace(verdict, accepted=not reasons, reasons=reasons))
    return tuple(found)


def _reasons(verdict: Verdict) -> Iterable[str]:
    """Why a candidate is not accepted. Written so that NaN is a reason."""
    if not verdict.loss_change <= MOST_LOSS_CHANGE * verdict.noise_sd:
        yield f"the loss grows by {verdict.loss_change:.2g}, noise is {verdict.noise_sd:.2g}"
    if not verdict.distance <= MOST_DISTANCE:
        yield (
            f"the weights end {verdict.distance:.3g} times as far away as another order takes them,"
            f" at most {MOST_DISTANCE:g}"
        )
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


def distance(left: Weights, right: Weights) -> float:
    """L2 distance of two sets of weights, float64. Raises ``ValueError`` where their paths
    differ.
    """
    return math.sqrt(sum(float(np.sum(difference**2)) for difference in _differences(left, right)))


def largest_change(left: Weights, right: Weights) -> float:
    """The largest absolute difference of an element; NaN where there is one. Raises ``ValueError``
    where their paths differ.
    """
    return float(
        np.max(
            [np.max(np.abs(difference), initial=0.0) for difference in _differences(left, right)],
            initial=0.0,
        )
    )


def lost_steps(start: Weights, exact: Weights, outcome: Weights, steps: int) -> float:
    """How many of ``steps`` steps are missing of the way that the exact run has gone from
    ``start``: 0
    for the exact run itself.

    The outcome's way, projected on the exact one's, both from the live ``start``. Shared batches
    make it free of their noise, so that it sees losses that the loss cannot show; it does not see
    whether a detour is as good as the way.
    """
    way = along = 0.0
    for gone, reached in zip(_differences(exact, start), _differences(outcome, start), strict=True):
        way += float(np.sum(gone * gone))
        along += float(np.sum(gone * reached))
    return steps * (1 - along / way) if way else 0.0


def _differences(left: Weights, right: Weights) -> Iterable[NDArray[np.float64]]:
    if left.keys() != right.keys():
        raise ValueError(
            f"weights of other paths: {', '.join(sorted(left.keys() ^ right.keys())[:3])} are on"
            " one side only"
        )
    for path, values in left.items():
        yield values.astype(np.float64) - right[path].astype(np.float64)


# --- candidates -----------------------------------------------------------------------------------


def changed(state: Any, change: Callable[[str, Any], Any]) -> Any:
    """A copy of a nested state, each leaf replaced by ``change(path, leaf)``; paths as in
    checkpoints.

    Containers: dicts, lists, tuples and named tuples; all else is a leaf. In JAX,
    ``jax.tree.map_with_path`` does the same for any pytree.
    """
    return _changed(state, (), change)


def rolled_back(state: Any, older: Any, chosen: Callable[[str], bool], factor: float = 1.0) -> Any:
    """``state`` with the chosen leaves as they were in ``older``, times ``factor`` (see
    ``policy.adam.bias_rescale``).

    ``older``: a state of the same structure whose leaves are copies, not views. Raises ``KeyError``
    naming a chosen leaf that it does not have.
    """
    before: dict[str, Any] = {}
    changed(older, lambda path, leaf: before.setdefault(path, leaf))
    return changed(
        state,
        lambda path, leaf: (
            leaf if not chosen(path) else before[path] if factor == 1.0 else before[path] * factor
        ),
    )


def rounded(state: Any, chosen: Callable[[str], bool], spacing: float) -> Any:
    """``state`` with the chosen leaves rounded to multiples of ``spacing``, all with the same
    phase.

    Only a stand-in for precision: against a fresh base such a rounding returns every element to it,
    which looks free and stalls training. ``codec.lattice.quantise`` is what a bounded master is
    stored with.
    """
    return changed(
        state, lambda path, leaf: (leaf / spacing + 0.5) // 1 * spacing if chosen(path) else leaf
    )


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
        return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
    return change("/".join(keys), node)
