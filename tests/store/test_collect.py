"""Deletion and collection: no order of deletions, and no collection, ever harms a step that
stays.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Keep, Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.store import collect
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.tagging import put
from deltacheck.store.roots.tags import lock
from tests.support.states import assert_same, nudge, training_state
from tests.support.waiting import wait_until


def segments(root: Path) -> set[str]:
    return {path.name for path in (root / "segments").glob("s*")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("run")
    state, states = {"a": torch.zeros(500), "b": torch.zeros(500), "c": torch.zeros(3)}, []
    with Engine(root, policy=Policy.exact(max_chain_depth=3)) as engine:
        for step in range(8):
            state["a"] += step
            if step % 3 == 0:
                state["b"] += 1
            states.append(copy.deepcopy(state))
            engine.save(step, state)
    return root, states


@pytest.mark.parametrize(
    "order",
    [range(7), range(7, 0, -1), (3, 0, 5, 7, 1, 6, 2)],
    ids=["oldest first", "newest first", "mixed"],
)
def test_deleting_any_step_in_any_order_never_harms_another(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, order: Any
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    left = set(range(8))
    for step in order:
        opened = open_root(root)
        collect.delete_checkpoint(opened, opened.manifest(step).seq)
        collect.collect(opened, grace_seconds=0)
        left.remove(step)
        assert set(deltacheck.open(root).steps()) == left
        with Engine(root) as engine:
            for other in left:
                assert_same(run[1][other], engine.restore(other))
    assert deltacheck.open(root).verify(deep=True) == []


def test_exactly_the_needed_segments_stay(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    opened = open_root(root)
    for step in range(7):
        collect.delete_checkpoint(opened, opened.manifest(step).seq)
    needed = {ref.id for ref in opened.manifest(7).segments}
    before = segments(root)
    dry = collect.collect(opened, grace_seconds=0, dry_run=True)
    assert segments(root) == before
    done = collect.collect(opened, grace_seconds=0)
    assert dry.removed == done.removed
    assert segments(root) == needed
    assert set(done.removed) == before - needed
    assert done.freed_bytes > 0


def test_an_unneeded_segment_waits_for_readers_before_it_goes(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    opened = open_root(root)
    for step in range(7):
        collect.delete_checkpoint(opened, opened.manifest(step).seq)
    first = collect.collect(opened, grace_seconds=3600)
    assert first.removed == ()
    assert first.waiting
    assert collect.collect(opened, grace_seconds=3600).waiting == first.waiting
    assert collect.collect(opened, grace_seconds=0).removed == first.waiting


def test_a_segment_newer_than_the_newest_step_is_a_save_under_way(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    under_way = root / "segments" / "s0000000099-00c0ffee"
    under_way.mkdir()
    assert collect.collect(open_root(root), grace_seconds=0).removed == ()
    assert under_way.exists()
    assert collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True).removed == (
        under_way.name,
    )


def test_nothing_is_collected_while_a_manifest_cannot_be_read(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    opened = open_root(root)
    collect.delete_checkpoint(opened, opened.manifest(0).seq)
    (root / "checkpoints" / "c0000000005" / "zarr.json").write_text("{}")
    before = segments(root)
    with pytest.raises(errors.Damaged, match="nothing is collected"):
        collect.collect(open_root(root), grace_seconds=0)
    assert segments(root) == before


def test_keep_last_keeps_the_newest_steps_readable_and_the_disk_bounded(tmp_path: Path) -> None:
    state, states = training_state(), {}
    with Engine(
        tmp_path,
        policy=Policy.exact(max_chain_depth=2),
        keep=Keep(last=2),
        options=SaveOptions(grace_seconds=0),
    ) as engine:
        for step in range(9):
            states[step] = copy.deepcopy(state)
            engine.save(step, state).wait(timeout=240)
            nudge(state)
            kept = engine.steps()
            assert kept == list(range(max(0, step - 1), step + 1))
        for step in kept:
            assert_same(states[step], engine.restore(step))
    assert len(segments(tmp_path)) <= 5
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_step_whose_chain_was_collected_around_it_stays_whole(tmp_path: Path) -> None:
    """Keep one step only: its keyframe is older than everything that is deleted."""
    state = {"big": torch.randn(1000), "small": torch.zeros(2)}
    with Engine(tmp_path, keep=Keep(last=1), options=SaveOptions(grace_seconds=0)) as engine:
        for _, step in zip(range(6), itertools.count(), strict=False):
            state["small"] += 1
            engine.save(step, state).wait(timeout=240)
        assert_same(state, engine.restore())


def test_what_a_document_that_was_being_written_has_left_is_removed(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Found by the model of power cuts: a kill leaves the half of a document, a later writer the
    whole one beside it.
    """
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    halves = [
        root / name / "zarr.json.__lock"
        for name in (".", "segments", "checkpoints", "control", "checkpoints/c0000000003")
    ]
    for half in halves:
        half.touch()
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    assert not any(half.exists() for half in halves)
    assert deltacheck.open(root).verify() == []


