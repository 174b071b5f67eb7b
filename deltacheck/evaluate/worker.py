"""One task of an evaluation in a process of its own: `python -m deltacheck.evaluate.worker FOLDER`.

The task is one line of JSON on standard input. Its results are events on standard output.
``session.py`` is the other side.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import deltacheck
from deltacheck.backends import profiler
from deltacheck.errors import DeltacheckError
from deltacheck.evaluate.comparison import contract, snapshot
from deltacheck.evaluate.comparison.snapshot import Snapshot
from deltacheck.evaluate.processes import report, reserve_stdout
from deltacheck.evaluate.records import (
    BEFORE,
    LIVE,
    MEASURED,
    OBSERVED,
    PLAN,
    PROFILE,
    ROOT,
    ROOTS,
    WEIGHTS,
    Ending,
    EvaluationPlan,
    Kill,
    WorkerTask,
    folder_of,
)
from deltacheck.evaluate.workload import (
    Factory,
    NoWorkload,
    Workload,
    create_workload,
    load_factory,
    saving_module,
)
from deltacheck.policy import Policy
from deltacheck.policy.presets import policy_of
from deltacheck.profile import Profile, sensitivity

# Snapshots of live states that are kept under an exact policy: after a kill, the newest checkpoint
# is that of the save in progress or of the one before.
LIVE_SNAPSHOTS = 3
WAIT_FOR_KILL_SECONDS = 120.0


class WorkerRun:
    """A workload, its current step, and the adapter of the framework that holds its state."""

    def __init__(self, factory: Factory, seed: int) -> None:
        self.workload: Workload = create_workload(factory, seed)
        self.step, self.losses = 0, dict[int, float]()
        # Only the backend of the state's framework is imported: the other may not be installed.
        backend = profiler.backend_of(self.workload.state())
        if backend is None:
            raise NoWorkload("the state of the workload holds neither torch tensors nor JAX arrays")
        self.backend = saving_module(backend)

    def train_until(self, step: int) -> float:
        """Train up to a step, and return the last loss."""
        loss = float("nan")
        while self.step < step:
            start_time = time.perf_counter()
            loss = float(self.workload.step())
            self.step += 1
            self.losses[self.step] = loss
            report("stepped", step=self.step, loss=loss, seconds=time.perf_counter() - start_time)
        return loss

    def snapshot(self, state: Any = None) -> Snapshot:
        """Copy a state, by default the current one."""
        flat = self.backend.flat(self.workload.state() if state is None else state)
        return snapshot.take(flat, self.backend.bytes_of, self._rate())

    def write_snapshot(self, state: Any, file: Path) -> None:
        """Write a state to a file, for the process that comes after a kill."""
        flat = self.backend.flat(state)
        snapshot.write(flat, self.backend.bytes_of, self._rate(), file)

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the metrics of a save."""
        rate = self._rate()
        return {"loss": loss} | ({} if rate is None else {"learning_rate": rate})

    def ending(self, seed: int) -> Ending:
        """Evaluate the run, and digest its state."""
        digests = snapshot.digests(self.snapshot())
        return Ending(seed, self.losses, float(self.workload.evaluate()), digests)

    def _rate(self) -> float | None:
        rate = getattr(self.workload, "learning_rate", None)
        return None if rate is None else float(rate)


def observe(
    plan: EvaluationPlan,
    folder: Path,
    factory: Factory,
    keep: Callable[[WorkerRun, int], None] = lambda run, seed: None,
) -> None:
    """Run all that is not killed, one after the other.

    These are the runs of every seed, a repeat of the first seed, and a run of the first seed with
    checkpoints. ``keep`` is called with each run of a seed at its end, and the seed.
    """
    first = plan.first_seed
    for seed in plan.unkilled_seeds():
        run = WorkerRun(factory, seed)
        if seed == first:
            report("framework", name=run.backend.FRAMEWORK, peer=run.backend.PEER)
        # The profiled run is one of the unkilled runs, so a profile costs no further training.
        if seed == first and plan.profile == MEASURED:
            _profile(run, plan).write(folder / PROFILE)
        _train_and_keep_weights(run, plan, folder, seed)
        keep(run, seed)
        report("unkilled", ending=asdict(run.ending(seed)))
    # The repeat shows if the run is deterministic. Only then are resumed runs compared in bits.
    repeat = WorkerRun(factory, first)
    repeat.train_until(plan.steps)
    report("repeat", ending=asdict(repeat.ending(first)))
    save(plan, folder, factory)


def _train_and_keep_weights(run: WorkerRun, plan: EvaluationPlan, folder: Path, seed: int) -> None:
    """Train to the end, and keep the weights of each checkpoint if a resumed run may differ."""
    places = folder / WEIGHTS / str(seed)
    if not plan.is_lossless and seed in plan.killed_seeds():
        places.mkdir(parents=True)
        for step in plan.checkpoints():
            # A profiled run has come to its end already.
            if step < run.step:
                return
            run.train_until(step)
            weights = contract.trained_weights(run.snapshot())
            with (places / f"{step}.npz").open("wb") as out:
                np.savez(out, *weights.values())  # in the order of paths of every state
    run.train_until(plan.steps)


