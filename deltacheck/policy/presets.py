"""The presets of a policy: the promises of a save that users choose from."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltacheck.profile.record import Profile

MOMENTS = ("exact", "bounded", "reused")
WEIGHTS = ("exact", "bounded")

# The largest error of a bounded master. Runs that were killed and resumed with it stayed within the
# noise between data orders, and none of their elements moved by 50 learning rates, where harm
# begins (docs/lab/stability.md).
MASTER_ERROR_LR = 32.0

# The largest error of a master for each update that its optimizer has made, in learning rates. Runs
# that resumed after 10, 20 and 30 updates lost at most 0.2 steps of progress with it, and up to 2.1
# with MASTER_ERROR_LR. With twice as much, losses grew by more than the noise between data orders
# (docs/lab/stability.md, "Early states").
ERROR_PER_UPDATE = 0.5

# The unit of a master's error is at least this share of the largest learning rate of the run. With
# MASTER_ERROR_LR, no master then errs by more than about one update at that rate. Runs that resumed
# with it in the last tenth of a cosine ended far within the noise between data orders
# (docs/lab/stability.md).
RATE_FLOOR = 1 / 32

# Spacing of first moments, in learning rates of the update m / sqrt(v) that they cause. They are
# fresh noise every ten steps, so more precision would be wasted: a first moment that is reused
# costs a resumed run as many steps with this spacing as without any (docs/lab/stability.md,
# "Precision of a reused first moment"), and at twice this spacing one more.
MEAN_SPACING = 0.5

# Steps of progress that a resume costs if the state is within bounds, or if moments are those of an
# earlier step: what was measured, for people (docs/lab/stability.md, "Early states" and "Precision
# of a reused first moment").
LOST_STEPS = {"bounded": "0 to 0.7", "reused": "2 to 3.5"}

# If every word changes, a restore then decodes at most seven times the state instead of 33 times,
# and four to six deltas follow each keyframe.
RESTORE_RATIO = 6.0


@dataclass(frozen=True, slots=True)
class Hidden:
    """The treatment of the state behind the weights once a run is stable.

    Attributes:
        weights: ``"exact"`` or ``"bounded"``, see ``Policy.auto``.
        float32_weights: The same for weights without a bfloat16 copy.
        moments: One of ``MOMENTS``, see ``Policy.auto``.
        master_error_lr: The largest error of a master weight, in learning rates. The first updates
            permit less: ``ERROR_PER_UPDATE`` for each.
        moment_error_octaves: The largest error of a second moment, in octaves.
        max_drift_octaves: The largest drift of a reused second moment, in octaves.
        max_age_steps: The largest age of reused moments in updates; 0: only v's memory limits it.
        stable_from: The first step at which moments may be reused, ``None`` to detect it.
        steady_from: The step from which a profile found the moments stable, ``None`` without one.
        leaves: Paths of the leaves that may be inexact, ``None`` for all.
        betas: The constants of Adam if the state does not hold them.
        rate_floor: The least unit of ``master_error_lr``, as a share of the largest learning rate.
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
    steady_from: int | None = None
    float32_weights: str = "exact"
    rate_floor: float = RATE_FLOOR

    @property
    def mean_error_updates(self) -> float:
        """The largest error of a first moment that is written at every save, in updates.

        A code errs by at most half a spacing, in units of the root of v as it is restored.
        """
        error = 0.5 * MEAN_SPACING * math.exp2(self.moment_error_octaves / 2)
        return (math.floor(100 * error) + 1) / 100


