"""The demo: train, save in every way, kill, resume each, compare, read back in other libraries.

Runs without checkpoints are tasks of `deltacheck eval`; the others are in ``demo_tasks.py``. This
process only watches and compares.
"""

from __future__ import annotations

import importlib.util
import json
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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
from deltacheck.evaluate.demo.methods import EXACT, METHODS, ROOT, Method, saved_steps
from deltacheck.evaluate.demo.summary import DemoOutcome, KillOutcome, Way
from deltacheck.evaluate.records import FINAL_STATE, Ending, EvaluationPlan, Kill, WorkerTask
from deltacheck.evaluate.session import OnReport, Reports, Workers, ending_of
from deltacheck.evaluate.workloads import equality, text
from deltacheck.evaluate.workloads.equality import EqualityVerdict
from deltacheck.evaluate.workloads.recipe import Recipe, demo, tiny_demo

_BUILTIN = "deltacheck.evaluate.workloads.builtin"
_WORKER = "deltacheck.evaluate.demo.demo_tasks"
_EVERY, _EVERY_QUICK = 2, 2  # steps between two checkpoints
_LEAST_CHECKPOINTS = 8  # so that a kill falls between two that are neither the first nor the last
_OTHER_SEEDS, _OTHER_SEEDS_QUICK = 3, 1  # runs that show the noise
_PROCESSES = 2  # at the same time, with one thread each
# Kills fall after this share of the steps: until the run is stable, lossy policies are exact.
_EARLIEST_KILL = 0.6
_SAVE_FIELDS = ("step", "overlapped", "blocking_seconds", "durable_seconds", "stored_bytes")
# Steps of fine-tuning, and those before it, see ``builtin.demo_settling``.
_STEPS, _STEPS_QUICK = 60, 24
_SETTLE_STEPS, _SETTLE_STEPS_QUICK = 30, 6
# PyTorch's default betas. The rate is constant, as in the middle of a long run.
_RECIPE: dict[str, Any] = {"betas": (0.9, 0.999), "steps": None, "warmup_steps": 0}
# One thread, so that two processes share two cores.
_SIZES: dict[bool, dict[str, Any]] = {
    False: {"threads": 1, "batch": 4, "pretrain_rate": 3e-3},
    True: {},
}

_Result = TypeVar("_Result")


class DemoFailed(DeltacheckError):
    """A part of the demo failed before the comparison."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The runs of a demo: a recipe, the plan of its fine-tuning, and other seeds of it.

    ``settle_steps``: of fine-tuning before the runs that are compared.
    """

    recipe: Recipe
    plan: EvaluationPlan
    other_seeds: tuple[int, ...]
    settle_steps: int

    @classmethod
    def create(cls, seed: int, steps: int | None = None, quick: bool = False) -> Demonstration:
        """Create a demo.

        Args:
            seed: Of weights, data order, dropout and the moment of the kill.
            steps: Of fine-tuning; ``None`` for the usual number.
            quick: Use a tiny model, for a look at the course in seconds.
        """
        recipe = (tiny_demo if quick else demo)(seed, **_RECIPE | _SIZES[quick])
        if steps is None:
            steps = _STEPS_QUICK if quick else _STEPS
        every = _EVERY_QUICK if quick else _EVERY
        seed_count = _OTHER_SEEDS_QUICK if quick else _OTHER_SEEDS
        settle_steps = _SETTLE_STEPS_QUICK if quick else _SETTLE_STEPS
        other_seeds = tuple(range(seed + 1, seed + 1 + seed_count))
        return cls(recipe, _plan("demo", seed, steps, every), other_seeds, settle_steps)

    def kill(self) -> Kill:
        """Choose the save that is killed, and the moment within it."""
        dice = random.Random(self.plan.first_seed)
        earliest = _EARLIEST_KILL * self.plan.steps
        saves = [step for step in self.plan.checkpoints()[1:-1] if step >= earliest]
        # The delay is measured in saves of one method, and a checkpoint has one of each.
        share = dice.random() * len(METHODS)
        return Kill(self.plan.first_seed, 0, dice.choice(saves), mid_save=True, share=share)


