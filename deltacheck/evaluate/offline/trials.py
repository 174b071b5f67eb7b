"""Train on from restored states, and measure the lost progress.

The trial is that of ``profile.sensitivity``: from one checkpoint the same few steps are trained
from the exact state, from the exact state on other data, and from each restored state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltacheck.backends.profiler import backend_of
from deltacheck.evaluate.comparison import snapshot
from deltacheck.evaluate.comparison.contract import trained_weights
from deltacheck.evaluate.comparison.snapshot import Snapshot
from deltacheck.evaluate.workload import (
    Factory,
    NoWorkload,
    create_workload,
    saving_module,
    workload_folder,
)
from deltacheck.policy.parameters import hyperparameters
from deltacheck.profile import AdamRule, sensitivity
from deltacheck.profile.sensitivity import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class Trials:
    """The trial of a restored state.

    Attributes:
        factory: Creates the run.
        seed: Its seed, that of the recorded run.
        steps: The number of steps of each trial. Larger: later effects are seen; smaller: faster.
        orders: The number of runs on other data, at least 2.
    """

    factory: Factory
    seed: int = 1
    steps: int = 10
    orders: int = 3

    def measure(self, exact: Any, candidates: Mapping[str, Any]) -> tuple[Verdict, ...]:
        """Return a verdict for each candidate.

        Args:
            exact: The exact state, as the run's ``load`` takes it.
            candidates: States that a policy restores instead, by name.

        Raises:
            NoWorkload: The run has no ``reorder(seed)``, or its learning rate is unknown.
        """
        with workload_folder():
            run = create_workload(self.factory, self.seed)
            if not callable(getattr(run, "reorder", None)):
                raise NoWorkload(
                    f"{type(run).__name__} has no method reorder(seed), which continues with other"
                    " data; without it there is no noise to compare with"
                )
            rate, rule = _constants(_view(exact))
            rate = rate or getattr(run, "learning_rate", None)
            if not rate:
                raise NoWorkload(
                    "neither the state nor an attribute learning_rate of the run tells the"
                    " learning rate"
                )
            return sensitivity.measure(
                self._train,
                exact,
                candidates,
                lr=float(rate),
                weights=lambda state: trained_weights(_view(state)),
                moments=lambda state: _moments(_view(state)),
                rule=rule,
                orders=self.orders,
            )

    def _train(self, state: Any, order: int) -> Outcome:
        run = create_workload(self.factory, self.seed)
        # ``load`` may keep what it is given, and the next trial needs it unchanged.
        run.load(copy.deepcopy(state))
        if order:
            run.reorder(order)  # type: ignore[attr-defined]
        losses = tuple(float(run.step()) for _ in range(self.steps))
        # Before the evaluation, which may change buffers.
        weights = trained_weights(_view(run.state()))
        return Outcome(losses, weights, float(run.evaluate()))


def _view(state: Any) -> Snapshot:
    """Return a state by the roles of its leaves."""
    backend = saving_module(backend_of(state))
    return snapshot.take(backend.flat(state), backend.bytes_of)


def _moments(view: Snapshot) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, m and v of each parameter of an Adam."""
    for p in view.roles.parameters:
        if p.adam and p.first is not None and p.second is not None:
            first, second = (view.arrays[path].astype(np.float32) for path in (p.first, p.second))
            yield p.name, first, second


def _constants(view: Snapshot) -> tuple[float | None, AdamRule | None]:
    """Return the largest learning rate of a state, and the constants of its Adam.

    Either is ``None`` if the state does not hold it, the constants also if it holds two pairs.
    """
    groups = hyperparameters(view.roles, view.numbers).values()
    rate = max((group.lr for group in groups if group.lr), default=None)
    pairs = {(group.beta1, group.beta2) for group in groups}
    beta1, beta2 = pairs.pop() if len(pairs) == 1 else (None, None)
    return rate, None if beta1 is None or beta2 is None else AdamRule(beta1, beta2)
