"""Ranks keep their newest steps in memory: kills, other numbers of ranks, failures, full memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import deltacheck
from deltacheck import Mirror
from deltacheck.backends.torch import Engine
from tests.ranks import jobs, memory_jobs
from tests.ranks.launch import launch


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The roots of two ranks that were killed after step 7."""
    folder = tmp_path_factory.mktemp("memory")
    launch(memory_jobs.keep_in_memory, 2, folder, lost={0, 1})
    return folder


def test_one_process_goes_on_from_the_memory_of_two_killed_ranks_or_its_mirror(
    killed: Path, tmp_path: Path
) -> None:
    folder = memory_jobs.copy_memory(killed, tmp_path / "copy")
    assert {0, 3, 4, 5} <= set(deltacheck.open(folder / "disk").steps()) <= {0, 3, 4, 5, 6}
    assert deltacheck.open(folder / "memory").verify(deep=True) == []
    with Mirror(folder / "memory", folder / "mirror") as mirror:
        mirror.poll()
    run = jobs.Run("plain", 1)
    for step in range(8):
        run.update(step)
    expected = jobs.whole(run.state(7))
    for memory in ("mirror", "memory"):
        with Engine(folder / "disk", memory=folder / memory) as engine:
            assert jobs.same(jobs.whole(engine.restore()), expected) == []
            assert engine.restored_step == 7
    assert jobs.same(jobs.whole(deltacheck.open(folder / "disk").restore(7)), expected) == []


def test_killed_ranks_go_on_from_their_memory_and_share_every_failure(
    killed: Path, tmp_path: Path
) -> None:
    folder = memory_jobs.copy_memory(killed, tmp_path / "copy")
    for seen in launch(memory_jobs.continue_in_memory, 2, folder):
        assert "memory=MemoryTier(" in seen["options"]
        assert "persist_every=2" in seen["options"]
        assert "are processes of one machine" in seen["machines"]
        assert seen["newest"] == (7, [])
        assert seen["next"] == ({"delta"}, "process")
        assert "No space left on device" in seen["persist"]
        assert seen["older"] == []
        assert seen["after older"] == {"keyframe"}
        assert seen["damaged"] == []
        assert seen["steps"][-1] == 10
        assert 8 not in seen["steps"]
        assert seen["small"][0] == {"keyframe"}
        # The memory was emptied in between, and every rank began anew.
        assert {"keyframe"} in seen["small"][1:]
        assert {"delta"} in seen["small"][1:]
        assert "memory_bytes" in seen["full"]
    disk = deltacheck.open(folder / "disk")
    assert disk.steps()[-1] == 10
    assert disk.verify(deep=True) == []
    small = deltacheck.open(folder / "small")
    assert small.steps() == [0, 1, 2, 3]
    assert small.verify(deep=True) == []
    assert sorted(path.name for path in folder.iterdir() if "of rank" in path.name) == []
