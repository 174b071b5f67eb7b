"""Trials of restored states: the sensitivity of a profile."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

import deltacheck
from deltacheck import Policy, Profile
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from tests.support import eval_workload

pytestmark = pytest.mark.tools

FACTORY = "tests.support.eval_workload"
MASTER = "optimizer/state/0/master"
MOMENTS = {"optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded checkpoints of a run that has become stable."""
    root, workload = tmp_path_factory.mktemp("trials") / "run", eval_workload.adam(1)
    with Engine(root) as engine:
        for step in range(1, 101):
            workload.step()
            if step % 5 == 0:
                engine.save(step, workload.state()).wait()
    return root


def test_a_profile_holds_the_harm_of_each_class(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    words = ["profile", str(run), "-o", str(file), "--sensitivity", f"{FACTORY}:adam"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["sensitivity"]
    trials = {trial.name: trial for trial in Profile.read(file).sensitivity}
    assert {trial["name"] for trial in shown} == trials.keys() == {"masters", "moments"}
    assert set(trials["masters"].leaves) == {MASTER}
    assert set(trials["moments"].leaves) == MOMENTS
    for trial in trials.values():
        assert trial.trial_steps == 10
        assert trial.noise_sd > 0
        assert trial.law_violations == 0
        assert trial.accepted == (not trial.reasons)
    assert 0 < trials["masters"].element_change <= 50


def test_post_training_keeps_a_rejected_class_exact(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    assert main(["profile", str(run), "-o", str(file), "--sensitivity", f"{FACTORY}:adam"]) == 0
    profile = Profile.read(file)

    def saved(**accepted: bool) -> set[str]:
        judged = tuple(
            msgspec.structs.replace(trial, accepted=accepted[trial.name])
            for trial in profile.sensitivity
        )
        known = msgspec.structs.replace(profile, sensitivity=judged)
        root, workload = tmp_path / str(accepted), eval_workload.adam(2)
        with Engine(root, policy=Policy.auto(known)) as engine:
            for step in range(1, 101):
                workload.step()
                if step % 5 == 0:
                    engine.save(step, workload.state()).wait()
        return set(deltacheck.open(root).manifest().contracts)

    assert saved(masters=True, moments=True) == {MASTER} | MOMENTS
    assert saved(masters=False, moments=True) == MOMENTS
    assert saved(masters=True, moments=False) == {MASTER}


def test_a_run_without_other_data_has_no_noise(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(eval_workload.Adam, "reorder")
    words = ["profile", str(run), "-o", str(tmp_path / "profile.json")]
    assert main([*words, "--sensitivity", f"{FACTORY}:adam"]) == 2
    assert "has no method reorder(seed)" in capsys.readouterr().err
