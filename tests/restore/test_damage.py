"""Damage of each kind in each kind of file: an error names it, or it has no effect.

A restore never returns wrong values.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf.tree import unflatten
from deltacheck.restore import read
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store.roots.opening import open_root
from tests.suites import damage_trials
from tests.support.states import differences, nudge, training_state

QUICK_TRIALS = 60  # of each kind of root; `make damage-test` makes many more


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("run")
    state, states = small_state(), []
    with Engine(root) as engine:
        for step in range(4):
            states.append(copy.deepcopy(state))
            engine.save(step, state)
            nudge(state, (0.01, 0.4, 1.0)[step % 3], seed=step)
    return root, states


def small_state() -> dict[str, Any]:
    state = training_state()
    for holder, key in (
        (state["model"], "embed.weight"),
        (state["optimizer"]["state"][0], "exp_avg"),
        (state["optimizer"]["state"][0], "master"),
    ):
        holder[key] = holder[key][:300, :300].contiguous()
    return state


def restored(root: Path, step: int) -> Any:
    opened = open_root(root)
    manifest = opened.manifest(step)
    loaded = load_leaves(resolve_leaves(opened, manifest))
    return unflatten(manifest.tree, lambda path, owner, tag: leaves.place(loaded[owner], tag))


@pytest.fixture
def copied(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path / "copy"
    shutil.copytree(run[0], root)
    return root, run[1]


@pytest.mark.parametrize("name", damage_trials.SUBJECTS)
def test_damage_is_never_silent(name: str) -> None:
    """This is a sample of `make damage-test`, which uses the same harness."""
    seed, tally = random.SystemRandom().randrange(1 << 32), damage_trials.Tally()
    with damage_trials.built(name) as (subject,):
        for number in range(QUICK_TRIALS):
            damage_trials.trial(subject, seed + number, tally)
    assert not tally.failures, tally.failures
    assert tally.trials == QUICK_TRIALS
    assert (
        sum(tally.outcomes[kind, "error"] for kind in ("manifest", "segment table", "stream")) > 0
    )


@pytest.mark.parametrize("name", ["engine", "policy", "tiled"])
def test_a_repaired_root_restores_what_it_does_not_name_as_lost(name: str) -> None:
    """This is a sample of `make damage-test ARGS=--repair`."""
    seed, tally = random.SystemRandom().randrange(1 << 32), damage_trials.Tally()
    with damage_trials.built(name) as (subject,):
        for number in range(12):
            damage_trials.mending(subject, seed + number, tally, subject.root.parent)
    assert not tally.failures, tally.failures


def test_damage_between_the_rows_that_a_step_needs_does_it_no_harm(tmp_path: Path) -> None:
    """Rows of a part are read together with the rows between them.

    Those belong to a leaf that has a newer keyframe.
    """
    state = {"a": torch.arange(3000), "b": torch.zeros(100_000), "c": torch.arange(3000)}
    with Engine(tmp_path) as engine:
        engine.save(0, state).result()
        state["a"][7] += 1
        state["b"] += torch.rand(100_000)  # the only change that cannot be compressed
        state["c"][7] += 1
        engine.save(1, state).result()
        state["b"] = torch.ones(5)
        engine.save(2, state).result()
    (stored,) = (tmp_path / "segments").glob("s0000000001-*/delta.0.store/c*")
    stored.write_bytes(b"")
    with pytest.raises(errors.Damaged, match=r"leaf 'b'.*store.*Steps that still restore: 0"):
        deltacheck.open(tmp_path).restore(1)
    assert list(deltacheck.open(tmp_path).restore(2)["c"][6:8]) == [6, 8]
    assert {finding.step for finding in deltacheck.open(tmp_path).verify(deep=True)} == {1}


def test_without_digests_the_trials_find_silent_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness detects errors: only digests reject a chunk of an older save."""
    monkeypatch.setattr(read, "_verify", lambda blocks: None)
    tally = damage_trials.Tally()
    with damage_trials.built("engine") as (subject,):
        for number in range(1000):
            damage_trials.trial(subject, number, tally)
            if any(failure.startswith("SILENT") for failure in tally.failures):
                return
    pytest.fail("no trial was silent")


def test_every_damage_to_data_is_found_by_verify(copied: tuple[Path, list[dict[str, Any]]]) -> None:
    root, _ = copied
    rng = random.Random(5)
    files = sorted(
        p for p in root.rglob("*") if p.is_file() and "control" not in p.parts and p.parent != root
    )
    documents = [p for p in files if p.name == "zarr.json"]
    ours = [p for p in documents if b'"checksum":"' in p.read_bytes()]
    metadata = [p for p in documents if p not in ours and b'"array"' in p.read_bytes()]
    data = [p for p in files if p not in documents]
    for victim in rng.sample(data, 8) + rng.sample(ours, 4) + rng.sample(metadata, 8):
        original = victim.read_bytes()
        deep = victim in data
        flip_in_the_middle(victim)
        try:
            findings = deltacheck.open(root).verify(deep=deep, redundant=True)
        except errors.DeltacheckError:
            findings = ["refused"]  # type: ignore[list-item]
        assert findings, f"a flipped bit in {victim.relative_to(root)} was not found"
        victim.write_bytes(original)


