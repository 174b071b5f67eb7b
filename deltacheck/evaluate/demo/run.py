"""The story of the demo: train, kill, resume, compare, read back elsewhere. Each act is a child
process; this one only watches.
"""

from __future__ import annotations

import importlib.util
import json
import random
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

import deltacheck
from deltacheck.errors import DeltacheckError
from deltacheck.evaluate import children
from deltacheck.evaluate.children import Event
from deltacheck.evaluate.demo import checks, report
from deltacheck.evaluate.demo.checks import Verdict
from deltacheck.evaluate.workloads import text
from deltacheck.evaluate.workloads.plan import Plan, tiny

_CHILD = "deltacheck.evaluate.demo.child"


class DemoFailed(DeltacheckError):
    """A part of the demo did not do what it should; the comparison was not reached."""


@dataclass(slots=True)
class Told:
    """What the child processes of one act have told so far."""

    losses: dict[int, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    saved: list[Event] = field(default_factory=list)
    torch_saved: list[Event] = field(default_factory=list)
    resumed: Event | None = None
    parameters: int = 0

    def hear(self, event: Event) -> None:
        match event["event"]:
            case "stepped":
                self.losses[event["step"]] = event["loss"]
                self.step_seconds.append(event["seconds"])
            case "saved":
                self.saved.append(event)
            case "torch_saved":
                self.torch_saved.append(event)
            case "resumed":
                self.resumed = event
            case "sized":
                self.parameters = event["parameters"]


@dataclass(frozen=True, slots=True)
class Kill:
    """When the child was killed, and what was lost."""

    saving_step: int
    seconds_after_call: float
    last_step: int
    newest_checkpoint: int


def main(
    *,
    seed: int | None = None,
    steps: int | None = None,
    quick: bool = False,
    keep: Path | None = None,
    json_file: Path | None = None,
) -> int:
    """Run the demo, print it, and give the exit code: 0 where every comparison held, 1 where one
    did
    not, 2 where it could not run.

    ``seed``: of weights, data order, dropout and the time of the kill; random where not given, and
    printed. ``steps``: of fine-tuning. ``quick``: a tiny model, for a look at the story in seconds.
    ``keep``: a new or empty folder that is left with the checkpoints and logs. ``json_file``: where
    all figures go.
    """
    console = Console()
    if importlib.util.find_spec("torch") is None:
        console.print(
            "The demo trains with PyTorch, which is not installed: pip install 'deltacheck[all]'"
        )
        return 2
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    plan = tiny(seed) if quick else Plan(seed=seed)
    if steps is not None:
        plan = replace(plan, steps=steps)
    if len(plan.checkpoints()) < 4:
        console.print(
            f"--steps {plan.steps} leaves too few checkpoints to kill between; give at least"
            f" {4 * plan.every}"
        )
        return 2
    try:
        with _folder(keep) as folder:
            outcome = perform(plan, folder, console)
    except DeltacheckError as error:
        console.print(f"[bold red]The demo failed.[/] {escape(str(error))}")
        return 1
    report.show(outcome, console)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(outcome), indent=1))
    return 0 if all(verdict.holds for verdict in outcome.verdicts) else 1


