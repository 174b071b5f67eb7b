"""The root goes away or comes back in the middle of a run: that save fails, and nothing else
does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine


def state(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((200_000,), float(step))}


def removed(root: Path) -> None:
    subprocess.run(["rm", "-r", str(root)], check=True)


def unmounted(root: Path) -> None:
    root.rename(root.with_name("away"))
    root.mkdir()  # the empty directory that something was mounted on


def replaced_by_a_file(root: Path) -> None:
    root.rename(root.with_name("away"))
    root.write_text("not a directory")


def replaced_by_another_root(root: Path) -> None:
    root.rename(root.with_name("away"))
    with Engine(root) as other:
        other.save(7, state(7))


@pytest.mark.parametrize(
    "happens", [removed, unmounted, replaced_by_a_file, replaced_by_another_root]
)
def test_a_save_into_a_root_that_has_gone_fails_and_is_committed_nowhere(
    tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    with Engine(root) as engine:
        engine.save(0, state(0)).wait()
        happens(root)
        error = engine.save(1, state(1)).exception(240)
        assert isinstance(error, errors.DeltacheckError)
        assert "step 1" in str(error) or "lost" in str(error)
    if happens is replaced_by_another_root:
        assert deltacheck.open(root).steps() == [7]
        assert deltacheck.open(root).verify(deep=True) == []
    if happens is not removed:
        assert deltacheck.open(root.with_name("away")).steps() == [0]
        assert deltacheck.open(root.with_name("away")).verify(deep=True) == []


def test_a_root_that_comes_back_is_written_to_again(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    with Engine(root) as engine:
        engine.save(0, state(0)).wait()
        root.rename(away)
        assert engine.save(1, state(1)).exception(240) is not None
        if root.exists():  # what the failed save has made in the place of the root
            removed(root)
        away.rename(root)
        engine.save(2, state(2)).wait()
        assert engine.steps() == [0, 2]
        assert torch.equal(engine.restore(2)["x"], state(2)["x"])
    assert deltacheck.open(root).verify(deep=True) == []


def test_a_root_without_a_parent_is_made_and_one_below_a_file_is_refused(tmp_path: Path) -> None:
    with Engine(tmp_path / "runs" / "today" / "root") as engine:
        engine.save(0, state(0)).wait()
    (tmp_path / "file").write_text("")
    with pytest.raises(
        errors.NotACheckpointRoot, match="file is a file; give an empty or new directory"
    ):
        Engine(tmp_path / "file" / "root")
