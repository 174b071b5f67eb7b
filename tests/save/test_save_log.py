"""The log has a line for each committed save, and a summary at the end."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.save.job.save_job import SaveJob


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_saves_and_their_sum_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deltacheck")
    state = {"w": torch.arange(1000.0)}
    with Engine(tmp_path, options=SaveOptions(on_error="log")) as engine:
        handles = [engine.save(step, state).wait() for step in (10, 20)]
        lines = [record.getMessage() for record in caplog.records]
        with monkeypatch.context() as patch:
            patch.setattr(SaveJob, "finish_segment", full)
            engine.save(30, {"w": torch.ones(1000)}).exception()
    reports = [handle.report for handle in handles]
    written = [report.stored_bytes for report in reports if report is not None]
    assert len(lines) == len(written) == 2
    for step, stored_bytes, line in zip((10, 20), written, lines, strict=True):
        assert line.startswith(
            f"step {step} is committed to {tmp_path}: {stored_bytes:,} bytes of 4,000 written, in "
        )
        assert " in the background; training waited " in line
    blocked = sum(handle.blocking_seconds for handle in handles)
    assert caplog.records[-1].levelno == logging.INFO
    assert caplog.records[-1].getMessage() == (
        f"{tmp_path}: 2 saves committed, 1 failed; {sum(written):,} bytes written,"
        f" training waited {blocked:.3f} s"
    )


def test_an_engine_that_saves_nothing_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deltacheck")
    with Engine(tmp_path):
        pass
    assert not caplog.records
