"""The quick demo as a user runs it, its verdicts, and its messages if something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deltacheck.evaluate.demo import demonstration
from deltacheck.evaluate.demo.demonstration import Demonstration
from deltacheck.evaluate.demo.methods import METHODS, PEER
from deltacheck.evaluate.demo.summary import DemoOutcome, Way, judge
from deltacheck.evaluate.workloads import equality

pytest.importorskip("torch")


def _output(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed text without the line breaks of the console's width."""
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.timeout(300)  # a dozen processes that import torch
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
    assert "killed with SIGKILL" in output
    assert "Every promise was kept" in output

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["verdicts"]) == 1 + len(METHODS) + 4
    assert all(verdict["holds"] for verdict in figures["verdicts"])
    assert not any(
        "not tried" in verdict["detail"] for verdict in figures["verdicts"]
    )  # jax and zarr are among the test extras
    plan = Demonstration.create(seed=11, quick=True).plan
    assert figures["kill"]["saving_step"] in plan.checkpoints()[1:-1]
    for way, method in zip(figures["ways"], METHODS, strict=True):
        assert way["method"]["key"] == method.key
        assert {save["step"] for save in way["saves"]} <= set(plan.checkpoints())
        assert all(save["stored_bytes"] > 0 for save in way["saves"])
        # Each way has its turn as the one that training overlaps.
        assert any(save["overlapped"] for save in way["saves"])
        assert way["restored_step"] in plan.checkpoints()
        assert way["leaves"] > 50
        assert not (method.is_exact and (way["inexact"] or way["different_leaves"]))
        # The optimizer is settled, so that the lossy policy does not stay exact.
        assert method.is_exact or way["inexact"]

    page = (tmp_path / "demo.html").read_text()
    for method in METHODS:
        assert method.title in page
    images = sorted(file.stem for file in (tmp_path / "images").iterdir())
    assert images == ["bytes", "losses", "noise", "overview", "promises"]


@pytest.mark.parametrize(
    ("changes", "holds", "words"),
    [
        ({}, True, "step 4: 9 of 10 leaves bit for bit, 1 exp_avg reused; final loss +5.0e-02"),
        ({"difference": 0.2}, False, "between seeds 1.0e-01"),
        ({"difference": -0.2}, True, "final loss -2.0e-01"),
        ({"broken": ["model/w"]}, False, "1 leaves broke their promise: model/w"),
        ({"method": METHODS[2], "inexact": []}, False, "3 leaves differ at the end"),
        ({"method": METHODS[2], "inexact": [], "different_leaves": 0}, True, "has every bit"),
    ],
)
def test_a_resumed_run_is_judged_by_its_promise(
    changes: dict[str, object], holds: bool, words: str
) -> None:
    verdict = judge(replace(WAY, **changes), [1.0, 1.1, 1.2])
    assert verdict.holds is holds
    assert words in verdict.detail


def test_a_comparison_that_fails_is_named_and_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def perform(demo: object, folder: Path, console: object) -> object:
        return OUTCOME

    monkeypatch.setattr(demonstration, "perform", perform)
    assert demonstration.main(seed=1, quick=True) == 1
    assert "NOT as promised: final state" in _output(capsys)


def test_a_worker_that_fails_is_one_clear_line_and_a_traceback_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # So that the first worker finds no data.
    monkeypatch.setattr(demonstration, "_write_data", lambda recipe, shared, on_report: None)
    assert demonstration.main(seed=1, quick=True, keep=tmp_path / "kept") == 1
    output = _output(capsys)
    assert "The demo failed. FileNotFoundError: " in output
    assert "recipe.json" in output.replace(" ", "")  # the console may break a line in a path
    assert "FileNotFoundError" in (tmp_path / "kept" / "pretraining" / "log.txt").read_text()


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert demonstration.main(quick=True, keep=tmp_path) == 1
    assert "not empty" in _output(capsys)
    assert (tmp_path / "mine").exists()


def test_too_few_steps_to_be_killed_between_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert demonstration.main(quick=True, steps=8) == 2
    assert "give at least 16" in _output(capsys)


def test_importing_the_demo_imports_no_framework() -> None:
    code = (
        "import sys, deltacheck.evaluate.demo.demonstration; print(sorted({'torch', 'jax', 'zarr',"
        " 'tensorstore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SAVE = {
    "step": 4,
    "overlapped": False,
    "blocking_seconds": 0.1,
    "durable_seconds": 0.2,
    "stored_bytes": 1,
}
WAY = Way(
    method=METHODS[4],
    saves=[SAVE],
    checkpoints=1,
    total_bytes=1,
    restored_step=4,
    restore_seconds=0.1,
    leaves=10,
    broken=[],
    inexact=[{"path": "optimizer/state/0/exp_avg", "contract": "reused"}],
    losses={5: 1.0},
    final_loss=1.05,
    difference=0.05,
    different_leaves=3,
)
OUTCOME = DemoOutcome(
    seed=1,
    steps=8,
    every=4,
    parameters=10,
    pretrain_losses=[1.0],
    losses={1: 1.0},
    final_losses=[1.0, 1.1],
    kill={"saving_step": 8, "seconds_after_call": 0.1, "last_step": 5},
    step_seconds=[0.1],
    saved=[],
    ways=[replace(WAY, method=PEER), WAY],
    verdicts=[
        equality.EqualityVerdict("losses", True, ""),
        equality.EqualityVerdict("final state", False, "1 of 2 leaves differ"),
    ],
    seconds=1.0,
)
