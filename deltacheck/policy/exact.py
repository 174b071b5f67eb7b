"""The lossless policy: every leaf is restored bit for bit, chains stay short."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class Policy:
    """What a save promises and how long its chains may grow. Make one with ``Policy.exact()``.

    ``contract``: ``"exact"``, bit for bit. ``max_chain_depth``: most deltas that a restore applies to a leaf. Larger: fewer
    keyframes to write, longer restore, more segments that a step depends on.
    """

    contract: str
    max_chain_depth: int

    @classmethod
    def exact(cls, max_chain_depth: int = 32) -> Policy:
        """Lossless. Raises ``ValueError`` for a depth below 0 (0: every save writes keyframes)."""
        if max_chain_depth < 0:
            raise ValueError(f"max_chain_depth must be at least 0, not {max_chain_depth}")
        return cls("exact", max_chain_depth)


def needs_keyframe(policy: Policy, path: str, depth: int | None) -> bool:
    """Whether a leaf is written whole: it has no base (``depth=None``), or its chain has reached its limit.

    The limit is staggered over leaves by a hash of the path, between half of ``max_chain_depth`` and all of it, so that
    keyframes do not all fall on one save. It depends on nothing else: every process decides alike.
    """
    if depth is None:
        return True
    spread = policy.max_chain_depth // 2
    limit = policy.max_chain_depth - (xxhash.xxh3_64_intdigest(path.encode()) % spread if spread else 0)
    return depth >= limit
