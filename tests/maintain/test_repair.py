"""Repair writes again what follows from the rest, names what is lost, and takes nothing away
unless that is asked for.
"""

from __future__ import annotations

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


def test_damage_to_content_is_named_and_changes_nothing(run: Run) -> None:
    root, _ = run
    spoil(data_of(root, 0, "leaves/weight")[0])
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    done = repair(open_root(root))
    assert {(lost.step, lost.leaf) for lost in done.lost} == {(n, "weight") for n in range(3)}
    assert (done.documents, done.removed, done.backup) == ([], [], None)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    whole(run, {3, 4, 5})


@pytest.mark.parametrize(
    "vanish",
    [lambda p: shutil.rmtree(p), lambda p: spoil(p / "zarr.json")],
    ids=["gone", "table"],
)
def test_a_lost_segment_costs_only_the_steps_that_need_it(
    run: Run, vanish: Callable[[Path], None]
) -> None:
    root, _ = run
    (segment,) = (root / "segments").glob("s0000000001-*")
    vanish(segment)
    done = repair(open_root(root))
    assert {loss.step for loss in done.lost} == {1, 2}
    assert all(loss.leaf is None and segment.name in loss.problem for loss in done.lost)
    whole(run, {0, 3, 4, 5})


def test_what_is_lost_stays_until_a_lossy_repair_sets_it_aside(run: Run) -> None:
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


def test_the_command_writes_a_lost_root_document_again(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = run
    assert main(["repair", str(root)]) == 0
    assert "no damage found" in capsys.readouterr().out
    (root / "zarr.json").write_bytes(b"\0" * 100)
    assert main(["ls", str(root)]) == 4
    assert "deltacheck repair" in capsys.readouterr().err
    with (
        Engine(root.with_name("elsewhere")),
        pytest.raises(errors.Damaged, match="steps that restore then: 0, 1, 2, 3, 4, 5"),
    ):
        Engine(root)
    assert main(["repair", str(root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["documents"] == [str(root / "zarr.json")]
    assert told["lost"] == []
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


def test_a_step_of_a_manager_is_set_aside_with_its_folder(tmp_path: Path) -> None:
    from deltacheck.backends import orbax as backend

    saved = {}
    policy = Policy.exact(max_chain_depth=0)
    with backend.manager(tmp_path / "run", policy=policy) as manager:
        for step in range(3):
            saved[step] = {"a": np.arange(200_000, dtype=np.float32) + step}
            manager.save(step, args=backend.DeltaSaveArgs(saved[step]))
        manager.wait_until_finished()
    (segment,) = (tmp_path / "run" / "deltacheck" / "segments").glob("s0000000001-*")
    spoil(next(p for p in (segment / "leaves" / "a").iterdir() if p.name.startswith("c")))
    assert main(["repair", str(tmp_path / "run")]) == 1
    assert main(["repair", str(tmp_path / "run"), "--lossy"]) == 0
    assert deltacheck.open(tmp_path / "run").verify(deep=True) == []
    with backend.manager(tmp_path / "run", policy=policy) as manager:
        assert manager.all_steps() == [0, 2]
        for step in (0, 2):
            restored = manager.restore(step, args=backend.DeltaRestoreArgs())
            np.testing.assert_equal(restored, saved[step])
        manager.save(3, args=backend.DeltaSaveArgs(saved[1]))
        manager.wait_until_finished()
    np.testing.assert_equal(deltacheck.open(tmp_path / "run").restore(), saved[1])