def main(
    *,
    seed: int | None = None,
    steps: int | None = None,
    quick: bool = False,
    keep: Path | None = None,
    json_file: Path | None = None,
    html: Path | None = None,
    png: Path | None = None,
) -> int:
    """Run the demo and print it.

    Args:
        seed: Of weights, data order, dropout and the moment of the kill. By default it is random
            and printed.
        steps: Of fine-tuning.
        quick: Use a tiny model, for a look at the course in seconds.
        keep: A new or empty folder that is left with the checkpoints and logs.
        json_file: A file for all figures.
        html: A file for a page of figures, which needs matplotlib.
        png: A folder for the same figures as images.

    Returns:
        The exit code: 0 if every comparison held, 1 if one did not, 2 if the demo cannot run here.
    """
    console = Console()
    # ``find_spec`` finds packages without importing them.
    if importlib.util.find_spec("torch") is None:
        console.print("The demo trains with PyTorch, which is not installed: pip install torch")
        return 2
    if (html or png) and importlib.util.find_spec("matplotlib") is None:
        console.print("Figures need matplotlib: pip install matplotlib")
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
    for file in _write_figures(outcome, html, png):
        console.print(f"wrote {escape(str(file))}")
    return 0 if all(verdict.holds for verdict in outcome.verdicts) else 1


def perform(demonstration: Demonstration, folder: Path, console: Console) -> DemoOutcome:
    """Perform all tasks in ``folder``, in order."""
    # Not at the top: it imports TensorStore, which the command line does not wait for.
    from deltacheck.evaluate.demo.saves import describe_saves

    start_time = time.perf_counter()
    plan = demonstration.plan
    shared, saving = folder / "shared", folder / "saving"
    shared.mkdir()
    saving.mkdir()
    console.print(f"[bold]deltacheck demo[/], seed {plan.first_seed}, in {folder}")
    with _progress(console) as progress:
        _write_data(demonstration.recipe, shared, _bar(progress, "reading the standard library", 1))
        pretrained = _prepare(demonstration, folder, shared, progress)
        reference, *unkilled = _train_all(demonstration, folder, shared, progress)
        before = Reports()
        with closing(Workers(plan, saving, shared, 2, _WORKER)) as session:
            bar = _bar(progress, "fine-tuning, saved in 6 ways", plan.steps)
            kill = _run_until_killed(demonstration, session, before, bar)
            progress.stop_task(progress.task_ids[-1])  # its clock stops short of the end
            progress.console.print(
                f"killed with SIGKILL {kill.seconds_after_call:.2f} s after the checkpoint of step"
                f" {kill.saving_step} was begun, after step {kill.last_step}"
            )
            restored = session.run(WorkerTask("restore")).other_events["restored_all"]["seconds"]
        sizes = {method.key: _size(method, saving / method.key, before) for method in METHODS}
        resumed = _resume_all(plan, saving, shared, progress)
        expected = _load_final_state(folder / str(plan.first_seed))
        losses = [ending.evaluation for ending in (reference, *unkilled)]
        ways = [
            _way(method, before, reports, reference, (restored[method.key], *sizes[method.key]))
            for method, reports in zip(METHODS, resumed, strict=True)
        ]
        verdicts = [
            equality.compare_losses("losses before the kill", reference.losses, before.losses),
            *(summary.judge(way, losses) for way in ways),
            *_compare_states(plan, expected, saving / EXACT / ROOT, progress),
        ]
    saved = [event for event in before.saved if event["method"] == EXACT]
    return DemoOutcome(
        seed=plan.first_seed,
        steps=plan.steps,
        every=plan.every,
        parameters=_parameters(expected["model"]),
        pretrain_losses=list(pretrained.losses.values()),
        losses=reference.losses,
        final_losses=losses,
        kill=asdict(kill),
        step_seconds=before.step_seconds,
        saved=describe_saves(saving / EXACT / ROOT, saved),
        ways=ways,
        verdicts=verdicts,
        seconds=time.perf_counter() - start_time,
    )


