"""What a save promises: the presets that users choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltacheck.leaf.contracts import Exact

if TYPE_CHECKING:
    from deltacheck.profile.record import Profile

MOMENTS = ("exact", "bounded", "reused", "dropped")
WEIGHTS = ("exact", "bounded")

# Largest error of a bounded master: runs that were killed and resumed with it stayed within the
# noise between data orders, and no element of theirs moved by 50 learning rates, where harm begins
# (docs/explanation/stability.md).
MASTER_ERROR_LR = 32.0

# Where everything changes, a restore then decodes seven times the state at most, and not 33 times;
# four to six deltas follow each keyframe.
RESTORE_RATIO = 6.0


@dataclass(frozen=True, slots=True)
class Hidden:
    """How the state behind the weights is kept once a run is stable; see ``Policy.model_exact`` for
    what the fields mean.
    """

    weights: str
    moments: str
    master_error_lr: float
    moment_error_octaves: float
    max_drift_octaves: float
    max_age_steps: int
    stable_from: int | None
    leaves: frozenset[str] | None
    betas: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Policy:
    """What a save promises and how long its chains may grow. Make one with a preset.

    ``hidden``: ``None`` where every leaf is restored bit for bit. ``max_chain_depth``: most deltas
    that a restore applies to a leaf. Larger: fewer keyframes to write, longer restore, more
    segments that a step depends on. ``derive``: whether weights that are the cast of their master
    are left out of what is stored, and computed, proven by their digest, at a restore. Fewer bytes;
    plain zarr finds no weights then. ``max_restore_reads``: most arrays of deltas that a restore
    opens beside the keyframes. Smaller: a faster restore, above all from storage with slow
    requests; more leaves written whole. ``max_restore_ratio``: most that a restore decodes of a
    leaf's deltas, in units of the leaf's own bytes; the delta that reaches it is the last.
    ``None``: what the depth allows. A delta of a leaf that changes everywhere counts as one, where
    few words change as a few hundredths. Smaller: faster restores; larger: fewer bytes where
    everything changes.
    """

    max_chain_depth: int
    hidden: Hidden | None = None
    derive: bool = False
    max_restore_reads: int | None = None
    max_restore_ratio: float | None = RESTORE_RATIO

    @property
    def is_exact(self) -> bool:
        """Whether every leaf is stored as it is, whatever the others are."""
        return self.hidden is None and not self.derive

    @classmethod
    def exact(
        cls,
        max_chain_depth: int = 32,
        *,
        derive: bool = False,
        max_restore_reads: int | None = None,
        max_restore_ratio: float | None = RESTORE_RATIO,
    ) -> Policy:
        """Lossless: every leaf is restored bit for bit. Raises ``ValueError`` for a limit below 0
        (0: every save writes keyframes).
        """
        return cls(**_checked(max_chain_depth, max_restore_reads, max_restore_ratio), derive=derive)

    @classmethod
    def model_exact(
        cls,
        *,
        moments: str = "reused",
        master_error_lr: float = MASTER_ERROR_LR,
        moment_error_octaves: float = 0.5,
        max_drift_octaves: float = 0.1,
        max_age_steps: int = 200,
        stable_from: int | None = None,
        betas: tuple[float, float] | None = None,
        max_chain_depth: int = 32,
        max_restore_reads: int | None = None,
        max_restore_ratio: float | None = RESTORE_RATIO,
    ) -> Policy:
        """What the forward pass sees is restored bit for bit; optimizer state that it does not see
        is
        bounded or reused, once it is stable.

        Until then, and after every event that makes the run unstable (a jump of loss, gradient norm
        or learning rate, a NaN, a resume), everything is exact. So are, always, the weights, step
        counts, schedules, generators, everything small or of one axis, and all that is not known to
        be Adam's.

        ``moments``: of Adam. ``"reused"``: mean and mean of squares (m, v) are written as a pair
        when they have drifted, and at least every ``max_age_steps``; between, a restore gives the
        earlier pair. ``"bounded"``: both at every save, within ``moment_error_octaves``; the
        largest files, the closest resume. ``"dropped"``: v bounded, m zero after a restore, which
        costs a resumed run about 1 / (1 - beta1) steps of progress, once. ``"exact"``: only master
        weights are bounded. ``master_error_lr``: largest error of a float32 master weight, in units
        of the learning rate; it never leaves the cell of its exact bfloat16 weight. Larger: fewer
        bytes, more noise on resume. ``moment_error_octaves``: of v, as ``|log2|`` of the ratio; m
        has 0.6. ``max_drift_octaves``: how far v may have moved (the median) while it is reused,
        beside that error. Larger: fewer bytes, an older state. ``max_age_steps``: 0 takes what
        Adam's memory permits. ``stable_from``: first step at which anything may be inexact
        (default: found from the drift of v). ``betas``: of Adam, where the state does not tell
        (optax). Saves take the learning rate from the state, or from ``metrics={"learning_rate":
        ...}``; without it masters stay exact.

        Raises ``ValueError`` for values out of range.
        """
        hidden = Hidden(
            "exact",
            moments,
            master_error_lr,
            moment_error_octaves,
            max_drift_octaves,
            max_age_steps,
            stable_from,
            None,
            betas,
        )
        limits = _checked(max_chain_depth, max_restore_reads, max_restore_ratio)
        return cls(**limits, hidden=_checked_hidden(hidden))

    @classmethod
    def post_training(
        cls,
        profile: Profile,
        *,
        weights: str = "exact",
        moments: str = "reused",
        master_error_lr: float = MASTER_ERROR_LR,
        moment_error_octaves: float = 0.5,
        max_drift_octaves: float = 0.1,
        max_age_steps: int = 200,
        max_chain_depth: int = 32,
        max_restore_reads: int | None = None,
        max_restore_ratio: float | None = RESTORE_RATIO,
    ) -> Policy:
        """What the profile of an earlier run allows: its stable set, from its stable start on.
        Everything else is exact.

        ``weights``: ``"exact"`` or ``"bounded"``: then bfloat16 weights are the cast of the bounded
        master and are not stored; fewer bytes where many weights move between saves, and the
        forward pass after a restore is not the one that was saved. Masters then err by no more than
        half a unit in the last place of a typical weight, or 8 learning rates. The others: as
        ``model_exact`` has them. A profile without a stable start, or of an unknown optimizer,
        gives an exact policy.

        Raises ``ValueError`` for values out of range.
        """
        stable = frozenset(
            path for path, leaf in profile.leaves.items() if not isinstance(leaf.recommended, Exact)
        )
        betas = (
            None
            if profile.optimizer is None
            else (profile.optimizer.beta1, profile.optimizer.beta2)
        )
        hidden = Hidden(
            weights,
            moments,
            master_error_lr,
            moment_error_octaves,
            max_drift_octaves,
            max_age_steps,
            profile.stable_start,
            stable,
            betas,
        )
        kept = None if profile.stable_start is None or betas is None else _checked_hidden(hidden)
        limits = _checked(max_chain_depth, max_restore_reads, max_restore_ratio)
        return cls(**limits, hidden=kept, derive=True)


def _checked(
    max_chain_depth: int, max_restore_reads: int | None, max_restore_ratio: float | None
) -> dict[str, Any]:
    """The limits of a chain by their names."""
    for limit in (max_chain_depth, max_restore_reads or 0):
        if limit < 0:
            raise ValueError(
                f"max_chain_depth and max_restore_reads must be at least 0, not {limit}"
            )
    if max_restore_ratio is not None and not max_restore_ratio > 0:
        raise ValueError(
            f"max_restore_ratio must be above 0, not {max_restore_ratio}; max_chain_depth=0 writes"
            " every leaf whole"
        )
    return {
        "max_chain_depth": max_chain_depth,
        "max_restore_reads": max_restore_reads,
        "max_restore_ratio": max_restore_ratio,
    }


def _checked_hidden(hidden: Hidden) -> Hidden:
    if hidden.weights not in WEIGHTS or hidden.moments not in MOMENTS:
        raise ValueError(
            f"weights must be one of {', '.join(WEIGHTS)} and moments one of {', '.join(MOMENTS)}, "
            f"not {hidden.weights!r} and {hidden.moments!r}"
        )
    if (
        not hidden.master_error_lr > 0
        or not 0 < hidden.max_drift_octaves < 8
        or not 0.02 <= hidden.moment_error_octaves <= 2
    ):
        raise ValueError(
            "master_error_lr must be above 0, max_drift_octaves from 0 to 8 and"
            f" moment_error_octaves from 0.02 to 2, not {hidden.master_error_lr},"
            f" {hidden.max_drift_octaves} and {hidden.moment_error_octaves}"
        )
    if hidden.max_age_steps < 0:
        raise ValueError(f"max_age_steps must be at least 0, not {hidden.max_age_steps}")
    return hidden
