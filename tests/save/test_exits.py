"""A process that ends has a durable last save, or a status other than 0 and a reason on stderr.

It never hangs, however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import deltacheck
from tests.support.paths import TESTS

CHILD = TESTS / "support" / "exits_child.py"
# Every deadline in the cases is below 1 s; the rest is for a machine that is busy with others
LIMIT_SECONDS = 240.0

pytestmark = pytest.mark.timeout(300)

# What becomes of the process where the last save is durable: its exit status, negative for a
# signal.
KINDS = {
    "end": 0,
    "exit 0": 0,
    "exit 3": 3,
    "exception": 1,
    "thread fails": 0,  # Python's own rule: an exception in a thread is printed, and that is all
    "thread exits": 0,
    "daemon thread": 0,
    "worker": 0,
    "forked child": 0,
    "sigint": -signal.SIGINT,
    "sigint in a wait": -signal.SIGINT,
    "sigterm, finish": -signal.SIGTERM,
    "sigterm inside save": -signal.SIGTERM,
    "sigterm, finish, handler": 75,
}
# These end at once, whatever is under way.
SUDDEN = {
    "sigterm": -signal.SIGTERM,
    "kill": -signal.SIGKILL,
    "os._exit": 9,
    "abort": -signal.SIGABRT,
}
FAULTS = ("ok", "full", "hang", "stuck")

EVERY = [
    *product([kind for kind in KINDS if kind != "sigint in a wait"], ["none"], FAULTS),
    *product(["end", "exception", "sigterm, finish"], ["wait", "close"], FAULTS),
    *product(SUDDEN, ["none"], ["ok", "stuck"]),
]
# Every case with EXIT_CASES=all (make soak); else each end of a process with a storage that works,
# and with one that does not.
FEW = ("exit 0", "thread exits")
CHOSEN = [
    case
    for number, case in enumerate(EVERY)
    if case[0] not in FEW
    and ((case[2], case[1]) == ("ok", "none") or number % 4 == 1 + number // 4 % 3)
]
CASES = [
    *(EVERY if os.environ.get("EXIT_CASES") == "all" else CHOSEN),
    ("sigint twice", "none", "stuck"),
    ("sigterm twice", "none", "stuck"),
    ("sigint inside save", "none", "ok"),
    ("no memory", "none", "ok"),
]
Result = dict[str, Any]


def run(
    folder: Path, cases: list[tuple[str, str, str]], *options: str
) -> dict[tuple[str, str, str], Result]:
    """Let every case end; its status, seconds, what it printed, and its root."""
    folders = {case: folder / str(number) for number, case in enumerate(cases)}
    for place in folders.values():
        place.mkdir()
    about = [
        {
            "folder": str(folders[case]),
            "kind": case[0],
            "ending": case[1],
            "fault": case[2],
            "limit": LIMIT_SECONDS,
        }
        for case in cases
    ]
    (folder / "cases.json").write_text(json.dumps(about))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder / "cases.json"), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    results = {line["folder"]: line for line in map(json.loads, done.stdout.splitlines())}
    found = {}
    for case, place in folders.items():
        output = (place / "out").read_text(errors="replace")
        found[case] = results[str(place)] | {"output": output, "root": place / "root"}
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Result]:
    return run(tmp_path_factory.mktemp("exits"), CASES)


def check(result: Result, status: int | None) -> bool:
    """No silent loss, no damage, no hang; whether the last save is durable. ``status``: where it
    is.
    """
    assert not result["hung"], result["output"]
    run = deltacheck.open(result["root"])
    steps = run.steps()
    assert steps in ([0], [0, 1]), result["output"]
    assert run.verify(deep=True) == []
    assert [run.restore(step)["x"].flat[0] for step in steps] == steps
    if steps == [0]:
        assert result["status"] != 0, result["output"]
    elif status is not None:
        assert result["status"] == status, result["output"]
    return steps == [0, 1]


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in KINDS], ids=", ".join)
def test_the_last_save_is_durable_or_the_exit_says_that_it_is_not(
    case: tuple[str, str, str], ended: dict[Any, Result]
) -> None:
    kind, _, fault = case
    result = ended[case]
    durable = check(result, KINDS[kind])
    assert durable == (fault == "ok"), result["output"]
    if not durable:
        assert "deltacheck" in result["output"]
        assert any(
            word in result["output"]
            for word in ("No space left", "may hang", "is only", "took longer")
        ), result["output"]


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in SUDDEN], ids=", ".join)
def test_a_sudden_end_is_seen_by_the_parent_and_earlier_steps_are_whole(
    case: tuple[str, str, str], ended: dict[Any, Result]
) -> None:
    result = ended[case]
    check(result, SUDDEN[case[0]])
    assert result["status"] == SUDDEN[case[0]]


def test_a_second_interrupt_ends_the_wait_for_a_storage_that_hangs(
    ended: dict[Any, Result],
) -> None:
    result = ended["sigint twice", "none", "stuck"]
    assert not check(result, None)
    assert result["status"] == -signal.SIGINT
    assert "did not become a checkpoint" in result["output"]


def test_a_second_signal_ends_the_process_at_once(ended: dict[Any, Result]) -> None:
    result = ended["sigterm twice", "none", "stuck"]
    assert not check(result, None)
    assert result["status"] == -signal.SIGTERM


def test_an_interrupt_in_the_middle_of_a_save_leaves_nothing_waiting(
    ended: dict[Any, Result],
) -> None:
    result = ended["sigint inside save", "none", "ok"]
    assert not check(result, None)
    assert result["status"] == -signal.SIGINT
    assert "KeyboardInterrupt" in result["output"]


def test_a_save_without_memory_fails_alone(ended: dict[Any, Result]) -> None:
    result = ended["no memory", "none", "ok"]
    assert check(result, 0)
    assert "told: the save of step 1 failed" in result["output"]


# --- the same under Orbax's CheckpointManager, whose own threads must end, too --------------------

ORBAX_CASES = [
    ("end", "none", "ok"),
    ("end", "none", "full"),
    ("end", "none", "hang"),
    ("sigterm, finish", "none", "ok"),
    ("sigterm, finish", "none", "stuck"),
    # Orbax waits with ``Thread.join``, which takes an interrupted thread for ended.
    ("sigint in a wait", "none", "held"),
]


@pytest.fixture(scope="module")
def managers_ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Result]:
    return run(tmp_path_factory.mktemp("managers"), ORBAX_CASES, "--orbax")


@pytest.mark.parametrize("case", ORBAX_CASES, ids=", ".join)
def test_a_managers_last_save_is_durable_or_the_exit_says_that_it_is_not(
    case: tuple[str, str, str], managers_ended: dict[Any, Result]
) -> None:
    result = managers_ended[case]
    durable = check(result, KINDS[case[0]])
    assert durable == (case[2] in ("ok", "held")), result["output"]
    if not durable:
        assert any(
            word in result["output"] for word in ("No space left", "Orbax has not finished it")
        ), result["output"]


# --- nothing is printed if nothing was lost -------------------------------------------------------

OPEN_MANAGER = """
import sys
import jax.numpy as jnp
import deltacheck
from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager

mngr = manager(sys.argv[1])
for step in range(3):
    mngr.save(step, args=DeltaSaveArgs({"x": jnp.full(300, step)}))
mngr.wait_until_finished()
mngr.restore(1, args=DeltaRestoreArgs({"x": jnp.zeros(300, int)}))
"""
OPEN_ENGINE = """
import sys
import torch
import deltacheck
from deltacheck.backends.torch import Engine

engine = Engine(sys.argv[1])
for step in range(2):
    engine.save(step, {"x": torch.full((300,), step)}).wait()
engine.restore()
engine.save(2, {"x": torch.full((300,), 2)})
engine.before_update()
"""
OPEN_READERS = """
follower = deltacheck.follow(sys.argv[1])
follower.poll()
reader = deltacheck.open(sys.argv[1])
reader.restore()
"""


@pytest.mark.parametrize("writer", [OPEN_MANAGER, OPEN_ENGINE], ids=["manager", "engine"])
def test_a_process_that_ends_with_everything_open_prints_nothing(
    writer: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", writer + OPEN_READERS, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert deltacheck.open(tmp_path).steps() == [0, 1, 2]
