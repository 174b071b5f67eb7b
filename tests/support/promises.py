"""An independent check of what a restored state promises, written from docs/reference/format.md.

It shares no code with the saver or with ``eval``: only the manifest's contracts are read, in plain
NumPy and float64, and the rate comes from the live state.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

SLACK = 1 + 1e-5
TINY = 2.0**-100  # moments below count as zero
# Reused first moments, in roots of their second moments without bias: half a step of 0.5, and a
# second moment that is coded within half an octave.
MEAN_ERROR, BETA1, BETA2 = 0.25 * 2**0.25, 0.9, 0.999
# The largest error of a master, and its share for each update, in learning rates
MASTER_ERROR, ERROR_PER_UPDATE = 32.0, 0.5
SAMPLED = 1.15  # a drift is the median of a sample, here that of every element is compared


def flat(state: Any, at: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts and lists by path."""
    pairs = state.items() if isinstance(state, dict) else enumerate(state)
    leaves: dict[str, Any] = {}
    for key, value in pairs:
        if isinstance(value, dict | list | tuple):
            leaves |= flat(value, f"{at}{key}/")
        else:
            leaves[f"{at}{key}"] = value
    return leaves


def torch_weight(master: str) -> str:
    """Return the path of the weight of a torch optimizer's master."""
    name = master.removeprefix("optimizer/state/").removesuffix("/master")
    return "model/w" + name.removeprefix("w")


def broken(
    live: Any,
    restored: Any,
    manifest: Any,
    live_at: Callable[[int], Any],
    rate: float | Mapping[str, float],
    weight_of: Callable[[str], str] = torch_weight,
    peak: float | Mapping[str, float] = 0.0,
    count: float = np.inf,
) -> list[str]:
    """Return the leaves of a restored state that do not keep the contract of the manifest.

    Args:
        live: The state when it was saved.
        restored: The state that came back.
        manifest: The manifest of the step.
        live_at: Return the live state of an earlier step.
        rate: The learning rate; by path, if leaves have other ones. A leaf without one is updated
            by no optimizer and may not err.
        weight_of: Return the path of the weight of a bounded master.
        peak: The largest learning rate of the run, 1/32 of which may be the unit of an error.
        count: The updates of the optimizer, if ``live`` does not hold their number.
    """
    before, after = flat(live), flat(restored)
    problems = [f"{path}: not in both" for path in before.keys() ^ after.keys()]
    for path in before.keys() & after.keys():
        now, most = (
            value.get(path, 0.0) if isinstance(value, Mapping) else value for value in (rate, peak)
        )
        rates = (now, max(now, most / 32))
        problem = _problem(path, before, after, manifest, live_at, rates, count)
        if problem:
            problems.append(f"{path}: {problem}")
    return problems + _casts(before, after, manifest, weight_of)


def _problem(
    path: str,
    before: Any,
    after: Any,
    manifest: Any,
    live_at: Callable[[int], Any],
    rates: tuple[float, float],
    count: float,
) -> str:
    old, new = np.asarray(before[path]), np.asarray(after[path])
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return f"was {old.dtype}{old.shape}, is {new.dtype}{new.shape}"
    promise = manifest.contracts.get(path)
    if promise is None:
        return "" if old.tobytes() == new.tobytes() else "exact, but its bits differ"
    terms = promise.terms
    a, b = old.astype(np.float64), new.astype(np.float64)
    if hasattr(terms, "norm"):
        unit, most = terms.rate or rates[0], rates[1]
        if terms.norm == "lr" and (not unit or unit > most * SLACK):
            return f"promised in learning rates of {unit}, at most {most} are allowed"
        limit = min(MASTER_ERROR, ERROR_PER_UPDATE * max(1.0, _updates(path, before) or count))
        if terms.norm == "lr" and terms.limit > limit:
            return f"promised {terms.limit} learning rates, at most {limit} are allowed"
        error = {
            # Equal bits have no error: the elements of an exact tile may be NaN.
            "lr": lambda: np.where(_equal(old, new), 0, np.abs(a - b)).max() / unit,
            "octaves": lambda: _octaves(a, b).max(),
            "updates": lambda: _update_changes(path, a, b, before, count).max(),
            "l2": lambda: np.linalg.norm(a - b) / np.linalg.norm(a),
        }[terms.norm]()
        if not error <= terms.limit * SLACK:
            return f"{error} {terms.norm}, promised {terms.limit}"
        return "" if error <= promise.measured * SLACK else f"measured {promise.measured} < {error}"
    return _reused(path, a, b, promise, manifest, live_at, before)


