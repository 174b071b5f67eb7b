"""Ranks that differ in their folder, options or calls are refused on every rank, by name."""

from __future__ import annotations

import re
from pathlib import Path

import deltacheck
from tests.ranks import setup_jobs as jobs
from tests.ranks.launch import launch


def test_ranks_that_differ_are_refused_on_every_rank_and_nothing_is_left(tmp_path: Path) -> None:
    first, second = launch(jobs.differ, 2, tmp_path)
    for found in (first, second):
        for name in ("root", "machine", "options", "moved", "steps asked for"):
            assert found[name].startswith("RankFailed"), found[name]
        for rank in (0, 1):
            assert str(tmp_path / f"of rank {rank}" / "run") in found["root"]
        assert "Give every rank the same root" in found["root"]
        assert "/proc/self/cwd/run" in found["machine"]
        for name, values in jobs.OPTIONS.items():
            assert f"{name}={values[1]!r} instead of {values[0]!r}" in found["options"]
        assert "keep.last=3 instead of None" in found["options"]
        assert f"policy={jobs.POLICIES[1]!r} instead of {jobs.POLICIES[0]!r}" in found["options"]
        assert "need max_pending=1" in found["unsupported"]
        assert found["left"] == ["machine 0", "machine 1"]
        assert found["groups"] == 0
        assert "rank 1 saves while rank 0 restores" in found["first restores"]
        assert "rank 1 restores while rank 0 saves" in found["second restores"]
        assert "ask for different steps" in found["steps asked for"]
        assert "rank 0 does not see segment" in found["moved"]
        assert "Give every rank the same root" in found["moved"]
        assert found["steps"] == [0, 2]
        assert found["restored"] == [1, 2, 3, 4]


def test_ranks_that_differ_are_refused_under_dcp(tmp_path: Path) -> None:
    for found in launch(jobs.differ_under_dcp, 2, tmp_path):
        for name in ("root", "machine", "options"):
            assert "CheckpointException" in found[name], found[name]
            assert "RankFailed" in found[name]
        for rank in (0, 1):
            assert str(tmp_path / f"of rank {rank}") in found["root"]
        assert "/proc/self/cwd/run" in found["machine"]
        assert "Give every rank the same root" in found["machine"]
        assert "durability='process' instead of 'power'" in found["options"]
        assert "keep.last=4 instead of 3" in found["options"]
        assert found["left"] == []
        assert found["same"] == ""
        assert found["steps"] == [1]


def test_a_rank_that_dies_while_the_group_forms_is_an_error_in_limited_time(
    tmp_path: Path,
) -> None:
    error, exists = launch(jobs.die_before_the_group, 2, tmp_path, lost={1})[0]
    assert error.startswith("RankFailed: the group of 2 ranks did not form within 2 s")
    assert not exists


def test_copies_that_differ_between_ranks_are_refused_at_every_save(tmp_path: Path) -> None:
    for found in launch(jobs.copies, 2, tmp_path):
        for name in ("equal", "equal again", "equal at the end"):
            assert found[name] == ""
        for name, leaf, step in (
            ("generator", "'generator'", 1),
            ("rows", "'rows' [4:6, 0:3]", 3),
            ("large", "'large'", None),
        ):
            assert "RankFailed" in found[name], found[name]
            assert f"copies of leaf {leaf} on rank" in found[name]
            assert step is None or f"step {step}:" in found[name]
            ours, theirs = re.findall(r"\b[0-9a-f]{32}\b", found[name])
            assert ours != theirs
        assert found["refused"] == "1"  # a large copy is compared at one of so many saves
    assert deltacheck.open(tmp_path / "run").verify(deep=True) == []


def test_copies_that_differ_between_ranks_are_refused_under_dcp(tmp_path: Path) -> None:
    for found in launch(jobs.copies_under_dcp, 2, tmp_path):
        for name in ("equal", "equal again", "cached 50", "cached 51", "equal at the end"):
            assert found[name] == ""
        for name, leaf in (
            ("generator", "generator"),
            ("rows", "rows"),
            ("large", "large"),
            ("cached", "generator"),
        ):
            assert "RankFailed" in found[name], found[name]
            assert f"copies of leaf '{leaf}' on rank" in found[name]
        assert found["refused"] == "1"
    reader = deltacheck.open(tmp_path / "run")
    assert {0, 2, 50, 51, 99} <= set(reader.steps())
    assert not {1, 3, 52} & set(reader.steps())
    assert reader.verify(deep=True) == []


def test_a_rank_that_only_holds_copies_compares_them_under_dcp(tmp_path: Path) -> None:
    for error in launch(jobs.copies_of_a_rank_without_parts, 2, tmp_path):
        assert "copies of leaf 'generator' on rank" in error
    # A refused first save leaves nothing.
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
