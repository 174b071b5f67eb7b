"""Redundant damage costs nothing, and repair never takes away a step that restores."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.repair import repair
from deltacheck.save import root_writer
from deltacheck.store import collect
from deltacheck.store.manifest import SegmentRef
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import StepRef
from tests.suites import damage_trials
from tests.suites.damage_trials import FAULTS, Subject, damaged
from tests.support.adam_run import AdamRun
from tests.support.states import assert_same, differences


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """Keyframes at steps 0 and 4, deltas in between; a large, a small and a frozen leaf."""
    state = {
        "large": torch.randn(400, 300),
        "small": torch.randn(50),
        "frozen": torch.randn(300, 300),
    }
    saved = {}
    with Engine(tmp_path / "run", policy=Policy.exact(max_chain_depth=3)) as engine:
        for step in range(6):
            state["large"][step] += 1.0
            state["small"][step] += 1.0
            saved[step] = copy.deepcopy(state)
            engine.save(step, state).result(240)
    return tmp_path / "run", saved


def digest_files(root: Path) -> list[Path]:
    return sorted(root.glob("segments/s*/digests/c*"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def forge(path: Path) -> None:
    """Put the digests of another segment there: their checksum is right."""
    others = [p for p in digest_files(path.parents[3]) if p.parents[1] != path.parents[1]]
    path.write_bytes(others[-1].read_bytes())


@pytest.mark.parametrize("spoil", [Path.unlink, truncate, forge], ids=["lost", "cut", "forged"])
@pytest.mark.parametrize("which", [0, 1, "all"])
def test_lost_digests_cost_nothing(
    run: tuple[Path, dict[int, Any]], which: int | str, spoil: Callable[[Path], None]
) -> None:
    root, saved = run
    files = digest_files(root)
    before = {path: path.read_bytes() for path in files}
    for path in files if which == "all" else [files[int(which)]]:
        spoil(path)
    opened = deltacheck.open(root)
    for step, state in saved.items():
        wanted = {path: value.numpy() for path, value in state.items()}
        assert not list(differences(wanted, opened.restore(step)))
    for deep in (False, True):
        assert deltacheck.open(root).verify(deep=deep) == []
        assert deltacheck.open(root).verify(deep=deep, redundant=True)
    done = repair(open_root(root), lossy=True)
    assert not done.lost
    assert not done.healed
    assert not done.removed
    assert deltacheck.open(root).verify(deep=True, redundant=True) == []
    if spoil is not forge or which != "all":
        assert {path: path.read_bytes() for path in digest_files(root)} == before
    with Engine(root) as engine:  # a training goes on as before
        assert_same(engine.restore(5), saved[5])
        engine.save(6, saved[5]).result(240)


@pytest.mark.parametrize("which", range(6))
def test_a_lost_table_is_rebuilt_byte_for_byte(
    run: tuple[Path, dict[int, Any]], which: int
) -> None:
    """From the manifest of the step and the arrays; the digest of the document proves it."""
    root, saved = run
    table = sorted(root.glob("segments/s*"))[which] / "zarr.json"
    before = table.read_bytes()
    table.unlink() if which % 2 else table.write_bytes(b"{" + before[1:-9])
    with pytest.raises(errors.Damaged):
        deltacheck.open(root).restore(which)
    done = repair(open_root(root), lossy=True)
    assert not done.lost
    assert not done.removed
    assert table.read_bytes() == before
    assert deltacheck.open(root).verify(deep=True, redundant=True) == []
    with Engine(root) as engine:
        assert_same(engine.restore(which), saved[which])


@pytest.fixture(scope="module")
def subjects() -> Iterator[list[Subject]]:
    """A root of each kind: plain, Orbax's, with codes, with gradients, in tiles."""
    with damage_trials.built() as built:
        yield built


def tables_of(root: Path) -> list[Path]:
    return sorted(root.rglob("segments/s*/zarr.json"))


@pytest.mark.parametrize("kind", damage_trials.SUBJECTS)
@pytest.mark.parametrize("what", ["tables", "newest tables", "digests", "metadata of arrays"])
def test_whatever_follows_from_the_rest_is_rebuilt_byte_for_byte(
    subjects: list[Subject], tmp_path: Path, kind: str, what: str
) -> None:
    (subject,) = (one for one in subjects if one.name == kind)
    root = tmp_path / "root"
    shutil.copytree(subject.root, root)
    victims = {
        "tables": tables_of(root),
        "newest tables": [path for path in tables_of(root) if path.parts[-2] > "s0000000002-"],
        "digests": sorted(root.rglob("segments/s*/digests/c*")),
        "metadata of arrays": sorted(root.rglob("segments/s*/*/**/zarr.json")),
    }[what]
    before = {path: path.read_bytes() for path in victims}
    for number, path in enumerate(victims):
        path.unlink() if number % 2 else path.write_bytes(before[path][:-9])
    steps = deltacheck.open(root).steps()
    assert bool(deltacheck.open(root).verify()) == ("tables" in what)
    done = repair(open_root(root), lossy=True)
    assert not done.lost
    assert not done.removed
    if what == "metadata of arrays":  # TensorStore leaves defaults out, which we write
        assert all(path.is_file() for path in victims)
    else:
        assert {path: path.read_bytes() for path in victims} == before
    assert deltacheck.open(root).verify(deep=True, redundant=True) == []
    assert deltacheck.open(root).steps() == steps
    door, wanted = next(iter(subject.doors.values()))
    for step in steps:
        assert not list(differences(wanted[step], door(root, step)))