def test_a_checkpoint_that_was_killed_before_its_manifest_is_removed(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    (root / "checkpoints" / "c0000000099").mkdir()
    (root / "checkpoints" / "c0000000099" / "zarr.json.__lock").touch()
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    assert not (root / "checkpoints" / "c0000000099").exists()
    assert deltacheck.open(root).steps() == list(range(8))


def test_a_segment_that_the_next_save_builds_on_stays(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    opened = open_root(root)
    for step in range(7):
        collect.delete_checkpoint(opened, opened.manifest(step).seq)
    unneeded = collect.collect(opened, grace_seconds=0, dry_run=True).removed
    assert collect.collect(opened, grace_seconds=0, protected=unneeded[:1]).removed == unneeded[1:]
    assert (root / "segments" / unneeded[0]).is_dir()


def without_seven_steps(run: Path, root: Path) -> Any:
    shutil.copytree(run, root)
    opened = open_root(root)
    for step in range(7):
        collect.delete_checkpoint(opened, opened.manifest(step).seq)
    return opened


def test_a_clock_that_jumps_neither_shortens_the_wait_nor_makes_it_endless(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = without_seven_steps(run[0], tmp_path / "root")
    first = collect.collect(opened, grace_seconds=36_000)
    now = time.monotonic
    for jump in (1e9, -1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        assert collect.collect(opened, grace_seconds=36_000).waiting == first.waiting
    monkeypatch.setattr(time, "monotonic", lambda: now() + 36_000)
    assert collect.collect(opened, grace_seconds=36_000).removed == first.waiting


@pytest.mark.parametrize(
    "mark", [["another start of the machine", 0.0], ["", 1e18], ["", "nan"], 7.0, None]
)
def test_a_mark_that_says_nothing_makes_its_segment_wait_anew(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, mark: Any
) -> None:
    opened = without_seven_steps(run[0], tmp_path / "root")
    first = collect.collect(opened, grace_seconds=3600)
    document = tmp_path / "root" / "control" / "marks" / "zarr.json"
    content = json.loads(document.read_bytes())
    boot = next(iter(content["attributes"]["deltacheck"].values()))[0]
    wrong = [mark[0] or boot, mark[1]] if isinstance(mark, list) else mark
    content["attributes"]["deltacheck"] = dict.fromkeys(first.waiting, wrong)
    document.write_text(json.dumps(content))
    assert collect.collect(opened, grace_seconds=1000).waiting == first.waiting


def test_two_collectors_at_once_remove_what_one_would(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    opened = without_seven_steps(run[0], root)
    due = collect.collect(opened, grace_seconds=0, dry_run=True).removed
    remove, meeting = collect._remove, threading.Barrier(2)

    def together(*of: Any) -> bool:
        meeting.wait(240)
        return remove(*of)

    monkeypatch.setattr(collect, "_remove", together)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(collect.collect, open_root(root), grace_seconds=0) for _ in range(2)]
        assert all(
            set(one.result(240).removed) | set(one.result(240).in_use) == set(due) for one in both
        )
    assert not segments(root) & set(due)
    with Engine(root) as engine:
        assert_same(run[1][7], engine.restore(7))


def test_a_segment_that_cannot_be_removed_does_not_keep_the_others(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    opened = without_seven_steps(run[0], root)
    due = collect.collect(opened, grace_seconds=0, dry_run=True).removed
    rmtree = shutil.rmtree

    def failing(path: Path, **how: bool) -> None:
        if Path(path).name == due[0]:
            raise OSError(5, "Input/output error")
        rmtree(path, **how)

    monkeypatch.setattr(shutil, "rmtree", failing)
    with pytest.raises(OSError, match="Input/output"):
        collect.collect(opened, grace_seconds=0)
    assert segments(root) & set(due) == {due[0]}
    monkeypatch.undo()
    assert collect.collect(opened, grace_seconds=0).removed == (due[0],)


def test_what_is_not_ours_is_never_removed(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    opened = without_seven_steps(run[0], root)
    foreign = [
        root / "segments" / "notes",
        root / "segments" / "s1-abc",
        root / "checkpoints" / "mine",
        root / "control" / "x",
    ]
    for folder in foreign:
        folder.mkdir()
        (folder / "file").write_text("kept")
    (root / "README.txt").write_text("kept")
    collect.collect(opened, grace_seconds=0, writer_is_dead=True)
    assert all((folder / "file").exists() for folder in foreign)
    assert (root / "README.txt").exists()


def test_a_collection_ends_when_another_process_takes_the_root(
    run: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As happens where locks do not work: the holder is checked before each segment."""
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    for seq in (0, 1, 2, 3):
        collect.delete_checkpoint(open_root(root), seq)
    unneeded = collect.collect(open_root(root), grace_seconds=0, dry_run=True).removed
    assert len(unneeded) > 1
    remove = collect._remove

    def then_lost(path: Any, durability: Any) -> bool:
        (root / "control" / "zarr.json").write_bytes(b"another")
        return remove(path, durability)

    monkeypatch.setattr(collect, "_remove", then_lost)
    assert main(["prune", str(root), "--grace", "0"]) == 5
    assert "lost" in capsys.readouterr().err
    assert segments(root) & set(unneeded) == set(unneeded[1:])


def test_a_tag_that_is_being_written_is_left_alone(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, locked_out: threading.Event
) -> None:
    root = tmp_path / "root"
    shutil.copytree(run[0], root)
    put(open_root(root), 3, "best")
    unfinished = root / "control" / "tags" / "best" / "zarr.json.__lock"
    unfinished.write_bytes(b"{")

    def gc() -> None:
        collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)

    thread = threading.Thread(target=gc)
    with lock(root):  # as the process that writes the tag does
        thread.start()
        wait_until(lambda: locked_out.is_set() or not thread.is_alive())
        assert unfinished.exists()
    thread.join(240)
    assert not unfinished.exists()
    assert deltacheck.open(root).restore("best") is not None
