"""The learning rate of a leaf as its last update shows it, whatever names say.

A contract in learning rates depends on which optimizer state and which parameter group a leaf
belongs to. Both are decided from names and shapes when a state is saved. Here they follow from the
values alone: a step of Adam or AdamW moves a leaf by ``-lr m / (sqrt(v) + eps) - lr decay w``.
"""

from __future__ import annotations

import numpy as np

from deltacheck.evaluate.comparison.snapshot import Snapshot
from deltacheck.policy.parameters import Parameter, hyperparameters

# A leaf has moved by the update of a state if it explains this share of the squares of the change.
_EXPLAINED = 0.9
_MOST_ELEMENTS = 1 << 16  # of a leaf that are compared
# The betas and eps of Adam, if the state does not hold them.
_DEFAULT_CONSTANTS = (0.9, 0.999, 1e-8)


def observed_rate(path: str, before: Snapshot, after: Snapshot) -> float | None:
    """Return the learning rate at which the last step has moved a leaf.

    The updates of all states of its shape are tried, and the best one is taken.

    Args:
        path: The leaf.
        before: The state one training step earlier.
        after: The state.

    Returns:
        The rate. ``None`` if the change does not show it: the leaf has not moved, the optimizer has
        not made exactly one update, or no state explains the change.
    """
    if path not in before.arrays or before.specs[path] != after.specs[path]:
        return None
    stride = max(1, after.arrays[path].size // _MOST_ELEMENTS)
    old, new = (s.arrays[path][::stride].astype(np.float64) for s in (before, after))
    change, rates = new - old, list[tuple[float, float]]()
    total = float(change @ change)
    for parameter in after.roles.parameters if 0 < total < np.inf else ():
        update = _update(parameter, path, before, after, stride)
        if update is None:
            continue
        # The weights themselves explain the decay.
        columns = np.stack((update, old), axis=1)
        factors, *_ = np.linalg.lstsq(columns, change, rcond=None)
        rest = change - columns @ factors
        rates.append((1 - float(rest @ rest) / total, -float(factors[0])))
    explained, rate = max(rates, default=(0.0, 0.0))
    return rate if explained >= _EXPLAINED and rate > 0 else None


def _constants(parameter: Parameter, state: Snapshot) -> tuple[float, float, float]:
    """Return the betas and eps of a parameter, those of Adam where the state does not hold them."""
    group = hyperparameters(state.roles, state.numbers).get(parameter.group or "")
    if group is None:
        return _DEFAULT_CONSTANTS
    values = (group.beta1, group.beta2, group.eps)
    beta1, beta2, eps = (
        default if value is None else value
        for value, default in zip(values, _DEFAULT_CONSTANTS, strict=True)
    )
    return beta1, beta2, eps


def _update(
    parameter: Parameter, path: str, before: Snapshot, after: Snapshot, stride: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """Return the last update of a state in learning rates, ``None`` if it has made another number.

    Only a state of the shape of ``path`` has one.
    """
    first, second = parameter.first, parameter.second
    if first is None or second is None:
        return None
    if not after.specs[path].shape == after.specs[first].shape == after.specs[second].shape:
        return None
    counts = [state.numbers.get(parameter.count or "") for state in (before, after)]
    if not all(isinstance(count, int | float) for count in counts):
        return None
    earlier, count = map(float, counts)  # type: ignore[arg-type]
    if count != earlier + 1:
        return None
    mean, square = (after.arrays[p][::stride].astype(np.float64) for p in (first, second))
    beta1, beta2, eps = _constants(parameter, after)
    with np.errstate(all="ignore"):
        update = mean / (1 - beta1**count) / (np.sqrt(square / (1 - beta2**count)) + eps)
    return update if np.isfinite(update).all() else None
