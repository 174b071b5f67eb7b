"""The codes of the two moments of one parameter, as its decisions ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from deltacheck.codec import derivation
from deltacheck.codec.derivation import Derived
from deltacheck.codec.lossy import octaves, ratios
from deltacheck.leaf.contracts import Bounded, Reused
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.decide import Decision
from deltacheck.save.treatment.error_measures import Array, largest_octaves, largest_update_change

_ROUNDING = 1e-6  # of a step, since values are float32
_MOST_CLIPPED = 0.2  # of a limit, by which a value may exceed it
_BLOCK = 1 << 15  # elements that are measured at a time, in the cache


@dataclass(frozen=True, slots=True)
class MomentCodes:
    """The forms of the moments of one parameter at one save.

    Args:
        decisions: The decisions for both moments, by path; that for a first moment names the second
            one (``of``).
        specs: The specs of the live moments, by path.
        correction: 1 - b2^t of Adam, the share of the mean squared gradient that v holds; 1 if it
            is unknown. Codes of a second moment are of what it would be without that growth from
            zero. So a young moment does not cross cells by growing, and a reused one stands for the
            present (law 5).
        unit: The change of m, in units of the root of v, that changes an update by one learning
            rate (``adam.update_unit``).
        derived: Returns how a restore computes a leaf that is kept as decided, with further fields.
    """

    decisions: Mapping[str, Decision]
    specs: Mapping[str, LeafSpec]
    correction: float
    unit: float
    derived: Callable[..., Derived]

    def spec(self, path: str) -> LeafSpec:
        """Return the form of the codes of a moment."""
        rule = self.rule(path)
        (dtype,) = derivation.RULES[rule.how].code_dtypes(rule)
        return LeafSpec.of(path, self.specs[path].shape, dtype)

    def rule(self, path: str) -> Derived:
        """Return how a restore computes a moment."""
        decision = self.decisions[path]
        if not decision.of:
            return self.derived(path, decision, scale=self.correction)
        # The root of a second moment grows as its bias vanishes, and a reused first moment must
        # not.
        unit = self.correction**-0.5 if isinstance(decision.terms, Reused) else self.unit
        return self.derived(path, decision, spacing=decision.spacing * unit)

    def in_order(self) -> list[str]:
        """Return the paths of the moments, a moment that another one follows from first."""
        return sorted(self.decisions, key=lambda path: bool(self.decisions[path].of))

    def encode(
        self, path: str, live: Array, codes: Mapping[str, Array], base: Array | None = None
    ) -> Array | None:
        """Return the codes of a moment, 1-D; ``None`` if it has none.

        ``largest_error`` tells whether they keep a contract.

        Args:
            path: Its path.
            live: Its values, or some of them, 1-D.
            codes: The codes of the same elements of the moments before it (``in_order``).
            base: Its stored codes, which stay if they are close enough.
        """
        decision = self.decisions[path]
        if decision.of:
            rule = self.rule(path)
            second = self.restored({rule.of: codes[rule.of]})[rule.of]
            ratio = ratios.codes(live, second, rule.spacing, limit=rule.limit)
            # Of a value without a limit, the error is at most half a step. The limit of a second
            # moment that is coded too small by half an octave is too small by a sixth.
            largest = max((0.5 + _ROUNDING) * rule.spacing, _MOST_CLIPPED * math.sqrt(rule.limit))
            if ratio.refused or ratio.largest_error > largest:
                return None
            return ratio.codes
        scale = self.correction
        encoding = octaves.codes(
            live if scale == 1.0 else live * np.float32(1 / scale),
            fraction_bits=decision.fraction_bits,
            base=base,
            dead_band=decision.dead_band,
        )
        return None if encoding.refused else encoding.codes

    def largest_errors(
        self, codes: Mapping[str, Array], live: Callable[[str], Array]
    ) -> dict[str, float] | None:
        """Return the largest error of each bounded moment, as a restore computes it.

        Args:
            codes: The codes of all moments, by path.
            live: Returns the live values of a moment.

        Returns:
            Leaf path -> error in the norm of its contract; ``None`` if one breaks its contract.
        """
        limits = {
            path: decision.terms.limit
            for path, decision in self.decisions.items()
            if isinstance(decision.terms, Bounded)
        }
        values = {path: live(path) for path in limits}
        errors = dict.fromkeys(limits, 0.0)
        for block in _blocks(min((v.size for v in values.values()), default=0)):
            restored = self.restored({path: codes[path][block] for path in codes})
            for path in limits:
                before, second = values[path][block], self.decisions[path].of
                error = (
                    largest_update_change(before, restored[path], values[second][block]) / self.unit
                    if second
                    else largest_octaves(before, restored[path])
                )
                # "not <=" and not ">", which a NaN would pass.
                if not error <= limits[path]:
                    return None
                errors[path] = max(errors[path], error)
        return errors

    def restored(self, codes: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values that a restore would compute from the codes of one moment, or both.

        One is enough if it does not follow from the other.
        """
        values: dict[str, Array] = {}
        for path in (path for path in self.in_order() if path in codes):
            rule = self.rule(path)
            values[path] = derivation.compute(rule, codes[path], values.get(rule.of), 0)
        return values


def _blocks(size: int) -> Iterator[slice]:
    return (slice(begin, begin + _BLOCK) for begin in range(0, size, _BLOCK))
