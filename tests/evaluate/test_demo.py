"""The quick demo as a user runs it, its verdicts, and its messages if something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.demo import demonstration
from benchmarks.demo.demonstration import create_plan
from benchmarks.demo.evaluation import way_kills
from benchmarks.demo.layout_bytes import OTHER_LAYOUTS
from benchmarks.demo.methods import AUTO, EXACT, LAW, METHODS, OWN_LAYOUT, TORCH_SAVE
from benchmarks.demo.results import DemoOutcome, problems
from benchmarks.demo.way_records import WayEvidence, WayRecovery, WaySaves
from benchmarks.workloads import equality
from deltacheck.evaluate.records import Ending, Kill, LeafCheck, MeasuredSave

pytest.importorskip("torch")


def _output(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed text without the line breaks of the console's width."""
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.timeout(900)  # eight processes that import torch
def test_quick_demo_is_saved_in_every_way_killed_and_resumed_as_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = demonstration.main(
        seed=11,
        quick=True,
        keep=tmp_path / "kept",
        json_file=tmp_path / "figures.json",
        html=tmp_path / "demo.html",
        png=tmp_path / "images",
    )
    output = _output(capsys)
    assert code == 0, output
    assert "Every promise was kept" in output

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["problems"] == []
    assert len(figures["states"]) == 4
    # jax and zarr are among the test extras
    assert not any("not tried" in state["detail"] for state in figures["states"])
    steps = create_plan(seed=11, quick=True).checkpoints()
    rows = (figures["ways"], figures["way_saves"], figures["recoveries"])
    for way, saved, recovery, method in zip(*rows, METHODS, strict=True):
        assert way["key"] == saved["way"] == recovery["way"] == method.key
        assert recovery["kill"]["saving_step"] in steps[1:-1]
        assert {save["step"] for save in saved["saves"]} <= set(steps)
        assert all(save["stored_bytes"] > 0 for save in saved["saves"])
        # Each way has its turn as the one that training overlaps.
        assert any(save["overlapped"] for save in saved["saves"])
        assert recovery["restored_step"] in steps
        assert recovery["leaves"] > 50
        assert bool(recovery["inexact"]) != method.is_exact
        assert (way["difference"] == 0) or not method.is_exact

    layouts = figures["layouts"]
    assert list(layouts) == [OWN_LAYOUT, *OTHER_LAYOUTS]
    own = {way["key"]: way["mean_bytes"] for way in figures["ways"]}
    for key, share in layouts[OWN_LAYOUT].items():
        assert share == pytest.approx(own[key] / own[TORCH_SAVE])
    for shares in layouts.values():
        assert list(shares) == [EXACT, AUTO, LAW]
        assert all(0 < share < 2 for share in shares.values())

    page = (tmp_path / "demo.html").read_text()
    for method in METHODS:
        assert method.title in page
    images = sorted(file.stem for file in (tmp_path / "images").iterdir())
    assert images == ["bytes", "latency", "overview", "quality", "recovery", "size"]


@pytest.mark.parametrize(
    ("key", "changes", "problem"),
    [
        ("auto", {}, ""),
        ("auto", {"ending": Ending(1, {5: 1.0}, 3.0, {"a": "2"})}, "loss is +2.0e+00 from that"),
        ("auto", {"ending": Ending(1, {5: 1.0}, 0.8, {"a": "2"})}, ""),
        ("auto", {"failed": (LeafCheck("model/w", "bounded", "too far"),)}, "'model/w' (bounded)"),
        ("exact", {}, ""),
        ("exact", {"ending": Ending(1, {5: 1.0}, 1.0, {"a": "2"})}, "the last state differs in a"),
        ("exact", {"inexact": (LeafCheck("model/w", "bounded"),)}, "1 leaves are not exact"),
    ],
)
def test_a_resumed_run_is_judged_by_its_promise(
    key: str, changes: dict[str, object], problem: str
) -> None:
    recoveries = tuple(
        replace(recovery, **changes) if recovery.way == key else recovery
        for recovery in EVIDENCE.recoveries
    )
    outcome = DemoOutcome(replace(EVIDENCE, recoveries=recoveries), (), {}, 1.0)
    reasons = problems(outcome)
    assert len(reasons) == bool(problem)
    assert problem in "".join(reasons)
    assert all(f"seed 1, kill 1, {key}" in reason for reason in reasons)


def test_the_kill_falls_into_a_late_checkpoint_and_is_that_of_the_seed() -> None:
    for seed in range(50):
        plan = create_plan(seed)
        (kill,) = way_kills(plan)
        assert (kill,) == way_kills(plan)
        assert 0.6 * plan.steps <= kill.saving_step < plan.steps
        assert kill.mid_save
        assert 0 <= kill.share < len(METHODS)


def test_a_comparison_that_fails_is_named_and_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def perform(plan: object, folder: Path, console: object, *, quick: bool) -> object:
        states = (equality.EqualityVerdict("final state", False, "1 of 2 leaves differ"),)
        return DemoOutcome(EVIDENCE, states, {}, 1.0)

    monkeypatch.setattr(demonstration, "perform", perform)
    assert demonstration.main(seed=1, quick=True) == 1
    assert "NOT as promised: final state" in _output(capsys)


def test_a_worker_that_fails_is_one_clear_line_and_a_traceback_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(create_plan(seed=1, quick=True), factory="tests.support.eval_workload:broken")
    monkeypatch.setattr(demonstration, "create_plan", lambda *words: plan)
    assert demonstration.main(seed=1, quick=True, keep=tmp_path / "kept") == 1
    assert "The demo failed. ZeroDivisionError: " in _output(capsys)
    assert "Traceback" in (tmp_path / "kept" / "log.txt").read_text()


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert demonstration.main(quick=True, keep=tmp_path) == 1
    assert "not empty" in _output(capsys)
    assert (tmp_path / "mine").exists()


def test_too_few_steps_to_be_killed_between_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert demonstration.main(quick=True, steps=7) == 2
    assert "give at least 8" in _output(capsys)


def test_importing_the_demo_imports_no_framework() -> None:
    code = (
        "import sys, benchmarks.demo.demonstration; print(sorted({'torch', 'jax', 'zarr',"
        " 'tensorstore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SAVE = {"step": 4, "overlapped": False, "blocking_seconds": 0.1, "stored_bytes": 1}
UNKILLED = Ending(1, {5: 1.0}, 1.0, {"a": "1"})
INEXACT = LeafCheck("optimizer/state/0/exp_avg", "reused", age_steps=2)


def _recovery(key: str) -> WayRecovery:
    recovery = WayRecovery(Kill(1, 0, 4, True, 0.5), 4, 4, 4, 0.1, 10, way=key, ending=UNKILLED)
    if key != "auto":
        return recovery
    ending = replace(UNKILLED, evaluation=1.05, digests={"a": "2"})
    return replace(recovery, inexact=(INEXACT,), ending=ending)


PLAN = create_plan(seed=1, quick=True)
EVIDENCE = WayEvidence(
    PLAN,
    "torch",
    "torch.save + fsync",
    (
        UNKILLED,
        replace(UNKILLED, seed=2, evaluation=1.1),
        replace(UNKILLED, seed=3, evaluation=1.2),
    ),
    UNKILLED,
    UNKILLED,
    (MeasuredSave(4, 10, 5, 11, 0.1, 0.2, 0.3),),
    (),
    tuple(map(_recovery, PLAN.ways)),
    way_saves=tuple(WaySaves(key, (SAVE,), 1.0) for key in PLAN.ways),
)
