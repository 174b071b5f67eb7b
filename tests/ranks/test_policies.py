"""Ranks that save under a lossy policy, are killed, and resume on other numbers of ranks.

Each step that exists is judged by ``tests.support.promises``, which knows only the live states and
the manifest.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import deltacheck
from tests.ranks import policy_jobs, policy_zero
from tests.ranks.launch import launch
from tests.support.promises import broken


@pytest.mark.parametrize("through", ["engine", "profile", "dcp"])
@pytest.mark.timeout(600)
def test_killed_fsdp_ranks_resume_from_steps_that_keep_their_promises(
    tmp_path: Path, through: str
) -> None:
    root = tmp_path / "run"
    live: dict[int, Any] = {}
    # Killed with two ranks twice, then four, then one: each goes on from where the others were.
    plan = [(2, 7, "durable"), (2, 6, "capture"), (4, 5, ""), (1, 5, "")]
    if through == "profile":
        plan = [(4, 7, "durable"), (2, 6, "capture"), (1, 5, "")]
    elif through == "dcp":
        # DCP captures and commits with the same code, so that one kill is enough.
        plan = [(2, 7, "durable"), (4, 6, ""), (1, 5, "")]
    for size, saves, killed_at in plan:
        before = deltacheck.open(root).restore() if live else None
        lost = {1} if killed_at else set()
        ranks = launch(policy_jobs.train, size, root, saves, killed_at, through, lost=lost)
        states = ranks[0]
        if before is not None:
            restored = states.pop(-1)
            assert all(policy_jobs.equal(r.get(-1, restored), restored) for r in ranks if r)
            assert policy_jobs.equal(restored["optimizer"]["state"], before["optimizer"]["state"])
            assert policy_jobs.equal(restored["model"], before["model"])
        run = deltacheck.open(root)
        if killed_at:  # the step of the killed save does not exist
            assert max(states) not in run.steps()
            assert run.manifest().contract == "reused"
            states.pop(max(states))
        elif through == "dcp" and size == 4:
            # One rank has seen a NaN, and no rank lets anything err.
            assert math.isnan(float(run.manifest(max(states)).metrics["loss"]))
            assert run.manifest(max(states)).contract == "exact"
            assert run.manifest(sorted(states)[-2]).contract != "exact"
        live |= states
        for step in states:
            manifest = run.manifest(step)
            state, copy = states[step], run.restore(step)
            if through == "dcp":  # which pickles all that is not a tensor
                state, copy = policy_jobs.tensors(state), policy_jobs.tensors(copy)
            assert broken(state, copy, manifest, live.__getitem__, 1e-5) == []
    assert set(live) == set(run.steps())
    promises = run.manifest().contracts.values()
    assert {type(promise.terms).__name__ for promise in promises} == {"Bounded", "Reused"}
    assert run.verify(deep=True) == []


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
@pytest.mark.timeout(600)
def test_killed_deepspeed_ranks_resume_from_steps_that_keep_their_promises(tmp_path: Path) -> None:
    live: dict[int, dict[int, Any]] = {stage: {} for stage in policy_zero.STAGES}
    for size, saves, is_killed in ((2, 7, True), (1, 5, False)):
        ranks = launch(
            policy_zero.train, size, tmp_path, saves, is_killed, lost={1} if is_killed else set()
        )
        states = ranks[0]
        for stage in policy_zero.STAGES:
            run, of_stage = deltacheck.open(tmp_path / str(stage) / "deltacheck"), states[stage]
            before = live[stage]
            if before:
                loaded = of_stage.pop(-1)
                restored = policy_zero.restored_leaves(run, max(before), loaded)
                # Under ZeRO 3 the model rounds its weights from the masters.
                assert policy_jobs.equal(restored, loaded)
                # The chains of the leaves continue where ranks have what others had.
                assert size > 1 or len(run.manifest(min(of_stage)).segments) > size
            if is_killed and stage == policy_zero.STAGES[-1]:
                del of_stage[max(of_stage)]  # the step of the killed save does not exist
            before |= of_stage
            assert set(before) == set(run.steps())
            for step, state in of_stage.items():
                manifest = run.manifest(step)
                assert manifest.contracts.keys() <= state.keys()
                restored = policy_zero.restored_leaves(run, step, state)
                problems = broken(
                    state,
                    restored,
                    manifest,
                    before.__getitem__,
                    1e-5,
                    policy_zero.weight_of,
                    count=step,
                )
                assert problems == []
            promises = run.manifest().contracts.values()
            assert {type(promise.terms).__name__ for promise in promises} == {"Bounded", "Reused"}
            assert run.verify(deep=True) == []
