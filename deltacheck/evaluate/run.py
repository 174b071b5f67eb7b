"""The course of an evaluation.

Train without a kill, save beside a peer, kill, restore in a fresh process, compare, and judge. Each
of these is a task of a worker process. This process kills them and combines their reports. It
imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    WaySaves,
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
    # one, or one of each way.
    session = Workers(plan, folder, shared, 1 + (1 + len(plan.ways or [""])) * len(kills(plan)))
    try:
        return _evaluate(session, progress)
    finally:
        session.close()


def _evaluate(session: Workers, progress: Progress) -> Evidence:
    plan = session.plan
    # With the repeat and the saving run.
    total = (len(plan.unkilled_seeds()) + 2) * plan.steps
    observed = session.run(
        WorkerTask("observe"),
        lambda reports: progress("unkilled runs", reports.trained_steps, total),
    )
    record = collect(session.folder / ROOTS / OBSERVED)
    pace = observed.pace(plan.every)
    # Only the first run shows which saves use which contracts, so kills come after it.
    used = contracts_of(session.folder / ROOTS / OBSERVED)
    contracts = tuple(sorted(set().union(*used.values())))
    planned_kills = kills(plan, best_saves(used))
    recoveries: list[Recovery] = []
    way_saves: tuple[WaySaves, ...] = ()
    for number, kill in enumerate(planned_kills):
        progress("kills and resumes", number, len(planned_kills))
        before, error = _until_killed(session, kill, pace)
        way_saves += tuple(_way_saves(before, session.folder, kill, way) for way in plan.ways)
        recoveries += [_recovery(session, kill, way, before, error) for way in plan.ways or ("",)]
    progress("kills and resumes", len(planned_kills), len(planned_kills))
    return Evidence(
        plan,
        observed.other_events["framework"]["name"],
        observed.other_events["framework"]["peer"],
        tuple(observed.unkilled),
        ending_of(observed.other_events["repeat"]["ending"]),
        ending_of(observed.other_events["saving_run"]["ending"]),
        _saves(observed.saved, record),
        _groups(record),
        tuple(recoveries),
        contracts,
        way_saves,
    )


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


def _until_killed(session: Workers, kill: Kill, pace: tuple[float, float]) -> tuple[Reports, str]:
    """Return the reports of a run up to its kill, and why it was not killed, empty if it was."""
    before = Reports()
    try:
        session.run_until_killed(WorkerTask("save_until_killed", kill), kill, before, pace)
    except DeltacheckError as error:
        return before, str(error)
    return before, ""


def _way_saves(before: Reports, folder: Path, kill: Kill, way: str) -> WaySaves:
    saves, root = before.saved_in(way), folder_of(folder, kill) / way / ROOT
    sizes = [save["stored_bytes"] for save in saves]
    if root.exists():
        # These include what was written behind the training to shorten chains.
        sizes = [step.written_bytes for step in collect(root).steps]
    return WaySaves(way, saves, sum(sizes) / max(1, len(sizes)))


def _recovery(session: Workers, kill: Kill, way: str, before: Reports, error: str) -> Recovery:
    root = folder_of(session.folder, kill) / way / ROOT
    acknowledged = before.acknowledged_step(way)
    try:
        if error:
            raise EvaluationFailed(error)
        if root.exists() and not deltacheck.open(root).steps():
            raise EvaluationFailed("no checkpoint survived the kill")
        resumed = session.run(WorkerTask("resume", kill, way)).other_events["resumed"]
    except DeltacheckError as problem:
        # A failed recovery is a result of the evaluation, not its end: the others still count.
        return Recovery(kill, before.step, acknowledged, error=str(problem), way=way)
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
        way=way,
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
