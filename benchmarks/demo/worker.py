"""One task of a demo in a process of its own: `python -m benchmarks.demo.worker FOLDER`.

It differs from ``deltacheck.evaluate.worker`` in that the killed run is saved in several ways.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

from benchmarks.demo.savers import open_saver
from benchmarks.demo.way_records import FINAL_STATE, WayPlan
from deltacheck.evaluate import worker
from deltacheck.evaluate.processes import report
from deltacheck.evaluate.records import LIVE, ROOT, Kill, WorkerTask, folder_of
from deltacheck.evaluate.worker import WorkerRun, live_file, report_saved
from deltacheck.evaluate.workload import Factory


def observe(plan: WayPlan, folder: Path, factory: Factory) -> None:
    """Perform the runs that are not killed, and leave the last state of the first one."""

    def keep(run: WorkerRun, seed: int) -> None:
        if seed == plan.first_seed:
            run.backend.peer_save(run.workload.state(), folder / FINAL_STATE)

    worker.observe(plan, folder, factory, keep)


def save_until_killed(plan: WayPlan, folder: Path, factory: Factory, kill: Kill) -> None:
    """Run with checkpoints, and write each live state to a file as it is saved.

    The ways take turns: each save ends before that of the next way begins, except the last of a
    checkpoint, beside which training goes on. Another way is last at each checkpoint. The parent
    ends the process with SIGKILL, as for ``deltacheck.evaluate.worker.save_until_killed``.
    """
    run, run_folder = WorkerRun(factory, kill.seed), folder_of(folder, kill)
    (run_folder / LIVE).mkdir(parents=True)
    savers = {way: open_saver(way, run_folder / way, run.workload) for way in plan.ways}
    turns = deque(savers)
    for step in (step for step in plan.checkpoints() if step <= kill.saving_step):
        # Ways are timed, and a save should not meet the writing of another state.
        loss = run.train_until(step)
        report_saved(savers[turns[-1]].finish(), way=turns[-1], overlapped=True)
        state = run.workload.state()
        run.write_snapshot(state, live_file(run_folder, step))
        turns.rotate()
        report("saving", step=step)
        for way in turns:
            savers[way].save(step, state, run.metrics(loss))
            if way != turns[-1]:
                report_saved(savers[way].finish(), way=way, overlapped=False)
    # Training goes on behind the last save, until the signal comes.
    run.train_until(min(kill.saving_step + plan.every, plan.steps))
    report_saved(savers[turns[-1]].finish(), way=turns[-1], overlapped=True)
    time.sleep(worker.WAIT_FOR_KILL_SECONDS)


def resume(plan: WayPlan, folder: Path, factory: Factory, kill: Kill, way: str) -> None:
    """Restore the newest step of a way after a kill, compare it, and train on."""
    run, way_folder = WorkerRun(factory, kill.seed), folder_of(folder, kill) / way
    # Ways are compared by a second restore: the first one imports modules and reads files that are
    # not in memory.
    first = open_saver(way, way_folder, run.workload)
    first.restore(run.workload.state())
    first.close()
    saver = open_saver(way, way_folder, run.workload)
    worker.go_on(plan, folder, run, kill, saver, way_folder / ROOT)


def perform(task: WorkerTask, plan: WayPlan, folder: Path, factory: Factory) -> None:
    """Perform a task: ``observe``, ``save_until_killed``, or ``resume`` and the key of a way."""
    name, _, way = task.name.partition(" ")
    if task.kill is None:
        observe(plan, folder, factory)
    elif name == "resume":
        resume(plan, folder, factory, task.kill, way)
    else:
        save_until_killed(plan, folder, factory, task.kill)


if __name__ == "__main__":
    worker.main(Path(sys.argv[1]), WayPlan, perform)
