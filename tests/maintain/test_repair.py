"""Repair: what other data still has is healed bit for bit, what has gone is named, and nothing goes
away without being asked for.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.compaction import compact
from deltacheck.maintain.repair import repair
from deltacheck.store import collect
from deltacheck.store.roots.opening import open_root
from tests.support.states import assert_same

Run = tuple[Path, dict[int, Any]]


def states(count: int = 6) -> list[dict[str, Any]]:
    """A master, its working copy, a replica of that which is not tied, and a leaf whose few changes
    leave most chunks as they were.
    """
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(600, 300, generator=generator)
    wide = torch.randn(1200, 1000, generator=generator)
    found = []
    for step in range(count):
        weight = master.bfloat16()
        found.append(
            {
                "master": master.clone(),
                "weight": weight,
                "twin": weight.clone(),
                "wide": wide.clone(),
                "step": step,
            }
        )
        master[step] += 0.1
        wide[step * 200] += 1.0  # another chunk each time
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Keyframes at steps 0 and 3, deltas in between."""
    saved = states()
    with Engine(tmp_path / "run", policy=Policy.exact(max_chain_depth=2)) as engine:
        for step, state in enumerate(saved):
            engine.save(step, state).result(240)
    return tmp_path / "run", dict(enumerate(saved))


