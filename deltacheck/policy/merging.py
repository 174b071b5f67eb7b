"""The decision to merge the deltas of leaves behind a training, in place of keyframes.

The newest deltas of a leaf become one delta: each changed word has its newest value. It takes about
the union of the changes, while a keyframe takes the whole leaf. Merged deltas are merged again, but
rarely, so that a delta is written a few times in the life of a run and a chain stays short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deltacheck.policy.keyframes import LEAST_RATIO_BYTES, path_hash

if TYPE_CHECKING:
    from deltacheck.policy.presets import Policy

# A merge is finished one save after it began, or later. Its leaf must not reach a limit meanwhile.
_SPARE_SAVES = 2
# Leaves of one group are merged together. More groups: smaller bursts of writing; fewer groups:
# less work, since each merge opens all segments of the step, and fewer segments for a restore.
_GROUPS = 4
# A state of at most so many bytes is one group: merging all of it is a small burst. At 46 MB, the
# largest of 200 saves was 5 times the mean with one group, and 2.4 times with four.
_ONE_GROUP_BYTES = 8 << 20
# Deltas that hold at least this share of a leaf are not merged: together they change nearly all of
# it, and it is due again after few saves, so keyframes take fewer bytes.
_DENSE_SHARE = 0.5
# A chain of groups may be this many times as long as another one. Larger: fewer keyframes, which
# take as many bytes as three to eight predicted deltas; smaller: faster restores.
_GROUP_CHAINS = 4
# A merge also reads the leaf, which counts as writing this share of it. Larger: fewer merges, of
# more deltas each; smaller: fewer bytes written.
_READ_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class DeltasSinceKeyframe:
    """The deltas of a leaf since its keyframe.

    Args:
        raw_bytes: The size of the leaf.
        decoded_bytes: The decoded size of each delta, oldest first.
        merged: The number of deltas at the beginning that are results of a merge.
    """

    raw_bytes: int
    decoded_bytes: Sequence[int]
    merged: int


def can_merge(policy: Policy) -> bool:
    """Return True if the limits of the policy leave room for a merge."""
    return policy.merge_deltas and policy.max_chain_depth >= 2 * _SPARE_SAVES


def is_dense(deltas: DeltasSinceKeyframe) -> bool:
    """Return True if saves change so much of a leaf that keyframes cost less than merges."""
    return len(deltas.decoded_bytes) > deltas.merged and (
        _typical(deltas) >= _DENSE_SHARE * deltas.raw_bytes
    )


def group_limits(policy: Policy, deltas: DeltasSinceKeyframe) -> Policy:
    """Return the policy with the limits of a group, longer while a law predicts its deltas.

    Args:
        policy: The policy that sets the limits of other leaves.
        deltas: The deltas of the group.
    """
    if is_dense(deltas):
        return policy
    ratio = policy.max_restore_ratio
    return replace(
        policy,
        max_chain_depth=_GROUP_CHAINS * policy.max_chain_depth,
        max_restore_ratio=None if ratio is None else _GROUP_CHAINS * ratio,
    )


def depth_limit(policy: Policy, path: str, state_bytes: int) -> int:
    """Return the number of deltas at which a leaf is due.

    The leaves of a large state are spread over a few groups, which are due at different lengths.

    Args:
        policy: The policy that sets the limits.
        path: The path of the leaf.
        state_bytes: The size of all leaves together.
    """
    depth = policy.max_chain_depth
    groups = 1 if state_bytes <= _ONE_GROUP_BYTES else _GROUPS
    spread = path_hash(path) % groups * (depth // (2 * groups))
    return max(2, depth - _SPARE_SAVES - spread)


def is_due(policy: Policy, depth: int, deltas: DeltasSinceKeyframe) -> bool:
    """Decide if deltas of a leaf are to be merged, so that its chain does not reach a limit.

    Args:
        policy: The policy that sets the limits.
        depth: The ``depth_limit`` of the leaf.
        deltas: Its deltas.
    """
    sizes = deltas.decoded_bytes
    if len(sizes) - deltas.merged < 2 or is_dense(deltas):
        return False
    if len(sizes) >= depth:
        return True
    ratio = policy.max_restore_ratio
    if ratio is None or deltas.raw_bytes < LEAST_RATIO_BYTES:
        return False
    return sum(sizes) + _SPARE_SAVES * _typical(deltas) >= ratio * deltas.raw_bytes


def first_merged(
    policy: Policy, depth: int, deltas: DeltasSinceKeyframe
) -> tuple[int, float] | None:
    """Choose the deltas of a leaf to merge: those that cost the fewest bytes for each later save.

    Either only the deltas of saves are merged, or also some of the newest merged ones.

    Args:
        policy: The policy that sets the limits.
        depth: The ``depth_limit`` of the leaf.
        deltas: Its deltas.

    Returns:
        The number of the first delta to merge, and the number of saves until the chain is due
        again; ``None`` if no merge gives room for a save.
    """
    ways = [
        ((_merged_share(deltas, first) + _READ_SHARE) / saves, -first, saves)
        for first in range(deltas.merged + 1)
        if (saves := _saves_after(policy, depth, deltas, first)) >= 1
    ]
    if not ways:
        return None
    _, first, saves = min(ways)
    return -first, saves


def pays(merged: float, saves: float, keyframe: float, delta: float, deltas_between: int) -> bool:
    """Decide if merging costs fewer bytes than keyframes do.

    Args:
        merged: Bytes of the merged delta.
        saves: Saves until the next merge.
        keyframe: Bytes of a keyframe.
        delta: Bytes of a delta, which a keyframe replaces.
        deltas_between: Deltas between two keyframes if nothing is merged.
    """
    return merged / saves < (keyframe - delta) / max(1, deltas_between)


def _typical(deltas: DeltasSinceKeyframe) -> float:
    """Return the mean decoded size of the deltas of saves."""
    sizes = deltas.decoded_bytes[deltas.merged :]
    return sum(sizes) / len(sizes)


def _merged_share(deltas: DeltasSinceKeyframe, first: int) -> float:
    """Estimate the decoded size of a merged delta, in units of the leaf.

    The changes of different saves are taken to be independent, and a delta of everything to be as
    large as the leaf.
    """
    size = max(1, deltas.raw_bytes)
    unchanged = math.prod(max(0.0, 1 - part / size) for part in deltas.decoded_bytes[first:])
    return 1 - unchanged


def _saves_after(policy: Policy, depth: int, deltas: DeltasSinceKeyframe, first: int) -> float:
    """Return the number of saves until a leaf is due again if the deltas from ``first`` merge."""
    saves: float = depth - (first + 1)
    ratio = policy.max_restore_ratio
    if ratio is not None and deltas.raw_bytes >= LEAST_RATIO_BYTES:
        kept_share = sum(deltas.decoded_bytes[:first]) / deltas.raw_bytes
        typical = max(_typical(deltas), 1) / deltas.raw_bytes
        room = ratio - kept_share - _merged_share(deltas, first)
        saves = min(saves, room / typical - _SPARE_SAVES)
    return saves
