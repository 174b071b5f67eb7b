"""DCP storage on several ranks: deltas, other numbers of ranks, failures and kills."""

from __future__ import annotations

import re
from pathlib import Path

import dcp_jobs as jobs
import numpy as np
import pytest
from launch import launch

import deltacheck


@pytest.mark.timeout(300)
def test_what_two_ranks_save_comes_back_on_one_and_on_three_and_later_saves_are_deltas(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    saved = launch(jobs.save_two, 2, root)
    assert saved[0] == saved[1]
    (_, first), (_, second), (_, third) = saved[0]
    assert first > 1_000_000
    assert second < first / 50
    assert third < first / 50
    expected = [digests for digests, _ in saved[0]]
    for size in (1, 3):
        for found in launch(jobs.load, size, root, [1, 2, 3, None]):
            assert found == [*expected, expected[-1]]
    opened = deltacheck.open(root)
    assert opened.steps() == [1, 2, 3]
    assert opened.verify(deep=True) == []
    assert opened.restore()["rows"].shape == (600, 500)
    assert np.array_equal(opened.restore(leaves=["plain"])["plain"], np.arange(5) + 6)


@pytest.mark.timeout(300)
def test_a_save_that_fails_on_one_rank_leaves_the_newest_step_whole_and_the_next_does_not_stand_on_it(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    results = launch(jobs.fail_between, 2, root)
    for first, after, _ in results:
        assert after["steps"] == [1]
        assert after["newest"] == first
        assert "the disk of rank 1 is full" in after["told"]
    third = results[0][2]
    assert launch(jobs.load, 1, root, [None])[0] == [third]
    failed = {path.name for path in (Path(root) / "segments").iterdir() if re.match(r"0*1\b|0*1-", path.name)}
    assert not failed & {ref.id for ref in deltacheck.open(root).manifest(3).segments}


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_before_the_commit_leaves_no_step_and_the_run_goes_on_from_the_one_before(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    results = launch(jobs.kill_between, 2, root, lost={1})
    first, error = results[0]
    assert error
    assert deltacheck.open(root).steps() == [1]
    assert launch(jobs.load, 2, root, [None])[0] == [first]
    saved = launch(jobs.save_two, 2, root)  # a new run takes the root
    assert launch(jobs.load, 1, root, [None])[0] == [saved[0][-1][0]]


@pytest.mark.timeout(300)
def test_a_training_under_fsdp2_goes_on_bit_for_bit_on_the_same_ranks_and_restores_on_others(tmp_path: Path) -> None:
    through = launch(jobs.fsdp, 2, str(tmp_path / "through"), 4, False)
    launch(jobs.fsdp, 2, str(tmp_path / "parts"), 2, False)
    parts = launch(jobs.fsdp, 2, str(tmp_path / "parts"), 2, True)
    assert parts == through
    launch(jobs.fsdp, 3, str(tmp_path / "parts"), 1, True)  # uneven: 70 rows on three ranks
    assert deltacheck.open(tmp_path / "parts").steps() == [1, 2, 3, 4, 5]
    one, other = (deltacheck.open(tmp_path / name).restore(4) for name in ("through", "parts"))
    assert np.array_equal(one["model"]["0.weight"], other["model"]["0.weight"])


@pytest.mark.timeout(300)
def test_fsdp_over_tensor_parallel_comes_back_as_plain_shards(tmp_path: Path) -> None:
    saved = launch(jobs.strided, 4, str(tmp_path / "root"), True)
    assert "StridedShard" in saved[0][0]
    assert {str(found) for _, found in launch(jobs.strided, 3, str(tmp_path / "root"), False)} == {str(saved[0][1])}
