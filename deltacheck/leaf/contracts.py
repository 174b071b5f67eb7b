"""Contracts: the accuracy that a restore promises for a leaf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

# Permanent names of norms (docs/reference/format.md).
NORMS = ("lr", "octaves", "updates", "max", "l2")


class Exact(msgspec.Struct, frozen=True, tag_field="contract", tag="exact"):
    """The contract that a restore returns every bit of the leaf."""


class Bounded(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="contract", tag="bounded"):
    """The contract that a restore returns values with a bounded error.

    The save measures the error. In the formulas, ``x`` is the saved value and ``x'`` the restored
    one.

    Args:
        limit: The largest error. Larger: smaller checkpoints; smaller: a restored run that deviates
            less.
        norm: The measure of the error. ``"lr"``: the largest ``|x' - x|`` in units of the learning
            rate. ``"octaves"``: the largest ``|log2(x' / x)|``. ``"updates"``:
            of a first moment, the largest change of an update of Adam, in learning rates:
            ``|x' - x| / (1 - b1^t) / sqrt(v / (1 - b2^t))`` after ``t`` updates. Without a count of
            updates, ``t`` is infinite. Where ``v`` is below 2^-126, values below 2^-60 count as
            zero. ``"max"``: the largest ``|x' - x|`` divided by the largest ``|x|`` of the leaf.
            ``"l2"``: ``||x' - x|| / ||x||``.
        rate: The learning rate that is the unit of the norm ``"lr"``. ``None``: that of the saved
            state. Otherwise it is a share of the largest rate that the run has had, or the smallest
            rate of several groups that may be the leaf's.
    """

    limit: float
    norm: str
    rate: float | None = None  # None, because msgspec would write a 0.0 that is the default


class Reused(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="contract", tag="reused"):
    """The contract that a restore returns the values of an earlier step.

    Args:
        max_age_steps: The largest age of the values, in updates of the optimizer. Larger: fewer
            bytes; smaller: a newer state.
        max_drift: The largest median of ``|log2(x' / x)|`` over sampled elements. ``None``: only
            the age is limited, which suits first moments, as they change entirely in ten steps.
    """

    max_age_steps: int
    max_drift: float | None = None


Contract: TypeAlias = Exact | Bounded | Reused

RANK = ("exact", "bounded", "reused")  # from the strongest promise to the weakest


def weakest_of(promises: Iterable[Promise]) -> str:
    """Return the name of the weakest contract of some leaves, ``exact`` if none has a promise."""
    return max((name_of(promise.terms) for promise in promises), key=RANK.index, default=RANK[0])


def name_of(contract: Contract) -> str:
    """Return the name of the kind of a contract, as in ``RANK``."""
    return RANK[(Exact, Bounded, Reused).index(type(contract))]


class PeakRate(msgspec.Struct, frozen=True):
    """The course of the learning rate of one parameter group, for the saves that follow.

    Args:
        peak: The largest rate since the run, its optimizer or its schedule began.
        newest: The rate of the step.
        count: The optimizer's count of updates at the step; the training step if it keeps none.
    """

    peak: float
    newest: float
    count: int


class Promise(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contract of a leaf in one step, with the measured error. Leaves without one are exact.

    Args:
        terms: The contract.
        measured: The error in the contract's norm; for a reused leaf, its drift.
        from_step: The step whose values a reused leaf has.
        age_steps: The age of these values in updates of the optimizer. ``None``: it equals the
            distance of both steps.
    """

    terms: Bounded | Reused
    measured: float
    from_step: int | None = None
    age_steps: int | None = None

    def age(self, step: int) -> int:
        """Return the age of a reused leaf's values, in updates of the optimizer; else 0."""
        # Without ``from_step``, the values are those of the step itself.
        if self.from_step is None:
            return 0
        return step - self.from_step if self.age_steps is None else self.age_steps

    def used(self, step: int) -> float:
        """Return the share of the allowed error that a step uses; above 1, it is exceeded."""
        if isinstance(self.terms, Bounded):
            return self.measured / self.terms.limit
        age = self.age(step) / max(1, self.terms.max_age_steps)
        return (
            age if self.terms.max_drift is None else max(age, self.measured / self.terms.max_drift)
        )

    @property
    def allowed(self) -> str:
        """Return a description of the allowed error."""
        if isinstance(self.terms, Bounded):
            unit = f" of {self.terms.rate:.3g}" if self.terms.rate else ""
            return f"{self.terms.limit:g} {self.terms.norm}{unit}"
        drift = "" if self.terms.max_drift is None else f"{self.terms.max_drift:g} octaves, "
        return f"{drift}{self.terms.max_age_steps} steps"
