"""Power cuts, in the model of ``faults/power.py``: what was acknowledged is there afterwards,
whatever
the file system had not written yet.

``make power-test`` tries many more states, and Orbax (``python -m tests.faults.cut --help``).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.store.files.durability import Durability
from tests.faults import cut, image, power, scenarios, shim
from tests.faults.power import Op

STATES = 40  # of each scenario; a new seed each time
RECORDED = (
    "two-saves",
    "keep-last",
    "durability-process",
    "reference-protocol",
    "torch.save-replaced",
)

needs_a_compiler = pytest.mark.skipif(
    shim.compiler() is None, reason="the fault shim needs a C compiler"
)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with cut.workplace() as folder:
        yield folder


@pytest.fixture(scope="module")
def traces(place: Path) -> dict[str, list[Op]]:
    """The calls of some scenarios, recorded by one process."""
    return cut.record(place, RECORDED)


@pytest.fixture
def seed() -> int:
    drawn = random.SystemRandom().randrange(1 << 32)
    print(f"seed {drawn}")
    return drawn


def states(*trace: Op, most: int = 10_000) -> list[dict[str, bytes | None]]:
    return [cut.tree for cut in power.cuts(trace, most, seed=0)]


# --- the model itself -----------------------------------------------------------------------------


def test_what_was_not_synced_may_be_there_gone_torn_or_the_right_length_and_wrong() -> None:
    found = states(Op("create", "a"), Op("sync", ""), Op("write", "a", data=b"abcd"))
    assert {tree["a"] for tree in found if "a" in tree} == {
        b"",
        b"abcd",
        b"ab",
        b"abc",
        bytes(4),
        b"\xa5" * 4,
    }
    assert {} in found  # before the sync of the directory


def test_a_synced_file_is_there_only_if_its_name_is_synced_too() -> None:
    unnamed = states(Op("create", "a"), Op("write", "a", data=b"x"), Op("sync", "a"))
    assert {} in unnamed
    assert {"a": b"x"} in unnamed
    last = power._disk(
        [Op("create", "a"), Op("write", "a", data=b"x"), Op("sync", "a"), Op("sync", "")], 4
    )
    assert list(last.every()) == [{"a": b"x"}]


def test_a_rename_happens_or_not_and_brings_what_was_synced_of_its_file() -> None:
    trace = [
        Op("create", "old"), Op("write", "old", data=b"1"), Op("sync", "old"), Op("sync", ""),
        Op("create", "new"), Op("write", "new", data=b"2"), Op("rename", "new", "old"),
    ]  # fmt: skip
    found = list(power._disk(trace, len(trace)).every())
    assert {"old": b"1"} in found
    assert {"old": b"2"} in found
    assert {
        "old": b""
    } in found  # renamed before its content was written: what os.replace without fsync leaves
    assert all("old" in tree for tree in found)


def test_acts_on_one_name_keep_their_order_and_others_do_not() -> None:
    trace = [Op("create", "a"), Op("unlink", "a"), Op("create", "b")]
    found = list(power._disk(trace, len(trace)).every())
    assert {frozenset(tree) for tree in found} == {
        frozenset(),
        frozenset("a"),
        frozenset("b"),
        frozenset("ab"),
    }


def test_a_directory_goes_after_what_was_in_it_and_what_cannot_be_reached_is_gone() -> None:
    made = [Op("mkdir", "d"), Op("create", "d/f"), Op("sync", "d")]
    found = list(power._disk(made, len(made)).every())
    assert {} in found  # the name of d itself was never synced
    assert {"d": None, "d/f": b""} in found
    removed = [*made, Op("sync", ""), Op("unlink", "d/f"), Op("rmdir", "d")]
    found = list(power._disk(removed, len(removed)).every())
    assert {"d": None} in found
    assert {} in found
    assert {"d": None, "d/f": b""} in found


def test_all_states_of_a_small_trace_are_enumerated_and_each_once() -> None:
    trace = [Op("create", name) for name in "abc"]
    found = [frozenset(tree) for tree in states(*trace)]
    assert len(found) == len(set(found)) == 8


@needs_a_compiler
def test_the_model_ends_where_the_real_file_system_did(
    traces: dict[str, list[Op]], place: Path
) -> None:
    for name, trace in traces.items():
        real = {
            str(path.relative_to(place / name)): None if path.is_dir() else path.read_bytes()
            for path in (place / name).rglob("*")
        }
        assert power.seen_at(trace, len(trace)) == real


# --- what is promised -----------------------------------------------------------------------------


@needs_a_compiler
@pytest.mark.parametrize("name", ["two-saves", "keep-last", "reference-protocol"])
def test_no_power_cut_takes_an_acknowledged_step(
    name: str, traces: dict[str, list[Op]], place: Path, seed: int
) -> None:
    outcome = cut.try_states(cut.ALL[name], traces[name], STATES, seed, place)
    assert not outcome.bad, (
        f"{outcome.first}\nreplay: python -m tests.faults.cut {name} --seed {seed}"
        f" --states {STATES}"
    )
    assert outcome.states >= 20


@needs_a_compiler
def test_nor_one_after_a_kill_that_left_unsynced_what_the_next_process_found(
    traces: dict[str, list[Op]], place: Path, seed: int
) -> None:
    trace = traces["two-saves"]
    points = [
        next(k for k, op in enumerate(trace) if op.path.endswith("root/segments")) + 1
    ]  # the root is half made
    points.append(random.Random(seed).randrange(points[0], len(trace)))
    for again in cut.killed(cut.ALL["two-saves"], trace, points, place):
        outcome = cut.try_states(cut.ALL["two-saves"], again, 20, seed, place)
        assert not outcome.bad, f"killed at one of {points}, seed {seed}: {outcome.first}"


@needs_a_compiler
def test_a_root_that_has_its_file_has_its_directories(traces: dict[str, list[Op]]) -> None:
    """Found by the model: a root file without ``checkpoints``, which no writer could commit to."""
    trace, file = traces["two-saves"], f"{cut.ROOT}/zarr.json"
    made = next(k for k, op in enumerate(trace) if op.kind == "rename" and op.other == file)
    disk = power._disk(trace, made + 1)
    assert disk.size() <= 4096
    found = [tree for tree in disk.every() if file in tree]
    assert found
    assert all(
        {f"{cut.ROOT}/{name}" for name in ("checkpoints", "segments", "control")} <= set(tree)
        for tree in found
    )


@needs_a_compiler
def test_the_model_sees_what_is_lost_without_a_sync(
    traces: dict[str, list[Op]], place: Path
) -> None:
    outcome = cut.try_states(
        cut.ALL["torch.save-replaced"], traces["torch.save-replaced"], STATES, 0, place
    )
    assert outcome.lost > 0
    assert outcome.wrong + outcome.unreadable + outcome.lost > outcome.states / 2


@needs_a_compiler
def test_durability_process_syncs_nothing_may_lose_steps_and_never_gives_wrong_values(
    traces: dict[str, list[Op]], place: Path, seed: int
) -> None:
    trace = traces["durability-process"]
    assert not [op for op in trace if op.kind == "sync"]
    outcome = cut.try_states(cut.ALL["durability-process"], trace, STATES, seed, place)
    assert outcome.lost > 0
    assert outcome.wrong == 0, outcome.first


@needs_a_compiler
def test_durability_process_writes_the_same_files_in_the_same_order_of_names(
    traces: dict[str, list[Op]],
) -> None:
    def committed(name: str) -> list[str]:
        return [
            op.other for op in traces[name] if op.kind == "rename" and "/checkpoints/c" in op.other
        ]

    assert committed("durability-process") == committed("two-saves")


# --- the option -----------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_step_says_what_its_save_survives(tmp_path: Path, durability: str) -> None:
    with Engine(tmp_path, options=SaveOptions(durability=durability)) as engine:
        report = engine.save(0, {"x": torch.ones(3)}).result(240)
    assert report is not None
    assert report.durability == durability
    assert deltacheck.open(tmp_path).manifest().durability == durability


def test_power_is_the_default_and_leaves_no_trace_in_a_manifest(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": torch.ones(3)}).wait(timeout=240)
    assert deltacheck.open(tmp_path).manifest().durability == "power"
    assert b"durability" not in next(tmp_path.glob("checkpoints/*/zarr.json")).read_bytes()


def test_an_unknown_durability_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="durability must be 'power' or 'process', not 'disk'"):
        Engine(tmp_path / "new", options=SaveOptions(durability="disk"))
    assert not (tmp_path / "new").exists()


def test_a_root_whose_making_was_cut_short_is_made_whole(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "zarr.json.__lock").write_bytes(b'{"zarr')
    (tmp_path / "zarr.json.__lock").touch()
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": torch.ones(3)}).wait(timeout=240)
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_directory_with_anything_else_in_it_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "notes.txt").touch()
    with pytest.raises(
        deltacheck.errors.NotACheckpointRoot, match="not empty and not a deltacheck root"
    ):
        Engine(tmp_path)


def test_the_way_to_a_root_is_synced_up_to_the_mount_whoever_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.store.files import durability

    synced: list[Path] = []
    monkeypatch.setattr(durability, "sync_directory", synced.append)
    root = tmp_path / "a" / "b"
    root.mkdir(parents=True)
    Durability.POWER.sync_ancestors(root)
    assert synced[:3] == [root.parent, tmp_path, tmp_path.parent]
    synced.clear()
    Durability.PROCESS.sync_ancestors(root)
    Durability.PROCESS.sync_tree(root)
    Durability.PROCESS.sync_directory(root)
    assert synced == []


def test_the_judge_finds_a_step_that_is_gone(tmp_path: Path) -> None:
    scenario = dataclasses.replace(scenarios.TORCH["first-keyframe"], prepared=())
    cut.ALL["two-saves"].act(tmp_path / "root", lambda step: None)
    assert scenarios.violations(scenario, tmp_path / "root", {0, 1}) == []
    assert scenarios.violations(scenario, tmp_path / "root", {0, 1, 2}) == [
        "step 2 was acknowledged, but only [0, 1] are there"
    ]


# --- a real file system ---------------------------------------------------------------------------


def test_a_file_system_image_copied_while_steps_are_saved_has_every_acknowledged_one(
    place: Path, seed: int
) -> None:
    reason = image.why_not()
    if reason is not None:
        pytest.skip(reason)
    outcome = image.try_cuts("engine", 3, "ext4", seed, place)
    assert not outcome.bad, outcome.first


def test_where_no_image_can_be_mounted_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert image.why_not() == "mounting an image needs root"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "losetup" else f"/bin/{name}")
    assert image.why_not() == "there is no losetup"
