"""The part of the profiler that knows no framework: the record of a run.

``deltacheck.backends.profiler`` reads the states of frameworks.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from statistics import fmean

from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.policy import roles
from deltacheck.policy.events import Detector, Event, RunObservation
from deltacheck.policy.parameters import hyperparameters
from deltacheck.profile import measure
from deltacheck.profile.analyse import TOLERANCE_OCTAVES, History, LeafFacts, analyse
from deltacheck.profile.measure import Observed, Samples
from deltacheck.profile.record import AdamRule, Profile
from deltacheck.profile.sample import SamplePlan, plan_samples


@typed
class Observer(ABC):
    """A recorder of observations. The options are those of ``deltacheck.Profiler``."""

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
        # Events need every step; the state is sampled only at intervals.
        self._detector = Detector()
        self._events: list[Event] = []
        self._observed: list[Observed] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._plan: SamplePlan | None = None
        self._rules: Mapping[str, tuple[AdamRule | None, float | None]] = {}
        self._samples: Samples = {}
        # (derived leaf, source, rule) -> True if the relation held at every observation.
        self._ties: dict[tuple[str, str, str], bool] = {}
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
        """Record a step, and sample the state if ``interval_steps`` have passed.

        Args:
            step: The training step.
            state: The state that a checkpoint would hold, with the state of the optimizer, or a
                function that returns it. The function is called only if the state is sampled.
            loss: The loss of this step. ``None`` (default): no loss events are detected.
            gradient_norm: The gradient norm of this step before clipping. ``None`` (default): no
                gradient events are detected.
            learning_rate: The learning rate, if the state does not hold it.

        Returns:
            True if the state was sampled.

        Raises:
            UnsupportedLeaf: If a save would refuse a leaf of the state.
        """
        # A step that does not ascend can only come from a resume.
        resumed = self._last_step is not None and step <= self._last_step
        self._last_step = step
        # Losses between two samples are averaged, because a single one is noisy.
        self._losses += [] if loss is None else [float(loss)]
        self._norms += [] if gradient_norm is None else [float(gradient_norm)]
        last = self._observed[-1].step if self._observed else None
        due = resumed or last is None or step - last >= self.interval_steps
        rates: tuple[float, ...] = () if learning_rate is None else (learning_rate,)
        optimizer: object = None
        if due:
            rates, optimizer = self._sample(
                step, state() if callable(state) else state, rates, resumed
            )
        observation = RunObservation(step, loss, gradient_norm, rates or None, optimizer)
        self._detector, events = self._detector.advance(observation)
        self._events += events
        return due

    def _sample(
        self, step: int, state: object, rates: tuple[float, ...], resumed: bool
    ) -> tuple[tuple[float, ...], object]:
        """Sample the state, and return its learning rates and an identity of its optimizer."""
        flat = self._flatten(state)
        specs = {
            path: LeafSpec.of(path, leaf.shape, leaf.dtype) for path, leaf in flat.leaves.items()
        }
        scalars = tree.scalars(flat.skeleton)
        # Another layout cannot be compared element by element, so the sampling starts anew.
        if fresh := self._plan is None or self._plan.specs != specs:
            order = tree.array_paths(flat.skeleton).values()
            self._plan = plan_samples(specs, roles.find(specs, scalars, order), self._blocks)
            self._ties = {}
        assert self._plan is not None
        samples = self._take(flat.arrays, self._plan)
        if fresh:
            proven_roles = measure.proven(self._plan.roles, samples)
            self._plan = SamplePlan(specs, proven_roles, self._plan.starts)
        values = measure.scalars_of(scalars, samples)
        self._rules = measure.rules(self._plan.roles, values, self._optimizer)
        groups = hyperparameters(self._plan.roles, values)
        rates = tuple(group.lr for group in groups.values() if group.lr is not None) or rates
        if len(rates) == 1:
            self._rules = _with_rate(self._rules, rates[0])
        count = _count(self._plan, values) or step
        self._find_derived(samples, fresh)
        leaves = {}
        if not fresh and not resumed and self._observed:
            counts = (self._observed[-1].count, count)
            leaves = measure.measure(self._plan, self._samples, samples, counts, self._rules)
        if resumed:
            # The run repeats these steps, so their observations no longer belong to it.
            self._observed = [o for o in self._observed if o.step < step]
        loss, norm = (fmean(values) if values else None for values in (self._losses, self._norms))
        self._losses, self._norms = [], []
        self._observed.append(Observed(step, leaves, rates, count, loss, norm))
        self._samples = samples
        # Compared for equality only; a hash keeps the detector small.
        layout = hash(tuple((path, spec.shape, spec.dtype) for path, spec in specs.items()))
        betas = tuple((group.beta1, group.beta2, group.eps) for group in groups.values())
        return rates, (layout, betas)

    def _find_derived(self, samples: Samples, fresh: bool) -> None:
        """Update the relations between leaves that can be computed from others.

        A relation counts only if it held in the samples of all observations.
        """
        assert self._plan is not None
        if fresh:
            for parameter in self._plan.roles.parameters:
                if parameter.weight is not None and parameter.master is not None:
                    self._ties[parameter.weight, parameter.master, "cast"] = True
            # Candidates are leaves whose first samples are equal. A comparison of all pairs would
            # take quadratic time.
            equal_samples: dict[tuple[object, ...], list[str]] = {}
            for path, sample in samples.items():
                if sample.size > 1:
                    equal_samples.setdefault(
                        (self._plan.specs[path].shape, str(sample.dtype), sample.tobytes()), []
                    ).append(path)
            for first, *copies in equal_samples.values():
                self._ties |= {(path, first, "same"): True for path in copies}
        for (path, source, rule), valid in self._ties.items():
            holds = measure.is_cast if rule == "cast" else measure.equal
            self._ties[path, source, rule] = valid and holds(samples[path], samples[source])

    def profile(self, tolerance: float = TOLERANCE_OCTAVES) -> Profile:
        """Return the profile of the run so far.

        Args:
            tolerance: The drift of a second moment over an interval that counts as stable, in
                octaves (default: 0.1). Larger: an earlier stable start and more reuse, but step
                sizes of a restored run that deviate more; smaller: the opposite.

        Returns:
            The profile.
        """
        return analyse(self.history(), tolerance)

    def write(self, path: str | os.PathLike[str]) -> Profile:
        """Write the profile so far as JSON, with the default tolerance.

        Args:
            path: The file to write.

        Returns:
            The profile.

        Raises:
            StorageFailed: If the file cannot be written.
        """
        profile = self.profile()
        profile.write(path)
        return profile

    def history(self) -> History:
        """Return the input of the analysis.

        Returns:
            The facts of all leaves, the observations and the events.
        """
        leaves: dict[str, LeafFacts] = {}
        roles_of = self._plan.roles.of() if self._plan else {}
        # A relation between two constant leaves proves nothing, see _changed.
        derived = {
            path: (source, rule)
            for (path, source, rule), valid in self._ties.items()
            if valid and (self._changed(path) or self._changed(source))
        }
        for path, spec in (self._plan.specs if self._plan else {}).items():
            role, parameter = roles_of.get(path, ("other", None))
            rule = (
                self._rules.get(parameter.name, (None, None))[0]
                if parameter and role == "second_moment"
                else None
            )
            source, relation = derived.get(path, ("", ""))
            leaves[path] = LeafFacts(
                spec.shape,
                spec.dtype,
                spec.raw_bytes,
                role,
                rule,
                source,
                relation,
            )
        return History(
            leaves, tuple(self._observed), tuple(self._events), self._rule_of_all(), self._source
        )

    def _changed(self, path: str) -> bool:
        """Return True if the sample of a leaf changed in any observation.

        Two leaves that never change may be equal by accident: all zeros, all ones. A weight whose
        sample does not change, while its master does, is still its cast: at small rates few weights
        change.
        """
        return any(o.leaves[path].density > 0 for o in self._observed if path in o.leaves)

    def _rule_of_all(self) -> AdamRule | None:
        """Return the constants of Adam that all parameters share, ``None`` if they differ."""
        distinct = {rule for rule, _ in self._rules.values()}
        return distinct.pop() if len(distinct) == 1 else None

    @abstractmethod
    def _flatten(self, state: object) -> Flat:
        """Return the leaf paths and arrays of a state."""

    @abstractmethod
    def _take(self, arrays: Mapping[str, object], plan: SamplePlan) -> Samples:
        """Return the samples of all leaves of ``plan.starts``, by path.

        Each is an array ``(blocks, width)`` of the type of its leaf, on the host, in memory that
        later steps of the training do not change.
        """


def _with_rate(rules: measure.Rules, rate: float) -> measure.Rules:
    """Return rules in which one rate holds, also for groups whose state does not hold it."""
    return {
        name: (rule, rate if own_rate is None else own_rate)
        for name, (rule, own_rate) in rules.items()
    }


def _count(plan: SamplePlan, scalars: Mapping[str, object]) -> int:
    """Return the largest step count of all parameters, 0 if the state holds none."""
    counts = [scalars.get(p.count) for p in plan.roles.parameters if p.count is not None]
    return max((int(float(value)) for value in counts if hasattr(value, "__float__")), default=0)
