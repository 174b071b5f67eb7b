"""One part of an evaluation in a process of its own: `python -m deltacheck.evaluate.child FOLDER`,
and
the part on its standard input.

See ``run.py`` for the story.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

import deltacheck
from deltacheck.backends import profiler
from deltacheck.errors import DeltacheckError
from deltacheck.evaluate import contract, snapshot
from deltacheck.evaluate.children import speak_alone, tell
from deltacheck.evaluate.records import Ending, Kill, Plan
from deltacheck.evaluate.snapshot import Snapshot
from deltacheck.evaluate.workload import Factory, NoWorkload, Workload, find, made
from deltacheck.policy import Policy
from deltacheck.profile import Profile

PLAN, PROFILE, ROOTS = "plan.json", "profile.json", "roots"
# Snapshots of live states: the newest checkpoint after a kill is of the save under way, or of the
# one before
LIVE_KEPT = 3
_NO_ONE_KILLS_SECONDS = 120.0


class Run:
    """A workload, the step that it is at, and the framework that its state comes from."""

    def __init__(self, factory: Factory, seed: int) -> None:
        self.workload: Workload = made(factory, seed)
        self.step, self.losses = 0, dict[int, float]()
        self.framework = _framework(self.workload.state())
        self.door: Any = import_module(
            f"deltacheck.backends.{_BACKENDS[self.framework]}.files.evaluation"
        )

    def train_until(self, step: int) -> float:
        """Train up to a step; the last loss."""
        loss = float("nan")
        while self.step < step:
            began = time.perf_counter()
            loss = float(self.workload.step())
            self.step += 1
            self.losses[self.step] = loss
            tell("stepped", step=self.step, seconds=time.perf_counter() - began)
        return loss

    def snapshot(self, state: Any = None) -> Snapshot:
        flat = self.door.flat(self.workload.state() if state is None else state)
        return snapshot.taken(flat, self.door.bytes_of, self._rate())

    def write(self, state: Any, file: Path) -> None:
        """Write a live state down, for the process that comes after this one was killed."""
        snapshot.written(self.door.flat(state), self.door.bytes_of, self._rate(), file)

    def metrics(self, loss: float) -> dict[str, float]:
        rate = self._rate()
        return {"loss": loss} | ({} if rate is None else {"learning_rate": rate})

    def ending(self, seed: int) -> Ending:
        digests = snapshot.digests(self.snapshot())
        return Ending(seed, self.losses, float(self.workload.evaluate()), digests)

    def _rate(self) -> float | None:
        rate = getattr(self.workload, "learning_rate", None)
        return None if rate is None else float(rate)


_BACKENDS = {"torch": "torch", "jax": "orbax"}


def observe(plan: Plan, folder: Path, factory: Factory) -> None:
    """All unkilled runs, one after the other: of every seed, of the first one again, and once more
    with checkpoints and peers.
    """
    first = plan.first_seed
    for seed in plan.unkilled_seeds():
        run = Run(factory, seed)
        if seed == first:
            tell("framework", name=run.framework, peer=run.door.PEER)
        if seed == first and plan.policy == "post_training" and not plan.profile:
            _profile(run, plan).write(folder / PROFILE)
        run.train_until(plan.steps)
        tell("unkilled", ending=asdict(run.ending(seed)))
    repeat = Run(factory, first)
    repeat.train_until(plan.steps)
    tell("repeat", ending=asdict(repeat.ending(first)))
    saving = Run(factory, first)
    saver = saving.door.Saver(folder / ROOTS / "observed", _policy(plan, folder))
    file = folder / "peer"
    state = saving.workload.state()
    saving.door.peer_save(
        state, file
    )  # the first one of a process is slower: imports, and a file system that wakes up
    waiting: dict[str, Any] | None = None
    for step in plan.checkpoints():
        loss = saving.train_until(step)
        # Nothing of ours is under way while the peer writes: it would slow it down.
        _tell_saved(saver.finish(), waiting)
        state = saving.workload.state()
        began = time.perf_counter()
        peer_bytes = saving.door.peer_save(state, file)
        waiting = {"peer_bytes": peer_bytes, "peer_seconds": time.perf_counter() - began}
        saver.save(step, state, saving.metrics(loss))
    saving.train_until(plan.steps)
    _tell_saved(saver.finish(), waiting)
    file.unlink()
    tell("saving", ending=asdict(saving.ending(first)))
    saver.close()


def killed(plan: Plan, folder: Path, factory: Factory, kill: Kill) -> None:
    """A run with checkpoints, whose live states are written down as they are saved. It ends by
    being killed.
    """
    run, own = Run(factory, kill.seed), own_folder(folder, kill)
    (own / "live").mkdir(parents=True)
    saver = run.door.Saver(own / "root", _policy(plan, folder))
    kept: list[Path] = []
    for step in plan.checkpoints():
        loss = run.train_until(step)
        done = saver.finish()
        if done is not None:
            tell("acknowledged", step=done[0])
        state = run.workload.state()
        kept.append(_live(own, step))
        run.write(state, kept[-1])
        for old in (
            kept[:-LIVE_KEPT] if plan.policy == "exact" else ()
        ):  # else a leaf may have the values of any earlier save
            old.unlink(missing_ok=True)
        tell("saving", step=step)
        saver.save(step, state, run.metrics(loss))
    run.train_until(plan.steps)
    time.sleep(_NO_ONE_KILLS_SECONDS)  # a short run may be over before the signal comes


def resumed(plan: Plan, folder: Path, factory: Factory, kill: Kill) -> None:
    """What comes after a kill: restore the newest step, compare it with what was live, and go on,
    with checkpoints, to the end.
    """
    run, own = Run(factory, kill.seed), own_folder(folder, kill)
    root = own / "root"
    saver = run.door.Saver(root, _policy(plan, folder))
    began = time.perf_counter()
    step, state = saver.restore(run.workload.state())
    seconds = time.perf_counter() - began
    manifest = deltacheck.open(root).manifest(step)
    given = run.snapshot(state)
    live_at = cache(lambda earlier: snapshot.read(_live(own, earlier)))
    checked = contract.check(live_at(step), given, manifest.contracts, step, live_at)
    run.workload.load(state)
    run.step = step
    not_put_back = contract.differences(snapshot.digests(given), snapshot.digests(run.snapshot()))
    tell("restored", step=step)
    for later in (later for later in plan.checkpoints() if later > step):
        loss = run.train_until(later)
        saver.finish()
        saver.save(later, run.workload.state(), run.metrics(loss))
    run.train_until(plan.steps)
    saver.finish()
    saver.close()
    tell(
        "resumed",
        restored_step=step,
        restore_seconds=seconds,
        leaves=len(checked),
        failed=[asdict(leaf) for leaf in checked if leaf.problem],
        inexact=[asdict(leaf) for leaf in checked if leaf.contract != "exact"],
        not_put_back=not_put_back,
        stage=manifest.stage,
        ending=asdict(run.ending(kill.seed)),
    )


def own_folder(folder: Path, kill: Kill) -> Path:
    """Of one killed run: its root, and its live states."""
    return folder / ROOTS / f"{kill.seed}-{kill.number}"


def _live(own: Path, step: int) -> Path:
    return own / "live" / f"{step}.npz"


def _profile(run: Run, plan: Plan) -> Profile:
    """Train to the end, looking at every state that would be saved."""
    watched = deltacheck.Profiler(interval_steps=plan.every, source="deltacheck eval")
    for step in range(1, plan.steps + 1):
        loss = run.train_until(step)
        watched.observe(
            step,
            run.workload.state,
            loss=loss,
            learning_rate=run.metrics(loss).get("learning_rate"),
        )
    return watched.profile()


def _policy(plan: Plan, folder: Path) -> Policy:
    if plan.policy == "post_training":
        return Policy.post_training(Profile.read(plan.profile or folder / PROFILE))
    return Policy.model_exact() if plan.policy == "model_exact" else Policy.exact()


def _framework(state: Any) -> str:
    found = {profiler.package_of(array) for array in profiler.flatten(state).arrays.values()}
    if "torch" in found:
        return "torch"
    if found & {"jax", "jaxlib"}:
        return "jax"
    raise NoWorkload("the state of the workload holds neither torch tensors nor JAX arrays")


def _tell_saved(done: tuple[int, float, float, int] | None, peer: dict[str, Any] | None) -> None:
    if done is not None and peer is not None:
        step, blocking, durable, stored = done
        tell(
            "saved",
            step=step,
            blocking_seconds=blocking,
            durable_seconds=durable,
            stored_bytes=stored,
            **peer,
        )


def main(folder: Path) -> None:
    speak_alone()
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    try:
        factory = find(plan.factory)
        part, *about = sys.stdin.readline().split(maxsplit=1) or [
            ""
        ]  # nothing: the evaluation has ended without it
        if part == "observe":
            observe(plan, folder, factory)
        elif part:
            kill = msgspec.json.decode(about[0], type=Kill)
            {"killed": killed, "resumed": resumed}[part](plan, folder, factory, kill)
    except Exception as error:
        tell(
            "failed",
            problem=str(error)
            if isinstance(error, DeltacheckError)
            else f"{type(error).__name__}: {error}",
        )
        raise  # the log has the rest


if __name__ == "__main__":
    main(Path(sys.argv[1]))
