"""The chain budget: the decision to write a leaf whole again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from deltacheck.policy.presets import Policy

# Smaller leaves are never merged because of their ratio: a keyframe takes as few bytes.
LEAST_RATIO_BYTES = 16 << 10
# Leaves of at least so many bytes may be stored whole at every save. The copies of smaller ones
# take no noticeable memory.
LEAST_WHOLE_BYTES = 1 << 20
# The most that a leaf may take whole, relative to its delta. Larger: less memory and faster
# restores; smaller: smaller saves.
_WHOLE_RATIO = 1.1
# Saves after which both sizes are estimated again.
_SAVES_BETWEEN_ESTIMATES = 64


def staggered(path: str, limit: int) -> int:
    """Return the limit of one leaf, between half of ``limit`` (exclusive) and all of it.

    A hash of the path spreads the limits, so that the keyframes of all leaves do not fall on one
    save. The result depends on nothing else, so every process decides alike.
    """
    spread = limit // 2
    return limit - (path_hash(path) % spread if spread else 0)


def path_hash(path: str) -> int:
    """Return a number of 64 bits that depends on the path alone, to spread leaves."""
    return xxhash.xxh3_64_intdigest(path.encode())


def needs_keyframe(
    policy: Policy, path: str, raw_bytes: int, deltas: Sequence[int] | None, *, merges: bool = False
) -> bool:
    """Decide if a leaf is written whole: it has no base, or its chain has reached a limit.

    The limits of leaves that are not merged are spread below those of the policy. The ratio of
    small leaves is not: their keyframes of one save share an array.

    Args:
        policy: The policy that sets the limits.
        path: The path of the leaf.
        raw_bytes: The size of the leaf.
        deltas: The decoded size in bytes of each delta since the keyframe; ``None`` if the leaf has
            no keyframe yet.
        merges: True if deltas of the leaf are merged before a limit is reached. The limits are then
            those of the policy, for a merge that failed or came late.
    """
    depth = policy.max_chain_depth if merges else staggered(path, policy.max_chain_depth)
    if deltas is None or len(deltas) >= depth:
        return True
    ratio = policy.max_restore_ratio
    if ratio is None:
        return False
    if not merges and raw_bytes >= LEAST_RATIO_BYTES:
        # The hash has 64 bits, so the fraction that is subtracted is below one half.
        ratio *= 1 - path_hash(path) / 2**65
    return sum(deltas) >= ratio * raw_bytes


def deltas_between(policy: Policy, path: str, raw_bytes: int, delta_bytes: int) -> int:
    """Return the number of deltas between two keyframes if each decodes to ``delta_bytes``."""
    return next(n for n in count() if needs_keyframe(policy, path, raw_bytes, [delta_bytes] * n))


def is_smaller_whole(whole_bytes: float, delta_bytes: float) -> bool:
    """Decide if a leaf is stored whole at every save, without a copy to compare with.

    This is so if it hardly takes more bytes than its delta does. It then needs no memory between
    saves, and a restore applies no deltas.

    Args:
        whole_bytes: Bytes of the leaf.
        delta_bytes: Bytes of its delta.
    """
    return whole_bytes <= _WHOLE_RATIO * delta_bytes


def saves_until_estimate(path: str) -> int:
    """Return the number of saves until both sizes of a leaf are estimated again.

    The estimate needs a copy of the leaf for one save, so the leaves take turns.
    """
    return staggered(path, _SAVES_BETWEEN_ESTIMATES)