def _missing_steps(
    run: WorkerRun, folder: Path, seed: int, start: Snapshot, steps: int
) -> float | None:
    """Return the progress since a restore that the run lacks beside the unkilled one.

    Args:
        run: The resumed run, at a checkpoint.
        folder: Of the evaluation.
        seed: Of the run.
        start: The live state at the restored step.
        steps: The number of steps since then.

    Returns:
        Steps, see ``profile.sensitivity.lost_steps``; ``None`` if the weights of the unkilled run
        were not kept.
    """
    file = folder / WEIGHTS / str(seed) / f"{run.step}.npz"
    if not file.exists():
        return None
    before = contract.trained_weights(start)
    with np.load(file, allow_pickle=False) as parts:
        exact = {path: parts[f"arr_{number}"] for number, path in enumerate(before)}
    return sensitivity.lost_steps(before, exact, contract.trained_weights(run.snapshot()), steps)


def save(plan: EvaluationPlan, folder: Path, factory: Factory) -> None:
    """Run the first seed with checkpoints, and save each state as the peer does, too."""
    run, peer_file = WorkerRun(factory, plan.first_seed), folder / "peer"
    saver = run.backend.Saver(folder / ROOTS / OBSERVED, _policy(plan, folder))
    # The first file of a process is slower than the others: imports, and a file system at rest.
    run.backend.peer_save(run.workload.state(), peer_file)
    peer: dict[str, Any] = {}
    for step in plan.checkpoints():
        loss = run.train_until(step)
        # The peer writes while no save of ours is in progress, which would slow it down.
        report_saved(saver.finish(), **peer)
        state = run.workload.state()
        start_time = time.perf_counter()
        peer_bytes = run.backend.peer_save(state, peer_file)
        peer = {"peer_bytes": peer_bytes, "peer_seconds": time.perf_counter() - start_time}
        report("saving", step=step)
        saver.save(step, state, run.metrics(loss))
    run.train_until(plan.steps)
    report_saved(saver.finish(), **peer)
    peer_file.unlink()
    report("saving_run", ending=asdict(run.ending(plan.first_seed)))
    saver.close()


def save_until_killed(plan: EvaluationPlan, folder: Path, factory: Factory, kill: Kill) -> None:
    """Run with checkpoints, and write each live state to a file as it is saved.

    The parent ends the process with SIGKILL. No save begins after that of the kill, so however late
    the signal comes, the newest step is that of the kill or the one before.
    """
    run, run_folder = WorkerRun(factory, kill.seed), folder_of(folder, kill)
    (run_folder / LIVE).mkdir(parents=True)
    saver, files = run.backend.Saver(run_folder / ROOT, _policy(plan, folder)), list[Path]()
    for step in (step for step in plan.checkpoints() if step <= kill.saving_step):
        loss = _train_to_save(plan, run, run_folder, step)
        report_saved(saver.finish())
        state = run.workload.state()
        files.append(live_file(run_folder, step))
        run.write_snapshot(state, files[-1])
        # Under another policy, a restored leaf may have the values of any earlier save.
        for old in files[:-LIVE_SNAPSHOTS] if plan.is_lossless else ():
            old.unlink(missing_ok=True)
        report("saving", step=step)
        saver.save(step, state, run.metrics(loss))
    # Training goes on behind the last save, until the signal comes.
    run.train_until(min(kill.saving_step + plan.every, plan.steps))
    report_saved(saver.finish())
    time.sleep(WAIT_FOR_KILL_SECONDS)


def resume(plan: EvaluationPlan, folder: Path, factory: Factory, kill: Kill) -> None:
    """Restore the newest step after a kill, compare it with the live state, and train on."""
    run, root = WorkerRun(factory, kill.seed), folder_of(folder, kill) / ROOT
    go_on(plan, folder, run, kill, run.backend.Saver(root, _policy(plan, folder)), root)


def go_on(
    plan: EvaluationPlan, folder: Path, run: WorkerRun, kill: Kill, saver: Any, root: Path
) -> None:
    """Restore a killed run as ``resume`` does, from the root of a saver."""
    resumed, start = restore_and_check(run, saver, folder_of(folder, kill), root)
    missing: float | None = None
    for next_step in (number for number in plan.checkpoints() if number > resumed["restored_step"]):
        loss = run.train_until(next_step)
        if missing is None:
            steps = next_step - resumed["restored_step"]
            missing = _missing_steps(run, folder, kill.seed, start, steps)
        # The time between two saves is not measured here, so each save is awaited before the next
        # one.
        saver.finish()
        saver.save(next_step, run.workload.state(), run.metrics(loss))
    run.train_until(plan.steps)
    saver.finish()
    saver.close()
    ending = asdict(run.ending(kill.seed))
    report("resumed", **resumed, missing_steps=missing, ending=ending)


