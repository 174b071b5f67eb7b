"""The story of an evaluation: train without a kill, save beside a peer, kill, restore in a fresh
process, compare, judge.

Each act is a child process (``child.py``); this one watches, kills, and puts together what they
bring back. It imports no framework.
"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

import deltacheck
from deltacheck.errors import DeltacheckError
from deltacheck.evaluate import children
from deltacheck.evaluate.child import PLAN, ROOTS, own_folder
from deltacheck.evaluate.children import Cast, Event
from deltacheck.evaluate.records import (
    Ending,
    Evidence,
    Group,
    Kill,
    LeafCheck,
    Plan,
    Recovery,
    Saved,
)
from deltacheck.evaluate.workload import FOLDER
from deltacheck.report.data import MOST_CLASSES, Record, collect
from deltacheck.report.groups import classes

_CHILD = "deltacheck.evaluate.child"

# Told what is being done, and how many steps of training of how many are behind it.
Progress: TypeAlias = Callable[[str, int, int], None]


class EvaluationFailed(DeltacheckError):
    """A part of the evaluation did not come to its end, so that there is nothing to judge."""


@dataclass(slots=True)
class _Told:
    """What one child has told so far."""

    step: int = 0
    trained: int = 0
    step_seconds: list[float] = field(default_factory=list)
    acknowledged: int = 0
    saved: list[Event] = field(default_factory=list)
    facts: dict[str, Event] = field(default_factory=dict)
    unkilled: list[Ending] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        match event["event"]:
            case "stepped":
                self.step, self.trained = event["step"], self.trained + 1
                self.step_seconds.append(event["seconds"])
            case "acknowledged":
                self.acknowledged = event["step"]
            case "saved":
                self.saved.append(event)
            case "unkilled":
                self.unkilled.append(_ending(event["ending"]))
            case name:
                self.facts[name] = event


def evaluate(
    plan: Plan, folder: Path, progress: Progress = lambda act, done, total: None
) -> Evidence:
    """Do all that the plan says, in ``folder``, which must be empty and is left with roots and
    logs.

    Raises ``EvaluationFailed`` where a part cannot be played, with the end of its log.
    """
    (folder / PLAN).write_bytes(msgspec.json.encode(plan))
    (folder / "made").mkdir()
    cast = Cast(
        _CHILD,
        [str(folder)],
        folder,
        {FOLDER: str(folder / "made")},
        parts=1 + 2 * len(kills(plan)),
    )
    try:
        return _evaluate(plan, folder, cast, progress)
    finally:
        cast.close()


def _evaluate(plan: Plan, folder: Path, cast: Cast, progress: Progress) -> Evidence:
    runs = len(plan.unkilled_seeds()) + 2
    watched = _watch(
        cast,
        folder,
        "observe",
        lambda told: progress("unkilled runs", told.trained, runs * plan.steps),
    )
    record = collect(folder / ROOTS / "observed")
    pace = (
        statistics.median(event["durable_seconds"] for event in watched.saved),
        plan.every * statistics.median(watched.step_seconds),
    )
    recoveries = []
    planned = kills(
        plan, [step.step for step in record.steps if step.bounded_bytes or step.reused_bytes]
    )
    for number, kill in enumerate(planned):
        progress("kills and resumes", number, len(planned))
        recoveries.append(_recovery(cast, folder, kill, pace))
    progress("kills and resumes", len(planned), len(planned))
    return Evidence(
        plan,
        watched.facts["framework"]["name"],
        watched.facts["framework"]["peer"],
        tuple(watched.unkilled),
        _ending(watched.facts["repeat"]["ending"]),
        _ending(watched.facts["saving"]["ending"]),
        _saves(watched.saved, record),
        _groups(record),
        tuple(recoveries),
    )


def kills(plan: Plan, inexact: Collection[int] = ()) -> tuple[Kill, ...]:
    """When processes are to die: spread evenly over the saves but the first, by turns during a save
    and between two; random within that, by seed.

    ``inexact``: the saves that do not promise every bit. Where there are two and more, only they
    are killed at: before, a policy that is not exact does nothing that an exact one does not.
    """
    saves = [step for step in plan.checkpoints() if len(inexact) < 2 or step in inexact][1:]
    found = []
    for seed in plan.killed_seeds():
        dice = random.Random(seed)
        for number in range(plan.kills):
            place = (number + dice.random()) / plan.kills
            step = saves[min(len(saves) - 1, int(place * len(saves)))]
            found.append(Kill(seed, number, step, (number + seed) % 2 == 1, dice.random()))
    return tuple(found)


def _recovery(cast: Cast, folder: Path, kill: Kill, pace: tuple[float, float]) -> Recovery:
    killed = _Told()
    try:
        _watch_and_kill(cast, folder, kill, pace, killed)
        if not deltacheck.open(own_folder(folder, kill) / "root").steps():
            raise EvaluationFailed("no checkpoint survived the kill")
        resumed = _watch(
            cast, folder, f"resumed {msgspec.json.encode(kill).decode()}", lambda told: None
        ).facts["resumed"]
    except DeltacheckError as error:
        return Recovery(kill, killed.step, killed.acknowledged, error=str(error))
    return Recovery(
        kill,
        killed.step,
        killed.acknowledged,
        resumed["restored_step"],
        resumed["restore_seconds"],
        resumed["leaves"],
        tuple(LeafCheck(**leaf) for leaf in resumed["failed"]),
        tuple(LeafCheck(**leaf) for leaf in resumed["inexact"]),
        tuple(resumed["not_put_back"]),
        resumed["stage"],
        _ending(resumed["ending"]),
    )


def _watch(cast: Cast, folder: Path, part: str, heard: Callable[[_Told], None]) -> _Told:
    """Let a child play its part to the end."""
    told = _Told()
    with cast.play(part) as process:
        for event in children.events(process):
            told.hear(event)
            heard(told)
    if process.returncode != 0:
        raise EvaluationFailed(_why(process, folder, told))
    return told


def _watch_and_kill(
    cast: Cast, folder: Path, kill: Kill, pace: tuple[float, float], told: _Told
) -> None:
    """Let a run come to the save that the kill names, and end it there with SIGKILL. ``pace``:
    seconds of a save, and between two.
    """
    with cast.play(f"killed {msgspec.json.encode(kill).decode()}") as process:
        events = children.events(process)
        for event in events:
            told.hear(event)
            if event["event"] == "saving" and event["step"] == kill.saving_step:
                time.sleep(pace[0 if kill.mid_save else 1] * kill.share)
                process.send_signal(signal.SIGKILL)
                break
        for event in events:  # what it had said before it died
            told.hear(event)
    if process.returncode != -signal.SIGKILL:
        raise EvaluationFailed(f"before the kill: {_why(process, folder, told)}")


def _why(process: subprocess.Popen[str], folder: Path, told: _Told) -> str:
    """What ended a child before its time: in its own words, else the end of its log."""
    if "failed" in told.facts:
        return str(told.facts["failed"]["problem"])
    return (
        f"a process ended with exit code {process.returncode}; the end of its"
        f" log:\n{children.end_of_log(folder)}"
    )


def _ending(told: dict[str, Any]) -> Ending:
    losses = {int(step): loss for step, loss in told["losses"].items()}  # JSON has text for keys
    return Ending(told["seed"], losses, told["evaluation"], told["digests"])


def _saves(told: Sequence[Event], record: Record) -> tuple[Saved, ...]:
    raw = {step.step: step.raw_bytes for step in record.steps}
    names = (
        "step",
        "stored_bytes",
        "peer_bytes",
        "blocking_seconds",
        "durable_seconds",
        "peer_seconds",
    )
    return tuple(
        Saved(raw_bytes=raw[event["step"]], **{name: event[name] for name in names})
        for event in told
    )


def _groups(record: Record) -> tuple[Group, ...]:
    """What the leaves of the newest step cost, those that differ in numbers alone together; the
    most bytes first.
    """
    found = []
    for name, paths in classes(
        {path: leaf.raw_bytes for path, leaf in record.leaves.items()}, MOST_CLASSES
    ).items():
        leaves = [record.leaves[path] for path in paths]
        later = sum(leaf.delta_bytes / leaf.saves for leaf in leaves if leaf.saves)
        later += sum(leaf.key_bytes for leaf in leaves if not leaf.saves)  # always written whole
        found.append(
            Group(
                name,
                len(leaves),
                sum(leaf.raw_bytes for leaf in leaves),
                sum(leaf.key_bytes for leaf in leaves),
                later,
            )
        )
    return tuple(sorted(found, key=lambda group: -group.raw_bytes))
