"""Every tool on steps that several ranks wrote: people see leaves, whole, and whatever a tool does
to the root every step restores as before.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import deltacheck
from deltacheck import errors
from deltacheck.cli import main
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.spec import LeafKind
from deltacheck.maintain.compaction import reclaim
from deltacheck.restore.follow import follower
from deltacheck.store import compact
from deltacheck.store.roots.opening import open_root
from tests.support.ranked_run import RankedRun, at_once, cells, model_state, nudge, rows, stages
from tests.support.states import assert_same

BIG = "model/big"


@dataclass(frozen=True)
class Saved:
    root: Path
    states: dict[int, Any]


@pytest.fixture(scope="session")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Four ranks, leaves cut along two axes, four steps; at step 2 only the upper rows of the big
    leaves have changed.
    """
    root = tmp_path_factory.mktemp("tiled") / "root"
    return Saved(root, save_steps(root, 4, cells))


def save_steps(root: Path, size: int, layout: Any, steps: int = 4) -> dict[int, Any]:
    states = {}
    state = model_state()
    with RankedRun(root, size, layout) as run:
        for step in range(steps):
            states[step] = copy.deepcopy(state)
            for found in run.save(step, state, {"loss": 1 / (step + 1)}):
                assert not isinstance(found, BaseException), found
            nudge(state, seed=step, rows=slice(0, 300) if step == 1 else slice(None))
    return states


@pytest.fixture
def copied(tiled: Saved, tmp_path: Path) -> Saved:
    """A copy that a test may change."""
    shutil.copytree(tiled.root, tmp_path / "root")
    return Saved(tmp_path / "root", tiled.states)


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A command in this process: what it says as JSON. ``code``: how it ends."""

    def call(*words: object, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*map(str, words), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command as people read it."""

    def call(*words: object) -> str:
        capsys.readouterr()
        main([*map(str, words)])
        return capsys.readouterr().out

    return call


def assert_whole(saved: Saved, steps: Any = None) -> None:
    opened = deltacheck.open(saved.root)
    assert opened.steps() == list(saved.states if steps is None else steps)
    for step in opened.steps():
        assert_same(in_order(opened.restore(step)), in_order(saved.states[step]))
    assert opened.verify(deep=True) == []


def in_order(state: Any) -> Any:
    """Dicts with their keys ascending: ranks that have other keys each do not agree on an order."""
    return (
        {key: in_order(state[key]) for key in sorted(state)} if isinstance(state, dict) else state
    )


def test_whatever_ranks_wrote_restores_whole_with_every_byte_checked(tiled: Saved) -> None:
    assert_whole(tiled)
    assert open_root(tiled.root).manifest().tiles.keys() == {BIG, "model/ids", "optimizer/exp_avg"}


# --- what is shown --------------------------------------------------------------------------------


def test_show_lists_a_tiled_leaf_once_with_its_tiles_and_its_ranks(
    tiled: Saved, tool: Any, said: Any
) -> None:
    found = {row["path"]: row for row in tool("show", tiled.root, 2)["leaves"]}
    assert found.keys() == tree.array_paths(open_root(tiled.root).manifest().tree).keys()
    big = found[BIG]
    assert (big["shape"], big["raw_bytes"], big["tiles"], big["ranks"]) == (
        [700, 1000],
        2_800_000,
        4,
        [0, 1, 2, 3],
    )
    assert (big["kind"], big["chain_depth"]) == ("delta", 2)
    changed = int((tiled.states[2]["model"]["big"] != tiled.states[1]["model"]["big"]).sum())
    assert (big["changed_words"], big["words"]) == (changed, 700_000)
    assert (found["model/bias"]["tiles"], len(found["model/bias"]["ranks"])) == (None, 1)
    (line,) = [line for line in said("show", tiled.root, 2).splitlines() if line.startswith(BIG)]
    assert line.split()[-2:] == ["4", "0-3"]
    assert "%@" not in said("show", tiled.root, 2)


