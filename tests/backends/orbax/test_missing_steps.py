"""Steps that are missing, were deleted in part, or whose root could not be opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp

from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager, restore_whole
from deltacheck.backends.orbax.manager_root import item_writer
from deltacheck.errors import NotACheckpointRoot, SaveFailed, StepNotFound

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own of folders without metadata


def save(mngr: Any, *steps: int) -> None:
    for step in steps:
        mngr.save(step, args=DeltaSaveArgs({"x": jnp.full(3, step)}))
    mngr.wait_until_finished()


def test_a_missing_step_is_named_with_the_steps_that_exist(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        with pytest.raises(StepNotFound, match="has no step at all"):
            mngr.restore(None)
        save(mngr, 1, 2)
        calls = (
            mngr.restore,
            lambda step: mngr.restore(step, args=DeltaRestoreArgs()),
            mngr.item_metadata,
            mngr.metadata,
            mngr.delete,
        )
        for call in calls:
            with pytest.raises(
                StepNotFound, match=r"has no step 9\. Steps that it has: 1, 2"
            ) as caught:
                call(9)
            assert isinstance(caught.value, FileNotFoundError)  # as Orbax's callers expect
            assert type(caught.value).__name__ == "StepNotFound"


def test_an_empty_newest_folder_does_not_block_the_other_steps(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, 1)
    (tmp_path / "7").mkdir()
    with manager(tmp_path) as mngr:
        assert restore_whole(mngr).step == 1
    with manager(tmp_path) as mngr:
        with pytest.raises(NotACheckpointRoot, match=r"7 has no item: .* Steps that it has: 0, 1"):
            mngr.restore(7)
        assert mngr.restore(1)["x"].tolist() == [1, 1, 1]
    with manager(tmp_path) as mngr:
        assert mngr.item_metadata(1)["x"].shape == (3,)
        save(mngr, 8)
        assert restore_whole(mngr).step == 8


@pytest.mark.parametrize("background", [False, True])
def test_a_step_that_is_being_deleted_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    from orbax.checkpoint._src.path import deleter

    listed = []

    def interrupted(self: Any, path: Any, **options: Any) -> None:
        (Path(path) / "default" / "zarr.json").unlink()
        listed.append((Path(path).name, ocp.utils.checkpoint_steps(tmp_path)))

    monkeypatch.setattr(deleter.PathDeleter, "delete", interrupted)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_background_delete=background)
    with manager(tmp_path, options=options) as mngr:
        save(mngr, 0, 1)
    assert listed == [("0.orbax-checkpoint-tmp", [1])]
    with manager(tmp_path) as mngr:
        assert mngr.all_steps() == [1]
        assert mngr.restore(1)["x"].tolist() == [1, 1, 1]
        save(mngr, 2)


def test_a_root_that_fails_to_open_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> int:
        raise OSError(5, "Input/output error")

    with manager(tmp_path) as mngr:
        with monkeypatch.context() as broken:
            broken.setattr(item_writer.Root, "next_seq", fail)
            with pytest.raises(SaveFailed, match="Input/output error"):
                mngr.save(0, args=DeltaSaveArgs({"x": jnp.ones(3)}))
        save(mngr, 1)
        assert mngr.all_steps() == [1]
