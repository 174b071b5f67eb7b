"""Measurements on two samples of a state: change and drift of each leaf."""

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
from deltacheck.profile.sample import SamplePlan

# Leaf path -> sampled elements, (blocks, width), of the type of the leaf.
Samples: TypeAlias = Mapping[str, NDArray[np.generic]]
# Name of a parameter -> constants of its Adam (None: unknown, or not Adam) and its learning rate.
Rules: TypeAlias = Mapping[str, tuple[AdamRule | None, float | None]]

_NUMBERS = ("float16", "bfloat16", "float32", "float64")


class Measured(msgspec.Struct, frozen=True, omit_defaults=True):
    """The change of one leaf between two observations.

    Attributes:
        density: The share of sampled elements whose bits changed.
        drift: The size of the change in the unit of its role (see ``LeafProfile``), 0 if it cannot
            be measured.
        violations: For second moments: the number of elements with m^2 > C v.
    """

    density: float
    drift: float = 0.0
    violations: int = 0


class Observed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A state at a step, compared with the previous observation.

    Attributes:
        step: The training step.
        leaves: The change of each leaf; empty if there is nothing to compare with.
        rates: The learning rates of the parameter groups.
        count: The step count of the optimizer.
        loss: The mean loss since the previous observation, ``None`` if it is unconstants.
        gradient_norm: The mean gradient norm, likewise.
    """

    step: int
    leaves: dict[str, Measured]
    rates: tuple[float, ...] = ()
    count: int = 0
    loss: float | None = None
    gradient_norm: float | None = None


def scalars_of(scalars: Mapping[str, object], samples: Samples) -> dict[str, object]:
    """Return the scalars of the tree, together with its leaves of one element."""
    return {
        **scalars,
        **{path: sample.reshape(-1)[0] for path, sample in samples.items() if sample.size == 1},
    }


def rules(roles: Roles, scalars: Mapping[str, object], default: AdamRule | None) -> Rules:
    """Return the optimizer's constants and the learning rate of each parameter, by name.

    Args:
        roles: The roles of the state.
        scalars: The values of ``scalars_of``.
        default: The constants of parameters whose state does not hold them.
    """
    groups = hyperparameters(roles, scalars)

    def rule(parameter: Parameter) -> AdamRule | None:
        constants = groups.get(parameter.group or "", Hyperparameters())
        if not parameter.adam:
            return None
        if constants.beta1 is None or constants.beta2 is None:
            return default
        return AdamRule(
            constants.beta1, constants.beta2, 1e-8 if constants.eps is None else constants.eps
        )

    return {
        p.name: (rule(p), groups.get(p.group or "", Hyperparameters()).lr) for p in roles.parameters
    }


def proven(roles: Roles, samples: Samples) -> Roles:
    """Return the roles, with unproven weights settled by the content of the sample."""
    return prove(
        roles,
        lambda weight, master: (
            is_cast(samples[weight], samples[master]) or equal(samples[weight], samples[master])
        ),
    )


def is_cast(weight: NDArray[np.generic], master: NDArray[np.generic]) -> bool:
    """Return True if a weight of a narrow type holds the bits of its master, cast."""
    return (
        weight.dtype != master.dtype
        and weight.shape == master.shape
        and _same(weight, master.astype(weight.dtype))
    )


def equal(first: NDArray[np.generic], second: NDArray[np.generic]) -> bool:
    """Return True if two samples have the same type, shape and bits."""
    return first.dtype == second.dtype and first.shape == second.shape and _same(first, second)


def _same(first: NDArray[np.generic], second: NDArray[np.generic]) -> bool:
    # As words, because NaN differs from itself and zeros of both signs are equal.
    return bool(np.array_equal(words_of(first), words_of(second)))


def words_of(sample: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
    """Return the bit patterns of a sample, as unsigned words of at most 8 bytes."""
    size = sample.dtype.itemsize
    contiguous = np.ascontiguousarray(sample)
    return (
        contiguous.view(f"u{size}")
        if size <= 8
        else contiguous.view(np.uint64).reshape(*sample.shape[:-1], -1)
    )


def measure(
    plan: SamplePlan,
    before: Samples,
    after: Samples,
    counts: tuple[int, int],
    rules_by_name: Rules,
) -> dict[str, Measured]:
    """Compare each leaf of ``after`` with the same leaf of ``before``.

    Args:
        plan: The plan that both samples follow.
        before: The older samples.
        after: The newer samples.
        counts: The step counts of the optimizer at both samples.
        rules_by_name: The result of ``rules`` for the newer state.
    """
    roles_of = plan.roles.of()
    result = {}
    for path, current in after.items():
        old = before[path]
        drift, violations = 0.0, 0
        if str(current.dtype) in _NUMBERS:
            role, parameter = roles_of.get(path, ("other", None))
            rule, rate = rules_by_name.get(parameter.name if parameter else "", (None, None))
            if role in ("weight", "master"):
                drift = _in_rates(old, current, rate)
            elif role == "second_moment" and parameter is not None:
                first = after.get(parameter.first or "")
                drift, violations = _second_moment(old, current, first, rule, counts)
            else:
                drift = _relative(old, current)
        density = float((words_of(old) != words_of(current)).mean())
        result[path] = Measured(density, drift, violations)
    return result


def _in_rates(before: NDArray[np.generic], after: NDArray[np.generic], rate: float | None) -> float:
    """Return the root mean square change over the learning rate, else the relative change."""
    if not rate:
        return _relative(before, after)
    change = after.astype(np.float64) - before.astype(np.float64)
    return _finite(math.sqrt(float(np.mean(change * change))) / rate)


def _relative(before: NDArray[np.generic], after: NDArray[np.generic]) -> float:
    """Return the relative L2 change, 0 if the older sample is zero."""
    old = before.astype(np.float64)
    size = float(np.linalg.norm(old))
    return _finite(float(np.linalg.norm(after.astype(np.float64) - old)) / size) if size else 0.0


def _finite(value: float) -> float:
    # JSON has no infinity; the value must still compare as larger than every limit.
    return value if math.isfinite(value) else 1e300


def _second_moment(
    before: NDArray[np.generic],
    after: NDArray[np.generic],
    first: NDArray[np.generic] | None,
    rule: AdamRule | None,
    counts: tuple[int, int],
) -> tuple[float, int]:
    """Return the drift of a second moment, and its violations of Adam's law.

    The drift is that of the moment which a reuse would restore: the older one, rescaled.
    """
    older_count, count = counts
    live, old = after.astype(np.float32), before.astype(np.float32)
    # A restore rescales a reused moment, so the drift is measured after the rescale.
    if rule is not None and 1 <= older_count <= count:
        old = old * np.float32(adam.bias_rescale(count, older_count, rule.beta2))
    positive = (live > 0) & (old > 0)
    drift = (
        float(np.median(np.abs(np.log2(old[positive] / live[positive])))) if positive.any() else 0.0
    )
    violations = 0
    if rule is not None and first is not None and first.shape == after.shape:
        limit = adam.moment_limit(rule.beta1, rule.beta2)
        violations = adam.law_violations(first.astype(np.float32), live, limit)
    return _finite(drift), violations
