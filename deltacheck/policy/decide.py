"""The decision for each leaf at one save: pure functions of roles, stage and hyperparameters.

The numbered laws are those of ``docs/explanation/policy.md``. ``save.treatment`` carries out the
decisions and measures the errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import xxhash

from deltacheck.leaf.contracts import Bounded, Reused
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import adam
from deltacheck.policy.parameters import Hyperparameters, Parameter
from deltacheck.policy.presets import ERROR_PER_UPDATE, MEAN_SPACING, Hidden, Policy
from deltacheck.policy.stage import DEGRADED, STABLE

# Smaller leaves and leaves of one axis are always exact: they take hardly any bytes, and norms are
# sensitive (law 6).
LEAST_ELEMENTS = 1024
# Spacing of a lattice in units of the permitted error. An element errs by at most half a spacing.
# A first lattice is as coarse as possible, because codes then change the least. It stays within the
# limits of the second line (``master_lattice``). The range of the first is spread over the leaves,
# so that few of them change lattice in the same save.
_FIRST_SPACING = (1.6, 1.95)
_LEAST_SPACING, _MOST_SPACING = 0.3, 1.98
# The least spacing while neither the rate falls nor the permitted error grows: another one would
# not have to be changed again soon.
_LEAST_LASTING_SPACING = 0.8
# The most halvings that codes have bits for. More: a lattice is written anew less often. Up
# to 6, the differences of codes fit in one byte, as the encoder stores them best.
_SPARE_BITS = 6
# Relative L2 error of weights that are the cast of a bounded master. One unit in the last place of
# bfloat16 is at most 2^-7.
_CAST_ERROR = 0.02
# Limit of a lattice's spacing, as a share of the root mean square of the master.
_WEIGHT_SHARE = 1 / 32
# The same limit for weights that are the cast of the bounded master: a unit in the last place of
# bfloat16, or a number of learning rates that is small beside a few updates.
_CAST_SHARE, _CAST_SPACING_LR = 1 / 256, 16.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The form in which one leaf is stored.

    Attributes:
        how: The name of a rule. Field names are those of ``derivation.Derived``.
        terms: The contract of the leaf, ``None`` if it is restored exactly.
        of: The leaf that this one is computed from, whose cells bound a lattice, or whose root is
            the unit of ratios.
        spacing: The spacing of a lattice, in units of the leaf's values; of ratios, in units of the
            root of the second moment without its bias.
        seed: The seed of a lattice's phases.
        fraction_bits: The number of mantissa bits of an octave code.
        dead_band: The distance, in octaves of the bit pattern, within which a stored code stays.
        limit: C of ``adam.moment_limit`` for ratios.
        halvings: The number of times that the spacing of a lattice was halved.
        spare_bits: The number of halvings that the codes of a lattice have bits for.
        part: The part of a group.
    """

    how: str
    terms: Bounded | Reused | None
    of: str = ""
    spacing: float = 0.0
    seed: int = 0
    fraction_bits: int = 0
    dead_band: float = 0.0
    limit: float = 0.0
    halvings: int = 0
    spare_bits: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True)
