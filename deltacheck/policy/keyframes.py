"""The chain budget: when a leaf is written whole again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from deltacheck.policy.presets import Policy

LEAST_RATIO_BYTES = 16 << 10  # what deltas of smaller leaves hold, a restore does not notice


def staggered(path: str, limit: int) -> int:
    """A limit for one leaf between half of ``limit`` (exclusive) and all of it, by a hash of its
    path.

    So what is due at the limit does not all fall on one save. It depends on nothing else: every
    process decides alike.
    """
    spread = limit // 2
    return limit - (_hash(path) % spread if spread else 0)


def staggered_ratio(path: str, limit: float) -> float:
    """As ``staggered``, of a ratio."""
    return limit * (1 - _hash(path) / 2**65)


def _hash(path: str) -> int:
    return xxhash.xxh3_64_intdigest(path.encode())


def needs_keyframe(policy: Policy, path: str, raw_bytes: int, deltas: Sequence[int] | None) -> bool:
    """Whether a leaf is written whole: it has no base (``deltas=None``), or its chain has reached
    one
    of its limits.

    ``deltas``: what each delta since the keyframe holds for a restore to decode, in bytes;
    ``raw_bytes``: of the leaf.
    """
    if deltas is None or len(deltas) >= staggered(path, policy.max_chain_depth):
        return True
    ratio = policy.max_restore_ratio
    if ratio is None or raw_bytes < LEAST_RATIO_BYTES:
        return False
    return sum(deltas) >= staggered_ratio(path, ratio) * raw_bytes


def deltas_between(policy: Policy, path: str, raw_bytes: int, delta_bytes: int) -> int:
    """How many deltas lie between two keyframes of a leaf where each holds ``delta_bytes`` for a
    restore to decode.
    """
    return next(n for n in count() if needs_keyframe(policy, path, raw_bytes, [delta_bytes] * n))


def due_for_reads(
    chains: Mapping[str, Sequence[str]], reads: Mapping[str, int], limit: int | None
) -> frozenset[str]:
    """Leaves to write whole, so that a restore opens at most ``limit`` arrays of deltas after the
    next
    save.

    ``chains``: the segments, oldest first, whose deltas each leaf needs; ``reads``: arrays that a
    segment's deltas are made of. The oldest segments are given up first: their deltas serve fewest
    leaves, since chains end at different times. The next save is taken to need as many as the
    largest so far.
    """
    if limit is None:
        return frozenset()
    needed = sorted(
        {segment for chain in chains.values() for segment in chain}
    )  # names ascend with the saves
    total = sum(reads.get(segment, 1) for segment in needed) + max(
        (reads.get(segment, 1) for segment in needed), default=0
    )
    given_up: set[str] = set()
    for segment in needed:
        if total <= limit:
            break
        given_up.add(segment)
        total -= reads.get(segment, 1)
    return frozenset(path for path, chain in chains.items() if given_up & set(chain))
