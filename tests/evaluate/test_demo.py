"""The quick demo as a user runs it, and its messages if something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltacheck.evaluate.demo import demonstration
from deltacheck.evaluate.demo.demonstration import Demonstration
from deltacheck.evaluate.demo.summary import Outcome
from deltacheck.evaluate.workloads import equality

pytest.importorskip("torch")


def _output(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed text without the line breaks of the console's width."""
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.timeout(300)  # four processes that import torch, one after the other
def test_quick_demo_is_killed_resumes_and_ends_bit_for_bit_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = demonstration.main(
        seed=11, quick=True, keep=tmp_path / "kept", json_file=tmp_path / "figures.json"
    )
    output = _output(capsys)
    assert code == 0, output
    assert "killed with SIGKILL" in output
    assert "Bit for bit the same" in output

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["verdicts"]) == 6
    assert all(verdict["holds"] for verdict in figures["verdicts"])
    assert not any(
        "not tried" in verdict["detail"] for verdict in figures["verdicts"]
    )  # jax and zarr are among the test extras
    plan = Demonstration.create(seed=11, quick=True).plan
    assert figures["kill"]["saving_step"] in plan.checkpoints()[1:-1]
    # If steps are fast, the kill may come after the last of them.
    assert figures["kill"]["newest_checkpoint"] <= figures["kill"]["last_step"] <= plan.steps
    assert {save["step"] for save in figures["saved"]} <= set(plan.checkpoints())
    assert all(
        save["stored_bytes"] > 0 and save["blocking_seconds"] > 0 for save in figures["saved"]
    )


def test_a_comparison_that_fails_is_named_and_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def perform(demo: object, folder: Path, console: object) -> object:
        return OUTCOME

    monkeypatch.setattr(demonstration, "perform", perform)
    assert demonstration.main(seed=1, quick=True) == 1
    assert "NOT the same: final state" in _output(capsys)


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
    assert "give at least 12" in _output(capsys)


def test_importing_the_demo_imports_no_framework() -> None:
    code = (
        "import sys, deltacheck.evaluate.demo.demonstration; print(sorted({'torch', 'jax', 'zarr',"
        " 'tensorstore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


OUTCOME = Outcome(
    seed=1,
    steps=8,
    every=4,
    parameters=10,
    pretrain_losses=[1.0],
    losses=[1.0],
    kill={"last_step": 5, "newest_checkpoint": 4},
    restore_seconds=0.1,
    step_seconds=[0.1],
    saved=[
        {
            "keyframe": True,
            "stored_bytes": 1,
            "blocking_seconds": 0.1,
            "durable_seconds": 0.1,
            "classes": {},
        }
    ],
    torch_saved=[{"bytes": 2, "seconds": 0.2}],
    verdicts=[
        equality.Verdict("losses", True, ""),
        equality.Verdict("final state", False, "1 of 2 leaves differ"),
    ],
    seconds=1.0,
)
