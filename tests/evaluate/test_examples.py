"""Each example runs, and continues from its last step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(example: str, folder: Path, steps: int) -> list[str]:
    command = [
        sys.executable,
        str(EXAMPLES / example),
        str(folder),
        "--steps",
        str(steps),
        "--every",
        "5",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.timeout(300)  # three processes that import a framework, one after the other
@pytest.mark.parametrize(
    ("example", "framework"), [("torch_training_loop.py", "torch"), ("jax_training_loop.py", "jax")]
)
def test_example_continues_from_its_last_step(example: str, framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    whole = _run(example, tmp_path / "whole", 20)
    first, second = _run(example, tmp_path / "parts", 10), _run(example, tmp_path / "parts", 20)
    assert second[0] == "resumed from step 10"
    assert first + second[1:] == whole  # losses included
