"""Merged deltas: one delta in place of several gives the same content, whatever methods they have,
and nothing uses a merge that is not proven.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Keep, Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.codec import default_codec
from deltacheck.codec.base import METHOD_NAMES
from deltacheck.leaf.spec import LeafKind
from deltacheck.restore.resolve import resolve_leaves, stored_chains
from deltacheck.save.chains import merged_deltas
from deltacheck.store import collect, documents, layout
from deltacheck.store import segment as columns
from deltacheck.store.manifest import SegmentTable
from deltacheck.store.roots.opening import open_root
from tests.support.merging import merge_newest
from tests.support.states import assert_same
from tests.support.waiting import HANG_SECONDS

WORDS = 4096


def chains_of(root: Path, step: int | None = None) -> dict[str, Any]:
    opened = open_root(root)
    return stored_chains(resolve_leaves(opened, opened.manifest(step)).values())


def kinds(report: Any) -> dict[str, LeafKind]:
    """Return the way in which a save stored each leaf."""
    return {leaf.path: leaf.kind for leaf in report.leaves}


def methods_of(chain: Any) -> list[set[str]]:
    """Return the methods of each delta of a chain."""
    return [
        {
            METHOD_NAMES[method]
            for part, first, rows in entry.delta
            for method in segment.part(part).index[first : first + rows, columns.METHOD]
        }
        for segment, entry in chain.deltas
    ]


def change(leaf: np.ndarray[Any, Any], method: str, random: np.random.Generator) -> None:
    """Change words in place so that the encoder chooses a method."""
    few = random.choice(WORDS, 20, replace=False)
    match method:
        case "sparse":
            leaf[few] += 3
        case "bitmap":
            leaf[random.random(WORDS) < 0.5] += 1
        case "diff":
            leaf += random.integers(1, 4, WORDS, leaf.dtype)
        case "planes":
            leaf[:] = random.integers(0, 3, WORDS, leaf.dtype)
        case "raw":
            # Positions and wide values look cheaper than planes, and are larger than the words.
            new = np.frombuffer(random.bytes(leaf.nbytes), leaf.dtype)
            leaf[:] = np.where(random.random(WORDS) < 0.95, new, leaf)


SEQUENCES = {
    "positions": ("sparse", "bitmap", "sparse"),
    "planes": ("diff", "sparse", "diff"),
    "absolute first": ("raw", "sparse", "diff"),
    "absolute between": ("sparse", "planes", "bitmap"),
    "absolute last": ("diff", "sparse", "raw"),
}


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_deltas_of_all_methods_are_merged_without_a_changed_bit(
    tmp_path: Path, sequence: tuple[str, ...], dtype: type[np.unsignedinteger[Any]]
) -> None:
    random = np.random.default_rng(0)
    leaf = random.integers(0, 200, WORDS, dtype)
    with Engine(tmp_path, policy=Policy.exact(max_restore_ratio=None)) as engine:
        engine.save(0, {"w": leaf.copy()}).wait()
        for step, method in enumerate(sequence, 1):
            change(leaf, method, random)
            engine.save(step, {"w": leaf.copy()}).wait()
    before = chains_of(tmp_path)["w"]
    if dtype is np.uint32:
        assert [set(sequence[n : n + 1]) for n in range(3)] == methods_of(before)
    assert len(before.deltas) == 3
    assert merge_newest(open_root(tmp_path)) == {"w"}
    ((segment, entry),) = chains_of(tmp_path)["w"].deltas
    assert entry.since == layout.seq_of(before.deltas[0][0].id)
    assert segment.table.must_understand == ("merged",)
    np.testing.assert_array_equal(deltacheck.open(tmp_path).restore()["w"], leaf)
    assert deltacheck.open(tmp_path).verify(deep=True) == []
    assert not merge_newest(open_root(tmp_path))


def test_words_that_have_their_first_value_again_are_not_stored(tmp_path: Path) -> None:
    leaf = np.arange(WORDS, dtype=np.uint32)
    still = np.zeros(WORDS, np.uint32)
    with Engine(tmp_path) as engine:
        for step in range(4):
            leaf[7] += step % 2
            leaf[9] ^= 1
            still[3] ^= 1
            engine.save(step, {"w": leaf.copy(), "returns": still.copy()}).wait()
    merge_newest(open_root(tmp_path))
    chains = chains_of(tmp_path)
    ((segment, entry),) = chains["w"].deltas
    ((part, row, _),) = entry.delta
    assert segment.part(part).index[row, columns.CHANGED] == 2
    np.testing.assert_equal(deltacheck.open(tmp_path).restore(), {"w": leaf, "returns": still})


def test_a_leaf_that_has_its_first_content_again_keeps_its_deltas(tmp_path: Path) -> None:
    leaf, other = torch.zeros(100), torch.zeros(100)
    with Engine(tmp_path) as engine:
        for step in range(3):
            leaf[0], other[0] = step % 2, step
            engine.save(step, {"w": leaf.clone(), "other": other.clone()}).wait()
    assert merge_newest(open_root(tmp_path)) == {"other"}
    assert [len(chains_of(tmp_path)[path].deltas) for path in ("w", "other")] == [2, 1]
    with Engine(tmp_path) as engine:
        assert_same({"w": leaf, "other": other}, engine.restore())


# --- behind a training ----------------------------------------------------------------------------


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "big": torch.randn(300, 400).bfloat16(),
        "wide": torch.randn(40_000),
        "small": torch.zeros(40),
        "seldom": torch.zeros(3000),
    }


def train(live: dict[str, Any], step: int) -> dict[str, Any]:
    live["big"].view(-1).view(torch.int16)[step % 7 :: 97] += 1
    live["wide"][
        torch.randint(0, 40_000, (300,), generator=torch.Generator().manual_seed(step))
    ] += 1e-3
    live["small"][step % 40] = step
    if step % 5 == 0:
        live["seldom"][step] = step
    return {name: value.clone() for name, value in live.items()}


def settle(engine: Engine) -> None:
    """Wait for a merge, so that the next save uses it."""
    compactor = engine._saver.chains.compactor
    assert compactor is not None
    compactor.wait(240)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_long_run_writes_no_keyframes_and_its_chains_stay_short(
    tmp_path: Path, resumes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, live = Policy.exact(max_chain_depth=8), state()
    engine, states, reports = Engine(tmp_path, policy=policy), {}, []
    for step in range(40):
        states[step] = train(live, step)
        report = engine.save(step, live).result()
        assert report is not None
        reports.append(report)
        settle(engine)
        assert max(len(chain.deltas) for chain in chains_of(tmp_path, step).values()) <= 8
        if resumes and step % 11 == 10:
            engine.close()
            engine = Engine(tmp_path, policy=policy)
            live = engine.restore()
    for step in engine.steps():
        assert_same(states[step], engine.restore(step))
    engine.close()
    # A keyframe of the smallest leaf takes as few bytes as a delta.
    whole = {
        path
        for report in reports[1:]
        for path, kind in kinds(report).items()
        if kind is LeafKind.KEYFRAME
    }
    assert whole <= {"small"}
    assert deltacheck.open(tmp_path).verify(deep=True) == []
    # What manifests state is what the segments of merges have.
    opened = open_root(tmp_path)
    manifests = [opened.manifest(step) for step in opened.steps()]
    saves = {manifest.seq for manifest in manifests}
    refs = {ref.id: ref for manifest in manifests for ref in manifest.segments}
    merges = [ref for ref in refs.values() if layout.seq_of(ref.id) not in saves]
    assert len(merges) > 4
    stated = sum(manifest.merged_bytes for manifest in manifests)
    assert stated == sum(report.merged_bytes for report in reports)
    assert stated >= sum(ref.stored_bytes for ref in merges) > 0
    assert main(["log", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert sum(row["merged_bytes"] for row in rows) == stated
    assert main(["log", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "MERGED" in text
    assert "mean of 40 saves, keyframes and merges included: " in text
    # A collection leaves what the steps need, and only that.
    collect.collect(open_root(tmp_path), grace_seconds=0, writer_is_dead=True)
    assert set(open_root(tmp_path).store.segment_ids()) == refs.keys()
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_segment_that_one_leaf_still_needs_does_not_bring_back_what_was_merged(
    tmp_path: Path,
) -> None:
    """``seldom`` keeps old segments alive, in which the merged deltas of other leaves stand."""
    live = state()
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=8), keep=Keep(last=1)) as engine:
        for step in range(30):
            expected = train(live, step)
            engine.save(step, live).wait()
            settle(engine)
        manifest = open_root(tmp_path).manifest()
        opened = open_root(tmp_path)
        segments = [opened.store.segment(ref) for ref in manifest.segments]
        entries = columns.entries_by_path(segments)
        hidden = {
            path
            for path in manifest.leaves
            if len(entries[path]) < sum(path in segment.table.leaves for segment in segments)
        }
        assert hidden, "the case that this test is about"
        assert_same(expected, engine.restore())


@pytest.mark.parametrize("fault", ["encoder", "disk"])
def test_a_merge_that_is_not_proven_is_not_used(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(after: Any, *arguments: Any, **options: Any) -> Any:
        after = after.copy()
        after[-1] ^= 1
        return codec.encode(after, *arguments, **options)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    codec = default_codec()
    if fault == "encoder":
        fake = type("Wrong", (), {"encode": staticmethod(wrong), "apply": codec.apply})
        monkeypatch.setattr(f"{merged_deltas.__name__}.default_codec", lambda: fake)
    else:
        monkeypatch.setattr(merged_deltas, "_enter", full)
    live, states, reports = state(), {}, []
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=4)) as engine:
        for step in range(8):
            states[step] = train(live, step)
            reports.append(engine.save(step, live).result())
            settle(engine)
            assert max(len(chain.deltas) for chain in chains_of(tmp_path, step).values()) <= 4
        for step in states:
            assert_same(states[step], engine.restore(step))
        assert not any(
            entry.since >= 0 for chain in chains_of(tmp_path).values() for _, entry in chain.deltas
        )
    assert "its chains stay as they are" in caplog.text
    reason = "the merged delta does not give" if fault == "encoder" else "No space left on device"
    assert reason in caplog.text
    # The limit holds without merges, too.
    assert any(LeafKind.KEYFRAME in kinds(report).values() for report in reports[1:])
    collect.collect(open_root(tmp_path), grace_seconds=0, writer_is_dead=True)
    needed = {ref.id for step in range(8) for ref in open_root(tmp_path).manifest(step).segments}
    assert set(open_root(tmp_path).store.segment_ids()) == needed


def test_damage_of_what_is_merged_ends_the_merge_and_stays_visible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = state()
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=6)) as engine:
        for step in range(3):
            train(live, step)
            engine.save(step, live).wait()
        for file in tmp_path.glob("segments/s0000000000-*/packed/float32/c*"):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        for step in range(3, 8):
            train(live, step)
            engine.save(step, live).wait()
            settle(engine)
        with pytest.raises(errors.Damaged):
            engine.restore()
    assert "its chains stay as they are" in caplog.text


def test_a_merge_of_another_branch_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge is finished after a restore of an earlier step."""
    go, write_merged = threading.Event(), merged_deltas.write_merged
    monkeypatch.setattr(
        "deltacheck.save.chains.compactor.write_merged",
        lambda *a, **k: go.wait(240) and write_merged(*a, **k),
    )
    one, two, states = torch.randn(3000), torch.randn(3000), {}
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=8)) as engine:
        for step in range(9):
            one[0], two[step] = min(step, 1), step
            states[step] = {"one": one.clone(), "two": two.clone()}
            engine.save(step, states[step]).wait()
        compactor = engine._saver.chains.compactor
        assert compactor is not None
        assert compactor.segments(), "the merge is under way"
        live = engine.restore(3)
        go.set()
        settle(engine)
        for step in (9, 10, 11):
            live["two"][step] = -step
            states[step] = {name: value.clone() for name, value in live.items()}
            engine.save(step, live).wait()
        for step, saved in states.items():
            assert_same(saved, engine.restore(step))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_keyframes_are_written_where_they_take_fewer_bytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    dense, sparse = random.normal(size=40_000), np.zeros(40_000)
    reports = []
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=8)) as engine:
        for step in range(12):
            dense[:] = random.normal(size=40_000)
            sparse[step] = step
            state = {"dense": torch.from_numpy(dense), "sparse": torch.from_numpy(sparse)}
            reports.append(engine.save(step, state).result())
            settle(engine)
    found = [kinds(report) for report in reports[1:]]
    assert any(saved["dense"] is LeafKind.KEYFRAME for saved in found)
    assert not any(saved["sparse"] is LeafKind.KEYFRAME for saved in found)