def test_ls_and_log_count_leaves_and_not_tiles(tiled: Saved, tool: Any) -> None:
    listed = tool("ls", tiled.root)["steps"]
    assert [row["step"] for row in listed] == [0, 1, 2, 3]
    assert {row["raw_bytes"] for row in listed} == {
        sum(a.nbytes for a in arrays_of(tiled.states[0]).values())
    }
    logged = tool("log", tiled.root, "--by-class", 1)["steps"]
    assert [(row["keyframes"], row["deltas"], row["unchanged"]) for row in logged] == [
        (6, 0, 0),
        *[(0, 2, 4)] * 3,
    ]
    assert {one["prefix"] for one in logged[1]["classes"]} == {"model", "optimizer"}


def test_a_leaf_of_which_a_part_is_written_whole_says_nothing_of_its_density(
    tmp_path: Path, tool: Any
) -> None:
    with RankedRun(tmp_path / "root", 2, depth=1) as run:
        state = model_state()
        run.save(0, state)
        nudge(state, rows=slice(0, 350))
        run.save(1, state)
        nudge(state)
        run.save(2, state)  # the upper tile's chain is full
    row = next(row for row in tool("show", tmp_path / "root", 2)["leaves"] if row["path"] == BIG)
    assert (row["kind"], row["changed_words"], row["density"]) == ("delta", None, None)


def test_diff_tells_what_moved_and_leaves_out_what_has_the_same_digests(
    tiled: Saved, tool: Any
) -> None:
    found = tool("diff", tiled.root, 0, 1)
    assert [row["path"] for row in found["changed"]] == [BIG, "optimizer/exp_avg"]
    assert found["unchanged"] == 4
    old, new = (arrays_of(tiled.states[step])[BIG].astype(np.float64) for step in (0, 1))
    row = found["changed"][0]
    assert row["changed"] == int((old != new).sum())
    assert row["relative_l2"] == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))
    assert row["max_abs"] == np.abs(new - old).max()


def test_diff_compares_leaves_that_were_cut_otherwise(tmp_path: Path, tool: Any) -> None:
    root = tmp_path / "root"
    state = model_state()
    with RankedRun(root, 2, rows) as run:
        run.save(0, state)
    with RankedRun(root, 3, rows) as run:
        run.save(1, state)
    found = tool("diff", root, 0, 1)
    assert (found["changed"], found["unchanged"]) == ([], 6)