class Lattice:
    """The lattice of a master.

    Attributes:
        spacing: Its spacing, in units of the values.
        halvings: The number of times that it was halved.
        spare_bits: The number of halvings that its codes have bits for.
    """

    spacing: float
    halvings: int = 0
    spare_bits: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs of a decision about one parameter at one save.

    Attributes:
        hyperparameters: The constants of its group.
        step: The step count of its optimizer, ``None`` if the state does not hold it.
        lattice: The lattice of its float32 weight so far, ``None`` without one.
        master_scale: The root mean square of a sample of that weight: the master, if it has one.
        is_due: True if this save is the turn of its moments to be written again, see
            ``policy.refresh``.
        phases: The number of the lattice's phases. A resumed run has another one, see ``_seed``.
        peak_rate: The largest learning rate of its group so far, 0 if it is unknown.
        is_rate_shared: True if the rate is the smallest one of several groups that may be its
            group. A contract then names it, because no reader can know it.
    """

    hyperparameters: Hyperparameters
    step: int | None
    lattice: Lattice | None
    master_scale: float
    is_due: bool = False
    phases: int = 0
    peak_rate: float = 0.0
    is_rate_shared: bool = False


def is_treatable(spec: LeafSpec | None, dtype: str) -> bool:
    """Return True if a leaf has the type of its role and is large enough to be stored inexactly."""
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
    """Return the decisions for the leaves of one parameter, by path.

    Leaves that are not in the result are stored exactly. Weights are never reused (law 1). The
    moments of an optimizer that is not known to be Adam stay exact (law 7). After an event, the
    same leaves are derived as before and after it, and everything is exact.

    Args:
        policy: The policy of the save.
        stage: The stage of the run, a constant of ``policy.stage``.
        parameter: The leaves of the parameter.
        specs: The specs of all leaves.
        situation: The numbers that the decision depends on.
    """
    master = parameter.master if _is_float32_matrix(parameter.master, specs) else None
    narrow = None if master is None else _narrow_weight(parameter, specs)
    hidden = policy.hidden
    decisions: dict[str, Decision] = {}
    if (policy.derive or policy.law) and narrow is not None and master is not None:
        decisions[narrow] = Decision("cast", None, of=master)
    if policy.law:
        return decisions | _group(parameter, specs)
    # The unit of a master's error is the size of an update, which is the rate for Adam only.
    if hidden is None or not parameter.adam:
        return decisions
    decisions |= _moments(hidden, parameter, specs, situation, may_be_reused=stage == STABLE)
    if parameter.paired:
        decisions = _with_weights(hidden, parameter, specs, situation, decisions, master, narrow)
    if stage == DEGRADED:
        return {path: decision for path, decision in decisions.items() if decision.terms is None}
    return decisions


def _with_weights(
    hidden: Hidden,
    parameter: Parameter,
    specs: Mapping[str, LeafSpec],
    situation: Situation,
    decided: Mapping[str, Decision],
    master: str | None,
    narrow: str | None,
) -> dict[str, Decision]:
    """Return earlier decisions with those for the weight and the master of one parameter.

    Args:
        hidden, parameter, specs, situation: As for ``decide``.
        decided: The earlier decisions.
        master: The float32 master, ``None`` if it is absent or small.
        narrow: The weight of 16 bits that may be its cast, ``None`` without one.
    """
    decisions = dict(decided)
    weight = narrow if narrow is not None and specs[narrow].dtype == "bfloat16" else None
    if hidden.float32_weights == "bounded" and weight is None:
        wide = _wide_weight(hidden, parameter, specs, situation)
        if master in wide and narrow is not None:
            decisions.pop(narrow, None)
        decisions |= wide
    if (
        master is not None
        and weight is not None
        and (hidden.leaves is None or master in hidden.leaves)
    ):
        is_exact = hidden.weights == "exact"
        bounded = _bounded_master(hidden, situation, master, weight if is_exact else "")
        if bounded is not None:
            decisions[master] = bounded
            if is_exact:
                decisions.pop(weight, None)
            else:
                decisions[weight] = Decision("cast", Bounded(_CAST_ERROR, "l2"), of=master)
    return decisions


def _group(parameter: Parameter, specs: Mapping[str, LeafSpec]) -> dict[str, Decision]:
    """Return the decisions that store weight, m and v of a parameter together."""
    weight, first, second = parameter.wide_weight, parameter.first, parameter.second
    members = [specs.get(path or "") for path in (weight, first, second)]
    forms = {None if spec is None else (spec.dtype, spec.shape) for spec in members}
    is_known = parameter.adam and parameter.paired
    if not is_known or len(forms) != 1 or not _is_float32_matrix(weight, specs):
        return {}
    assert weight is not None
    assert first is not None
    assert second is not None
    return {
        weight: Decision("group", None),
        first: Decision("group", None, of=weight, part=1),
        second: Decision("group", None, of=weight, part=2),
    }


def _is_float32_matrix(path: str | None, specs: Mapping[str, LeafSpec]) -> bool:
    return is_treatable(specs.get(path or ""), "float32")


def _narrow_weight(parameter: Parameter, specs: Mapping[str, LeafSpec]) -> str | None:
    """Return the weight of 16 bits that may be the cast of the parameter's master."""
    weight, master = parameter.weight, parameter.master
    if weight is None or master is None:
        return None
    is_narrow = any(is_treatable(specs.get(weight), dtype) for dtype in ("bfloat16", "float16"))
    return weight if is_narrow and specs[weight].shape == specs[master].shape else None


