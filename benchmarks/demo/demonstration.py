"""The plan of the demo, and its course: evaluate, compare the ends, show, write figures."""

from __future__ import annotations

import importlib.util
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import deltacheck
from benchmarks.demo import other_readers, results
from benchmarks.demo.methods import EXACT, METHODS
from benchmarks.demo.results import DemoOutcome
from benchmarks.demo.way_records import FINAL_STATE, WayEvidence, WayPlan
from benchmarks.workloads import equality
from benchmarks.workloads.equality import EqualityVerdict
from deltacheck.errors import DeltacheckError
from deltacheck.evaluate.records import ROOT, folder_of

_BUILTIN = "benchmarks.workloads.builtin"
_STEPS, _STEPS_QUICK = 40, 12
_EVERY = 1  # steps between two checkpoints
_LEAST_CHECKPOINTS = 8  # so that a kill falls between two that are neither the first nor the last
_UNKILLED_SEEDS, _UNKILLED_SEEDS_QUICK = 4, 2  # runs that show the noise


class DemoFailed(DeltacheckError):
    """The demo has nothing to show."""


def create_plan(seed: int, steps: int | None = None, quick: bool = False) -> WayPlan:
    """Return the evaluation of a demo.

    Args:
        seed: Of weights, data order, dropout and the moment of the kill.
        steps: Of fine-tuning; ``None`` for the usual number.
        quick: Use a tiny model, for a look at the course in seconds.
    """
    return WayPlan(
        factory=f"{_BUILTIN}:{'tiny_demo' if quick else 'demo'}",
        policy="exact",
        steps=steps or (_STEPS_QUICK if quick else _STEPS),
        every=_EVERY,
        kills=1,
        seeds=1,
        noise_seeds=_UNKILLED_SEEDS_QUICK if quick else _UNKILLED_SEEDS,
        first_seed=seed,
        ways=tuple(method.key for method in METHODS),
    )


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
    plan = create_plan(seed, steps, quick)
    if len(plan.checkpoints()) < _LEAST_CHECKPOINTS:
        console.print(
            f"--steps {plan.steps} leaves too few checkpoints to kill between; give at least"
            f" {_LEAST_CHECKPOINTS * plan.every}"
        )
        return 2
    try:
        with _folder(keep) as folder:
            outcome = perform(plan, folder, console, quick=quick)
    except DeltacheckError as error:
        # Messages may contain paths in brackets, which Rich would read as markup.
        console.print(f"[bold red]The demo failed.[/] {escape(str(error))}")
        return 1
    results.show(outcome, console)
    if json_file is not None:
        json_file.write_text(json.dumps(results.document(outcome), indent=1))
    for file in _write_figures(outcome, html, png):
        console.print(f"wrote {escape(str(file))}")
    return 0 if outcome.holds else 1


def perform(plan: WayPlan, folder: Path, console: Console, *, quick: bool = False) -> DemoOutcome:
    """Evaluate the ways of saving in ``folder``, and compare the ends of the runs."""
    # Not at the top: they import TensorStore, which the command line does not wait for.
    from benchmarks.demo import layout_bytes
    from benchmarks.demo.evaluation import evaluate
    from deltacheck.evaluate.run import show_progress

    start_time = time.perf_counter()
    console.print(f"[bold]deltacheck demo[/], seed {plan.first_seed}, in {folder}")
    with show_progress(console) as progress:
        evidence = evaluate(plan, folder, progress)
    errors = [recovery.error for recovery in evidence.recoveries]
    if all(errors):
        raise DemoFailed(errors[0])
    states = tuple(_compare_states(evidence, folder))
    layouts = layout_bytes.measure(plan.every, folder, quick=quick)
    return DemoOutcome(evidence, states, layouts, time.perf_counter() - start_time)


def _compare_states(evidence: WayEvidence, folder: Path) -> Iterator[EqualityVerdict]:
    """Compare the unkilled run's final state with the last checkpoint, read in every way."""
    import torch

    from deltacheck.backends.torch import Engine

    plan, (kill, *_) = evidence.plan, [recovery.kill for recovery in evidence.recoveries]
    root = folder_of(folder, kill) / EXACT / ROOT
    expected: dict[str, Any] = torch.load(folder / FINAL_STATE, weights_only=True)

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
        lambda: other_readers.in_jax("final state as a JAX pytree", expected, root, plan.steps),
        lambda: other_readers.in_plain_zarr(
            "first checkpoint in plain zarr", root, plan.checkpoints()[0]
        ),
    ]
    for comparison in comparisons:
        yield comparison()


def _write_figures(outcome: DemoOutcome, html: Path | None, png: Path | None) -> list[Path]:
    """Write the page and the images that were asked for, and return their files."""
    if html is None and png is None:
        return []
    from benchmarks.demo import demo_figures
    from deltacheck.report import page

    figures = demo_figures.draw(outcome)
    files = [] if png is None else page.write_images(figures, png)
    if html is not None:
        title = "deltacheck demo: one fine-tuning, saved in six ways, killed and resumed"
        facts = demo_figures.facts(outcome)
        text = page.page(title, facts, results.problems(outcome), figures, "Does not hold:")
        page.write_page(html, text)
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