def _train_all(
    demonstration: Demonstration, folder: Path, shared: Path, progress: Progress
) -> list[Ending]:
    """Fine-tune every seed to the end without checkpoints, beginning with that of the demo."""
    plan = demonstration.plan
    seeds = (plan.first_seed, *demonstration.other_seeds)
    bar = _bar(progress, f"fine-tuning {len(seeds)} seeds, not killed", plan.steps * len(seeds))
    shares = _Shares(bar)

    def train(seed: int) -> Ending:
        own_folder = folder / str(seed)
        own_folder.mkdir()
        with closing(Workers(replace(plan, first_seed=seed), own_folder, shared, 1)) as session:
            (ending,) = session.run(WorkerTask("train"), shares.add(seed)).unkilled
        return ending

    return _in_parallel([lambda seed=seed: train(seed) for seed in seeds])  # type: ignore[misc]


def _resume_all(
    plan: EvaluationPlan, saving: Path, shared: Path, progress: Progress
) -> list[Reports]:
    """Resume the killed run from the newest step of each method."""
    # A session writes the plan, which the workers of the others read.
    sessions = [Workers(plan, saving, shared, 1, _WORKER) for _ in METHODS]
    total = plan.steps * len(METHODS)
    shares = _Shares(_bar(progress, "resumed from each way", total))

    def resume(session: Workers, method: Method) -> Reports:
        with closing(session):
            return session.run(WorkerTask("resume", root=method.key), shares.add(method.key))

    jobs = [
        lambda session=session, method=method: resume(session, method)
        for session, method in zip(sessions, METHODS, strict=True)
    ]
    return _in_parallel(jobs)


