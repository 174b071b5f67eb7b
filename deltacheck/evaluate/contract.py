"""Whether a restored state is what was promised of it: leaf by leaf, measured anew from both sides,
not taken from the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from deltacheck.evaluate.records import LeafCheck
from deltacheck.evaluate.snapshot import Array, Snapshot
from deltacheck.leaf.contracts import Bounded, Promise, Reused, name_of
from deltacheck.policy import roles
from deltacheck.policy.parameters import hyperparameters
from deltacheck.save.treatment.error_measures import RelativeError, octaves_apart, sample

_SLACK = 1e-5  # of a limit: saves measure in float32 what is measured here in float64
_ZERO_MOMENT = 2.0**-100  # smaller first moments count as zero (deltacheck.leaf.contracts)
_REUSED_MEAN_OCTAVES = 0.6  # of a first moment as it is stored (``Policy.model_exact``)
_ONE_SIDE = {True: "did not come back", False: "was not there when the step was saved"}


def check(
    live: Snapshot,
    restored: Snapshot,
    promises: Mapping[str, Promise],
    step: int,
    live_at: Callable[[int], Snapshot],
) -> tuple[LeafCheck, ...]:
    """Compare every leaf and every Python value of a restored state with what was live at ``step``.

    ``promises``: of the leaves that are not exact, from the manifest; nothing else of it is
    believed. ``live_at``: what was live at an earlier save, whose values a reused leaf has; called
    for ages that are allowed only.
    """
    rates = learning_rates(live)
    found = []
    for path in sorted(live.ties.keys() | restored.ties.keys()):
        if path not in restored.ties or path not in live.ties:
            found.append(LeafCheck(path, "exact", _ONE_SIDE[path in live.ties]))
            continue
        owner, other = live.ties[path], restored.ties[path]
        before, after = live.specs[owner], restored.specs[other]
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            kinds = (f"{spec.dtype}{list(spec.shape)}" for spec in (before, after))
            found.append(LeafCheck(path, "exact", "was {}, came back as {}".format(*kinds)))
        elif owner in promises:
            promise, values = promises[owner], restored.arrays[other]
            checked = _promised(path, promise, live.arrays[owner], values, step, rates.get(owner))
            if promise.from_step is not None and not checked.problem:
                checked = replace(
                    checked,
                    problem=_earlier(live_at(promise.from_step).arrays.get(owner), values, promise),
                )
            found.append(checked)
        else:
            found.append(
                LeafCheck(path, "exact", _bits(live.arrays[owner], restored.arrays[other]))
            )
    for path in sorted(live.values.keys() | restored.values.keys()):
        if path not in restored.values or path not in live.values:
            found.append(LeafCheck(path, "exact", _ONE_SIDE[path in live.values]))
            continue
        one, again = live.values[path], restored.values[path]
        found.append(
            LeafCheck(path, "exact", "" if one == again else f"was {one}, came back as {again}")
        )
    return tuple(found)


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """The paths whose digests differ, or that one side lacks, ascending."""
    return tuple(
        sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))
    )


def learning_rates(live: Snapshot) -> dict[str, float]:
    """The learning rate that each master weight is trained with: as the state tells it, else as the
    run does.
    """
    found = roles.find(live.specs, live.numbers)
    told = hyperparameters(found, live.numbers)
    rates = {}
    for parameter in found.parameters:
        own = told.get(parameter.group or "")
        rate = own.lr if own is not None and own.lr is not None else live.told_rate
        if parameter.master is not None and rate is not None:
            rates[parameter.master] = rate
    return rates


def _bits(live: Array, restored: Array) -> str:
    """What differs between two arrays of one type, in bits; empty where nothing does."""
    width = live.dtype.itemsize
    one, other = (array.view(np.uint8).reshape(-1, width) for array in (live, restored))
    wrong = np.flatnonzero((one != other).any(axis=1))
    if not wrong.size:
        return ""
    first = int(wrong[0])
    return (
        f"{wrong.size} of {live.size} elements differ in bits, first element {first}: was"
        f" {live[first]!s}, came back as {restored[first]!s}"
    )


def _promised(
    path: str, promise: Promise, live: Array, restored: Array, step: int, rate: float | None
) -> LeafCheck:
    terms, name = promise.terms, name_of(promise.terms)
    if isinstance(terms, Bounded):
        if terms.norm == "lr" and not rate:
            return LeafCheck(
                path,
                name,
                "its error is promised in learning rates, and neither the state nor the run tells"
                " the rate",
            )
        measured = _error(terms.norm, live, restored, rate or 0.0)
        problem = (
            ""
            if measured <= terms.limit * (1 + _SLACK)
            else f"its error is {measured:.4g} {terms.norm}, promised was {terms.limit:g}"
        )
        return LeafCheck(path, name, problem, measured, terms.limit)
    return _reused(path, terms, promise.from_step, live, restored, step)


def _reused(
    path: str, terms: Reused, from_step: int | None, live: Array, restored: Array, step: int
) -> LeafCheck:
    age = step - (step if from_step is None else from_step)
    if not 0 <= age <= terms.max_age_steps:
        return LeafCheck(
            path,
            "reused",
            f"it is {age} steps old, promised were {terms.max_age_steps}",
            age,
            terms.max_age_steps,
        )
    if not np.isfinite(restored).all():
        return LeafCheck(
            path, "reused", "it has elements that are not finite", age, terms.max_age_steps
        )
    if terms.max_drift is None:
        return LeafCheck(path, "reused", "", age, terms.max_age_steps)
    drift = octaves_apart(sample(live), sample(restored)) or 0.0
    problem = (
        ""
        if drift <= terms.max_drift * (1 + _SLACK)
        else f"it drifted by {drift:.4g} octaves, promised were {terms.max_drift:g}"
    )
    return LeafCheck(path, "reused", problem, drift, terms.max_drift)


def _earlier(then: Array | None, restored: Array, promise: Promise) -> str:
    """Whether a reused first moment has the values of its earlier step; a second one is rescaled to
    now, and so is held to its drift instead.
    """
    if then is None or then.shape != restored.shape:
        return f"it was not there at step {promise.from_step}, whose values it should have"
    if isinstance(promise.terms, Reused) and promise.terms.max_drift is not None:
        return ""
    apart = _error("octaves", then, restored, 0.0)
    return (
        ""
        if apart <= _REUSED_MEAN_OCTAVES
        else f"it is {apart:.4g} octaves from its values of step {promise.from_step}"
    )


def _error(norm: str, live: Array, restored: Array, rate: float) -> float:
    """The error of a restored leaf in a norm of ``deltacheck.leaf.contracts.NORMS``, in float64;
    infinite where there is no comparing.
    """
    one, other = live.astype(np.float64), restored.astype(np.float64)
    if norm == "l2":
        relative = RelativeError()
        relative.add(live, restored)
        return relative.l2
    if norm == "octaves":
        sizes = [np.maximum(np.abs(values), _ZERO_MOMENT) for values in (one, other)]
        turned = (
            (np.sign(one) * np.sign(other) < 0)
            & (sizes[0] > _ZERO_MOMENT)
            & (sizes[1] > _ZERO_MOMENT)
        )
        return math.inf if turned.any() else _largest(np.abs(np.log2(sizes[1] / sizes[0])))
    error = _largest(np.abs(other - one))
    if norm == "lr":
        return error / rate
    scale = _largest(np.abs(one))
    return error / scale if scale else (0.0 if error == 0 else math.inf)


def _largest(values: Array) -> float:
    """Infinite where there is a NaN."""
    most = float(np.max(values, initial=0.0))
    return math.inf if math.isnan(most) else most
