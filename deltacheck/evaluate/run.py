"""The course of an evaluation.

Train without a kill, save beside a peer, kill, restore in a fresh process, compare, and judge. Each
of these is a task of a worker process. This process kills them and combines their reports. It
imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

import deltacheck
from deltacheck.errors import DeltacheckError
from deltacheck.evaluate.comparison.contract import used_contracts
from deltacheck.evaluate.processes import Event
from deltacheck.evaluate.records import (
    OBSERVED,
    ROOT,
    ROOTS,
    EvaluationPlan,
    Evidence,
    Kill,
    LeafCheck,
    LeafGroup,
    MeasuredSave,
    Recovery,
    WorkerTask,
    folder_of,
)
from deltacheck.evaluate.session import EvaluationFailed, Reports, Workers, ending_of, kills
from deltacheck.report.data import MOST_CLASSES, Record, collect
from deltacheck.report.groups import classes

# Called with the current phase, the finished parts of it, and their total.
Progress: TypeAlias = Callable[[str, int, int], None]


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """Show a bar for each phase of an evaluation on a console."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, completed: int, total: int) -> None:
            # Phases are not known beforehand. A bar appears with the first report of its phase.
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=completed)

        yield show


def evaluate(
    plan: EvaluationPlan, folder: Path, progress: Progress = lambda phase, count, total: None
) -> Evidence:
    """Perform a plan.

    Args:
        plan: The runs.
        folder: An empty folder, which is left with roots and logs.
        progress: Called as the evaluation advances.

    Raises:
        EvaluationFailed: A task failed; the message contains its problem or the end of its log.
    """
    shared = folder / "made"
    shared.mkdir()
    # One task for all runs without a kill, and two for each kill: the killed run and the resumed
    # one.
    session = Workers(plan, folder, shared, 1 + 2 * len(kills(plan)))
    try:
        evidence, pace = observe(session, progress)
        # Only the first run shows which saves use which contracts, so kills come after it.
        best = best_saves(contracts_of(folder / ROOTS / OBSERVED))
        recoveries: list[Recovery] = []
        for kill, before, error in killed_runs(session, kills(plan, best), pace, progress):
            root = folder_of(folder, kill) / ROOT
            task = WorkerTask("resume", kill)
            recoveries.append(recovery_of(session, task, root, before, error))
    finally:
        session.close()
    return replace(evidence, recoveries=tuple(recoveries))


def observe(session: Workers, progress: Progress) -> tuple[Evidence, tuple[float, float]]:
    """Perform the runs that are not killed; return their results and ``Reports.pace``."""
    plan, root = session.plan, session.folder / ROOTS / OBSERVED
    # With the repeat and the saving run.
    total = (len(plan.unkilled_seeds()) + 2) * plan.steps
    observed = session.run(
        WorkerTask("observe"),
        lambda reports: progress("unkilled runs", reports.trained_steps, total),
    )
    record = collect(root)
    evidence = Evidence(
        plan,
        observed.other_events["framework"]["name"],
        observed.other_events["framework"]["peer"],
        tuple(observed.unkilled),
        ending_of(observed.other_events["repeat"]["ending"]),
        ending_of(observed.other_events["saving_run"]["ending"]),
        _saves(observed.saved, record),
        _groups(record),
        (),
        tuple(sorted(set().union(*contracts_of(root).values()))),
    )
    return evidence, observed.pace(plan.every)


def killed_runs(
    session: Workers, kills: Sequence[Kill], pace: tuple[float, float], progress: Progress
) -> Iterator[tuple[Kill, Reports, str]]:
    """Run until each kill; yield it, the events before it, and the error of a run that had one."""
    for number, kill in enumerate(kills):
        progress("kills and resumes", number, len(kills))
        before, error = Reports(), ""
        try:
            session.run_until_killed(WorkerTask("save_until_killed", kill), kill, before, pace)
        except DeltacheckError as problem:
            error = str(problem)
        yield kill, before, error
    progress("kills and resumes", len(kills), len(kills))


