"""The worker processes of one plan: giving them tasks, collecting their events, killing them."""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from deltacheck.errors import DeltacheckError
from deltacheck.evaluate import processes
from deltacheck.evaluate.processes import Event, WorkerPool
from deltacheck.evaluate.records import PLAN, Ending, EvaluationPlan, Kill, WorkerTask
from deltacheck.evaluate.workload import FOLDER, NoWorkload

_WORKER = "deltacheck.evaluate.worker"


class EvaluationFailed(DeltacheckError):
    """A task of the evaluation failed, so that there is nothing to judge."""


@dataclass(slots=True)
class Reports:
    """The events of one worker so far."""

    step: int = 0
    trained_steps: int = 0
    step_seconds: list[float] = field(default_factory=list)
    saved: list[Event] = field(default_factory=list)
    unkilled: list[Ending] = field(default_factory=list)
    other_events: dict[str, Event] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add an event."""
        match event["event"]:
            case "stepped":
                self.step, self.trained_steps = event["step"], self.trained_steps + 1
                self.step_seconds.append(event["seconds"])
            case "saved":
                self.saved.append(event)
            case "unkilled":
                self.unkilled.append(ending_of(event["ending"]))
            case name:
                self.other_events[name] = event

    @property
    def acknowledged_step(self) -> int:
        """The newest step that was reported durable, 0 without one."""
        return max((event["step"] for event in self.saved), default=0)

    def pace(self, every: int) -> tuple[float, float]:
        """Return the seconds of a save until it is durable, and between two saves."""
        return (
            # Medians, because a single slow save must not delay every kill beyond its save.
            statistics.median(event["durable_seconds"] for event in self.saved),
            every * statistics.median(self.step_seconds),
        )


OnReport = Callable[[Reports], None]


class Workers:
    """The workers of one plan.

    Args:
        plan: Every worker reads it.
        folder: For plan, log and checkpoints.
        shared: An existing folder for what the factory creates once, such as weights.
        tasks: The number of expected tasks.
        module: That of the worker.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        folder: Path,
        shared: Path,
        tasks: int,
        module: str = _WORKER,
    ) -> None:
        self.plan, self.folder = plan, folder
        (folder / PLAN).write_bytes(msgspec.json.encode(plan))
        environment = {FOLDER: str(shared)}
        self._pool = WorkerPool(module, [str(folder)], folder, environment, tasks)

    def run(self, task: WorkerTask, on_report: OnReport = lambda reports: None) -> Reports:
        """Let a worker perform a task to its end.

        Raises:
            EvaluationFailed: The worker failed.
            NoWorkload: The factory does not exist, or makes no workload.
        """
        reports = Reports()
        with self._worker(task) as process:
            for event in processes.events(process):
                reports.add(event)
                on_report(reports)
        # A worker that failed has reported the problem or left it in its log.
        if process.returncode != 0:
            # A factory that does not exist is a mistake in the command line.
            is_run = reports.other_events.get("failed", {}).get("workload", True)
            failure = EvaluationFailed if is_run else NoWorkload
            raise failure(self._reason(process, reports))
        return reports

    def run_until_killed(
        self,
        task: WorkerTask,
        kill: Kill,
        reports: Reports,
        pace: tuple[float, float],
    ) -> None:
        """Let a worker come to the save that a kill names, and end it there with SIGKILL.

        Args:
            task: A task that saves.
            kill: The moment of the kill.
            reports: Is filled with the events of the worker, even if the call fails.
            pace: As ``Reports.pace`` returns it.

        Raises:
            EvaluationFailed: The worker ended before.
        """
        with self._worker(task) as process:
            events = processes.events(process)
            for event in events:
                reports.add(event)
                if (event["event"], event.get("step")) == ("saving", kill.saving_step):
                    save_seconds, between_seconds = pace
                    # Relative to measured times, so that a kill falls into the save on any machine.
                    time.sleep((save_seconds if kill.mid_save else between_seconds) * kill.share)
                    process.send_signal(signal.SIGKILL)
                    break
            for event in events:  # those that it had reported before it died
                reports.add(event)
        # A worker that ended by itself before the signal has not tested any recovery.
        if process.returncode != -signal.SIGKILL:
            raise EvaluationFailed(f"before the kill: {self._reason(process, reports)}")

    def close(self) -> None:
        """End the worker that waits for a task."""
        self._pool.close()

    @contextmanager
    def _worker(self, task: WorkerTask) -> Iterator[subprocess.Popen[str]]:
        with self._pool.worker(msgspec.json.encode(task).decode()) as process:
            yield process

    def _reason(self, process: subprocess.Popen[str], reports: Reports) -> str:
        """Explain the end of a worker by the problem that it reported, else by its log."""
        if "failed" in reports.other_events:
            return str(reports.other_events["failed"]["problem"])
        return (
            f"a process ended with exit code {process.returncode}; the end of its"
            f" log:\n{processes.end_of_log(self.folder)}"
        )


def kills(plan: EvaluationPlan, inexact: Collection[int] = ()) -> tuple[Kill, ...]:
    """Choose when to kill: spread evenly over the saves, in turn during a save and between two.

    The moment within that is random, from the seed. The first save is left out, because a restore
    needs one; so is the last step, after which nothing is left to train.

    Args:
        plan: Gives seeds, saves and the number of kills.
        inexact: The saves that test the policy. If there are at least two, only kills are chosen
            whose restore gets one of them, also if the killed save does not end: before them, a
            policy that is not exact does the same as an exact one.
    """
    checkpoints = plan.checkpoints()
    saves = [
        step
        for before, step in pairwise(checkpoints)
        if len(inexact) < 2 or (step in inexact and before in inexact)
    ]
    if not saves:
        saves = [step for step in checkpoints if step in inexact][1:]
    result = []
    for seed in plan.killed_seeds():
        # Each seed has a generator of its own, so that more seeds do not move the kills of others.
        dice = random.Random(seed)
        for number in range(plan.kills):
            # One random position in each of as many equal parts of the run as there are kills.
            position = (number + dice.random()) / plan.kills
            step = saves[min(len(saves) - 1, int(position * len(saves)))]
            result.append(Kill(seed, number, step, (number + seed) % 2 == 1, dice.random()))
    return tuple(result)


def ending_of(fields: dict[str, Any]) -> Ending:
    """Convert the ending that a worker has reported; JSON has text for keys."""
    losses = {int(step): loss for step, loss in fields["losses"].items()}
    return Ending(fields["seed"], losses, fields["evaluation"], fields["digests"])