def _wide_weight(
    hidden: Hidden, parameter: Parameter, specs: Mapping[str, LeafSpec], situation: Situation
) -> dict[str, Decision]:
    """Return the decision for a float32 weight without a bfloat16 copy: plain AdamW, or float16.

    No cell of an exact weight bounds it, so it is bounded like a master that weights are cast from.
    """
    path = parameter.wide_weight
    is_excluded = hidden.leaves is not None and path not in hidden.leaves
    if path is None or is_excluded or not is_treatable(specs.get(path), "float32"):
        return {}
    bounded = _bounded_master(replace(hidden, weights="bounded"), situation, path)
    return {} if bounded is None else {path: bounded}


def error_unit(hidden: Hidden, situation: Situation) -> float | None:
    """Return the learning rate that is the unit of a master's error, ``None`` without one.

    Updates vanish at the end of a schedule, but the noise that training tolerates does not. The
    unit is therefore at least ``hidden.rate_floor`` of the largest rate so far.
    """
    rate = situation.hyperparameters.lr
    if rate is None or not math.isfinite(rate) or rate < 0:
        return None
    return max(rate, hidden.rate_floor * situation.peak_rate) or None


def master_error(hidden: Hidden, situation: Situation) -> float:
    """Return the largest error of a master, in learning rates.

    After few updates, a master has moved by fewer learning rates than it may err by later. It errs
    by at most ``ERROR_PER_UPDATE`` for each of them, or for one before the first.
    """
    return min(hidden.master_error_lr, ERROR_PER_UPDATE * (situation.step or 1))


def _bounded_master(
    hidden: Hidden, situation: Situation, master: str, weight: str = ""
) -> Decision | None:
    """Return the decision for a master on a lattice, ``None`` if no lattice is possible.

    Args:
        hidden: The policy.
        situation: The numbers that the lattice depends on.
        master: The path of the master.
        weight: The path of its exact bfloat16 weight; empty (default): there is none.
    """
    lattice = master_lattice(hidden, situation, master)
    if lattice is None:
        return None
    unit, rate = error_unit(hidden, situation), situation.hyperparameters.lr
    return Decision(
        "lattice",
        # The contract names its unit if that is not the rate of the state.
        Bounded(
            master_error(hidden, situation),
            "lr",
            None if unit == rate and not situation.is_rate_shared else unit,
        ),
        of=weight,
        spacing=lattice.spacing,
        seed=_seed(master, situation.phases),
        halvings=lattice.halvings,
        spare_bits=lattice.spare_bits,
    )


def master_lattice(hidden: Hidden, situation: Situation, master: str) -> Lattice | None:
    """Return the lattice of a master, ``None`` if no lattice is possible.

    The spacing is as large as the learning rate permits, but small beside the weights. Law 2: it is
    in units of the learning rate (``error_unit``), on a fixed lattice. The random phases of its
    cells make the rounding error independent of the value: subtractive dither (Schuchman, "Dither
    signals and their effect on quantization noise", 1964).

    A lattice stays through the slow change of a schedule, while its error remains permitted and not
    needlessly small, because another spacing changes every code. One that became too coarse is
    halved. Codes gain one bit by that, if they have room for it. The first lattice has this room if
    the rate is falling, else the one after the first halving: codes with room for more bits may be
    larger, and a run whose rate stays would never use the room.

    Args:
        hidden: The policy.
        situation: The numbers that the lattice depends on.
        master: The path of the master.
    """
    rate, current = error_unit(hidden, situation), situation.lattice
    if rate is None or not situation.master_scale > 0:
        return None
    error_lr, largest = master_error(hidden, situation), _largest_spacing(hidden, situation, rate)
    error = error_lr * rate
    is_lasting = error_lr == hidden.master_error_lr and not _is_falling(situation)
    least = _LEAST_LASTING_SPACING if is_lasting else _LEAST_SPACING
    if current is None or current.spacing < min(least * error, 0.5 * largest):
        return _first_lattice(hidden, situation, master, rate)
    limit = _MOST_SPACING * _lattice_error(hidden, situation, rate, error_lr)
    if current.spacing <= limit:
        return current
    new_halvings = max(1, math.ceil(math.log2(current.spacing / limit)))
    spacing = current.spacing * 0.5**new_halvings
    if new_halvings <= current.spare_bits:
        return Lattice(spacing, current.halvings + new_halvings, current.spare_bits - new_halvings)
    # Without a bit for this halving, all codes are new.
    if hidden.weights == "bounded":
        # The first lattice was that of the largest rate, which need not lead to the last one.
        spacing = _aligned(hidden, situation, master, spacing, limit)
    return Lattice(spacing, 0, _halvings_left(hidden, situation, spacing))


