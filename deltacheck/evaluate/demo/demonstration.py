"""The demo: train, kill, resume, compare, and read back in other libraries.

The training runs are tasks of two evaluation plans, one for pre-training and one for fine-tuning.
Their worker processes are those of `deltacheck eval`; this process only watches and compares.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

import deltacheck
from deltacheck.errors import DeltacheckError
from deltacheck.evaluate.demo import summary
from deltacheck.evaluate.demo.summary import KillOutcome, Outcome
from deltacheck.evaluate.records import FINAL_STATE, Plan, Task
from deltacheck.evaluate.session import OnReport, Reports, Session, kills
from deltacheck.evaluate.workloads import equality, text
from deltacheck.evaluate.workloads.equality import Verdict
from deltacheck.evaluate.workloads.recipe import Recipe, demo, tiny_demo

_BUILTIN = "deltacheck.evaluate.workloads.builtin"
_CHECKPOINTS = "checkpoints"
_EVERY, _EVERY_QUICK = 4, 3  # steps between two checkpoints
_LEAST_CHECKPOINTS = 4  # so that a kill falls between two that are neither the first nor the last


class DemoFailed(DeltacheckError):
    """A part of the demo failed before the comparison."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The runs of one demo: a recipe, and the plan that kills its fine-tuning once."""

    recipe: Recipe
    plan: Plan

    @classmethod
    def create(cls, seed: int, steps: int | None = None, quick: bool = False) -> Demonstration:
        """Create a demo.

        Args:
            seed: Of weights, data order, dropout and the moment of the kill.
            steps: Of fine-tuning; ``None`` for the usual number.
            quick: Use a tiny model, for a look at the course in seconds.
        """
        changes = {} if steps is None else {"steps": steps}
        recipe = (tiny_demo if quick else demo)(seed, **changes)
        assert recipe.steps is not None
        every = _EVERY_QUICK if quick else _EVERY
        fine_tuning = _plan("demo", seed, recipe.steps, every)
        return cls(recipe, fine_tuning)


def main(
    *,
    seed: int | None = None,
    steps: int | None = None,
    quick: bool = False,
    keep: Path | None = None,
    json_file: Path | None = None,
) -> int:
    """Run the demo and print it.

    Args:
        seed: Of weights, data order, dropout and the moment of the kill. By default it is random
            and printed.
        steps: Of fine-tuning.
        quick: Use a tiny model, for a look at the course in seconds.
        keep: A new or empty folder that is left with the checkpoints and logs.
        json_file: A file for all figures.

    Returns:
        The exit code: 0 if every comparison held, 1 if one did not, 2 if the demo cannot run here.
    """
    console = Console()
    # ``find_spec`` finds torch without importing it.
    if importlib.util.find_spec("torch") is None:
        console.print(
            "The demo trains with PyTorch, which is not installed: pip install 'deltacheck[all]'"
        )
        return 2
    # A new seed for each demo: the moment of the kill differs, and the printed seed repeats it.
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    demonstration = Demonstration.create(seed, steps, quick)
    plan = demonstration.plan
    if len(plan.checkpoints()) < _LEAST_CHECKPOINTS:
        console.print(
            f"--steps {plan.steps} leaves too few checkpoints to kill between; give at least"
            f" {_LEAST_CHECKPOINTS * plan.every}"
        )
        return 2
    try:
        with _folder(keep) as folder:
            outcome = perform(demonstration, folder, console)
    except DeltacheckError as error:
        # Messages may contain paths in brackets, which Rich would read as markup.
        console.print(f"[bold red]The demo failed.[/] {escape(str(error))}")
        return 1
    summary.show(outcome, console)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(outcome), indent=1))
    return 0 if all(verdict.holds for verdict in outcome.verdicts) else 1


def perform(demonstration: Demonstration, folder: Path, console: Console) -> Outcome:
    """Perform all tasks in ``folder``, in order."""
    # Not at the top: it imports TensorStore, which the command line does not wait for.
    from deltacheck.evaluate.demo.saves import describe_saves

    start_time = time.perf_counter()
    plan, root = demonstration.plan, folder / _CHECKPOINTS
    shared = folder / "shared"
    shared.mkdir()
    console.print(f"[bold]deltacheck demo[/], seed {plan.first_seed}, in {folder}")
    with _progress(console) as progress:
        _write_data(demonstration.recipe, shared, _bar(progress, "reading the standard library", 1))
        pretrained = _pretrain(demonstration, folder, shared, progress)
        # Three tasks: the reference, the run that is killed, and the one that resumes.
        with closing(Session(plan, folder, shared, tasks=3)) as session:
            bar = _bar(progress, "fine-tuning, uninterrupted", plan.steps)
            reference = session.run(Task("train"), bar)
            before = Reports()
            bar = _bar(progress, "fine-tuning, with checkpoints", plan.steps)
            kill = _run_until_killed(session, before, bar)
            progress.stop_task(progress.task_ids[-1])  # its clock stops short of the end
            progress.console.print(
                f"killed with SIGKILL {kill.seconds_after_call:.2f} s after"
                f" save({kill.saving_step}) was called, after step {kill.last_step}; newest"
                f" checkpoint: step {kill.newest_checkpoint}"
            )
            bar = _bar(progress, "fine-tuning, resumed", plan.steps)
            resumed = session.run(Task("save", root=_CHECKPOINTS), bar)
        restored = resumed.other_events.get("restored", {"step": None})
        # A resume from another step would train the same losses and prove nothing about the kill.
        if restored["step"] != kill.newest_checkpoint:
            raise DemoFailed(
                f"the second process did not resume from step {kill.newest_checkpoint}, but from"
                f" {restored['step']}"
            )
        expected = _load_final_state(folder)
        verdicts = [
            equality.compare_losses("losses before the kill", reference.losses, before.losses),
            equality.compare_losses("losses after the resume", reference.losses, resumed.losses),
            *_compare_states(plan, expected, root, progress),
        ]
    saved = before.saved + resumed.saved
    return Outcome(
        seed=plan.first_seed,
        steps=plan.steps,
        every=plan.every,
        parameters=_parameters(expected["model"]),
        pretrain_losses=list(pretrained.losses.values()),
        losses=list(reference.losses.values()),
        kill=asdict(kill),
        restore_seconds=restored["seconds"],
        step_seconds=reference.step_seconds,
        saved=describe_saves(root, saved),
        torch_saved=[
            {
                "event": "torch_saved",
                "step": event["step"],
                "bytes": event["peer_bytes"],
                "seconds": event["peer_seconds"],
            }
            for event in saved
        ],
        verdicts=verdicts,
        seconds=time.perf_counter() - start_time,
    )


