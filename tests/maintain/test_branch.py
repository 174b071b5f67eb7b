"""Branches of a run."""

from __future__ import annotations

import copy
import errno
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.cli.app import app
from deltacheck.maintain import branch as branching
from deltacheck.maintain.branch import branch
from deltacheck.maintain.transfer import copy_file
from deltacheck.store import collect
from deltacheck.store.files import storage
from deltacheck.store.files.object_path import ObjectPath
from deltacheck.store.lock.object_lease import ObjectLease
from deltacheck.store.roots.opening import open_root
from tests.support.s3_server import FOREVER, S3, Fault
from tests.support.states import assert_same, nudge, training_state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("run")
    state, states = training_state(), []
    with Engine(root, policy=Policy.exact(max_chain_depth=4)) as engine:
        for step in range(4):
            states.append(copy.deepcopy(state))
            engine.save(step, state)
            nudge(state, seed=step)
    return root, states


def test_a_branch_has_the_step_and_goes_on_by_itself(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root, states = run
    done = branch(open_root(root), 2, tmp_path / "b")
    assert (done.step, done.copied_bytes) == (2, 0)
    assert done.linked_bytes > 0
    state = copy.deepcopy(states[2])
    with Engine(tmp_path / "b") as engine:
        assert_same(engine.restore(), state)
        nudge(state, seed=77)
        report = engine.save(3, state).result(240)
        assert report is not None
        assert report.stored_bytes < report.raw_bytes / 4  # the chain went on
    assert deltacheck.open(tmp_path / "b").steps() == [2, 3]
    assert deltacheck.open(tmp_path / "b").verify(deep=True) == []
    assert deltacheck.open(root).verify(deep=True) == []


def test_neither_root_hurts_the_other_when_it_is_collected(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "a"
    shutil.copytree(run[0], root)
    branch(open_root(root), 3, tmp_path / "b")
    opened = open_root(root)
    for step in range(4):
        collect.delete_checkpoint(opened, opened.manifest(step).seq)
    collect.collect(opened, grace_seconds=0, writer_is_dead=True)
    assert open_root(root).store.segment_ids() == []
    with Engine(tmp_path / "b") as engine:
        assert_same(engine.restore(), run[1][3])


def test_where_no_link_can_be_made_the_files_are_copied(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    done = branch(open_root(run[0]), None, tmp_path / "b")
    assert done.linked_bytes == 0
    assert done.copied_bytes > 0
    assert deltacheck.open(tmp_path / "b").verify(deep=True) == []


def test_a_copied_branch_survives_damage_to_the_first_root(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "a"
    shutil.copytree(run[0], root)
    branch(open_root(root), 3, tmp_path / "b", copy=True)
    for file in (root / "segments").rglob("c.*"):
        file.write_bytes(b"")
    assert deltacheck.open(tmp_path / "b").verify(deep=True) == []


def test_a_directory_that_holds_something_is_no_place_for_a_branch(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(errors.NotACheckpointRoot, match="not empty"):
        branch(open_root(run[0]), 1, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_step_that_is_deleted_meanwhile_is_not_committed(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a"
    shutil.copytree(run[0], root)
    link = os.link

    def gone(source: Path, target: Path, **how: Any) -> None:
        if source.name == "zarr.json" and source.parents[1].name == "segments":
            source.unlink()
        link(source, target, **how)

    monkeypatch.setattr(os, "link", gone)
    with pytest.raises((OSError, errors.DeltacheckError)):
        branch(open_root(root), 3, tmp_path / "b")
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_branch_that_has_failed_can_be_repeated(
    run: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exists: bool,
) -> None:
    target = tmp_path / "parent" / "b"
    if exists:
        target.mkdir(parents=True)
    copied: list[Path] = []

    def fill_disk(source: Path, target: Any, durability: Any) -> int:
        copied.append(source)
        if len(copied) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy_file(source, target, durability)

    monkeypatch.setattr(branching, "copy_file", fill_disk)
    words = ["branch", str(run[0]), "3", "--to", str(target), "--copy"]
    assert main(words) == 5
    message = capsys.readouterr().err
    assert f"No space left on device: {target}" in message
    assert "Free space" in message
    assert list((tmp_path / "parent").iterdir()) == ([target] if exists else [])
    monkeypatch.undo()
    assert main(words) == 0
    assert list((tmp_path / "parent").iterdir()) == [target]
    assert deltacheck.open(target).verify(deep=True) == []
    with Engine(target) as engine:
        assert_same(engine.restore(), run[1][3])


@pytest.fixture(params=["from", "to", "within"])
def addresses(
    request: pytest.FixtureRequest,
    run: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    s3: S3,
) -> tuple[str, str]:
    """Return the addresses of the run and of a branch, of which one at least is in a bucket."""
    prefix = f"s3://bucket/{secrets.token_hex(4)}"
    origin, target = str(run[0]), f"{prefix}/branch"
    if request.param != "to":
        origin = f"{prefix}/run"
        with deltacheck.Mirror(run[0], origin) as mirror:
            mirror.poll()
    return origin, str(tmp_path / "branch") if request.param == "from" else target


def objects(address: str, segment: str) -> list[str]:
    """Return the names of the files of a segment."""
    folder = storage.of(address) / "segments" / segment
    if isinstance(folder, ObjectPath):
        return [key.removeprefix(f"{folder.key}/") for key in folder.keys()]  # noqa: SIM118
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_a_branch_in_a_bucket_or_of_one_goes_on_by_itself(
    run: tuple[Path, list[dict[str, Any]]], addresses: tuple[str, str], s3: S3
) -> None:
    origin, target = addresses
    # A listing of the origin that lags hides nothing from the branch.
    hidden = r"/segments/"
    with s3.failing(Fault("stale", "/run", "LIST", times=FOREVER, hidden=hidden)):
        done = branch(open_root(origin), 2, target)
    assert (done.step, done.linked_bytes) == (2, 0)
    assert done.copied_bytes > 0
    assert open_root(target).manifest().segments
    for ref in open_root(target).manifest().segments:
        assert objects(target, ref.id) == objects(origin, ref.id)
    state = copy.deepcopy(run[1][2])
    with Engine(target) as engine:
        assert_same(engine.restore(), state)
        nudge(state, seed=77)
        report = engine.save(3, state).result(240)
        assert report.stored_bytes < report.raw_bytes / 4  # the chain went on
    assert deltacheck.open(target).steps() == [2, 3]
    for address in addresses:
        assert deltacheck.open(address).verify(deep=True) == []
    with pytest.raises(errors.NotACheckpointRoot, match=r"has steps|is not empty"):
        branch(open_root(origin), 2, target)
    for inside in (origin, f"{origin}/inside"):
        with pytest.raises(errors.NotACheckpointRoot, match=r"is in|is not empty"):
            branch(open_root(origin), 2, inside)


@pytest.mark.parametrize("addresses", ["to", "within"], indirect=True)
def test_a_branch_that_has_failed_in_a_bucket_can_be_repeated(
    addresses: tuple[str, str], s3: S3
) -> None:
    origin, target = addresses
    refusal = Fault("501", "/branch/segments/", times=FOREVER, skip=3)
    reader = deltacheck.open(origin)
    with s3.failing(refusal), pytest.raises(errors.StorageFailed, match="refused a write"):
        reader.branch(2, target)
    assert deltacheck.open(target).steps() == []
    reader.branch(2, target)
    assert deltacheck.open(target).verify(deep=True) == []


def test_a_branch_that_has_lost_its_lease_is_not_acknowledged(
    run: tuple[Path, list[dict[str, Any]]], s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: object) -> None:
        raise errors.RootBusy("another writer has the root")

    monkeypatch.setattr(ObjectLease, "check", lost)
    with pytest.raises(errors.RootBusy, match="another writer"):
        branch(open_root(run[0]), 2, f"s3://bucket/{secrets.token_hex(4)}/branch")


def test_an_object_that_is_gone_ends_a_branch(
    run: tuple[Path, list[dict[str, Any]]], s3: S3, tmp_path: Path
) -> None:
    address = f"s3://bucket/{secrets.token_hex(4)}/run"
    with deltacheck.Mirror(run[0], address) as mirror:
        mirror.poll()
    path = storage.of(address)
    assert isinstance(path, ObjectPath)
    lost = next(key for key in path.keys() if "/leaves/" in key and "/c." in key)  # noqa: SIM118
    replace(path, key=lost).unlink()
    with pytest.raises(errors.ChainBroken):
        branch(open_root(address), 0, tmp_path / "branch")
    assert not (tmp_path / "branch").exists()


def test_the_command_says_what_was_done(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["branch", str(run[0]), "latest", "--to", str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    assert "begins with step 3" in done.output