def test_a_report_has_every_leaf_once_and_adds_up(tiled: Saved, tool: Any, tmp_path: Path) -> None:
    from deltacheck.report.data import collect

    record = collect(tiled.root)
    assert record.problems == ()
    assert record.leaves[BIG].raw_bytes == 2_800_000
    assert record.leaves[BIG].saves == 3
    assert record.leaves[BIG].delta_bytes > 0
    assert not any(
        "%@" in path
        for path in [*record.leaves, *(p for paths in record.groups.values() for p in paths)]
    )
    for step in record.steps:
        assert step.written_bytes == step.recorded_bytes
        assert step.raw_bytes < record.steps[0].read_bytes * 1.5
    tool("report", tiled.root, "-o", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_plan_reads_the_rates_of_tiled_leaves(tiled: Saved, tool: Any) -> None:
    speeds = [f"--speed={name}=1e9" for name in ("write", "read", "encode", "apply", "copy")]
    found = tool("plan", tiled.root, *speeds, "--step-seconds", "1")
    assert found["state_bytes"] == sum(a.nbytes for path, a in arrays_of(tiled.states[0]).items())


# --- what is checked, healed, freed ---------------------------------------------------------------


def test_verify_goes_through_all_tiles_in_parts_and_in_full(
    tiled: Saved, tool: Any, tmp_path: Path
) -> None:
    assert tool("verify", tiled.root)["ok"]
    assert tool("verify", tiled.root, "--deep")["checked_bytes"] > 5_000_000
    kept = tmp_path / "progress"
    runs = [tool("verify", tiled.root, "--subset", "40%", "--resume", kept)]
    while runs[-1]["remaining_bytes"]:
        runs.append(tool("verify", tiled.root, "--subset", "40%", "--resume", kept))
        assert runs[-1]["ok"]
    assert len(runs) in (2, 3, 4)


def flipped(saved: Saved, segment: int, what: str) -> Path:
    """Change a bit in the largest file of a group or an array of a step's segment."""
    ref = open_root(saved.root).manifest(3).segments[segment]
    folder = saved.root / "segments" / ref.id
    files = [p for p in folder.glob(f"{what}*/**/c.*") if p.is_file()]
    path = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def test_damage_to_a_tile_names_the_leaf_the_file_and_the_way_out(copied: Saved, tool: Any) -> None:
    path = flipped(copied, -1, "delta")
    with pytest.raises(errors.Damaged, match=r"leaf '(model/big|optimizer/exp_avg)") as caught:
        deltacheck.open(copied.root).restore(3)
    assert caught.value.leaf in (BIG, "optimizer/exp_avg")
    assert str(path.parent) in str(caught.value)
    assert "Steps that still restore: 0, 1, 2" in str(caught.value)
    findings = tool("verify", copied.root, "--deep", code=1)["findings"]
    assert {(one["step"], one["leaf"]) for one in findings} <= {(3, BIG), (3, "optimizer/exp_avg")}
    opened = deltacheck.open(copied.root)
    assert_same(opened.restore(fallback=True), copied.states[2])
    assert opened.restored_step == 2


def test_a_lost_segment_of_one_rank_harms_only_the_steps_that_need_it(
    copied: Saved, tool: Any
) -> None:
    root = open_root(copied.root)
    only = next(ref for ref in root.manifest(3).segments if ref not in root.manifest(2).segments)
    shutil.rmtree(copied.root / "segments" / only.id)
    assert {one["step"] for one in tool("verify", copied.root, code=1)["findings"]} == {3}
    with pytest.raises(errors.ChainBroken, match=only.id):
        deltacheck.open(copied.root).restore(3)
    assert_same(deltacheck.open(copied.root).restore(2), copied.states[2])
    box = {BIG: (slice(0, 10), slice(0, 10))}
    lane = root.manifest(3).tiles[BIG].lanes[0]
    if only not in [root.manifest(3).segments[number] for number in root.manifest(3).lanes[lane]]:
        deltacheck.open(copied.root).restore(
            3, slices=box
        )  # what another rank wrote is not looked at


def test_repair_says_which_leaves_in_tiles_are_lost(copied: Saved, tool: Any) -> None:
    flipped(copied, 0, "leaves")
    lost = tool("repair", copied.root, "--dry-run", code=1)["lost"]
    assert {one["step"] for one in lost} == {0, 1, 2, 3}
    assert all(one["leaf"] in (BIG, "optimizer/exp_avg") for one in lost)


def test_gc_and_its_compaction_keep_every_step_that_is_left(copied: Saved, tool: Any) -> None:
    tool("prune", copied.root, 0)
    tool("prune", copied.root, "--keep-last", 2)
    tool("prune", copied.root, "--grace", 0)
    assert_whole(copied, [2, 3])
    assert tool("prune", copied.root, "--grace", 0, "--compact")
    assert_whole(copied, [2, 3])


def test_old_steps_of_ranks_keep_weights_only(
    copied: Saved, tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--full-last", 1, "--keep-leaves", "model/*")
    assert [row["step"] for row in tool("prune", copied.root, *options)["partial"]] == [0, 1, 2]
    reclaim(open_root(copied.root), below=0.9)
    tool("prune", copied.root, "--grace", 0)
    opened = deltacheck.open(copied.root)
    assert opened.verify(deep=True) == []
    assert_same(in_order(opened.restore(3)), in_order(copied.states[3]))
    with pytest.raises(errors.LeafPruned, match="the newest step that has it is 3"):
        opened.restore(0, leaves=["optimizer/exp_avg"])
    for step in range(3):
        for name, value in copied.states[step]["model"].items():
            assert_same(opened.restore(step, leaves=[f"model/{name}"])[f"model/{name}"], value)
    # The compact form has digests over all leaves of a rank: such steps stay as they are.
    monkeypatch.setattr(compact, "COMPACT_TILES", 1)
    save_steps(tmp_path / "compact", 4, cells, 2)
    assert tool("prune", tmp_path / "compact", *options)["partial"] == []


def test_segments_of_one_save_that_are_written_again_take_their_place_in_order(
    tmp_path: Path, tool: Any
) -> None:
    """New segments have new names, and the manifest names those of one save in the order of their
    names.
    """
    state = {f"w{k}": np.full((300, 250), k, np.float32) for k in range(3)} | {
        "small": np.arange(8.0).reshape(4, 2)
    }
    for trial in range(2):
        saved = Saved(tmp_path / f"root{trial}", {})
        with RankedRun(saved.root, 2, depth=1) as run:
            for step in range(4):
                saved.states[step] = copy.deepcopy(state)
                run.save(step, state)
                for k in range(3):
                    state[f"w{k}"] += 1
        tool("prune", saved.root, 0)
        tool("prune", saved.root, 1)
        found = tool("prune", saved.root, "--grace", 0, "--compact")
        assert found
        assert_whole(saved, [2, 3])


def test_compact_takes_every_delta_from_the_newest_step_and_its_chains_go_on(
    copied: Saved, tool: Any
) -> None:
    done = tool("prune", copied.root, "--whole")["compacted"]
    assert (done["step"], done["deltas"]) == (3, 3)
    assert_whole(copied)
    row = next(row for row in tool("show", copied.root, 3)["leaves"] if row["path"] == BIG)
    assert (row["tiles"], row["ranks"], row["chain_depth"]) == (4, None, 0)
    state = copy.deepcopy(copied.states[3])
    with RankedRun(copied.root, 4, cells) as run:
        assert all(one for one in run.resume(state))
        nudge(state, seed=9)
        reports = run.save(4, state)
    kinds = {leaf.path: leaf.kind for report in reports for leaf in report.leaves}
    assert {kind for name, kind in kinds.items() if tiles.leaf_of(name) == BIG} == {LeafKind.DELTA}
    assert_same(deltacheck.open(copied.root).restore(4), state)


def test_ranks_that_share_no_leaf_can_be_compacted_and_freed(tmp_path: Path, tool: Any) -> None:
    saved = Saved(tmp_path / "root", save_steps(tmp_path / "root", 3, stages, 3))
    assert open_root(saved.root).manifest().tiles == {}
    tool("prune", saved.root, "--whole")
    tool("prune", saved.root, 0)
    tool("prune", saved.root, "--grace", 0, "--compact")
    assert_whole(saved, [1, 2])


def test_a_branch_and_a_tag_of_a_tiled_step(copied: Saved, tool: Any, tmp_path: Path) -> None:
    tool("tag", copied.root, 1, "good")
    tool("branch", copied.root, "@good", "--to", tmp_path / "branch")
    assert_whole(Saved(tmp_path / "branch", copied.states), [1])
    assert main(["prune", str(copied.root), "1"]) == 5  # it has a tag
    assert_whole(copied)


# --- what goes out, and comes in ------------------------------------------------------------------


def arrays_of(state: Any) -> dict[str, Any]:
    return {
        f"{a}/{b}": x
        for a, group in state.items()
        if isinstance(group, dict)
        for b, x in group.items()
    }


@pytest.mark.parametrize("kind", ["safetensors", "npz", "pt"])
def test_an_export_has_whole_leaves(tiled: Saved, tool: Any, tmp_path: Path, kind: str) -> None:
    out = tmp_path / f"x.{kind}"
    tool("export", tiled.root, 3, "--out", out)
    if kind == "pt":
        import torch

        loaded = torch.load(
            out, weights_only=False
        )  # NumPy arrays are no tensors to torch, and this file is ours
        found = {p: np.asarray(v) for p, v in arrays_of(loaded).items()}
    else:
        found = load_file(out) if kind == "safetensors" else dict(np.load(out))
    assert_same(dict(sorted(found.items())), dict(sorted(arrays_of(tiled.states[3]).items())))


def test_what_is_exported_is_imported_again(tiled: Saved, tool: Any, tmp_path: Path) -> None:
    tool("export", tiled.root, 3, "--out", tmp_path / "x.safetensors")
    tool("import", tmp_path / "new", tmp_path / "x.safetensors", "--step", 3)
    found = deltacheck.open(tmp_path / "new").restore(3, leaves=["model%2Fbig"])
    assert_same(found["model%2Fbig"], tiled.states[3]["model"]["big"])


# --- following ------------------------------------------------------------------------------------


def apply(update: follower.Update, mine: dict[str, Any]) -> None:
    for path, change in update.changes.items():
        mine.setdefault(path, np.empty(change.spec.shape, change.spec.element.numpy))
        change.apply(mine[path])
        change.check(mine[path])


@pytest.mark.parametrize("compact_tiles", [1, compact.COMPACT_TILES])
def test_a_follower_has_the_bits_of_every_step_and_is_told_only_what_changed(
    compact_tiles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "COMPACT_TILES", compact_tiles)
    root, state, mine = tmp_path / "root", model_state(), {}
    before, watching = state["model"]["big"].copy(), None
    with RankedRun(root, 4, cells) as run:
        for step in range(4):
            run.save(step, state)
            watching = watching or deltacheck.follow(root)
            update = watching.poll()
            assert update is not None
            apply(update, mine)
            assert_same(dict(sorted(mine.items())), dict(sorted(arrays_of(state).items())))
            if step:
                assert update.changes.keys() == {BIG, "optimizer/exp_avg"}
                positions = update.changes[BIG].positions
                assert positions is not None
                assert np.array_equal(
                    positions,
                    np.flatnonzero(before.reshape(-1) != state["model"]["big"].reshape(-1)),
                )
            before = state["model"]["big"].copy()
            nudge(state, seed=step)
    assert bool(open_root(root).manifest().lane_digests) == (compact_tiles == 1)


def test_a_followed_leaf_that_is_only_cut_otherwise_has_not_changed(tmp_path: Path) -> None:
    root, state, mine = tmp_path / "root", model_state(), {}
    watching = None
    for step, size in enumerate((2, 3, 1, 4)):
        with RankedRun(root, size) as run:
            run.save(step, state)
        watching = watching or deltacheck.follow(root)
        update = watching.poll()
        assert update is not None
        apply(update, mine)
        assert bool(update.changes) == (step == 0)
    nudge(state)
    with RankedRun(root, 2) as run:
        run.save(4, state)
    update = watching.poll() if watching else None
    assert update is not None
    apply(update, mine)
    assert_same(mine[BIG], state["model"]["big"])
    assert update.changes[BIG].positions is not None


def test_a_copy_with_a_wrong_bit_in_one_tile_is_found(tiled: Saved) -> None:
    update = deltacheck.follow(tiled.root).poll()
    assert update is not None
    change = update.changes[BIG]
    wrong = tiled.states[3]["model"]["big"].copy()
    change.check(wrong)
    wrong[699, 999] += 1
    with pytest.raises(errors.Damaged, match=r"model/big%@350,500.*Take the whole state again"):
        change.check(wrong)


# --- receipts -------------------------------------------------------------------------------------


def test_every_rank_reads_back_what_it_wrote(tmp_path: Path) -> None:
    with RankedRun(tmp_path / "root", 2, verify="commit") as run:
        handles = at_once(2, lambda rank: run.begin_on(rank, 0, model_state()))
        at_once(2, lambda rank: handles[rank].wait(timeout=240))
    found = [handle.receipt for handle in handles]
    assert [one.step for one in found] == [0, 0]
    assert sum(one.raw_bytes for one in found) == sum(
        a.nbytes for a in arrays_of(model_state()).values()
    )


def test_a_box_is_restored_from_the_tiles_that_it_touches(
    tiled: Saved, read_bytes: list[int]
) -> None:
    found = deltacheck.open(tiled.root).restore(3, slices={BIG: (slice(0, 350), slice(500, 1000))})[
        BIG
    ]
    assert_same(found, tiled.states[3]["model"]["big"][:350, 500:])
    assert sum(read_bytes) <= 1.1 * found.nbytes
