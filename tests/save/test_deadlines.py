"""No wait is without an end: a storage or a thread that hangs is told, and training goes on."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.save.job import save_job, segment_builder
from deltacheck.store.files import arrays, background, native_files
from deltacheck.store.files.local_storage import LocalStorage
from tests.support.waiting import wait_until

PATIENCE_SECONDS = 2.0  # only while a thread hangs; the machine may be busy with other tests


class Hanging:
    """A future of a storage that hangs."""

    def result(self, timeout: float | None = None) -> None:
        assert timeout is not None, "a wait without a deadline"
        threading.Event().wait(min(timeout, 5))
        raise TimeoutError

    def wait(self, timeout: float) -> None:
        """Return when the storage has not answered in time."""

    def done(self) -> bool:
        return False


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Lets a thread hang at the beginning of a method of ``SaveJob``, until the event is set."""
    go = threading.Event()

    def hang(method: str) -> threading.Event:
        original = getattr(save_job.SaveJob, method)

        def hanging(self: Any, *args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                assert go.wait(240)
            return original(self, *args)

        monkeypatch.setattr(save_job.SaveJob, method, hanging)
        return go

    yield hang
    go.set()


def guarded(engine: Engine) -> tuple[torch.nn.Parameter, dict[str, Any]]:
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    engine.guard(optimizer)
    return parameter, {"p": parameter, "optimizer": optimizer}


@pytest.mark.parametrize("method", ["capture", "encode"])
def test_a_thread_that_hangs_stops_neither_the_training_nor_later_saves(
    tmp_path: Path, stuck: Callable[[str], threading.Event], method: str
) -> None:
    with Engine(tmp_path) as engine:
        parameter, held = guarded(engine)
        engine.save(0, {"p": torch.zeros(3)}).wait(timeout=240)
        go = stuck(method)
        patience_seconds = engine._saver._pulse.patience_seconds
        engine._saver._pulse.patience_seconds = PATIENCE_SECONDS
        handle = engine.save(1, {"p": parameter})
        engine.before_update()
        with torch.no_grad():
            parameter.add_(1)
        with pytest.raises(errors.SaveFailed, match=r"step 1 .*nothing has happened for 2 s"):
            engine.save(2, {"p": parameter})
        with pytest.raises(errors.SaveFailed, match="still hangs in the save of step 1"):
            engine.save(3, {"p": parameter})
        assert isinstance(handle.exception(240), errors.SaveFailed)
        engine._saver._pulse.patience_seconds = patience_seconds
        go.set()
        wait_until(lambda: not engine._saver.pipeline.stuck)
        engine.save(4, {"p": parameter}).wait(timeout=240)
        assert engine.steps() == [0, 4]
        assert torch.equal(engine.restore(4)["p"], torch.full((1000,), 2.0))
        del held
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_waiting_without_a_timeout_ends_where_nothing_happens(
    tmp_path: Path, stuck: Callable[[str], threading.Event]
) -> None:
    with Engine(tmp_path) as engine:
        go = stuck("encode")
        patience_seconds = engine._saver._pulse.patience_seconds
        engine._saver._pulse.patience_seconds = PATIENCE_SECONDS
        handle = engine.save(1, {"p": torch.zeros(3)})
        for wait in (handle.wait, handle.result, handle.exception, engine.wait, engine.restore):
            with pytest.raises(
                errors.StorageTimeout, match=r"step 1 is captured, and nothing has happened for 2 s"
            ):
                wait()
        with pytest.raises(TimeoutError, match=r"is only captured after 0\.0"):
            engine.wait(0.01)
        engine._saver._pulse.patience_seconds = patience_seconds
        go.set()
        handle.wait(timeout=240)  # it was only waited for: nobody has given it up
        assert engine.steps() == [1]


def test_a_storage_that_is_slow_but_gets_on_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = segment_builder.chunk_digests, []

    with Engine(tmp_path) as engine:
        pulse = engine._saver._pulse

        def slow(*args: Any) -> Any:
            pulse._last -= 0.6 * pulse.patience_seconds  # so long does each leaf take
            left.append(pulse.left)
            return original(*args)

        monkeypatch.setattr(segment_builder, "chunk_digests", slow)
        engine.save(0, {f"p{k}": torch.zeros(70_000) for k in range(6)})
        engine.wait()
    assert len(left) == 6
    assert min(left) > 0


def test_a_root_is_given_back_when_the_save_that_close_gave_up_has_ended(
    tmp_path: Path, stuck: Callable[[str], threading.Event]
) -> None:
    engine = Engine(tmp_path)
    go = stuck("finish_segment")
    engine.save(1, {"p": torch.zeros(3)})
    with pytest.raises(TimeoutError):
        engine.close(0.05)
    with pytest.raises(errors.RootBusy):  # it may still be committed
        Engine(tmp_path)
    engine.close()
    go.set()
    wait_until(lambda: engine._writer.lease._descriptor < 0)
    with Engine(tmp_path) as again:
        assert again.steps() == [1]


def test_a_read_that_hangs_is_told_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path) as engine:
        engine.save(0, {"p": torch.zeros(100_000)}).wait()
        monkeypatch.setattr(background, "TIMEOUT_SECONDS", 0.05)
        original = native_files.JoinedRead.start
        monkeypatch.setattr(
            native_files.JoinedRead,
            "start",
            lambda self, memory: (
                [(Hanging(), file.path)]
                if str((file := self._files[0]).path).endswith("/p")
                else original(self, memory)
            ),
        )
        with pytest.raises(
            errors.StorageTimeout, match=r"leaves/p: the storage did not answer within 0\.05 s"
        ):
            deltacheck.open(tmp_path).restore()


