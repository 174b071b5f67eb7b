"""Test the chain budget: the arrays and the amount of deltas that a restore reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.policy.keyframes import deltas_between
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.store.roots.opening import open_root


def decoded(root: Path, step: int) -> dict[str, float]:
    """Return the decoded size of the deltas of each leaf, in units of the leaf."""
    leaves = resolve_leaves(open_root(root), deltacheck.open(root).manifest(step))
    return {
        path: sum(chain.delta_bytes) / chain.spec.raw_bytes
        for path, chain in leaves.items()
        if isinstance(chain, Chain)
    }


@pytest.mark.parametrize("resume", [False, True])
def test_a_restore_decodes_no_more_than_the_policy_says(tmp_path: Path, resume: bool) -> None:
    random = np.random.default_rng(0)
    state = {f"dense{n}": random.normal(size=30_000).astype(np.float32) for n in range(12)}
    state["dense small"] = random.normal(size=64).astype(np.float32)
    state["sparse"] = random.normal(size=30_000).astype(np.float32)
    policy = Policy.exact(max_restore_ratio=3)
    engine = Engine(tmp_path, policy=policy)
    depths: set[int] = set()
    for step in range(12):
        for path, value in state.items():
            changed = slice(None) if path.startswith("dense") else random.integers(0, 30_000, 100)
            value[changed] *= np.float32(1 + 2**-14)
        engine.save(step, state).result()
        ratios = decoded(tmp_path, step)
        assert max(ratios.values()) < 4  # a delta of everything holds one leaf
        assert ratios["sparse"] < 0.3
        depths |= {len(open_root(tmp_path).manifest(step).segments)}
        if resume and step % 5 == 3:
            engine.close()
            engine = Engine(tmp_path, policy=policy)
            engine.restore()
    engine.close()
    assert max(depths) == 12, "what changes little goes on with its first keyframe"
    np.testing.assert_equal(deltacheck.open(tmp_path).restore(), state)


def test_keyframes_of_what_changes_everywhere_do_not_all_fall_on_one_save() -> None:
    distances = Counter(
        deltas_between(Policy.exact(), f"layers.{n}.weight", 1 << 20, 1 << 20) for n in range(200)
    )
    assert distances.keys() == {4, 5, 6}
    assert min(distances.values()) > 40
    assert deltas_between(Policy.exact(max_restore_ratio=1), "w", 1 << 20, 1 << 20) == 1
    assert 15 < deltas_between(Policy.exact(max_restore_ratio=None), "w", 1 << 20, 1 << 20) <= 32


def test_keyframes_of_small_leaves_that_change_everywhere_share_a_save() -> None:
    distances = {deltas_between(Policy.exact(), f"layers.{n}.bias", 256, 256) for n in range(200)}
    assert distances == {6}


def test_merges_do_not_bring_the_keyframes_of_what_changes_everywhere_together(
    tmp_path: Path,
) -> None:
    state = {f"dense{n}": np.full(30_000, n + 1, np.float32) for n in range(12)}
    with Engine(tmp_path, policy=Policy.exact()) as engine:
        for step in range(7):
            for value in state.values():
                value *= np.float32(1 + 2**-14)
            engine.save(step, state).result()
    assert len(set(decoded(tmp_path, 6).values())) > 1


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_a_ratio_that_leaves_no_room_is_refused(wrong: float) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"max_restore_ratio must be above 0, not .*; max_chain_depth=0 writes every leaf whole"
        ),
    ):
        Policy.exact(max_restore_ratio=wrong)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_chain_depth must be at least 0, not -1"):
        Policy.exact(max_chain_depth=-1)
