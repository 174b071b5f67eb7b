"""``save`` and ``load`` in the place of ``torch.save`` and ``torch.load``."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import errors
from deltacheck.backends import torch as drop_in
from deltacheck.backends.torch.files import dropin, pointer
from tests.support import forked
from tests.support.states import assert_same


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    drop_in.release()


def state(step: int) -> dict[str, Any]:
    frozen = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    return {
        "model": {"frozen": frozen, "head": torch.full((64,), float(step))},
        "step": step,
        "name": "run",
    }


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_is_saved_to_a_path_is_loaded_from_it(tmp_path: Path) -> None:
    drop_in.save(state(1), tmp_path / "last.pt")
    assert_same(state(1), drop_in.load(tmp_path / "last.pt"))
    assert_same(
        state(1),
        drop_in.load(str(tmp_path / "last.pt"), map_location="cpu", weights_only=True, mmap=True),
    )


def test_the_same_path_takes_a_new_step_and_what_did_not_change_is_not_written_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "last.pt"
    drop_in.save(state(1), path)
    first = stored_bytes(tmp_path)
    for step in (2, 3, 4):
        drop_in.save(state(step), path)
    assert stored_bytes(tmp_path) - first < 80_000 < first
    assert_same(state(4), drop_in.load(path))
    root = deltacheck.open(tmp_path / "last.pt.deltacheck")
    assert root.steps() == [0, 1, 2, 3]
    assert root.restore(1)["step"] == 2


def test_names_that_differ_in_their_last_number_share_a_root(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        drop_in.save(state(step), tmp_path / f"v2-ckpt_{step}.pt")
    assert deltacheck.open(tmp_path / "v2-ckpt_#.pt.deltacheck").steps() == [100, 200, 300]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        f"v2-ckpt_{s}.pt" for s in (100, 200, 300)
    ]
    for step in (100, 200, 300):
        assert_same(state(step), drop_in.load(tmp_path / f"v2-ckpt_{step}.pt"))


def test_files_of_one_number_but_different_names_do_not_meet(tmp_path: Path) -> None:
    drop_in.save({"w": torch.ones(3)}, tmp_path / "model_1.pt")
    drop_in.save({"state": torch.zeros(5)}, tmp_path / "optimizer_1.pt")
    assert_same({"w": torch.ones(3)}, drop_in.load(tmp_path / "model_1.pt"))
    assert_same({"state": torch.zeros(5)}, drop_in.load(tmp_path / "optimizer_1.pt"))


@pytest.mark.parametrize(
    ("name", "root", "step"),
    [
        ("last.pt", "last.pt.deltacheck", None),
        ("ckpt_#.pt", "ckpt_#.pt.deltacheck", None),
        ("epoch=3-step=120.ckpt", "epoch=3-step=#.ckpt.deltacheck", 120),
        ("0007", "#.deltacheck", 7),
        ("run." + "1" * 30, "run." + "1" * 30 + ".deltacheck", None),
    ],
)
def test_a_name_means_a_root_and_a_step(name: str, root: str, step: int | None) -> None:
    assert dropin.series_of(Path("folder", name)) == dropin.FileSeries(Path("folder", root), step)


def test_a_step_that_is_saved_again_is_what_its_file_shows(tmp_path: Path) -> None:
    drop_in.save(state(1), tmp_path / "ckpt_7.pt")
    os.rename(tmp_path / "ckpt_7.pt", tmp_path / "kept.pt")
    drop_in.save(state(2), tmp_path / "ckpt_7.pt")
    assert_same(state(2), drop_in.load(tmp_path / "ckpt_7.pt"))
    assert_same(state(1), drop_in.load(tmp_path / "kept.pt"))


def test_keep_last_deletes_older_steps_and_their_files_say_so(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        drop_in.save(state(step), tmp_path / f"ckpt_{step}.pt", keep_last=2)
    with pytest.raises(
        errors.StepNotFound, match=r"step 1 .* not there any more.*Steps that it has: 2, 3"
    ):
        drop_in.load(tmp_path / "ckpt_1.pt")
    assert_same(state(2), drop_in.load(tmp_path / "ckpt_2.pt"))


def test_a_folder_with_its_root_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    drop_in.save(state(1), tmp_path / "here" / "a.pt")
    drop_in.release(tmp_path / "here" / "a.pt")
    os.rename(tmp_path / "here", tmp_path / "there")
    assert_same(state(1), drop_in.load(tmp_path / "there" / "a.pt"))


def test_a_link_in_another_folder_is_read_and_written_as_its_target(tmp_path: Path) -> None:
    for folder in ("run/checkpoints", "other/deep"):
        (tmp_path / folder).mkdir(parents=True)
    for step in (1, 2):
        drop_in.save(state(step), tmp_path / f"run/checkpoints/{step}.pt")
    os.symlink("checkpoints/2.pt", tmp_path / "run/best.pt")
    os.symlink(tmp_path / "run/best.pt", tmp_path / "other/deep/last.pt")
    os.symlink(tmp_path / "run/checkpoints", tmp_path / "other/folder")
    for link in ("run/best.pt", "other/deep/last.pt", "other/folder/2.pt"):
        assert_same(state(2), drop_in.load(tmp_path / link))
    drop_in.save(state(3), tmp_path / "other/deep/last.pt")
    assert (tmp_path / "run/best.pt").is_symlink()
    assert_same(state(3), drop_in.load(tmp_path / "run/checkpoints/2.pt"))
    # The same root as through the folder itself, which this process still holds.
    drop_in.save(state(4), tmp_path / "other/folder/4.pt")
    (tmp_path / "run/checkpoints").rename(tmp_path / "moved")
    assert_same(state(4), drop_in.load(tmp_path / "moved/4.pt"))


def test_a_failed_save_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    drop_in.save(state(1), tmp_path / "a.pt")
    with pytest.raises(errors.UnsupportedLeaf, match=r"'model/loss' is of type .*MSELoss"):
        drop_in.save({"model": {"loss": torch.nn.MSELoss()}}, tmp_path / "a.pt")
    assert_same(state(1), drop_in.load(tmp_path / "a.pt"))


def test_what_torch_save_takes_and_we_do_not_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a path, not to a BytesIO.*use torch\.save"):
        drop_in.save(state(1), io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pickle_module"):
        drop_in.save(state(1), tmp_path / "a.pt", pickle_module=io)
    with pytest.raises(IsADirectoryError, match="Engine"):
        drop_in.save(state(1), tmp_path)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    torch.save(state(1), tmp_path / "foreign.pt")
    with pytest.raises(errors.NotACheckpointRoot, match=r"deltacheck import ROOT foreign\.pt"):
        drop_in.load(tmp_path / "foreign.pt")
    assert not pointer.is_pointer(tmp_path / "foreign.pt")
    with pytest.raises(TypeError, match="not from a BytesIO"):
        drop_in.load(io.BytesIO())  # type: ignore[arg-type]


def test_every_form_of_map_location_is_understood_and_ties_stay_ties(tmp_path: Path) -> None:
    weight = torch.ones(4)
    drop_in.save({"a": weight, "b": weight}, tmp_path / "a.pt")
    forms: list[Any] = [
        None,
        "cpu",
        torch.device("cpu"),
        {"cuda:0": "cpu"},
        lambda storage, location: storage,
    ]
    for form in forms:
        found = drop_in.load(tmp_path / "a.pt", map_location=form)
        assert found["a"] is found["b"]
        assert found["a"].device.type == "cpu"
    for meta in ("meta", {"cpu": "meta"}):
        assert drop_in.load(tmp_path / "a.pt", meta)["a"].device.type == "meta"


def test_only_so_many_series_are_held_open(tmp_path: Path) -> None:
    for name in "abcdef":
        drop_in.save({"w": torch.ones(2)}, tmp_path / f"{name}.pt")
    assert len(dropin._open) == 4
    drop_in.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    assert_same({"w": torch.zeros(2)}, drop_in.load(tmp_path / "a.pt"))


def test_the_example_writes_what_does_not_change_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forked.example("torch_save.py", tmp_path).startswith(
        "3 checkpoints take 1."
    )  # the frozen layer alone takes 1.05 MB
