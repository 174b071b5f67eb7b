"""Redundant damage costs nothing, and repair never takes away a step that restores."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.repair import repair
from deltacheck.store.roots.opening import open_root
from tests.suites import damage_trials
from tests.suites.damage_trials import FAULTS, Subject, damaged
from tests.support.states import differences


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


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.fixture(scope="module")
def subjects() -> Iterator[list[Subject]]:
    """A root of each kind: plain, Orbax's, with codes, with gradients, in tiles."""
    with damage_trials.built() as built:
        yield built


@pytest.mark.parametrize("kind", damage_trials.SUBJECTS)
def test_metadata_of_arrays_is_written_again(
    subjects: list[Subject], tmp_path: Path, kind: str
) -> None:
    (subject,) = (one for one in subjects if one.name == kind)
    root = tmp_path / "root"
    shutil.copytree(subject.root, root)
    victims = sorted(root.rglob("segments/s*/*/**/zarr.json"))
    before = {path: path.read_bytes() for path in victims}
    for number, path in enumerate(victims):
        path.unlink() if number % 2 else path.write_bytes(before[path][:-9])
    steps = deltacheck.open(root).steps()
    assert not deltacheck.open(root).verify()
    done = repair(open_root(root), lossy=True)
    assert not done.lost
    assert not done.removed
    assert all(path.is_file() for path in victims)
    assert deltacheck.open(root).verify(deep=True, redundant=True) == []
    assert deltacheck.open(root).steps() == steps
    door, wanted = next(iter(subject.doors.values()))
    for step in steps:
        assert not list(differences(wanted[step], door(root, step)))


def test_the_command_reports_redundant_damage_apart_and_succeeds(
    run: tuple[Path, dict[int, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = run
    (root / "segments" / "zarr.json").write_bytes(b"{")
    assert main(["verify", str(root), "--deep", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["findings"] == []
    problems = " ".join(finding["problem"] for finding in report["redundant"])
    assert "segments/zarr.json" in problems
    assert main(["verify", str(root)]) == 0
    assert "redundant" in capsys.readouterr().out
    assert main(["repair", str(root)]) == 0
    assert "segments/zarr.json written again" in capsys.readouterr().out


# --- repair and the steps that restore ------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lossy": True},
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
    # tables, without which much is lost.
    kinds = rng.choices(sorted(subject.files), k=rng.choice([1, 1, 2, 3]))
    kinds[0] = kinds[0] if seed % 2 else "segment table"
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