def data_of(root: Path, seq: int, inside: str) -> list[Path]:
    (segment,) = (root / "segments").glob(f"s{seq:010d}-*")
    return sorted(p for p in segment.glob(f"{inside}*/**/c*") if p.is_file())


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), max(1, len(content) // 64)):
        content[at] ^= 0xFF
    path.write_bytes(content)


def whole(run: Run, steps: set[int] | None = None) -> None:
    """Every step (or some) restores as it was saved, and verify finds nothing wrong with them."""
    root, saved = run
    broken = {finding.step for finding in deltacheck.open(root).verify(deep=True)}
    assert broken == set(saved) - (set(saved) if steps is None else steps)
    for step in saved if steps is None else steps:
        with Engine(root) as engine:
            assert_same(engine.restore(step), saved[step])


def test_a_working_copy_is_healed_from_its_equal_or_its_master(run: Run) -> None:
    root, _ = run
    spoil(data_of(root, 0, "leaves/weight")[0])
    before = root.stat().st_mtime_ns, sorted(root.rglob("*"))
    planned = repair(open_root(root), dry_run=True)
    assert before == (root.stat().st_mtime_ns, sorted(root.rglob("*")))  # a dry run changes nothing
    done = repair(open_root(root))
    assert done.healed == planned.healed
    assert done.steps == [0, 1, 2]
    assert all(healed.leaf == "weight" and "leaf 'twin'" in healed.source for healed in done.healed)
    whole(run)
    spoil(data_of(root, 3, "leaves/twin")[0])
    spoil(data_of(root, 3, "leaves/weight")[0])
    done = repair(open_root(root))
    assert {healed.leaf for healed in done.healed} == {"weight", "twin"}
    assert all(
        "'master' of the same step, rounded to bfloat16" in healed.source for healed in done.healed
    )
    whole(run)


def test_chunks_that_stand_elsewhere_too_are_healed_and_the_others_named(run: Run) -> None:
    """Of a damaged keyframe those that the next keyframe, or the one before, still has."""
    root, saved = run
    spoil(data_of(root, 3, "leaves/wide")[0])
    done = repair(open_root(root))
    lost = {(lost.step, lost.leaf, lost.chunks) for lost in done.lost}
    assert {step for step, _, _ in lost} <= {3, 4, 5}
    for _, leaf, chunks in lost:
        assert leaf == "wide"
        assert 0 < len(chunks) < 5  # the chunks that changed since step 2, and stand nowhere else
    healed = set(saved) - {step for step, _, _ in lost}
    whole(run, {step for step in healed if step is not None})


def test_a_delta_is_healed_where_a_keyframe_says_the_same(run: Run) -> None:
    """A step that was compacted holds whole what the deltas of its past led to; equal states at
    later steps do as well.
    """
    root, saved = run
    with Engine(root) as engine:
        engine.restore(5)
        engine.save(6, {**saved[5], "step": 6}).result(240)
    saved[6] = {**saved[5], "step": 6}
    compact(open_root(root))
    for file in data_of(root, 5, "delta"):
        spoil(file)
    assert {finding.step for finding in deltacheck.open(root).verify(deep=True)} == {5}
    done = repair(open_root(root))
    assert done.steps == [5]
    assert not done.lost
    whole(run)
    assert deltacheck.open(root).manifest().step == 6  # the newest is still the newest


def test_deltas_go_on_from_what_was_healed(run: Run) -> None:
    root, _ = run
    spoil(data_of(root, 0, "leaves/master")[0])
    lost = repair(open_root(root), dry_run=True).lost
    assert {loss.leaf for loss in lost} == {"master"}
    shutil.copytree(root, root.with_name("copy"))
    with Engine(
        root.with_name("copy")
    ) as engine:  # the same leaf at the same content, under another name
        state = states()[0]
        engine.save(9, {**state, "spare": state["master"].clone(), "step": 9}).result(240)
    done = repair(open_root(root.with_name("copy")))
    assert done.steps == [0, 1, 2]
    assert any(
        "the deltas after it" in healed.source or "segment" in healed.source
        for healed in done.healed
    )
    run[1][9] = {**states()[0], "spare": states()[0]["master"], "step": 9}
    whole((root.with_name("copy"), run[1]))


@pytest.mark.parametrize(
    "vanish",
    [lambda p: shutil.rmtree(p), lambda p: spoil(p / "zarr.json")],
    ids=["gone", "table"],
)
def test_a_lost_segment_costs_only_the_leaves_that_it_held(
    run: Run, vanish: Callable[[Path], None]
) -> None:
    root, _ = run
    (segment,) = (root / "segments").glob("s0000000001-*")
    vanish(segment)
    done = repair(open_root(root))
    assert {loss.step for loss in done.lost} == {1, 2}
    assert {loss.leaf for loss in done.lost} <= {"master", "wide", "weight", "twin"}
    whole(run, {0, 3, 4, 5})


def test_what_cannot_be_healed_stays_until_a_lossy_repair_sets_it_aside(run: Run) -> None:
    root, saved = run
    manifest = root / "checkpoints" / "c0000000004" / "zarr.json"
    manifest.write_bytes(manifest.read_bytes()[:-100])
    for file in data_of(root, 1, "delta"):
        spoil(file)
    done = repair(open_root(root))
    assert {loss.step for loss in done.lost} == {None, 1, 2}
    assert not done.removed
    assert manifest.exists()
    with pytest.raises(errors.Damaged, match="nothing is collected"):
        collect.collect(open_root(root), grace_seconds=0)
    done = repair(open_root(root), lossy=True)
    assert len(done.removed) == 3
    assert deltacheck.open(root).steps() == [0, 3, 5]
    assert (Path(done.backup or "") / "checkpoints" / "c0000000004" / "zarr.json").exists()
    whole((root, {step: saved[step] for step in (0, 3, 5)}))
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    whole((root, {step: saved[step] for step in (0, 3, 5)}))


def test_a_step_is_not_healed_past_a_newer_manifest_that_cannot_be_read(run: Run) -> None:
    """It would become the newest, and a restore of the newest would no longer say that there was
    another.
    """
    root, saved = run
    spoil(data_of(root, 0, "leaves/weight")[0])
    manifest = root / "checkpoints" / "c0000000005" / "zarr.json"
    manifest.write_bytes(b"{}")
    done = repair(open_root(root))
    assert not done.healed
    assert any("--lossy" in loss.problem for loss in done.lost)
    with pytest.raises(errors.Damaged):
        deltacheck.open(root).restore()
    repair(open_root(root), lossy=True)
    whole((root, {step: state for step, state in saved.items() if step != 5}))


def test_documents_that_only_plain_zarr_reads_are_written_again(run: Run) -> None:
    import zarr

    root, _ = run
    victims = [
        p
        for p in root.rglob("zarr.json")
        if b'"checksum"' not in p.read_bytes() and "control" not in p.parts and p.parent != root
    ]
    for number, victim in enumerate(victims):
        victim.write_bytes(
            b"{" if number % 2 else victim.read_bytes().replace(b"zarr_format", b"zarr_farmat")
        )
    done = repair(open_root(root))
    assert sorted(done.documents) == sorted(map(str, victims))
    whole(run)
    array = min(p.parent for p in victims if p.parent.name == "master")  # of the first step
    np.testing.assert_array_equal(
        zarr.open_array(array, mode="r")[...], run[1][0]["master"].numpy()
    )


def test_the_command_writes_a_lost_root_document_again_and_heals(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = run
    assert main(["repair", str(root)]) == 0
    assert "no damage found" in capsys.readouterr().out
    (root / "zarr.json").write_bytes(b"\0" * 100)
    spoil(data_of(root, 0, "leaves/weight")[0])
    assert main(["ls", str(root)]) == 4
    assert "deltacheck repair" in capsys.readouterr().err
    with (
        Engine(root.with_name("elsewhere")),
        pytest.raises(errors.Damaged, match="steps that restore then: 0, 1, 2, 3, 4, 5"),
    ):
        Engine(root)
    assert main(["repair", str(root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == [0, 1, 2]
    assert told["documents"] == [str(root / "zarr.json")]
    whole(run)


def test_the_command_says_what_is_lost_and_is_refused_beside_a_training(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = run
    spoil(data_of(root, 1, "delta")[0])
    assert main(["repair", str(root)]) == 1
    assert "step 1, leaf" in capsys.readouterr().out
    with Engine(root):
        assert main(["repair", str(root)]) == 5
        assert main(["repair", str(root), "--dry-run"]) == 1
    assert main(["repair", str(root), "--lossy"]) == 0
    assert "its step set aside" in capsys.readouterr().out
    assert main(["verify", str(root), "--deep"]) == 0


def test_a_managers_steps_are_healed_in_their_place(tmp_path: Path) -> None:
    from deltacheck.backends import orbax as backend

    saved = {}
    with backend.manager(tmp_path / "run") as manager:
        for step in range(3):
            value = np.arange(200_000, dtype=np.float32) + step
            saved[step] = {"a": value, "b": value.copy()}
            manager.save(step, args=backend.DeltaSaveArgs(saved[step]))
        manager.wait_until_finished()
    (segment,) = (tmp_path / "run" / "deltacheck" / "segments").glob("s0000000000-*")
    spoil(next(p for p in (segment / "leaves" / "a").iterdir() if p.name.startswith("c")))
    assert main(["repair", str(tmp_path / "run")]) == 0
    assert deltacheck.open(tmp_path / "run").verify(deep=True) == []
    with backend.manager(tmp_path / "run") as manager:
        assert manager.latest_step() == 2
        for step, state in saved.items():
            np.testing.assert_equal(deltacheck.open(tmp_path / "run").restore(step), state)
            np.testing.assert_equal(manager.restore(step, args=backend.DeltaRestoreArgs()), state)
        again = copy.deepcopy(saved[2])
        manager.save(3, args=backend.DeltaSaveArgs(again))
        manager.wait_until_finished()
    np.testing.assert_equal(deltacheck.open(tmp_path / "run").restore(), again)
