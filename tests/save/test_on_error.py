"""``on_error="log"``: a failed save is counted, and neither ends the run nor becomes a step."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.errors import ReceiptFailed, SaveFailed
from deltacheck.save import pipeline
from deltacheck.save.job.save_job import SaveJob
from deltacheck.save.job.save_log import FailureCount
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import Durability
from tests.support.states import assert_same, nudge, training_state
from tests.support.waiting import wait_until


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# Where a save fails, and what fails there.
PLACES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "capture": (SaveJob, "encode", full),
    "segment": (SaveJob, "finish_segment", full),
    "file": (arrays, "create_file", full),
    "sync of the commit": (Durability, "sync_directory", full),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_run_goes_on_and_the_next_save_restores_bit_for_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    state, root = training_state(), str(tmp_path)
    with Engine(root, options=SaveOptions(on_error="log")) as engine:
        engine.save(0, state).wait()
        nudge(state)
        with monkeypatch.context() as patch:
            patch.setattr(*PLACES[place])
            handles = [engine.save(step, state) for step in (1, 2)]
            engine.wait()
        assert [handle.state for handle in handles] == ["failed"] * 2
        assert isinstance(handles[1].exception(), SaveFailed)
        assert caplog.text.count("the save of step") == 2
        assert engine.steps() == [0]
        nudge(state)
        report = engine.save(3, state).result()
        assert report is not None
        assert report.failed_saves == 2
        assert {str(leaf.kind) for leaf in report.leaves if leaf.raw_bytes} == {"keyframe"}
        nudge(state)
        last = engine.save(4, state).result()
        assert last is not None
        assert last.failed_saves == 0
        assert_same(engine.restore(), state)
    assert deltacheck.open(root).verify(deep=True) == []
    main(["log", root, "--json"])
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [(row["step"], row["failed_saves"]) for row in rows] == [(0, 0), (3, 2), (4, 0)]
    main(["log", root])
    assert "FAILED" in capsys.readouterr().out


def test_after_max_failures_in_a_row_the_next_call_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.zeros(100)}
    engine = Engine(tmp_path, options=SaveOptions(on_error="log", max_failures=2))
    for step in range(0, 6, 2):  # a commit in between begins a new row
        engine.save(step, state).wait()
        with monkeypatch.context() as patch:
            patch.setattr(*PLACES["segment"])
            engine.save(step + 1, state)
            engine.wait()
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES["segment"])
        engine.save(6, state)
        with pytest.raises(SaveFailed, match=r"2 saves in a row.*max_failures=2.*step 6.*No space"):
            engine.wait()
    engine.save(7, state)
    engine.close()
    assert deltacheck.open(tmp_path).steps() == [0, 2, 4, 7]


def test_by_default_the_next_call_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(*PLACES["segment"])
            engine.save(0, {"x": torch.zeros(100)})
            with pytest.raises(SaveFailed, match="the save of step 0 failed"):
                engine.save(1, {"x": torch.zeros(100)})
        report = engine.save(2, {"x": torch.zeros(100)}).result()
        assert report is not None
        assert report.failed_saves == 1


def test_while_the_storage_hangs_every_save_fails_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, finish = threading.Event(), SaveJob.finish_segment

    def hanging(job: SaveJob) -> Any:
        go.wait(240)
        return finish(job)

    monkeypatch.setattr(SaveJob, "finish_segment", hanging)
    monkeypatch.setattr(pipeline, "_PATIENCE", 1000)
    state = {"x": torch.zeros(100)}
    engine = Engine(tmp_path, options=SaveOptions(on_error="log", max_failures=10))
    patience_seconds = engine._saver._pulse.patience_seconds
    engine._saver._pulse.patience_seconds = 0.2
    handles = [engine.save(step, state) for step in range(3)]
    # The first is given up when the second waits for it, which then finds the thread stuck.
    assert [handle.state for handle in handles] == ["failed"] * 3
    assert "still hangs in the save of step 0" in str(handles[2].exception())
    engine._saver._pulse.patience_seconds = patience_seconds
    go.set()
    wait_until(lambda: not engine._saver.pipeline.stuck)
    report = engine.save(3, state).result(240)
    assert report is not None
    assert report.failed_saves == 3
    engine.close()
    assert deltacheck.open(tmp_path).steps() == [3]


def test_a_receipt_that_fails_is_raised_because_its_step_exists() -> None:
    count = FailureCount("log", 3)
    assert count.to_raise(SaveFailed("no")) is None
    error = ReceiptFailed("other bytes")
    assert count.to_raise(error) is error


def test_failures_during_a_commit_belong_to_the_next_row() -> None:
    count = FailureCount("log", 3)
    for name in "ab":
        count.add(SaveFailed(name))
    counted = count.in_a_row
    count.add(SaveFailed("a later save, while the commit is under way"))
    count.committed(counted)
    assert count.in_a_row == 1
    with pytest.raises(SaveFailed, match="a later save"):
        count.raise_lost()
    count.committed(1)
    count.raise_lost()


@pytest.mark.parametrize("option", [{"on_error": "ignore"}, {"max_failures": 0}])
def test_unknown_values_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Engine(tmp_path, options=SaveOptions(**option))


def test_a_memory_tier_stops_a_run_that_it_cannot_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_error='log' and memory"):
        Engine(tmp_path / "root", memory=tmp_path / "memory", options=SaveOptions(on_error="log"))
    Engine(tmp_path / "root").close()  # the root is free


LOST = """
import sys, torch
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.save.job.save_job import SaveJob
engine = Engine(sys.argv[1], options=SaveOptions(on_error="log"))
engine.save(0, {"x": torch.zeros(9)}).wait()
def full(job):
    raise OSError("No space left")
SaveJob.finish_segment = full
engine.save(1, {"x": torch.ones(9)})
engine.wait()
"""


def test_the_exit_status_says_that_the_newest_save_is_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 120, done.stderr
    assert "the last save did not become a checkpoint" in done.stderr
