"""Redundant damage costs nothing, and repair never takes away a step that restores."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
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
from deltacheck.store.roots.opening import open_root
from tests.suites import damage_trials
from tests.suites.damage_trials import FAULTS, Subject, damaged
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


@pytest.fixture(scope="module")
def subjects() -> Iterator[list[Subject]]:
    """A root of each kind: plain, Orbax's, with codes, with gradients, in tiles."""
    with damage_trials.built() as built:
        yield built


@pytest.mark.parametrize("kind", damage_trials.SUBJECTS)
@pytest.mark.parametrize("what", ["digests", "metadata of arrays"])
def test_whatever_follows_from_the_rest_is_rebuilt_byte_for_byte(
    subjects: list[Subject], tmp_path: Path, kind: str, what: str
) -> None:
    (subject,) = (one for one in subjects if one.name == kind)
    root = tmp_path / "root"
    shutil.copytree(subject.root, root)
    victims = {
        "digests": sorted(root.rglob("segments/s*/digests/c*")),
        "metadata of arrays": sorted(root.rglob("segments/s*/*/**/zarr.json")),
    }[what]
    before = {path: path.read_bytes() for path in victims}
    for number, path in enumerate(victims):
        path.unlink() if number % 2 else path.write_bytes(before[path][:-9])
    steps = deltacheck.open(root).steps()
    assert not deltacheck.open(root).verify()
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
    # chunk digests, which follow from the rest, or tables, without which much is lost.
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
