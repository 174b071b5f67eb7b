"""S3: whichever call fails, falls short or hangs, training goes on, the failure is told, older
steps
are intact and the next save is whole.

The quick part; ``make crash-test`` tries more points. Any failure prints its seed and what to
replay it with.
"""

from __future__ import annotations

import copy
import errno
import itertools
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.save.job.save_job import SaveJob
from deltacheck.store import collect, segment
from deltacheck.store.files import arrays, durability
from tests.faults import io_errors
from tests.faults.campaign import Campaign, Tally
from tests.faults.shim import Fault, Mode
from tests.support.states import assert_same, nudge, training_state
from tests.support.waiting import set_deadline, wait_until


def test_a_training_and_a_whole_life_of_the_library_survive_any_error_of_any_call(
    campaign: Campaign,
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    cells = [cell for cell in io_errors.cells(["first-keyframe", "keep-last"]) if cell[2] != "hang"]
    found = io_errors.calls(campaign, cells)
    problems = io_errors.attempt_all(
        campaign, io_errors.stratified(10, found, rng), tally := Tally("S3", seed)
    )
    print(tally)
    assert problems == []


@pytest.mark.parametrize("fault", ["fsync", "fsync-from"])
def test_a_file_whose_fsync_failed_is_never_trusted(campaign: Campaign, fault: str) -> None:
    """The kernel may have dropped what it could not write: a second fsync would succeed and prove
    nothing.
    """
    assert io_errors.attempt(campaign, io_errors.Point("delta", "train", fault, 7)) == []


def test_a_call_that_hangs_fails_its_save_alone(campaign: Campaign) -> None:
    assert io_errors.attempt(campaign, io_errors.Point("delta", "train", "hang", 90)) == []


def test_the_shim_fails_the_call_that_it_was_told_to_and_no_other(campaign: Campaign) -> None:
    with campaign.trial("keep-last") as trial:
        campaign.run("fail", trial, fault=Fault(Mode.FAIL, 5, errno.ENOSPC, frozenset({"sync"})))
        failed = [op for op in trial.ops() if op.error == errno.ENOSPC]
        assert [(op.kind, op.number) for op in failed] == [("sync", 5)]
    with campaign.trial("keep-last") as trial:
        campaign.run("fail", trial, fault=Fault(Mode.FAIL_FROM, 5, errno.EIO, frozenset({"sync"})))
        before_the_end = list(itertools.takewhile(lambda op: op.kind != "mark", trial.ops()))
        assert [op.error == errno.EIO for op in before_the_end] == [
            op.number >= 5 for op in before_the_end
        ]
        assert len(before_the_end) > 5


def test_a_collection_that_hangs_does_not_hold_an_orbax_manager(campaign: Campaign) -> None:
    fault = Fault(Mode.HANG, 1, kinds=frozenset({"unlink"}))
    with campaign.trial("orbax-keep") as trial:
        ran = io_errors.meet(campaign, trial, "train", fault)
        assert (ran.value, ran.error, ran.hits) == ([], "", 1)


# --- what was found this way ----------------------------------------------------------------------


def test_a_lease_that_could_not_be_written_does_not_lock_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        Engine(tmp_path)
    monkeypatch.undo()
    Engine(tmp_path).close()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``hanging(module, when)``: fsyncs of directories through that module hang from now on where
    ``when(path)``, until the event is set.
    """
    go = threading.Event()
    original = durability.sync_directory

    def hang(module: Any, when: Any) -> threading.Event:
        def wait(path: Path) -> None:
            if when(path) and not go.is_set():
                assert go.wait(240)
            original(path)

        monkeypatch.setattr(module, "sync_directory", wait)
        return go

    yield hang
    go.set()


def test_an_fsync_that_hangs_fails_the_save_at_its_deadline_and_the_next_save_is_not_kept_waiting(
    tmp_path: Path, hanging: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": torch.ones(3)}
    options = SaveOptions()
    with Engine(tmp_path, options=options) as engine:
        # Only the hang is to meet a short deadline.
        set_deadline(options, 2.0)
        first: list[str] = []
        go = hanging(durability, lambda path: first.append(path.name) or len(first) == 1)
        with caplog.at_level(logging.ERROR, "deltacheck"):
            error = engine.save(7, state).exception(240)
        assert isinstance(error, errors.SaveFailed)
        assert "the save of step 7: the storage did not answer within" in str(error)
        assert "step 7" in caplog.text
        state["x"] += 1
        set_deadline(options, 240.0)
        engine.save(8, state).wait(timeout=240)
        assert not go.is_set()  # the hang has not ended
        assert engine.steps() == [8]
        assert_same(state, engine.restore(8))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


@pytest.mark.parametrize("later", [0, 3], ids=["alone", "behind newer steps"])
def test_a_commit_that_ends_after_its_save_was_given_up_gives_a_whole_step_or_none(
    tmp_path: Path, later: int
) -> None:
    """It hangs before its manifest is there. Alone, the step appears, and has its segments; behind
    newer ones the fence takes it back.
    """
    state, options = training_state(), SaveOptions()
    with Engine(tmp_path, options=options) as engine, pytest.MonkeyPatch.context() as patch:
        go, created = threading.Event(), threading.Event()
        create, manifest = arrays.create_file, SaveJob.manifest

        def hang(directory: Path, *of: Any) -> bool:
            if directory.name != "c0000000000":
                return create(directory, *of)
            assert go.wait(240)
            done = create(directory, *of)
            created.set()
            return done

        def hurry(job: SaveJob, *args: Any) -> Any:
            set_deadline(options, 0.1)  # of the commit alone
            return manifest(job, *args)

        patch.setattr(arrays, "create_file", hang)
        patch.setattr(SaveJob, "manifest", hurry)
        assert "may hang" in str(engine.save(0, state).exception(240))
        patch.setattr(SaveJob, "manifest", manifest)
        set_deadline(options, 240.0)
        saved = copy.deepcopy(state)
        for step in range(1, 1 + later):
            nudge(state)
            engine.save(step, state).wait(timeout=240)
        collect.collect(
            engine._root, grace_seconds=0, protected=engine._saver.chains.protected_segments()
        )
        newer = list(range(1, 1 + later))
        assert engine.steps() == newer
        go.set()
        wait_until(created.is_set)
        wait_until(lambda: engine.steps() == (newer or [0]))
        assert engine.steps() == (newer or [0])
        if not later:
            assert_same(saved, engine.restore(0))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_every_failure_of_a_save_names_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise errors.SaveFailed(
            "segment x: writing took longer than the deadline; the storage may hang"
        )

    with Engine(tmp_path) as engine:
        monkeypatch.setattr(segment.SegmentWriter, "finish", late)
        error = engine.save(12, {"x": torch.zeros(1)}).exception(240)
        assert isinstance(error, errors.SaveFailed)
        assert "the save of step 12 failed" in str(error)
        assert "may hang" in str(error)
