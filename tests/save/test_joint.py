"""Saves of several ranks: one step for all or none, deltas that go on after a change of the ranks,
restores that read what they need.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import deltacheck
from deltacheck import errors
from deltacheck.backends.numpy_leaves import describe_numpy
from deltacheck.leaf import sharding, tiles, tree
from deltacheck.leaf.sharding import HeldShards, Holdings
from deltacheck.leaf.spec import LeafKind, LeafSpec
from deltacheck.restore.content import box_bytes, chunk_bytes
from deltacheck.restore.leaf_kinds import Chain, Tiled
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_boxes
from deltacheck.save.ranks import joint
from deltacheck.store.manifest import Tiles
from deltacheck.store.roots.opening import open_root
from tests.support.forge import forge_manifest
from tests.support.ranked_run import (
    Layout,
    RankedRun,
    at_once,
    cells,
    model_state,
    nudge,
    rows,
    stages,
)
from tests.support.states import assert_same

BIG = "model/big"


def saved(run: RankedRun, step: int, state: Any) -> list[Any]:
    found = run.save(step, state)
    for one in found:
        assert not isinstance(one, BaseException), one
    return found


def kinds(reports: list[Any]) -> dict[str, LeafKind]:
    return {leaf.path: leaf.kind for report in reports for leaf in report.leaves}


def in_order(state: Any) -> Any:
    return (
        {key: in_order(state[key]) for key in sorted(state)} if isinstance(state, dict) else state
    )


# --- saved and restored ---------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "layout"), [(1, rows), (3, rows), (4, cells), (3, stages)])
def test_every_step_of_ranks_restores_to_what_they_had_together(
    tmp_path: Path, size: int, layout: Any
) -> None:
    state, states = model_state(), {}
    with RankedRun(tmp_path / "root", size, layout) as run:
        for step in range(3):
            states[step] = copy.deepcopy(state)
            reports = saved(run, step, state)
            assert len({one.digest for one in reports}) == 1  # the step's, on every rank
            nudge(state, seed=step)
    big = [kind for path, kind in kinds(reports).items() if tiles.leaf_of(path) == BIG]
    assert set(big) == {LeafKind.DELTA}
    opened = deltacheck.open(tmp_path / "root")
    for step, was in states.items():
        assert_same(in_order(opened.restore(step)), in_order(was))
    written = [leaf.path for report in reports for leaf in report.leaves]
    assert sorted(written) == sorted(opened.manifest().stored)  # each by one rank


@pytest.mark.parametrize(("size", "again"), [(4, 2), (2, 4), (4, 1), (1, 2), (3, 2)])
def test_another_number_of_ranks_goes_on_and_keeps_the_chains_whose_boxes_fit(
    tmp_path: Path, size: int, again: int
) -> None:
    state = model_state()
    with RankedRun(tmp_path / "root", size) as run:
        saved(run, 0, state)
        nudge(state)
        saved(run, 1, state)
    before = open_root(tmp_path / "root").manifest()
    with RankedRun(tmp_path / "root", again) as run:
        run.resume(state)
        nudge(state, seed=5)
        reports = saved(run, 2, state)
    assert_same(deltacheck.open(tmp_path / "root").restore(2), state)
    assert deltacheck.open(tmp_path / "root").verify(2, deep=True) == []
    boxes = dict.fromkeys([name for name in before.stored if tiles.leaf_of(name) == BIG])
    now = {path: kind for path, kind in kinds(reports).items() if tiles.leaf_of(path) == BIG}
    stays = {
        name
        for name in now
        if name in boxes and before.stored[name].shape == deltacheck_shape(tmp_path, name)
    }
    assert {name for name, kind in now.items() if kind is LeafKind.DELTA} == stays
    if size % again == 0:  # the new shards are made of the old tiles
        assert stays == set(boxes)
    cut = open_root(tmp_path / "root").manifest().tiles
    assert (BIG in cut) == (max(size if size % again == 0 else 0, again) > 1)


def deltacheck_shape(tmp_path: Path, name: str) -> tuple[int, ...]:
    return open_root(tmp_path / "root").manifest().stored[name].shape


def test_a_rank_reads_the_chunks_that_its_box_touches_and_no_others(
    tmp_path: Path, read_bytes: list[int]
) -> None:
    """Saved in cells of 4 ranks, restored in rows of 3: beside what a rank needs, the rest of the
    chunks that its edges go through.
    """
    state = {"w": np.random.default_rng(0).standard_normal((1500, 4096)).astype(np.float32)}
    with RankedRun(tmp_path / "root", 4, cells) as run:
        saved(run, 0, state)
    root = open_root(tmp_path / "root")
    manifest = root.manifest()
    for rank in range(3):
        boxes = {"w": rows("w", (1500, 4096), rank, 3)[0]}
        leaves = resolve_leaves(root, manifest, boxes=boxes)
        read_bytes.clear()
        found = load_boxes(leaves, boxes)["w"]
        assert np.array_equal(found, state["w"][boxes["w"]])
        edges = 2 if rank == 1 else 1
        assert (
            found.nbytes <= sum(read_bytes) <= found.nbytes + edges * 2 * (1 << 20)
        )  # in each of two columns of cells


def columns(path: str, shape: Sequence[int], rank: int, size: int) -> list[sharding.Box]:
    (box,) = rows(path, [*reversed(shape)], rank, size)
    return [box[::-1]]


@pytest.mark.parametrize(
    ("saved_as", "read_as", "shape", "times"),
    [
        # A chunk is whole rows of its tile, and is read, decoded and verified whole: each of four
        # ranks reads all chunks for a quarter of their columns.
        (rows, columns, (1024, 4096), 4),
        (columns, rows, (1024, 4096), 1),
        # Rows that are longer than a chunk are cut into chunks.
        (rows, columns, (8, 1 << 20), 1),
    ],
)
def test_ranks_that_read_columns_of_rows_read_all_chunks_each(
    tmp_path: Path,
    read_bytes: list[int],
    saved_as: Layout,
    read_as: Layout,
    shape: tuple[int, int],
    times: int,
) -> None:
    """Count the bytes that the reader decodes for all ranks, of a step with a keyframe and deltas.
    These are the figures of docs/how-to/several-ranks.md.
    """
    ranks = 4
    state = {"w": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    with RankedRun(tmp_path / "root", ranks, saved_as) as run:
        saved(run, 0, state)
        state["w"][:, ::100] += 1
        saved(run, 1, state)
    root = open_root(tmp_path / "root")
    for rank in range(ranks):
        boxes = {"w": read_as("w", shape, rank, ranks)[0]}
        leaves = resolve_leaves(root, root.manifest(), boxes=boxes)
        box = load_boxes(leaves, boxes)["w"]
        assert np.array_equal(box, state["w"][boxes["w"]])
    assert sum(read_bytes) == times * state["w"].nbytes


@pytest.mark.parametrize(
    ("size", "layout", "again", "into", "most"),
    [
        (8, cells, 3, rows, 1.1),
        (8, cells, 16, rows, 1.1),
        (64, rows, 48, rows, 1.1),
        (8, cells, 4, cells, 1.1),
        (
            16,
            rows,
            6,
            cells,
            2.1,
        ),  # a chunk has whole rows of its tile: half of the columns are half of each chunk
    ],
)
def test_elastic_restores_read_at_most_a_tenth_more_than_they_need_but_for_columns(
    size: int, layout: Layout, again: int, into: Layout, most: float
) -> None:
    """Of a leaf of the size that a large model has, told from its tables: 28672 x 8192 float32."""
    shape = (28672, 8192)
    held = [
        {"w": HeldShards("float32", shape, tuple(layout("w", shape, rank, size)))}
        for rank in range(size)
    ]
    cuts = sharding.plan([Holdings.of(one) for one in held])["w"].cuts
    assert cuts is not None
    digests, none = "0" * 32 * tiles.count(cuts), (-1,) * tiles.count(cuts)
    of = Tiles("float32", cuts, digests, none)
    chains = {
        n: Chain(r.spec(of.names("w")[n]), None, (), None) for n, r in enumerate(of.records())
    }  # type: ignore[arg-type]
    leaf = Tiled(LeafSpec.of("w", shape, "float32"), cuts, chains)
    read = needed = 0
    for rank in range(again):
        (box,) = into("w", shape, rank, again)
        chunks: dict[str, set[int]] = {chain.spec.path: set() for chain in chains.values()}
        leaf.add_needed(box, chunks)
        read += sum(chunk_bytes(one.spec, sorted(chunks[one.spec.path])) for one in chains.values())
        needed += box_bytes(leaf.spec, box)
    assert needed == leaf.spec.raw_bytes
    assert read <= most * needed


def test_a_rank_opens_only_the_segments_of_those_who_wrote_its_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = model_state()
    with RankedRun(tmp_path / "root", 4, cells) as run:
        for step in range(3):
            saved(run, step, state)
            nudge(state)
    root = open_root(tmp_path / "root")
    manifest = root.manifest()
    opened = []
    before = type(root.store).segment
    monkeypatch.setattr(
        type(root.store),
        "segment",
        lambda self, ref, table=None: opened.append(ref.id) or before(self, ref, table),
    )
    resolve_leaves(root, manifest, [BIG], boxes={BIG: (slice(0, 10), slice(0, 10))})
    assert len(opened) == 3
    assert len(manifest.segments) == 12


# --- one rank fails -------------------------------------------------------------------------------


def assert_stands(root: Path, state: Any) -> None:
    """The newest step is as it was, and the next save is right."""
    assert deltacheck.open(root).steps() == [0]
    assert_same(deltacheck.open(root).restore(), state)


Breaks = Callable[[RankedRun, pytest.MonkeyPatch], None]


def break_begin(run: RankedRun, patch: pytest.MonkeyPatch) -> None:
    held = run.held

    def broken(rank: int, flat: Any) -> Any:
        if rank == 1:
            run.joints[1].fail(OSError("no more memory"))
        return held(rank, flat)

    patch.setattr(run, "held", broken)


def break_holdings(run: RankedRun, patch: pytest.MonkeyPatch) -> None:
    held = run.held
    patch.setattr(run, "held", lambda rank, flat: held(rank, flat) if rank != 1 else {})


def break_dtype(run: RankedRun, patch: pytest.MonkeyPatch) -> None:
    held = run.held

    def broken(rank: int, flat: Any) -> Any:
        found = held(rank, flat)
        return found if rank != 1 else found | {BIG: found[BIG]._replace(dtype="float64")}

    patch.setattr(run, "held", broken)


def break_encode(run: RankedRun, patch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the codec broke")

    patch.setattr(
        run.savers[1],
        "_setup",
        replace(run.savers[1]._setup, codec=_Broken(run.savers[1].codec, broken)),
    )


class _Broken:
    def __init__(self, codec: Any, broken: Any) -> None:
        self._codec = codec
        self.encode = self.encode_group = broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)


def break_segment(run: RankedRun, patch: pytest.MonkeyPatch) -> None:
    before = run.stores[1].writer

    def writer(*given: Any, **options: Any) -> Any:
        found = before(*given, **options)

        def finish(*_: Any) -> Any:
            raise OSError("no space left on the device")

        found.finish = finish
        return found

    patch.setattr(run.stores[1], "writer", writer)


def break_commit(run: RankedRun, patch: pytest.MonkeyPatch) -> None:
    def broken(manifest: Any) -> Any:
        raise OSError("no space left for the manifest")

    patch.setattr(run, "commit", broken)


@pytest.mark.parametrize(
    ("breaks", "cause", "named"),
    [
        (break_begin, "no more memory", "rank 1"),
        (break_holdings, "no rank holds", "model/big"),
        (break_dtype, "float64", "rank 1"),
        (break_encode, "the codec broke", "rank 1"),
        (break_segment, "no space left on the device", "rank 1"),
        (break_commit, "no space left for the manifest", "rank 0"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_failure_of_one_rank_reaches_all_with_its_cause_and_leaves_the_newest_step(
    tmp_path: Path, breaks: Breaks, cause: str, named: str
) -> None:
    state = model_state()
    with RankedRun(tmp_path / "root", 3) as run:
        saved(run, 0, state)
        moved = copy.deepcopy(state)
        nudge(moved)
        with pytest.MonkeyPatch.context() as patch:
            breaks(run, patch)
            found = run.save(1, moved)
        for rank, error in enumerate(found):
            assert isinstance(error, errors.DeltacheckError), (rank, error)
            assert cause in str(error)
        assert (
            sum(named in str(error) for error in found) >= 2
        )  # where it happened it needs no name
        assert_stands(tmp_path / "root", state)
        for saver in run.savers:
            with contextlib.suppress(errors.SaveFailed):
                saver.raise_unseen()
        saved(run, 2, moved)
    assert_same(deltacheck.open(tmp_path / "root").restore(2), moved)


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    with RankedRun(tmp_path / "root", 2) as run:
        found = at_once(2, lambda rank: run.begin_on(rank, 5 + rank, model_state()))
    for error in found:
        assert isinstance(error, errors.RankFailed)
        assert "rank 1 saves step 6, rank 0 step 5: every rank has to make the same calls" in str(
            error
        )


def test_ranks_whose_trees_disagree_are_told_where(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return model_state() | {"rng": rank}

    with RankedRun(tmp_path / "root", 2) as run:
        found = at_once(2, lambda rank: run.begin_on(rank, 0, state(rank)))
    for error in found:
        assert isinstance(error, errors.DeltacheckError)
        assert "leaf 'rng' is int 0 in an earlier process and int 1 in process 1" in str(error)


def test_a_report_of_another_step_or_length_is_refused() -> None:
    held = {"w": sharding.HeldShards("float32", (4,), (tiles.whole((4,)),))}
    plan = sharding.plan([sharding.Holdings.of(held)] * 2)
    manifest = msgspec.convert(_body(), type=deltacheck.store.manifest.Manifest)
    good = [joint.Report(1, (), "0" * 32), joint.Report(1, (), "")]
    assert joint.merged(manifest, plan, good).leaves["w"].digest == "0" * 32
    with pytest.raises(errors.RankFailed, match="rank 1 reports step 2, rank 0 step 1"):
        joint.merged(manifest, plan, [good[0], joint.Report(2, (), "")])
    with pytest.raises(errors.RankFailed, match="rank 1 reports 1 tiles, the plan gives it 0"):
        joint.merged(manifest, plan, [good[0], joint.Report(1, (), "0" * 32)])


def _body() -> dict[str, Any]:
    about = {
        "format": "deltacheck",
        "version": 1,
        "seq": 1,
        "step": 1,
        "nonce": "0",
        "time": 0.0,
        "writer": "",
        "contract": "exact",
    }
    return about | {"segments": [], "tree": tree.flatten({}, describe_numpy).skeleton, "leaves": {}}


# --- documents that are not right -----------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "root"
    ramp = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = {"w": ramp, "v": 2 * ramp, "b": np.arange(3.0)}
    with RankedRun(root, 2) as run:
        saved(run, 0, state)
        state["w"] += 1
        saved(run, 1, state)
    return root


def edit_tiles(**fields: Any) -> Any:
    return lambda body: body["tiles"]["w"].update(fields)


def set_lane(body: Any) -> None:
    body["leaves"]["b"]["lane"] = 2


def swap_segments(body: Any) -> None:
    body["segments"] = [body["segments"][n] for n in (1, 0, 2, 3)]


def name_leaf_like_a_tile(body: Any) -> None:
    body["leaves"]["w%@0,0"] = body["leaves"]["b"]
    body["tree"]["k"].append(["x", {"t": "array", "of": "w%@0,0"}])


def both(body: Any) -> None:
    body["leaves"]["w"] = {"dtype": "float32", "shape": [8, 8], "chunk": [8, 8], "digest": "0" * 32}


def bounded(body: Any) -> None:
    body["contracts"] = {
        "b": {"terms": {"contract": "bounded", "limit": 1, "norm": "max"}, "measured": 0.1}
    }
    body["contract"] = "bounded"


LIKE_V = {"how": "same", "of": "v"}


def rules(form_of_all: dict[str, Any], **fields: Any) -> Any:
    """Return an edit that derives the tiles of a leaf by a rule."""
    rule = {"dtype": "float32", "shape": [8, 8]} | form_of_all

    def edit(body: Any) -> None:
        codes = "int32" if rule["how"] == "lattice" else ""
        body["tiles"]["w"].update({"forms": [rule], "codes": [codes]} | fields)
        body["must_understand"] = ["derived", "tiles"]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_tiles(cuts=[[0, 4, 4, 8], [0, 8]]), "cannot be cut as it says"),
        (edit_tiles(cuts=[[1, 4, 8], [0, 8]]), "cannot be cut as it says"),
        (edit_tiles(cuts=[[0, 1 << 40], [0, 1 << 40]]), "cannot be cut as it says"),
        (edit_tiles(cuts=[]), "cannot be cut as it says"),
        (
            edit_tiles(cuts=[list(range((1 << 12) + 2)), list(range((1 << 12) + 2))]),
            "tiles, 2 lanes",
        ),
        (edit_tiles(digests="0" * 63), "2 tiles, 2 lanes and 63 digits"),
        (edit_tiles(digests="0" * 63 + "G"), "2 tiles, 2 lanes and 64 digits"),
        (edit_tiles(lanes=[0]), "2 tiles, 1 lanes"),
        (edit_tiles(lanes=[0, 2]), "a tile in a lane that it does not have"),
        (edit_tiles(lanes=[0, -2]), "a tile in a lane that it does not have"),
        (edit_tiles(dtype="float33"), "float33"),
        (set_lane, "a leaf lies in a lane that it does not have"),
        (
            lambda body: body.update(lanes=[[0, 2], [1, 1, 3]]),
            "one of its lanes is not a list of its segments in order",
        ),
        (
            lambda body: body.update(lanes=[[0, 2], [1, 4]]),
            "one of its lanes is not a list of its segments in order",
        ),
        (
            lambda body: body.update(lanes=[[2, 0], [1, 3]]),
            "one of its lanes is not a list of its segments in order",
        ),
        (lambda body: body.update(lanes=[[0, 2], [1]]), "its lanes do not use all of its segments"),
        (swap_segments, "its segments are not in ascending order"),
        (
            lambda body: body["segments"].append(body["segments"][-1]),
            "its segments are not in ascending order",
        ),
        (lambda body: body.update(must_understand=[]), "ascending order"),
        (lambda body: body.update(must_understand=["tiles", "law"]), "do not match"),
        (lambda body: body.pop("tiles"), "its tree and its leaves do not match"),
        (
            lambda body: body["tiles"].update(x=body["tiles"]["w"]),
            "its tree and its leaves do not match",
        ),
        (both, "cannot be cut as it says"),
        (name_leaf_like_a_tile, "one of its leaves has the name of a tile"),
        (bounded, "features .'tiles',. do not match"),
        (rules({"how": "cast", "of": "b"}), "cannot be derived as they say"),  # not in tiles
        (rules({"how": "cast", "of": "w"}), "cannot be derived|cycle"),  # of itself
        (rules(LIKE_V | {"shape": [4, 8]}), "cannot be derived as they say"),
        (rules(LIKE_V | {"dtype": "float64"}), "cannot be derived as they say"),
        (rules(LIKE_V | {"digest": "0" * 32}), "cannot be derived as they say"),
        (rules({"how": "lattice", "spacing": 0.0}), "cannot be derived as it says"),
        (rules(LIKE_V, codes=["int32"]), "cannot be derived as it says"),
        (rules(LIKE_V, codes=[]), "1 rules and 0 codes"),
        (rules(LIKE_V, form=[0]), "tiles of rules that it does not have"),
        (rules(LIKE_V, form=[0, 1]), "tiles of rules that it does not have"),
        (rules(LIKE_V, form=[0, -2]), "tiles of rules that it does not have"),
        (rules(LIKE_V, from_steps=[0, 1]), "tiles of other steps than its contract"),
    ],
)
def test_a_manifest_of_tiles_that_cannot_be_is_refused(good: Path, edit: Any, message: str) -> None:
    path = good / "checkpoints" / "c0000000001" / "zarr.json"
    content = path.read_bytes()
    assert len(json.loads(content)["attributes"]["deltacheck"]["segments"]) == 4
    try:
        forge_manifest(path, edit)
        with pytest.raises(errors.Damaged, match=message):
            open_root(good).manifest(1)
    finally:
        path.write_bytes(content)
    open_root(good).manifest(1)


def test_tiles_that_claim_the_lanes_of_others_are_missed_not_misread(good: Path) -> None:
    path = good / "checkpoints" / "c0000000001" / "zarr.json"
    content = path.read_bytes()
    try:
        forge_manifest(path, edit_tiles(lanes=[1, 0]))
        with pytest.raises(errors.ChainBroken, match="holds its keyframe"):
            deltacheck.open(good).restore(1, slices={"w": (slice(0, 1),)})
    finally:
        path.write_bytes(content)


def test_one_process_goes_on_from_a_step_of_several_ranks_and_they_from_its(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from deltacheck.backends.torch import Engine

    state = {
        "cut": np.arange(600_000, dtype=np.float32).reshape(600, 1000),
        "whole": np.arange(7),
        "other": np.arange(9),
    }
    with RankedRun(tmp_path / "run", 2) as run:
        for step in range(2):
            assert not any(isinstance(one, Exception) for one in run.save(step, state))
            state["cut"][:, 3] += 1
            state["whole"] += 1
            state["other"] += 1
    with Engine(tmp_path / "run") as engine:
        engine.restore()
        engine.save(2, {path: torch.from_numpy(value) for path, value in state.items()}).wait(
            "committed"
        )
    opened = deltacheck.open(tmp_path / "run")
    seqs = [ref.id.split("-")[0] for ref in opened.manifest().segments]
    assert len(set(seqs)) < len(seqs)  # small leaves still stand on what both ranks wrote
    assert all(np.array_equal(opened.restore(2)[path], value) for path, value in state.items())
    with RankedRun(tmp_path / "run", 2) as run:
        run.resume(state)
        state["cut"] *= 2
        run.save(3, state)
    assert all(np.array_equal(opened.restore(3)[path], value) for path, value in state.items())
    assert opened.verify(deep=True) == []
