"""An engine whose calls are interrupted by handlers of signals, or made from several threads."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.save import exits, pipeline, saver
from deltacheck.save.job import save_job
from deltacheck.save.job.source import ViewedLeaf
from deltacheck.store.lock.interrupts import Flag, Lock
from tests.support.waiting import HANG_SECONDS, open_when_called


@pytest.fixture
def trained() -> Any:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

    step()
    return model, optimizer, step


@pytest.fixture
def on_usr1() -> Iterator[Any]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handle: signal.signal(signal.SIGUSR1, lambda *_: handle())
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_interrupts_an_early_copy_may_wait_for_the_save(
    tmp_path: Path, trained: Any, on_usr1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, step = trained
    original, capture = ViewedLeaf.copy, save_job.SaveJob.capture
    handled: list[int] = []
    is_copying = Flag()

    def copy(*arguments: Any) -> None:
        if not is_copying.is_set():
            is_copying.set()
            os.kill(os.getpid(), signal.SIGUSR1)
        original(*arguments)

    def capture_late(job: Any, sources: Any) -> None:
        if job.request.step == 1:
            assert is_copying.wait(240)
        capture(job, sources)

    with Engine(tmp_path, options=SaveOptions(durability="process")) as engine:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        engine.save(0, state).wait()
        monkeypatch.setattr(ViewedLeaf, "copy", copy)
        monkeypatch.setattr(save_job.SaveJob, "capture", capture_late)

        def handle() -> None:
            engine.before_update()  # copies, too, but not within a copy
            engine.wait(240)
            handled.extend(engine.steps())

        on_usr1(handle)
        engine.save(1, state)
        step()
    assert handled == [0, 1]


def test_the_wait_at_the_end_survives_what_another_handler_raises(
    tmp_path: Path, on_usr1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    waits, is_interrupted = Flag(), Flag()
    commit, shielded = pipeline.Pipeline._complete, exits.shielded

    def fail() -> None:
        is_interrupted.set()
        raise RuntimeError("DataLoader worker is killed by signal")

    def commit_late(self: Any, job: Any) -> None:
        assert waits.wait(240)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert is_interrupted.wait(240)
        commit(self, job)

    @contextlib.contextmanager
    def then_wait() -> Any:
        with shielded() as errors:
            waits.set()
            yield errors

    monkeypatch.setattr(pipeline.Pipeline, "_complete", commit_late)
    monkeypatch.setattr(exits, "shielded", then_wait)
    before = signal.signal(signal.SIGTERM, lambda *_: ends.append("earlier handler"))
    with Engine(tmp_path) as engine:
        on_usr1(fail)
        undo = exits.finish_on_signal(signal.SIGTERM)
        try:
            engine.save(0, {"x": torch.ones(100)})
            os.kill(os.getpid(), signal.SIGTERM)
            assert ends == ["earlier handler"]
            assert engine.steps() == [0]
        finally:
            undo()
            signal.signal(signal.SIGTERM, before)


def test_close_waits_for_the_save_whatever_a_handler_raises(
    tmp_path: Path, on_usr1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closes, is_interrupted, commit = Flag(), Flag(), pipeline.Pipeline._complete
    is_shielded = saver.shielded

    def fail() -> None:
        is_interrupted.set()
        raise RuntimeError("DataLoader worker is killed by signal")

    def commit_late(self: Any, job: Any) -> None:
        assert closes.wait(HANG_SECONDS)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert is_interrupted.wait(HANG_SECONDS)
        commit(self, job)

    @contextlib.contextmanager
    def then_close() -> Any:
        with is_shielded() as errors:
            closes.set()
            yield errors

    monkeypatch.setattr(pipeline.Pipeline, "_complete", commit_late)
    monkeypatch.setattr(saver, "shielded", then_close)
    on_usr1(fail)
    engine = Engine(tmp_path)
    engine.save(0, {"x": torch.ones(100)})
    with pytest.raises(RuntimeError, match="worker is killed"):
        engine.close()
    assert deltacheck.open(tmp_path).steps() == [0]


def test_load_state_dict_waits_for_the_save(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, train = trained
    gate, capture = threading.Event(), save_job.SaveJob.capture
    caller = threading.current_thread()

    def capture_late(job: Any, sources: Any) -> None:
        assert threading.current_thread() is caller or gate.wait(HANG_SECONDS)
        capture(job, sources)

    monkeypatch.setattr(save_job.SaveJob, "capture", capture_late)
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with Engine(tmp_path, options=SaveOptions(durability="process")) as engine:
        train()  # the engine now knows the optimizer, and reads its parameters in the background
        before = copy.deepcopy(model.state_dict())
        for step in range(3):
            gate.clear()
            engine.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            with monkeypatch.context() as patch:
                open_when_called(patch, saver.Saver, "settle_reads", gate)
                model.load_state_dict(other)
            gate.set()
            engine.wait()
            model.load_state_dict(before)
        restored = engine.restore()["model"]
    assert all(torch.equal(restored[name], before[name]) for name in before)
    assert torch.nn.Module.load_state_dict.__module__ == torch.nn.Module.__module__


def test_a_restore_of_another_thread_and_saves_follow_each_other(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    has_saved = Flag()
    with Engine(tmp_path, options=SaveOptions(durability="process")) as engine:
        engine.save(0, {"x": torch.zeros(1000)}).wait()

        def restore() -> None:
            try:
                while not has_saved.is_set():
                    engine.restore()
            except BaseException as error:  # noqa: BLE001 - asserted
                errors.append(error)

        thread = threading.Thread(target=restore)
        thread.start()
        for step in range(1, 15):
            engine.save(step, {"x": torch.full((1000,), float(step))}).wait()
        has_saved.set()
        thread.join()
        assert not errors
        assert engine.restore(14)["x"][0] == 14


def test_a_copy_of_an_optimizer_waits_for_its_overlapped_restore(
    tmp_path: Path, trained: Any
) -> None:
    model, optimizer, _ = trained
    with Engine(tmp_path, options=SaveOptions(durability="process")) as engine:
        engine.save(0, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}).wait()
        expected = copy.deepcopy(optimizer.state_dict()["state"])
        for values in optimizer.state.values():
            values["exp_avg"].zero_()
        engine.restore(into={"model": model.state_dict(), "optimizer": optimizer}, overlap=True)
        copied = copy.deepcopy(optimizer)
        engine.wait()
        assert "__getstate__" not in vars(optimizer)
    for number, values in copied.state_dict()["state"].items():
        assert torch.equal(values["exp_avg"], expected[number]["exp_avg"])


def test_a_save_that_is_half_begun_is_not_interrupted(
    tmp_path: Path, on_usr1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an engine around it, as in a Checkpointer of Orbax."""
    events: list[str] = []
    on_usr1(lambda: events.append("handled"))
    with Engine(tmp_path) as engine:

        def begin(*_: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)
            events.append("begun")

        saver: Any = engine._saver
        monkeypatch.setattr(saver, "_begin", begin)
        saver.save(0, {"t": "none"}, {}, lambda _: None)
    assert events == ["begun", "handled"]


