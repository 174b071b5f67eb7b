"""Carry out a policy's decisions: turn live leaves into what is stored of them, and measure what a
restore will give.

One ``Treatment`` a saver. At each save it decides, from small things only, how every leaf is kept;
the leaves themselves are read when the saver captures them, often behind the training loop. There
codes are made, the error of what they decode to is measured, and a leaf whose contract would not
hold is stored exactly after all. Laws are numbered as in ``docs/explanation/policy.md``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from deltacheck.codec import lattice, octaves
from deltacheck.codec.base import U8
from deltacheck.leaf.contracts import Bounded, Promise, Reused
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Node, scalars
from deltacheck.policy import Policy, adam, roles
from deltacheck.policy.decide import Decision, Situation, betas, decide
from deltacheck.policy.events import Detector, RunObservation
from deltacheck.policy.keyframes import staggered
from deltacheck.policy.parameters import Hyperparameters, Parameter, Roles, hyperparameters
from deltacheck.policy.stage import STABLE, SaveObservation, Stage, advance
from deltacheck.restore import derive
from deltacheck.save.job.manifest_builder import Terms
from deltacheck.save.job.source import Coded, LeafSource
from deltacheck.store.manifest import Derived

log = logging.getLogger("deltacheck")

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_BLOCK = (
    1 << 18
)  # elements of a weight whose error is measured at once, in memory that is used again
SAMPLE_BLOCKS, SAMPLE_BLOCK = (
    64,
    64,
)  # elements of a leaf that drift is measured on: blocks, evenly spread, and their length
_RATES = (
    "learning_rate",
    "lr",
)  # names of the metric that tells the learning rate where the state does not
_NORMS = ("gradient_norm", "grad_norm")  # and the norm before clipping


@dataclass(frozen=True, slots=True)
class Shadow:
    """What is stored of a leaf: its spec and bytes in host memory."""

    spec: LeafSpec
    data: U8


class Treatment:
    """Decides and carries out, save after save. ``host``: a source's bytes in host memory.
    ``shadow``: what is stored of a leaf so far.
    """

    def __init__(
        self, policy: Policy, host: Callable[[Any], U8], shadow: Callable[[str], Shadow | None]
    ) -> None:
        self._policy = policy
        self._host = host
        self._shadow = shadow
        self._stage = Stage()
        self._detector = Detector()
        self._drifts: list[
            float
        ] = []  # of second moments, measured while the last save was captured
        self._spacings: dict[str, float] = {}
        self._scales: dict[str, float] = {}
        self._pairs: dict[
            str, int
        ] = {}  # the step at which the moments of a parameter were stored that are reused since
        self._counts: dict[str, int | None] = {}  # of the optimizer, at the last save
        self._find = roles.Finder()
        self._settled: tuple[Roles, Roles] | None = (
            None  # before and after a proof that no capture has contradicted since
        )

    def resumed(self) -> None:
        """A step was restored: nothing is known of the run that goes on from it."""
        self._stage, self._detector = Stage(), Detector()
        self._drifts.clear()
        self._pairs.clear()
        self._counts.clear()

    def plan(
        self, step: int, sources: Mapping[str, LeafSource], tree: Node, metrics: Mapping[str, float]
    ) -> tuple[dict[str, LeafSource], Callable[[], Terms]]:
        """What to store at this save, and what its manifest will say of it; that is complete once
        every source was captured.
        """
        if self._policy.is_exact:
            return dict(sources), Terms
        specs = {path: source.spec for path, source in sources.items()}
        known = dict(scalars(tree)) | self._single(sources)
        found = self._find(specs, known)
        told = next((metrics[name] for name in _RATES if name in metrics), None)
        rates = {
            group: own if own.lr is not None else replace(own, lr=told)
            for group, own in (hyperparameters(found, known) | {"": Hyperparameters()}).items()
        }
        self._observe(step, rates, metrics, specs)
        if self._stage.name == STABLE:
            found = self._proven(found, sources)
        save = _Save(self, step, self._stage.name)
        taken = save.share_equal({path: sources[path] for path in known if path in sources})
        for parameter in found.parameters:
            own = rates[parameter.group or ""]
            count = _as_count(known.get(parameter.count or ""))
            spacing = self._spacings.get(parameter.master or "")
            situation = Situation(own, count, spacing, self._scale(parameter.master, sources))
            taken |= save.take(
                parameter,
                situation,
                decide(self._policy, self._stage.name, parameter, specs, situation),
                sources,
            )
        return dict(sources) | taken, save.terms

    def _observe(
        self,
        step: int,
        rates: Mapping[str, Hyperparameters],
        metrics: Mapping[str, float],
        specs: Mapping[str, LeafSpec],
    ) -> None:
        """Bring the stage to this save."""
        hidden = self._policy.hidden
        if hidden is None:
            return
        learning_rates = tuple(own.lr for own in rates.values() if own.lr is not None)
        about = (
            tuple((group, own.beta1, own.beta2) for group, own in rates.items()),
            tuple(specs.values()),
        )
        seen = RunObservation(
            step,
            loss=metrics.get("loss"),
            gradient_norm=next((metrics[name] for name in _NORMS if name in metrics), None),
            learning_rate=learning_rates or None,
            optimizer=about,
        )
        self._detector, events = self._detector.advance(seen)
        for event in events:
            log.info(
                "step %d: %s (%.3g): every leaf is saved exactly until the run is quiet again",
                step,
                event.what,
                event.size,
            )
        drifts, self._drifts = self._drifts, []
        drift = float(np.median(drifts)) if drifts else None
        observed = SaveObservation(
            step, max(learning_rates, default=None), drift, tuple(event.what for event in events)
        )
        self._stage = advance(self._stage, observed, hidden.max_drift_octaves, hidden.stable_from)

    def _single(self, sources: Mapping[str, LeafSource]) -> dict[str, float]:
        """Leaves of one number: step counts, rates that are kept as arrays."""
        found = {}
        for path, source in sources.items():
            spec = source.spec
            if (
                spec.raw_bytes == spec.element.item_bytes
                and np.dtype(spec.element.numpy).kind in "iuf"
            ):
                found[path] = float(self._live(source)[0])
        return found

    def _live(self, source: LeafSource) -> Array:
        """A leaf as it is now, 1-D."""
        return self._host(source.current()).view(source.spec.element.numpy)

    def _proven(self, found: Roles, sources: Mapping[str, LeafSource]) -> Roles:
        """Whose weights they are, by content; looked at again while a master has none, and once a
        weight is not what its master says.
        """
        if self._settled is not None and self._settled[0] == found:
            return self._settled[1]
        proven = roles.prove(found, partial(self._is_cast, sources))
        self._settled = (
            (found, proven)
            if all(p.proven or p.master is None for p in proven.parameters)
            else None
        )
        return proven

    def doubt(self) -> None:
        """A weight was not the cast of its master, whatever the proof says."""
        self._settled = None

    def _is_cast(self, sources: Mapping[str, LeafSource], weight: str, master: str) -> bool:
        """Whether a weight is its master, rounded; told from a sample, since every value is checked
        again when it is captured.
        """
        one, other = (sample(self._live(sources[path])) for path in (weight, master))
        return bool(
            np.array_equal(one.view(np.uint8), derive.cast(other, one.dtype).view(np.uint8))
        )

    def _scale(self, master: str | None, sources: Mapping[str, LeafSource]) -> float:
        """Root mean square of a master, sampled once: it hardly changes in a run."""
        if self._stage.name != STABLE or master is None or master not in sources:
            return 0.0
        if master not in self._scales:
            values = sample(self._live(sources[master])).astype(np.float64)
            self._scales[master] = (
                float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
            )
        return self._scales[master]


class _Save:
    """One save: what came of the leaves that are kept otherwise than exactly.

    It lives until the commit, and so holds no leaf: memory that the training has left, as JAX
    leaves a state at every step, goes once captured.
    """

    def __init__(self, treatment: Treatment, step: int, stage: str) -> None:
        self.treatment = treatment
        self.step = step
        self._stage = stage
        self._derived: dict[str, Derived] = {}
        self._contracts: dict[str, Promise] = {}

    def terms(self) -> Terms:
        """What the manifest says. REQUIRES: every source was captured."""
        policy = self.treatment._policy
        return Terms(
            self._derived, self._contracts, self._stage if policy.hidden is not None else ""
        )

    def take(
        self,
        parameter: Parameter,
        situation: Situation,
        decisions: Mapping[str, Decision],
        sources: Mapping[str, LeafSource],
    ) -> dict[str, LeafSource]:
        """The sources of one parameter's leaves as decided, of those that are not just what they
        were.
        """
        paths = (parameter.weight, parameter.master, parameter.first, parameter.second)
        group = _Group(
            self,
            parameter,
            situation,
            decisions,
            {path: sources[path] for path in paths if path is not None},
        )
        together = list(group.sources.values())
        taken = {
            path: _read_as(group.sources[path], group.capture_of(path, d), together)
            for path, d in decisions.items()
        }
        second, hidden = parameter.second, self.treatment._policy.hidden
        rescale = group.rescale_since_last()
        if second is not None and parameter.adam and hidden is not None and self._stage != STABLE:
            source = sources[second]
            taken[second] = _read_as(source, partial(self._watched, source, rescale), [source])
        return taken

    def share_equal(self, sources: Mapping[str, LeafSource]) -> dict[str, LeafSource]:
        """Store leaves of one number that are equal once: the step counts that an optimizer keeps
        for every parameter.
        """
        owners: dict[tuple[LeafSpec, bytes], LeafSource] = {}
        taken = {}
        for path, source in sources.items():
            owner = owners.setdefault(
                (replace(source.spec, path=""), self.live(source).tobytes()), source
            )
            if owner is not source:
                taken[path] = _read_as(source, partial(self._same, source, owner), [source, owner])
        return taken

    def _same(self, source: LeafSource, owner: LeafSource) -> Any:
        live, spec = self.live(source), source.spec
        if live.tobytes() != self.live(owner).tobytes():
            return source.current()
        self.promise(
            spec.path,
            Derived("same", spec.dtype, spec.shape, _digest(spec, live), of=owner.spec.path),
            None,
        )
        return Coded(None, None)

    def live(self, source: LeafSource) -> Array:
        return self.treatment._live(source)

    def stored(self, path: str, spec: LeafSpec) -> Array | None:
        """What is stored of a leaf so far, where it is of this form."""
        shadow = self.treatment._shadow(path)
        return (
            shadow.data.view(spec.element.numpy)
            if shadow is not None and shadow.spec == spec
            else None
        )

    def promise(self, path: str, derived: Derived, promise: Promise | None) -> None:
        self._derived[path] = derived
        if promise is not None:
            self._contracts[path] = promise

    def _watched(self, source: LeafSource, scale: float) -> Any:
        """A second moment that is stored exactly; its drift since the save before is measured on
        the
        way.

        ``scale``: what reuse would multiply it with. Without it, the growth from zero of a young v
        would look like drift.
        """
        spec = source.spec
        before = self.stored(spec.path, spec)
        if before is not None and spec.dtype == "float32":
            drift = octaves_apart(sample(self.live(source)), sample(before) * np.float32(scale))
            if drift is not None:
                self.treatment._drifts.append(drift)
        return source.current()


def _read_as(
    source: LeafSource, current: Callable[[], Any], together: Sequence[LeafSource]
) -> LeafSource:
    """A leaf that is read ``together`` with others is read when the first of them must be."""
    return replace(source, current=current, lazy=all(other.lazy for other in together))


class _Group:
    """The leaves of one parameter at one save. Codes are made when the first leaf that needs them
    is captured.
    """

    def __init__(
        self,
        save: _Save,
        parameter: Parameter,
        situation: Situation,
        decisions: Mapping[str, Decision],
        sources: Mapping[str, LeafSource],
    ) -> None:
        self.sources = sources
        self._save = save
        self._parameter = parameter
        self._situation = situation
        self._decisions = decisions
        self._moments: dict[str, Any] | None = None

    def capture_of(self, path: str, decision: Decision) -> Callable[[], Any]:
        """What captures the leaf ``path``."""
        match decision.how:
            case "cast":
                return partial(self._cast, path, decision)
            case "lattice":
                return partial(self._lattice, path, decision)
            case "zeros":
                return partial(self._zeros, path, decision)
        return partial(self._moment, path)

    def _spec(self, path: str) -> LeafSpec:
        return self.sources[path].spec

    def _live(self, path: str) -> Array:
        return self._save.live(self.sources[path])

    def _exactly(self, path: str) -> Any:
        return self.sources[path].current()

    def _derive(self, path: str, decision: Decision, **about: Any) -> Derived:
        spec = self._spec(path)
        fields = ("of", "spacing", "seed", "fraction_bits", "signed", "first", "limit")
        known = {name: getattr(decision, name) for name in fields}
        if decision.how == "octaves":
            known["scale"] = self._scale(decision)
        return Derived(decision.how, spec.dtype, spec.shape, **known | about)

    # --- weights and masters ----------------------------------------------------------------------

    def _lattice(self, path: str, decision: Decision) -> Any:
        """A master on its lattice; exactly, where some value does not fit or is not in the cell of
        its weight.
        """
        save, rate = self._save, self._situation.hyperparameters.lr
        assert rate is not None  # else there were no spacing
        assert isinstance(decision.terms, Bounded)
        live = self._live(path)
        weights = self._live(decision.of) if decision.of else None
        made = lattice.codes(live, decision.spacing, decision.seed, weights=weights)
        error = made.largest_error / rate
        if made.refused or error > decision.terms.limit:
            save.treatment.doubt()
            return self._exactly(path)
        save.treatment._spacings[path] = decision.spacing
        save.promise(path, self._derive(path, decision), Promise(decision.terms, error))
        spec = LeafSpec.of(path, self._spec(path).shape, "int32")
        return Coded(spec, made.codes.view(np.uint8))

    def _cast(self, path: str, decision: Decision) -> Any:
        """A weight that is the cast of its master as a restore gives it: not stored where that is
        the promise, and it holds.
        """
        save, spec = self._save, self._spec(path)
        live = self._live(path)
        master = self._live(decision.of)
        bounded = self._decisions.get(decision.of)
        error = None if bounded is None else self._cast_error(live, master, bounded)
        if error is None:  # the master is stored exactly
            given = derive.cast(master, spec.element.numpy)
            if not np.array_equal(given.view(np.uint16), live.view(np.uint16)):
                save.treatment.doubt()
                return self._exactly(path)
            save.promise(path, self._derive(path, decision, digest=_digest(spec, live)), None)
            return Coded(None, None)
        assert isinstance(decision.terms, Bounded)
        if not error <= decision.terms.limit:
            save.treatment.doubt()
            return self._exactly(path)
        save.promise(path, self._derive(path, decision), Promise(decision.terms, error))
        return Coded(None, None)

    def _cast_error(self, live: Array, master: Array, bounded: Decision) -> float | None:
        """``||given - live|| / ||live||`` of the weight that the bounded master gives; ``None``
        where a value of the master does not fit.
        """
        rate = self._situation.hyperparameters.lr
        assert rate is not None  # else there were no spacing
        assert isinstance(bounded.terms, Bounded)
        error = RelativeError()
        for begin in range(0, live.size, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            made = lattice.codes(master[block], bounded.spacing, bounded.seed, start=begin)
            if made.refused or made.largest_error / rate > bounded.terms.limit:
                return None
            values = lattice.values(made.codes, bounded.spacing, bounded.seed, start=begin)
            error.add(live[block], derive.cast(values, live.dtype))
        return error.l2

    # --- moments ----------------------------------------------------------------------------------

    def _zeros(self, path: str, decision: Decision) -> Any:
        assert isinstance(decision.terms, Bounded)
        self._save.promise(
            path, self._derive(path, decision), Promise(decision.terms, decision.terms.limit)
        )
        return Coded(None, None)

    def _moment(self, path: str) -> Any:
        """Both moments are decided on when the first of them is captured."""
        if self._moments is None:
            self._moments = self._both()
        return self._moments.pop(path)

    def _both(self) -> dict[str, Any]:
        coded = {
            path: decision
            for path, decision in self._decisions.items()
            if decision.how == "octaves"
        }
        exactly = {path: self._exactly(path) for path in coded}
        if self._breaks_the_law():
            return exactly
        reused = any(isinstance(decision.terms, Reused) for decision in coded.values())
        if reused and (kept := self._keep(coded)) is not None:
            return kept
        made: dict[str, Any] = {}
        promises = {}
        for path, decision in coded.items():
            spec = LeafSpec.of(
                path, self._spec(path).shape, octaves.code_dtype(decision.fraction_bits).name
            )
            found = octaves.codes(
                self._coded_values(path, decision),
                fraction_bits=decision.fraction_bits,
                signed=decision.signed,
                base=self._save.stored(path, spec),
                dead_band=decision.dead_band,
            )
            allowed = decision.terms.limit if isinstance(decision.terms, Bounded) else np.inf
            if found.refused or found.largest_error_octaves > allowed:
                return exactly
            made[path] = Coded(spec, found.codes.view(np.uint8))
            measured, from_step = found.largest_error_octaves, None
            if isinstance(decision.terms, Reused):
                live, codes = (sample(values) for values in (self._live(path), found.codes))
                given = octaves.values(
                    codes, fraction_bits=decision.fraction_bits, signed=decision.signed
                )
                measured = (
                    octaves_apart(np.abs(live), np.abs(given) * np.float32(self._scale(decision)))
                    or 0.0
                )
                from_step = self._save.step
            assert decision.terms is not None
            promises[path] = Promise(decision.terms, measured, from_step)
        for path, decision in coded.items():
            self._save.promise(path, self._derive(path, decision), promises[path])
        if reused:
            self._save.treatment._pairs[self._parameter.name] = self._save.step
        return made

    def _scale(self, decision: Decision) -> float:
        """What the values of codes are multiplied with. Of v, the share of its mean square that it
        has
        so far, growing from zero: codes are of what it would be without that. So a young v does not
        cross cells by growing, and one that is reused is one of now (law 5).
        """
        known, step = self._betas(), self._situation.step
        return (
            1.0
            if decision.signed or known is None or step is None
            else adam.bias_correction(step, known[1])
        )

    def _coded_values(self, path: str, decision: Decision) -> Array:
        scale = self._scale(decision)
        live = self._live(path)
        return live if scale == 1.0 else live * np.float32(1 / scale)

    def _betas(self) -> tuple[float, float] | None:
        hidden = self._save.treatment._policy.hidden
        return None if hidden is None else betas(hidden, self._situation.hyperparameters)

    def _breaks_the_law(self) -> bool:
        """Whether the live moments are not those of an Adam with these betas, whatever they are
        called.
        """
        first, second = self._parameter.first, self._parameter.second
        limit = next((d.limit for d in self._decisions.values() if d.limit), None)
        if limit is None or first is None or second is None:
            return False
        return adam.law_violations(sample(self._live(first)), sample(self._live(second)), limit) > 0

    def _keep(self, coded: Mapping[str, Decision]) -> dict[str, Any] | None:
        """The pair as it was stored, where it may still be reused; the drift guard."""
        save, first, second = self._save, self._parameter.first, self._parameter.second
        stored_step = save.treatment._pairs.get(self._parameter.name)
        if stored_step is None or first is None or second is None:
            return None
        specs = {
            path: LeafSpec.of(
                path, self._spec(path).shape, octaves.code_dtype(d.fraction_bits).name
            )
            for path, d in coded.items()
        }
        codes = {path: save.stored(path, spec) for path, spec in specs.items()}
        terms = coded[second].terms
        assert isinstance(terms, Reused)
        age = save.step - stored_step
        if any(found is None for found in codes.values()) or not 0 < age <= staggered(
            second, terms.max_age_steps
        ):
            return None
        old = {path: found for path, found in codes.items() if found is not None}
        live = self._live(second)
        if np.any(
            (old[second] == 0) & (live > 0)
        ):  # law 8: rows that are touched for the first time
            return None
        given = self._given(coded, {path: sample(found) for path, found in old.items()})
        now = {path: sample(self._live(path)) for path in (first, second)}
        drift = octaves_apart(now[second], given[second])
        own = self._situation.hyperparameters
        change = adam.update_change(now[first], now[second], given[second], own.eps or 1e-8)
        most = terms.max_drift
        if drift is None or most is None or drift > most or change > most:
            return None
        for path, decision in coded.items():
            measured = (
                drift
                if path == second
                else octaves_apart(np.abs(now[path]), np.abs(given[path])) or 0.0
            )
            assert isinstance(decision.terms, Reused)
            save.promise(
                path, self._derive(path, decision), Promise(decision.terms, measured, stored_step)
            )
        return {path: Coded(specs[path], None) for path in coded}

    def rescale_since_last(self) -> float:
        """What a second moment of the save before is multiplied with to stand for that of now."""
        counts = self._save.treatment._counts
        before = counts.get(self._parameter.name)
        counts[self._parameter.name] = self._situation.step
        known, now = self._betas(), self._situation.step
        if known is None or now is None or before is None or not 1 <= before <= now:
            return 1.0
        return adam.bias_rescale(now, before, known[1])

    def _given(self, coded: Mapping[str, Decision], codes: Mapping[str, Array]) -> dict[str, Array]:
        """What a restore would give for some codes."""
        found: dict[str, Array] = {}
        for path in sorted(coded, key=lambda path: bool(coded[path].first)):  # v needs m
            derived = self._derive(path, coded[path])
            found[path] = derive.compute(derived, codes[path], found, 0, codes[path].size)
        return found


def _digest(spec: LeafSpec, values: Array) -> str:
    return digest_of(spec, values.view(np.uint8))


def octaves_apart(one: Array, other: Array) -> float | None:
    """Median ``|log2(one / other)|`` of the elements that are positive in both, ``None`` where
    there are none.
    """
    both = (one > 0) & (other > 0) & np.isfinite(one) & np.isfinite(other)
    if not both.any():
        return None
    return float(
        np.median(
            np.abs(np.log2(one[both].astype(np.float64)) - np.log2(other[both].astype(np.float64)))
        )
    )


@dataclass(slots=True)
class RelativeError:
    """``||given - live|| / ||live||`` of arrays that come in parts, in float64; 0 where both are
    zero, infinite or NaN where elements are.
    """

    _size: float = 0.0
    _error: float = 0.0

    def add(self, live: Array, given: Array) -> None:
        wide = live.astype(np.float64)
        self._size += float(np.vdot(wide, wide))
        wide -= given.astype(np.float64)
        self._error += float(np.vdot(wide, wide))

    @property
    def l2(self) -> float:
        return (
            math.sqrt(self._error / self._size)
            if self._size
            else (0.0 if self._error == 0 else math.inf)
        )


def sample(values: Array) -> Array:
    """Evenly spread blocks of a 1-D array; all of it where it is no larger."""
    if values.size <= SAMPLE_BLOCKS * SAMPLE_BLOCK:
        return values
    starts = np.linspace(0, values.size - SAMPLE_BLOCK, SAMPLE_BLOCKS).astype(np.int64)
    taken: Array = values[(starts[:, None] + np.arange(SAMPLE_BLOCK)).reshape(-1)]
    return taken


def _as_count(value: object) -> int | None:
    """A step count that is kept as an integer or as a float, ``None`` where it is none or before
    the first step.
    """
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 1:
        return None
    return int(value)
