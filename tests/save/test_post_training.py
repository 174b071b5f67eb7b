"""From the offline phase to the online one: what a profile finds is what a policy then leaves
out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy, Profile, Profiler
from deltacheck.backends.torch import Engine
from deltacheck.leaf.contracts import Bounded, Reused
from deltacheck.policy.stage import STABLE
from tests.support.adam_run import AdamRun


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Of a run of 250 steps, written and read again."""
    run, profiler = AdamRun(), Profiler(interval_steps=10)
    for _ in range(25):
        run.advance(10)
        profiler.observe(run.step, run.state())
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profiler.write(path)
    return Profile.read(path)


def test_the_stable_set_is_bounded_and_reused_from_its_stable_start_on(
    profile: Profile, tmp_path: Path
) -> None:
    assert profile.stable_start is not None
    run = AdamRun(seed=1)
    stages = {}
    with Engine(tmp_path, policy=Policy.post_training(profile)) as engine:
        for _ in range(20):
            run.advance(10)
            engine.save(run.step, run.state()).result()
            stages[run.step] = deltacheck.open(tmp_path).manifest().stage
    stable = [step for step, stage in stages.items() if stage == STABLE]
    assert stable
    assert min(stable) >= profile.stable_start
    contracts = deltacheck.open(tmp_path).manifest().contracts
    kinds = {path: type(promise.terms) for path, promise in contracts.items()}
    for number in (0, 1):
        assert kinds[f"optimizer/state/{number}/master"] is Bounded
        assert kinds[f"optimizer/state/{number}/exp_avg_sq"] is Reused
    assert not any(path.startswith("model/") for path in contracts)
    np.testing.assert_equal(deltacheck.open(tmp_path).restore()["model"], run.state()["model"])


def test_bounded_weights_are_not_stored_and_stay_close(profile: Profile, tmp_path: Path) -> None:
    run = AdamRun(seed=1)
    with Engine(tmp_path, policy=Policy.post_training(profile, weights="bounded")) as engine:
        for _ in range(20):
            run.advance(10)
            engine.save(run.step, run.state()).result()
    manifest = deltacheck.open(tmp_path).manifest()
    assert "model/w0" not in manifest.leaves
    assert manifest.contracts["model/w0"].terms == Bounded(0.02, "l2")
    found, live = deltacheck.open(tmp_path).restore()["model"]["w0"], run.state()["model"]["w0"]
    error = np.linalg.norm(found.astype(float) - live.astype(float)) / np.linalg.norm(
        live.astype(float)
    )
    assert 0 < error == pytest.approx(manifest.contracts["model/w0"].measured)


def test_a_profile_without_a_stable_start_gives_an_exact_policy() -> None:
    run, profiler = AdamRun(), Profiler(interval_steps=10)
    for _ in range(4):
        run.advance(10)
        profiler.observe(run.step, run.state())
    assert profiler.profile().stable_start is None
    assert Policy.post_training(profiler.profile()).hidden is None
