"""The chain budget: when a leaf is written whole again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash


def staggered(path: str, limit: int) -> int:
    """A limit for one leaf between half of ``limit`` (exclusive) and all of it, by a hash of its path.

    So what is due at the limit does not all fall on one save. It depends on nothing else: every process decides alike.
    """
    spread = limit // 2
    return limit - (xxhash.xxh3_64_intdigest(path.encode()) % spread if spread else 0)


def needs_keyframe(max_chain_depth: int, path: str, depth: int | None) -> bool:
    """Whether a leaf is written whole: it has no base (``depth=None``), or its chain has reached its limit."""
    return depth is None or depth >= staggered(path, max_chain_depth)


def due_for_reads(chains: Mapping[str, Sequence[str]], reads: Mapping[str, int], limit: int | None) -> frozenset[str]:
    """Leaves to write whole, so that a restore opens at most ``limit`` arrays of deltas after the next save.

    ``chains``: the segments, oldest first, whose deltas each leaf needs; ``reads``: arrays that a segment's deltas are made of. The oldest
    segments are given up first: their deltas serve fewest leaves, since chains end at different times. The next save is taken to need as
    many as the largest so far.
    """
    if limit is None:
        return frozenset()
    needed = sorted({segment for chain in chains.values() for segment in chain})  # names ascend with the saves
    total = sum(reads.get(segment, 1) for segment in needed) + max((reads.get(segment, 1) for segment in needed), default=0)
    given_up: set[str] = set()
    for segment in needed:
        if total <= limit:
            break
        given_up.add(segment)
        total -= reads.get(segment, 1)
    return frozenset(path for path, chain in chains.items() if given_up & set(chain))
