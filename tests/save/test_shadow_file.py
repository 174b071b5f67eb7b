"""Shadows in scratch files."""

from __future__ import annotations

import errno
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


def mapped_files(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def states() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    first = {"w": torch.randn(300, 1000, generator=random), "small": torch.zeros(3)}
    second = {
        "w": first["w"] + 0.01 * torch.randn(300, 1000, generator=random),
        "small": first["w"][0, :3],
    }
    return [first, second, {name: value + 1 for name, value in second.items()}]


def test_a_mapped_shadow_lies_in_files_that_end_with_the_engine(
    tmp_path: Path, scratch: Path
) -> None:
    saved = states()
    with Engine(tmp_path / "root", options=SaveOptions(shadow="mapped")) as engine:
        for step, state in enumerate(saved[:2]):
            report = engine.save(step, state).result()
        assert report is not None
        assert report.stored_bytes < 4 * saved[0]["w"].numel()  # it was found in the shadow
        assert mapped_files(scratch) == 1
        assert list(scratch.iterdir()) == []
    del engine
    gc.collect()
    assert mapped_files(scratch) == 0
    with Engine(tmp_path / "root", options=SaveOptions(shadow="mapped")) as engine:
        assert torch.equal(engine.restore(1)["w"], saved[1]["w"])
        assert mapped_files(scratch) == 1
        engine.save(2, saved[2]).result()
        for step, state in enumerate(saved):
            restored = engine.restore(step)
            assert all(torch.equal(restored[name], value) for name, value in state.items())


def test_without_space_for_it_the_shadow_stays_in_memory_and_the_log_says_so(
    tmp_path: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    saved = states()
    with Engine(tmp_path / "root", options=SaveOptions(shadow="mapped")) as engine:
        for step, state in enumerate(saved):
            engine.save(step, state).result()
            assert torch.equal(engine.restore(step)["w"], state["w"])
    assert mapped_files(scratch) == 0
    assert caplog.text.count("No space left on device; set TMPDIR") == 1
