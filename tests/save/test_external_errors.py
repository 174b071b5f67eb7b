"""Errors of the libraries below become errors of ours, which name the file or the step."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture.capture import Capture
from deltacheck.leaf.external_errors import translated
from deltacheck.profile import Profile
from deltacheck.restore.follow import follower as follower_module
from deltacheck.store.files.local_storage import LocalStorage


class Failing:
    """A future of TensorStore whose request has failed."""

    def result(self, timeout: float | None = None) -> None:
        raise ValueError("UNAVAILABLE: Error writing local file: Input/output error [OS error 5]")


def test_a_root_that_tensorstore_cannot_write_is_an_error_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "start_write_new", lambda *_: Failing())
        with pytest.raises(errors.StorageFailed, match=r"zarr\.json could not be written: UNAVAIL"):
            Engine(tmp_path / "root")
    Engine(tmp_path / "root").close()
    assert os.listdir(tmp_path) == ["root"]


def test_a_capture_without_memory_is_a_failed_save_and_the_next_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 EB")

    with Engine(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "sources", full)
            with pytest.raises(errors.SaveFailed, match=r"save of step 0 failed.*allocate memory"):
                engine.save(0, {"x": torch.zeros(9)})
        engine.save(1, {"x": torch.zeros(9)}).wait()
        assert engine.steps() == [1]


# torch and XLA have classes of their own for the memory of a device; both are ``RuntimeError``.
NO_DEVICE_MEMORY = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cuda": RuntimeError("CUDA error: out of memory"),
    "host": MemoryError("Unable to allocate 2.00 GiB for an array"),
}


@pytest.mark.parametrize("error", NO_DEVICE_MEMORY.values(), ids=NO_DEVICE_MEMORY.keys())
def test_a_capture_without_device_memory_is_a_failed_save_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    with Engine(tmp_path, options=SaveOptions(capture="eager")) as engine:
        engine.save(0, {"x": torch.zeros(9)}).wait()
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "sources", full)
            with pytest.raises(errors.SaveFailed, match=r"step 1 failed.*shadow='host'") as caught:
                engine.save(1, {"x": torch.ones(9)})
        assert caught.value.__cause__ is error
        report = engine.save(2, {"x": torch.ones(9)}).result()
        assert report is not None
        assert report.failed_saves == 1
        assert engine.steps() == [0, 2]


def test_a_capture_without_device_memory_is_left_to_the_log_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise NO_DEVICE_MEMORY["torch"]

    with Engine(
        tmp_path, options=SaveOptions(capture="eager", on_error="log", max_failures=2)
    ) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "sources", full)
            handle = engine.save(0, {"x": torch.zeros(9)})
            assert handle.state == "failed"
            assert isinstance(handle.exception(0), errors.SaveFailed)
            with pytest.raises(errors.SaveFailed, match="2 saves in a row"):
                engine.save(1, {"x": torch.zeros(9)})
        engine.save(2, {"x": torch.zeros(9)}).wait()


def test_errors_of_the_system_keep_their_class_number_and_cause_beside_ours(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.StorageFailed, match="file/root") as caught:
        Profile.read(tmp_path / "file" / "root")
    failure = caught.value
    assert isinstance(failure, NotADirectoryError)
    assert failure.errno == errno.ENOTDIR
    assert type(failure.__cause__) is NotADirectoryError
    # A rank sends its error to the others.
    copy = pickle.loads(pickle.dumps(failure))  # noqa: S301 - ours
    assert (type(copy), str(copy), copy.errno) == (type(failure), str(failure), failure.errno)


def test_mistakes_of_the_caller_and_limits_of_time_keep_their_class(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        with pytest.raises(ValueError, match="step must be an integer") as caught:
            engine.save(-1, {})
        assert not isinstance(caught.value, errors.DeltacheckError)
        with pytest.raises(TypeError):
            engine.save()  # type: ignore[call-arg]
    for error in (TimeoutError("step 3 is only captured"), KeyboardInterrupt(), ValueError("x")):
        assert translated(error, "a call") is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.ENOMEM], ids=os.strerror)
def test_a_file_that_cannot_be_opened_for_want_of_resources_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A restore with ``fallback`` would go on with older values."""
    with Engine(tmp_path) as engine:
        for step in range(2):
            engine.save(step, {"x": torch.full((9,), float(step))}).wait()
    opened = deltacheck.open(tmp_path)
    original = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("c.0"):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(errors.StorageFailed) as caught:
        opened.restore(fallback=True)
    assert caught.value.errno == number


def test_an_update_that_fails_half_way_is_followed_by_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may then hold values of both steps."""
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": torch.zeros(9), "y": torch.zeros(9)}).wait()
        follower = deltacheck.follow(tmp_path)
        assert follower.poll() is not None
        engine.save(1, {"x": torch.ones(9), "y": torch.ones(9)}).wait()
        with monkeypatch.context() as patch:

            def full(*_: Any, **__: Any) -> None:
                raise MemoryError

            patch.setattr(follower_module, "load_leaves", full)
            with pytest.raises(errors.BudgetExceeded):
                follower.poll()
        engine.save(2, {"x": torch.ones(9), "y": torch.zeros(9)}).wait()
        update = follower.poll()
        assert update is not None
        assert (update.step, update.since) == (2, None)
        assert update.changes.keys() == {"x", "y"}
