"""Overlapped restores: the weights first, the optimizer during the first forward and backward.

The second stage is held back here until a test lets it go on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import deltacheck
from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.group.arrival import Arrival
from deltacheck.backends.torch.group.two_stages import TwoStages
from tests.support.forked import forked
from tests.support.states import assert_same
from tests.support.waiting import open_when_called

MOMENT = "optimizer/state/0/exp_avg"
SIZE = 260  # large enough for a file of its own


class Run(NamedTuple):
    """A training with a model, an optimizer and a schedule."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler

    @classmethod
    def new(cls, seed: int = 0) -> Run:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.BatchNorm1d(SIZE))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return cls(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer))

    def gradients(self, seed: int) -> None:
        self.optimizer.zero_grad()
        batch = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed))
        self.model(batch).square().sum().backward()

    def train(self, seed: int) -> None:
        self.gradients(seed)
        self.optimizer.step()
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        return {**self.target(), "optimizer": self.optimizer.state_dict()}

    def target(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer,
            "schedule": self.schedule.state_dict(),
        }

    @property
    def moment(self) -> torch.Tensor:
        moment: torch.Tensor = self.optimizer.state[next(self.model.parameters())]["exp_avg"]
        return moment


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A root with two steps, and the run after them."""
    root, run = tmp_path_factory.mktemp("overlapped") / "run", Run.new()
    with Engine(root) as engine:
        for step in range(2):
            run.train(step)
            engine.save(step, run.state()).wait()
    return root, run


@pytest.fixture
def root(saved: tuple[Path, Run], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "run"))


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Hold the second stage back until the event is set."""
    go, second = threading.Event(), TwoStages.second

    def late(self: TwoStages) -> None:
        assert go.wait(240)
        second(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TwoStages, "second", late)
        yield go
        go.set()


@pytest.fixture
def slow_source() -> Iterator[threading.Event]:
    """Holds the second stage back until the event is set."""
    with held_back() as go:
        yield go


@pytest.mark.parametrize("is_used", [False, True], ids=["new optimizer", "used optimizer"])
def test_training_begins_with_the_weights_and_its_step_waits_for_the_optimizer(
    is_used: bool,
    saved: tuple[Path, Run],
    root: Path,
    slow_source: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, run = Run.new(), Run.new(seed=1)
    for step in range(2):
        expected.train(step)
    if is_used:
        run.train(5)
    with Engine(root) as engine:
        handle = engine.restore(into=run.target(), overlap=True)
        assert (handle.step, engine.restored_step, handle.done()) == (1, 1, False)
        assert handle.state["optimizer"] is run.optimizer
        assert_same(run.model.state_dict(), expected.model.state_dict())
        assert run.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]
        run.schedule.load_state_dict(handle.state["schedule"])
        assert not torch.equal(run.moment, saved[1].moment)
        with pytest.raises(TimeoutError, match="step 1 is not restored yet"):
            handle.wait(timeout=0.01)
        run.gradients(2)
        assert not handle.done()
        open_when_called(monkeypatch, Arrival, "join", slow_source)
        run.optimizer.step()
        assert slow_source.is_set()
        assert handle.done()
        run.schedule.step()
        expected.train(2)
        assert_same(run.state(), expected.state())
        # The save goes on from the chains of the restored step.
        engine.save(2, run.state()).wait()
        assert len(deltacheck.open(root).manifest(2).segments) == 3
        assert_same(engine.restore(2), expected.state())


USES: dict[str, Callable[[Engine, Run, Any], object]] = {
    "save": lambda engine, run, handle: engine.save(2, run.model.state_dict()),
    "wait": lambda engine, run, handle: engine.wait(),
    "persist": lambda engine, run, handle: engine.persist(),
    "before_update": lambda engine, run, handle: engine.before_update(),
    "delete": lambda engine, run, handle: engine.delete(0),
    "restore": lambda engine, run, handle: engine.restore(),
    "handle": lambda engine, run, handle: handle.wait(),
    "state_dict": lambda engine, run, handle: run.optimizer.state_dict(),
    "load_state_dict": lambda engine, run, handle: run.optimizer.load_state_dict(
        {"state": {}, "param_groups": run.optimizer.param_groups}
    ),
    "close": lambda engine, run, handle: engine.close(),
}