@pytest.mark.parametrize("kind", ["engine", "policy", "tiled"])
def test_a_table_is_rebuilt_although_the_step_of_its_save_was_deleted(
    subjects: list[Subject], tmp_path: Path, kind: str
) -> None:
    """Later manifests and tables state what the manifest of the save did."""
    (subject,) = (one for one in subjects if one.name == kind)
    root = tmp_path / "root"
    shutil.copytree(subject.root, root)
    for seq in (0, 2):
        collect.delete_checkpoint(open_root(root), seq)
    steps = deltacheck.open(root).steps()
    for path in tables_of(root):
        before = path.read_bytes()
        path.unlink()
        assert not repair(open_root(root), lossy=True).lost
        assert path.read_bytes() == before
    assert deltacheck.open(root).steps() == steps


@pytest.mark.parametrize("lost", ["merged", "all"])
def test_tables_of_merged_deltas_are_rebuilt_too(tmp_path: Path, lost: str) -> None:
    """The chunk digests tell which leaf each row is of, and what it replaces."""
    root = tmp_path / "run"
    state = {name: torch.randn(400, 300) for name in "abc"} | {"small": torch.randn(50)}
    with Engine(root, policy=Policy.exact(max_chain_depth=4)) as engine:
        for step in range(10):
            state["a"][step] += 1.0
            state["b"][step % 3] += 1.0
            state["c"][step] += step % 2
            state["small"][step] += 1.0
            engine.save(step, state).result(240)
            engine._saver._chains.compactor.wait(240)  # type: ignore[union-attr]
    merged = [path for path in tables_of(root) if b'"since"' in path.read_bytes()]
    assert merged
    if lost == "all":
        for ref in open_root(root).checkpoints()[:3]:
            collect.delete_checkpoint(open_root(root), ref.seq)
    before = {path: path.read_bytes() for path in (merged if lost == "merged" else tables_of(root))}
    for path in before:
        path.unlink()
    assert not repair(open_root(root)).lost
    needed = {ref.id for m in open_root(root).checkpoints() for ref in _segments(root, m)}
    assert all(path.read_bytes() == before[path] for path in before if path.parts[-2] in needed)
    assert deltacheck.open(root).verify(deep=True, redundant=True) == []


def _segments(root: Path, ref: StepRef) -> Sequence[SegmentRef]:
    return open_root(root).read(ref.manifest_path).segments


def test_small_leaves_that_were_due_are_told_apart_by_their_content(tmp_path: Path) -> None:
    """A keyframe that was due is written although the leaf did not change, beside others that
    were not: only the content of the packed array tells which leaves it has.
    """
    state = {name: torch.randn(20) for name in "abcd"} | {"big": torch.randn(400, 300)}
    with Engine(tmp_path / "run", policy=Policy.exact(max_chain_depth=2)) as engine:
        for step in range(6):
            state["b"][step] += 1.0
            state["big"][step] += 1.0
            if step % 2:
                state["d"][step] += 1.0
            engine.save(step, state).result(240)
        saved = copy.deepcopy(state)
    before = {path: path.read_bytes() for path in tables_of(tmp_path / "run")}
    for path in before:
        path.unlink()
    assert not repair(open_root(tmp_path / "run")).lost
    assert {path: path.read_bytes() for path in before} == before
    with Engine(tmp_path / "run") as engine:
        assert_same(engine.restore(5), saved)


def test_rows_number_leaves_that_are_computed_and_not_stored_too(tmp_path: Path) -> None:
    root, run = tmp_path / "run", AdamRun((400, 300), 1)
    with Engine(root, policy=Policy.exact(derive=True)) as engine:
        for step in range(4):
            run.advance()
            engine.save(step, run.state()).result(240)
    manifest = deltacheck.open(root).manifest()
    assert manifest.derived["model/w0"].how == "cast"
    assert "model/w0" not in manifest.leaves
    before = {path: path.read_bytes() for path in tables_of(root)}
    for path in before:
        path.unlink()
    assert not repair(open_root(root)).lost
    assert {path: path.read_bytes() for path in before} == before


