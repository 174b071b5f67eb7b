"""Errors of the libraries below become errors of ours, which name the file or the step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture.capture import Capture
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
    def full(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 EB")

    with Engine(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "sources", full)
            with pytest.raises(errors.SaveFailed, match=r"save of step 0 failed.*allocate memory"):
                engine.save(0, {"x": torch.zeros(9)})
        engine.save(1, {"x": torch.zeros(9)}).wait()
        assert engine.steps() == [1]
