"""Which leaf is kept how, at one save: pure functions from roles, stage and hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import xxhash

from deltacheck.leaf.contracts import Bounded, Reused
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import adam
from deltacheck.policy.presets import Hidden, Policy
from deltacheck.policy.roles import Hyperparameters, Parameter
from deltacheck.policy.stage import STABLE

# Smaller leaves, and those of one axis, are always exact: they weigh nothing, and norms are
# sensitive
LEAST_ELEMENTS = 1024
# Of first moments, whose codes are a sign and an exponent: they are fresh noise every ten steps
_MEAN_ERROR_OCTAVES = 0.6
# A lattice's spacing over the error that is allowed: when it is chosen, and the range in which it
# is kept. An element errs by half of it.
_SPACING, _LEAST_SPACING, _MOST_SPACING = 1.6, 0.8, 1.98
# Of weights that are the cast of a bounded master: one unit in the last place is 2^-7 at most
_CAST_ERROR = 0.02
_WEIGHT_SHARE = (
    1 / 32
)  # of the root mean square of a master, that a lattice's spacing never exceeds
# The same where weights are the cast of the bounded master: a unit in the last place of bfloat16
# (or what is small beside a few updates).
_CAST_SHARE, _CAST_SPACING_LR = 1 / 256, 16.0


@dataclass(frozen=True, slots=True)
class Decision:
    """How one leaf is kept: ``cast``, ``lattice``, ``octaves``, ``zeros`` as
    ``store.schema.Derived``
    has them, with its fields.

    ``terms``: what is promised, ``None`` where the leaf is exact. ``dead_band``: in octaves of the
    bits, within which a stored code stays.
    """

    how: str
    terms: Bounded | Reused | None
    of: str = ""
    spacing: float = 0.0
    seed: int = 0
    fraction_bits: int = 0
    signed: bool = False
    dead_band: float = 0.0
    first: str = ""
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of one parameter at one save. ``step``: of its optimizer, ``None`` where it
    does
    not say. ``spacing``: of its master's lattice so far. ``master_scale``: root mean square of the
    master, sampled.
    """

    hyperparameters: Hyperparameters
    step: int | None
    spacing: float | None
    master_scale: float


def treated(spec: LeafSpec | None, dtype: str) -> bool:
    """Whether a leaf is large enough to be kept otherwise than exactly, and of the type that its
    role has.
    """
    return (
        spec is not None
        and spec.dtype == dtype
        and len(spec.shape) >= 2
        and math.prod(spec.shape) >= LEAST_ELEMENTS
    )


def decide(
    policy: Policy,
    stage: str,
    parameter: Parameter,
    specs: Mapping[str, LeafSpec],
    situation: Situation,
) -> dict[str, Decision]:
    """How the leaves of one parameter are kept, by path; those that are not named are exact.

    Law 1: weights are never reused. Law 7: an optimizer that is not known to be Adam keeps its
    moments exactly.
    """
    master = parameter.master if treated(specs.get(parameter.master or ""), "float32") else None
    weight = (
        parameter.weight
        if master is not None and treated(specs.get(parameter.weight or ""), "bfloat16")
        else None
    )
    if weight is not None and specs[weight].shape != specs[str(master)].shape:
        weight = None
    hidden = policy.hidden
    found: dict[str, Decision] = {}
    if policy.derive and weight is not None and master is not None:
        found[weight] = Decision("cast", None, of=master)
    if hidden is None or stage != STABLE:
        return found
    if (
        master is not None
        and weight is not None
        and (hidden.leaves is None or master in hidden.leaves)
    ):
        spacing = lattice_spacing(hidden, situation)
        if spacing is not None:
            terms = Bounded(hidden.master_error_lr, "lr")
            cells = weight if hidden.weights == "exact" else ""
            found[master] = Decision(
                "lattice", terms, of=cells, spacing=spacing, seed=_seed(master)
            )
            if cells:
                found.pop(weight, None)
            else:
                found[weight] = Decision("cast", Bounded(_CAST_ERROR, "l2"), of=master)
    return found | _moments(hidden, parameter, specs, situation)


