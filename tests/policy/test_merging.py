"""The decision to merge deltas, and which."""

from __future__ import annotations

from deltacheck import Policy
from deltacheck.policy.merging import (
    DeltasSinceKeyframe,
    can_merge,
    depth_limit,
    first_merged,
    is_dense,
    is_due,
    pays,
)

RAW = 1 << 20
PATHS = [f"layers.{n}.weight" for n in range(200)]
POLICY = Policy.exact()
DEPTH = depth_limit(POLICY, "w", RAW)


def test_short_chains_are_not_merged() -> None:
    assert can_merge(POLICY)
    assert not can_merge(Policy.exact(max_chain_depth=3))
    assert not can_merge(Policy.exact(merge_deltas=False))


def test_leaves_of_a_large_state_are_due_in_four_groups_before_they_reach_the_limit() -> None:
    limits = [depth_limit(POLICY, path, 9 << 20) for path in PATHS]
    assert sorted(set(limits)) == [18, 22, 26, 30]
    assert min(limits.count(n) for n in set(limits)) > 25


def test_leaves_of_a_small_state_are_due_together() -> None:
    assert {depth_limit(POLICY, path, 8 << 20) for path in PATHS} == {30}
    assert not is_due(POLICY, DEPTH, DeltasSinceKeyframe(RAW, [100] * 29, 0))
    assert is_due(POLICY, DEPTH, DeltasSinceKeyframe(RAW, [100] * 30, 0))
    # A leaf whose last deltas were merged waits for further ones.
    assert not is_due(POLICY, DEPTH, DeltasSinceKeyframe(RAW, [100] * 31, 30))


def test_a_leaf_of_which_much_changes_is_due_before_it_reaches_the_ratio() -> None:
    share = RAW * 2 // 5
    assert not is_due(POLICY, DEPTH, DeltasSinceKeyframe(RAW, [share] * 12, 0))
    assert is_due(POLICY, DEPTH, DeltasSinceKeyframe(RAW, [share] * 14, 0))
    assert not is_due(POLICY, DEPTH, DeltasSinceKeyframe(1 << 10, [400] * 14, 0))


def test_a_leaf_that_changes_everywhere_is_not_merged() -> None:
    assert not any(is_due(POLICY, DEPTH, DeltasSinceKeyframe(RAW, [RAW] * n, 0)) for n in range(8))
    assert is_dense(DeltasSinceKeyframe(RAW, [RAW // 2] * 2, 0))
    assert not is_dense(DeltasSinceKeyframe(RAW, [RAW // 2 - 1] * 2, 0))
    # The size of a merged delta says nothing about the next save.
    assert not is_dense(DeltasSinceKeyframe(RAW, [RAW, 100], 1))
    assert not is_dense(DeltasSinceKeyframe(RAW, [RAW], 1))


def test_merged_deltas_stay_while_that_costs_fewer_bytes_for_each_save() -> None:
    depth = 18
    share = RAW // 100
    first = first_merged(POLICY, depth, DeltasSinceKeyframe(RAW, [share] * 18, 0))
    assert first == (0, 17)
    # The result of the first merge is large and stays.
    first = first_merged(POLICY, depth, DeltasSinceKeyframe(RAW, [15 * share] + [share] * 17, 1))
    assert first == (1, 16)
    # With little room left, everything becomes one delta again.
    first = first_merged(
        POLICY, depth, DeltasSinceKeyframe(RAW, [15 * share] * 15 + [share] * 3, 15)
    )
    assert first is not None
    assert first[0] < 15
    assert first[1] == 17 - first[0]
    # Changes of everything take as much as one of them, however many there are.
    assert first_merged(POLICY, depth, DeltasSinceKeyframe(RAW, [RAW] * 4, 0)) == (0, 3)


def test_a_merge_that_gives_no_room_is_not_chosen() -> None:
    assert (
        first_merged(
            Policy.exact(max_restore_ratio=2), DEPTH, DeltasSinceKeyframe(RAW, [RAW] * 2, 0)
        )
        is None
    )


def test_the_price_of_a_merge_is_compared_with_that_of_keyframes() -> None:
    assert pays(merged=10, saves=16, keyframe=50, delta=1, deltas_between=24)
    assert not pays(merged=40, saves=3, keyframe=50, delta=40, deltas_between=5)
    assert pays(merged=40, saves=40, keyframe=50, delta=1, deltas_between=0)
