"""An engine that nobody refers to any more is closed: its saves are finished, and its root, threads
and memory are given back.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Keep, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture import guard
from deltacheck.save import exits
from deltacheck.save.job import save_job
from deltacheck.store.lock import holding
from deltacheck.store.lock import lease as lease_module
from deltacheck.store.lock.lease import LocalLease


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let saves end once the event is set."""
    original: Any = save_job.SaveJob.finish_segment
    go = threading.Event()

    def finish(self: Any) -> Any:
        assert go.wait(240)
        return original(self)

    monkeypatch.setattr(save_job.SaveJob, "finish_segment", finish)
    return go


def test_a_dropped_engine_gives_its_root_to_the_next_one(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    del engine
    for step in range(3):
        Engine(tmp_path).save(step, {"x": torch.full((3,), float(step))})
    with Engine(tmp_path) as engine:
        assert engine.steps() == [0, 1, 2]
        assert torch.equal(engine.restore(1)["x"], torch.ones(3))


def test_the_next_engine_waits_for_the_saves_of_a_dropped_one(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    waits: list[float] = []
    handle = Engine(tmp_path).save(7, {"x": torch.ones(3)})

    class Released(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            slow_disk.set()
            waits.append(timeout or 0)
            return super().wait(240)

    held = next(lease for lease in list(lease_module._held) if lease._root == tmp_path)
    assert held.holding.is_abandoned
    held.holding.released = Released()
    with Engine(tmp_path) as engine:
        assert waits
        assert engine.steps() == [7]
    assert handle.done()


def test_an_engine_in_a_cycle_is_dropped_too(tmp_path: Path) -> None:
    class Run:
        def __init__(self) -> None:
            self.engine, self.itself = Engine(tmp_path), self

    gc.disable()
    try:
        Run().engine.save(0, {"x": torch.zeros(3)})
        with Engine(tmp_path) as engine:
            assert engine.steps() == [0]
    finally:
        gc.enable()


def test_an_engine_that_is_in_use_is_named(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(errors.RootBusy) as caught:
        Engine(tmp_path)
    assert f"opened at {__file__}, line {line} and is still in use" in str(caught.value)
    assert "close()" in str(caught.value)
    first.close()
    Engine(tmp_path).close()


def test_the_traceback_of_an_exception_keeps_an_engine_in_use(tmp_path: Path) -> None:
    def train() -> None:
        engine = Engine(tmp_path)
        engine.save(0, {"x": torch.zeros(3)})
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory") as caught:
        train()
    with pytest.raises(errors.RootBusy, match="traceback"):
        Engine(tmp_path)
    del caught
    with Engine(tmp_path) as engine:
        assert engine.steps() == [0]


def test_updates_wait_for_the_reads_of_a_dropped_engine_as_long_as_it_saves(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    before = guard._guards
    handle = Engine(tmp_path).save(0, {"x": torch.ones(3)})
    gc.collect()
    assert len(guard._guards) == len(before) + 1
    slow_disk.set()
    handle.wait()
    Engine(tmp_path).close()
    assert guard._guards == before


def test_a_hundred_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    guards, sessions = guard._guards, weakref.WeakSet[Any]()
    for step in range(100):
        engine = Engine(tmp_path, keep=Keep(last=2), options=SaveOptions(durability="process"))
        engine.save(step, {"x": torch.full((3,), float(step))})
        sessions.add(engine._open)
        sessions.add(engine._saver)
        del engine
    with Engine(tmp_path) as engine:
        assert engine.steps() == [98, 99]
    # The last thread of each ends after it has given the root back. Those that read stay.
    for thread in set(threading.enumerate()) - before:
        if thread.name != "deltacheck-reader":
            thread.join(240)
            assert not thread.is_alive()
    gc.collect()
    assert not list(sessions)
    assert guard._guards == guards
    assert not [file for file in _open_files() if file.startswith(str(tmp_path))]


def _open_files() -> list[str]:
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return files


def test_a_dropped_engine_copies_its_steps_from_memory(tmp_path: Path) -> None:
    Engine(tmp_path / "root", memory=tmp_path / "memory").save(3, {"x": torch.ones(3)})
    with Engine(tmp_path / "root") as engine:
        assert engine.steps() == [3]


FAILED = """
import sys, torch
from deltacheck.backends.torch import Engine
from deltacheck.save.job.save_job import SaveJob
def full(job):
    raise OSError(28, "No space left")
SaveJob.finish_segment = full
Engine(sys.argv[1]).save(1, {"x": torch.ones(9)})
"""
UNDER_WAY = """
import sys, threading, torch
from deltacheck.backends.torch import Engine
from deltacheck.save import exits
from deltacheck.save.job.save_job import SaveJob
original, go = SaveJob.finish_segment, threading.Event()
def finish(job):
    assert go.wait(240)
    return original(job)
SaveJob.finish_segment = finish
ends = exits._saves_of_process
def begun():
    go.set()
    return ends()
exits._saves_of_process = begun
Engine(sys.argv[1]).save(1, {"x": torch.ones(9)})
"""


@pytest.mark.parametrize(
    ("program", "status"), [(FAILED, 120), (UNDER_WAY, 0)], ids=["failed", "under way"]
)
def test_the_exit_of_a_process_waits_for_a_dropped_engine(
    tmp_path: Path, program: str, status: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert ("did not become a checkpoint" in done.stderr) == (status == 120)
    assert deltacheck.open(tmp_path).steps() == ([] if status else [1])


def test_a_failure_of_a_dropped_engine_is_reported_at_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any) -> None:
        raise OSError(28, "No space left on device")

    unseen: list[tuple[int, str]] = []
    monkeypatch.setattr(exits, "_unseen", unseen)
    monkeypatch.setattr(save_job.SaveJob, "finish_segment", full)
    Engine(tmp_path).save(0, {"x": torch.zeros(3)})
    Engine(tmp_path).close()
    assert len(unseen) == 1
    assert f"{tmp_path}: the last save did not become a checkpoint" in unseen[0][1]
    assert "No space left" in unseen[0][1]


def test_a_lease_that_nobody_refers_to_is_given_back(tmp_path: Path) -> None:
    Engine(tmp_path).close()
    lease = LocalLease(tmp_path)
    with pytest.raises(errors.RootBusy, match="this process"):
        LocalLease(tmp_path)
    del lease
    LocalLease(tmp_path).release()


def test_a_lease_that_is_given_back_while_its_owner_is_looked_for_can_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engine(tmp_path).close()
    lease = LocalLease(tmp_path)
    own_holding = LocalLease._own_holding

    def look(taken: LocalLease) -> holding.Holding | None:
        lease.release()
        return own_holding(taken)

    monkeypatch.setattr(LocalLease, "_own_holding", look)
    LocalLease(tmp_path).release()


def test_a_holding_names_the_program_and_not_this_package() -> None:
    assert holding.Holding().opened_at.startswith(__file__)