def test_saves_go_on_while_a_merge_is_under_way_and_use_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write_merged = threading.Event(), merged_deltas.write_merged
    monkeypatch.setattr(
        "deltacheck.save.chains.compactor.write_merged",
        lambda *a, **k: go.wait(HANG_SECONDS) and write_merged(*a, **k),
    )
    live, states = state(), {}
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=8)) as engine:
        for step in range(8):
            states[step] = train(live, step)
            engine.save(step, live).wait()
        assert is_merged(tmp_path, 7) is False
        go.set()
        settle(engine)
        states[8] = train(live, 8)
        engine.save(8, live).wait()
        assert is_merged(tmp_path, 8) is True
        for step, saved in states.items():
            assert_same(saved, engine.restore(step))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def is_merged(root: Path, step: int) -> bool:
    return any(
        entry.since >= 0 for chain in chains_of(root, step).values() for _, entry in chain.deltas
    )


def test_closing_gives_up_a_merge_under_way_and_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, write_merged = threading.Event(), merged_deltas.write_merged

    def write(*arguments: Any) -> Any:
        begun.set()
        assert engine._saver.chains.compactor._stop.wait(HANG_SECONDS)  # of ``close``
        return write_merged(*arguments)

    monkeypatch.setattr("deltacheck.save.chains.compactor.write_merged", write)
    live = state()
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=4)) as engine:
        for step in range(4):
            train(live, step)
            engine.save(step, live).wait()
        assert begun.wait(HANG_SECONDS)
    needed = {ref.id for step in range(4) for ref in open_root(tmp_path).manifest(step).segments}
    assert set(open_root(tmp_path).store.segment_ids()) == needed


CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from tests.save.test_merged_deltas import state, train
from deltacheck import Keep, Policy, SaveOptions
from deltacheck.backends.torch import Engine
torch.set_num_threads(1)
policy = Policy.exact(max_chain_depth=4)
options = SaveOptions(grace_seconds=0)
with Engine(sys.argv[1], policy=policy, keep=Keep(last=4), options=options) as engine:
    live, first = state(), 0
    if engine.steps():
        first = engine.steps()[-1] + 1
        live = engine.restore(into=live)
    for step in range(first, 10_000):
        train(live, step)
        engine.save(step, live).wait()
        print(step, flush=True)
"""


def test_a_training_that_is_killed_while_it_merges_loses_nothing(tmp_path: Path) -> None:
    expected, done = state(), -1
    for kill in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parents[2])],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            for _ in range(4 + kill):  # a merge begins after the third step
                child.stdout.readline()
            child.kill()
            acknowledged = [done, *map(int, child.stdout.read().split())][-1]
        steps = deltacheck.open(tmp_path).steps()
        assert acknowledged in steps or acknowledged == done
        assert deltacheck.open(tmp_path).verify(deep=True) == []
        for step in range(done + 1, steps[-1] + 1):
            train(expected, step)
        done = steps[-1]
        with Engine(tmp_path) as engine:
            assert_same(expected, engine.restore())
    collect.collect(open_root(tmp_path), grace_seconds=0, writer_is_dead=True)
    opened = open_root(tmp_path)
    assert set(opened.store.segment_ids()) == {
        ref.id for step in opened.steps() for ref in opened.manifest(step).segments
    }


# --- the format -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merged")
    with Engine(path) as engine:
        for step in range(4):
            engine.save(step, {"w": torch.arange(500.0) * step}).wait()
    assert merge_newest(open_root(path))
    return path


def test_a_reader_that_does_not_know_merged_deltas_refuses_them(
    merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "FEATURES", tuple({*documents.FEATURES} - {"merged"}))
    with pytest.raises(errors.UnsupportedFormat, match="needs the features"):
        deltacheck.open(merged).restore()
    np.testing.assert_array_equal(deltacheck.open(merged).restore(2)["w"], np.arange(500.0) * 2)


@pytest.mark.parametrize(
    "forged",
    [
        lambda table, entry: msgspec.structs.replace(table, must_understand=()),
        lambda table, entry: msgspec.structs.replace(
            table, leaves={"w": msgspec.structs.replace(entry, since=99)}
        ),
        lambda table, entry: msgspec.structs.replace(
            table, leaves={"w": msgspec.structs.replace(entry, since=-7)}
        ),
        lambda table, entry: msgspec.structs.replace(
            table, leaves={"w": msgspec.structs.replace(entry, base="")}
        ),
    ],
)
def test_an_impossible_merged_delta_is_refused(
    merged: Path, forged: Callable[[SegmentTable, Any], SegmentTable]
) -> None:
    opened = open_root(merged)
    table = opened.store.segment(opened.manifest().segments[-1]).table
    content = layout.group_json(documents.to_attributes(forged(table, table.leaves["w"])))
    with pytest.raises(errors.Damaged):
        documents.from_zarr_json(content, SegmentTable, "a table")
