"""Capture weight, m and v of a parameter as one group, whose changes follow from Adam's law."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from deltacheck.codec import adam_law
from deltacheck.codec.adam_law import Law, Sample
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import adam
from deltacheck.policy.decide import Decision
from deltacheck.save.job.source import Coded
from deltacheck.save.treatment.lossy_save import ParameterSave

# Tried if the state does not hold them, as with optax.
_BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.99), (0.8, 0.999), (0.8, 0.95))
_EPS = 1e-8
_F32 = np.dtype(np.float32)


class LawCapture:
    """The group of one parameter.

    Args:
        group: The parameter, and its save.
        steps_apart: The updates since the last save; ``None``: unknown.
    """

    def __init__(self, group: ParameterSave, steps_apart: int | None) -> None:
        self._group = group
        self._steps_apart = steps_apart

    def capture(self, path: str, decision: Decision) -> Any:
        """Store the group under the path of its weight, and nothing of m and v."""
        return self._capture_part(path, decision) if decision.of else self._capture_group(path)

    def _capture_part(self, path: str, decision: Decision) -> Coded:
        self._promise(path, decision)
        return Coded(None, None)

    def _capture_group(self, path: str) -> Coded:
        group = self._group
        paths = (path, group.parameter.first or "", group.parameter.second or "")
        memory, contents = group.together(*paths)
        content = memory.grouped(contents)
        self._promise(path, group.decisions[path])
        elements = math.prod(group.spec(path).shape)

        def law(base: Any) -> Law | None:
            places = adam_law.sample_places(elements)
            before = group.save.reader.memory_of(base).picked(base, _F32, places)
            return self._law_of(path, Sample(before, memory.picked(content, _F32, places)))

        spec = LeafSpec.of(path, adam_law.group_shape(elements), "float32")
        return Coded(spec, content, law=law)

    def _promise(self, path: str, decision: Decision) -> None:
        group = self._group
        derived = group.derived(path, decision, digest=group.digest(path), part=decision.part)
        group.save.promise(path, derived, None)

    def _law_of(self, path: str, sample: Sample) -> Law | None:
        """Return the law of a group since the save before."""
        constants, run = self._group.situation.hyperparameters, self._group.save.run
        betas: tuple[tuple[float, float], ...] = _BETAS
        if constants.beta1 is not None and constants.beta2 is not None:
            betas = ((constants.beta1, constants.beta2),)
        eps, step = _EPS if constants.eps is None else constants.eps, self._group.situation.step
        if step is not None and step > 0:
            eps *= adam.bias_correction(step, betas[0][1]) ** 0.5
        if self._steps_apart in (None, 1):
            last_law = run.laws.get(path)
            one_step = adam_law.find(sample, betas, eps, one_step=True, last_law=last_law)
            if one_step is not None:
                run.laws[path] = one_step
                return one_step
        return adam_law.find(sample, betas, eps, one_step=False)
