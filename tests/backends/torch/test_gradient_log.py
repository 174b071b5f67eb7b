"""The gradient log: whatever it stores of a step, a restore gives the state as it was, bit for bit,
or says why it cannot.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import deltacheck
from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from deltacheck import Keep, Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine, GradientLog
from deltacheck.cli import main
from deltacheck.leaf.spec import LeafKind
from deltacheck.maintain.compaction import compact
from deltacheck.restore import replay
from deltacheck.restore.replay import LogSituation, ReplayLimits
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store import documents
from deltacheck.store.documents import encode_manifest
from deltacheck.store.manifest import ReplayStep, SegmentTable
from deltacheck.store.roots.opening import open_root
from tests.support.states import assert_same, bits


class Run:
    """A small training: two parameter groups, a frozen weight, one that never has a gradient, a
    buffer, a schedule, clipping.
    """

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.ModuleDict(
            {
                "first": torch.nn.Linear(48, 160),
                "second": torch.nn.Linear(160, 8),
                "unused": torch.nn.Linear(4, 4),
            }
        ).to(dtype)
        self.model["first"].bias.requires_grad_(False)
        self.model.register_buffer("seen", torch.zeros(5))
        self.optimizer = make(
            [
                {"params": list(self.model["first"].parameters())},
                {
                    "params": [
                        *self.model["second"].parameters(),
                        *self.model["unused"].parameters(),
                    ],
                    "weight_decay": 0.0,
                },
            ]
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.step = 0
        self.saved: dict[int, Any] = {}

    def backward(self) -> None:
        x = torch.randn(16, 48).to(self.model["first"].weight.dtype)
        loss = self.model["second"](torch.tanh(self.model["first"](x))).float().square().mean()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 0.01)

    def train_step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.model.seen += 1
        self.step += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {
                "last_epoch": self.scheduler.last_epoch,
                "last_lr": self.scheduler.get_last_lr(),
            },
            "rng": torch.get_rng_state(),
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.last_epoch = state["scheduler"]["last_epoch"]
        torch.set_rng_state(state["rng"])
        self.step = state["step"]

    def save(self, log: GradientLog) -> Any:
        self.saved[self.step] = copy.deepcopy(self.state())
        return log.save(self.step, self.state())

    def train_and_save(self, log: GradientLog, steps: int) -> list[Any]:
        """The reports of ``steps`` saves, one after each training step."""
        reports = []
        for _ in range(steps):
            self.train_step()
            reports.append(self.save(log).result(240))
        return reports


def adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, **options)


class Shrinking(torch.optim.Optimizer):
    """Changes the gradients that it is given."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad.mul_(group["lr"]))


