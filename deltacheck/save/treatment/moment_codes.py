"""The codes of the two moments of one parameter, as its decisions ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deltacheck.codec.lossy import octaves, ratios
from deltacheck.leaf.contracts import Bounded
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.decide import Decision
from deltacheck.restore import derive
from deltacheck.save.treatment.error_measures import Array
from deltacheck.store.manifest import Derived

_ROUNDING = 1e-6  # of a step, since values are float32
_MOST_CLIPPED = 0.2  # of a limit, by which a value may exceed it


class MomentCoded(NamedTuple):
    """The codes of one moment.

    Attributes:
        codes: In the shape of the values, 1-D.
        largest_error: In the unit of the form: octaves, or roots of the second moment.
    """

    codes: Array
    largest_error: float


@dataclass(frozen=True, slots=True)
class MomentCodes:
    """The forms of the moments of one parameter at one save.

    Args:
        decisions: The decisions for both moments, by path.
        specs: The specs of the live moments, by path.
        correction: 1 - b2^t of Adam, the share of the mean squared gradient that v holds; 1 if it
            is unknown. Codes of a second moment are of what it would be without that growth from
            zero. So a young moment does not cross cells by growing, and a reused one stands for the
            present (law 5).
        derived: Returns how a restore computes a leaf that is kept as decided, with further fields.
    """

    decisions: Mapping[str, Decision]
    specs: Mapping[str, LeafSpec]
    correction: float
    derived: Callable[..., Derived]

    def spec(self, path: str) -> LeafSpec:
        """Return the form of the codes of a moment."""
        decision = self.decisions[path]
        dtype = (
            "int8" if decision.how == "ratio" else octaves.code_dtype(decision.fraction_bits).name
        )
        return LeafSpec.of(path, self.specs[path].shape, dtype)

    def rule(self, path: str) -> Derived:
        """Return how a restore computes a moment."""
        decision = self.decisions[path]
        if decision.how == "ratio":
            # The root of a second moment grows as its bias vanishes, and the first moment must not.
            return self.derived(path, decision, spacing=decision.spacing / self.correction**0.5)
        return self.derived(path, decision, scale=self._scale(decision))

    def in_order(self) -> list[str]:
        """Return the paths of the moments, a moment that another one follows from first."""
        sources = {path: self.rule(path).sources for path in self.decisions}
        return sorted(sources, key=lambda path: len(sources[path]))

    def encode(
        self,
        path: str,
        live: Array,
        codes: Mapping[str, Array],
        base: Array | None = None,
    ) -> MomentCoded | None:
        """Return the codes of a moment; ``None`` if it has none within its contract.

        Args:
            path: Its path.
            live: Its values, or some of them, 1-D.
            codes: The codes of the same elements of the moments before it (``in_order``).
            base: Its stored codes, which stay if they are close enough.
        """
        decision = self.decisions[path]
        if decision.how == "ratio":
            rule = self.rule(path)
            second = self.restored({rule.of: codes[rule.of]})[rule.of]
            ratio = ratios.codes(live, second, rule.spacing, limit=rule.limit)
            # Of a value without a limit, the error is at most half a step. The limit of a second
            # moment that is coded too small by half an octave is too small by a sixth.
            largest = max((0.5 + _ROUNDING) * rule.spacing, _MOST_CLIPPED * math.sqrt(rule.limit))
            if ratio.refused or ratio.largest_error > largest:
                return None
            return MomentCoded(ratio.codes, ratio.largest_error)
        scale = self._scale(decision)
        encoding = octaves.codes(
            live if scale == 1.0 else live * np.float32(1 / scale),
            fraction_bits=decision.fraction_bits,
            signed=decision.signed,
            base=base,
            dead_band=decision.dead_band,
        )
        limit = decision.terms.limit if isinstance(decision.terms, Bounded) else np.inf
        if encoding.refused or encoding.largest_error_octaves > limit:
            return None
        return MomentCoded(encoding.codes, encoding.largest_error_octaves)

    def restored(self, codes: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values that a restore would compute from the codes of one moment, or both.

        One is enough if it does not follow from the other.
        """
        values: dict[str, Array] = {}
        for path in (path for path in self.in_order() if path in codes):
            values[path] = derive.compute(self.rule(path), codes[path], values, 0, codes[path].size)
        return values

    def _scale(self, decision: Decision) -> float:
        """Return the factor by which the values of octave codes are multiplied."""
        return 1.0 if decision.signed else self.correction
