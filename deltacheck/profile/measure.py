"""What two samples of a state say: how much of each leaf changed, how far it drifted, and what an
exact code of it would take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltacheck.policy import adam
from deltacheck.policy.parameters import Hyperparameters, Parameter, Roles, hyperparameters
from deltacheck.policy.roles import prove
from deltacheck.profile.record import AdamRule
from deltacheck.profile.sample import Plan

Samples: TypeAlias = Mapping[str, NDArray[np.generic]]

_NUMBERS = ("float16", "bfloat16", "float32", "float64")


class Measured(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leaf between two observations.

    ``density``: share of sampled elements whose bits changed. ``touched``: share of sampled blocks
    with a change. ``drift``: in the unit of its role (``profile.record.LeafProfile``), 0 where it
    cannot be told. Of second moments also: ``update_change``, the relative change of the update if
    the older one stood for it, rescaled and repaired; ``violations`` of m^2 <= C v; ``fresh``,
    share of blocks that were zero. ``exact_bytes``: bytes an element.
    """

    density: float
    touched: float
    drift: float = 0.0
    update_change: float = 0.0
    violations: int = 0
    fresh: float = 0.0
    exact_bytes: float = 0.0


class Observed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A state at a step, against the observation before. ``rates``: of the parameter groups.
    ``count``: steps that the optimizer has done.
    """

    step: int
    leaves: dict[str, Measured]
    rates: tuple[float, ...] = ()
    count: int = 0
    loss: float | None = None
    gradient_norm: float | None = None


def scalars_of(scalars: Mapping[str, object], samples: Samples) -> dict[str, object]:
    """The tree's scalars, and leaves of one element with them."""
    return {
        **scalars,
        **{path: sample.reshape(-1)[0] for path, sample in samples.items() if sample.size == 1},
    }


def rules(
    found: Roles, scalars: Mapping[str, object], given: AdamRule | None
) -> dict[str, tuple[AdamRule | None, float | None]]:
    """Of each parameter, by name: the constants of its Adam (``None``: unknown, or not Adam), and
    its learning rate.
    """
    groups = hyperparameters(found, scalars)

    def rule(parameter: Parameter) -> AdamRule | None:
        known = groups.get(parameter.group or "", Hyperparameters())
        if not parameter.adam:
            return None
        if known.beta1 is None or known.beta2 is None:
            return given
        return AdamRule(known.beta1, known.beta2, 1e-8 if known.eps is None else known.eps)

    return {
        p.name: (rule(p), groups.get(p.group or "", Hyperparameters()).lr) for p in found.parameters
    }


def proven(found: Roles, samples: Samples) -> Roles:
    """The roles, with unproven weights settled by the sample."""
    return prove(
        found,
        lambda weight, master: (
            is_cast(samples[weight], samples[master]) or equal(samples[weight], samples[master])
        ),
    )


def is_cast(weight: NDArray[np.generic], master: NDArray[np.generic]) -> bool:
    """Whether a narrow weight holds the bits of its master, cast."""
    return (
        weight.dtype != master.dtype
        and weight.shape == master.shape
        and _same(weight, master.astype(weight.dtype))
    )