class Derived(torch.optim.AdamW):
    """Its step is a step of its base class and more."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.mul_(0.999)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], torch.dtype]] = {
    "AdamW foreach": (lambda groups: adamw(groups, foreach=True), torch.float32),
    "AdamW for-loop": (lambda groups: adamw(groups, foreach=False), torch.float32),
    "AdamW fused": (lambda groups: adamw(groups, fused=True), torch.float32),
    "AdamW of bfloat16": (lambda groups: adamw(groups, amsgrad=True), torch.bfloat16),
    "SGD": (
        lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
        torch.float32,
    ),
    "one that calls that of its base": (lambda groups: Derived(groups, lr=1e-2), torch.float32),
    "one that changes its gradients": (Shrinking, torch.float32),
    "MixedPrecisionAdamW": (lambda groups: MixedPrecisionAdamW(groups, lr=1e-3), torch.bfloat16),
}


@pytest.fixture
def run() -> Run:
    return Run(*OPTIMIZERS["MixedPrecisionAdamW"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_logged_step_is_restored_bit_for_bit_by_a_fresh_optimizer(
    name: str, tmp_path: Path
) -> None:
    run = Run(*OPTIMIZERS[name])
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        reports = run.train_and_save(log, 6)
    assert [report.replayed_steps for report in reports] == [0, 1, 2, 3, 4, 5]
    with Engine(tmp_path) as engine:
        for step in (6, 1, 4, 2, 5, 3):
            assert_same(
                run.saved[step], engine.restore(step, optimizer=Run(*OPTIMIZERS[name]).optimizer)
            )


def test_a_logged_step_stores_gradients_and_nothing_of_what_the_optimizer_owns(
    run: Run, tmp_path: Path
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        report = run.train_and_save(log, 3)[-1]
    kinds = {leaf.path: leaf.kind for leaf in report.leaves}
    assert kinds.pop("rng") is kinds.pop("model/seen") is LeafKind.DELTA
    gradients = {path for path in kinds if path.startswith("%gradient/1/")}
    assert {path for path, kind in kinds.items() if kind is not LeafKind.UNCHANGED} == gradients
    assert len(gradients) == 3  # a frozen bias and two unused weights have none
    assert report.raw_bytes == sum(
        leaf.raw_bytes for leaf in report.leaves if not leaf.path.startswith("%")
    )


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 4)
    for _ in range(5):
        run.train_step()
    resumed = Run(*OPTIMIZERS["MixedPrecisionAdamW"])
    with Engine(tmp_path) as engine, GradientLog(engine, resumed.optimizer) as log:
        resumed.load(log.restore())
        reports = resumed.train_and_save(log, 5)
        assert_same(run.state(), resumed.state())
        for step, state in resumed.saved.items():
            assert_same(state, log.restore(step))
    assert [report.replayed_steps for report in reports] == [0, 1, 2, 3, 4]
    assert "no checkpoint of this log yet" in reports[0].note


def test_a_logged_step_fills_the_state_at_hand_in_place(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 3)
        weight = run.model["first"].weight
        before = weight.data_ptr()
        run.train_step()
        log.restore(2, into=run.state())
        assert weight.data_ptr() == before
        assert bits(weight) == bits(run.saved[2]["model"]["first.weight"])
        assert_same(
            run.saved[3], engine.restore(3, optimizer=run.optimizer)
        )  # the base of the first restore was left as it is


def test_several_updates_between_two_saves_are_all_replayed(run: Run, tmp_path: Path) -> None:
    with (
        Engine(tmp_path) as engine,
        GradientLog(engine, run.optimizer, max_steps_per_save=3) as log,
    ):
        for steps, replayed in ((1, 0), (3, 3), (2, 5), (4, 0), (1, 1)):
            for _ in range(steps):
                run.train_step()
            if steps > 3:
                assert not any(update.inputs for update in log._book._base.fresh)  # type: ignore[union-attr]  # nobody will need them
            report = run.save(log).result(240)
            assert report.replayed_steps == replayed
            assert ("max_steps_per_save=3" in report.note) == (steps == 4)
        for step, state in run.saved.items():
            assert_same(state, log.restore(step))


def test_the_state_itself_is_stored_often_enough(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer, max_replay_steps=2) as log:
        reports = run.train_and_save(log, 7)
    assert [report.replayed_steps for report in reports] == [0, 1, 2, 0, 1, 2, 0]
    assert "max_replay_steps=2" in reports[3].note
    with Engine(tmp_path) as engine:
        for step, state in run.saved.items():
            assert_same(state, engine.restore(step, optimizer=run.optimizer))


def test_a_weight_that_somebody_else_wrote_to_is_stored_itself(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)
        run.train_step()
        with torch.no_grad():
            run.model["second"].weight[0, 0] += 0.5
        report = run.save(log).result(240)
        assert report.replayed_steps == 0
        assert "'model/second.weight'" in report.note
        assert run.train_and_save(log, 1)[0].replayed_steps == 1
        for step, state in run.saved.items():
            assert_same(state, log.restore(step))


def test_a_log_gives_up_after_three_saves_that_it_could_not_replay(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        for _ in range(6):
            run.train_step()
            with torch.no_grad():
                run.model["second"].weight.mul_(0.5)
            report = run.save(log).result(240)
        assert "the last 3 replays" in report.note
        assert len([record for record in caplog.records if "gives up" in record.message]) == 1
        assert_same(run.saved[6], log.restore())


def sparse_gradient(run: Run) -> None:
    run.optimizer.param_groups[1]["momentum"] = 0.0  # a momentum would be sparse too
    run.model["unused"].weight.grad = torch.ones(4, 4).bfloat16().to_sparse()


Spoil = Callable[[Run], object]
SPOILERS: dict[str, tuple[Spoil, str]] = {
    "a closure": (lambda run: run.optimizer.step(lambda: 0.0), "closure"),
    "an option that is a tensor": (
        lambda run: run.optimizer.param_groups[0].update(lr=torch.tensor(1e-3)),
        "option '0/lr'",
    ),
    "a sparse gradient": (lambda run: sparse_gradient(run), "not a dense array"),
    "an attribute of the optimizer": (
        lambda run: setattr(run.optimizer, "warmth", 3),
        "attributes that change",
    ),
    "a new parameter": (
        lambda run: run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
        "other arrays",
    ),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_what_cannot_be_logged_exactly_is_stored_itself(name: str, tmp_path: Path) -> None:
    spoil, note = SPOILERS[name]
    run = Run(lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.5), torch.bfloat16)
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)
        run.backward()
        spoil(run)
        run.optimizer.step()
        report = log.save(3, run.state()).result(240)
        assert report.replayed_steps == 0
        assert note in report.note
        assert_same(run.state(), log.restore(3))


def test_where_there_is_no_memory_for_a_replica_the_state_itself_is_stored(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.backends.torch.state import replica

    def full(*arguments: object) -> object:
        raise torch.OutOfMemoryError("not enough memory")

    monkeypatch.setattr(replica, "OptimizerReplica", full)
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        assert [report.replayed_steps for report in run.train_and_save(log, 3)] == [0, 0, 0]
        assert_same(run.saved[3], log.restore())


def test_a_step_that_raised_does_not_end_the_log(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "_foreach_sqrt", lambda *_: 1 / 0)
            run.backward()
            with pytest.raises(ZeroDivisionError):
                run.optimizer.step()
        assert [report.replayed_steps for report in run.train_and_save(log, 3)] == [0, 1, 2]
        for step, state in run.saved.items():
            assert_same(state, log.restore(step))


@pytest.mark.parametrize(
    "options",
    [{"max_pending": 3}, {"shadow": "none"}, {"capture": "eager", "host_cache_bytes": 4096}],
    ids=str,
)
def test_saves_that_nobody_waits_for_are_all_restored(
    options: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    with (
        Engine(tmp_path, options=SaveOptions(**options)) as engine,
        GradientLog(engine, run.optimizer, max_replay_steps=3) as log,
    ):
        handles = []
        for _ in range(9):
            run.train_step()
            handles.append(run.save(log))
        assert [handle.result(240).replayed_steps for handle in handles] == [
            0,
            1,
            2,
            3,
            0,
            1,
            2,
            3,
            0,
        ]
        for step, state in run.saved.items():
            assert_same(state, log.restore(step))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_save_of_the_engine_itself_between_is_no_harm(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)
        run.train_step()
        engine.save(3, run.state())
        run.saved[3] = copy.deepcopy(run.state())
        assert [report.replayed_steps for report in run.train_and_save(log, 2)] == [0, 1]
        for step, state in run.saved.items():
            assert_same(state, log.restore(step))


def test_gradients_of_a_skipped_save_are_in_the_next(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.save.job import save_job

    go = threading.Event()
    finish = save_job.SaveJob.finish_segment

    def slow(self: save_job.SaveJob) -> Any:
        assert go.wait(240)
        return finish(self)

    with (
        Engine(tmp_path, options=SaveOptions(on_busy="skip")) as engine,
        GradientLog(engine, run.optimizer) as log,
    ):
        run.train_and_save(log, 1)
        monkeypatch.setattr(save_job.SaveJob, "finish_segment", slow)
        run.train_step()
        first = run.save(log)
        run.train_step()
        assert log.save(run.step, run.state()).state == "skipped"
        go.set()
        assert first.result(240).replayed_steps == 1
        assert run.train_and_save(log, 1)[0].replayed_steps == 3
        assert engine.steps() == [1, 2, 4]
        for step, state in run.saved.items():
            assert_same(state, log.restore(step))


def test_a_failed_save_is_followed_by_one_that_stores_the_state_itself(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.save import root_writer

    def fail(*arguments: object) -> int:
        raise OSError("no space left")

    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)
        run.train_step()
        with monkeypatch.context() as patched:
            patched.setattr(root_writer, "commit", fail)
            assert isinstance(log.save(3, run.state()).exception(240), errors.SaveFailed)
        reports = run.train_and_save(log, 2)
        assert [report.replayed_steps for report in reports] == [0, 1]
        for step, state in run.saved.items():
            assert_same(state, log.restore(step))
        assert deltacheck.open(tmp_path).verify(deep=True) == []


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[2])
import torch
from deltacheck.backends.torch import Engine, GradientLog
from deltacheck.save import root_writer
from tests.backends.torch.test_gradient_log import OPTIMIZERS, Run
torch.set_num_threads(1)
run = Run(*OPTIMIZERS["MixedPrecisionAdamW"])
engine = Engine(sys.argv[1])
log = GradientLog(engine, run.optimizer)
run.train_and_save(log, 2)
root_writer.commit = lambda *_: os._exit(9)  # everything is on disk but the manifest
run.train_and_save(log, 1)
"""


