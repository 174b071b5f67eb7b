"""A plan for a policy against what the same run writes later, on the workloads of the package."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from benchmarks.workloads import builtin
from deltacheck import Policy, Profile
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.evaluate.offline.measured import thinned
from deltacheck.evaluate.offline.policy_replay import steady_steps
from deltacheck.evaluate.workload import FOLDER
from deltacheck.policy.stage import stable_start
from deltacheck.report.data import collect

pytestmark = pytest.mark.tools

SPEEDS = [f"--speed={name}=1e9" for name in ("write", "read", "encode", "apply", "copy")]
EVERY, PLANNED_AT, STEPS = 5, 160, 240
POLICIES = {"exact": Policy.exact(), "auto": Policy.auto()}


@pytest.fixture(scope="module", params=["tiny_sft", "tiny_rl_like"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is saved under two policies, and exactly until the plan is made."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        workload = getattr(builtin, request.param)(1)
    engines = {name: Engine(folder / name, policy=policy) for name, policy in POLICIES.items()}
    with Engine(folder / "before", policy=Policy.exact()) as before:
        for step in range(1, STEPS + 1):
            workload.step()
            if step % EVERY:
                continue
            targets = [*engines.values(), *([before] if step <= PLANNED_AT else [])]
            for engine in targets:
                engine.save(step, workload.state()).wait()
    for engine in engines.values():
        engine.close()
    return folder


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *words, *SPEEDS, "--step-seconds", "1", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_is_within_a_third_of_the_later_saves_of_its_policy(
    policy: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(capsys, str(run / "before"), "--policy", policy, "--interval-steps", str(EVERY))
    steady = steady_steps(collect(run / policy).steps)
    later = [step.written_bytes for step in steady if step.step > PLANNED_AT]
    assert len(later) >= 10
    assert plan["policy"] == policy
    assert fmean(later) / 1.3 <= plan["ways"][0]["bytes"] <= fmean(later) * 1.3


def test_profile_plan_and_log_name_one_stable_start(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(run / "before"), "-o", str(tmp_path / "profile.json")]) == 0
    plan = planned(capsys, str(run / "before"), "--policy", "auto", "--interval-steps", str(EVERY))
    assert main(["log", str(run / "auto"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    start = stable_start((row["step"], row["stage"]) for row in rows)
    assert start is not None
    assert plan["policies"][0]["stable_from"] == start
    profile = Profile.read(tmp_path / "profile.json")
    assert profile.stable_start == pytest.approx(start, abs=EVERY)


def test_auto_uses_the_profile_that_is_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, file = str(run / "before"), tmp_path / "profile.json"
    assert main(["profile", root, "-o", str(file)]) == 0
    early = msgspec.structs.replace(Profile.read(file), stable_start=EVERY, confidence=1.0)
    early.write(file)
    words = ["--policy", "auto", "--interval-steps", str(EVERY)]
    (without,), (given,) = (
        planned(capsys, root, *words, *profile)["policies"]
        for profile in ([], ["--profile", str(file)])
    )
    assert given["stable_from"] < without["stable_from"]


def test_another_interval_is_measured_on_every_second_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run / "before"), "--policy", "exact", "--interval-steps"]
    assert planned(capsys, *words, str(2 * EVERY))["observed_interval_steps"] == 2 * EVERY
    # Too few would be left: the bytes are an extrapolation, and the plan says so.
    assert planned(capsys, *words, str(8 * EVERY))["observed_interval_steps"] == EVERY


def test_a_run_that_was_never_stable_is_not_planned_for_a_lossy_policy(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path / "young") as engine:
        for step in range(3):
            engine.save(step, {"w": torch.full((64, 64), float(step))}).wait()
    words = [str(tmp_path / "young"), "--policy", "auto", "--step-seconds", "1"]
    assert main(["plan", *words, *SPEEDS]) == 3
    assert "steady at none of the 3 checkpoints" in capsys.readouterr().err


def test_checkpoints_are_thinned_only_to_whole_multiples() -> None:
    steps = list(range(10, 310, 10))
    assert thinned(steps, None) is None
    assert thinned(steps, 10) is None
    assert thinned(steps, 15) is None
    assert thinned(steps, 20) == set(range(10, 310, 20))
    assert thinned(steps, 100) is None
