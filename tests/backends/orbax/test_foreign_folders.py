"""Folders of others in the directory of a ``CheckpointManager``: no damage, and never moved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch

import deltacheck
from deltacheck import SaveOptions, errors
from deltacheck.backends.orbax import DeltaSaveArgs, manager, v1
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.repair import repair
from deltacheck.policy import Policy
from deltacheck.store.collect import collect
from deltacheck.store.files.local_storage import list_directory
from deltacheck.store.roots import manager_steps
from deltacheck.store.roots.opening import open_root


def train(root: Path, steps: range, **options: Any) -> None:
    """Save steps to a manager root, whose leaves are whole in each, and keep two."""
    with manager(
        root,
        ocp.CheckpointManagerOptions(max_to_keep=2, **options),
        policy=Policy.exact(max_chain_depth=0),
        save_options=SaveOptions(grace_seconds=0, durability="process"),
    ) as mngr:
        for step in steps:
            mngr.save(step, args=DeltaSaveArgs({"w": np.arange(100.0) + step}))


def nested_run(folder: Path) -> None:
    train(folder, range(3))


def engine_root(folder: Path) -> None:
    with Engine(folder) as engine:
        engine.save(1, {"w": torch.ones(9)}).wait()


def zarr_arrays(folder: Path) -> None:
    (folder / "x").mkdir(parents=True)
    (folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (folder / "x" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')


def garbage(folder: Path) -> None:
    (folder / "events").mkdir(parents=True)
    (folder / "events" / "zarr.json").write_text("garbage")


def plain_orbax(folder: Path) -> None:
    options = {"use_ocdbt": False, "use_zarr3": True}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder.absolute(), {"w": np.arange(9.0)})


FOREIGN: dict[str, Callable[[Path], None]] = {
    "best": nested_run,
    "best_1": nested_run,
    "a/b": nested_run,
    "torch": engine_root,
    "torch_2": engine_root,
    "data": zarr_arrays,
    "data_3": zarr_arrays,
    "tb": garbage,
    "tb_4": garbage,
    "final_5": plain_orbax,
    "link": lambda path: path.symlink_to("3"),
    "link_6": lambda path: path.symlink_to("3"),
    "elsewhere": lambda path: path.symlink_to("/"),
}


def tree_of(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Return the times and contents of everything in a directory."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def segments_of(root: Path) -> int:
    return len(list((root / "deltacheck" / "segments").glob("s*")))


def test_folders_of_others_are_no_damage_and_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, range(4))
    for name, make in FOREIGN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make(tmp_path / name)
    before = {
        name: tree_of(tmp_path / name) for name in FOREIGN if not (tmp_path / name).is_symlink()
    }
    opened = deltacheck.open(tmp_path)
    assert opened.steps() == [2, 3]
    assert opened.verify(deep=True) == []
    for command in ("ls", "verify", "prune", "log"):
        assert main([command, str(tmp_path)]) == 0, capsys.readouterr().err
    done = repair(open_root(tmp_path), lossy=True)
    assert (done.lost, done.removed, done.backup) == ([], [], None)
    train(tmp_path, range(4, 8))
    # Orbax deletes a step after the collection of its save.
    assert segments_of(tmp_path) <= 3
    assert deltacheck.open(tmp_path).steps() == [6, 7]
    assert before == {name: tree_of(tmp_path / name) for name in before}


def test_folders_that_may_not_be_listed_stop_no_save_and_no_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lost+found", "user_2"):
        (tmp_path / name).mkdir()

    def refused(path: Path) -> Any:
        if path.name in ("lost+found", "user_2"):
            raise errors.Damaged(f"{path} cannot be listed: Permission denied")
        return list_directory(path)

    monkeypatch.setattr(manager_steps, "list_directory", refused)
    train(tmp_path, range(4))
    assert segments_of(tmp_path) <= 3
    assert deltacheck.open(tmp_path).verify() == []


def test_a_copy_of_a_step_under_another_name_keeps_its_segments(tmp_path: Path) -> None:
    train(tmp_path, range(2))
    shutil.copytree(tmp_path / "1", tmp_path / "kept")
    train(tmp_path, range(2, 6))
    shutil.copytree(tmp_path / "kept", tmp_path / "1")
    restored = deltacheck.open(tmp_path).restore(1)
    np.testing.assert_array_equal(restored["w"], np.arange(100.0) + 1)


@pytest.mark.parametrize("prefix", [None, "ckpt"])
@pytest.mark.parametrize("content", [b"", b"{}", b'{"zarr_format":3', None])
def test_a_damaged_step_of_ours_is_damage_whatever_is_left_of_it(
    content: bytes | None, prefix: str | None, tmp_path: Path
) -> None:
    train(tmp_path, range(2), step_prefix=prefix)
    step = tmp_path / ("1" if prefix is None else f"{prefix}_1")
    if content is None:
        shutil.move(step, tmp_path.with_name("moved"))
        step.symlink_to(tmp_path.with_name("moved"))
    else:
        (step / "default" / "zarr.json").write_bytes(content)
    assert len(deltacheck.open(tmp_path).verify()) == 1
    with pytest.raises(errors.Damaged, match="nothing is collected"):
        collect(open_root(tmp_path), grace_seconds=0)


@pytest.mark.parametrize(
    "use",
    [
        manager,
        lambda root: v1.context(root).__enter__(),
        lambda root: manager(root, ocp.CheckpointManagerOptions(read_only=True)),
    ],
)
@pytest.mark.parametrize("place", ["", "deltacheck"])
def test_a_manager_refuses_the_root_of_an_engine(
    use: Callable[[Path], Any], place: str, tmp_path: Path
) -> None:
    engine_root(tmp_path / place)
    with pytest.raises(errors.NotACheckpointRoot, match="is the root of an Engine"):
        use(tmp_path)
    assert deltacheck.open(tmp_path / place).steps() == [1]


def test_the_store_of_a_manager_is_no_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, range(2))
    before = segments_of(tmp_path)
    for use in (Engine, deltacheck.open):
        with pytest.raises(errors.NotACheckpointRoot, match="whose root is"):
            use(tmp_path / "deltacheck")
    assert main(["prune", str(tmp_path / "deltacheck"), "--grace", "0"]) != 0
    assert "whose root is" in capsys.readouterr().err
    assert segments_of(tmp_path) == before


def test_a_copied_step_and_a_step_in_the_place_of_its_root_are_named(tmp_path: Path) -> None:
    root, copied = tmp_path / "root", tmp_path / "copied"
    with manager(root) as mngr:
        mngr.save(2, args=DeltaSaveArgs({"w": np.arange(3)}))
    shutil.copytree(root / "2", copied / "2")
    with pytest.raises(errors.NotACheckpointRoot, match=r"is a step of .*: give that root"):
        deltacheck.open(root / "2")
    for place in (copied, copied / "2"):
        with pytest.raises(
            errors.NotACheckpointRoot, match=r"without the segments .* the whole root"
        ):
            deltacheck.open(place)