def flip_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_missing_segment_is_named_together_with_the_newest_whole_step(
    copied: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, _ = copied
    newest = deltacheck.open(root).manifest(3).segments[-1].id
    shutil.rmtree(root / "segments" / newest)
    with pytest.raises(
        errors.ChainBroken,
        match=rf"step 3 .*segment {newest} is not in .*Steps that still restore: 0, 1, 2",
    ):
        deltacheck.open(root).restore(3)
    deltacheck.open(root).restore(2)
    findings = deltacheck.open(root).verify()
    assert [finding.step for finding in findings] == [3]


def test_a_segment_of_another_run_is_refused(
    copied: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Two runs are mixed by a backup: equal names and shapes, but other bytes."""
    root, _ = copied
    with Engine(tmp_path / "other") as engine:
        engine.save(0, small_state())
    theirs = (
        tmp_path
        / "other"
        / "segments"
        / deltacheck.open(tmp_path / "other").manifest(0).segments[0].id
    )
    ours = root / "segments" / deltacheck.open(root).manifest(0).segments[0].id
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    with pytest.raises(errors.Damaged, match="not the file that was committed"):
        deltacheck.open(root).restore(0)


def test_a_stale_chunk_with_a_right_checksum_is_refused(tmp_path: Path) -> None:
    """A chunk file of an older save replaces a newer one.

    The crc32c proves that a file is intact, the xxh3 of the chain that it is the right one.
    """
    state = {"w": torch.zeros(1000, 1000, dtype=torch.int32)}
    with Engine(tmp_path) as engine:
        for step in range(3):
            state["w"] += torch.randint(
                -128, 128, (1000, 1000), dtype=torch.int32
            )  # their low bytes cannot be compressed
            engine.save(step, state)
    segments = [
        tmp_path / "segments" / ref.id for ref in deltacheck.open(tmp_path).manifest(2).segments
    ]
    older, newer = (sorted((segment / "delta.0.store").rglob("c*")) for segment in segments[-2:])
    pairs = [
        (a, b)
        for a, b in zip(older, newer, strict=True)
        if a.is_file() and a.stat().st_size == b.stat().st_size
    ]
    assert pairs
    for a, b in pairs:
        shutil.copyfile(a, b)
    with pytest.raises(errors.Damaged, match="leaf 'w'"):
        deltacheck.open(tmp_path).restore(2)


def test_a_damaged_manifest_hides_its_step_but_not_the_others(
    copied: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, states = copied
    flip_in_the_middle(root / "checkpoints" / "c0000000003" / "zarr.json")
    opened = deltacheck.open(root)
    assert opened.steps() == [0, 1, 2]
    for asked in (3, None):
        with pytest.raises(
            errors.Damaged, match=r"step.* of .*c0000000003.*Steps that still restore: 0, 1, 2"
        ):
            opened.restore(asked)
    assert not list(differences(states[2], restored(root, 2)))
    assert "c0000000003" in opened.verify()[0].problem


def test_a_symbolic_link_is_not_followed_out_of_the_root(
    copied: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root, _ = copied
    manifest = root / "checkpoints" / "c0000000003"
    shutil.move(manifest, tmp_path / "elsewhere")
    manifest.symlink_to(tmp_path / "elsewhere")
    assert deltacheck.open(root).steps() == [0, 1, 2]


@pytest.mark.parametrize(
    "make",
    [lambda p: p.mkdir(), lambda p: os.mkfifo(p), lambda p: p.symlink_to("/etc/hostname")],
    ids=["directory", "pipe", "link"],
)
@pytest.mark.parametrize("which", ["manifest", "table"])
def test_a_document_that_is_no_regular_file_is_damage_and_hangs_nobody(
    copied: tuple[Path, list[dict[str, Any]]], make: Callable[[Path], None], which: str
) -> None:
    root, _ = copied
    newest = deltacheck.open(root).manifest(3).segments[-1].id
    path = {"manifest": root / "checkpoints" / "c0000000003", "table": root / "segments" / newest}[
        which
    ] / "zarr.json"
    path.unlink()
    make(path)
    with pytest.raises(errors.Damaged):
        deltacheck.open(root).restore()
    assert deltacheck.open(root).verify()


def test_damage_to_a_group_that_only_plain_zarr_reads_is_found(
    copied: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, states = copied
    groups = [p for p in root.rglob("zarr.json") if p.read_bytes().endswith(b'"attributes":{}}')]
    assert len(groups) >= 4
    for victim in groups:
        original = victim.read_bytes()
        victim.write_bytes(original[:-5])
        if victim.parent != root / "control":
            assert deltacheck.open(root).verify() == []
            found = deltacheck.open(root).verify(redundant=True)
            assert any(str(victim) in finding.problem for finding in found), victim
        assert not list(differences(states[3], restored(root, 3)))
        victim.write_bytes(original)


def test_a_delta_to_another_base_is_refused_before_anything_is_read(
    copied: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table names another base, with valid checksums, as a writer with a wrong shadow would."""
    import msgspec

    from deltacheck.store.manifest import SegmentTable

    root, _ = copied
    opened = open_root(root)
    manifest = opened.manifest(3)
    segment = opened.store.segment(manifest.segments[-1])
    path, entry = next((path, entry) for path, entry in segment.table.leaves.items() if entry.base)
    forged = msgspec.structs.replace(entry, base="0" * len(entry.base))
    table = msgspec.structs.replace(segment.table, leaves={**segment.table.leaves, path: forged})
    assert isinstance(table, SegmentTable)
    monkeypatch.setattr(segment, "table", table)
    monkeypatch.setattr(
        opened.store,
        "segment",
        lambda ref, table=None: segment if ref.id == segment.id else type(segment)(root, ref),
    )
    with pytest.raises(
        errors.ChainBroken,
        match=f"{segment.id} is a delta to 0+, but the leaf is {entry.base} there",
    ):
        resolve_leaves(opened, manifest)