def equal(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    """Bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and _same(one, other)


def _same(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    return bool(np.array_equal(_words(one), _words(other)))


def measure(
    plan: Plan,
    before: Samples,
    after: Samples,
    settings: tuple[int, int, Mapping[str, tuple[AdamRule | None, float | None]]],
) -> dict[str, Measured]:
    """Each leaf of ``after`` against ``before``. ``settings``: the optimizer's count before and
    after, and ``rules`` after.
    """
    then, now, by_name = settings
    roles_of = plan.roles.of()
    role = {path: roles_of[path][0] if path in roles_of else "other" for path in after}
    codes = _codes({path: (role[path], before[path], after[path]) for path in after})
    found = {}
    for path, current in after.items():
        old = before[path]
        changed = _words(old) != _words(current)
        density, touched = float(changed.mean()), float(changed.any(axis=1).mean())
        measured = Measured(density, touched, exact_bytes=codes[path])
        if role[path] != "other" and str(current.dtype) in _NUMBERS:
            parameter = roles_of[path][1]
            rule, rate = by_name.get(parameter.name, (None, None))
            if role[path] in ("weight", "master"):
                measured = msgspec.structs.replace(measured, drift=_in_rates(old, current, rate))
            elif role[path] == "second_moment":
                first = after.get(parameter.first or "")
                measured = _second_moment(measured, old, current, first, rule, then, now)
            else:
                measured = msgspec.structs.replace(measured, drift=_relative(old, current))
        elif str(current.dtype) in _NUMBERS:
            measured = msgspec.structs.replace(measured, drift=_relative(old, current))
        found[path] = measured
    return found


def _in_rates(before: NDArray[np.generic], after: NDArray[np.generic], rate: float | None) -> float:
    """Root mean square change over the learning rate; relative L2 where that is not known or 0."""
    if not rate:
        return _relative(before, after)
    change = after.astype(np.float64) - before.astype(np.float64)
    return _finite(math.sqrt(float(np.mean(change * change))) / rate)


def _relative(before: NDArray[np.generic], after: NDArray[np.generic]) -> float:
    old = before.astype(np.float64)
    size = float(np.linalg.norm(old))
    return _finite(float(np.linalg.norm(after.astype(np.float64) - old)) / size) if size else 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e300  # JSON has no infinity


def _second_moment(
    measured: Measured,
    before: NDArray[np.generic],
    after: NDArray[np.generic],
    first: NDArray[np.generic] | None,
    rule: AdamRule | None,
    then: int,
    now: int,
) -> Measured:
    """Drift in octaves of what a reuse would restore, the older moment rescaled, against the live
    one; and what it does to the update.
    """
    live, old = after.astype(np.float32), before.astype(np.float32)
    fresh = float(((old == 0).all(axis=1) & (live != 0).any(axis=1)).mean())
    if rule is not None and 1 <= then <= now:
        old = old * np.float32(adam.bias_rescale(now, then, rule.beta2))
    both = (live > 0) & (old > 0)
    drift = float(np.median(np.abs(np.log2(old[both] / live[both])))) if both.any() else 0.0
    measured = msgspec.structs.replace(measured, drift=_finite(drift), fresh=fresh)
    if rule is None or first is None or first.shape != after.shape:
        return measured
    m, limit = first.astype(np.float32), adam.moment_limit(rule.beta1, rule.beta2)
    change = adam.update_change(
        m, live, adam.repair(old, m, limit), rule.eps, now or None, (rule.beta1, rule.beta2)
    )
    return msgspec.structs.replace(
        measured, update_change=_finite(change), violations=adam.law_violations(m, live, limit)
    )


# --- what an exact code takes ---------------------------------------------------------------------


def _codes(
    leaves: Mapping[str, tuple[str, NDArray[np.generic], NDArray[np.generic]]],
) -> dict[str, float]:
    """Bytes an element of the best of three exact codes, by order-0 entropy: changed elements
    alone,
    planes of the difference, of the value.

    Entropies are those of the class (role and type), as the sample of one leaf is too small to tell
    them; its density is the leaf's own.
    """
    classes: dict[tuple[str, str], list[str]] = {}
    for path, (role, _, after) in leaves.items():
        classes.setdefault((role, str(after.dtype)), []).append(path)
    found = {}
    for paths in classes.values():
        old = np.concatenate([_words(leaves[path][1]).reshape(-1) for path in paths])
        new = np.concatenate([_words(leaves[path][2]).reshape(-1) for path in paths])
        changed = old != new
        dense = min(_planes(new - old), _planes(new))
        value = _planes((new - old)[changed]) if changed.any() else 0.0
        for path in paths:
            density = float((_words(leaves[path][1]) != _words(leaves[path][2])).mean())
            found[path] = min(dense, _binary(density) / 8 + density * value) if density else 0.0
    return found


def _planes(words: NDArray[np.unsignedinteger]) -> float:
    """Entropy of the byte planes together, in bytes an element, with Miller and Madow's correction
    for few samples (1955).
    """
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(words.size, -1)
    return (
        sum(_entropy(np.bincount(planes[:, i], minlength=256)) for i in range(planes.shape[1])) / 8
    )


def _entropy(counts: NDArray[np.int64]) -> float:
    seen = counts[counts > 0]
    share = seen / seen.sum()
    return min(
        8.0,
        float(-(share * np.log2(share)).sum())
        + (seen.size - 1) / (2 * math.log(2) * float(seen.sum())),
    )


def _binary(density: float) -> float:
    """Bits an element to say which of them changed."""
    return (
        0.0
        if density in (0, 1)
        else -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    )


def _words(sample: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
    size = sample.dtype.itemsize
    kept = np.ascontiguousarray(sample)
    return (
        kept.view(f"u{size}") if size <= 8 else kept.view(np.uint64).reshape(*sample.shape[:-1], -1)
    )
