"""A restore of many small leaves shares reads and calls, and still names a damaged leaf."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import deltacheck
from deltacheck import _native, errors
from deltacheck.backends.torch import Engine
from deltacheck.codec.base import STREAMS
from deltacheck.restore import deltas, read
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store import documents, layout, segment
from deltacheck.store.files.native_files import JoinedRead
from deltacheck.store.manifest import SegmentTable
from deltacheck.store.roots.opening import open_root
from tests.support.states import bits
from tests.support.waiting import HANG_SECONDS

LEAVES, STEPS = 40, 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save many small leaves of two element sizes, a scalar and an empty leaf.

    Return the root and the last state.
    """
    root = tmp_path_factory.mktemp("root")
    generator = torch.Generator().manual_seed(0)
    state = {
        f"p{n:02}": (
            torch.randn(70, 9 + n, generator=generator).to([torch.float32, torch.bfloat16][n % 2])
        )
        for n in range(LEAVES)
    }
    state |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.5)}
    with Engine(root) as engine:
        for step in range(STEPS):
            engine.save(step, state).wait()
            if step + 1 < STEPS:
                for value in state.values():
                    value.reshape(-1)[:: 7 + step] += 1
    return root, state


def test_leaves_that_keep_their_keyframe_come_first_in_the_streams(tmp_path: Path) -> None:
    dense, sparse = torch.randn(50_000), torch.zeros(50_000)
    with Engine(tmp_path, policy=deltacheck.Policy.exact(max_restore_ratio=2.0)) as engine:
        for step in range(8):
            engine.save(step, {"a": dense, "b": sparse}).wait()
            dense.copy_(torch.randn(50_000))
            sparse[step] += 1
    root = open_root(tmp_path)
    manifest = root.manifest()
    tables = {ref: root.store.segment(ref) for ref in manifest.segments}
    leaves = [
        table.part(0).index[:, segment.LEAF].tolist()
        for table in tables.values()
        if table.table.parts
    ]
    # Until the first keyframe of "a", both keyframes have one age.
    assert leaves[0][0] == 0
    assert leaves[-1][0] == 1
    assert any(len(set(numbers)) == 2 and numbers[0] == 1 for numbers in leaves)