def test_a_commit_that_hangs_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path) as engine:
        monkeypatch.setattr(background, "TIMEOUT_SECONDS", 0.05)
        monkeypatch.setattr(LocalStorage, "start_write_new", lambda *_: Hanging())
        monkeypatch.setattr(
            arrays,
            "write",
            lambda *_: type("Done", (), {"result": lambda self, timeout=None: None})(),
        )
        error = engine.save(0, {"p": torch.zeros(3)}).exception(240)
        assert isinstance(error, errors.SaveFailed)
        assert isinstance(error.__cause__, errors.StorageTimeout)
        monkeypatch.undo()
        engine.save(1, {"p": torch.zeros(3)}).wait(timeout=240)


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), GeneratorExit()]
)
@pytest.mark.parametrize("method", ["encode", "manifest"])
def test_whatever_ends_a_thread_fails_the_save_and_not_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, method: str
) -> None:
    def fails(*_: Any) -> None:
        raise error

    with Engine(tmp_path) as engine:
        monkeypatch.setattr(save_job.SaveJob, method, fails)
        found = engine.save(0, {"p": torch.zeros(3)}).exception(240)
        assert isinstance(found, errors.SaveFailed)
        assert type(error).__name__ in str(found)
        monkeypatch.undo()
        engine.save(1, {"p": torch.zeros(3)}).wait(timeout=240)
        assert engine.steps() == [1]


@pytest.mark.parametrize("copies", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_neither_pickled_nor_copied(
    tmp_path: Path, copies: Callable[[object], object]
) -> None:
    with (
        Engine(tmp_path) as engine,
        pytest.raises(TypeError, match="an Engine cannot be pickled or copied"),
    ):
        copies(engine)


def test_a_signal_finishes_the_saves_and_then_calls_the_handler_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that lets the process live is asked again at the next signal."""
    seen: list[list[int]] = []
    with Engine(tmp_path) as engine:
        before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(engine.steps()))
        try:
            ours = deltacheck.finish_on_signal(signal.SIGUSR1, grace_seconds=30)
            for step in range(3):
                engine.save(step, {"p": torch.zeros(3)})
                signal.raise_signal(signal.SIGUSR1)
            assert seen == [[0], [0, 1], [0, 1, 2]]
            ours()
            signal.raise_signal(signal.SIGUSR1)
            assert len(seen) == 4
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_handlers_are_set_in_the_main_thread_only_and_for_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="grace_seconds must be more than 0"):
        deltacheck.finish_on_signal(grace_seconds=0)
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            deltacheck.finish_on_signal()
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(240)
    assert "main thread" in str(found[0])
    assert not any(thread.name == "deltacheck-grace" for thread in threading.enumerate())
