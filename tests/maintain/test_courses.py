"""Tests of courses: a program that saves without a restore leaves the steps of an earlier one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import deltacheck
from deltacheck import Keep, SaveOptions, errors
from deltacheck.backends.torch import Engine, load, save
from deltacheck.backends.torch.dcp import DeltaStorageReader, DeltaStorageWriter
from deltacheck.backends.torch.files.dropin import release
from deltacheck.cli import main
from deltacheck.maintain.memory_tier import MemoryTier

# DCP says with every call that it is used without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Train = Callable[[Path, bool, "range | tuple[int, ...]"], None]


def state(step: int) -> dict[str, object]:
    return {"w": torch.full((300,), float(step)), "step": step}


def with_engine(root: Path, restores: bool, steps: range | tuple[int, ...]) -> None:
    with Engine(root, keep=Keep(last=2), options=SaveOptions(grace_seconds=0)) as engine:
        if restores:
            engine.restore(into=state(-1))
        for step in steps:
            engine.save(step, state(step)).wait(timeout=240)


def without_shadow(root: Path, restores: bool, steps: range | tuple[int, ...]) -> None:
    with Engine(
        root, keep=Keep(last=2), options=SaveOptions(grace_seconds=0, shadow="none")
    ) as engine:
        if restores:
            engine.restore()
        for step in steps:
            engine.save(step, state(step)).wait(timeout=240)


def with_memory(root: Path, restores: bool, steps: range | tuple[int, ...]) -> None:
    memory = MemoryTier(root.with_name("memory"))
    with Engine(
        root, memory=memory, keep=Keep(last=2), options=SaveOptions(grace_seconds=0)
    ) as engine:
        if restores:
            engine.restore()
        for step in steps:
            engine.save(step, state(step)).wait(timeout=240)
            engine.persist(timeout=240)


def with_dcp(root: Path, restores: bool, steps: range | tuple[int, ...]) -> None:
    writer = DeltaStorageWriter(root, keep=Keep(last=2), options=SaveOptions(grace_seconds=0))
    if restores:
        dcp.load(state(0), storage_reader=DeltaStorageReader(root), no_dist=True)
    for step in steps:
        dcp.save(state(step), storage_writer=writer, checkpoint_id=str(step), no_dist=True)
    writer.close()


@pytest.fixture(params=[with_engine, without_shadow, with_memory, with_dcp])
def train(request: pytest.FixtureRequest) -> Train:
    chosen: Train = request.param
    return chosen


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "course" in record.getMessage()
    ]


def test_a_program_that_has_forgotten_to_restore_deletes_no_earlier_step(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    train(root, False, range(97, 100))
    assert warnings(caplog) == []
    train(root, False, range(4))
    assert deltacheck.open(root).steps() == [2, 3, 98, 99]
    (warning,) = warnings(caplog)
    assert "has 2 steps" in warning
    assert "98, 99" in warning
    assert "restore()" in warning
    # The next program restores the newest step, and goes on with that course.
    train(root, True, range(4, 7))
    assert deltacheck.open(root).steps() == [5, 6, 98, 99]
    assert len(warnings(caplog)) == 1
    reader = deltacheck.open(root)
    assert reader.verify(deep=True) == []
    for step in reader.steps():
        assert torch.equal(load(root, step)["w"], state(step)["w"])


def test_a_run_that_restores_is_one_course(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    train(root, False, range(1, 4))
    # A resumed run may save the step again that it has restored.
    train(root, True, range(3, 6))
    assert deltacheck.open(root).steps() == [4, 5]
    # The state may have been restored by other means.
    train(root, False, range(6, 8))
    assert deltacheck.open(root).steps() == [6, 7]
    assert warnings(caplog) == []


def test_a_run_that_goes_back_goes_on_with_the_course_of_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_engine(tmp_path, False, (8, 9))
    with_engine(tmp_path, False, (0, 1))
    with Engine(tmp_path, keep=Keep(last=1), options=SaveOptions(grace_seconds=0)) as engine:
        engine.restore(9)
        engine.save(10, state(10)).wait(timeout=240)
    assert deltacheck.open(tmp_path).steps() == [0, 1, 10]
    assert len(warnings(caplog)) == 1


def test_a_replaced_file_is_no_other_course(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        for number in range(3):
            save(state(number), tmp_path / f"model_{number}.pt", keep_last=2)
        release()
    assert deltacheck.open(tmp_path / "model_#.pt.deltacheck").steps() == [1, 2]
    assert warnings(caplog) == []


def test_ls_shows_the_course_of_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_engine(tmp_path, False, (8, 9))
    assert main(["ls", str(tmp_path)]) == 0
    assert "COURSE" not in capsys.readouterr().out
    with_engine(tmp_path, False, (0, 1))
    assert main(["ls", str(tmp_path)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    column = header.split().index("COURSE")
    # A date and its time are two words, and a size and its unit.
    assert [row.split()[column + 3] for row in rows] == ["1", "1", "2", "2"]
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert deltacheck.open(tmp_path).steps() == [1, 8, 9]


@pytest.mark.parametrize("memory", [False, True])
def test_the_latest_step_is_the_one_that_a_restore_returns(tmp_path: Path, memory: bool) -> None:
    root, tier = tmp_path / "run", MemoryTier(tmp_path / "memory") if memory else None
    with Engine(root, memory=tier) as engine:
        assert engine.latest_step() is None
        assert deltacheck.open(root).latest_step() is None
        for step in (100, 200, 300, 400):
            engine.save(step, state(step)).wait(timeout=240)
        assert engine.latest_step() == 400
        engine.restore(200)
        engine.save(250, state(250)).wait(timeout=240)
        assert engine.steps()[-1] == 400
        assert engine.latest_step() == 250
        for newest in (None, "latest"):
            assert engine.restore(newest)["step"] == 250
        assert engine.restored_step == 250
        engine.persist(timeout=240)
    reader = deltacheck.open(root)
    assert reader.latest_step() == 250
    assert reader.restore("latest")["step"] == 250


def test_a_damaged_newest_step_is_not_passed_over(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        for step in (1, 2):
            engine.save(step, state(step)).wait(timeout=240)
    (tmp_path / "checkpoints" / "c0000000001" / "zarr.json").write_text("{")
    with pytest.raises(errors.Damaged):
        deltacheck.open(tmp_path).latest_step()
