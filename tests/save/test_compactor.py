"""Compaction behind a training: chains are cut short, no bit changes, and a kill at any moment
costs nothing but disk space.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.leaf.spec import LeafKind
from deltacheck.save.chains import compactor, whole_leaves
from deltacheck.store import collect
from deltacheck.store.root import open_root
from tests.support.states import assert_same, kinds
from tests.support.waiting import HANG_SECONDS


def state() -> dict[str, Any]:
    return {
        "big": torch.randn(300, 400),
        "small": torch.zeros(40),
        "frozen": torch.randn(200, 300),
        "number": 0,
    }


def train(state: dict[str, Any], step: int) -> dict[str, Any]:
    state["big"].view(-1)[step::97] += 1e-3
    state["small"][step % 40] = step
    state["number"] = step
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def depths(root: Path, step: int) -> dict[str, int]:
    from deltacheck.restore.chain import resolve_chains

    opened = open_root(root)
    manifest = opened.manifest(step)
    return {
        path: len(found.deltas)
        for path, found in resolve_chains(opened, manifest, manifest.leaves).items()
    }


@pytest.mark.parametrize(("keep_last", "pending"), [(None, 3), (1, 1)])
def test_chains_stay_short_without_keyframes_and_every_step_restores(
    tmp_path: Path, keep_last: int | None, pending: int
) -> None:
    live, states, written = state(), {}, []
    options: dict[str, Any] = {"keep_last": keep_last, "grace_seconds": 0, "max_pending": pending}
    with Engine(
        tmp_path, policy=Policy.exact(max_chain_depth=100), compact_after=4, **options
    ) as engine:
        for step in range(24):
            states[step] = train(live, step)
            handle = engine.save(step, live)
            if step % 3 == 0:
                handle.wait(timeout=60)
                engine._saver._chains.compactor.wait(60)  # type: ignore[union-attr]
            written.append(handle)
        engine.wait(60)
        for handle in written[1:]:
            assert LeafKind.KEYFRAME not in kinds(handle).values()
        for step in engine.steps():
            assert_same(states[step], engine.restore(step))
        assert max(depths(tmp_path, 23).values()) < 16
        assert depths(tmp_path, 23)["frozen"] == 0
    assert len(deltacheck.open(tmp_path).steps()) == (24 if keep_last is None else 1)
    assert deltacheck.open(tmp_path).verify(deep=True) == []
    collect.collect(open_root(tmp_path), grace_seconds=0, writer_is_dead=True)
    assert deltacheck.open(tmp_path).verify(deep=True) == []
    assert_same(
        states[23],
        {
            k: torch.as_tensor(v) if k != "number" else v
            for k, v in deltacheck.open(tmp_path).restore().items()
        },
    )


def test_saves_go_on_while_a_compaction_is_under_way_and_hang_from_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    go, write_whole = threading.Event(), compactor.write_whole
    monkeypatch.setattr(
        compactor, "write_whole", lambda *a, **k: go.wait(120) and write_whole(*a, **k)
    )
    live, states = state(), {}
    with Engine(
        tmp_path,
        policy=Policy.exact(max_chain_depth=100),
        compact_after=2,
        keep_last=1,
        grace_seconds=0,
    ) as engine:
        for step in range(8):
            states[step] = train(live, step)
            engine.save(step, live).wait(timeout=60)
        assert depths(tmp_path, 7)["big"] == 7
        go.set()
        engine._saver._chains.compactor.wait(60)  # type: ignore[union-attr]
        states[8] = train(live, 8)
        engine.save(8, live).wait(timeout=60)
        assert depths(tmp_path, 8)["big"] == 6
        assert_same(states[8], engine.restore(8))
        manifest = open_root(tmp_path).manifest()
        assert (
            len(manifest.segments) == 1 + 1 + 6
        )  # frozen, the compacted one, and the deltas since
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_compaction_that_fails_is_logged_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compactor, "write_whole", fail)
    live = state()
    with Engine(tmp_path, compact_after=2) as engine:
        for step in range(6):
            expected = train(live, step)
            engine.save(step, live).wait(timeout=60)
            engine._saver._chains.compactor.wait(60)  # type: ignore[union-attr]
        assert_same(expected, engine.restore())
    assert "was not compacted; its chains stay as they are" in caplog.text
    assert "No space left" in caplog.text


def test_a_restore_of_another_step_while_a_compaction_is_under_way_is_not_misled_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, states = state(), {}
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=100), compact_after=3) as engine:
        for step in range(6):
            states[step] = train(live, step)
            engine.save(step, live).wait(timeout=60)
        engine._saver._chains.compactor.wait(60)  # type: ignore[union-attr]
        live = engine.restore(1)
        states[7] = train(live, 7)
        engine.save(7, live).wait(timeout=60)
        states[8] = train(live, 8)
        engine.save(8, live).wait(timeout=60)
        for step in engine.steps():
            assert_same(states[step], engine.restore(step))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_closing_gives_up_a_compaction_under_way_and_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = whole_leaves.batches

    def slowly(*of: Any) -> Any:
        for batch in batches(*of):
            assert engine._saver._chains.compactor._stop.wait(HANG_SECONDS)  # of ``close``
            yield batch

    monkeypatch.setattr(whole_leaves, "batches", slowly)
    live = state()
    with Engine(tmp_path, compact_after=1) as engine:
        for step in range(3):
            train(live, step)
            engine.save(step, live).wait(timeout=60)
    needed = {ref.id for step in range(3) for ref in open_root(tmp_path).manifest(step).segments}
    assert set(open_root(tmp_path).store.segment_ids()) == needed


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compact_after must be at least 1"):
        Engine(tmp_path, compact_after=0)
    with Engine(tmp_path):
        pass  # the lease was given back


CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from tests.save.test_compactor import state, train
from deltacheck import Policy
from deltacheck.backends.torch import Engine
torch.set_num_threads(1); torch.manual_seed(0)
options = dict(policy=Policy.exact(max_chain_depth=100), compact_after=3)
with Engine(sys.argv[1], **options, keep_last=4, grace_seconds=0) as engine:
    if engine.steps():
        live = engine.restore(); first = live["number"] + 1
    else:
        live, first = state(), 0
    for step in range(first, 10_000):
        train(live, step)
        engine.save(step, live).wait()
        print(step, flush=True)
"""


@pytest.mark.timeout(300)
def test_a_training_that_is_killed_while_it_compacts_loses_nothing(tmp_path: Path) -> None:
    expected, done = None, -1
    torch.manual_seed(0)
    expected = state()
    for kill in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parents[2])],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            for _ in range(4 + kill):  # a compaction begins after the third step
                child.stdout.readline()
            child.kill()
            acknowledged = [done, *map(int, child.stdout.read().split())][-1]
        steps = deltacheck.open(tmp_path).steps()
        assert acknowledged in steps or acknowledged == done
        assert deltacheck.open(tmp_path).verify(deep=True) == []
        for step in range(done + 1, steps[-1] + 1):
            train(expected, step)
        done = steps[-1]
        with Engine(tmp_path) as engine:
            assert_same(expected, engine.restore())
    collect.collect(open_root(tmp_path), grace_seconds=0, writer_is_dead=True)
    opened = open_root(tmp_path)
    assert set(opened.store.segment_ids()) == {
        ref.id for step in opened.steps() for ref in opened.manifest(step).segments
    }
