"""DCP storage on several ranks: deltas, other numbers of ranks, failures and kills."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deltacheck
from tests.ranks import dcp_jobs as jobs
from tests.ranks.jobs import merged_content
from tests.ranks.launch import launch


@pytest.mark.timeout(600)
def test_what_two_ranks_save_comes_back_on_one_and_on_three_and_later_saves_are_deltas(
    tmp_path: Path,
) -> None:
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


@pytest.mark.timeout(600)
def test_a_failed_rank_leaves_the_newest_step_intact_and_no_base_for_the_next(
    tmp_path: Path,
) -> None:
    root = str(tmp_path / "root")
    for first, after in launch(jobs.fail_between, 2, root):
        assert after["steps"] == [1]
        assert after["newest"] == first
        assert "the disk of rank 1 is full" in after["told"]
        assert "no memory on rank 0" in after["stubborn"]
        assert after["third"]
    needed = {ref.id for ref in deltacheck.open(root).manifest(3).segments}
    assert len(needed) == 2  # those of step 3, by two ranks, and none of the failed save
    assert not needed & {ref.id for ref in deltacheck.open(root).manifest(1).segments}


@pytest.mark.timeout(600)
def test_a_rank_killed_before_the_commit_leaves_no_step_and_the_run_resumes(
    tmp_path: Path,
) -> None:
    root = str(tmp_path / "root")
    first, error = launch(jobs.kill_between, 2, root, lost={1})[0]
    assert error
    assert deltacheck.open(root).steps() == [1]
    for found, again, taken in launch(jobs.go_on, 2, root):
        assert found == first
        assert again
        assert taken < 60_000  # of 1.2 MB: a resumed run goes on with deltas
    assert deltacheck.open(root).steps() == [1, 2]
    assert deltacheck.open(root).verify(deep=True) == []


@pytest.mark.timeout(600)
def test_ranks_merge_deltas_in_place_of_keyframes_also_after_a_save_that_failed(
    tmp_path: Path,
) -> None:
    root, first = str(tmp_path / "root"), 0
    for size, fails_at in ((2, 9), (1, None)):
        results = launch(jobs.merge, size, root, 16, fails_at)
        for oldest, merged_bytes in results:
            # Each step needs the keyframes of the first save, or of that after the failed one.
            assert len(set(oldest)) == (2 if fails_at else 1)
            assert merged_bytes > 0
        first += 16
        run = deltacheck.open(root)
        assert run.steps() == [first - 1, first]
        for step in run.steps():
            assert np.array_equal(run.restore(step)["w"], merged_content(step).numpy())
        assert run.verify(deep=True) == []
    assert len(run.manifest().segments) < 16


# The sequences of tests/backends/torch/test_dcp_contract.py that need ranks or processes.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["files", "deltas"])
def test_a_load_that_fails_on_a_rank_fails_on_all_and_can_be_repeated(
    kind: str, tmp_path: Path
) -> None:
    for results in launch(jobs.load_failures, 2, str(tmp_path), kind, seconds=300):
        assert results == {"failed": {1: "ValueError"}, "after": True, "by a process": True}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["files", "deltas"])
def test_a_rank_killed_in_a_load_ends_the_load_of_the_others(kind: str, tmp_path: Path) -> None:
    error, _ = launch(jobs.killed_load, 2, str(tmp_path), kind, seconds=300, lost={1})
    assert error
    if kind == "deltas":
        assert deltacheck.open(tmp_path / "root").verify(deep=True) == []


@pytest.mark.timeout(600)
def test_a_training_under_fsdp2_goes_on_bit_for_bit_and_restores_on_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    through, parts = str(tmp_path / "through"), str(tmp_path / "parts")
    expected = launch(jobs.fsdp, 2, through, None, 0, 4)
    assert launch(jobs.fsdp, 2, parts, through, 2, 4) == expected
    one, other = (deltacheck.open(path).restore(4) for path in (through, parts))
    assert np.array_equal(
        one["optimizer"]["state"]["0.weight"]["exp_avg"],
        other["optimizer"]["state"]["0.weight"]["exp_avg"],
    )
    launch(jobs.fsdp, 3, parts, through, 4, 5)  # uneven: 70 rows on three ranks
    assert deltacheck.open(parts).steps() == [3, 4, 5]
    assert deltacheck.open(parts).restore(5)["model"]["0.weight"].shape == (70, 33)


@pytest.mark.timeout(600)
def test_fsdp_over_tensor_parallel_comes_back_as_plain_shards(tmp_path: Path) -> None:
    saved = launch(jobs.strided, 4, str(tmp_path / "root"), True)
    assert "StridedShard" in saved[0][0]
    assert {str(found) for _, found in launch(jobs.strided, 2, str(tmp_path / "root"), False)} == {
        str(saved[0][1])
    }
