"""FSDP2 ranks that save under a lossy policy, are killed, and resume on other numbers of ranks.

Each step that exists is judged by ``tests.support.promises``, which knows only the live states and
the manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import deltacheck
from tests.ranks import policy_jobs
from tests.ranks.launch import launch
from tests.support.promises import broken


@pytest.mark.timeout(600)
def test_killed_fsdp_ranks_resume_from_steps_that_keep_their_promises(tmp_path: Path) -> None:
    root = tmp_path / "run"
    live: dict[int, Any] = {}
    # Killed with two ranks twice, then four, then one: each goes on from where the others were.
    plan = ((2, 7, "durable"), (2, 6, "capture"), (4, 5, ""), (1, 5, ""))
    for size, saves, killed_at in plan:
        before = deltacheck.open(root).restore() if live else None
        ranks = launch(
            policy_jobs.train, size, root, saves, killed_at, lost={1} if killed_at else set()
        )
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
        live |= states
        for step in states:
            manifest = run.manifest(step)
            assert broken(states[step], run.restore(step), manifest, live.__getitem__, 1e-5) == []
    assert set(live) == set(run.steps())
    assert run.manifest().contract == "reused"
    assert run.verify(deep=True) == []