def _first_lattice(hidden: Hidden, situation: Situation, master: str, rate: float) -> Lattice:
    """Return a lattice that is not made from an earlier one.

    Args:
        hidden: The policy.
        situation: The numbers that the lattice depends on.
        master: The path of the master.
        rate: The learning rate that is the unit of the error.
    """
    error = master_error(hidden, situation) * rate
    largest = _largest_spacing(hidden, situation, rate)
    limit, spread = _MOST_SPACING * error, _spread(master)
    if hidden.weights == "bounded":
        limit = min(limit, largest)
        # This limit follows the rate, so that all leaves would be halved in the same save.
        largest *= spread / _MOST_SPACING
    spacing = min(spread * error, largest)
    if not _is_falling(situation):
        return Lattice(spacing)
    spacing = _aligned(hidden, situation, master, spacing, limit)
    return Lattice(spacing, 0, _halvings_left(hidden, situation, spacing))


def _is_falling(situation: Situation) -> bool:
    """Return True if the learning rate has been larger."""
    return (situation.hyperparameters.lr or 0.0) < situation.peak_rate


def _largest_spacing(hidden: Hidden, situation: Situation, rate: float) -> float:
    """Return the largest spacing of a first lattice that is small beside the weights.

    Args:
        hidden: The policy.
        situation: The scale of the weights.
        rate: The learning rate that is the unit of the error.
    """
    largest = _WEIGHT_SHARE * situation.master_scale
    if hidden.weights == "bounded":
        largest = min(largest, max(_CAST_SHARE * situation.master_scale, _CAST_SPACING_LR * rate))
    return largest


def _lattice_error(hidden: Hidden, situation: Situation, rate: float, error_lr: float) -> float:
    """Return the error above which a lattice is too coarse.

    Args:
        hidden, situation, rate: As for ``_largest_spacing``.
        error_lr: The permitted error, in learning rates.
    """
    # The limit of a first lattice follows the rate, and a lattice stays until it has halved.
    largest = 2 / _MOST_SPACING * _largest_spacing(hidden, situation, rate)
    return min(error_lr * rate, largest)


def _floor_error(hidden: Hidden, situation: Situation) -> float:
    """Return the same error at the floor of the learning rate, 0 without a floor."""
    rate = hidden.rate_floor * situation.peak_rate
    return _lattice_error(hidden, situation, rate, hidden.master_error_lr)


def _halvings_left(hidden: Hidden, situation: Situation, spacing: float) -> int:
    """Return the number of halvings that a new lattice should have bits for."""
    floor = _floor_error(hidden, situation)
    halvings_left = (
        math.ceil(math.log2(spacing / (_MOST_SPACING * floor))) if floor else _SPARE_BITS
    )
    return max(0, min(halvings_left, _SPARE_BITS))


def _aligned(
    hidden: Hidden, situation: Situation, master: str, spacing: float, limit: float
) -> float:
    """Return a spacing whose last halving is as coarse as the floor of the rate permits.

    Otherwise most of the last bit would be finer than the contract asks for.

    Args:
        hidden: The policy.
        situation: The numbers that the lattice depends on.
        master: The path of the master.
        spacing: The spacing without a floor.
        limit: The largest spacing that is permitted now.
    """
    last = _spread(master) * _floor_error(hidden, situation)
    # Exact weights that are small beside the rate limit the spacing.
    if not 0 < last <= limit or 2 * spacing <= limit:
        return spacing
    return math.ldexp(last, math.floor(math.log2(limit / last)))


