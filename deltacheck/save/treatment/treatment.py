"""Decide at each save how every leaf is kept, and return the sources that keep it so.

Decisions are made from small things only: names, step counts, rates and samples. The leaves are
read when the saver captures them, often behind the training loop. Codes are made then, and the
error of what they decode to is measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Node, scalars
from deltacheck.policy import Policy, roles
from deltacheck.policy.decide import Decision, Situation, decide
from deltacheck.policy.events import Event, RunObservation
from deltacheck.policy.parameters import Hyperparameters, Parameter, Roles, hyperparameters
from deltacheck.policy.stage import STABLE, SaveObservation, advance
from deltacheck.restore import derive
from deltacheck.save.job.manifest_builder import Terms
from deltacheck.save.job.source import LeafSource
from deltacheck.save.treatment.error_measures import sample
from deltacheck.save.treatment.lossy_save import LossySave, ParameterSave, read_together
from deltacheck.save.treatment.moment_capture import MomentCapture
from deltacheck.save.treatment.run_state import LeafReader, RunState, Shadow
from deltacheck.save.treatment.weight_capture import WeightCapture

log = logging.getLogger("deltacheck")

# Metrics that tell the learning rate if the state does not, and the norm before clipping.
_RATES = ("learning_rate", "lr")
_NORMS = ("gradient_norm", "grad_norm")


class Treatment:
    """The policy of one saver, save after save.

    Args:
        policy: The policy.
        host: Return a source's bytes in host memory.
        shadow: Return what is stored of a leaf, by path.
    """

    def __init__(
        self, policy: Policy, host: Callable[[Any], U8], shadow: Callable[[str], Shadow | None]
    ) -> None:
        self._policy = policy
        self._reader = LeafReader(host, shadow)
        self._run = RunState()
        self._find_roles = roles.Finder()

    def resumed(self) -> None:
        """Forget the course of the run, because a step was restored."""
        self._run.reset()

    def plan(
        self, step: int, sources: Mapping[str, LeafSource], tree: Node, metrics: Mapping[str, float]
    ) -> tuple[dict[str, LeafSource], Callable[[], Terms]]:
        """Decide how the leaves of one save are kept.

        Args:
            step: The training step.
            sources: The leaves by path.
            tree: The structure of the state, with its scalars.
            metrics: Values that the caller reports.

        Returns:
            The sources that store the leaves as decided, and a function that returns the terms for
            the manifest. These are complete once every source was captured.
        """
        # The common case must not read a single leaf on the training thread.
        if self._policy.is_exact:
            return dict(sources), Terms
        specs = {path: source.spec for path, source in sources.items()}
        numbers = dict(scalars(tree)) | self._numbers(sources)
        leaf_roles = self._find_roles(specs, numbers)
        metric_rate = next((metrics[name] for name in _RATES if name in metrics), None)
        groups = hyperparameters(leaf_roles, numbers) | {"": Hyperparameters()}
        rates = {
            group: values if values.lr is not None else replace(values, lr=metric_rate)
            for group, values in groups.items()
        }
        # Before any decision: an event of this very step must already end the stable stage.
        counted_events = self._count(step, leaf_roles, numbers, specs)
        self._observe(step, rates, metrics, specs, counted_events)
        stage = self._run.stage.name
        if stage == STABLE:
            leaf_roles = self._prove(leaf_roles, sources)
        save = LossySave(self._policy, step, stage, self._run, self._reader)
        replacements = save.share_equal(
            {path: sources[path] for path in numbers if path in sources}
        )
        hidden = self._policy.hidden
        has_wide_weights = hidden is not None and hidden.float32_weights == "bounded"
        for parameter in leaf_roles.parameters:
            wide_weight = parameter.master or (parameter.weight if has_wide_weights else None)
            situation = Situation(
                rates[parameter.group or ""],
                # Without a count, the step is the best estimate of the number of updates.
                _as_count(numbers.get(parameter.count or "", step)),
                self._run.spacings.get(wide_weight or ""),
                self._scale(wide_weight, sources),
            )
            decisions = decide(self._policy, stage, parameter, specs, situation)
            replacements |= self._parameter_sources(save, parameter, situation, decisions, sources)
        return dict(sources) | replacements, save.terms

    def _parameter_sources(
        self,
        save: LossySave,
        parameter: Parameter,
        situation: Situation,
        decisions: Mapping[str, Decision],
        sources: Mapping[str, LeafSource],
    ) -> dict[str, LeafSource]:
        """Return the sources of those leaves of one parameter that are not simply stored."""
        paths = (parameter.weight, parameter.master, parameter.first, parameter.second)
        group_sources = {path: sources[path] for path in paths if path is not None}
        group = ParameterSave(save, parameter, situation, decisions, group_sources)
        weights, moments = WeightCapture(group), MomentCapture(group)
        members = list(group_sources.values())
        replacements = {}
        for path, decision in decisions.items():
            capture = _capture_of(path, decision, weights, moments)
            replacements[path] = read_together(group_sources[path], capture, members)
        second = parameter.second
        # Called at every save, since it remembers the step count for the next one.
        rescale = moments.rescale_since_last()
        # Before the stable stage the drift of second moments decides when that stage begins.
        if (
            second is not None
            and parameter.adam
            and self._policy.hidden is not None
            and save.stage != STABLE
        ):
            replacements[second] = save.watch(sources[second], rescale)
        return replacements

    def _observe(
        self,
        step: int,
        rates: Mapping[str, Hyperparameters],
        metrics: Mapping[str, float],
        specs: Mapping[str, LeafSpec],
        counted_events: tuple[Event, ...],
    ) -> None:
        """Bring the stage of the run to this save."""
        hidden, run = self._policy.hidden, self._run
        if hidden is None:
            return
        learning_rates = tuple(rate.lr for rate in rates.values() if rate.lr is not None)
        optimizer = (
            tuple((group, rate.beta1, rate.beta2) for group, rate in rates.items()),
            tuple(specs.values()),
        )
        observation = RunObservation(
            step,
            loss=metrics.get("loss"),
            gradient_norm=next((metrics[name] for name in _NORMS if name in metrics), None),
            learning_rate=learning_rates or None,
            optimizer=optimizer,
        )
        run.detector, run_events = run.detector.advance(observation)
        run_events += counted_events
        for event in run_events:
            log.info(
                "step %d: %s (%.3g): every leaf is saved exactly until the run is quiet again",
                step,
                event.what,
                event.size,
            )
        # The captures of the last save have measured these. Each drift counts once.
        drifts, run.drifts = run.drifts, []
        drift = float(np.median(drifts)) if drifts else None
        rate = max(learning_rates, default=None)
        run.stage = advance(
            run.stage,
            SaveObservation(step, rate, drift, tuple(event.what for event in run_events)),
            hidden.max_drift_octaves,
            hidden.stable_from,
            hidden.steady_from,
        )

    def _count(
        self,
        step: int,
        leaf_roles: Roles,
        numbers: Mapping[str, object],
        specs: Mapping[str, LeafSpec],
    ) -> tuple[Event, ...]:
        """Return the events that the step counts and the stored moments show."""
        run = self._run
        if self._policy.hidden is None:
            return ()
        counts, sizes = {}, {}
        for parameter in leaf_roles.parameters:
            count = numbers.get(parameter.count or "")
            if isinstance(count, int | float) and math.isfinite(count):
                counts[parameter.name] = int(count)
                spec = specs.get(parameter.first or parameter.master or "")
                sizes[parameter.name] = 0 if spec is None else math.prod(spec.shape)
        run.activity, events = run.activity.advance(step, counts, sizes)
        if run.zeroed and not events:
            events = (Event(step, "optimizer"),)
        run.zeroed.clear()
        return events

    def _numbers(self, sources: Mapping[str, LeafSource]) -> dict[str, float]:
        """Return the leaves of one number: step counts, and rates that are kept as arrays."""
        numbers = {}
        for path, source in sources.items():
            spec = source.spec
            if (
                # A leaf of one element, whatever its shape.
                spec.raw_bytes == spec.element.item_bytes
                and np.dtype(spec.element.numpy).kind in "iuf"
            ):
                numbers[path] = float(self._reader.live(source)[0])
        return numbers

    def _prove(self, leaf_roles: Roles, sources: Mapping[str, LeafSource]) -> Roles:
        """Return the roles with each master's weight, found by content.

        The proof is repeated while a master has no weight, and after a capture has found a weight
        that is not the cast of its master.
        """
        run = self._run
        if run.proof is not None and run.proof[0] == leaf_roles:
            return run.proof[1]
        proven = roles.prove(leaf_roles, partial(self._is_cast, sources))
        is_complete = all(p.proven or p.master is None for p in proven.parameters)
        run.proof = (leaf_roles, proven) if is_complete else None
        return proven

    def _is_cast(self, sources: Mapping[str, LeafSource], weight: str, master: str) -> bool:
        """Return true if a sample of a weight is the rounded master.

        A sample is enough: every value is checked again when the weight is captured.
        """
        weights, masters = (sample(self._reader.live(sources[path])) for path in (weight, master))
        restored = derive.cast(masters, weights.dtype)
        return bool(np.array_equal(weights.view(np.uint8), restored.view(np.uint8)))

    def _scale(self, master: str | None, sources: Mapping[str, LeafSource]) -> float:
        """Return the root mean square of a master, sampled once: it hardly changes in a run."""
        run = self._run
        if run.stage.name != STABLE or master is None or master not in sources:
            return 0.0
        if master not in run.scales:
            values = sample(self._reader.live(sources[master])).astype(np.float64)
            run.scales[master] = float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
        return run.scales[master]


def _capture_of(
    path: str, decision: Decision, weights: WeightCapture, moments: MomentCapture
) -> Callable[[], Any]:
    """Return the function that captures a leaf as decided."""
    match decision.how:
        case "cast":
            return partial(weights.capture_cast, path, decision)
        case "lattice":
            return partial(weights.capture_lattice, path, decision)
        case "zeros":
            return partial(moments.capture_zeros, path, decision)
    return partial(moments.capture, path)


def _as_count(value: object) -> int | None:
    """Return a step count that is kept as an integer or a float; ``None`` before the first step."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 1:
        return None
    return int(value)
