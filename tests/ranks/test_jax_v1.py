"""Orbax's v1 interface in two and four processes of two devices each."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import deltacheck
from tests.ranks import jax_v1_jobs
from tests.ranks.launch import launch
from tests.support.adam_run import AdamRun
from tests.support.promises import broken
from tests.support.xla import UNOPTIMIZED


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each process that a test starts. This one's devices start before, with its own flags."""
    jax.devices()
    flags = f"--xla_force_host_platform_device_count=2 {UNOPTIMIZED}"
    monkeypatch.setenv("XLA_FLAGS", flags)


@pytest.mark.timeout(600)
def test_a_run_of_two_killed_processes_resumes_in_four_under_every_policy(tmp_path: Path) -> None:
    launch(jax_v1_jobs.train, 2, str(tmp_path), 2, True, lost={0, 1}, seconds=250)
    resumed = launch(jax_v1_jobs.train, 4, str(tmp_path), 6, False, seconds=250)
    assert resumed == [resumed[0]] * 4
    live, run = {}, AdamRun()
    run.advance(jax_v1_jobs.FIRST)
    for _ in range(8):
        run.advance(jax_v1_jobs.EVERY)
        live[run.step] = run.state()
    for name, last in zip(jax_v1_jobs.POLICIES, resumed[0], strict=True):
        root = deltacheck.open(tmp_path / name)
        # The kill came behind the beginning of the last save of "exact", which it may have missed.
        assert last == 120 or (name, last) == ("exact", 110)
        assert root.steps() == [step for step in live if step <= last + 60]
        for step in root.steps():
            restored, manifest = root.restore(step), root.manifest(step)
            assert broken(live[step], restored, manifest, live.__getitem__, 1e-5) == []
        kinds = {type(promise.terms).__name__ for promise in root.manifest().contracts.values()}
        is_exact = name in ("derive", "exact")
        assert kinds == (set() if is_exact else {"Bounded", "Reused"})
        assert root.verify(deep=True) == []


def test_a_failure_of_one_process_is_raised_in_all_and_the_next_save_goes_well(
    tmp_path: Path,
) -> None:
    for messages in launch(jax_v1_jobs.fail_in_one, 2, str(tmp_path / "root")):
        assert "no space left" in messages["disk"]
        assert "leaf 'host', a NumPy array, is another on process 1" in messages["array"]
    root = deltacheck.open(tmp_path / "root")
    assert root.steps() == [0, 3, 4]
    assert root.restore(4)["arrays"]["rows"].dtype == "bfloat16"
    assert root.verify(deep=True) == []


def test_all_processes_save_the_same_step_if_one_of_them_is_about_to_be_taken_away(
    tmp_path: Path,
) -> None:
    step, other = launch(jax_v1_jobs.train_until_preempted, 2, str(tmp_path))
    assert step == other > 3
    for name, steps in (("v0", [0, step]), ("v1", [step])):
        root = deltacheck.open(tmp_path / name)
        assert root.steps() == steps
        restored = root.restore(step)
        assert restored["step"] == step
        assert (restored["w"] == step).all()
