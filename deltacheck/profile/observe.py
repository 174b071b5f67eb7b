"""The profiler without its eyes: what it remembers of the states that it is shown.
``deltacheck.backends.profiler`` reads them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from statistics import fmean

from deltacheck.leaf import tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.policy import roles
from deltacheck.policy.events import Detector, Event, RunObservation
from deltacheck.policy.parameters import hyperparameters
from deltacheck.profile import measure
from deltacheck.profile.analyse import TOLERANCE_OCTAVES, Facts, History, analyse
from deltacheck.profile.measure import Observed, Samples
from deltacheck.profile.record import AdamRule, Profile
from deltacheck.profile.sample import Plan, embedding_paths, plan


class Observer(ABC):
    """Takes note of a run. The options are those of ``deltacheck.Profiler``."""

    def __init__(
        self,
        *,
        interval_steps: int = 10,
        sample: int = 64,
        optimizer: AdamRule | None = None,
        source: str = "",
    ) -> None:
        if interval_steps < 1 or sample < 1:
            raise ValueError(
                f"interval_steps and sample must be at least 1, not {interval_steps} and {sample}"
            )
        self.interval_steps = interval_steps
        self._blocks, self._optimizer, self._source = sample, optimizer, source
        self._detector = Detector()
        self._events: list[Event] = []
        self._observed: list[Observed] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._plan: Plan | None = None
        self._rules: Mapping[str, tuple[AdamRule | None, float | None]] = {}
        self._samples: Samples = {}
        self._ties: dict[
            tuple[str, str, str], bool
        ] = {}  # (derived leaf, source, how) -> held at every look
        self._last_step: int | None = None

    def observe(
        self,
        step: int,
        state: object | Callable[[], object],
        *,
        loss: float | None = None,
        gradient_norm: float | None = None,
        learning_rate: float | None = None,
    ) -> bool:
        """Take note of a step; where one is due, look at the state. Says whether it did.

        ``state``: what a checkpoint would hold, with the optimizer's state, or a function that
        gives it, called where a look is due. ``loss``, ``gradient_norm``: of this step, the norm
        before clipping. ``learning_rate``: where the state does not hold it. Raises
        ``UnsupportedLeaf`` as a save would.
        """
        resumed = self._last_step is not None and step <= self._last_step
        self._last_step = step
        self._losses += [] if loss is None else [float(loss)]
        self._norms += [] if gradient_norm is None else [float(gradient_norm)]
        last = self._observed[-1].step if self._observed else None
        due = resumed or last is None or step - last >= self.interval_steps
        rates: tuple[float, ...] = () if learning_rate is None else (learning_rate,)
        optimizer: object = None
        if due:
            rates, optimizer = self._look(
                step, state() if callable(state) else state, rates, resumed
            )
        observation = RunObservation(step, loss, gradient_norm, rates or None, optimizer)
        self._detector, events = self._detector.advance(observation)
        self._events += events
        return due

    def _look(
        self, step: int, state: object, rates: tuple[float, ...], resumed: bool
    ) -> tuple[tuple[float, ...], object]:
        flat = self._flatten(state)
        specs = {
            path: LeafSpec.of(path, leaf.shape, leaf.dtype) for path, leaf in flat.leaves.items()
        }
        scalars = tree.scalars(flat.skeleton)
        if fresh := self._plan is None or self._plan.specs != specs:
            order = tree.array_paths(flat.skeleton).values()
            self._plan = plan(specs, roles.find(specs, scalars, order), self._blocks)
            self._ties = {}
        assert self._plan is not None
        samples = self._take(flat.arrays, self._plan)
        if fresh:
            settled = measure.proven(self._plan.roles, samples)
            self._plan = Plan(specs, settled, self._plan.starts)
        values = measure.scalars_of(scalars, samples)
        self._rules = measure.rules(self._plan.roles, values, self._optimizer)
        groups = hyperparameters(self._plan.roles, values)
        rates = tuple(group.lr for group in groups.values() if group.lr is not None) or rates
        if len(rates) == 1:
            self._rules = {
                name: (rule, rate if rate is not None else rates[0])
                for name, (rule, rate) in self._rules.items()
            }
        count = _count(self._plan, values) or step
        self._find_derived(samples, fresh)
        comparable = not fresh and not resumed and bool(self._observed)
        then = self._observed[-1].count if comparable else 0
        leaves = (
            measure.measure(self._plan, self._samples, samples, (then, count, self._rules))
            if comparable
            else {}
        )
        if resumed:  # what was observed of the steps that are done again is no longer the run's
            self._observed = [o for o in self._observed if o.step < step]
        loss, norm = (fmean(values) if values else None for values in (self._losses, self._norms))
        self._losses, self._norms = [], []
        self._observed.append(Observed(step, leaves, rates, count, loss, norm))
        self._samples = samples
        layout = hash(tuple((path, spec.shape, spec.dtype) for path, spec in specs.items()))
        betas = tuple((group.beta1, group.beta2, group.eps) for group in groups.values())
        return rates, (layout, betas)

    def _find_derived(self, samples: Samples, fresh: bool) -> None:
        """Which leaves can be computed from others, as far as the sample can tell: at every look,
        or not at all.
        """
        assert self._plan is not None
        if fresh:
            for parameter in self._plan.roles.parameters:
                if parameter.weight is not None and parameter.master is not None:
                    self._ties[parameter.weight, parameter.master, "cast"] = True
            alike: dict[tuple[object, ...], list[str]] = {}
            for path, sample in samples.items():
                if sample.size > 1:
                    alike.setdefault(
                        (self._plan.specs[path].shape, str(sample.dtype), sample.tobytes()), []
                    ).append(path)
            for first, *others in alike.values():
                self._ties |= {(path, first, "same"): True for path in others}
        for (path, source, how), held in self._ties.items():
            holds = measure.is_cast if how == "cast" else measure.equal
            self._ties[path, source, how] = held and holds(samples[path], samples[source])

    def profile(self, tolerance: float = TOLERANCE_OCTAVES) -> Profile:
        """What was found so far; see ``analyse`` for ``tolerance``."""
        return analyse(self.history(), tolerance)

    def write(self, path: str | os.PathLike[str]) -> Profile:
        """Write the profile so far as JSON. Raises ``OSError``."""
        found = self.profile()
        found.write(path)
        return found

    def history(self) -> History:
        """What the analysis works on."""
        leaves: dict[str, Facts] = {}
        embeddings = embedding_paths(self._plan.specs, self._plan.roles) if self._plan else set()
        found = self._plan.roles.of() if self._plan else {}
        derived = {
            path: (source, how)
            for (path, source, how), held in self._ties.items()
            if held and (self._changed(path) or self._changed(source))
        }
        casts = {source: path for path, (source, how) in derived.items() if how == "cast"}
        for path, spec in (self._plan.specs if self._plan else {}).items():
            role, parameter = found.get(path, ("other", None))
            rule = (
                self._rules.get(parameter.name, (None, None))[0]
                if parameter and role == "second_moment"
                else None
            )
            source, how = derived.get(path, ("", ""))
            leaves[path] = Facts(
                spec.shape,
                spec.dtype,
                spec.raw_bytes,
                role,
                rule,
                source,
                how,
                casts.get(path, ""),
                path in embeddings,
            )
        return History(
            leaves, tuple(self._observed), tuple(self._events), self._rule_of_all(), self._source
        )

    def _changed(self, path: str) -> bool:
        """Whether any look found it changed. Two leaves that never change are equal by accident:
        all
        zeros, all ones. A weight that does not change, as far as its sample tells, beside a master
        that does is its cast all the same: at small rates few weights change.
        """
        return any(o.leaves[path].density > 0 for o in self._observed if path in o.leaves)

    def _rule_of_all(self) -> AdamRule | None:
        """The constants that all parameters share; ``None`` where they differ or one of them is not
        Adam's.
        """
        found = {rule for rule, _ in self._rules.values()}
        return found.pop() if len(found) == 1 else None

    @abstractmethod
    def _flatten(self, state: object) -> Flat:
        """The state as leaf paths and arrays."""

    @abstractmethod
    def _take(self, arrays: Mapping[str, object], plan: Plan) -> Samples:
        """The samples of all leaves of ``plan.starts``, on the host, in memory of their own: path
        -> array ``(blocks, width)`` of its type.
        """


def _count(plan: Plan, scalars: Mapping[str, object]) -> int:
    """Steps that the optimizer has done: the most of any parameter; 0 where the state does not
    tell.
    """
    found = [scalars.get(p.count) for p in plan.roles.parameters if p.count is not None]
    return max((int(float(value)) for value in found if hasattr(value, "__float__")), default=0)
