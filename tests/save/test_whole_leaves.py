"""Leaves that take hardly more bytes whole than as a delta are stored whole, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.leaf.spec import LeafKind
from deltacheck.policy import causes, keyframes
from deltacheck.restore.resolve import resolve_leaves, stored_chains
from deltacheck.save.job.sampled_sizes import sampled_sizes
from deltacheck.save.job.source import LeafSource
from deltacheck.store.roots.opening import open_root
from tests.support.states import assert_same

# Two chunks, of the smallest leaf that is cut into more than one.
ROWS = 600
NOISE, SPARSE = "noise", "sparse"


def noise(seed: int) -> torch.Tensor:
    """Return values with nothing in common with those of another seed."""
    return torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(seed))


def states(count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield states of which one leaf changes everywhere, and one in a few elements."""
    sparse = noise(-1)
    for step in range(count):
        sparse = sparse.clone()
        sparse[step] += 1
        yield {NOISE: noise(step), SPARSE: sparse}


def arrays(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    return {path: leaf.numpy() for path, leaf in state.items()}


def bases(engine: Engine) -> set[str]:
    """Return the leaves that an engine holds a copy of."""
    leaves = engine._saver.chains.leaves
    return {path for path, leaf in leaves.items() if leaf.base is not None}


def has_deltas(root: Path, step: int) -> dict[str, bool]:
    """Return whether a restore applies deltas to each leaf."""
    opened = open_root(root)
    chains = stored_chains(resolve_leaves(opened, opened.manifest(step)).values())
    return {path: bool(chain.deltas) for path, chain in chains.items()}


def reports(report: Any) -> dict[str, tuple[LeafKind, str]]:
    return {leaf.path: (leaf.kind, leaf.cause) for leaf in report.leaves}


def test_only_a_leaf_that_takes_no_more_bytes_is_stored_whole_and_needs_no_copy(
    tmp_path: Path,
) -> None:
    saved = list(states(5))
    with Engine(tmp_path) as engine:
        for step, state in enumerate(saved):
            report = engine.save(step, state).wait().report
            if step:
                assert reports(report)[NOISE] == (LeafKind.DELTA, causes.CHANGED)
                assert bases(engine) == {SPARSE}
        assert has_deltas(tmp_path, 4) == {NOISE: False, SPARSE: True}
    run = deltacheck.open(tmp_path)
    assert run.verify(deep=True) == []
    for step, state in enumerate(saved):
        assert_same(run.restore(step), arrays(state))


def test_it_is_not_written_again_while_it_stays_the_same(tmp_path: Path) -> None:
    saved = list(states(3))
    with Engine(tmp_path) as engine:
        for step, state in enumerate(saved):
            engine.save(step, state).wait()
        report = engine.save(3, {NOISE: saved[2][NOISE].clone(), SPARSE: noise(9)}).wait().report
    assert reports(report)[NOISE] == (LeafKind.UNCHANGED, "")
    assert np.array_equal(deltacheck.open(tmp_path).restore(3)[NOISE], saved[2][NOISE].numpy())


def test_it_is_compared_again_as_soon_as_a_part_of_it_stays_the_same(tmp_path: Path) -> None:
    saved = list(states(3))
    leaf = saved[2][NOISE].clone()
    with Engine(tmp_path) as engine:
        for step, state in enumerate(saved):
            engine.save(step, state).wait()
        for step in (3, 4):
            leaf = leaf.clone()
            leaf[0, 0] += 1
            report = engine.save(step, {NOISE: leaf, SPARSE: noise(9)}).wait().report
            assert NOISE in bases(engine)
    assert reports(report)[NOISE] == (LeafKind.DELTA, causes.CHANGED)
    assert np.array_equal(deltacheck.open(tmp_path).restore(4)[NOISE], leaf.numpy())


def test_both_sizes_are_estimated_again_after_a_number_of_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyframes, "_SAVES_BETWEEN_ESTIMATES", 2)
    saved = list(states(8))
    held = []
    with Engine(tmp_path) as engine:
        for step, state in enumerate(saved):
            engine.save(step, state).wait()
            held.append(NOISE in bases(engine))
    # Whole at once, with a copy again for one save before each estimate.
    assert held[:2] == [True, False]
    assert 0 < sum(held[2:]) < 6
    for step, state in enumerate(saved):
        assert_same(deltacheck.open(tmp_path).restore(step), arrays(state))


def test_a_resumed_run_goes_on_without_a_copy(tmp_path: Path) -> None:
    saved = list(states(6))
    with Engine(tmp_path) as engine:
        for step in range(3):
            engine.save(step, saved[step]).wait()
    with Engine(tmp_path) as engine:
        assert_same(engine.restore(), saved[2])
        assert bases(engine) == {SPARSE}
        report = engine.save(3, {**saved[3], NOISE: saved[2][NOISE]}).wait().report
        assert reports(report)[NOISE][0] is LeafKind.UNCHANGED
        for step in (4, 5):
            engine.save(step, saved[step]).wait()
            assert bases(engine) == {SPARSE}
    for step in (2, 4, 5):
        assert_same(deltacheck.open(tmp_path).restore(step), arrays(saved[step]))


@pytest.mark.parametrize(
    "options",
    [{"policy": Policy.auto(derive=False)}, {"options": SaveOptions(shadow="mapped")}],
    ids=["lossy", "mapped"],
)
def test_policies_that_compare_and_mapped_copies_keep_the_copy(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    saved = list(states(3))
    with Engine(tmp_path, **options) as engine:
        for step, state in enumerate(saved):
            engine.save(step, state).wait()
        assert NOISE in bases(engine)
    assert_same(deltacheck.open(tmp_path).restore(), arrays(saved[2]))


def test_what_is_stored_whole_is_checked_against_the_content_at_the_save(tmp_path: Path) -> None:
    saved = list(states(4))
    with Engine(tmp_path) as engine:
        for step in range(3):
            engine.save(step, saved[step]).wait()

        def refuse(content: np.ndarray[Any, Any]) -> None:
            assert bytes(content) == saved[3][NOISE].numpy().tobytes()
            raise errors.SnapshotTorn("leaf 'noise' was written to")

        original = LeafSource.__init__

        def checked(self: LeafSource, *args: Any, **values: Any) -> None:
            original(self, *args, **values)
            if self.spec.path == NOISE:
                object.__setattr__(self, "check_content", refuse)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LeafSource, "__init__", checked)
            handle = engine.save(3, saved[3])
            assert isinstance(handle.exception(240), errors.SaveFailed)
    run = deltacheck.open(tmp_path)
    assert run.steps() == [0, 1, 2]
    assert_same(run.restore(), arrays(saved[2]))


def test_the_estimate_tells_noise_from_small_changes_and_leaves_the_copy_alone() -> None:
    before, after = (noise(seed).numpy().reshape(-1) for seed in (0, 1))
    base = before.view(np.uint8).copy()
    sizes = sampled_sizes(after.view(np.uint8), base, 4)
    assert keyframes.is_smaller_whole(*sizes)
    assert np.array_equal(base, before.view(np.uint8))
    close = (before.view(np.uint32) + np.uint32(3)).view(np.uint8)
    assert not keyframes.is_smaller_whole(*sampled_sizes(close, base, 4))
    equal = sampled_sizes(before.view(np.uint8), base, 4)
    assert equal.delta < equal.whole / 100
