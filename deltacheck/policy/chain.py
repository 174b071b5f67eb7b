"""The chain budget: when a leaf is written whole again."""

from __future__ import annotations

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
