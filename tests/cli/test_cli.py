"""Tests of the command: correct output, exact files, one-line failures, documented exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pty
import re
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.cli.app import root_command
from deltacheck.cli.output import Column, columns_within
from deltacheck.leaf.spec import SaveReport
from deltacheck.restore import export
from deltacheck.store.files.storage import take_lease
from tests.support.states import assert_same, bits

COMMANDS = (
    "run",
    "ls",
    "show",
    "log",
    "diff",
    "verify",
    "export",
    "repair",
    "prune",
    "profile",
    "report",
    "plan",
    "eval",
)
SPEEDS = [f"--speed={name}=1e9" for name in ("write", "read", "encode", "apply", "copy")]


@dataclass(frozen=True)
class Run:
    """A root, the states that were saved to it, and the reports of the saves."""

    root: Path
    states: Mapping[int, Any]
    reports: Mapping[int, SaveReport]

    def leaf(self, step: int, path: str) -> np.ndarray:
        return deltacheck.open(self.root).restore(step, leaves=[path])[path]


def states() -> dict[int, dict[str, Any]]:
    """Three states: a weight that moves a little, one that is tied, and every kind of difference
    that ``diff`` tells apart.
    """
    torch.manual_seed(7)
    weight = torch.randn(700, 1000)  # 2.8 MB: several chunks
    moved = weight.clone()
    moved[3, :40] += 0.5
    last = moved.clone()
    last[699] *= 2
    tied = torch.randn(50, 60).to(torch.bfloat16)

    def state(weight: torch.Tensor, **more: Any) -> dict[str, Any]:
        return {
            "model": OrderedDict(weight=weight, norm=torch.ones(8), embed=tied, head=tied),
            "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            "eight": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
            "flags": torch.tensor([True, False]),
            "wave": torch.tensor([1 + 2j, -1j]),
            "zero": torch.tensor(3.5),
            "none": torch.empty(0, 3),
            **more,
        }

    nan, inf = float("nan"), float("inf")
    first: dict[str, Any] = {
        "odd": torch.tensor([1.0, nan, inf, 4.0], dtype=torch.float64),
        "count": torch.tensor([2**60, -5, 7]),
        "gone": torch.zeros(3),
        "bent": torch.zeros(6),
        "lr": 0.1,
        "note": "a",
        "same": nan,
        "left": 1,
    }
    second: dict[str, Any] = {
        "odd": torch.tensor([1.0, nan, 3.0, 4.5], dtype=torch.float64),
        "count": torch.tensor([2**60 + 1, -5, 7]),
        "new": torch.zeros(2, 2, dtype=torch.int16),
        "bent": torch.zeros(2, 3),
        "lr": 0.1,
        "note": "b",
        "same": nan,
        "right": None,
    }
    return {0: state(weight, **first), 10: state(moved, **first), 25: state(last, **second)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("cli") / "root"
    reports = {}
    with Engine(root, options=SaveOptions(capture="eager")) as engine:
        for step, state in states().items():
            report = engine.save(step, state, metrics={"loss": 1 / (step + 1)}).result(240)
            assert report is not None
            reports[step] = report
    return Run(root, states(), reports)


@pytest.fixture
def damaged(run: Run, tmp_path: Path) -> Path:
    """Return a copy of the root that a test may damage."""
    copy = tmp_path / "damaged"
    shutil.copytree(run.root, copy)
    return copy


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


Command = Callable[..., Outcome]


@pytest.fixture
def deltacheck_(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Outcome(code, said.out, said.err)

    return call


def data_files(root: Path, segment: int, kind: str) -> list[Path]:
    """The data files of the n-th segment in its arrays and groups ``kind``."""
    folder = sorted((root / "segments").iterdir(), key=lambda path: (path.is_file(), path.name))[
        segment
    ]
    return sorted(path for path in folder.glob(f"{kind}*/**/c.*") if path.is_file())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# --- ls, show, log --------------------------------------------------------------------------------


def test_ls_lists_every_step_with_its_sizes_depth_and_metrics(
    run: Run, deltacheck_: Command
) -> None:
    found = deltacheck_("ls", run.root, "--json").json
    assert found["schema"] == 1
    assert found["root"] == str(run.root)
    assert [(row["step"], row["seq"]) for row in found["steps"]] == [(0, 0), (10, 1), (25, 2)]
    for row, report in zip(found["steps"], run.reports.values(), strict=True):
        segment = next((run.root / "segments").glob(f"s{row['seq']:010d}-*"))
        assert row["raw_bytes"] == report.raw_bytes
        assert row["stored_bytes"] == sum(
            path.stat().st_size for path in segment.rglob("*") if path.is_file()
        )
        assert row["metrics"] == {"loss": 1 / (row["step"] + 1)}
        assert row["item"] is None
        assert row["problem"] is None
        written = datetime.fromtimestamp(deltacheck.open(run.root).manifest(row["step"]).time, UTC)
        assert datetime.fromisoformat(row["time"]) == written.replace(
            microsecond=written.microsecond // 1000 * 1000
        )
    for_people = deltacheck_("ls", run.root)
    assert for_people.code == 0
    assert for_people.out.splitlines()[0].split() == [
        "STEP",
        "SEQ",
        "TIME",
        "RAW",
        "STORED",
        "METRICS",
    ]
    assert "loss=0.0909091" in for_people.out


def test_show_names_each_leaf_its_kind_and_depth(run: Run, deltacheck_: Command) -> None:
    found = deltacheck_("show", run.root, 25, "--json").json
    leaves = {row["path"]: row for row in found["leaves"]}
    kinds = {leaf.path: leaf for leaf in run.reports[25].leaves}
    assert leaves.keys() == kinds.keys() | {"model/head"}
    for path, leaf in kinds.items():
        row = leaves[path]
        assert (row["kind"], row["raw_bytes"], row["words"]) == (
            str(leaf.kind),
            leaf.raw_bytes,
            leaf.words,
        )
        assert row["changed_words"] == (None if leaf.kind == "keyframe" else leaf.changed)
        assert row["contract"] == "exact"
    assert leaves["model/weight"]["shape"] == [700, 1000]
    assert leaves["model/weight"]["density"] == 1000 / 700_000
    assert leaves["model/head"]["tied_to"] == "model/embed"
    depths = {
        path: leaves[path]["chain_depth"] for path in ("model/weight", "odd", "new", "model/norm")
    }
    assert depths == {"model/weight": 2, "odd": 1, "new": 0, "model/norm": 0}
    assert [row["id"] for row in found["segments"]] == sorted(
        path.name for path in (run.root / "segments").glob("s*")
    )
    scalars = {row["path"]: (row["type"], row["value"]) for row in found["scalars"]}
    assert scalars == {
        "lr": ("float", 0.1),
        "note": ("str", "b"),
        "same": ("float", "NaN"),
        "right": ("NoneType", None),
    }
    for_people = deltacheck_("show", run.root, 25).out
    assert "model/weight" in for_people
    assert "[700,1000]" in for_people


def test_show_takes_latest_and_a_pattern(run: Run, deltacheck_: Command) -> None:
    found = deltacheck_("show", run.root, "latest", "--leaves", "model/*", "--json").json
    assert found["step"] == 25
    assert [row["path"] for row in found["leaves"]] == [
        "model/embed",
        "model/head",
        "model/norm",
        "model/weight",
    ]


def test_show_groups_the_leaves_of_a_large_state(tmp_path: Path, deltacheck_: Command) -> None:
    layers = {f"layers.{n}.w": np.full(300, n, np.float32) for n in range(50)}
    with Engine(tmp_path / "root") as engine:
        engine.save(0, {"model": layers, "groups": list(range(9))}).result(240)
    (line,) = (x for x in deltacheck_("show", tmp_path / "root").out.splitlines() if "*.w" in x)
    assert line.split()[:5] == ["model/layers.*.w", "50", "float32", "58.6", "KiB"]
    printed = deltacheck_("show", tmp_path / "root").out
    assert "groups/*  int   0, 1, ... (9 values)" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert deltacheck_("show", tmp_path / "root", "--leaves", "*").out.count("layers.") == 50
    assert len(deltacheck_("show", tmp_path / "root", "--json").json["leaves"]) == 50


def test_a_step_is_shown_of_the_root_one_stands_in(
    run: Run, deltacheck_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.root)
    assert deltacheck_("show", 10, "--json").json["step"] == 10
    assert len(deltacheck_("ls", "--json").json["steps"]) == 3


def test_a_root_whose_name_is_a_number_is_written_as_a_path(
    run: Run, tmp_path: Path, deltacheck_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run.root, tmp_path / "7")
    monkeypatch.chdir(tmp_path)
    refused = deltacheck_("ls", "7")
    assert refused.code == 2
    assert "./7" in refused.err
    assert deltacheck_("show", "./7", 10, "--json").json["step"] == 10


def test_log_tells_bytes_density_and_time_of_each_save(run: Run, deltacheck_: Command) -> None:
    rows = deltacheck_("log", run.root, "--json").json["steps"]
    times = [deltacheck.open(run.root).manifest(step).time for step in run.reports]
    since = [row["seconds_since_previous"] for row in rows]
    assert since == [None, pytest.approx(times[1] - times[0]), pytest.approx(times[2] - times[1])]
    for row, report in zip(rows, run.reports.values(), strict=True):
        assert row["written_bytes"] == report.stored_bytes
        counts = [
            sum(leaf.kind == kind for leaf in report.leaves)
            for kind in ("keyframe", "delta", "unchanged")
        ]
        assert [row["keyframes"], row["deltas"], row["unchanged"]] == counts
        compared = [leaf for leaf in report.leaves if leaf.kind != "keyframe"]
        assert row["words"] == sum(leaf.words for leaf in compared)
        assert row["changed_words"] == sum(leaf.changed for leaf in compared)
    assert rows[0]["density"] is None
    assert rows[1]["changed_words"] == 40
    assert rows[1]["density"] == 40 / rows[1]["words"]
    assert deltacheck_("log", run.root).code == 0


def test_log_groups_leaves_by_class(run: Run, deltacheck_: Command) -> None:
    last = deltacheck_("log", run.root, "--by-class", 1, "--json").json["steps"][-1]
    classes = {(row["prefix"], row["dtype"]): row for row in last["classes"]}
    assert classes["model", "float32"]["raw_bytes"] == 4 * 700_000 + 4 * 8
    assert classes["model", "float32"]["changed_words"] == 1000
    assert classes["model", "bfloat16"]["density"] == 0
    assert sum(row["raw_bytes"] for row in last["classes"]) == last["raw_bytes"]
    deeper = deltacheck_("log", run.root, "--by-class", 2, "--json").json["steps"][-1]
    assert ("model/norm", "float32") in {(row["prefix"], row["dtype"]) for row in deeper["classes"]}
    assert "model bfloat16" in deltacheck_("log", run.root, "--by-class", 1).out


def test_a_root_without_a_step_has_nothing_to_verify(tmp_path: Path, deltacheck_: Command) -> None:
    Engine(tmp_path / "fresh").close()
    assert deltacheck_("ls", tmp_path / "fresh").out.endswith("has no committed step\n")
    assert deltacheck_("log", tmp_path / "fresh", "--json").json["steps"] == []
    for command in (["verify", "--deep"], ["show", "latest"]):
        assert deltacheck_(command[0], tmp_path / "fresh", *command[1:]).code == 3


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [("report", "--out", "page.html"), ("verify", "--resume", "progress.json")],
)
def test_a_full_disk_is_named_with_its_file_and_leaves_nothing(
    run: Run,
    tmp_path: Path,
    deltacheck_: Command,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    option: str,
    name: str,
) -> None:
    def fill_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export.os, "fsync", fill_disk)
    failed = deltacheck_(command, run.root, option, tmp_path / name)
    assert failed.code == 5
    assert f"No space left on device: {tmp_path / name}. Free space" in failed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["/dev/full", "/dev/null"])
def test_a_device_is_no_progress_of_a_check(run: Run, deltacheck_: Command, file: str) -> None:
    refused = deltacheck_("verify", run.root, "--resume", file)
    assert refused.code == 2
    assert "not a regular file" in refused.err


# --- diff -----------------------------------------------------------------------------------------


def test_diff_measures_what_moved(run: Run, deltacheck_: Command) -> None:
    found = deltacheck_("diff", run.root, 0, 25, "--json").json
    moved = {row["path"]: row for row in found["changed"]}
    assert moved.keys() == {"model/weight", "odd", "count"}
    before, after = (
        run.states[step]["model"]["weight"].numpy().astype(np.float64) for step in (0, 25)
    )
    row = moved["model/weight"]
    assert row["elements"] == 700_000
    assert row["changed"] == (before != after).sum() == 1040
    assert row["density"] == 1040 / 700_000
    assert row["relative_l2"] == pytest.approx(
        np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-12
    )
    assert row["max_abs"] == np.abs(after - before).max()
    assert (found["before"]["step"], found["after"]["step"]) == (0, 25)
    assert found["unchanged"] == 8
    assert deltacheck_("diff", run.root, 0, 25).code == 0


def test_diff_leaves_nan_and_infinity_out_of_drift_and_counts_them(
    run: Run, deltacheck_: Command
) -> None:
    (row,) = deltacheck_("diff", run.root, 0, 25, "--leaves", "odd", "--json").json["changed"]
    assert (row["changed"], row["nonfinite_before"], row["nonfinite_after"]) == (2, 2, 1)
    assert row["max_abs"] == 0.5
    assert row["relative_l2"] == pytest.approx(0.5 / math.sqrt(1 + 16))


def test_diff_of_large_integers_is_exact(run: Run, deltacheck_: Command) -> None:
    (row,) = deltacheck_("diff", run.root, 10, 25, "--leaves", "count", "--json").json["changed"]
    assert (row["changed"], row["max_abs"]) == (1, 1)  # float64 would see no difference


def test_diff_tells_leaves_and_values_that_came_went_or_changed_shape(
    run: Run, deltacheck_: Command
) -> None:
    found = deltacheck_("diff", run.root, 0, 25, "--json").json
    assert found["added"] == [{"path": "new", "dtype": "int16", "shape": [2, 2]}]
    assert found["removed"] == [{"path": "gone", "dtype": "float32", "shape": [3]}]
    bent = {
        "path": "bent",
        "before": {"dtype": "float32", "shape": [6]},
        "after": {"dtype": "float32", "shape": [2, 3]},
    }
    assert found["reshaped"] == [bent]
    assert found["scalars"] == [
        {"path": "left", "before": {"type": "int", "value": 1}, "after": None},
        {
            "path": "note",
            "before": {"type": "str", "value": "a"},
            "after": {"type": "str", "value": "b"},
        },
        {"path": "right", "before": None, "after": {"type": "NoneType", "value": None}},
    ]
    backwards = deltacheck_("diff", run.root, 25, 0, "--json").json
    assert [row["path"] for row in backwards["added"]] == ["gone"]


def test_diff_compares_steps_of_two_roots_and_names_the_root_that_is_damaged(
    run: Run, damaged: Path, deltacheck_: Command
) -> None:
    found = deltacheck_("diff", run.root, 0, damaged, 25, "--json").json
    assert (found["before"]["root"], found["after"]["root"]) == (str(run.root), str(damaged))
    assert found["changed"] == deltacheck_("diff", run.root, 0, 25, "--json").json["changed"]
    printed = deltacheck_("diff", run.root, 0, damaged, "latest").out
    assert printed.startswith(f"step 0 of {run.root} -> step 25 of {damaged}: 3 changed")
    for file in data_files(damaged, 1, "delta"):
        flip(file)
    failed = deltacheck_("diff", run.root, 0, damaged, 25)
    assert failed.code == 4
    assert f"step 25 of {damaged}: leaf" in failed.err
    assert "Steps that still restore: 0" in failed.err
    assert deltacheck_("diff", run.root, 0, damaged).code == 2


def test_diff_does_not_read_leaves_with_equal_digests(
    run: Run, damaged: Path, deltacheck_: Command
) -> None:
    (packed,) = [path for path in data_files(damaged, 0, "packed") if "uint16" in str(path)]
    flip(packed)  # holds the bfloat16 leaves, which never change
    expected = deltacheck_("diff", run.root, 0, 25, "--json").json
    for document in (expected, expected["before"], expected["after"]):
        document["root"] = str(damaged)
    assert deltacheck_("diff", damaged, 0, 25, "--json").json == expected
    assert (
        deltacheck_("export", damaged, 25, "--out", damaged.parent / "x.npz").code == 4
    )  # so it would have been noticed


@pytest.mark.parametrize(
    "dtype", ["float64", "bfloat16", "float8_e5m2", "int8", "uint64", "int4", "bool", "complex64"]
)
def test_drift_agrees_with_numpy_for_every_kind_of_number(
    dtype: str, tmp_path: Path, deltacheck_: Command
) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    random = np.random.default_rng(3)
    before = (random.integers(0, 8, 500)).astype(kind)
    after = before.copy()
    after[::7] = (random.integers(0, 8, 72)).astype(kind)
    with Engine(tmp_path / "root") as engine:
        engine.save(0, {"x": before}).result(240)
        engine.save(1, {"x": after}).result(240)
    (row,) = deltacheck_("diff", tmp_path / "root", 0, 1, "--json").json["changed"]
    wide = np.complex128 if dtype == "complex64" else np.float64
    difference = np.abs(after.astype(wide) - before.astype(wide))
    assert row["changed"] == np.count_nonzero(difference)
    assert row["max_abs"] == difference.max()
    assert row["relative_l2"] == pytest.approx(
        np.linalg.norm(difference) / np.linalg.norm(before.astype(wide))
    )


def test_drift_survives_numbers_whose_squares_do_not(tmp_path: Path, deltacheck_: Command) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(
            0,
            {"huge": np.array([1e200, 3e200]), "tiny": np.array([1e-200, 0.0]), "nil": np.zeros(2)},
        ).result(240)
        engine.save(
            1,
            {
                "huge": np.array([1e200, 4e200]),
                "tiny": np.array([2e-200, 0.0]),
                "nil": np.array([0.0, -0.0]),
            },
        )
    rows = {
        row["path"]: row
        for row in deltacheck_("diff", tmp_path / "root", 0, 1, "--json").json["changed"]
    }
    assert rows["huge"]["relative_l2"] == pytest.approx(1 / math.sqrt(10))
    assert rows["tiny"]["relative_l2"] == pytest.approx(1)
    assert (rows["nil"]["changed"], rows["nil"]["relative_l2"], rows["nil"]["max_abs"]) == (
        1,
        0,
        0,
    )  # -0.0 is other bits


# --- verify ---------------------------------------------------------------------------------------


def test_verify_finds_a_whole_root_whole(run: Run, deltacheck_: Command) -> None:
    for options in ((), ("--deep",), (10, "--deep")):
        found = deltacheck_("verify", run.root, *options, "--json")
        assert found.code == 0
        assert (found.json["ok"], found.json["findings"]) == (True, [])
    assert found.json["steps"] == [10]
    assert "3 steps checked" in deltacheck_("verify", run.root).out


def test_deep_verify_names_each_step_and_leaf_that_stands_on_a_damaged_file(
    damaged: Path, deltacheck_: Command
) -> None:
    file = data_files(damaged, 0, "leaves")[0]  # the keyframe of model/weight
    flip(file)
    assert deltacheck_("verify", damaged).code == 0  # no data is read
    found = deltacheck_("verify", damaged, "--deep", "--json")
    assert found.code == 1
    assert [(f["step"], f["leaf"]) for f in found.json["findings"]] == [
        (step, "model/weight") for step in (0, 10, 25)
    ]
    assert all(str(file.parent) in f["problem"] for f in found.json["findings"])
    lines = deltacheck_("verify", damaged, 10, "--deep").out.splitlines()
    assert lines[0].startswith("step 10, leaf model/weight: ")
    assert lines[1].endswith("1 finding")
    assert lines[2].startswith(f"next: deltacheck repair {damaged} --lossy --dry-run")


def test_verify_prints_a_damaged_chunk_once_and_the_steps_without_damage(
    damaged: Path, deltacheck_: Command
) -> None:
    for file in data_files(damaged, 1, "delta"):
        flip(file)
    found = deltacheck_("verify", damaged, "--deep", "--json").json["findings"]
    lines = deltacheck_("verify", damaged, "--deep").out.splitlines()
    assert len(lines) - 3 == len({row["problem"] for row in found}) < len(found)
    assert lines[0].startswith("steps 10, 25, ")
    assert lines[-3].endswith(f"{len(found)} findings")
    assert lines[-2] == "steps without a finding: 0"


def test_deep_verify_finds_what_the_library_finds(damaged: Path, deltacheck_: Command) -> None:
    for segment, kind in ((0, "packed"), (1, "delta")):
        for file in data_files(damaged, segment, kind):
            flip(file)
    expected = deltacheck.open(damaged).verify(deep=True)
    found = deltacheck_("verify", damaged, "--deep", "--json").json["findings"]
    assert {(f["step"], f["leaf"]) for f in found} == {(f.step, f.leaf) for f in expected}


def test_a_damaged_manifest_is_found_and_never_passed_over_in_silence(
    damaged: Path, deltacheck_: Command
) -> None:
    manifest = damaged / "checkpoints" / "c0000000002" / "zarr.json"
    flip(manifest)
    for command in (("verify",), ("verify", 25), ("verify", "latest")):
        found = deltacheck_(command[0], damaged, *command[1:])
        assert found.code == 1
        assert str(manifest) in found.out
    for command in ("ls", "log"):
        found = deltacheck_(command, damaged, "--json")
        assert found.code == 4
        assert [row["step"] for row in found.json["steps"]] == [0, 10]
        assert str(manifest) in json.loads(found.err)["warning"]["message"]
    for step in ("25", "latest"):
        assert deltacheck_("show", damaged, step).code == 4
        assert deltacheck_("export", damaged, step, "--out", damaged.parent / "x.npz").code == 4
    assert deltacheck_("show", damaged, 10).code == 0
    segments = sorted((damaged / "segments").iterdir())
    assert deltacheck_("prune", damaged).code == 4  # what the manifest needs is unknown
    pruned = deltacheck_("prune", damaged, "--keep-last", 1, "--grace", 0, "--json")
    assert pruned.code == 0
    assert ([row["step"] for row in pruned.json["deleted"]], pruned.json["removed"]) == ([0], [])
    assert str(manifest) in json.loads(pruned.err)["warning"]["message"]
    assert sorted((damaged / "segments").iterdir()) == segments


def test_a_missing_segment_is_shown_where_it_is_missed(damaged: Path, deltacheck_: Command) -> None:
    segment = sorted((damaged / "segments").glob("s*"))[1]
    shutil.rmtree(segment)
    rows = deltacheck_("ls", damaged, "--json")
    assert rows.code == 4
    assert [row["problem"] is None for row in rows.json["steps"]] == [True, False, False]
    assert segment.name in rows.err
    assert deltacheck_("verify", damaged).code == 1
    shown = deltacheck_("show", damaged, 10)
    assert shown.code == 4
    assert segment.name in shown.err


def seen_on_terminal(command: list[str]) -> tuple[str, str]:
    """Run a command whose stderr is a terminal; return the text there, and stdout."""
    with terminal() as (theirs, seen):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=theirs, timeout=240, check=True
        )
    return b"".join(seen).decode(), done.stdout.decode()


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """Yield the file descriptor of a terminal, and what has been written to it, whole at the end.

    It is read all the time: a terminal takes about 4 KiB, and then its writers wait.
    """
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while more := os.read(ours, 65536):
                seen.append(more)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, seen
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def test_verify_shows_its_progress_on_a_terminal_only(run: Run) -> None:
    command = [sys.executable, "-m", "deltacheck", "verify", str(run.root), "--deep"]
    seen, out = seen_on_terminal(command)
    assert "reading" in seen
    assert "reading" not in out
    quiet = subprocess.run(command, capture_output=True, timeout=240, check=True)
    assert b"reading" not in quiet.stderr


def test_an_import_shows_its_progress_on_a_terminal_only(tmp_path: Path) -> None:
    files = [str(tmp_path / f"model-{step}.safetensors") for step in (1, 2)]
    for file in files:
        save_file({"weight": torch.randn(200, 200)}, file)
    command = [sys.executable, "-m", "deltacheck", "import"]
    seen, out = seen_on_terminal([*command, str(tmp_path / "root"), *files])
    assert "importing" in seen
    size = 2 * os.path.getsize(files[0]) / 1024  # both files, when the last is committed
    assert f"{size:.1f}/{size:.1f} KiB" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert [line.partition(":")[0] for line in out.splitlines()] == ["step 1", "step 2"]
    quiet = [*command, str(tmp_path / "other"), *files]
    done = subprocess.run(quiet, capture_output=True, timeout=240, check=True)
    assert b"importing" not in done.stderr


def test_tables_fit_the_terminal_and_name_the_columns_that_they_leave_out(
    run: Run, deltacheck_: Command
) -> None:
    for command in (["log"], ["show"], ["diff", "0", "25"]):
        line = [sys.executable, "-m", "deltacheck", command[0], str(run.root), *command[1:]]
        environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
        with terminal() as (theirs, seen):
            subprocess.run(line, stdout=theirs, timeout=240, check=True, env=environment)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", b"".join(seen).decode()).splitlines()
        tables = [line for line in lines if "   " in line or "──" in line]
        assert len(tables) >= 3, command
        assert max(map(len, tables)) <= 80, command
        left_out = [line for line in lines if line.startswith("left out")]
        assert left_out, command
        # No column vanishes unnamed.
        whole = deltacheck_(command[0], run.root, *command[1:]).out.splitlines()
        headings = [line for line in whole if line.isupper()]
        titles = {title for line in headings for title in re.split(" {2,}", line.strip())}
        assert titles
        for title in titles:
            assert title in "\n".join(lines), (command, title)


@pytest.mark.parametrize(
    ("width", "titles"), [(1000, "ABC"), (48, "ABC"), (47, "AB"), (37, "A"), (10, "A")]
)
def test_the_columns_of_the_highest_rank_are_left_out_first(width: int, titles: str) -> None:
    columns = [Column("A", "a", left=True), Column("B", "b", rank=1), Column("C", "c", rank=2)]
    kept = columns_within(width, columns, [["a" * 30, "12345", "1234567"]])
    assert "".join(columns[index].title for index in kept) == titles


# --- export ---------------------------------------------------------------------------------------


def test_safetensors_hold_every_leaf_bit_for_bit(
    run: Run, tmp_path: Path, deltacheck_: Command
) -> None:
    file = tmp_path / "step.safetensors"
    done = deltacheck_("export", run.root, 25, "--to", "safetensors", "--out", file, "--json").json
    tensors = load_file(file)
    truth = {row["path"] for row in deltacheck_("show", run.root, 25, "--json").json["leaves"]}
    assert tensors.keys() == truth
    assert (done["leaves"], done["file_bytes"]) == (len(truth), file.stat().st_size)
    for path, tensor in tensors.items():
        owner: Any = run.states[25]
        for key in path.split("/"):
            owner = owner[key]
        assert tensor.dtype == owner.dtype
        assert tensor.shape == owner.shape
        assert bits(tensor) == bits(owner)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert about["step"] == "25"
    assert str(run.root) in about["source"]
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    assert (8 + header_bytes) % 8 == 0  # so that what follows can be mapped


def test_npz_holds_every_leaf_and_names_the_types_that_numpy_lacks(
    run: Run, tmp_path: Path, deltacheck_: Command
) -> None:
    file = tmp_path / "step.npz"
    assert deltacheck_("export", run.root, 0, "--out", file).code == 0
    with np.load(file, allow_pickle=False) as found:
        named = {name.removesuffix(".dtype") for name in found.files if name.endswith(".dtype")}
        assert named == {"half", "eight", "model/embed", "model/head"}
        for path in set(found.files) - {f"{name}.dtype" for name in named}:
            array = found[path]
            if path in named:
                array = array.view(getattr(ml_dtypes, str(found[f"{path}.dtype"])))
            expected = run.leaf(0, path)
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert array.tobytes() == expected.tobytes()


def test_torch_files_hold_the_nested_state_and_load_without_pickle(
    run: Run, tmp_path: Path, deltacheck_: Command
) -> None:
    file = tmp_path / "step.pt"
    assert deltacheck_("export", run.root, 25, "--out", file, "--json").json["weights_only"] is True
    state = torch.load(file, weights_only=True)
    assert_same(run.states[25], state)
    assert state["model"]["embed"].data_ptr() == state["model"]["head"].data_ptr()


def test_torch_files_say_when_they_need_pickle(tmp_path: Path, deltacheck_: Command) -> None:
    for step, extra in enumerate((np.arange(3), deque([1, 2]))):
        with Engine(tmp_path / "root") as engine:
            engine.save(step, {"w": torch.ones(2), "extra": extra}).result(240)
        file = tmp_path / f"{step}.pt"
        assert (
            deltacheck_("export", tmp_path / "root", step, "--out", file, "--json").json[
                "weights_only"
            ]
            is False
        )
        assert_same({"w": torch.ones(2), "extra": extra}, torch.load(file, weights_only=False))
        file.unlink()
        assert (
            "weights_only=False"
            in deltacheck_("export", tmp_path / "root", step, "--out", file).out
        )


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
def test_chosen_leaves_are_written_under_stripped_keys(
    suffix: str, run: Run, tmp_path: Path, deltacheck_: Command
) -> None:
    file = tmp_path / f"model{suffix}"
    options = ("--leaves", "model/*", "--leaves", "zero", "--strip", "model/", "--out", file)
    assert deltacheck_("export", run.root, 10, *options).code == 0
    if suffix == ".npz":
        with np.load(file) as found:
            keys = {name for name in found.files if not name.endswith(".dtype")}
    else:
        keys = set(
            load_file(file) if suffix == ".safetensors" else torch.load(file, weights_only=True)
        )
    assert keys == {"weight", "norm", "embed", "head", "zero"}


def test_the_file_is_named_after_the_step_where_no_name_is_given(
    run: Run, tmp_path: Path, deltacheck_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert deltacheck_("export", run.root, 10, "--to", "npz").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-10.npz"]


def test_an_existing_file_is_kept(run: Run, tmp_path: Path, deltacheck_: Command) -> None:
    file = tmp_path / "x.npz"
    file.write_text("precious")
    refused = deltacheck_("export", run.root, 0, "--out", file)
    assert refused.code == 5
    assert "exists" in refused.err
    assert file.read_text() == "precious"


def test_a_file_that_appears_while_exporting_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "x"

    def exported() -> None:
        with export.new_file(file) as new:
            new.write(b"ours")
            file.write_text("theirs")

    with pytest.raises(FileExistsError):
        exported()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


def test_a_failed_export_leaves_nothing_behind(
    damaged: Path, tmp_path: Path, deltacheck_: Command
) -> None:
    flip(data_files(damaged, 0, "leaves")[-1])
    target = tmp_path / "out"
    target.mkdir()
    (target / "old.npz").write_text("old")
    for suffix in (".safetensors", ".npz", ".pt"):
        assert deltacheck_("export", damaged, 25, "--out", target / f"x{suffix}").code == 4
    assert (
        deltacheck_("export", damaged, 25, "--out", target / "old.npz").code == 5
    )  # refused before anything is read
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [("old.npz", "old")]


def test_a_root_takes_no_foreign_file_and_a_device_is_no_file(
    damaged: Path, deltacheck_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(damaged)
    before = sorted(damaged.rglob("*"))
    assert deltacheck_("export", 10, "--to", "npz").code == 5
    assert (
        deltacheck_("export", 10, "--to", "npz", "--out", damaged / "segments" / "x.npz").code == 5
    )
    assert sorted(damaged.rglob("*")) == before
    os.mkfifo(
        damaged.parent / "pipe"
    )  # stands for any device; a real one would be lost if this test failed
    assert deltacheck_("export", 10, "--to", "npz", "--out", damaged.parent / "pipe").code == 5
    assert (
        deltacheck_("export", 10, "--to", "npz", "--out", damaged.parent / "no" / "x.npz").code == 5
    )
    assert deltacheck_("export", 10, "--to", "npz", "--out", damaged.parent).code == 5


def test_safetensors_refuse_a_type_that_they_lack(tmp_path: Path, deltacheck_: Command) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(
            0, {"double": torch.ones(2, dtype=torch.complex128), "fine": torch.ones(2)}
        ).result(240)
    refused = deltacheck_("export", tmp_path / "root", 0, "--out", tmp_path / "x.safetensors")
    assert refused.code == 5
    assert "'double'" in refused.err
    assert "complex128" in refused.err
    assert not (tmp_path / "x.safetensors").exists()
    assert deltacheck_("export", tmp_path / "root", 0, "--out", tmp_path / "x.npz").code == 0


def test_two_leaves_never_share_a_key(tmp_path: Path, deltacheck_: Command) -> None:
    with Engine(tmp_path / "root") as engine:
        state = {
            "a": {"x": torch.ones(1), "x.dtype": torch.ones(2)},
            "x": torch.ones(3, dtype=torch.bfloat16),
        }
        engine.save(0, state).result(240)
    clash = deltacheck_(
        "export", tmp_path / "root", 0, "--out", tmp_path / "x.safetensors", "--strip", "a/"
    )
    assert clash.code == 2
    options = ("--leaves", "x", "--leaves", "a/x.dtype", "--strip", "a/")
    assert (
        deltacheck_("export", tmp_path / "root", 0, "--out", tmp_path / "x.npz", *options).code == 5
    )


def test_npz_refuses_names_that_numpy_takes_for_those_of_another_leaf(
    tmp_path: Path, deltacheck_: Command
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"x": np.ones(2), "x.npy": np.zeros(2)}).wait()
    failed = deltacheck_("export", tmp_path / "root", "--to", "npz", "--out", tmp_path / "o")
    assert failed.code == 5
    assert "'x' has the file that numpy.load opens for 'x.npy'" in failed.err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("form", ["torch", "safetensors", "hf"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2", "float8_e4m3"])
def test_types_that_a_format_lacks_are_refused_before_a_file_is_made(
    form: str, dtype: str, tmp_path: Path, deltacheck_: Command
) -> None:
    with Engine(tmp_path / "root") as engine:
        values = np.zeros(2, getattr(ml_dtypes, dtype))
        engine.save(1, {"x": values, "y": np.ones(2)}).wait()
    words = ("export", tmp_path / "root", "--to", form, "--out", tmp_path / "o", "--leaves", "x")
    failed = deltacheck_(*words)
    assert failed.code == 5
    assert f"'x' of type {dtype} cannot be put into a file of" in failed.err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


@pytest.mark.parametrize("form", ["npz", "torch", "safetensors", "hf"])
def test_a_full_disk_is_told_in_a_line_with_the_file_and_leaves_nothing(
    form: str, tmp_path: Path, deltacheck_: Command
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"x": torch.arange(1 << 16)}).wait()
    # A file that may not grow fails as one on a full disk, with another number.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
    try:
        failed = deltacheck_("export", tmp_path / "root", "--to", form, "--out", tmp_path / "o")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.code == 5
    assert f"File too large: {tmp_path}" in failed.err
    assert "defect" not in failed.err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_memory_does_not_grow_with_the_exported_leaf(tmp_path: Path, deltacheck_: Command) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(0, {"big": torch.arange(20_000_000, dtype=torch.float32)}).result(240)
    for suffix in (".safetensors", ".npz"):
        tracemalloc.start()
        assert (
            deltacheck_("export", tmp_path / "root", 0, "--out", tmp_path / f"x{suffix}").code == 0
        )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * export.BATCH_BYTES + (8 << 20) < 80_000_000


# --- prune ----------------------------------------------------------------------------------------


@pytest.fixture
def littered(damaged: Path) -> tuple[Path, str]:
    """A root whose step 10 was deleted, with a segment that a killed save has left; the name of
    that.
    """
    shutil.rmtree(damaged / "checkpoints" / "c0000000001")
    shutil.rmtree(damaged / "checkpoints" / "c0000000002")
    litter = damaged / "segments" / "s0000000009-0123abcd"
    (litter / "delta.0.stream").mkdir(parents=True)
    (litter / "delta.0.stream" / "c.0").write_bytes(b"x" * 1000)
    return damaged, litter.name


def test_gc_removes_what_no_step_needs(littered: tuple[Path, str], deltacheck_: Command) -> None:
    root, litter = littered
    needed, *unneeded = sorted(path.name for path in (root / "segments").glob("s*"))
    assert unneeded[-1] == litter
    planned = deltacheck_("prune", root, "--dry-run", "--grace", 0, "--json").json
    assert planned["removed"] == unneeded
    assert sorted(path.name for path in (root / "segments").glob("s*")) == [needed, *unneeded]
    done = deltacheck_("prune", root, "--grace", 0, "--json").json
    assert (done["removed"], done["waiting"], done["dry_run"]) == (unneeded, [], False)
    assert done["freed_bytes"] == planned["freed_bytes"] > 1000
    assert [path.name for path in (root / "segments").glob("s*")] == [needed]
    assert deltacheck_("verify", root, "--deep").code == 0


def test_gc_lets_readers_finish_first(littered: tuple[Path, str], deltacheck_: Command) -> None:
    root, litter = littered
    first = deltacheck_("prune", root)
    assert "run prune again" in first.out
    assert (root / "segments" / litter).exists()


def test_gc_is_refused_while_a_training_writes(
    run: Run, damaged: Path, deltacheck_: Command
) -> None:
    with Engine(damaged):
        for options in ((), ("--dry-run",)):
            refused = deltacheck_("prune", damaged, *options)
            assert refused.code == 5
            assert "is being written by this process: it was opened at " in refused.err
    assert deltacheck_("prune", damaged).code == 0
    take_lease(damaged).release()  # and gc has given it back


# --- the roots of CheckpointManager ---------------------------------------------------------------


@pytest.fixture
def manager_root(damaged: Path, tmp_path: Path) -> Path:
    """The same checkpoints as Orbax's CheckpointManager would lay them out; step 25 has a second
    item.
    """
    root = tmp_path / "managed"
    root.mkdir()
    for seq, step in enumerate((0, 10, 25)):
        (root / str(step)).mkdir()
        (damaged / "checkpoints" / f"c{seq:010d}").rename(root / str(step) / "default")
    damaged.rename(root / "deltacheck")
    shutil.copytree(root / "25" / "default", root / "25" / "ema")
    return root


def test_the_roots_of_a_checkpoint_manager_are_read_alike(
    manager_root: Path, tmp_path: Path, deltacheck_: Command
) -> None:
    rows = deltacheck_("ls", manager_root, "--json").json["steps"]
    assert [(row["step"], row["item"]) for row in rows] == [
        (0, "default"),
        (10, "default"),
        (25, "default"),
        (25, "ema"),
    ]
    assert "ITEM" in deltacheck_("ls", manager_root).out
    ambiguous = deltacheck_("show", manager_root, 25)
    assert ambiguous.code == 3
    assert "ema" in ambiguous.err
    assert deltacheck_("show", manager_root, 25, "--item", "ema").code == 0
    assert deltacheck_("log", manager_root, "--item", "default").code == 0
    assert deltacheck_("diff", manager_root, 0, 10, "--json").json["changed"][0]["changed"] == 40
    assert deltacheck_("verify", manager_root, "--deep").code == 0
    assert deltacheck_("export", manager_root, 10, "--out", tmp_path / "x.npz").code == 0


def test_gc_of_a_manager_root_spares_what_a_save_under_way_may_need(
    manager_root: Path, deltacheck_: Command
) -> None:
    segments = manager_root / "deltacheck" / "segments"
    (segments / "s0000000009-0123abcd").mkdir()  # newer than every step
    shutil.rmtree(manager_root / "25" / "default")
    done = deltacheck_("prune", manager_root, "--grace", 0, "--json").json
    assert done["removed"] == []  # the other item still needs every segment
    shutil.rmtree(manager_root / "10")
    shutil.rmtree(manager_root / "0")
    assert deltacheck_("prune", manager_root, "--grace", 0, "--json").json["removed"] == []
    assert deltacheck_("verify", manager_root, "--deep").code == 0


# --- failures -------------------------------------------------------------------------------------


def assert_one_line(outcome: Outcome, code: int, *words: str) -> None:
    assert outcome.code == code
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("deltacheck: ")
    for word in words:
        assert word in line


def command_lines(root: object) -> list[list[str]]:
    """Every command that reads a root, on this one."""
    name = str(root)
    lines = [
        ["ls", name],
        ["log", name],
        ["show", name, "0"],
        ["diff", name, "0", "10"],
        ["verify", name],
        ["prune", name],
        ["export", name, "0", "--to", "npz"],
    ]
    return [*lines, ["report", name, "-o", f"{name}.html"], ["plan", name, *SPEEDS]]


def test_a_wrong_path_and_a_foreign_directory_are_told_in_a_line(
    tmp_path: Path, deltacheck_: Command
) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (tmp_path / "file").write_text("x")
    for name, word in (
        ("missing", "does not exist"),
        ("foreign", "not a deltacheck root"),
        ("file", "not a directory"),
    ):
        for line in command_lines(tmp_path / name):
            assert_one_line(deltacheck_(*line), 3, word, str(tmp_path / name))
    assert list((tmp_path / "foreign").iterdir()) == [tmp_path / "foreign" / "zarr.json"]


def test_a_step_or_leaf_that_is_not_there_is_told_in_a_line(run: Run, deltacheck_: Command) -> None:
    for line in (["show", 11], ["diff", 0, 11], ["verify", 11], ["export", 11, "--to", "npz"]):
        assert_one_line(deltacheck_(line[0], run.root, *line[1:]), 3, "no step 11", "0, 10, 25")
    for line in (["show", 10], ["diff", 0, 10], ["export", 10, "--to", "npz"]):
        assert_one_line(
            deltacheck_(line[0], run.root, *line[1:], "--leaves", "nope*"), 3, "'nope*'"
        )


def test_a_root_of_another_version_is_refused(damaged: Path, deltacheck_: Command) -> None:
    about = json.loads((damaged / "zarr.json").read_text())
    about["attributes"]["deltacheck"]["version"] = 99
    (damaged / "zarr.json").write_text(json.dumps(about))
    for line in command_lines(damaged):
        assert_one_line(deltacheck_(*line), 5, "version 99")


@pytest.mark.parametrize(
    "harm",
    [flip, lambda path: path.write_bytes(b""), lambda path: path.unlink()],
    ids=["flipped", "empty", "missing"],
)
def test_no_damaged_file_ends_in_a_traceback(
    harm: Callable[[Path], None], damaged: Path, deltacheck_: Command
) -> None:
    pristine = damaged.parent / "pristine"
    damaged.rename(pristine)
    files = sorted(
        path.relative_to(pristine)
        for path in pristine.rglob("*")
        if path.is_file() and "control" not in path.parts
    )
    for file in files[::16]:
        shutil.copytree(pristine, damaged)
        harm(damaged / file)
        for line in (["ls"], ["show", "25"], ["diff", "0", "25"], ["verify", "--deep"]):
            found = deltacheck_(line[0], damaged, *line[1:])
            assert found.code in (0, 1, 3, 4), (file, line, found.err)
            assert all(line.startswith("deltacheck: ") for line in found.err.splitlines())
        shutil.rmtree(damaged)


@pytest.mark.parametrize(
    "line",
    [
        ["nonsense"],
        ["ls", "--nonsense"],
        ["ls", "a", "b"],
        ["ls", "5"],
        ["tag", "a", "1"],
        ["tag", "a", "--delete", "b", "--move"],
        ["tag", "a", "1", "--delete", "b"],
        ["show", "a", "1", "2"],
        ["diff", "a", "1"],
        ["verify", "a", "1", "2"],
        ["export", "a", "1"],
        ["export", "a", "1", "--to", "pickle"],
        ["prune", "a", "--grace", "-1"],
        ["prune", "a", "1", "--keep-last", "1"],
        ["prune", "a", "--keep-leaves", "w"],
        ["log", "a", "--by-class", "0"],
        ["report", "a", "b"],
        ["plan", "a", "--processes", "0"],
    ],
    ids=" ".join,
)
def test_misuse_is_told_in_a_line(line: list[str], deltacheck_: Command) -> None:
    assert_one_line(deltacheck_(*line), 2)
    as_json = deltacheck_(*line, "--json")
    assert json.loads(as_json.err)["error"]["exit_code"] == as_json.code == 2


def test_errors_under_json_are_json(tmp_path: Path, deltacheck_: Command) -> None:
    for line in command_lines(tmp_path / "missing"):
        found = deltacheck_(*line, "--json")
        error = json.loads(found.err)
        assert found.out == ""
        assert error["schema"] == 1
        assert error["error"]["kind"] == "NotACheckpointRoot"
        assert error["error"]["exit_code"] == found.code == 3
        assert "does not exist" in error["error"]["message"]


def test_an_interrupt_is_told_in_a_line(
    run: Run, deltacheck_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltacheck.store.roots.root.Root.manifest_paths", interrupted)
    assert_one_line(deltacheck_("ls", run.root), 130, "interrupted")


def test_a_defect_is_told_in_a_line_that_says_how_to_see_more(
    run: Run, deltacheck_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("oops\nand more")

    monkeypatch.setattr("deltacheck.store.roots.root.Root.manifest_paths", broken)
    assert_one_line(
        deltacheck_("ls", run.root), 70, "ZeroDivisionError: oops and more", "DELTACHECK_TRACEBACK"
    )
    monkeypatch.setenv("DELTACHECK_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        deltacheck_("ls", run.root)


def test_control_characters_from_disk_never_reach_a_terminal(
    tmp_path: Path, deltacheck_: Command
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(
            0, {"note": "\x1b[31mred", "[bold]x": torch.ones(1)}, metrics={"\x1b]0;t\x07": 1.0}
        ).result(240)
    for line in (["ls"], ["show", "0"]):
        out = deltacheck_(line[0], tmp_path / "root", *line[1:]).out
        assert "\x1b" not in out
        assert "\x07" not in out
    assert "[bold]x" in out


@pytest.mark.parametrize(
    "line", [["ls"], ["show", "25", "--json"], ["--help"], ["prune", "--help"]]
)
def test_a_closed_pipe_ends_the_command_without_a_message(run: Run, line: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = line if "--help" in line else [line[0], str(run.root), *line[1:]]
    result = subprocess.run(
        [sys.executable, "-m", "deltacheck", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_pipe_into_head_prints_no_message(run: Run) -> None:
    for line in ("--help", f"show {run.root} 25 --json", f"ls {run.root}"):
        command = f"{sys.executable} -m deltacheck {line} | head -n 1"
        result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=240)
        assert result.stderr == ""
        assert len(result.stdout.splitlines()) == 1


def test_a_full_disk_behind_stdout_is_told_in_a_line(run: Run) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "deltacheck", "ls", str(run.root)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 5
    assert done.stderr == "deltacheck: No space left on device\n"


# --- the command itself ---------------------------------------------------------------------------


def test_help_lists_every_command_with_a_line(deltacheck_: Command) -> None:
    shown = deltacheck_("--help")
    assert shown.code == 0
    for command in COMMANDS:
        assert f" {command} " in shown.out
        described = deltacheck_(command, "--help")
        assert described.code == 0
        assert "--json" in described.out


def test_the_help_of_each_command_ends_with_an_example_that_it_takes() -> None:
    commands: Any = root_command
    for name, command in commands.commands.items():
        program, *words = shlex.split(command.epilog.removeprefix("Example: "))
        assert (program, words[0]) == ("deltacheck", name)
        command.make_context(name, words[1:])  # raises for an unknown option, and calls nothing


def test_help_groups_the_commands(deltacheck_: Command) -> None:
    shown = deltacheck_("--help").out
    titles = ["Train", "Inspect", "Check and repair", "Keep and move", "Plan and measure"]
    positions = [shown.index(f" {title} ") for title in titles]
    assert positions == sorted(positions)
    for command, title in (("run", 0), ("ls", 1), ("verify", 2), ("prune", 3)):
        line = next(line for line in shown.splitlines() if line.startswith(f"│ {command} "))
        assert positions[title] < shown.index(line) < positions[title + 1]


def test_version_is_the_packages(deltacheck_: Command) -> None:
    assert deltacheck_("--version").out == f"deltacheck {deltacheck.__version__}\n"


def test_no_words_at_all_is_misuse_that_helps(deltacheck_: Command) -> None:
    shown = deltacheck_()
    assert shown.code == 2
    assert "verify" in shown.out


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["ls"], ["diff", "0", "25"], ["export", "25", "--to", "npz"]],
)
def test_a_command_imports_no_framework(arguments: list[str], run: Run, tmp_path: Path) -> None:
    words = arguments if arguments == ["--help"] else [arguments[0], str(run.root), *arguments[1:]]
    code = (
        f"import sys; from deltacheck.cli import main; main({words!r}); print(*sys.modules,"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    heavy = {"torch", "jax", "orbax", "flax", "safetensors"} | (
        {"numpy", "tensorstore"} if arguments == ["--help"] else set()
    )
    assert heavy.isdisjoint(done.stderr.split())


def cli_page() -> str:
    return (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()


def test_every_documented_exit_code_is_the_programs() -> None:
    from deltacheck.cli import output as o

    codes = [
        o.OK,
        o.FOUND_DAMAGE,
        o.MISUSE,
        o.NOT_FOUND,
        o.DAMAGED,
        o.REFUSED,
        o.UNDECIDED,
        o.DEFECT,
        o.INTERRUPTED,
        o.BROKEN_PIPE,
    ]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", cli_page(), re.MULTILINE)] == codes


def test_every_key_of_every_document_is_documented(
    run: Run, tmp_path: Path, deltacheck_: Command
) -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return {key for key in value if key != "loss"}.union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    rows = {
        row.split("|")[1]: row
        for row in cli_page().split("## JSON")[1].splitlines()
        if row.startswith("| `")
    }
    lines = (["ls"], ["show", 25], ["log", "--by-class", 1], ["diff", 0, 25], ["verify"], ["prune"])
    more = (
        ["export", 0, "--out", tmp_path / "x.npz"],
        ["report", "-o", tmp_path / "r.html"],
        ["plan", *SPEEDS],
    )
    for command, *options in (*lines, *more):
        found = keys(deltacheck_(command, run.root, *options, "--json").json) - {"schema"}
        (row,) = [text for commands, text in rows.items() if f"`{command}`" in commands]
        assert found == {key for key in found if f"`{key}`" in row}
