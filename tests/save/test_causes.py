"""A save says why it is large: in its report, in the log and in the page, with the same causes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltacheck import Policy, SaveReport
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.report.data import collect
from tests.support.adam_run import AdamRun

MASTER, FIRST, WEIGHT = "optimizer/state/0/master", "optimizer/state/0/exp_avg", "model/w0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, SaveReport]]:
    """A run that becomes stable, halves its rate, loses a step to a NaN and goes on."""
    root, run, reports = tmp_path_factory.mktemp("causes"), AdamRun(rate=1e-6), {}
    run.advance(60)  # lattices are finer before
    with Engine(root, policy=Policy.auto(derive=False)) as engine:
        for number in range(1, 21):
            if 13 <= number <= 15:  # a schedule, not a jump
                run.rate *= 0.8
            run.advance(10)
            loss = float("nan") if number == 18 else 1.0
            report = engine.save(run.step, run.state(), metrics={"loss": loss}).result()
            assert report is not None
            reports[run.step] = report
    return root, reports


def causes_of(report: SaveReport) -> dict[str, str]:
    return {leaf.path: leaf.cause for leaf in report.leaves}


def test_each_leaf_has_the_cause_of_its_bytes(saved: tuple[Path, dict[int, SaveReport]]) -> None:
    root, reports = saved
    stages = {step.step: step.stage for step in collect(root).steps}
    first = min(reports)
    stable = min(step for step, stage in stages.items() if stage == "stable")
    assert set(causes_of(reports[first]).values()) <= {"keyframe", ""}
    assert causes_of(reports[first])[WEIGHT] == "keyframe"
    assert causes_of(reports[first + 10])[WEIGHT] == "changed"
    assert causes_of(reports[first + 10])[FIRST] == causes_of(reports[first + 10])[MASTER]
    assert causes_of(reports[first + 10])[FIRST] == "changed"
    # The codes that are reused are new at the first stable save.
    assert causes_of(reports[stable])[FIRST] == "refresh"
    assert causes_of(reports[stable + 10])[MASTER] in ("changed", "")
    # Written again in its turn, and reused in between: nothing is written.
    assert {causes_of(reports[step])[FIRST] for step in (stable + 10, stable + 20)} == {
        "refresh",
        "",
    }
    # The rate has fallen by half: another lattice, once.
    assert "lattice" in {causes_of(reports[step])[MASTER] for step in (190, 200, 210)}
    # The event: what had a contract is exact again.
    assert stages[240] == "degraded"
    assert causes_of(reports[240])[MASTER] == "event"
    assert causes_of(reports[240])[FIRST] == "event"
    assert causes_of(reports[240])[WEIGHT] == "changed"
    # And after it, the codes are new.
    assert stages[250] == "warm"
    assert causes_of(reports[250])[MASTER] == "lattice"


def test_the_causes_add_up_to_all_bytes_and_agree(
    saved: tuple[Path, dict[int, SaveReport]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, reports = saved
    assert main(["log", str(root), "--json"]) == 0
    rows = {row["step"]: row for row in json.loads(capsys.readouterr().out)["steps"]}
    for step in collect(root).steps:
        assert sum(step.causes.values()) == step.written_bytes
        assert rows[step.step]["causes"] == dict(step.causes)
        present = {cause for cause, size in step.causes.items() if size}
        assert present - {"rest"} == {cause for cause, size in reports[step.step].causes.items()}
        assert sum(reports[step.step].causes.values()) == sum(
            leaf.encoded_bytes for leaf in reports[step.step].leaves
        )
    assert main(["log", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "event" in next(line for line in lines if line.split()[0] == "240").split("WHY")[-1]


def test_a_resume_writes_codes_anew_and_is_no_event(tmp_path: Path) -> None:
    root, run = tmp_path / "root", AdamRun(rate=1e-6)
    run.advance(60)  # lattices are finer before
    with Engine(root, policy=Policy.auto(derive=False)) as engine:
        for _ in range(12):
            run.advance(10)
            engine.save(run.step, run.state()).result()
    with Engine(root, policy=Policy.auto(derive=False)) as engine:
        engine.restore()
        run.advance(10)
        report = engine.save(run.step, run.state()).result()
    assert report is not None
    assert "event" not in causes_of(report).values()
    assert causes_of(report)[MASTER] == causes_of(report)[FIRST] == "changed"
    assert causes_of(report)[WEIGHT] == "changed"
