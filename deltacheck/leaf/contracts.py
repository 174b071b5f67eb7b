"""What a restore promises of a leaf: all bits, a bounded error, or the values of an earlier
step.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

# Permanent names of norms. ``x'`` is what a restore gives, ``x`` what was live at the step.
NORMS = ("lr", "octaves", "max", "l2")


class Exact(msgspec.Struct, frozen=True, tag_field="contract", tag="exact"):
    """Bit for bit."""


class Bounded(msgspec.Struct, frozen=True, tag_field="contract", tag="bounded"):
    """Every element within ``limit`` of what it was, measured against the values that a restore
    gives.

    ``norm``: ``"lr"``: largest ``|x' - x|`` in units of the learning rate; ``"octaves"``: largest
    ``|log2(x' / x)|``, where first moments below 2^-100 count as zero; ``"max"``: largest ``|x' -
    x|`` over the largest ``|x|`` of the leaf; ``"l2"``: ``||x' - x|| / ||x||``. Larger limit:
    smaller checkpoints, a restored run that deviates more.
    """

    limit: float
    norm: str


class Reused(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="contract", tag="reused"):
    """The values of an earlier step: at most ``max_age_steps`` old, and drifted by no more than
    ``max_drift``.

    ``max_drift``: in the median of ``|log2(x' / x)|`` over sampled elements, ``None`` where age
    alone is promised: a first moment is another one after ten steps. Larger: fewer bytes, an older
    state.
    """

    max_age_steps: int
    max_drift: float | None = None


Contract: TypeAlias = Exact | Bounded | Reused

RANK = ("exact", "bounded", "reused")  # from the strongest promise to the weakest


def name_of(contract: Contract) -> str:
    return RANK[(Exact, Bounded, Reused).index(type(contract))]


class Promise(msgspec.Struct, frozen=True, omit_defaults=True):
    """A leaf's contract in one step, and what was measured. Leaves without one are exact.

    ``measured``: the error, in the contract's norm; for a reused leaf its drift. ``from_step``: the
    step whose values a reused leaf holds.
    """

    terms: Bounded | Reused
    measured: float
    from_step: int | None = None

    def used(self, step: int) -> float:
        """The largest share of what the contract allows that ``step`` takes: above 1 it does not
        hold.
        """
        if isinstance(self.terms, Bounded):
            return self.measured / self.terms.limit
        age = (step - (step if self.from_step is None else self.from_step)) / max(
            1, self.terms.max_age_steps
        )
        return (
            age if self.terms.max_drift is None else max(age, self.measured / self.terms.max_drift)
        )

    @property
    def allowed(self) -> str:
        """What the contract allows, in words."""
        if isinstance(self.terms, Bounded):
            return f"{self.terms.limit:g} {self.terms.norm}"
        drift = "" if self.terms.max_drift is None else f"{self.terms.max_drift:g} octaves, "
        return f"{drift}{self.terms.max_age_steps} steps"