def _in_parallel(jobs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    with ThreadPoolExecutor(_PROCESSES) as pool:
        return list(pool.map(lambda job: job(), jobs))


class _Shares:
    """A bar of progress for several runs."""

    def __init__(self, on_report: OnReport) -> None:
        self._on_report, self._steps = on_report, dict[object, int]()

    def add(self, name: object) -> OnReport:
        """Return a function for a run to call."""

        def on_report(reports: Reports) -> None:
            self._steps[name] = reports.step
            self._on_report(Reports(step=sum(self._steps.values())))

        return on_report


def _size(method: Method, folder: Path, reports: Reports) -> tuple[int, int]:
    """Return the number of checkpoints of a method, and the bytes of all of its files.

    Peers keep their newest files only, so theirs are summed up.
    """
    from deltacheck.evaluate.workloads.experiment import bytes_under  # imports TensorStore

    sizes = [event["stored_bytes"] for event in reports.saved if event["method"] == method.key]
    if not method.is_ours:
        return len(sizes), sum(sizes)
    return len(saved_steps(method, folder)), bytes_under(folder / ROOT)


def _way(
    method: Method,
    before: Reports,
    reports: Reports,
    reference: Ending,
    measured: tuple[float, int, int],
) -> Way:
    """Combine the measurements of a method."""
    resumed = reports.other_events["resumed"]
    ending = ending_of(resumed["ending"])
    saves = [event for event in before.saved if event["method"] == method.key]
    seconds, count, total_bytes = measured
    return Way(
        method=method,
        saves=[{name: save[name] for name in _SAVE_FIELDS} for save in saves],
        checkpoints=count,
        total_bytes=total_bytes,
        restored_step=resumed["restored_step"],
        restore_seconds=seconds,
        leaves=resumed["leaves"],
        broken=[leaf["path"] for leaf in resumed["failed"]],
        inexact=resumed["inexact"],
        losses=ending.losses,
        final_loss=ending.evaluation,
        difference=ending.evaluation - reference.evaluation,
        different_leaves=sum(
            ending.digests.get(path) != digest for path, digest in reference.digests.items()
        ),
    )


def _plan(factory: str, seed: int, steps: int, every: int) -> EvaluationPlan:
    """Plan one killed run of a built-in factory, whose last step is saved for the comparison."""
    return EvaluationPlan(
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


def _prepare(
    demonstration: Demonstration, folder: Path, shared: Path, progress: Progress
) -> Reports:
    """Train a new model, and fine-tune it until its optimizer is settled."""
    from deltacheck.evaluate.workloads import builtin

    seed, steps = demonstration.plan.first_seed, demonstration.recipe.pretrain_steps
    first = _plan("demo_pretraining", seed, steps, steps)
    target = shared / builtin.PRETRAINED
    reports = _train(first, folder / "pretraining", target, _bar(progress, "pre-training", steps))
    steps = demonstration.settle_steps
    second = _plan("demo_settling", seed, steps, steps)
    target = shared / builtin.SETTLED
    _train(second, folder / "settling", target, _bar(progress, "settling the optimizer", steps))
    return reports


def _train(plan: EvaluationPlan, folder: Path, target: Path, on_report: OnReport) -> Reports:
    """Train without checkpoints, and leave the final state in ``target``, for other runs."""
    folder.mkdir()
    with closing(Workers(plan, folder, target.parent, tasks=1)) as session:
        reports = session.run(WorkerTask("train"), on_report)
    (folder / FINAL_STATE).rename(target)
    return reports


def _run_until_killed(
    demonstration: Demonstration, session: Workers, reports: Reports, on_report: OnReport
) -> KillOutcome:
    """Fine-tune with checkpoints of every method up to the kill, and return its moment."""
    kill = demonstration.kill()
    delay = session.run_until_killed(WorkerTask("save"), kill, reports, on_report)
    for method in METHODS:
        if not saved_steps(method, session.folder / method.key):
            raise DemoFailed(
                f"no checkpoint of {method.title} survived the kill at step {reports.step}"
            )
    return KillOutcome(kill.saving_step, delay, reports.step)


# --- comparison -----------------------------------------------------------------------------------


def _load_final_state(folder: Path) -> dict[str, Any]:
    """Load the state that an uninterrupted run has left in torch's own format."""
    import torch

    state: dict[str, Any] = torch.load(folder / FINAL_STATE, weights_only=True)
    return state


def _compare_states(
    plan: EvaluationPlan, expected: Any, root: Path, progress: Progress
) -> Iterator[EqualityVerdict]:
    """Compare the uninterrupted run's final state with the last checkpoint, read in every way."""
    from deltacheck.backends.torch import Engine

    def in_torch() -> EqualityVerdict:
        with Engine(root) as engine:
            state = engine.restore(plan.steps)
        return equality.compare("final state in PyTorch", expected, state)

    def in_numpy() -> EqualityVerdict:
        state = deltacheck.open(root).restore(plan.steps)
        return equality.compare("final state in NumPy", expected, state)

    comparisons: list[Callable[[], EqualityVerdict]] = [
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


def _write_figures(outcome: DemoOutcome, html: Path | None, png: Path | None) -> list[Path]:
    """Write the page and the images that were asked for, and return their files."""
    if html is None and png is None:
        return []
    from deltacheck.evaluate.demo import demo_figures
    from deltacheck.report import page

    figures = demo_figures.draw(outcome)
    files = [] if png is None else page.write_images(figures, png)
    if html is not None:
        problems = [f"{v.claim}: {v.detail}" for v in outcome.verdicts if not v.holds]
        title = "deltacheck demo: one fine-tuning, saved in six ways, killed and resumed"
        facts = demo_figures.facts(outcome)
        page.write_page(html, page.page(title, facts, problems, figures, "Does not hold:"))
        files.append(html)
    return files


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
