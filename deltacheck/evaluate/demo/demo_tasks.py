"""`python -m deltacheck.evaluate.demo.demo_tasks FOLDER`: a task of the demo, in its process.

The protocol is that of ``deltacheck.evaluate.worker``.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from deltacheck.evaluate import contract, snapshot
from deltacheck.evaluate.demo.methods import EXACT, METHODS, Method
from deltacheck.evaluate.demo.savers import POLICIES, DemoSaver, open_saver
from deltacheck.evaluate.processes import report
from deltacheck.evaluate.records import EvaluationPlan, WorkerTask
from deltacheck.evaluate.worker import WorkerRun, live_file, main, report_saved, restore_and_check
from deltacheck.evaluate.workload import Factory
from deltacheck.evaluate.workloads.builtin import ProtocolWorkload


def save(plan: EvaluationPlan, folder: Path, factory: Factory) -> None:
    """Train with checkpoints of every method, until the parent kills this process.

    The methods take turns: each save ends before that of the next method begins, except the last
    of a checkpoint, beside which training goes on. Another method is last at each checkpoint.
    """
    run = WorkerRun(factory, plan.first_seed)
    savers = {method.key: _open(method, folder, run) for method in METHODS}
    (folder / "live").mkdir()
    for method in METHODS:  # where ``restore_and_check`` looks for them
        (folder / method.key / "live").symlink_to(folder / "live")
    turns = deque(savers)
    for step in plan.checkpoints():
        loss = run.train_until(step)
        report_saved(savers[turns[-1]].finish(), method=turns[-1], overlapped=True)
        state = run.workload.state()
        # All are kept: a reused moment may have the values of any save before, and is compared with
        # the live ones of that save.
        run.write_snapshot(state, live_file(folder, step))
        turns.rotate()
        report("saving", step=step)
        for key in turns:
            savers[key].save(step, state, run.metrics(loss))
            if key != turns[-1]:
                report_saved(savers[key].finish(), method=key, overlapped=False)
    run.train_until(plan.steps)
    time.sleep(60)  # a short run may end before the signal comes


def restore(plan: EvaluationPlan, folder: Path, factory: Factory) -> None:
    """Restore the newest step of every method, and report the seconds.

    Each is restored twice, and the second time counts: the first one imports modules and reads
    files that are not in memory.
    """
    run, seconds = WorkerRun(factory, plan.first_seed), dict[str, float]()
    for _ in range(2):
        for method in METHODS:
            saver = _open(method, folder, run)
            start_time = time.perf_counter()
            saver.restore(run.workload.state())
            seconds[method.key] = time.perf_counter() - start_time
            saver.close()
    report("restored_all", seconds=seconds)


def resume(plan: EvaluationPlan, folder: Path, factory: Factory, method: Method) -> None:
    """Restore the newest step of a method, compare it with the live state, and train to the end."""
    run = WorkerRun(factory, plan.first_seed)
    saver = _open(method, folder, run)
    if method.is_ours:
        policy = POLICIES[method.key]
        resumed, _ = restore_and_check(run, saver, policy, folder / method.key)
    else:
        resumed = _restore_peer(run, saver, folder)
    if method.key != EXACT:
        saver.close()
    run.train_until(plan.steps)
    if method.key == EXACT:  # for other libraries to read
        saver.save(plan.steps, run.workload.state(), {})
        saver.finish()
        saver.close()
    report("resumed", **resumed, ending=asdict(run.ending(plan.first_seed)))


def _restore_peer(run: WorkerRun, saver: DemoSaver, folder: Path) -> dict[str, Any]:
    """Restore as a peer does, and return the fields of the event that reports it."""
    step, state = saver.restore(run.workload.state())
    restored = snapshot.digests(run.snapshot(state))
    live = snapshot.digests(snapshot.read(live_file(folder, step)))
    run.workload.load(state)
    run.step = step
    report("restored", step=step)
    return {
        "restored_step": step,
        "leaves": len(live),
        "failed": [{"path": path} for path in contract.differences(live, restored)],
        "inexact": [],
    }


def _open(method: Method, folder: Path, run: WorkerRun) -> DemoSaver:
    workload = cast(ProtocolWorkload, run.workload)
    return open_saver(method, folder / method.key, workload.optimizer)


def _perform(task: WorkerTask, plan: EvaluationPlan, folder: Path, factory: Factory) -> None:
    if task.name == "resume":
        [method] = [method for method in METHODS if method.key == task.root]
        resume(plan, folder, factory, method)
    else:
        {"save": save, "restore": restore}[task.name](plan, folder, factory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), _perform)
