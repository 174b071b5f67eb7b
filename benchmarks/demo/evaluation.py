"""The evaluation of a demo: one killed run, saved in several ways and resumed from each."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from benchmarks.demo.way_records import WayEvidence, WayPlan, WayRecovery, WaySaves
from deltacheck.evaluate.records import ROOT, Kill, WorkerTask, folder_of
from deltacheck.evaluate.run import Progress, killed_runs, observe, recovery_of
from deltacheck.evaluate.session import Reports, Workers, kills
from deltacheck.report.data import collect

# Kills come after this share of the steps: before the run is stable, policies that are not exact do
# nearly the same as an exact one.
_EARLIEST_KILL = 0.6


def way_kills(plan: WayPlan) -> tuple[Kill, ...]:
    """Choose when to kill: during the saves of a late checkpoint, of which each way has one."""
    late = [step for step in plan.checkpoints() if _EARLIEST_KILL * plan.steps <= step < plan.steps]
    return tuple(
        replace(kill, mid_save=True, share=kill.share * len(plan.ways))
        for kill in kills(plan, late)
    )


def evaluate(plan: WayPlan, folder: Path, progress: Progress) -> WayEvidence:
    """Perform a plan; the arguments and errors are those of ``deltacheck.evaluate.run``."""
    shared = folder / "made"
    shared.mkdir()
    chosen = way_kills(plan)
    # One task for all runs without a kill, and for each kill the killed run and one for each way.
    tasks = 1 + (1 + len(plan.ways)) * len(chosen)
    session = Workers(plan, folder, shared, tasks, "benchmarks.demo.worker")
    saves: list[WaySaves] = []
    recoveries: list[WayRecovery] = []
    try:
        evidence, pace = observe(session, progress)
        for kill, before, error in killed_runs(session, chosen, pace, progress):
            for way in plan.ways:
                root = folder_of(folder, kill) / way / ROOT
                of_way = replace(before, saved=[e for e in before.saved if e["way"] == way])
                saves.append(_saves(way, of_way, root))
                task = WorkerTask(f"resume {way}", kill)
                recovery = recovery_of(session, task, root, of_way, error)
                values = {field.name: getattr(recovery, field.name) for field in fields(recovery)}
                recoveries.append(WayRecovery(**values, way=way))
    finally:
        session.close()
    values = {field.name: getattr(evidence, field.name) for field in fields(evidence)}
    results = {"recoveries": tuple(recoveries), "way_saves": tuple(saves)}
    return WayEvidence(**(values | results))


def _saves(way: str, before: Reports, root: Path) -> WaySaves:
    sizes = [save["stored_bytes"] for save in before.saved]
    if root.exists():
        # These include what was written behind the training to shorten chains.
        sizes = [step.written_bytes for step in collect(root).steps]
    return WaySaves(way, tuple(before.saved), sum(sizes) / max(1, len(sizes)))
