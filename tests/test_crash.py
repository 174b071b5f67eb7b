"""kill -9 at any moment: acknowledged steps stay whole, the run goes on where it was, and collection removes what is left behind."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from states import assert_same, nudge, training_state

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.store import collect
from deltacheck.store.root import open_root

CHILD = Path(__file__).parent / "crash_child.py"
KILLS = 6


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_again_and_again_never_loses_an_acknowledged_step(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    root, next_step, leftovers = tmp_path / "root", 0, 0
    for kill in range(KILLS):
        with subprocess.Popen(
            [sys.executable, str(CHILD), str(root), str(next_step)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            first = child.stdout.readline()
            assert first, f"seed {seed}, kill {kill}: the child ended by itself"
            time.sleep(rng.uniform(0, 0.4))
            child.kill()
            acknowledged = [int(first), *map(int, child.stdout.read().split())][-1]
        steps = deltacheck.open(root).steps()
        assert acknowledged in steps, (
            f"seed {seed}, kill {kill}: step {acknowledged} was acknowledged, but there are only {steps}"
        )
        assert deltacheck.open(root).verify(deep=True) == [], f"seed {seed}, kill {kill}"
        committed = {ref.id for step in steps for ref in open_root(root).manifest(step).segments}
        leftovers += len(set(open_root(root).store.segment_ids()) - committed)
        next_step = steps[-1] + 1
    expected = training_state()
    for step in range(next_step):
        nudge(expected, seed=step)
        expected["step"] = step
    with Engine(root) as engine:
        restored = engine.restore()
        del restored["rng"], expected["rng"]  # the children's generators are their own
        assert_same(expected, restored)
    opened = open_root(root)
    collect.collect(opened, grace_seconds=0, writer_is_dead=True)
    needed = {ref.id for step in opened.steps() for ref in opened.manifest(step).segments}
    assert set(opened.store.segment_ids()) == needed


def test_a_process_that_ends_with_a_save_under_way_finishes_it_first(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from deltacheck.backends.torch import Engine; engine = Engine(sys.argv[1])\n"
        "engine.save(3, {'x': torch.randn(2000, 1000)})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert deltacheck.open(tmp_path).steps() == [3]
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_an_exception_in_the_training_loop_still_finishes_the_save_under_way(tmp_path: Path) -> None:
    def training() -> None:
        with Engine(tmp_path) as engine:
            engine.save(0, {"x": torch.randn(1000, 1000)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert deltacheck.open(tmp_path).verify(deep=True) == []