def test_the_end_of_the_threads_is_not_interrupted(tmp_path: Path, on_usr1: Any) -> None:
    """A handler that closes the engine would join the threads within their join."""
    events: list[str] = []
    on_usr1(lambda: events.append("handled"))

    class Ending:
        def join(self, timeout: float) -> None:
            signal.raise_signal(signal.SIGUSR1)
            events.append("joined")

    with Engine(tmp_path) as engine:
        engine._saver.pipeline._threads.append(Ending())  # type: ignore[arg-type]
    assert events == ["joined", "handled"]


def test_the_grace_of_a_signal_begins_when_it_arrives() -> None:
    """Even while the main thread holds a lock, and its other handlers wait."""
    ends: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: ends.append("earlier handler"))
    undo = exits.finish_on_signal(signal.SIGTERM)
    try:
        with Lock():
            signal.raise_signal(signal.SIGTERM)
            assert undo.__self__._number == signal.SIGTERM  # type: ignore[attr-defined]
            assert ends == []
        assert ends == ["earlier handler"]
    finally:
        undo()
        signal.signal(signal.SIGTERM, before)


def test_the_saves_are_finished_at_exit_whatever_a_handler_raises(
    on_usr1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    def fail() -> None:
        raise RuntimeError("DataLoader worker is killed by signal")

    class Saves:
        def close(self, timeout: float | None) -> None:
            signal.raise_signal(signal.SIGUSR1)
            ends.append("closed")

    on_usr1(fail)
    monkeypatch.setattr(exits, "_saves_of_process", lambda: [(Saves(), "a root", 60.0)])
    monkeypatch.setattr(exits, "_unseen", [])
    monkeypatch.setattr(exits, "fail", ends.append)
    exits._finish_all()
    assert ends == ["closed"]
