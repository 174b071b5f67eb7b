"""The chain budget: how many arrays of deltas a restore opens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy, restore
from deltacheck.backends.torch import Engine
from deltacheck.policy.chain import due_for_reads
from deltacheck.store.root import open_root


def opened(root: Path, step: int) -> int:
    """Arrays of deltas that a restore of a step opens."""
    store, manifest = open_root(root), deltacheck.open(root).manifest(step)
    chains = {leaf.spec.path: leaf for leaf in restore.resolve(store, manifest).values()}
    segments = {segment.id: segment for chain in chains.values() for segment, _ in chain.deltas}
    return sum(segment.table.delta_arrays for segment in segments.values())


def test_the_oldest_segments_are_given_up_first() -> None:
    chains = {"a": ["s1", "s2", "s3"], "b": ["s3"], "c": ["s2", "s3"], "d": []}
    reads = {"s1": 4, "s2": 4, "s3": 4}
    assert due_for_reads(chains, reads, None) == frozenset()
    assert due_for_reads(chains, reads, 16) == frozenset()
    assert due_for_reads(chains, reads, 12) == {"a"}
    assert due_for_reads(chains, reads, 8) == {"a", "c"}
    assert due_for_reads(chains, reads, 0) == {"a", "b", "c"}


@pytest.mark.parametrize("resume", [False, True])
def test_a_restore_opens_no_more_arrays_than_the_policy_says(tmp_path: Path, resume: bool) -> None:
    random = np.random.default_rng(0)
    state = {f"w{n}": random.normal(size=5000).astype(np.float32) for n in range(12)}
    policy, limit = Policy.exact(max_restore_reads=24), 24
    engine = Engine(tmp_path, policy=policy)
    most = 0
    for step in range(30):
        for value in state.values():
            value[random.integers(0, 5000, 40)] += np.float32(1e-3)
        engine.save(step, state).result()
        most = max(most, opened(tmp_path, step))
        assert most <= limit
        if resume and step % 7 == 3:
            engine.close()
            engine = Engine(tmp_path, policy=policy)
            engine.restore()
    engine.close()
    assert most > limit // 2  # deltas are written as long as there is room
    np.testing.assert_equal(deltacheck.open(tmp_path).restore(), state)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_restore_reads must be at least 0, not -1"):
        Policy.exact(max_restore_reads=-1)