@dataclass(frozen=True, slots=True)
class Policy:
    """The promises of a save and the limits of its delta chains.

    Make one with a preset: ``Policy.exact`` or ``Policy.auto``.

    Args:
        max_chain_depth: The largest number of deltas that a restore applies to a leaf. Larger:
            fewer keyframes to write, longer restores, more segments that a step depends on;
            smaller: the opposite. 0: every save writes keyframes.
        hidden: The treatment of the state behind the weights. ``None`` (default): every leaf is
            restored bit for bit.
        derive: If True, weights that are the cast of their master are not stored. A restore
            computes them and proves them by their digest: fewer bytes, but plain zarr finds no
            weights. If False (default), every weight is stored: more bytes, readable by zarr.
        max_restore_ratio: The largest amount that a restore decodes of a leaf's deltas, in units of
            the leaf's own bytes (default: 6). The delta that reaches it is the last of its chain. A
            delta of a leaf that changes everywhere counts as 1; if few words change, it counts as
            a few hundredths. Smaller: faster restores; larger: fewer bytes if everything changes.
            ``None``: only ``max_chain_depth`` limits the chain.
        merge_deltas: If True (default), deltas are merged behind the training before a chain
            reaches a limit: a long run writes fewer keyframes and fewer bytes, but reads what is
            stored beside the training. If False, the leaf is written whole at the limit.
        law: If True, weight, m and v of a parameter of Adam are stored together and predicted from
            the save before, and weights that are the cast of their master are not stored: far
            fewer bytes if steps are saved one by one, but plain zarr finds none of these leaves.
            While the prediction holds, their chains may be four times as long as the limits say. If
            False (default), every leaf is stored by itself.
    """

    max_chain_depth: int
    hidden: Hidden | None = None
    derive: bool = False
    max_restore_ratio: float | None = RESTORE_RATIO
    merge_deltas: bool = True
    law: bool = False

    @property
    def is_exact(self) -> bool:
        """Return True if every leaf is stored as it is, independently of other leaves."""
        return self.hidden is None and not self.derive and not self.law

    def promises(self) -> list[str]:
        """Return what a restore gives back, for people.

        Returns:
            One line for each kind of leaf.
        """
        hidden = self.hidden
        if hidden is None:
            return ["all leaves: every bit"]
        master = (
            f"within {hidden.master_error_lr:g} learning rates"
            f" ({ERROR_PER_UPDATE:g} for each update so far, if that is less)"
        )
        wide = [f"float32 weights: {master}"] if hidden.float32_weights == "bounded" else []
        narrow = (
            f"masters of bfloat16 weights: {master}, and in the cell of their weight"
            if hidden.weights == "exact"
            else f"bfloat16 weights: the cast of their master, which is {master}"
        )
        bounded = [
            f"second moments of Adam: within {hidden.moment_error_octaves:g} octaves",
            f"first moments of Adam: within {hidden.mean_error_updates:g} updates",
        ]
        reused = (
            "moments once the run is stable: those of one earlier step, at most"
            f" {hidden.max_age_steps or '1 / (1 - beta2)'} updates old; each resume then costs"
            f" {LOST_STEPS['reused']} steps of progress (measured with beta1 = 0.9)"
        )
        return [
            *wide,
            narrow,
            *(bounded if hidden.moments != "exact" else []),
            *([reused] if hidden.moments == "reused" else []),
            "all other leaves, and all leaves of a save after an event: every bit",
        ]

    @classmethod
    def exact(
        cls,
        max_chain_depth: int = 32,
        *,
        derive: bool = False,
        max_restore_ratio: float | None = RESTORE_RATIO,
        merge_deltas: bool = True,
        law: bool = False,
    ) -> Policy:
        """Return a lossless policy: every leaf is restored bit for bit.

        Args:
            max_chain_depth: The largest number of deltas that a restore applies to a leaf (default:
                32). Larger: fewer bytes to write; smaller: faster restores. 0: every save writes
                keyframes.
            derive: Omit weights that are the cast of their master (default: False). True: fewer
                bytes; False: plain zarr can read the weights.
            max_restore_ratio: The largest amount that a restore decodes of a leaf's deltas, in
                units of the leaf (default: 6), ``None`` for no limit. Smaller: faster restores;
                larger: fewer bytes.
            merge_deltas: If True (default), deltas are merged behind the training instead of
                writing keyframes at a limit: fewer bytes in a long run, but reads beside the
                training. If False: keyframes.
            law: Predict weights and moments of Adam from the save before (default: False). True: a
                save at every step takes a tenth to a quarter of the state, weights that are the
                cast of their master are omitted, and chains are up to four times as long; False:
                plain zarr can read every leaf.

        Returns:
            The policy.

        Raises:
            ValueError: If a limit is negative, or ``max_restore_ratio`` is not positive.
        """
        return cls(
            **_chain_limits(max_chain_depth, max_restore_ratio),
            derive=derive,
            merge_deltas=merge_deltas,
            law=law,
        )

    @classmethod
    def auto(  # noqa: PLR0913 - one argument per option
        cls,
        profile: Profile | None = None,
        *,
        derive: bool = True,
        weights: str = "exact",
        float32_weights: str = "exact",
        moments: str = "reused",
        master_error_lr: float = MASTER_ERROR_LR,
        rate_floor: float = RATE_FLOOR,
        moment_error_octaves: float = 0.5,
        max_drift_octaves: float = 0.1,
        max_age_steps: int = 200,
        stable_from: int | None = None,
        betas: tuple[float, float] | None = None,
        max_chain_depth: int = 32,
        max_restore_ratio: float | None = RESTORE_RATIO,
        merge_deltas: bool = True,
    ) -> Policy:
        """Return the stage-aware policy: exact weights, and optimizer state bounded or reused.

        The forward pass after a restore is bit for bit that of the save. Optimizer state that it
        does not see is bounded from the first save on: its error is measured at every save. Moments
        are reused once the run is stable. A save after an event (a jump of loss, gradient norm or
        learning rate, a NaN, a new optimizer) is exact. The following leaves are always exact:
        weights, step counts, schedules, generators, everything small or of one axis, and all
        moments that are not known to be Adam's. ``docs/explanation/policy.md`` gives the reasons.
        ``deltacheck log`` and ``deltacheck report`` show the reason of each decision.

        Saves take the learning rate from the state, or from ``metrics={"learning_rate": ...}``.
        Without it masters stay exact.

        Args:
            profile: The profile of an earlier, similar run (``deltacheck profile``). From its
                stable start on, the drift of v need not settle first. It gives the constants of
                Adam if the state does not hold them. Classes of leaves that its sensitivity
                analysis has rejected, and the moments and masters of an unknown optimizer, stay
                exact. Every save passes the same checks as without it. Default: the run is
                measured while it saves.
            derive: If True (default), weights that are the cast of an exact master are not stored:
                a restore computes them and proves them by their digest. Fewer bytes, but plain zarr
                finds no such weights. Those of a bounded master are stored, since it lies in their
                cells. False: every weight is stored.
            weights: ``"exact"`` (default): weights are restored bit for bit. ``"bounded"``:
                bfloat16 weights are the cast of the bounded master and are not stored: fewer bytes
                if many weights move between saves, but the forward pass after a restore differs
                from the saved one. Masters then err by at most half a unit in the last place of a
                typical weight, or 8 learning rates.
            float32_weights: The treatment of float32 weights without a bfloat16 copy: those of
                plain AdamW, also under float16 autocast with a gradient scaler, and the masters of
                float16 weights. ``"exact"`` (default): they are restored bit for bit, which takes
                most of the bytes of a save. ``"bounded"``: they err by at most ``master_error_lr``
                learning rates, which is measured at every save: 15 % and 33 % of the bytes in two
                runs, but the forward pass of plain AdamW after a restore differs from the saved
                one. Their error is also small beside the weights: half a unit in the last place of
                a typical bfloat16 weight, or 8 learning rates.
            moments: The treatment of Adam's moments m and v:

                - ``"bounded"``: both are written at every save, v within ``moment_error_octaves``
                  and m so that the update ``m / sqrt(v)`` errs by at most 0.3 learning rates: the
                  closest resume.
                - ``"reused"`` (default): the same until the run is stable. From then on m and v are
                  written as a pair when they have drifted, and at least every ``max_age_steps``. In
                  between, a restore gives the earlier pair: the smallest files.
                - ``"exact"``: only master weights are bounded.
            master_error_lr: The largest error of a float32 master weight, in units of the learning
                rate (default: 32). After n updates of its optimizer, a master errs by at most
                n / 2. It never leaves the cell of its exact bfloat16 weight.
                Larger: fewer bytes, more noise on resume; smaller: the opposite.
            rate_floor: The least learning rate that is the unit of ``master_error_lr``, as a share
                of the largest rate of the parameter group so far, from 0 to 1 (default: 1/32).
                Larger: fewer bytes at the end of a schedule, more noise in a run that is resumed
                there; smaller: the opposite. 0: the error follows the rate, and is 0 at rate 0.
            moment_error_octaves: The largest error of v, as ``|log2|`` of the ratio, from 0.02 to 2
                (default: 0.5). Larger: fewer bytes, a less faithful step size; smaller: the
                opposite.
            max_drift_octaves: The largest median drift of v while it is reused, in addition to
                ``moment_error_octaves``; above 0 and below 8 (default: 0.1). Larger: fewer bytes,
                an older state; smaller: the opposite.
            max_age_steps: The largest age of a reused pair in updates (default: 200), as the
                optimizer counts them, else in steps. Larger: fewer bytes, an older state; smaller:
                the opposite. 0: only Adam's memory limits the age.
            stable_from: The first step at which moments may be reused. Earlier: fewer bytes, but
                older moments while v still changes; later: the opposite. ``None`` (default): it is
                detected from the drift of v.
            betas: The constants of Adam if the state does not hold them, as with optax. ``None``
                (default): those of the profile; moments without known betas stay exact.
            max_chain_depth: As in ``Policy.exact``.
            max_restore_ratio: As in ``Policy.exact``.
            merge_deltas: As in ``Policy.exact``.

        Returns:
            The policy.

        Raises:
            ValueError: If a value is out of its range.
        """
        steady_from: int | None = None
        leaves: frozenset[str] | None = None
        if profile is not None:
            steady_from = profile.stable_start
            if betas is None and profile.optimizer is not None:
                betas = (profile.optimizer.beta1, profile.optimizer.beta2)
            rejected = {
                path for trial in profile.sensitivity if not trial.accepted for path in trial.leaves
            }
            leaves = frozenset(profile.leaves.keys() - rejected) if rejected else None
        hidden = Hidden(
            weights=weights,
            moments=moments,
            master_error_lr=master_error_lr,
            moment_error_octaves=moment_error_octaves,
            max_drift_octaves=max_drift_octaves,
            max_age_steps=max_age_steps,
            stable_from=stable_from,
            leaves=leaves,
            betas=betas,
            steady_from=steady_from,
            float32_weights=float32_weights,
            rate_floor=rate_floor,
        )
        limits = _chain_limits(max_chain_depth, max_restore_ratio)
        return cls(
            **limits, hidden=_checked_hidden(hidden), derive=derive, merge_deltas=merge_deltas
        )