def lattice_spacing(hidden: Hidden, situation: Situation) -> float | None:
    """The spacing of a master's lattice, ``None`` where there can be none.

    As large as the learning rate permits, but small beside the weights. Kept while the error stays
    allowed and is not needlessly small, and so through a schedule's slow change: a new spacing
    makes every code new. Law 2: in units of the learning rate, on a fixed lattice.
    """
    rate = situation.hyperparameters.lr
    if not rate or not math.isfinite(rate) or rate < 0 or not situation.master_scale > 0:
        return None
    error, most = hidden.master_error_lr * rate, _WEIGHT_SHARE * situation.master_scale
    if hidden.weights == "bounded":
        most = min(most, max(_CAST_SHARE * situation.master_scale, _CAST_SPACING_LR * rate))
    kept = situation.spacing
    if kept is not None and min(_LEAST_SPACING * error, most) <= kept <= min(
        _MOST_SPACING * error, 2 * most
    ):
        return kept
    return min(_SPACING * error, most)


def _moments(
    hidden: Hidden, parameter: Parameter, specs: Mapping[str, LeafSpec], situation: Situation
) -> dict[str, Decision]:
    """Laws 3 to 5: m is disposable; v needs little precision but never less than m^2 / C; both are
    reused as a pair, or not at all.
    """
    first, second = parameter.first, parameter.second
    if not (
        parameter.adam
        and treated(specs.get(first or ""), "float32")
        and treated(specs.get(second or ""), "float32")
    ):
        return {}
    assert first is not None  # treated() has said so
    assert second is not None
    if hidden.moments == "exact" or (hidden.leaves is not None and second not in hidden.leaves):
        return {}
    known = betas(hidden, situation.hyperparameters)
    if known is None or not 0 <= known[0] ** 2 < known[1] < 1:
        return {}
    dead_band = _dead_band(hidden.moment_error_octaves)
    fraction_bits = next((bits for bits in range(7) if 0.5 ** (bits + 1) <= 0.75 * dead_band), 7)
    within = Bounded(hidden.moment_error_octaves, "octaves")
    coarse = Decision("octaves", within, fraction_bits=fraction_bits, dead_band=dead_band)
    if hidden.moments == "dropped":
        return {first: Decision("zeros", Bounded(1.0, "l2")), second: coarse}
    limit = adam.moment_limit(*known)
    mean = Decision("octaves", Bounded(_MEAN_ERROR_OCTAVES, "octaves"), signed=True, dead_band=0.5)
    paired = Decision(
        "octaves",
        within,
        fraction_bits=fraction_bits,
        dead_band=dead_band,
        first=first,
        limit=limit,
    )
    if hidden.moments == "bounded":
        return {first: mean, second: paired}
    age = (
        0
        if situation.step is None
        else adam.permitted_staleness(hidden.max_drift_octaves, situation.step, known[1])
    )
    if hidden.max_age_steps:
        age = min(age, hidden.max_age_steps)
    if age == 0:
        return {}
    terms = Reused(age, hidden.max_drift_octaves + hidden.moment_error_octaves / 2)
    return {first: replace(mean, terms=Reused(age)), second: replace(paired, terms=terms)}


def _dead_band(octaves: float) -> float:
    """The distance in octaves of the bits within which ``|log2|`` moves by no more than ``octaves``
    (``codec.octaves``).
    """
    return float(2.0**octaves - 1) if octaves < 1 else octaves - 0.09


def betas(hidden: Hidden, known: Hyperparameters) -> tuple[float, float] | None:
    """Of Adam: what the state says, else what the policy was told."""
    if known.beta1 is not None and known.beta2 is not None:
        return known.beta1, known.beta2
    return hidden.betas


def _seed(path: str) -> int:
    """Of a leaf's random phases: fixed, so that the lattice is."""
    return xxhash.xxh3_64_intdigest(path.encode())