@pytest.mark.parametrize("use", USES)
def test_every_other_use_waits(
    use: str, root: Path, slow_source: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.new()
    with Engine(root) as engine:
        handle = engine.restore(into=run.target(), overlap=True)
        open_when_called(monkeypatch, Arrival, "join", slow_source)
        USES[use](engine, run, handle)
        assert slow_source.is_set()
        assert handle.done()


def test_no_optimizer_steps_with_a_damaged_state(root: Path) -> None:
    run = Run.new(seed=1)
    run.train(5)
    damage(root)
    with Engine(root) as engine:
        handle = engine.restore(into=run.target(), overlap=True)
        run.gradients(2)
        before = run.model.state_dict()["0.weight"].clone(), run.moment.clone()
        for use in ("step", "step", "state_dict", "save", "handle"):
            with pytest.raises(errors.Damaged, match=rf"step 1 .*{MOMENT}.*No other step restores"):
                run.optimizer.step() if use == "step" else USES[use](engine, run, handle)
        assert torch.equal(before[0], run.model.state_dict()["0.weight"])
        assert torch.equal(before[1], run.moment)
    # The optimizer is still incomplete after the end of the engine.
    with pytest.raises(errors.Damaged):
        run.optimizer.step()
    run.optimizer.load_state_dict(Run.new().optimizer.state_dict())
    run.optimizer.step()


def test_a_failure_that_nobody_has_seen_is_raised_by_close_and_ended_by_a_restore(
    root: Path,
) -> None:
    run, other = Run.new(), Run.new()
    damage(root)
    engine = Engine(root)
    engine.restore(into=run.target(), overlap=True)
    with pytest.raises(errors.Damaged):
        engine.close()
    with Engine(root.with_name("other")) as engine:
        other.train(0)
        engine.save(0, other.state()).wait()
        engine.restore(into=run.target(), overlap=True).wait()
        assert_same(run.optimizer.state_dict(), other.optimizer.state_dict())


def fork_during_restores(root: Path, go: threading.Event) -> None:
    """Kill and fork processes while the second stage is held back."""
    run = Run.new()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def step() -> str:
        run.gradients(2)
        with pytest.raises(errors.SaveFailed, match=r"incomplete here\. Wait for the restore"):
            run.optimizer.step()
        return "refused"

    with Engine(root) as engine:
        engine.restore(into=run.target(), overlap=True)
        assert forked(die) == {"killed": signal.SIGKILL}
        assert forked(step) == "refused"
        go.set()

    def restore_and_die() -> None:
        go.clear()
        Engine(root).restore(into=Run.new().target(), overlap=True)
        die()

    assert forked(restore_and_die) == {"killed": signal.SIGKILL}


# Forks need a process without the threads of other tests, such as those of JAX.
FORKING = """
import sys
from pathlib import Path
from tests.backends.torch import test_overlapped_restore as tests

with tests.held_back() as go:
    tests.fork_during_restores(Path(sys.argv[1]), go)
"""


def test_a_process_that_ends_or_is_forked_meanwhile_does_no_harm(
    saved: tuple[Path, Run], root: Path
) -> None:
    program = [sys.executable, "-c", FORKING, str(root)]
    subprocess.run(program, timeout=240, check=True, cwd=Path(__file__).parents[3])
    with Engine(root) as engine:
        assert engine.steps() == [0, 1]
        assert_same(engine.restore(), saved[1].state())


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        (Policy.exact(derive=True), {"model/w": "cast"}),
        (
            Policy.auto(derive=False, moments="exact", stable_from=0),
            {"optimizer/state/0/master": "lattice"},
        ),
    ],
    ids=["weights from masters", "masters from weights"],
)
def test_leaves_that_follow_from_others_come_after_them(
    policy: Policy, how: dict[str, str], tmp_path: Path, slow_source: threading.Event
) -> None:
    def make() -> tuple[torch.nn.Parameter, MixedPrecisionAdamW]:
        weight = torch.nn.Parameter(torch.randn(96, 80).mul(0.02).bfloat16())
        return weight, MixedPrecisionAdamW([weight], lr=1e-6, betas=(0.9, 0.999), weight_decay=0.0)

    torch.manual_seed(0)
    weight, optimizer = make()
    # Masters of a run lie between the values that the weights can have.
    optimizer.state[weight]["master"].add_(torch.randn(96, 80), alpha=1e-5)
    scale = torch.randn(96, 80).exp() * 1e-3
    with Engine(tmp_path, policy=policy) as engine:
        for step in range(6):
            for _ in range(5 if step else 100):
                weight.grad = (scale * (torch.randn(96, 80) + 0.1)).bfloat16()
                optimizer.step()
            state = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
            engine.save(step, state).wait()
    manifest = deltacheck.open(tmp_path).manifest()
    assert {path: leaf.how for path, leaf in manifest.derived.items()} == how
    weight, optimizer = make()
    with Engine(tmp_path) as engine:
        expected = engine.restore()
        target = {"model": {"w": weight.detach()}, "optimizer": optimizer}
        version = weight._version
        handle = engine.restore(into=target, overlap=True)
        assert weight._version > version
        assert_same(weight.detach(), expected["model"]["w"])
        early = {
            name
            for name, value in optimizer.state[weight].items()
            if torch.equal(value, expected["optimizer"]["state"][0][name])
        }
        assert early == ({"master"} if "model/w" in how else set())
        slow_source.set()
        handle.wait()
        assert_same(optimizer.state_dict(), expected["optimizer"])


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {}, "needs `into` with a torch optimizer"),
        ({}, {"into": {"optimizer": object()}}, "needs `into` with a torch optimizer"),
        ({}, {"fallback": True}, "fallback"),
        ({"memory": "memory"}, {}, "memory and overlap=True"),
        ({"process_group": "group"}, {}, "process_group and overlap=True"),
    ],
    ids=["no target", "no torch optimizer", "fallback", "memory", "process group"],
)
def test_what_cannot_overlap_is_refused_by_name(
    options: dict[str, Any],
    arguments: dict[str, Any],
    message: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if "process_group" in options:
        options = {"process_group": request.getfixturevalue("one_rank")}
    if "memory" in options:
        options = {"memory": tmp_path / "memory"}
    run = Run.new()
    run.train(0)
    if message != "needs `into` with a torch optimizer":
        arguments = {"into": run.target(), **arguments}
    with Engine(tmp_path / "run", **options) as engine:
        engine.save(0, run.state()).wait()
        before = run.moment.clone()
        with pytest.raises(ValueError, match=message):
            engine.restore(overlap=True, **arguments)
        assert torch.equal(run.moment, before)


def test_an_optimizer_of_another_form_is_refused_before_anything_changes(root: Path) -> None:
    run = Run.new(seed=1)
    weight = run.model.state_dict()["0.weight"].clone()
    groups = [{"params": [parameter]} for parameter in run.model.parameters()]
    other = {**run.target(), "optimizer": torch.optim.AdamW(groups)}
    with Engine(root) as engine:
        with pytest.raises(errors.TreeMismatch, match=r"groups of \[1, 1, 1, 1\] parameters"):
            engine.restore(into=other, overlap=True)
        with pytest.raises(errors.BudgetExceeded):
            engine.restore(into=run.target(), overlap=True, max_bytes=500_000)
    assert not run.optimizer.state
    assert torch.equal(weight, run.model.state_dict()["0.weight"])


def damage(root: Path) -> None:
    """Damage a moment in both steps."""
    (path,) = root.glob("segments/*/leaves/optimizer.state.0.exp_avg/c.0.0")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