def _reused(
    path: str,
    a: Any,
    b: Any,
    promise: Any,
    manifest: Any,
    live_at: Callable[[int], Any],
    before: Mapping[str, Any],
) -> str:
    terms, cut = promise.terms, manifest.tiles.get(path)
    boxes = [(tuple(slice(None) for _ in a.shape), promise.from_step, True)]
    if cut is not None:
        grid = np.ndindex(*(len(edges) - 1 for edges in cut.cuts))
        boxes = [
            (
                tuple(slice(e[i], e[i + 1]) for e, i in zip(cut.cuts, cell, strict=True)),
                cut.from_steps[number] if cut.from_steps else promise.from_step,
                not cut.form or cut.form[number] >= 0,
            )
            for number, cell in enumerate(grid)
        ]
    for box, from_step, is_reused in boxes:
        if not is_reused:
            if not np.array_equal(a[box], b[box], equal_nan=True):
                return f"the exact tile {box} differs"
            continue
        # The optimizer counts the age of its moments, if it counts.
        now, then = (_updates(path, s) for s in (before, flat(live_at(from_step))))
        age = manifest.step - from_step if now is None or then is None else now - then
        if from_step < promise.from_step or not 0 <= age <= terms.max_age_steps:
            return f"{age} steps old, promised {terms.max_age_steps} from {promise.from_step}"
        if not np.isfinite(b[box]).all():
            return "not finite"
        if terms.max_drift is None:
            second = path.replace("exp_avg", "exp_avg_sq").replace("/mu/", "/nu/")
            wrong = _other_than(live_at(from_step), path, second, from_step, b, box)
            # Elements whose second moment has drifted since may have their values of a later save.
            old = np.asarray(flat(live_at(from_step))[second])[box].astype(np.float64)
            for later in range(from_step + 1, manifest.step + 1) if wrong.any() else ():
                with contextlib.suppress(LookupError, OSError):  # no save of this step
                    new = np.asarray(flat(live_at(later))[second])[box].astype(np.float64)
                    stays = _octaves(old, new) < 0.4
                    wrong &= stays | _other_than(live_at(later), path, second, later, b, box)
            if wrong.any():
                return f"the tile {box} is not that of step {from_step}"
        else:
            drift = float(np.median(_octaves(a[box], b[box])))
            if not drift <= terms.max_drift * SAMPLED:
                return f"drift {drift} of {box}, promised {terms.max_drift}"
    return ""


def _updates(path: str, leaves: Mapping[str, Any]) -> float | None:
    """Return the updates of the optimizer of a leaf, ``None`` if the state counts none."""
    beside = re.sub("(exp_avg_sq|exp_avg|master)$", "step", path)
    counts = (beside, re.split("/(?:mu|nu)/", path)[0] + "/count")
    return next((float(leaves[p]) for p in counts if p != path and p in leaves), None)


def _other_than(live: Any, path: str, second: str, step: int, restored: Any, box: Any) -> Any:
    """Return the elements of a box of a first moment that are not those of a state.

    They may differ by a quarter of an update. If the limit of Adam's law clips them, by 0.6
    octaves. Below 2^-60 and beside a second moment below 2^-126, they may be zero.
    """
    mean, variance = (np.asarray(flat(live)[p])[box].astype(np.float64) for p in (path, second))
    count = _updates(path, flat(live)) or step
    allowed = MEAN_ERROR * SLACK * np.sqrt(variance / (1 - BETA2**count))
    is_clipped = (np.abs(restored[box]) < np.abs(mean)) & (_octaves(mean, restored[box]) <= 0.6)
    is_tiny = (restored[box] == 0) & (np.abs(mean) < 2.0**-60) & (variance < 2.0**-125)
    return ~((np.abs(restored[box] - mean) <= allowed) | is_clipped | is_tiny)


def _update_changes(path: str, a: Any, b: Any, before: Mapping[str, Any], count: float) -> Any:
    """Return by how many learning rates an update of Adam changes if b replaces a."""
    variance = np.asarray(before[path.replace("exp_avg", "exp_avg_sq").replace("/mu/", "/nu/")])
    count = _updates(path, before) or count
    roots = np.sqrt(variance.astype(np.float64) / (1 - BETA2**count))
    is_tiny = (np.maximum(np.abs(a), np.abs(b)) < 2.0**-60) & (variance < 2.0**-126)
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = np.abs(b - a) / (1 - BETA1**count) / roots
    # Equal bits have no error: the elements of an exact tile may be NaN.
    return np.where(is_tiny | (a == b) | (np.isnan(a) & np.isnan(b)), 0, changes)


def _equal(old: Any, new: Any) -> Any:
    return old.view(np.uint32) == new.view(np.uint32)


def _octaves(a: Any, b: Any) -> Any:
    sizes = [np.maximum(np.abs(values), TINY) for values in (a, b)]
    flipped = (np.sign(a) * np.sign(b) < 0) & (sizes[0] > TINY) & (sizes[1] > TINY)
    with np.errstate(divide="ignore", invalid="ignore"):  # infinities and NaN are far from all
        distance = np.abs(np.log2(sizes[1] / sizes[0]))
    return np.where(flipped | np.isnan(distance), np.inf, distance)


def _casts(before: Any, after: Any, manifest: Any, weight_of: Callable[[str], str]) -> list[str]:
    """Check that a weight that is exact is still the cast of its bounded master."""
    problems = []
    for path in manifest.contracts:
        weight = weight_of(path)
        if "master" not in path or weight not in after or weight in manifest.contracts:
            continue
        cast = np.asarray(after[path]).astype(ml_dtypes.bfloat16)
        was = np.asarray(before[path]).astype(ml_dtypes.bfloat16)
        is_cast = was.tobytes() == np.asarray(before[weight]).tobytes()
        if is_cast and cast.tobytes() != np.asarray(after[weight]).tobytes():
            problems.append(f"{path}: does not round to {weight}")
    return problems