def restore_and_check(
    run: WorkerRun, saver: Any, run_folder: Path, root: Path
) -> tuple[dict[str, Any], Snapshot]:
    """Restore the newest step into a run, and compare it with the live state of the save.

    Args:
        run: A new run.
        saver: The saver of the run before.
        run_folder: Has the live states.
        root: The root of the saver. Without one, it promises every bit.

    Returns:
        The fields of the event that reports it, and the live state.
    """
    start_time = time.perf_counter()
    step, state = saver.restore(run.workload.state())
    seconds = time.perf_counter() - start_time
    manifest = deltacheck.open(root).manifest(step) if root.exists() else None
    restored = run.snapshot(state)
    live_at = cache(lambda earlier: snapshot.read(live_file(run_folder, earlier)))
    before = live_file(run_folder, step, BEFORE)
    live_steps = sorted(int(file.stem) for file in (run_folder / LIVE).glob("*.npz"))
    checks = contract.check(
        live_at(step),
        restored,
        {} if manifest is None else manifest.contracts,
        step,
        live_at,
        cut={} if manifest is None else manifest.tiles,
        earlier_steps=[earlier for earlier in live_steps if earlier < step],
        rate_floor=saver.rate_floor if manifest is not None else 0.0,
    )
    if manifest is not None and before.exists():
        checks = contract.with_rates(
            checks, manifest.contracts, snapshot.read(before), live_at(step)
        )
    # Compared before and after ``load``: a wrong restore is a defect of deltacheck, but a wrong
    # ``load`` is one of the workload.
    run.workload.load(state)
    run.step = step
    loaded = snapshot.digests(run.snapshot())
    report("restored", step=step, seconds=seconds)
    fields = {
        "restored_step": step,
        "restore_seconds": seconds,
        "leaves": len(checks),
        "failed": [asdict(leaf) for leaf in checks if leaf.problem],
        "inexact": [asdict(leaf) for leaf in checks if leaf.contract != "exact"],
        "not_put_back": contract.differences(snapshot.digests(restored), loaded),
        "stage": "" if manifest is None else manifest.stage,
    }
    return fields, live_at(step)


def live_file(run_folder: Path, step: int, folder: str = LIVE) -> Path:
    """Return the file of the live state that was saved at a step."""
    return run_folder / folder / f"{step}.npz"


def _train_to_save(plan: EvaluationPlan, run: WorkerRun, run_folder: Path, step: int) -> float:
    """Train up to a step that is saved, and return the last loss.

    If the policy is not exact, the state one step before is written, too: the change since then
    shows the learning rate of each leaf.
    """
    if not plan.is_lossless and step > run.step:
        run.train_until(step - 1)
        (run_folder / BEFORE).mkdir(exist_ok=True)
        run.write_snapshot(run.workload.state(), live_file(run_folder, step, BEFORE))
        live_file(run_folder, step - LIVE_SNAPSHOTS * plan.every, BEFORE).unlink(missing_ok=True)
    return run.train_until(step)


def _profile(run: WorkerRun, plan: EvaluationPlan) -> Profile:
    """Train to the end, and observe every state that would be saved."""
    observer = deltacheck.Profiler(interval_steps=plan.every, source="deltacheck eval")
    for step in range(1, plan.steps + 1):
        loss = run.train_until(step)
        rate = run.metrics(loss).get("learning_rate")
        observer.observe(step, run.workload.state, loss=loss, learning_rate=rate)
    return observer.profile()


def _policy(plan: EvaluationPlan, folder: Path) -> Policy:
    file = folder / PROFILE if plan.profile == MEASURED else plan.profile
    return policy_of(plan.policy, Profile.read(file) if file else None)


def report_saved(save_times: tuple[int, float, float, int] | None, **fields: Any) -> None:
    """Report the times and the bytes of a save, if one has ended.

    Args:
        save_times: The step, the blocking and the durable seconds, and the stored bytes.
        **fields: Further fields of the report.
    """
    if save_times is not None:
        step, blocking, durable, stored_bytes = save_times
        report(
            "saved",
            step=step,
            blocking_seconds=blocking,
            durable_seconds=durable,
            stored_bytes=stored_bytes,
            **fields,
        )


def _perform(task: WorkerTask, plan: EvaluationPlan, folder: Path, factory: Factory) -> None:
    if task.kill is None:
        observe(plan, folder, factory)
    elif task.name == "resume":
        resume(plan, folder, factory, task.kill)
    else:
        save_until_killed(plan, folder, factory, task.kill)


def main(
    folder: Path,
    kind: type[EvaluationPlan] = EvaluationPlan,
    perform: Callable[[WorkerTask, Any, Path, Factory], None] = _perform,
) -> None:
    """Wait for a task of the plan in a folder, and perform it."""
    reserve_stdout()
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=kind)
    try:
        factory = load_factory(plan.factory)
        line = sys.stdin.readline()
        if line:  # nothing: the evaluation has ended without this process
            perform(msgspec.json.decode(line, type=WorkerTask), plan, folder, factory)
    except Exception as error:
        is_expected = isinstance(error, DeltacheckError)
        problem = str(error) if is_expected else f"{type(error).__name__}: {error}"
        report("failed", problem=problem, workload=not isinstance(error, NoWorkload))
        raise  # the traceback goes to the log


if __name__ == "__main__":
    main(Path(sys.argv[1]))
