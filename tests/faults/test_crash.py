"""The end of a process with a save under way: it is finished first. Kills are in
``test_crash_points.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deltacheck
from deltacheck.backends.torch import Engine


def test_a_process_that_ends_with_a_save_under_way_finishes_it_first(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from deltacheck.backends.torch import Engine; engine ="
        " Engine(sys.argv[1])\nengine.save(3, {'x': torch.randn(2000, 1000)})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=240)
    assert deltacheck.open(tmp_path).steps() == [3]
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_an_exception_in_the_training_loop_still_finishes_the_save_under_way(
    tmp_path: Path,
) -> None:
    def training() -> None:
        with Engine(tmp_path) as engine:
            engine.save(0, {"x": torch.randn(1000, 1000)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert deltacheck.open(tmp_path).verify(deep=True) == []
