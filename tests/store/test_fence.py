"""One writer: whoever has lost the root cannot commit, cannot delete, and leaves nothing but
garbage.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Keep, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.store import collect
from deltacheck.store.files import arrays
from deltacheck.store.roots.opening import open_root
from tests.support import writer_child
from tests.support.paths import TESTS

CHILD = TESTS / "support" / "writer_child.py"
ROUNDS = int(os.environ.get("DELTACHECK_FENCE_ROUNDS", "6"))


def take_over(root: Path) -> None:
    """Make another writer's lock worthless: replace its file.

    A file system whose locks do not last does the same.
    """
    (root / "control" / "zarr.json").unlink()


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((50,), value), "b": torch.full((50,), value)}


def test_a_writer_that_has_lost_the_root_cannot_commit_nor_delete(tmp_path: Path) -> None:
    old = Engine(tmp_path, keep=Keep(last=1), options=SaveOptions(grace_seconds=0))
    old.save(0, state(0)).wait(timeout=240)
    take_over(tmp_path)
    with Engine(tmp_path) as new:
        new.restore()
        new.save(1, state(1)).wait(timeout=240)
        error = old.save(2, state(2)).exception(240)
        assert isinstance(error, errors.SaveFailed)
        assert isinstance(error.__cause__, errors.RootBusy)
        assert f"process {os.getpid()}" in str(error)
        with pytest.raises(errors.RootBusy, match="has lost"):
            old.delete(0)
        new.save(2, state(3)).wait(timeout=240)
    assert deltacheck.open(tmp_path).steps() == [0, 1, 2]
    old.save(4, state(4))
    with pytest.raises(errors.SaveFailed):
        old.close()
    assert [float(deltacheck.open(tmp_path).restore(step)["a"][0]) for step in (0, 1, 2)] == [
        0,
        1,
        3,
    ]
    before = set(open_root(tmp_path).store.segment_ids())
    needed = {ref.id for step in (0, 1, 2) for ref in open_root(tmp_path).manifest(step).segments}
    assert before > needed
    collect.collect(open_root(tmp_path), grace_seconds=0, writer_is_dead=True)
    assert set(open_root(tmp_path).store.segment_ids()) == needed


@pytest.mark.parametrize(
    "first", [True, False], ids=["before it looks", "between its look and the creation"]
)
def test_a_writer_behind_another_that_has_gone_on_and_deleted_cannot_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """The newer writer has deleted the checkpoint that the older one is about to create: its number
    is free again.
    """
    from deltacheck.store.lock.lease import LocalLease

    monkeypatch.setattr(
        LocalLease, "check", lambda self: None
    )  # as where even the look at the lock's file tells nothing
    create = arrays.create_file
    old = Engine(tmp_path)
    old.save(0, state(0)).wait(timeout=240)
    take_over(tmp_path)
    new = Engine(tmp_path, keep=Keep(last=1), options=SaveOptions(grace_seconds=0))

    def go_on() -> None:
        for step in (10, 11, 12):
            new.save(step, state(step)).wait(timeout=240)

    def late(directory: Path, *of: Any) -> bool:
        if not first and directory.name == "c0000000001":
            monkeypatch.setattr(arrays, "create_file", create)
            go_on()
            directory.mkdir(exist_ok=True)
        return create(directory, *of)

    monkeypatch.setattr(arrays, "create_file", late)
    if first:
        go_on()
    handle = old.save(1, state(1))
    error = handle.exception(240)
    assert isinstance(error, errors.SaveFailed)
    assert isinstance(error.__cause__, errors.RootBusy)
    assert "has been written by another since" in str(error)
    new.close()
    old.close()
    assert deltacheck.open(tmp_path).steps() == [12]
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_root_whose_creation_was_killed_is_created_by_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = arrays.create_file

    def killed(directory: Path, *of: Any) -> bool:
        if directory == tmp_path:
            raise KeyboardInterrupt
        return create(directory, *of)

    monkeypatch.setattr(arrays, "create_file", killed)
    with pytest.raises(KeyboardInterrupt):
        Engine(tmp_path)
    monkeypatch.undo()
    (tmp_path / "zarr.json.__lock").touch()
    with Engine(tmp_path) as engine:
        engine.save(0, state(0)).wait(timeout=240)
        assert engine.steps() == [0]


def test_a_directory_with_anything_else_in_it_is_no_root(tmp_path: Path) -> None:
    for foreign in (
        tmp_path / "a" / "notes.txt",
        tmp_path / "b" / "segments" / "mine" / "x",
        tmp_path / "c" / "zarr.json",
    ):
        foreign.parent.mkdir(parents=True)
        foreign.write_text("{}")
        top = tmp_path / foreign.relative_to(tmp_path).parts[0]
        if top.name == "c":
            (top / "array").mkdir()
        with pytest.raises(errors.NotACheckpointRoot):
            Engine(top)


def test_a_writer_that_restores_what_another_has_just_committed_continues_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltacheck.store.roots.opened.take_lease", writer_child.NoLease)
    with Engine(tmp_path) as late, Engine(tmp_path) as other:
        other.save(0, state(0.0)).wait()
        assert late.restore()["a"][0] == 0
        assert late.save(1, state(1.0)).result().seq == 1
        with pytest.raises(errors.SaveFailed, match="RootBusy"):
            other.save(1, state(2.0)).wait()
    assert deltacheck.open(tmp_path).restore()["a"][0] == 1


@pytest.mark.timeout(600)
def test_two_writers_without_locks_never_mix_and_each_save_that_is_acknowledged_is_there(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(CHILD), str(tmp_path)]
    children = [
        subprocess.Popen(
            [*command, str(k), str(ROUNDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in (1, 2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    lines = [line.split() for child in children for line in child.communicate()[0].splitlines()]
    assert [child.returncode for child in children] == [0, 0]
    acknowledged = {int(line[0]): float(line[1]) for line in lines if line != ["fenced"]}
    fenced = sum(line == ["fenced"] for line in lines)
    print(f"{2 * ROUNDS} saves: {len(acknowledged)} acknowledged, {fenced} fenced")
    assert len(acknowledged) + fenced == 2 * ROUNDS
    root = open_root(tmp_path)
    found = {ref.seq: root.read(ref.manifest_path) for ref in root.checkpoints()}
    assert found.keys() == acknowledged.keys()
    from deltacheck.restore.content import as_array
    from deltacheck.restore.resolve import resolve_leaves
    from deltacheck.restore.values import load_leaves

    for seq, manifest in found.items():
        leaves = load_leaves(resolve_leaves(root, manifest))
        values = {float(value) for leaf in leaves.values() for value in as_array(leaf)}
        assert values == {acknowledged[seq]}, f"checkpoint {seq} mixes {values}"
