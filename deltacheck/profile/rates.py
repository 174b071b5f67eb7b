"""The bytes of a checkpoint, and their growth with the interval.

The rates of a state come from the saves of a root. Every formula, its source and its range:
``docs/how-to/size-an-interval.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Growth of the share of changed words with the steps between two checkpoints. The exponent is below
# 1 because the same words change again. Fitted to our own runs, see size-an-interval.md.
_SPREAD_EXPONENT = 0.65
# Growth of the delta of a leaf in which nearly every word changed: if the differences double, each
# takes about one more bit.
_BITS_PER_DOUBLING = 1.0
# Share of changed words from which the second law holds.
_DENSE = 0.5

# The limits of chains are spread over leaves between half of the policy's limit and all of it. The
# mean over leaves is taken at the midpoints of four equal parts.
_STAGGERED_SHARES = (0.5625, 0.6875, 0.8125, 0.9375)


@dataclass(frozen=True, slots=True)
class LeafRate:
    """The bytes that one leaf, or several similar leaves, add to a save.

    Attributes:
        raw_bytes: The size of the leaf.
        word_bytes: The size of a word that is compared.
        density: The share of words that change between two checkpoints.
        delta_bytes: The bytes that are stored for the change.
        key_bytes: The bytes that are stored for the whole leaf.
    """

    raw_bytes: int
    word_bytes: int
    density: float
    delta_bytes: float
    key_bytes: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a whole state.

    Attributes:
        interval_steps: The number of steps between two observations.
        leaves: The rates of its leaves.
        tables_bytes: The bytes of manifest, tables, indexes and digests of each save.
        measured_bytes: The measured mean of whole saves under the planned policy, ``None`` if there
            is none. It includes keyframes, refreshes and new lattices, which no formula predicts.
    """

    interval_steps: float
    leaves: tuple[LeafRate, ...]
    tables_bytes: float
    measured_bytes: float | None = None

    @property
    def state_bytes(self) -> int:
        """Return the size of the raw state."""
        return sum(leaf.raw_bytes for leaf in self.leaves)


def scaled(rates: Rates, state_bytes: int) -> Rates:
    """Return the rates of a state of another size that behaves like this one."""
    factor = state_bytes / rates.state_bytes
    leaves = tuple(
        replace(
            leaf,
            raw_bytes=round(leaf.raw_bytes * factor),
            delta_bytes=leaf.delta_bytes * factor,
            key_bytes=leaf.key_bytes * factor,
        )
        for leaf in rates.leaves
    )
    measured = None if rates.measured_bytes is None else rates.measured_bytes * factor
    return replace(
        rates,
        leaves=leaves,
        tables_bytes=rates.tables_bytes * factor,
        measured_bytes=measured,
    )


# --- bytes ----------------------------------------------------------------------------------------


def mean_chain(max_chain_depth: int) -> float:
    """Return the mean number of deltas between two keyframes of a leaf, over all leaves.

    The limits of leaves are spread between half of ``max_chain_depth`` and all of it, see
    ``policy.keyframes.staggered``.
    """
    spread = max_chain_depth // 2
    return max_chain_depth - (spread - 1) / 2 if spread else float(max_chain_depth)


def at_interval(rates: Rates, interval_steps: float) -> Rates:
    """Return the rates of the same state for another interval.

    This is an extrapolation; size-an-interval.md shows its accuracy.
    """
    factor = interval_steps / rates.interval_steps
    projected = replace(
        rates,
        interval_steps=interval_steps,
        leaves=tuple(_leaf_at(leaf, factor) for leaf in rates.leaves),
    )
    if rates.measured_bytes is None:
        return projected
    # What was measured grows as the changes do.
    growth = delta_bytes(projected) / delta_bytes(rates)
    return replace(projected, measured_bytes=rates.measured_bytes * growth)


def _leaf_at(leaf: LeafRate, factor: float) -> LeafRate:
    if leaf.density <= 0 or factor == 1:
        return leaf
    # A delta is never larger than the whole leaf.
    largest = max(leaf.key_bytes, leaf.delta_bytes)
    if leaf.density >= _DENSE:
        growth = leaf.raw_bytes / leaf.word_bytes * _BITS_PER_DOUBLING * math.log2(factor) / 8
        return replace(
            leaf, delta_bytes=min(largest, max(leaf.delta_bytes / 8, leaf.delta_bytes + growth))
        )
    density = -math.expm1(factor**_SPREAD_EXPONENT * math.log1p(-leaf.density))
    return replace(
        leaf, density=density, delta_bytes=min(largest, leaf.delta_bytes * density / leaf.density)
    )


def keyframe_bytes(rates: Rates) -> float:
    """Return the bytes of a checkpoint in which every leaf is written whole."""
    return sum(leaf.key_bytes for leaf in rates.leaves) + rates.tables_bytes


def delta_bytes(rates: Rates) -> float:
    """Return the bytes of a checkpoint in which every leaf is written as a delta."""
    return sum(leaf.delta_bytes for leaf in rates.leaves) + rates.tables_bytes


def mean_bytes(rates: Rates, max_chain_depth: int, max_restore_ratio: float | None = None) -> float:
    """Return the mean bytes of a checkpoint, with keyframes amortised over their chains.

    A leaf that never changes is never written again.

    Args:
        rates: The rates of the state.
        max_chain_depth: As in ``Policy``.
        max_restore_ratio: As in ``Policy``.
    """
    if rates.measured_bytes is not None:
        return rates.measured_bytes
    chain = mean_chain(max_chain_depth)
    total = rates.tables_bytes
    for leaf in (leaf for leaf in rates.leaves if leaf.density > 0):
        lengths = [chain_within(leaf, max_restore_ratio, share) for share in _STAGGERED_SHARES]
        deltas = min(chain, sum(lengths) / len(lengths))
        total += (leaf.key_bytes + deltas * leaf.delta_bytes) / (deltas + 1)
    return total


def chain_within(leaf: LeafRate, max_restore_ratio: float | None, share: float = 1.0) -> float:
    """Return the number of deltas that reach ``share`` of the restore ratio.

    A changed word decodes to its own bytes and one byte for its place. A dense delta decodes to no
    more than the leaf.
    """
    decoded = min(1.0, leaf.density * (1 + 1 / leaf.word_bytes))
    return (
        math.inf
        if max_restore_ratio is None or not decoded
        else math.ceil(share * max_restore_ratio / decoded)
    )