def test_a_kill_in_the_middle_of_a_logged_save_changes_nothing(run: Run, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parents[3])]
    assert subprocess.run(arguments, timeout=240).returncode == 9
    with Engine(tmp_path / "other") as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)  # the same training
    with Engine(tmp_path) as engine:
        assert engine.steps() == [1, 2]
        for step in (1, 2):
            assert_same(run.saved[step], engine.restore(step, optimizer=run.optimizer))


# --- what it stands on ----------------------------------------------------------------------------


def test_a_logged_step_outlives_the_checkpoint_that_it_is_replayed_from(
    run: Run, tmp_path: Path
) -> None:
    with (
        Engine(tmp_path, keep=Keep(last=1), options=SaveOptions(grace_seconds=0)) as engine,
        GradientLog(engine, run.optimizer) as log,
    ):
        for _ in range(4):
            run.train_and_save(log, 1)
            assert engine.steps() == [run.step]
            assert deltacheck.open(tmp_path).verify(deep=True) == []
    with Engine(tmp_path) as engine:
        assert_same(run.saved[4], engine.restore(4, optimizer=run.optimizer))


def test_a_logged_step_that_was_compacted_is_replayed_as_before(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer, max_replay_steps=1) as log:
        run.train_and_save(log, 4)  # the third is a delta, which the fourth is replayed from
    assert compact(open_root(tmp_path)) is not None
    with Engine(tmp_path) as engine:
        assert_same(run.saved[4], engine.restore(4, optimizer=run.optimizer))


