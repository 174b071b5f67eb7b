"""Capture the moments of an optimizer: as codes, reused from an earlier save, or exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deltacheck.leaf.contracts import Promise, Reused
from deltacheck.policy import adam
from deltacheck.policy.decide import betas, is_reusable
from deltacheck.save.job.source import Coded, LeafSource
from deltacheck.save.treatment.error_measures import Array, octaves_apart, sample
from deltacheck.save.treatment.lossy_save import ParameterSave
from deltacheck.save.treatment.moment_codes import MomentCodes
from deltacheck.save.treatment.run_state import StoredPair

# Elements of a second moment that drifted by more octaves are written alone, while the rest of the
# leaf is reused, unless their share of the leaf is larger than the second number.
_MOST_ELEMENT_DRIFT, _MOST_DRIFTED = 1.0, 1 / 8


class MomentCapture:
    """The first and the second moment of one parameter.

    Both are decided on when the first of them is captured, since their contracts hold together.

    Args:
        group: The leaves of the parameter.
        is_watched: If True, the drift of the second moment is measured (``LossySave.note_drift``).
    """

    def __init__(self, group: ParameterSave, *, is_watched: bool) -> None:
        self._group = group
        self._rescale = self._rescale_since_last()
        self._is_watched = is_watched
        self._captured: dict[str, Coded | None] | None = None
        self._live: dict[str, Array] = {}  # copies during a capture, which reads a moment often
        self._coded = {  # the moments that are stored as codes
            path: decision
            for path, decision in group.decisions.items()
            if path in (group.parameter.first, group.parameter.second)
        }

    def capture(self, path: str) -> Any:
        """Capture one moment, and the other one with it."""
        if self._captured is None:
            try:
                self._captured = self._capture_both()
            finally:
                self._live.clear()
        # Handed out once, so that the codes of this moment are freed when they are stored.
        coded = self._captured.pop(path)
        # The training may have changed the leaf since the capture of the other moment, after it
        # has made a copy, which is read here.
        return self._group.exactly(path) if coded is None else coded

    def _values(self, path: str) -> Array:
        if path not in self._live:
            self._live[path] = self._group.live(path)
        return self._live[path]

    def _capture_both(self) -> dict[str, Coded | None]:
        """Return the codes of both moments; ``None``: they are stored exactly."""
        group, decisions = self._group, self._coded
        # If either moment breaks its contract, both are exact: an update mixes the two.
        exactly = dict.fromkeys(decisions)
        if self._is_watched:
            second = str(group.parameter.second)
            group.save.note_drift(second, self._values(second), self._rescale)
        if self._breaks_adam_law():
            return exactly
        forms = self._forms()
        self._watch_for_zeros(forms)
        may_reuse = any(isinstance(decision.terms, Reused) for decision in decisions.values())
        if may_reuse and (reused := self._reuse(forms)) is not None:
            return reused
        codes: dict[str, Array] = {}
        for path in forms.in_order():
            base = group.save.reader.stored(path, forms.spec(path))
            coded = forms.encode(path, self._values(path), codes, base)
            if coded is None:
                return exactly
            codes[path] = coded
        errors = forms.largest_errors(codes, self._values)
        if errors is None:
            return exactly
        # Promises only now: the other moment may have been refused.
        for path, decision in decisions.items():
            measured, from_step = errors.get(path, 0.0), None
            if isinstance(decision.terms, Reused):
                measured = self._sampled_error(forms, path, codes)
                from_step = group.save.step
            assert decision.terms is not None
            promise = Promise(decision.terms, measured, from_step)
            group.save.promise(path, forms.rule(path), promise)
        # What is bounded at every save has another unit, so it is never reused.
        stored_pairs, name = group.save.run.stored_pairs, group.parameter.name
        stored_pairs.pop(name, None)
        if may_reuse:
            stored_pairs[name] = StoredPair(group.save.step, group.situation.step)
        # Old and new first moments have hardly anything in common.
        return {
            path: Coded(forms.spec(path), codes[path].view(np.uint8), bool(decision.of))
            for path, decision in decisions.items()
        }

    def _reuse(self, forms: MomentCodes) -> dict[str, Coded | None] | None:
        """Return the stored pair if it may still stand for the live one; else ``None``.

        The drift guard compares samples of both, and the update that each of them gives. If it
        refuses the pair, the elements that drifted far are written alone.
        """
        group, save, decisions = self._group, self._group.save, self._coded
        second = group.parameter.second
        stored_pair = save.run.stored_pairs.get(group.parameter.name)
        if stored_pair is None or group.parameter.first is None or second is None:
            return None
        age = stored_pair.age(save.step, group.situation.step)
        codes = self._stored_codes(forms) if self._is_young(age, second) else None
        if codes is None:
            return None
        # Law 8: rows that are touched for the first time have no stored moment.
        is_touched = bool(np.any((codes[second] == 0) & (self._values(second) > 0)))
        measured = None if is_touched else self._drifts(forms, codes)
        patched = None
        if measured is None:
            patched = self._with_drifted(forms, codes, second)
            measured = None if patched is None else self._drifts(forms, patched)
            if patched is None or measured is None:
                return None
            codes = patched
        age_steps = None if age == save.step - stored_pair.step else age
        for path, decision in decisions.items():
            assert isinstance(decision.terms, Reused)
            promise = Promise(decision.terms, measured[path], stored_pair.step, age_steps)
            save.promise(path, forms.rule(path), promise)
        return {
            path: Coded(forms.spec(path), None if patched is None else codes[path].view(np.uint8))
            for path in decisions
        }

    def _is_young(self, age: int | None, second: str) -> bool:
        """Return true if a stored pair of some age may stand for the live one."""
        terms = self._coded[second].terms
        assert isinstance(terms, Reused)
        # A frozen parameter has the values of its stored pair.
        is_due = self._group.situation.is_due and age != 0
        return age is not None and age <= terms.max_age_steps and not is_due

    def _stored_codes(self, forms: MomentCodes) -> dict[str, Array] | None:
        """Return the codes that are stored of both moments; ``None`` if there are not all."""
        codes: dict[str, Array] = {}
        for path in self._coded:
            stored_codes = self._group.save.reader.stored(path, forms.spec(path))
            if stored_codes is None:
                return None
            codes[path] = stored_codes
        return codes

    def _drifts(self, forms: MomentCodes, codes: Mapping[str, Array]) -> dict[str, float] | None:
        """Return the drift of a sample of both moments; ``None`` if the guard refuses it."""
        parameter = self._group.parameter
        first, second = str(parameter.first), str(parameter.second)
        restored = forms.restored({path: sample(codes[path]) for path in codes})
        live = {path: sample(self._values(path)) for path in (first, second)}
        drift = octaves_apart(live[second], restored[second])
        # 1e-8 is the default of Adam in PyTorch and in Optax.
        epsilon = self._group.situation.hyperparameters.eps or 1e-8
        change = adam.update_change(live[first], live[second], restored[second], epsilon)
        terms = self._coded[second].terms
        assert isinstance(terms, Reused)
        limit = terms.max_drift
        if drift is None or limit is None or drift > limit or change > limit:
            return None
        first_drift = octaves_apart(np.abs(live[first]), np.abs(restored[first])) or 0.0
        return {second: drift, first: first_drift}

    def _with_drifted(
        self, forms: MomentCodes, codes: Mapping[str, Array], second: str
    ) -> dict[str, Array] | None:
        """Return stored codes with the live values of the elements whose second moment drifted.

        These are mostly rows of an embedding that occur for the first or the second time.

        Returns:
            Leaf path -> codes; ``None`` if there are too many such elements, or one has no code.
        """
        # A reused second moment does not follow from the first one.
        live, restored = self._values(second), forms.restored({second: codes[second]})[second]
        ratio = np.float32(2.0**_MOST_ELEMENT_DRIFT)
        drifted = np.flatnonzero((live > restored * ratio) | (live * ratio < restored))
        if drifted.size > _MOST_DRIFTED * live.size:
            return None
        newer: dict[str, Array] = {}
        for path in forms.in_order():
            coded = forms.encode(path, self._values(path)[drifted], newer)
            if coded is None:
                return None
            newer[path] = coded
        result = {path: codes[path].copy() for path in newer}
        for path in newer:
            result[path][drifted] = newer[path]
        return result

    def _watch_for_zeros(self, forms: MomentCodes) -> None:
        """Note a second moment that is zero again: the optimizer has begun anew."""
        group, second = self._group, self._group.parameter.second
        if second is None or sample(self._values(second)).any():
            return
        codes = group.save.reader.stored(second, forms.spec(second))
        if codes is not None and sample(codes).any():
            group.save.run.zeroed.add(group.parameter.name)

    def watched(self, source: LeafSource) -> LeafSource:
        """Return the source of a second moment that is stored exactly, with its drift measured."""
        return self._group.save.watch(source, self._rescale)

    def _rescale_since_last(self) -> float | None:
        """Return the factor from the second moment of the last save to one of now.

        It is ``None`` if moments may never be reused for so long, whatever their drift, or if the
        step count was set back.
        """
        counts, name = self._group.save.run.counts, self._group.parameter.name
        last_step, step = counts.get(name), self._group.situation.step
        counts[name] = step
        hidden, coefficients = self._group.save.policy.hidden, self._betas()
        if hidden is None or coefficients is None or step is None or last_step is None:
            return None
        if not 1 <= last_step <= step or not is_reusable(hidden, step - last_step, coefficients[1]):
            return None
        return adam.bias_rescale(step, last_step, coefficients[1])

    def _forms(self) -> MomentCodes:
        """Return the forms of both moments at this save."""
        coefficients, step = self._betas(), self._group.situation.step
        correction = unit = 1.0
        if coefficients is not None and step is not None:
            correction = adam.bias_correction(step, coefficients[1])
            if self._group.parameter.count is not None:
                unit = adam.update_unit(step, *coefficients)
        specs = {path: self._group.spec(path) for path in self._coded}
        return MomentCodes(self._coded, specs, correction, unit, self._group.derived)

    def _sampled_error(self, forms: MomentCodes, path: str, codes: Mapping[str, Array]) -> float:
        """Return the median error in octaves of the decoded codes, on a sample."""
        live = sample(self._values(path))
        restored = forms.restored({path: sample(codes[path]) for path in codes})[path]
        return octaves_apart(np.abs(live), np.abs(restored)) or 0.0

    def _betas(self) -> tuple[float, float] | None:
        hidden = self._group.save.policy.hidden
        return None if hidden is None else betas(hidden, self._group.situation.hyperparameters)

    def _breaks_adam_law(self) -> bool:
        """Return true if the live moments are not those of an Adam with these betas.

        The test goes by content, because the names of leaves prove nothing (law 7).
        """
        group = self._group
        first, second = group.parameter.first, group.parameter.second
        limit = next((d.limit for d in group.decisions.values() if d.limit), None)
        if limit is None or first is None or second is None:
            return False
        violations = adam.law_violations(
            sample(self._values(first)), sample(self._values(second)), limit
        )
        return violations > 0
