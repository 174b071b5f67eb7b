"""Capture weight, m and v of a parameter as one group, whose changes follow from Adam's law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deltacheck.codec import adam_law
from deltacheck.codec.adam_law import F32, Law
from deltacheck.codec.base import U8
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import adam
from deltacheck.policy.decide import Decision
from deltacheck.save.job.source import Coded
from deltacheck.save.treatment.lossy_save import ParameterSave

# Tried if the state does not hold them, as with optax.
_BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.99), (0.8, 0.999), (0.8, 0.95))
_EPS = 1e-8


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
        content = adam_law.grouped([group.live(member) for member in paths])
        self._promise(path, group.decisions[path])
        spec = LeafSpec.of(path, content.shape, "float32")
        return Coded(spec, content.reshape(-1).view(np.uint8), law=self._law_of(path, content))

    def _promise(self, path: str, decision: Decision) -> None:
        group = self._group
        digest = group.save.digest(group.sources[path])
        derived = group.derived(path, decision, digest=digest, part=decision.part)
        group.save.promise(path, derived, None)

    def _law_of(self, path: str, content: F32) -> Callable[[U8], Law | None]:
        """Return a function that finds the law from the group of the save before."""
        constants, run = self._group.situation.hyperparameters, self._group.save.run
        betas: tuple[tuple[float, float], ...] = _BETAS
        if constants.beta1 is not None and constants.beta2 is not None:
            betas = ((constants.beta1, constants.beta2),)
        eps, step = _EPS if constants.eps is None else constants.eps, self._group.situation.step
        if step is not None and step > 0:
            eps *= adam.bias_correction(step, betas[0][1]) ** 0.5

        def law(base: U8) -> Law | None:
            before = adam_law.as_group(base, content.shape)
            if self._steps_apart in (None, 1):
                last_law = run.laws.get(path)
                one_step = adam_law.find(
                    before, content, betas, eps, one_step=True, last_law=last_law
                )
                if one_step is not None:
                    run.laws[path] = one_step
                    return one_step
            return adam_law.find(before, content, betas, eps, one_step=False)

        return law