def _plan(factory: str, seed: int, steps: int, every: int) -> Plan:
    """Plan one killed run of a built-in factory, whose last step is saved for the comparison."""
    return Plan(
        factory=f"{_BUILTIN}:{factory}",
        policy="exact",
        steps=steps,
        every=every,
        kills=1,
        seeds=1,
        noise_seeds=1,
        first_seed=seed,
        save_last=True,
    )


def _write_data(recipe: Recipe, shared: Path, on_report: OnReport) -> None:
    from deltacheck.evaluate.workloads import builtin

    sources = text.standard_library()
    recipe.write(shared / builtin.RECIPE)
    text.pretraining_rows(sources, recipe.context).write(shared / builtin.PRETRAINING_ROWS)
    text.finetuning_rows(sources, recipe.context).write(shared / builtin.ROWS)
    on_report(Reports(step=1))


def _pretrain(
    demonstration: Demonstration, folder: Path, shared: Path, progress: Progress
) -> Reports:
    """Train a new model, and leave its state for the fine-tuning."""
    from deltacheck.evaluate.workloads import builtin

    steps = demonstration.recipe.pretrain_steps
    plan = _plan("demo_pretraining", demonstration.plan.first_seed, steps, steps)
    own_folder = folder / "pretraining"
    own_folder.mkdir()
    with closing(Session(plan, own_folder, shared, tasks=1)) as session:
        reports = session.run(Task("train"), _bar(progress, "pre-training", steps))
    (own_folder / FINAL_STATE).rename(shared / builtin.PRETRAINED)
    return reports


def _run_until_killed(session: Session, reports: Reports, on_report: OnReport) -> KillOutcome:
    """Fine-tune with checkpoints up to the kill, and return what it left."""
    (kill,) = kills(session.plan)
    task = Task("save", root=_CHECKPOINTS)
    delay = session.run_until_killed(task, kill, reports, on_report)
    newest_step = max(deltacheck.open(session.folder / _CHECKPOINTS).steps(), default=None)
    if newest_step is None:
        raise DemoFailed(f"no checkpoint survived the kill at step {reports.step}")
    return KillOutcome(kill.saving_step, delay, reports.step, newest_step)


# --- comparison -----------------------------------------------------------------------------------


def _load_final_state(folder: Path) -> dict[str, Any]:
    """Load the state that the uninterrupted run has left in torch's own format."""
    import torch

    state: dict[str, Any] = torch.load(folder / FINAL_STATE, weights_only=True)
    return state


def _compare_states(plan: Plan, expected: Any, root: Path, progress: Progress) -> Iterator[Verdict]:
    """Compare the uninterrupted run's final state with the last checkpoint, read in every way."""
    from deltacheck.backends.torch import Engine

    def in_torch() -> Verdict:
        with Engine(root) as engine:
            state = engine.restore(plan.steps)
        return equality.compare("final state in PyTorch", expected, state)

    def in_numpy() -> Verdict:
        state = deltacheck.open(root).restore(plan.steps)
        return equality.compare("final state in NumPy", expected, state)

    comparisons: list[Callable[[], Verdict]] = [
        in_torch,
        in_numpy,
        lambda: equality.in_jax("final state as a JAX pytree", expected, root, plan.steps),
        lambda: equality.in_plain_zarr(
            "first checkpoint in plain zarr", root, plan.checkpoints()[0]
        ),
    ]
    bar = _bar(progress, "comparing states", len(comparisons))
    for number, comparison in enumerate(comparisons, start=1):
        yield comparison()
        bar(Reports(step=number))


def _parameters(weights: Mapping[str, Any]) -> int:
    """Count the elements of the weights, tied ones once."""
    # Tied weights share an address.
    sizes = {weight.data_ptr(): weight.numel() for weight in weights.values()}
    return sum(sizes.values())


# --- files and progress ---------------------------------------------------------------------------


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


def _bar(progress: Progress, title: str, total: int) -> OnReport:
    """Add a line of progress; the returned function updates it."""
    task = progress.add_task(title, total=total)
    return lambda reports: progress.update(task, completed=reports.step)
