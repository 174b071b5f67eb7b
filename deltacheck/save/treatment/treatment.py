"""Decide at each save how every leaf is kept, and return the sources that keep it so.

Decisions are made from small things only: names, step counts, rates and samples. The leaves are
read when the saver captures them, often behind the training loop. Codes are made then, and the
error of what they decode to is measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from deltacheck.codec.base import Codec
from deltacheck.codec.leaf_memory import memories_of
from deltacheck.leaf.contracts import PeakRate
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Node, scalars
from deltacheck.policy import Policy, refresh, roles
from deltacheck.policy.activity import Activity
from deltacheck.policy.decide import Decision, Situation, decide, is_treatable
from deltacheck.policy.events import Detector, Event, RunObservation
from deltacheck.policy.parameters import (
    Hyperparameters,
    Parameter,
    Roles,
    hyperparameters,
    peak_rates,
)
from deltacheck.policy.stage import DEGRADED, STABLE, SaveObservation, Stage, advance, explain
from deltacheck.save.job.manifest_builder import Terms
from deltacheck.save.job.source import LeafSource, ViewedLeaf
from deltacheck.save.treatment.cells import Layout
from deltacheck.save.treatment.law_capture import LawCapture
from deltacheck.save.treatment.lossy_save import LossySave, ParameterSave, read_together
from deltacheck.save.treatment.moment_capture import MomentCapture
from deltacheck.save.treatment.proof import paired, proven
from deltacheck.save.treatment.run_state import LeafReader, RunState, Shadow
from deltacheck.save.treatment.signals import Agreed, HeldState, Signals, layout_text, scale_of
from deltacheck.save.treatment.weight_capture import WeightCapture

log = logging.getLogger("deltacheck")

# Metrics that tell the learning rate if the state does not, and the norm before clipping.
_RATES = ("learning_rate", "lr")
_NORMS = ("gradient_norm", "grad_norm")


class _Optimizers(NamedTuple):
    """The optimizers of a state, as far as the state shows them.

    Attributes:
        roles: The roles of the leaves.
        rates: The hyperparameters of each parameter group.
        numbers: All numbers of the state, by path.
        counts: The step count of each parameter's optimizer, by the name of the parameter.
    """

    roles: Roles
    rates: Mapping[str, Hyperparameters]
    numbers: Mapping[str, object]
    counts: Mapping[str, int | None]

    def activity(
        self, run: RunState, step: int, specs: Mapping[str, LeafSpec]
    ) -> tuple[Activity, tuple[Event, ...]]:
        """Return the activity with the step counts of a save, and the events that it shows."""
        counts, sizes = {}, {}
        for parameter in self.roles.parameters:
            count = self.numbers.get(parameter.count or "")
            if isinstance(count, int | float) and math.isfinite(count):
                counts[parameter.name] = int(count)
                spec = specs.get(parameter.first or parameter.master or "")
                sizes[parameter.name] = 0 if spec is None else math.prod(spec.shape)
        activity, events = run.activity.advance(step, counts, sizes)
        # The stored moments show a new optimizer that keeps no counts.
        if run.zeroed and not events:
            events = (Event(step, "optimizer"),)
        return activity, events

    def peaks(
        self, peaks: Mapping[str, PeakRate], events: Sequence[str], *, is_resumed: bool
    ) -> dict[str, PeakRate]:
        """Return the course of the learning rate of each parameter group, with this save."""
        largest: dict[str, int] = {}
        for parameter in self.roles.parameters:
            group = parameter.group or ""
            largest[group] = max(largest.get(group, 0), self.counts[parameter.name] or 0)
        rates = {group: rate for group in largest if (rate := self.rates[group].lr) is not None}
        return peak_rates(peaks, rates, largest, events, is_resumed=is_resumed)


class Treatment:
    """The policy of one saver, which is not exact, save after save.

    Args:
        policy: The policy.
        codec: The codec of the backend's memory.
        shadow: Return what is stored of a leaf, by path.
    """

    def __init__(
        self, policy: Policy, codec: Codec[Any], shadow: Callable[[str], Shadow | None]
    ) -> None:
        self._policy = policy
        self._reader = LeafReader(memories_of(codec), shadow)
        self._run = RunState()
        self._find_roles = roles.Finder()

    def resumed(self, rates: Mapping[str, PeakRate]) -> None:
        """Forget the course of the run, because a step was restored.

        Args:
            rates: The course of the learning rate up to that step, from its manifest.
        """
        self._run.reset(rates)

    def signals(self, step: int, state: HeldState) -> Signals | None:
        """Return the signals of this process, which the ranks of a save agree on.

        Args:
            step: The training step.
            state: The state of which this process holds a part.

        Returns:
            The signals; ``None`` if the policy needs none.
        """
        if self._policy.hidden is None:
            return None
        optimizers = self._optimizers(step, state)
        return msgspec.structs.replace(
            self._signals(step, state, optimizers), scales=self._scales(optimizers.roles, state)
        )

    def _signals(self, step: int, state: HeldState, optimizers: _Optimizers) -> Signals:
        """Return the signals of a process that saves alone: without scales."""
        metrics, run, rates = state.metrics, self._run, optimizers.rates
        constants = tuple((group, rate.beta1, rate.beta2) for group, rate in rates.items())
        return Signals(
            loss=metrics.get("loss"),
            gradient_norm=next((metrics[name] for name in _NORMS if name in metrics), None),
            learning_rates=tuple(rate.lr for rate in rates.values() if rate.lr is not None),
            optimizer=layout_text(constants, state.specs),
            # The captures of the last save have measured these.
            drifts=tuple(run.drifts),
            events=tuple(
                (event.what, event.size) for event in optimizers.activity(run, step, state.specs)[1]
            ),
        )

    def measured(self, state: HeldState) -> Signals | None:
        """Return what the last save of this process has shown, for ranks that agree before a save.

        They cannot agree on ``signals`` if the next state is known to each only when it is written.

        Args:
            state: The state that was saved.
        """
        if self._policy.hidden is None:
            return None
        run = self._run
        return Signals(
            drifts=tuple(run.drifts),
            events=(("optimizer", 0.0),) if run.zeroed else (),
            scales=self._scales(self._optimizers(0, state).roles, state),
        )

    def _scales(self, leaf_roles: Roles, state: HeldState) -> dict[str, tuple[float, int]]:
        """Return the scales of masters that are not known, or may have grown since."""
        # A master may begin as zeros, as one of LoRA's two matrices does, and grows ever slower.
        is_due = self._run.saves & (self._run.saves - 1) == 0
        return {
            path: scale_of(state.values(path))
            for path in map(self._wide_weight, leaf_roles.parameters)
            if path in state.specs and (is_due or not self._run.scales.get(path))
        }

    def plan(
        self,
        step: int,
        sources: Mapping[str, LeafSource],
        tree: Node,
        metrics: Mapping[str, float],
        agreed: Agreed | None = None,
    ) -> tuple[dict[str, LeafSource], Callable[[], Terms]]:
        """Decide how the leaves of one save are kept.

        Args:
            step: The training step.
            sources: The leaves, or the tiles that this rank writes, by stored path.
            tree: The structure of the state, with its scalars.
            metrics: Values that the caller reports.
            agreed: The agreement of the ranks that save together; ``None``: there are none.

        Returns:
            The sources that store the leaves as decided, and a function that returns the terms for
            the manifest. These are complete once every source was captured.
        """
        # A leaf is read for others, too, so that all of them read the copy that a training makes.
        sources = {
            path: ViewedLeaf(source).source() if source.is_view else source
            for path, source in sources.items()
        }
        agreed = agreed or Agreed()
        state = agreed.held or self._held(sources, tree, metrics)
        optimizers = self._optimizers(step, state)
        places = self._run.turns_of(optimizers.roles, state.specs)
        # Before any decision: an event of this very step must already end the stable stage.
        if self._policy.hidden is not None:
            signals = agreed.signals or self._signals(step, state, optimizers)
            self._follow(step, signals, state, optimizers)
        layout = Layout({name: source.spec for name, source in sources.items()}, agreed.cuts)
        settled = self._settled(optimizers, layout, sources, agreed)
        optimizers = optimizers._replace(roles=settled)
        if self._policy.hidden is not None and agreed.signals is None:
            self._keep_scales(self._scales(optimizers.roles, state))
        # A first save shows nothing of what is not named.
        is_first = self._run.pairs is None and agreed.signals is None
        doubts = "" if is_first else self._doubts(optimizers.roles, state.specs)
        if doubts and doubts != self._run.doubts:
            log.warning("step %d: %s", step, doubts)
        self._run.doubts = doubts
        save = LossySave(
            self._policy,
            step,
            self._run.stage.name,
            self._run,
            self._reader,
            agreed.digests,
            reason="; ".join(filter(None, (self._run.reason, doubts))),
            rates=self._run.peaks,
        )
        replacements = save.share_equal(
            {path: sources[path] for path in state.numbers if path in sources}
        )
        replacements |= self._decided(save, sources, layout, state.specs, optimizers, places)
        return dict(sources) | replacements, save.terms

    def _decided(
        self,
        save: LossySave,
        sources: Mapping[str, LeafSource],
        layout: Layout,
        specs: Mapping[str, LeafSpec],
        optimizers: _Optimizers,
        places: Mapping[str, float],
    ) -> dict[str, LeafSource]:
        """Return the sources of the leaves of all parameters that are not simply stored."""
        run, rates, counts = self._run, optimizers.rates, optimizers.counts
        replacements: dict[str, LeafSource] = {}
        run.clocks, turns = refresh.due(
            self._policy, save.stage, optimizers.roles, places, rates, counts, run.clocks
        )
        for parameter in optimizers.roles.parameters:
            wide_weight = self._wide_weight(parameter)
            groups = (parameter.group or "", *parameter.rivals)
            slowest = min(groups, key=lambda group: self._unit(group, rates))
            situation = Situation(
                replace(rates[parameter.group or ""], lr=rates[slowest].lr),
                counts[parameter.name],
                run.lattices.get(wide_weight),
                run.scales.get(wide_weight, 0.0),
                parameter.name in turns,
                run.phases_at(save.step),
                self._peak(slowest),
                bool(parameter.rivals),
            )
            decisions = decide(self._policy, save.stage, parameter, specs, situation)
            decision = decisions.get(wide_weight)
            for cell in layout.cells(parameter.leaves):
                cell_parameter = cell.parameter(parameter)
                replacements |= self._parameter_sources(
                    save, cell_parameter, situation, cell.decisions(parameter, decisions), sources
                )
                if cell.suffix and decision is not None and decision.spacing:
                    # As decided and not as captured, so that it is the same on every rank.
                    run.keep_lattice(wide_weight, decision)
        return replacements

    def _follow(
        self, step: int, signals: Signals, state: HeldState, optimizers: _Optimizers
    ) -> None:
        """Bring all that is known of the run to this save."""
        run = self._run
        is_resumed = run.detector.last is None
        events = tuple(event.what for event in self._observe(step, signals))
        run.peaks = optimizers.peaks(run.peaks, events, is_resumed=is_resumed)
        run.activity, _ = optimizers.activity(run, step, state.specs)
        run.zeroed.clear()
        if run.stage.name == STABLE:
            run.seconds.clear()

    def _settled(
        self,
        optimizers: _Optimizers,
        layout: Layout,
        sources: Mapping[str, LeafSource],
        agreed: Agreed,
    ) -> Roles:
        """Return the roles with what content shows of them."""
        leaf_roles = optimizers.roles
        if self._run.stage.name == DEGRADED:
            self._run.pairs = None
            return leaf_roles
        # Ranks would have to agree on what each of them finds in its tiles.
        if self._policy.law:
            leaf_roles = _without_guesses(leaf_roles)
        if agreed.signals is None:
            leaf_roles = paired(
                self._run,
                self._reader,
                leaf_roles,
                sources,
                optimizers.rates,
                optimizers.counts,
                with_weights=self._has_wide_weights or self._policy.law,
            )
        return proven(self._run, self._reader, leaf_roles, layout, sources)

    def _doubts(self, leaf_roles: Roles, specs: Mapping[str, LeafSpec]) -> str:
        """Return what is not known of the weights that may be bounded, for people."""
        wide = [
            p
            for p in leaf_roles.parameters
            if p.adam and is_treatable(specs.get(self._wide_weight(p)), "float32")
        ]
        exact = [p for p in wide if not p.paired]
        shared = [p for p in wide if p.paired and p.rivals]
        texts = []
        if exact:
            texts.append(
                f"{len(exact)} master weights stay exact, because nothing shows which optimizer"
                f" state is theirs, such as {exact[0].wide_weight}"
            )
        if shared:
            texts.append(
                f"{len(shared)} master weights are bounded by the smallest learning rate of the"
                f" groups that share their shape, such as {shared[0].wide_weight}"
            )
        remedy = "to name them, make the optimizer from model.named_parameters()"
        return "; ".join([*texts, remedy]) if texts else ""

    def _keep_scales(self, scales: Mapping[str, tuple[float, int]]) -> None:
        for path, (squares, count) in scales.items():
            self._run.scales[path] = math.sqrt(squares / count) if count else 0.0

    def _peak(self, group: str) -> float:
        """Return the largest learning rate of a parameter group so far, 0 if it is unknown."""
        peak = self._run.peaks.get(group)
        return 0.0 if peak is None else peak.peak

    def _unit(self, group: str, rates: Mapping[str, Hyperparameters]) -> float:
        """Return the unit of errors in a parameter group, 0 if its rate is unknown."""
        hidden, rate = self._policy.hidden, rates[group].lr
        if hidden is None or rate is None:
            return 0.0
        return max(rate, hidden.rate_floor * self._peak(group))

    @property
    def _has_wide_weights(self) -> bool:
        """True if float32 weights without a narrow copy may be bounded."""
        hidden = self._policy.hidden
        return hidden is not None and hidden.float32_weights == "bounded"

    def _wide_weight(self, parameter: Parameter) -> str:
        """Return the float32 weight that may lie on a lattice: the master, if there is one."""
        return parameter.master or (parameter.weight if self._has_wide_weights else None) or ""

    def _held(
        self, sources: Mapping[str, LeafSource], tree: Node, metrics: Mapping[str, float]
    ) -> HeldState:
        """Return the state of a process that saves alone."""
        specs = {path: source.spec for path, source in sources.items()}
        return HeldState.of(specs, tree, metrics, lambda path: [self._reader.live(sources[path])])

    def _optimizers(self, step: int, state: HeldState) -> _Optimizers:
        """Return what a state shows of its optimizers."""
        numbers = dict(scalars(state.tree)) | dict(state.numbers)
        leaf_roles = self._find_roles(state.specs, numbers)
        metric_rate = next((state.metrics[name] for name in _RATES if name in state.metrics), None)
        groups = hyperparameters(leaf_roles, numbers) | {"": Hyperparameters()}
        rates = {
            group: values if values.lr is not None else replace(values, lr=metric_rate)
            for group, values in groups.items()
        }
        # Without a count, the step is the best estimate of the number of updates.
        counts = {
            parameter.name: _as_count(numbers.get(parameter.count or "", step))
            for parameter in leaf_roles.parameters
        }
        return _Optimizers(leaf_roles, rates, numbers, counts)

    def _parameter_sources(
        self,
        save: LossySave,
        parameter: Parameter,
        situation: Situation,
        decisions: Mapping[str, Decision],
        sources: Mapping[str, LeafSource],
    ) -> dict[str, LeafSource]:
        """Return the sources of those leaves of one parameter that are not simply stored."""
        group_sources = {path: sources[path] for path in parameter.leaves}
        group = ParameterSave(save, parameter, situation, decisions, group_sources)
        is_watched = self._policy.hidden is not None and save.stage != STABLE
        weights = WeightCapture(group)
        count, last = situation.step, self._run.counts.get(parameter.name)
        law = LawCapture(group, None if count is None or last is None else count - last)
        # Made at every save, since it remembers the step count for the next one.
        moments = MomentCapture(group, is_watched=is_watched)
        members = list(group_sources.values())
        replacements = {}
        for path, decision in decisions.items():
            capture = _capture_of(path, decision, weights, moments, law)
            replacements[path] = read_together(group_sources[path], capture, members)
        second = parameter.second
        # Before the stable stage the drift of second moments decides when that stage begins.
        if is_watched and second is not None and parameter.adam and second not in decisions:
            replacements[second] = moments.watched(sources[second])
        return replacements

    def _observe(self, step: int, signals: Signals) -> tuple[Event, ...]:
        """Bring the stage of the run to this save, and return its events."""
        hidden, run = self._policy.hidden, self._run
        assert hidden is not None  # there are no signals without it
        before = run.stage
        run.detector, run.stage, run_events = self._advanced(step, signals)
        observation = _observation(step, signals, run_events)
        limits = (hidden.max_drift_octaves, hidden.stable_from)
        run.reason = explain(before, run.stage, observation, *limits)
        if run.stage.name != before.name:
            log.info("step %d: stage %s: %s", step, run.stage.name, run.reason)
        for event in run_events:
            log.info(
                "step %d: %s (%.3g): every leaf is saved exactly once",
                step,
                event.what,
                event.size,
            )
        # Each drift counts once.
        run.drifts = []
        run.saves += 1
        self._keep_scales(signals.scales)
        return run_events

    def _advanced(self, step: int, signals: Signals) -> tuple[Detector, Stage, tuple[Event, ...]]:
        """Return the detector and the stage after some signals, and the events that they show."""
        hidden, run = self._policy.hidden, self._run
        assert hidden is not None  # there are no signals without it
        observation = RunObservation(
            step,
            loss=signals.loss,
            gradient_norm=signals.gradient_norm,
            learning_rate=signals.learning_rates or None,
            optimizer=signals.optimizer or None,
        )
        detector, run_events = run.detector.advance(observation)
        run_events += tuple(Event(step, name, size) for name, size in signals.events)
        stage = advance(
            run.stage,
            _observation(step, signals, run_events),
            hidden.max_drift_octaves,
            hidden.stable_from,
            hidden.steady_from,
        )
        return detector, stage, run_events


def leaf_groups(specs: Mapping[str, LeafSpec], tree: Node) -> list[list[str]]:
    """Return the leaves of each parameter, which one rank should write if several hold them.

    Args:
        specs: The specs of all leaves of all ranks.
        tree: The structure of the state, with its scalars.
    """
    return [
        [path for path in parameter.leaves if path in specs]
        for parameter in roles.find(specs, dict(scalars(tree))).parameters
    ]


def _without_guesses(leaf_roles: Roles) -> Roles:
    """Return the roles with weights that were matched by order alone as open.

    All parameters of a group have one rate, so their order does not matter for that. A law needs
    the very state of a weight.
    """
    parameters = tuple(
        replace(p, paired=p.paired and (p.proven or p.master is not None))
        for p in leaf_roles.parameters
    )
    return replace(leaf_roles, parameters=parameters)


def _observation(step: int, signals: Signals, run_events: Sequence[Event]) -> SaveObservation:
    """Return what the stage of a save depends on."""
    drift = float(np.median(signals.drifts)) if signals.drifts else None
    rate = max(signals.learning_rates, default=None)
    return SaveObservation(step, rate, drift, tuple(event.what for event in run_events))


def _capture_of(
    path: str, decision: Decision, weights: WeightCapture, moments: MomentCapture, law: LawCapture
) -> Callable[[], Any]:
    """Return the function that captures a leaf as decided."""
    match decision.how:
        case "cast":
            return partial(weights.capture_cast, path, decision)
        case "lattice":
            return partial(weights.capture_master, path, decision)
        case "group":
            return partial(law.capture, path, decision)
    return partial(moments.capture, path)


def _as_count(value: object) -> int | None:
    """Return a step count that is kept as an integer or a float; ``None`` before the first step."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 1:
        return None
    return int(value)
