"""Manifests with many tiles: places by rule, and digests from the tables of the segments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import deltacheck
from deltacheck import errors
from deltacheck.maintain.compaction import compact as compact_root
from deltacheck.maintain.compaction import reclaim
from deltacheck.maintain.repair import repair
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.store import collect, compact, documents
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root
from tests.support import forge
from tests.support.merging import merge_newest
from tests.support.ranked_run import RankedRun, cells

SIZE = 4


def state_of(step: int) -> dict[str, Any]:
    values = np.arange(64 * 30, dtype=np.float32).reshape(64, 30)
    # Noise alone: the bytes of a delta are more than those of the whole leaf.
    values *= np.random.default_rng(step).standard_normal(values.shape, np.float32)
    return {"w": values, "v": values[:40] * 2, "b": np.arange(3.0) + step, "step": step}


def saved_by_ranks(root: Path) -> None:
    with RankedRun(root, SIZE, cells) as run:
        for step in range(3):
            for report in run.save(step, state_of(step)):
                assert not isinstance(report, BaseException), report


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root of four ranks, whose steps are written in the compact form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "COMPACT_TILES", 1)
        folder = tmp_path_factory.mktemp("good")
        saved_by_ranks(folder / "root")
        yield folder / "root"


def manifest_path(root: Path, step: int = 2) -> Path:
    return root / f"checkpoints/c{step:010d}/zarr.json"


def assert_restores(root: Path) -> None:
    for step in deltacheck.open(root).steps():
        restored, state = deltacheck.open(root).restore(step), state_of(step)
        assert restored.keys() == state.keys()
        assert all((restored[name] == state[name]).all() for name in "wvb")
    assert deltacheck.open(root).verify(deep=True) == []


def test_a_step_is_the_same_in_both_forms(good: Path, tmp_path: Path) -> None:
    saved_by_ranks(tmp_path / "long")
    small = open_root(good).manifest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "COMPACT_TILES", 1 << 14)
        saved_by_ranks(tmp_path / "short")
    large = open_root(tmp_path / "short").manifest()
    assert (bool(small.lane_digests), bool(large.lane_digests)) == (True, False)
    assert small.tiles.keys() == large.tiles.keys() == {"v", "w"}
    assert {path: small.tiling(path) for path in small.tiles} == large.tiles
    assert dict(small.stored.items()) == dict(large.stored.items())
    assert {path: small.mark_of(path) for path in small.specs} == {
        path: large.mark_of(path) for path in large.specs
    }
    # The file has none of the digests, and the same bytes whenever it is written.
    content = manifest_path(good).read_bytes()
    assert not any(large.stored[name].digest in content.decode() for name in large.names_of("w"))
    again = documents.from_zarr_json(content, Manifest, "it")
    assert documents.manifest_content(again) == content
    assert_restores(good)


def test_a_rank_reads_and_proves_its_own_lane_only(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_root(good)
    manifest = root.manifest()
    opened: list[str] = []
    before = type(root.store).segment
    monkeypatch.setattr(
        type(root.store),
        "segment",
        lambda self, ref, table=None: opened.append(ref.id) or before(self, ref, table),
    )
    names = manifest.names_of("w")
    assert names[0] in manifest.stored  # without any table
    assert "w%@1,1" not in manifest.stored
    assert not opened
    resolve_leaves(root, manifest, ["w"], boxes={"w": (slice(0, 10), slice(0, 10))})
    assert set(opened) == {manifest.segments[number].id for number in manifest.lanes[0]}


@pytest.mark.parametrize("rewrite", [compact_root, merge_newest])
def test_what_is_written_again_keeps_the_form(good: Path, tmp_path: Path, rewrite: Any) -> None:
    root = shutil.copytree(good, tmp_path / "root")
    before = open_root(root).manifest()
    expected = dict(before.stored.items())
    assert rewrite(open_root(root))
    after = open_root(root).manifest()
    assert (after.lane_digests, after.tiles) == (before.lane_digests, before.tiles)
    assert dict(after.stored.items()) == expected
    assert_restores(root)


def test_reclaimed_segments_take_the_place_of_the_old_ones_in_their_lanes(
    good: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(good, tmp_path / "root")
    for seq in (0, 1):
        collect.delete_checkpoint(open_root(root), seq)
    assert len(reclaim(open_root(root), below=1.0)) >= SIZE
    # Every leaf is whole in the new segment of its rank.
    manifest = open_root(root).manifest()
    assert sorted(manifest.lanes) == [(number,) for number in range(SIZE)]
    assert_restores(root)


def test_tables_of_another_state_are_refused_by_the_digest_of_their_lane(
    good: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(good, tmp_path / "root")
    old = open_root(root).manifest(1)
    new = open_root(root).manifest(2)
    # Each segment is whole and known to the manifest, but those of the last save are left out.
    path = manifest_path(root)
    kept = [n for n, ref in enumerate(new.segments) if ref in old.segments]
    forged = msgspec.structs.replace(
        new,
        segments=tuple(new.segments[n] for n in kept),
        lanes=tuple(tuple(kept.index(n) for n in lane if n in kept) for lane in new.lanes),
    )
    path.write_bytes(documents.manifest_content(forged))
    with pytest.raises(errors.Damaged, match=r"step 2: the tiles of lane \d have the digest"):
        deltacheck.open(root).restore(2, ["w"])
    assert {finding.step for finding in deltacheck.open(root).verify()} == {2}
    assert (deltacheck.open(root).restore(1)["w"] == state_of(1)["w"]).all()


def lose_newest(root: Path) -> str:
    """Remove the table of a segment of the newest step."""
    name = next(
        ref.id for ref in open_root(root).manifest(2).segments if ref.id.startswith("s0000000002")
    )
    (root / "segments" / name / "zarr.json").unlink()
    return name


def test_a_lost_table_is_reported_and_only_its_steps_are_lost(good: Path, tmp_path: Path) -> None:
    root = shutil.copytree(good, tmp_path / "root")
    newest = lose_newest(root)
    with pytest.raises(errors.ChainBroken, match=newest):
        deltacheck.open(root).restore(2, ["w"])
    assert {finding.step for finding in deltacheck.open(root).verify()} == {2}
    assert (deltacheck.open(root).restore(fallback=True)["w"] == state_of(1)["w"]).all()
    # The step goes only if that is asked for.
    kept = repair(open_root(root))
    assert {lost.step for lost in kept.lost} == {2}
    assert newest in kept.lost[0].problem
    assert deltacheck.open(root).steps() == [0, 1, 2]
    repair(open_root(root), lossy=True)
    assert deltacheck.open(root).steps() == [0, 1]
    assert_restores(root)


def edited(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Return an edit that replaces a field of the compact form."""

    def edit(body: dict[str, Any]) -> None:
        place = body["compact"]
        for key in keys[:-1]:
            place = place[key]
        assert keys[-1] in (place if isinstance(place, dict) else range(len(place)))
        place[keys[-1]] = to

    return edit


