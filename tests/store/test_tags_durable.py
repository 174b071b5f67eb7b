"""A tag that was acknowledged survives a power cut, and so does its step.

Found by the model of the commit protocol (``make model-check``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.store import layout
from deltacheck.store.files.durability import Durability
from deltacheck.store.roots import tagging, tags
from deltacheck.store.roots.opening import open_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": torch.ones(3)}).wait(timeout=240)
    return tmp_path


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    """Every directory that a tag syncs, and whether the tag was there already."""
    calls: list[tuple[Path, bool]] = []
    sync = tags.sync_directory

    def record(path: Path) -> None:
        top = next(parent for parent in (path, *path.parents) if (parent / "segments").is_dir())
        calls.append((path, (top / "control" / "tags" / "best" / "zarr.json").exists()))
        sync(path)

    for module in (tags, tagging):
        monkeypatch.setattr(module, "sync_directory", record)
    return calls


def test_a_step_is_durable_before_a_tag_names_it(
    root: Path, synced: list[tuple[Path, bool]]
) -> None:
    tagging.put(open_root(root), 0, "best")
    checkpoints = root / layout.CHECKPOINTS
    assert (checkpoints / layout.checkpoint_id(0), False) in synced
    assert (checkpoints, False) in synced


def test_the_way_to_a_tag_is_synced_whoever_made_the_directory_of_the_tags(
    root: Path, synced: list[tuple[Path, bool]]
) -> None:
    # As a process that was killed before its sync has left it.
    with tags.lock(root):
        pass
    synced.clear()
    tagging.put(open_root(root), 0, "best")
    folder = root / "control" / "tags" / "best"
    assert [path for path, is_tagged in synced if is_tagged] == [
        folder,
        folder.parent,
        folder.parent.parent,
    ]


def test_a_tag_that_a_killed_process_has_left_is_synced_by_the_next_call(
    root: Path, synced: list[tuple[Path, bool]]
) -> None:
    tag = tagging.put(open_root(root), 0, "best")
    synced.clear()
    assert tagging.put(open_root(root), 0, "best") == tag
    assert root / "control" / "tags" / "best" in [path for path, _ in synced]


@pytest.mark.parametrize("is_tagged", [True, False])
def test_a_commit_whose_sync_fails_withdraws_its_step_unless_it_was_tagged_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_tagged: bool
) -> None:
    sync = Durability.sync_directory

    def fail(self: Durability, path: Path) -> None:
        if path.name == layout.CHECKPOINTS:
            if is_tagged:
                tagging.put(open_root(root), 1, "best")
            raise OSError("the disk fails")
        sync(self, path)

    with Engine(root) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Durability, "sync_directory", fail)
            with pytest.raises(errors.SaveFailed, match="the disk fails"):
                engine.save(1, {"x": torch.ones(3)}).wait(timeout=60)
        engine.save(2, {"x": torch.ones(3)}).wait(timeout=240)
    reader = deltacheck.open(root)
    assert reader.steps() == ([0, 1, 2] if is_tagged else [0, 2])
    assert reader.verify(deep=True) == []