class Parsed:
    """A counter of parsed documents by file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: Counter[str] = Counter()
        for name in ("from_zarr_json", "bound_table"):
            original = getattr(documents, name)

            def counted(content: bytes, *kind_and_where: Any, original: Any = original) -> Any:
                self.files[kind_and_where[-1]] += 1
                return original(content, *kind_and_where)

            monkeypatch.setattr(documents, name, counted)


def test_a_restore_parses_each_table_of_the_step_once_and_no_other_manifest(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = saved
    manifest = deltacheck.open(root).manifest()
    assert len(manifest.segments) == STEPS
    parsed = Parsed(monkeypatch)
    found = deltacheck.open(root).restore()
    expected = [root / "segments" / ref.id / "zarr.json" for ref in manifest.segments]
    expected.append(root / "checkpoints" / f"c{manifest.seq:010}" / "zarr.json")
    assert parsed.files == Counter(map(str, expected))
    assert all(bits(found[path]) == bits(value) for path, value in state.items())


def test_verify_parses_each_document_once_however_many_steps_stand_on_it(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = Parsed(monkeypatch)
    assert deltacheck.open(saved[0]).verify() == []
    assert len(parsed.files) == 2 * STEPS
    assert set(parsed.files.values()) == {1}


def test_rows_of_all_small_leaves_are_decoded_by_one_call(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    decode = _native.apply_rows

    def counted(rows: Any, *arguments: Any) -> Any:
        calls.append(rows.shape[0])
        return decode(rows, *arguments)

    monkeypatch.setattr(_native, "apply_rows", counted)
    root = open_root(saved[0])
    load_leaves(resolve_leaves(root, root.manifest()))
    assert calls == [(STEPS - 1) * (LEAVES + 1)]


@pytest.mark.parametrize("batch_bytes", [1, 3000, 20_000])
def test_rows_that_are_decoded_in_batches_of_any_size_give_the_same_bits(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(deltas, "_BATCH_BYTES", batch_bytes)
    restored = deltacheck.open(saved[0]).restore()
    assert all(bits(restored[path]) == bits(value) for path, value in saved[1].items())


def test_deltas_are_read_beside_the_keyframes_and_beside_the_decoder(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noting(name: str, do: Any) -> Any:
        def call(*arguments: Any) -> Any:
            events.append(name)
            return do(*arguments)

        return call

    monkeypatch.setattr(deltas, "_BATCH_BYTES", 20_000)
    monkeypatch.setattr(deltas, "Reading", noting("start", deltas.Reading))
    monkeypatch.setattr(deltas, "_decode", noting("decode", deltas._decode))
    start_keyframes = noting("keyframes", read._start_keyframes)

    def awaited(items: Any) -> Any:
        reading = start_keyframes(items)
        return SimpleNamespace(result=noting("await", reading.result), settle=reading.settle)

    monkeypatch.setattr(read, "_start_keyframes", awaited)
    deltacheck.open(saved[0]).restore()
    batches = events.count("decode")
    assert batches > 2
    assert events == [
        "keyframes",
        "start",
        "await",
        *["start", "decode"] * (batches - 1),
        "decode",
    ]


def test_a_restore_that_fails_waits_for_the_reads_that_it_has_started(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, ended = threading.Event(), threading.Event()
    original = JoinedRead._read

    def slow(self: JoinedRead, *files: Any) -> None:
        if self.size:  # not a table
            assert failed.wait(HANG_SECONDS)
        original(self, *files)
        ended.set()

    def damaged() -> None:
        failed.set()
        raise errors.Damaged("a keyframe")

    reading = SimpleNamespace(result=damaged, settle=lambda: None)
    monkeypatch.setattr(JoinedRead, "_read", slow)
    monkeypatch.setattr(read, "_start_keyframes", lambda _: reading)
    with pytest.raises(errors.Damaged, match="a keyframe"):
        deltacheck.open(saved[0]).restore()
    assert ended.is_set()


def test_a_restore_whose_deltas_cannot_be_read_waits_for_the_keyframes(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def damaged(_: Any) -> None:
        events.append("deltas")
        raise errors.Damaged("a delta")

    reading = SimpleNamespace(settle=lambda: events.append("settled"))
    monkeypatch.setattr(read, "_start_keyframes", lambda _: reading)
    monkeypatch.setattr(read, "Deltas", damaged)
    with pytest.raises(errors.Damaged, match="a delta"):
        deltacheck.open(saved[0]).restore()
    assert events == ["deltas", "settled"]


@pytest.mark.parametrize("wanted", [["p03"], ["p31", "p02", "p30", "scalar"], ["empty"]])
def test_some_leaves_come_back_without_the_others(
    saved: tuple[Path, dict[str, torch.Tensor]], wanted: list[str]
) -> None:
    root, state = saved
    found = deltacheck.open(root).restore(leaves=wanted)
    assert list(found) == wanted
    assert all(bits(found[path]) == bits(state[path]) for path in wanted)


def test_leaves_that_are_decoded_together_take_no_more_memory_than_the_limit_counts(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    root, state = saved
    size = sum(value.nbytes for value in state.values())
    found = deltacheck.open(root).restore(max_bytes=size)
    owners = {id(owner): owner.nbytes for value in found.values() for owner in [_owner(value)]}
    assert sum(owners.values()) == size
    with pytest.raises(errors.BudgetExceeded):
        deltacheck.open(root).restore(max_bytes=size - 1)


def _owner(value: Any) -> np.ndarray[Any, Any]:
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return value


@pytest.mark.parametrize("path", ["p00", "p17", "p38"])
def test_a_stream_that_cannot_be_decoded_names_its_leaf_among_those_decoded_with_it(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    root = open_root(saved[0])
    manifest = root.manifest()
    last = root.store.segment(manifest.segments[-1])
    ((number, _, _),) = last.table.leaves[path].delta
    decode = deltas._decode

    def changed_decode(rows: Any, batch: Any, streams: Any) -> None:
        for row, offsets in enumerate(batch.offsets, batch.first):
            part, leaf = rows.owner_of(row)
            if (part.path, leaf) == (last.path / f"delta.{number}", path):
                tiles = int(offsets[STREAMS.index("tiles")])
                streams[tiles : tiles + 6] = 255
        decode(rows, batch, streams)

    monkeypatch.setattr(deltas, "_decode", changed_decode)
    with pytest.raises(errors.DamagedStream, match=f"leaf '{path}': .*{last.id}/delta.{number}: "):
        load_leaves(resolve_leaves(root, manifest))


def test_a_manifest_under_another_number_is_not_taken_for_the_newest(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved[0], root)
    shutil.copytree(root / "checkpoints" / "c0000000001", root / "checkpoints" / "c0000000009")
    with pytest.raises(
        errors.Damaged,
        match=(
            rf"c0000000009.*is the manifest of another checkpoint.*still restore: 0, .*{STEPS - 1}"
        ),
    ):
        deltacheck.open(root).manifest()
    for step in (1, STEPS - 1):
        assert deltacheck.open(root).manifest(step).step == step
    assert "c0000000009" in deltacheck.open(root).verify()[0].problem


def test_a_key_that_stands_twice_in_a_document_is_refused_by_the_quick_parser_too() -> None:
    body = b'{"version":1}'
    checksum = xxhash.xxh3_128_hexdigest(body).encode()
    once = layout.group_json({layout.ATTRIBUTE: {"version": 1, "checksum": checksum.decode()}})
    assert documents._is_bound(once)
    with pytest.raises(errors.Damaged, match="the same key twice"):
        documents.from_zarr_json(
            once.replace(b'"version":1', b'"version":1,"version":1'), SegmentTable, "x"
        )