def perform(plan: Plan, folder: Path, console: Console) -> report.Outcome:
    """All acts, in order, in ``folder``."""
    began = time.perf_counter()
    plan.write(folder)
    console.print(f"[bold]deltacheck demo[/], seed {plan.seed}, in {folder}")
    with _progress(console) as progress:
        _write_rows(plan, folder, progress)

        pretrained = Told()
        watch(folder, "pretrain", pretrained, _bar(progress, "pre-training", plan.pretrain_steps))
        reference = Told()
        watch(
            folder, "reference", reference, _bar(progress, "fine-tuning, uninterrupted", plan.steps)
        )
        killed, resumed = Told(), Told()
        kill = watch_and_kill(
            plan, folder, killed, _bar(progress, "fine-tuning, with checkpoints", plan.steps)
        )
        progress.console.print(
            f"killed with SIGKILL {kill.seconds_after_call:.2f} s after save({kill.saving_step})"
            f" was called, after step {kill.last_step}; newest checkpoint: step"
            f" {kill.newest_checkpoint}"
        )
        watch(folder, "finetune", resumed, _bar(progress, "fine-tuning, resumed", plan.steps))
        if resumed.resumed is None or resumed.resumed["step"] != kill.newest_checkpoint:
            raise DemoFailed(
                f"the second process did not resume from step {kill.newest_checkpoint}, but from"
                f" {resumed.resumed}"
            )

        verdicts = [
            checks.compare_losses("losses before the kill", reference.losses, killed.losses),
            checks.compare_losses("losses after the resume", reference.losses, resumed.losses),
            *_compare_states(plan, folder, _bar(progress, "comparing states", 4)),
        ]
    return report.Outcome(
        seed=plan.seed,
        steps=plan.steps,
        every=plan.every,
        parameters=pretrained.parameters,
        pretrain_losses=list(pretrained.losses.values()),
        losses=list(reference.losses.values()),
        kill=asdict(kill),
        restore_seconds=resumed.resumed["seconds"],
        step_seconds=reference.step_seconds,
        saved=killed.saved + resumed.saved,
        torch_saved=killed.torch_saved + resumed.torch_saved,
        verdicts=verdicts,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of progress."""

    progress: Progress
    task: TaskID

    def at(self, completed: int) -> None:
        self.progress.update(self.task, completed=completed)

    def stop(self) -> None:
        """Stop its clock short of the end."""
        self.progress.stop_task(self.task)


def watch(folder: Path, part: str, told: Told, bar: Bar) -> None:
    """Let a child play its part to the end; `DemoFailed` if it fails."""
    with children.child(_CHILD, [str(folder), part], folder) as child:
        for event in children.events(child):
            _hear(event, told, bar)
    if child.returncode != 0:
        raise DemoFailed(
            f"{part} ended with exit code {child.returncode}; the end of its"
            f" log:\n{children.end_of_log(folder)}"
        )


def watch_and_kill(plan: Plan, folder: Path, told: Told, bar: Bar) -> Kill:
    """Let the fine-tuning run up to a random one of its saves, and kill it during that save or at
    some time before the next one.
    """
    dice = random.Random(plan.seed)
    saving_step = dice.choice(plan.checkpoints()[1:-1])
    mid_save, share = dice.random() < 0.5, dice.random()
    with children.child(_CHILD, [str(folder), "finetune"], folder) as child:
        events = children.events(child)
        for event in events:
            _hear(event, told, bar)
            if event["event"] == "saving" and event["step"] == saving_step:
                break
        else:
            raise DemoFailed(
                f"fine-tuning ended before step {saving_step}; the end of its"
                f" log:\n{children.end_of_log(folder)}"
            )
        span = (
            told.saved[-1]["durable_seconds"]
            if mid_save
            else plan.every * sum(told.step_seconds) / len(told.step_seconds)
        )
        time.sleep(span * share)
        child.send_signal(signal.SIGKILL)
        for event in events:  # what it had said before it died
            _hear(event, told, bar)
    bar.stop()
    if child.returncode != -signal.SIGKILL:
        raise DemoFailed(
            f"the child was to be killed but ended with exit code {child.returncode}; the end of"
            f" its log:\n{children.end_of_log(folder)}"
        )
    newest = max(deltacheck.open(folder / "checkpoints").steps(), default=None)
    if newest is None:
        raise DemoFailed(f"no checkpoint survived the kill at step {max(told.losses)}")
    return Kill(saving_step, span * share, max(told.losses), newest)


def _hear(event: Event, told: Told, bar: Bar) -> None:
    told.hear(event)
    if event["event"] in ("stepped", "resumed"):
        bar.at(event["step"])


def _write_rows(plan: Plan, folder: Path, progress: Progress) -> None:
    bar = _bar(progress, "reading the standard library", 1)
    sources = text.standard_library()
    text.pretraining_rows(sources, plan.context).write(folder / "pretrain.npz")
    text.finetuning_rows(sources, plan.context).write(folder / "finetune.npz")
    bar.at(1)


def _compare_states(plan: Plan, folder: Path, bar: Bar) -> Iterator[Verdict]:
    """The uninterrupted run's final state against the last checkpoint of the killed and resumed
    one, read back in every way.
    """
    import torch

    from deltacheck.backends.torch import Engine

    expected = torch.load(folder / "reference.pt", weights_only=True)
    with Engine(folder / "checkpoints") as engine:
        yield checks.compare("final state in PyTorch", expected, engine.restore(plan.steps))
    bar.at(1)
    yield checks.compare(
        "final state in NumPy",
        expected,
        deltacheck.open(folder / "checkpoints").restore(plan.steps),
    )
    bar.at(2)
    yield checks.in_jax("final state as a JAX pytree", expected, folder / "checkpoints", plan.steps)
    bar.at(3)
    yield checks.in_plain_zarr(
        "first checkpoint in plain zarr", folder / "checkpoints", plan.checkpoints()[0]
    )
    bar.at(4)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="deltacheck-demo-") as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise DemoFailed(f"{keep} is not empty; --keep wants a new or empty folder")
    yield keep.resolve()


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def _bar(progress: Progress, title: str, total: int) -> Bar:
    return Bar(progress, progress.add_task(title, total=total))