def _chain_limits(max_chain_depth: int, max_restore_ratio: float | None) -> dict[str, Any]:
    """Check the limits of a chain and return them by their names."""
    if max_chain_depth < 0:
        raise ValueError(f"max_chain_depth must be at least 0, not {max_chain_depth}")
    if max_restore_ratio is not None and not max_restore_ratio > 0:
        raise ValueError(
            f"max_restore_ratio must be above 0, not {max_restore_ratio}; max_chain_depth=0 writes"
            " every leaf whole"
        )
    return {
        "max_chain_depth": max_chain_depth,
        "max_restore_ratio": max_restore_ratio,
    }


def _checked_hidden(hidden: Hidden) -> Hidden:
    """Check the ranges of all values and return the record."""
    for name, choices in (("weights", WEIGHTS), ("float32_weights", WEIGHTS), ("moments", MOMENTS)):
        value = getattr(hidden, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
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
    if not 0 <= hidden.rate_floor <= 1:
        raise ValueError(f"rate_floor must be from 0 to 1, not {hidden.rate_floor}")
    if hidden.max_age_steps < 0:
        raise ValueError(f"max_age_steps must be at least 0, not {hidden.max_age_steps}")
    return hidden


_PRESETS: dict[str, Callable[..., Policy]] = {
    "whole": lambda **options: Policy.exact(max_chain_depth=0, **options),
    "exact": Policy.exact,
    "auto": Policy.auto,
}
NAMES = tuple(_PRESETS)


def policy_of(text: str, profile: Profile | None = None) -> Policy:
    """Return the policy that a text describes.

    Args:
        text: One of ``NAMES``, and arguments of the preset: ``auto:moments=bounded``.
        profile: The profile for ``auto``.

    Raises:
        ValueError: If there is no such preset or argument, or a value is out of its range.
    """
    name, _, words = text.partition(":")
    options: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} in {text!r} is no NAME=VALUE")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[key.strip()] = value.strip()
    if name not in _PRESETS:
        raise ValueError(f"{name!r} is no policy; choose from {', '.join(NAMES)}")
    if name == "auto":
        options["profile"] = profile
    try:
        return _PRESETS[name](**options)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from error