def without_compact(body: dict[str, Any]) -> None:
    del body["compact"]


def with_tiles_beside(body: dict[str, Any]) -> None:
    body["segments"] = [{"id": "s0000000000-00000000", "digest": "0" * 32, "stored_bytes": 1}]


def without_lane_digests(body: dict[str, Any]) -> None:
    del body["lane_digests"]


def with_other_lane_digests(body: dict[str, Any]) -> None:
    body["lane_digests"].pop()


def with_codes(body: dict[str, Any]) -> None:
    body["compact"]["leaves"]["w"] |= {
        "forms": [{"how": "same", "of": "v", "dtype": "float32", "shape": [64, 30]}],
        "codes": [""],
    }


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_compact, "lanes is not a list of its segments"),
        (with_tiles_beside, "outside its compact form"),
        (without_lane_digests, "leaf 'v' has .* tiles"),
        (with_other_lane_digests, "4 lanes and other digests of lanes"),
        (with_codes, "leaves digests to tables that do not have them"),
        (edited("nonces", to="0" * 8), "columns of its segments differ"),
        (edited("digests", to="0" * 32), "columns of its segments differ"),
        (edited("seqs", to=[[0, 0, 1 << 40]]), "columns of its segments differ"),
        (edited("stored_bytes", to=[[0, 0, -1]]), "no numbers"),
        (edited("leaves", "w", "cuts", to=99), "is damaged"),
        (edited("leaves", "w", "lanes", to=-1), "negative"),
        (edited("places", 0, to=[-1, 0, 0, 0]), "a lane that it does not have|to tables that"),
        (edited("places", 0, to=[7, 0, 0, 0]), "a lane that it does not have"),
        (edited("places", 0, to=[0, 0]), "other numbers for them"),
        (edited("axes", 0, to={"size": 64, "step": 1 << 60}), "cannot be cut as it says"),
        (edited("axes", 0, to={"size": 64, "step": -1}), "cannot be cut as it says"),
        (edited("axes", 0, to={"size": 64, "step": 8, "parts": 8}), "cannot be cut as it says"),
        (edited("axes", 0, to={"size": 1 << 40, "step": 1}), "more than the .* of a file of its"),
        (edited("axes", 0, to={"size": 1 << 40, "parts": 1 << 39}), "more than the .* of a file"),
        (edited("axes", 0, to={"size": 40, "edges": [41]}), "cannot be cut as it says"),
    ],
)
def test_a_compact_manifest_that_cannot_be_is_refused(
    edit: Callable[[dict[str, Any]], None], message: str, good: Path
) -> None:
    group = json.loads(manifest_path(good).read_bytes())
    edit(forge.body_of(group))
    with pytest.raises(errors.Damaged, match=message):
        documents.from_zarr_json(forge.sealed(group), Manifest, "it")
