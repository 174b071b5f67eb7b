"""Compaction: the newest step restores as before, from keyframes alone, and nothing else
changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.leaf.spec import LeafKind
from deltacheck.maintain.compaction import compact
from deltacheck.restore.resolve import resolve_leaves, stored_chains
from deltacheck.store import collect
from deltacheck.store.roots.opening import open_root
from tests.support.adam_run import AdamRun


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """A root with deltas, also of codes, and what each of its steps restores."""
    run = AdamRun((64, 96))
    run.advance(100)
    with Engine(tmp_path / "root", policy=Policy.auto(derive=False)) as engine:
        for _ in range(8):
            run.advance(10)
            engine.save(run.step, run.state()).result()
    opened = deltacheck.open(tmp_path / "root")
    return tmp_path / "root", {step: opened.restore(step) for step in opened.steps()}


def test_a_compacted_step_restores_as_before_from_keyframes_alone(
    run: tuple[Path, dict[int, Any]],
) -> None:
    path, states = run
    before = deltacheck.open(path).manifest()
    assert before.contract == "reused"
    done = compact(open_root(path))
    assert done is not None
    assert done.deltas > 1
    after = deltacheck.open(path).manifest()
    assert (after.step, after.contracts, after.derived, after.stage) == (
        before.step,
        before.contracts,
        before.derived,
        before.stage,
    )
    found = resolve_leaves(open_root(path), after)
    assert not any(chain.deltas for chain in stored_chains(found.values()).values())
    for step, state in states.items():
        np.testing.assert_equal(deltacheck.open(path).restore(step), state)
    assert deltacheck.open(path).verify(deep=True) == []
    assert compact(open_root(path)) is None


def test_after_compaction_gc_removes_what_no_step_needs_and_training_goes_on(
    run: tuple[Path, dict[int, Any]],
) -> None:
    path, states = run
    for ref in open_root(path).checkpoints()[:-1]:
        collect.delete_checkpoint(open_root(path), ref.seq)
    stored = set(open_root(path).store.segment_ids())
    compact(open_root(path))
    newest = max(states)
    # Leaves that the last saves stored whole, such as refreshed first moments, stay where they are.
    needed = {ref.id for ref in open_root(path).manifest(newest).segments}
    done = collect.collect(open_root(path), grace_seconds=0, writer_is_dead=True)
    assert {*done.removed} == stored - needed
    assert len(done.removed) > len(states) / 2
    np.testing.assert_equal(deltacheck.open(path).restore(), states[newest])
    with Engine(path) as engine:
        state = engine.restore()
        state["optimizer"]["state"][0]["master"][3, 4] = 1.0
        report = engine.save(newest + 1, state).result()
        assert {leaf.kind for leaf in report.leaves if leaf.path.startswith("model/")} == {
            LeafKind.UNCHANGED
        }
        np.testing.assert_equal(deltacheck.open(path).restore(), state)


def test_a_killed_compaction_leaves_nothing_after_one_collection(
    run: tuple[Path, dict[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the model of power cuts: the older form went, but what only it needed stayed for
    another collection.
    """
    path, states = run
    for ref in open_root(path).checkpoints()[:-1]:
        collect.delete_checkpoint(open_root(path), ref.seq)
    with monkeypatch.context() as patch:
        patch.setattr(collect, "delete_checkpoint", lambda *_: None)
        compact(open_root(path))
    assert len(open_root(path).checkpoints()) == 2
    collect.collect(open_root(path), grace_seconds=0, writer_is_dead=True)
    (ref,) = open_root(path).checkpoints()
    needed = {segment.id for segment in open_root(path).read(ref.manifest_path).segments}
    assert set(open_root(path).store.segment_ids()) == needed
    np.testing.assert_equal(deltacheck.open(path).restore(), states[max(states)])


def test_a_damaged_step_is_left_as_it_is(run: tuple[Path, dict[int, Any]]) -> None:
    path, _ = run
    before = open_root(path).manifest()
    victim = sorted((path / "segments" / before.segments[-1].id).rglob("c*"))[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(errors.Damaged):
        compact(open_root(path))
    assert open_root(path).manifest() == before


def test_the_steps_of_a_manager_are_not_compacted(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    from deltacheck.backends import orbax as backend

    with backend.manager(tmp_path / "root") as manager:
        manager.save(0, args=backend.DeltaSaveArgs({"w": np.zeros(3)}))
        manager.wait_until_finished()
    with pytest.raises(errors.StepNotFound, match="is the root of a CheckpointManager"):
        compact(open_root(tmp_path / "root"))


def test_the_command_compacts_once_and_says_so(
    run: tuple[Path, dict[int, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = run
    assert main(["prune", str(path), "--whole"]) == 0
    assert "written whole" in capsys.readouterr().out
    assert main(["prune", str(path), "--whole", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compacted"] is None


def test_the_command_is_refused_while_a_training_writes(run: tuple[Path, dict[int, Any]]) -> None:
    path, _ = run
    with Engine(path):
        assert main(["prune", str(path), "--whole"]) == 5
