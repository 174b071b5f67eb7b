"""Each example runs, and continues from its last step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import deltacheck
from tests.support.promises import flat
from tests.support.xla import UNOPTIMIZED

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(example: str, folder: Path, steps: int, *more: str) -> list[str]:
    command = [
        sys.executable,
        str(EXAMPLES / example),
        str(folder),
        "--steps",
        str(steps),
        "--every",
        "5",
        *more,
    ]
    result = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def _environment() -> dict[str, str]:
    return os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {UNOPTIMIZED}"}


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


def test_the_queue_of_rollouts_trains_on_each_prompt_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    _run("rollout_queue.py", tmp_path / "run", 10)
    resumed, *_, end = _run("rollout_queue.py", tmp_path / "run", 20)
    assert resumed == "resumed from step 10"
    assert end == "each of 80 prompts was trained on once"


@pytest.mark.timeout(300)  # three processes that import a framework, one after the other
def test_a_checkpoint_of_every_step_continues_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import deltacheck
    from tests.golden.make import described

    _run("every_step.py", tmp_path / "whole", 12)
    first = _run("every_step.py", tmp_path / "parts", 6)
    _run("every_step.py", tmp_path / "parts", 12, "--memory", str(tmp_path / "memory"))
    whole, parts = (deltacheck.open(tmp_path / name) for name in ("whole", "parts"))
    assert whole.steps() == [*range(1, 13)]
    # Of the steps that were committed in memory, some are copied.
    assert {*range(1, 7), 12} <= set(parts.steps())
    for step in parts.steps():
        assert described(whole.restore(step)) == described(parts.restore(step))
    share = float(first[-1].partition("mean: ")[2].partition("%")[0])
    assert 0 < share < 25


# Kills the process behind the beginning of the save of step 15.
KILL = """
import os, runpy, signal, sys
from orbax.checkpoint import v1
save = v1.training.Checkpointer.save_checkpointables_async
def killed(self, step, *args):
    response = save(self, step, *args)
    if step == 15:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return response
v1.training.Checkpointer.save_checkpointables_async = killed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(300)  # three processes that import a framework, one after the other
@pytest.mark.parametrize("data", ["own", "grain"])
def test_a_killed_rl_loop_skips_and_repeats_no_prompt(data: str, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    more = ["--grain"] if data == "grain" and pytest.importorskip("grain") else []
    example, roots = "jax_rl_loop.py", [tmp_path / "whole", tmp_path / "parts"]
    whole = _run(example, roots[0], 20, *more)
    arguments = [str(roots[1]), "--steps", "20", "--every", "5", *more]
    command = [sys.executable, "-c", KILL, str(EXAMPLES / example), *arguments]
    killed = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout.splitlines() == whole[:2]
    resumed, *lines = _run(example, roots[1], 20, *more)
    # The last save may have ended just before the kill.
    assert resumed in ("resumed from step 10", "resumed from step 15")
    assert lines == whole[int(resumed.split()[-1]) // 5 :]
    states = [flat(deltacheck.open(root, item="state").restore(20)) for root in roots]
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(values, states[1][path]) for path, values in states[0].items())