def test_segments_of_gradients_go_with_the_last_step_that_needs_them(
    run: Run, tmp_path: Path
) -> None:
    with (
        Engine(tmp_path, keep=Keep(last=1), options=SaveOptions(grace_seconds=0)) as engine,
        GradientLog(engine, run.optimizer, max_replay_steps=3) as log,
    ):
        run.train_and_save(log, 9)
        needed = {ref.id for ref in deltacheck.open(tmp_path).manifest().segments}
        assert {path.name for path in (tmp_path / "segments").iterdir() if path.is_dir()} == needed


# --- refusals at restore --------------------------------------------------------------------------


def test_a_damaged_gradient_is_refused(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 3)
    newest = sorted(path for path in (tmp_path / "segments").iterdir() if path.is_dir())[-1]
    stream = max(
        (path for path in newest.rglob("c*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(stream.read_bytes())
    content[len(content) // 3] ^= 4
    stream.write_bytes(content)
    with Engine(tmp_path) as engine:
        with pytest.raises(errors.Damaged):
            engine.restore(3, optimizer=run.optimizer)
        assert_same(run.saved[2], engine.restore(2, optimizer=run.optimizer))
    assert deltacheck.open(tmp_path).verify(deep=True)


def test_a_gradient_that_was_forged_with_its_digests_is_refused_by_the_state(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 3)

    def forged(*arguments: Any, **options: Any) -> Any:
        loaded = load_leaves(*arguments, **options)
        loaded["%gradient/1/0"].data[100] ^= 0x40
        return loaded

    monkeypatch.setattr("deltacheck.restore.fill.load_leaves", forged)
    with (
        Engine(tmp_path) as engine,
        pytest.raises(errors.ReplayDiffers, match="without a replay: 1"),
    ):
        engine.restore(3, optimizer=run.optimizer)


class Almost(MixedPrecisionAdamW):
    """Another kernel: the last bit of one moment is another."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        MixedPrecisionAdamW.step.__wrapped__(self)  # type: ignore[attr-defined]
        moment = self.state[self.param_groups[1]["params"][0]]["exp_avg"]
        moment.view(torch.int32)[0, 0] ^= 1


def test_another_kernel_at_restore_is_refused_naming_leaf_both_digests_and_the_way_out(
    run: Run, tmp_path: Path
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 3)
    other = Run(lambda groups: Almost(groups, lr=1e-3), torch.bfloat16)
    number = next(
        k
        for k, p in enumerate(p for g in run.optimizer.param_groups for p in g["params"])
        if p.shape == (8, 160)
    )
    promised = deltacheck.open(tmp_path).manifest(3).digest_of(f"optimizer/state/{number}/exp_avg")
    with Engine(tmp_path) as engine:
        with pytest.raises(errors.ReplayDiffers) as refused:
            engine.restore(3, optimizer=other.optimizer)
        assert_same(
            run.saved[1], engine.restore(1, optimizer=other.optimizer)
        )  # the way out that the error names
    text = str(refused.value)
    assert f"step 3, leaf 'optimizer/state/{number}/exp_avg': replaying 2 updates" in text
    assert promised in text
    assert "Almost" in text
    assert "MixedPrecisionAdamW" in text
    assert "Newest earlier step that restores without a replay: 1" in text


def test_an_optimizer_of_another_kind_or_of_other_groups_is_refused(
    run: Run, tmp_path: Path
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)
    with Engine(tmp_path) as engine:
        with pytest.raises(errors.ReplayDiffers, match="AdamW"):
            engine.restore(2, optimizer=Run(adamw, torch.bfloat16).optimizer)
        with pytest.raises(errors.TreeMismatch, match="6 parameters, the optimizer has 2"):
            engine.restore(2, optimizer=torch.optim.SGD(run.model["first"].parameters()))
        with pytest.raises(errors.TreeMismatch, match="parameter 0 is"):
            engine.restore(2, optimizer=Run(adamw).optimizer)


def test_a_replay_uses_the_rates_of_the_run_and_not_those_of_the_optimizer_at_hand(
    run: Run, tmp_path: Path
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 3)
        other = Run(
            lambda groups: MixedPrecisionAdamW(groups, lr=7.0, betas=(0.1, 0.2)), torch.bfloat16
        )
        before = copy.deepcopy(other.state())
        assert_same(run.saved[3], engine.restore(3, optimizer=other.optimizer))
        assert_same(before, other.state())  # and changes nothing of it


def test_without_the_optimizer_a_logged_step_is_refused_naming_a_step_that_needs_none(
    run: Run, tmp_path: Path
) -> None:
    from deltacheck.backends.torch import load

    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 3)
        for refused in (engine.restore, deltacheck.open(tmp_path).restore, lambda: load(tmp_path)):
            with pytest.raises(
                errors.ReplayNeeded,
                match=r"step 3 .* Newest earlier step that restores without a replay: 1",
            ):
                refused()
        assert_same(run.saved[1], engine.restore(1))


def test_what_a_logged_step_stores_can_be_read_without_the_optimizer(
    run: Run, tmp_path: Path
) -> None:
    seen: dict[int, torch.Tensor] = {}
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        weight = run.model["first"].weight
        run.optimizer.register_step_pre_hook(
            lambda *_: seen.update({run.step + 1: weight.grad.clone()})
        )
        run.train_and_save(log, 3)
    found = deltacheck.open(tmp_path)
    plan = found.manifest(3).replay
    assert plan is not None
    paths = [step.inputs["0"] for step in plan.steps]
    arrays = found.restore(3, leaves=["rng", *paths])
    assert bits(arrays["rng"]) == bits(run.saved[3]["rng"])
    assert [bits(arrays[path]) for path in paths] == [bits(seen[2]), bits(seen[3])]
    row = found.restore(3, slices={paths[1]: (slice(5, 6),)})[paths[1]]
    assert bits(row) == bits(seen[3][5:6])
    with pytest.raises(errors.ReplayNeeded, match=r"'model/first\.weight'"):
        found.restore(3, leaves=["model/first.weight"])


def test_the_command_marks_logged_steps(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 3)

    def said(*words: str) -> str:
        assert main([words[0], str(tmp_path), *words[1:]]) == 0
        return capsys.readouterr().out

    assert [row["replayed_steps"] for row in json.loads(said("ls", "--json"))["steps"]] == [0, 1, 2]
    assert "REPLAYS" in said("ls")
    assert "replays 2 updates of benchmarks.workloads.optimizer.MixedPrecisionAdamW" in said(
        "show", "3"
    )
    shown = json.loads(said("show", "3", "--json"))
    kinds = {row["path"]: row["kind"] for row in shown["leaves"]}
    assert kinds["model/first.weight"] == "replayed"
    assert kinds["rng"] == "delta"
    assert shown["replay"]["base_step"] == 1
    assert json.loads(said("show", "1", "--json"))["replay"] is None
    assert "2 of them are stored as gradients" in said("verify", "--deep")
    assert main(["export", str(tmp_path), "3", "--out", str(tmp_path / "x.npz")]) != 0


def test_diff_of_logged_steps_sees_what_changed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)
    assert main(["diff", str(tmp_path), "1", "2"]) == 5
    assert "kept as gradients" in (said := capsys.readouterr().err) or "gradients" in said


# --- decisions and records ------------------------------------------------------------------------


def test_the_reason_for_storing_the_state_itself() -> None:
    limits = ReplayLimits(max_replay_steps=5, max_steps_per_save=2)
    assert replay.why_direct(LogSituation(True, 3, 2), limits) is None
    for situation, words in (
        (LogSituation(False, 0, 1), "no checkpoint of this log"),
        (LogSituation(True, 3, 0), "no step since"),
        (LogSituation(True, 0, 3), "max_steps_per_save=2"),
        (LogSituation(True, 4, 2), "max_replay_steps=5"),
        (LogSituation(True, 0, 1, differed=3), "other bits"),
    ):
        assert words in (replay.why_direct(situation, limits) or "")
    for wrong in ({"max_replay_steps": 0}, {"max_steps_per_save": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            ReplayLimits(**wrong)


def test_no_leaf_of_a_tree_can_be_called_like_a_gradient() -> None:
    from deltacheck.backends.torch.state import leaves
    from deltacheck.leaf import tree

    flat = tree.flatten(
        {"%gradient": {"0": {"1": torch.ones(1)}, 0: {1: torch.ones(1)}}}, leaves.describe
    )
    assert not any(path.startswith("%gradient/") for path in flat.leaves)


def test_a_manifest_whose_replay_does_not_fit_is_refused(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
        run.train_and_save(log, 2)
    manifest = open_root(tmp_path).manifest(2)
    plan = manifest.replay
    assert plan is not None
    assert encode_manifest(manifest)
    change = msgspec.structs.replace
    path = next(iter(plan.digests))
    for wrong in (
        change(manifest, must_understand=()),
        change(manifest, replay=None),
        change(manifest, replay=change(plan, steps=())),
        change(manifest, replay=change(plan, steps=(ReplayStep({"0": path}, {}),))),
        change(
            manifest,
            replay=change(plan, digests={k: v for k, v in plan.digests.items() if k != path}),
        ),
        change(manifest, replay=change(plan, places={k: path for k in plan.places})),
        change(
            manifest,
            leaves={k: v for k, v in manifest.leaves.items() if not k.startswith("%gradient/0/0")},
        ),
    ):
        with pytest.raises(errors.Damaged):
            encode_manifest(wrong)


def test_a_log_refuses_an_engine_that_does_not_store_every_leaf_as_it_is(
    run: Run, tmp_path: Path
) -> None:
    with (
        Engine(tmp_path, policy=Policy.exact(derive=True)) as engine,
        pytest.raises(ValueError, match="the state itself"),
    ):
        GradientLog(engine, run.optimizer)


def test_a_closed_log_keeps_out_of_the_optimizers_steps(run: Run, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        with GradientLog(engine, run.optimizer) as log:
            run.train_and_save(log, 2)
        assert not run.optimizer._optimizer_step_pre_hooks
        assert not run.optimizer._optimizer_step_post_hooks


def test_a_replica_calls_nobodys_hooks_and_leaves_gradients_alone(run: Run, tmp_path: Path) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: list[object] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        with Engine(tmp_path) as engine, GradientLog(engine, run.optimizer) as log:
            run.train_and_save(log, 3)
            log.restore(3)
    finally:
        hook.remove()
    assert seen == [run.optimizer] * 3


def test_a_gradient_of_many_chunks_is_encoded_whole_and_read_in_part(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(900, 1000).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with (
        Engine(tmp_path, options=SaveOptions(host_cache_bytes=1 << 20)) as engine,
        GradientLog(engine, optimizer) as log,
    ):
        log.save(0, {"w": weight})
        weight.grad = torch.randn(900, 1000).bfloat16()
        optimizer.step()
        report = log.save(1, {"w": weight}).result(240)
        assert report.replayed_steps == 1
        assert report.stored_bytes < 0.85 * weight.nbytes
        found = deltacheck.open(tmp_path).restore(
            1, slices={"%gradient/0/0": (slice(700, 710), slice(3, 5))}
        )
        assert np.array_equal(
            found["%gradient/0/0"].view(np.uint16),
            weight.grad[700:710, 3:5].view(torch.uint16).numpy(),
        )
        assert bits(log.restore(1)["w"]) == bits(weight)


def test_an_encoded_keyframe_without_a_row_for_every_chunk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.ones(900, 1000).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Engine(tmp_path) as engine, GradientLog(engine, optimizer) as log:
        log.save(0, {"w": weight})
        weight.grad = torch.randn(900, 1000).bfloat16()
        optimizer.step()
        log.save(1, {"w": weight})
    root = open_root(tmp_path)
    segment = root.store.segment(root.manifest(1).segments[-1])
    table, entry = segment.table, segment.table.leaves["%gradient/0/0"]
    rows = sum(count for _, _, count in entry.delta)
    assert rows == entry.spec("").chunk_count > 1
    fewer = msgspec.structs.replace(entry, delta=((0, 0, rows - 1),))
    parts = (msgspec.structs.replace(table.parts[0], rows=rows - 1),)
    wrong = msgspec.structs.replace(
        table, leaves={"%gradient/0/0": fewer}, packed={}, parts=parts, digests=rows - 1
    )
    content = json.dumps({"attributes": documents.to_attributes(wrong)}).encode()
    with pytest.raises(errors.Damaged, match=f"has {rows - 1} rows for {rows} chunks"):
        documents.from_zarr_json(content, SegmentTable, "x")
    twice = segment.part(0).index.copy()
    twice[:, 1] = 0  # the column of chunk numbers
    monkeypatch.setattr(type(segment.part(0)), "index", twice)
    with pytest.raises(errors.Damaged, match="no row for chunk 1"):
        resolve_leaves(root.afresh(), root.manifest(1), ["%gradient/0/0"])