def _spread(master: str) -> float:
    """Return a first spacing in units of the permitted error, fixed by the path of the master."""
    least, most = _FIRST_SPACING
    return least + _seed(master) / 2.0**64 * (most - least)


def _moments(
    hidden: Hidden,
    parameter: Parameter,
    specs: Mapping[str, LeafSpec],
    situation: Situation,
    *,
    may_be_reused: bool,
) -> dict[str, Decision]:
    """Return the decisions for both moments, by laws 3 to 5.

    v needs little precision, m is a multiple of its root, and both are reused as a pair or not at
    all.
    """
    first, second = parameter.first, parameter.second
    if not (_is_float32_matrix(first, specs) and _is_float32_matrix(second, specs)):
        return {}
    assert first is not None  # is_treatable() is False for a missing leaf
    assert second is not None
    if hidden.moments == "exact" or (hidden.leaves is not None and second not in hidden.leaves):
        return {}
    constants = betas(hidden, situation.hyperparameters)
    # Outside this range the moments obey no law, see adam.moment_limit. Before the first update
    # there are none.
    if constants is None or not 0 <= constants[0] ** 2 < constants[1] < 1 or situation.step is None:
        return {}
    dead_band = _dead_band(hidden.moment_error_octaves)
    # A code errs by half of its cell. A quarter of the dead band is left for changes of the value
    # that keep its code.
    fraction_bits = next((bits for bits in range(7) if 0.5 ** (bits + 1) <= 0.75 * dead_band), 7)
    tolerance = Bounded(hidden.moment_error_octaves, "octaves")
    coarse = Decision("octaves", tolerance, fraction_bits=fraction_bits, dead_band=dead_band)
    age = reusable_steps(hidden, situation.step, constants[1])
    is_reused = hidden.moments == "reused" and may_be_reused and age > 0
    ratio = Decision(
        "ratio",
        Reused(age) if is_reused else Bounded(hidden.mean_error_updates, "updates"),
        of=second,
        spacing=MEAN_SPACING,
        limit=adam.moment_limit(*constants),
    )
    if is_reused:
        terms = Reused(age, hidden.max_drift_octaves + hidden.moment_error_octaves / 2)
        coarse = replace(coarse, terms=terms)
    return {first: ratio, second: coarse}


def reusable_steps(hidden: Hidden, step: int | None, beta2: float) -> int:
    """Return the largest age of reused moments, in updates; 0 if they may not be reused (law 7)."""
    if step is None:
        return 0
    age = adam.permitted_staleness(hidden.max_drift_octaves, step, beta2)
    return min(age, hidden.max_age_steps) if hidden.max_age_steps else age


def is_reusable(hidden: Hidden, updates: int, beta2: float) -> bool:
    """Return True if law 7 permits moments so many updates later, once the memory of v is full.

    Other moments are no evidence for the stable stage, however little they drift.
    """
    full = math.ceil(1 / (1 - beta2))
    return updates <= reusable_steps(hidden, full, beta2)


def _dead_band(octaves: float) -> float:
    """Return the dead band on the bit pattern for a change of ``|log2|`` by ``octaves``.

    A float's bit pattern is a piecewise linear approximation of its logarithm (see
    ``codec.lossy.octaves``). The logarithm rises fastest at the start of an octave, where a
    distance d of the pattern is log2(1 + d) octaves. Over an octave or more the two differ by at
    most 0.09.
    """
    return float(2.0**octaves - 1) if octaves < 1 else octaves - 0.09


def betas(hidden: Hidden, hyperparameters: Hyperparameters) -> tuple[float, float] | None:
    """Return the betas of Adam: those of the state, else those of the policy."""
    if hyperparameters.beta1 is not None and hyperparameters.beta2 is not None:
        return hyperparameters.beta1, hyperparameters.beta2
    return hidden.betas


def _seed(path: str, phases: int = 0) -> int:
    """Return the seed of a leaf's phases: fixed by its path until the run is resumed.

    A resumed run starts on points of the lattice. On the same lattice, whatever it gains in less
    than half a spacing would be lost at the next resume (law 2).
    """
    return xxhash.xxh3_64_intdigest(path.encode(), seed=phases)