def test_lost_digests_do_not_hide_damage_to_the_content(
    run: tuple[Path, dict[int, Any]],
) -> None:
    root, saved = run
    digest_files(root)[1].unlink()
    (segment,) = root.glob("segments/s0000000001-*")
    stream = max((segment / "delta").rglob("c*"), key=lambda path: path.stat().st_size)
    truncate(stream)
    with pytest.raises(errors.Damaged) as raised:
        deltacheck.open(root).restore(1)
    assert str(segment) in str(raised.value)
    assert {finding.step for finding in deltacheck.open(root).verify()} == {1, 2, 3}
    assert deltacheck.open(root).verify(0, deep=True) == []
    assert (deltacheck.open(root).restore(0)["large"] == saved[0]["large"].numpy()).all()


def test_a_log_record_that_is_kept_does_not_keep_a_segment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a handled error nor the record of it keeps the pin that a reader has on a segment."""
    with Engine(tmp_path) as engine:
        engine.save(0, {"first": torch.randn(300, 300)}).wait(timeout=240)
        engine.save(1, {"second": torch.randn(300)}).wait(timeout=240)
    (segment,) = tmp_path.glob("segments/s0000000000-*")
    digest_files(tmp_path)[0].unlink()
    with caplog.at_level("WARNING", "deltacheck"):
        deltacheck.open(tmp_path).restore(0)
    assert "proven by the digest of each leaf" in caplog.text
    root_writer.delete(open_root(tmp_path), 0)
    collect.collect(open_root(tmp_path), grace_seconds=0, writer_is_dead=True)
    assert not segment.exists()


def test_the_command_reports_redundant_damage_apart_and_succeeds(
    run: tuple[Path, dict[int, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = run
    digest_files(root)[0].unlink()
    (root / "segments" / "zarr.json").write_bytes(b"{")
    assert main(["verify", str(root), "--deep", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["findings"] == []
    problems = " ".join(finding["problem"] for finding in report["redundant"])
    assert "digests" in problems
    assert "segments/zarr.json" in problems
    assert main(["verify", str(root)]) == 0
    assert "redundant" in capsys.readouterr().out
    assert main(["repair", str(root)]) == 0
    assert "digests written again" in capsys.readouterr().out


# --- repair and the steps that restore ------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lossy": True},
    {"step": 2},
    {"step": 2, "lossy": True},
    {"dry_run": True, "lossy": True},
]


# More in a campaign: DELTACHECK_REPAIR_TRIALS=500.
TRIALS = int(os.environ.get("DELTACHECK_REPAIR_TRIALS", "6"))


@pytest.mark.parametrize("seed", range(TRIALS))
def test_no_repair_makes_a_step_unrestorable_that_restores(
    subjects: list[Subject], tmp_path: Path, seed: int
) -> None:
    """Whatever is damaged (one to three files, any fault) and whatever options repair gets."""
    kind = ("engine", "policy", "tiled")[seed % 3]
    (subject,) = (one for one in subjects if one.name == kind)
    rng = random.Random(seed)
    # Kinds first: else nearly all damage would be to the many streams. Half of the trials have lost
    # chunk digests or tables, which follow from the rest.
    kinds = rng.choices(sorted(subject.files), k=rng.choice([1, 1, 2, 3]))
    kinds[0] = kinds[0] if seed % 2 else rng.choice(["digests", "segment table"])
    changes: dict[Path, bytes | None] = {}
    for kind in kinds:
        path = rng.choice(subject.files[kind])
        changes |= rng.choice(FAULTS)(subject, kind, path, rng)
    wanted = next(iter(subject.doors.values()))[1]
    for order, options in enumerate(OPTIONS):
        root = tmp_path / f"{order}"
        with damaged(subject, changes):
            shutil.copytree(subject.root, root, symlinks=True)
        before = _restorable(root, wanted)
        try:
            repair(open_root(root), **options)
        except errors.DeltacheckError:
            continue  # refused: nothing was changed
        assert before <= _restorable(root, wanted), (seed, options, sorted(changes))


def _restorable(root: Path, wanted: dict[int, Any] | Any) -> set[int]:
    steps = set()
    for step, state in wanted.items():
        try:
            restored = deltacheck.open(root).restore(step)
        except errors.DeltacheckError:
            continue
        assert not list(differences(state, restored))
        steps.add(step)
    return steps


def test_tables_of_leaves_that_each_save_stores_whole_are_rebuilt(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Engine(root) as engine:
        for step in range(4):
            noise = torch.randn(600, 512, generator=torch.Generator().manual_seed(step))
            small = noise[:300].clone()
            engine.save(step, {"noise": noise, "small": small, "step": step}).result(240)
    before = {path: path.read_bytes() for path in tables_of(root)}
    for path in before:
        path.unlink()
    assert not repair(open_root(root)).lost
    assert {path: path.read_bytes() for path in before} == before