def contracts_of(root: Path) -> dict[int, set[str]]:
    """Return the contracts that each step of a root uses, as ``LeafCheck.exercise`` names them."""
    opened = deltacheck.open(root)
    return {step: used_contracts(opened.manifest(step)) for step in opened.steps()}


def best_saves(used: Mapping[int, set[str]]) -> list[int]:
    """Return the steps whose restores test all contracts of the policy, ascending.

    If none uses all of them, as moments are bounded first and reused later, these are the last
    steps that use each of them, equally many: kills are spread over them.
    """
    contracts = set().union(*used.values())
    together = [step for step, tested in used.items() if contracts and tested >= contracts]
    # A single one is not enough for kills that are spread.
    if len(together) > 2:
        return together
    steps_of = [[s for s, tested in used.items() if name in tested] for name in contracts]
    fewest = max(3, min(map(len, steps_of), default=0))
    return sorted({step for steps in steps_of for step in steps[-fewest:]})


def recovery_of(
    session: Workers, task: WorkerTask, root: Path, before: Reports, error: str
) -> Recovery:
    """Resume a killed run, and return the result.

    Args:
        session: The workers.
        task: Resumes it.
        root: The root of the killed run, if it has one.
        before: The events before the kill.
        error: The error of the killed run; empty: none.
    """
    kill, acknowledged = task.kill, before.acknowledged_step
    assert kill is not None
    try:
        if error:
            raise EvaluationFailed(error)
        if root.exists() and not deltacheck.open(root).steps():
            raise EvaluationFailed("no checkpoint survived the kill")
        resumed = session.run(task).other_events["resumed"]
    except DeltacheckError as problem:
        # A failed recovery is a result of the evaluation, not its end: the others still count.
        return Recovery(kill, before.step, acknowledged, error=str(problem))
    return Recovery(
        kill,
        before.step,
        acknowledged,
        resumed["restored_step"],
        resumed["restore_seconds"],
        resumed["leaves"],
        tuple(LeafCheck(**leaf) for leaf in resumed["failed"]),
        tuple(LeafCheck(**leaf) for leaf in resumed["inexact"]),
        tuple(resumed["not_put_back"]),
        resumed["stage"],
        ending_of(resumed["ending"]),
        missing_steps=resumed["missing_steps"],
    )


def _saves(events: Sequence[Event], record: Record) -> tuple[MeasuredSave, ...]:
    raw_bytes = {step.step: step.raw_bytes for step in record.steps}
    return tuple(
        MeasuredSave(
            event["step"],
            raw_bytes[event["step"]],
            event["stored_bytes"],
            event["peer_bytes"],
            event["blocking_seconds"],
            event["durable_seconds"],
            event["peer_seconds"],
        )
        for event in events
    )


def _groups(record: Record) -> tuple[LeafGroup, ...]:
    """Sum up the newest step's leaves, those whose paths differ in numbers alone together.

    The groups with the most bytes come first.
    """
    raw_bytes = {path: leaf.raw_bytes for path, leaf in record.leaves.items()}
    groups = []
    for name, paths in classes(raw_bytes, MOST_CLASSES).items():
        leaves = [record.leaves[path] for path in paths]
        save_bytes = sum(leaf.delta_bytes / leaf.saves for leaf in leaves if leaf.saves)
        # Leaves without such a save are written whole every time.
        save_bytes += sum(leaf.key_bytes for leaf in leaves if not leaf.saves)
        key_bytes = sum(leaf.key_bytes for leaf in leaves)
        groups.append(
            LeafGroup(
                name, len(leaves), sum(leaf.raw_bytes for leaf in leaves), key_bytes, save_bytes
            )
        )
    return tuple(sorted(groups, key=lambda group: -group.raw_bytes))
