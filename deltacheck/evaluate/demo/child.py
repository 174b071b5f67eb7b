"""One part of the demo in a process of its own, which may be killed: `python -m
deltacheck.evaluate.demo.child
FOLDER PART`.

It tells what it does in JSON lines on standard output, which the parent process turns into progress
bars and figures.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from deltacheck import SaveHandle
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.evaluate.children import tell
from deltacheck.evaluate.demo.classes import leaf_class
from deltacheck.evaluate.workloads.plan import Plan
from deltacheck.evaluate.workloads.text import Rows
from deltacheck.evaluate.workloads.train import Training, be_deterministic, finetuning, pretraining
from deltacheck.leaf.spec import LeafKind


def pretrain(plan: Plan, folder: Path) -> None:
    """Train a new model; leave its weights in `pretrained`."""
    training = pretraining(plan, Rows.read(folder / "pretrain.npz"))
    tell("sized", parameters=sum(parameter.numel() for parameter in training.model.parameters()))
    train_until(training, plan.pretrain_steps)
    with Engine(folder / "pretrained") as engine:
        engine.save(training.step, {"model": training.model.state_dict()})


def reference(plan: Plan, folder: Path) -> None:
    """Fine-tune without a stop. Deltacheck has no part in it: the final state is left in torch's
    own format.
    """
    training = start_finetuning(plan, folder)
    train_until(training, plan.steps)
    peer_save(training.state(), folder / "reference.pt")


def finetune(plan: Plan, folder: Path) -> None:
    """Fine-tune with checkpoints, from the newest one if there is any."""
    training = start_finetuning(plan, folder)
    with Engine(folder / "checkpoints") as engine:
        if engine.steps():
            began = time.perf_counter()
            training.load(engine.restore())
            tell("resumed", step=training.step, seconds=time.perf_counter() - began)
        under_way: SaveHandle | None = None
        for step in (step for step in plan.checkpoints() if step > training.step):
            loss = train_until(training, step)
            # Both ways save the same state. torch.save goes first, and only once nothing of ours is
            # under way that could slow it; what that makes training wait is charged to our save.
            began = time.perf_counter()
            engine.wait()
            waited = time.perf_counter() - began
            tell_saved(under_way, waited)
            began = time.perf_counter()
            size = peer_save(training.state(), folder / "torch_save.pt")
            tell("torch_saved", step=step, bytes=size, seconds=time.perf_counter() - began)
            tell("saving", step=step)
            under_way = engine.save(step, training.state(), metrics={"loss": loss})
        tell_saved(under_way, waited_seconds=0.0)


def start_finetuning(plan: Plan, folder: Path) -> Training:
    with Engine(folder / "pretrained") as engine:
        weights = engine.restore()["model"]
    return finetuning(plan, Rows.read(folder / "finetune.npz"), weights)


def train_until(training: Training, step: int) -> float:
    """Train up to ``step``; the last loss."""
    loss = math.nan
    while training.step < step:
        began = time.perf_counter()
        loss = training.train_step()
        tell("stepped", step=training.step, loss=loss, seconds=time.perf_counter() - began)
    return loss


def tell_saved(handle: SaveHandle | None, waited_seconds: float) -> None:
    """Tell what a save has cost, its leaves summed up by class."""
    report = handle.result() if handle else None
    if report is None:
        return
    classes: dict[str, dict[str, int]] = {}
    for leaf in report.leaves:
        sums = classes.setdefault(leaf_class(leaf.path), {"raw_bytes": 0, "words": 0, "changed": 0})
        sums["raw_bytes"] += leaf.raw_bytes
        sums["words"] += leaf.words
        sums["changed"] += leaf.changed
    tell(
        "saved",
        step=report.step,
        keyframe=all(leaf.kind is LeafKind.KEYFRAME for leaf in report.leaves),
        raw_bytes=report.raw_bytes,
        stored_bytes=report.stored_bytes,
        blocking_seconds=report.blocking_seconds + waited_seconds,
        durable_seconds=report.durable_seconds,
        classes=classes,
    )


def main(folder: Path, part: str) -> None:
    plan = Plan.read(folder)
    be_deterministic(plan.threads)
    {"pretrain": pretrain, "reference": reference, "finetune": finetune}[part](plan, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
