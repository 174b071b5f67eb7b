"""``deltacheck run`` with several ranks: starters pass the hook on, and a signal to one rank is
one to all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import deltacheck
from tests.support.paths import REPOSITORY

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (find_spec("transformers") and find_spec("accelerate")),
        reason="transformers is not installed",
    ),
]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
)


class Done(NamedTuple):
    code: int
    lines: list[str]
    err: str


def train(
    folder: Path, name: str, starter: tuple[str, ...], *options: str, kind: str = "hf", **env: str
) -> Done:
    script = REPOSITORY / "tests" / "support" / "unmodified" / f"{kind}_script.py"
    words = [str(folder / name), str(folder / f"{name}.json"), "1"]
    command = [sys.executable, "-m", *starter, str(script), *words]
    done = subprocess.run(
        [sys.executable, "-m", "deltacheck", "run", *options, "--", *command],
        env=os.environ
        | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        | env,
        capture_output=True,
        text=True,
        timeout=560,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("deltacheck run: ")]
    return Done(done.returncode, lines, done.stderr[-4000:])


def result(folder: Path, name: str) -> Any:
    return [json.loads((folder / f"{name}.json{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("starter", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_killed_ranks_continue_without_an_edit(tmp_path: Path, starter: tuple[str, ...]) -> None:
    whole = train(tmp_path, "whole", starter)
    assert whole.code == 0, whole.err
    parts = train(tmp_path, "parts", starter, "--restarts", "1", KILL_AT="5")
    assert parts.code == 0, parts.err
    assert result(tmp_path, "parts") == result(tmp_path, "whole")
    # One rank speaks for all.
    root = tmp_path / "parts" / "deltacheck"
    begun = [line for line in parts.lines if "Trainer saves to" in line]
    assert len(begun) == 2
    assert begun[1] in {
        f"deltacheck run: Trainer saves to {root}, continues from step {step}" for step in (2, 4)
    }


# The trainer, and the root beside or in the folder of the script. Accelerate's script is killed
# after its second save, Lightning's in its third epoch of two steps.
LOOPS = {
    "accelerate": ("Accelerator", "parts.deltacheck", "5", {4}),
    "lightning": ("Trainer", "parts/deltacheck", "5", {2, 4}),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_killed_ranks_of_other_trainers_continue_without_an_edit(tmp_path: Path, kind: str) -> None:
    if find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    trainer, root, kill_at, steps = LOOPS[kind]
    whole = train(tmp_path, "whole", TORCHRUN, kind=kind)
    assert whole.code == 0, whole.err
    options = {"KILL_AT": kill_at}
    parts = train(tmp_path, "parts", TORCHRUN, "--restarts", "1", kind=kind, **options)
    assert parts.code == 0, parts.err
    expected, actual = result(tmp_path, "whole"), result(tmp_path, "parts")
    for result_of in (*expected, *actual):
        result_of.pop("begin", None)
    assert actual == expected
    # Each rank has random states of its own.
    assert len({rank["state"] for rank in expected}) == 2
    begun = [line for line in parts.lines if f"{trainer} saves to" in line]
    assert begun[1] in {
        f"deltacheck run: {trainer} saves to {tmp_path / root}, continues from step {step}"
        for step in steps
    }, parts.err


def test_a_signal_to_one_rank_saves_the_same_step_on_all(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", TORCHRUN)
    ended = train(tmp_path, "parts", TORCHRUN, KILL_AT="2", KILL_BY="SIGUSR1")
    assert ended.code != 0
    assert deltacheck.open(tmp_path / "parts" / "deltacheck").steps() == [2, 3], ended.err
    again = train(tmp_path, "parts", TORCHRUN)
    assert (whole.code, again.code) == (0, 0), again.err
    assert result(tmp_path, "parts") == result(tmp_path, "whole")
    assert signal.Signals.SIGUSR1.name in ended.err
