"""One rival on one state, in a process of its own: `python -m benchmarks.race JSON`.

It measures the cost of saves during training, and restores. Training alone alternates with the same
number of steps that begin with a save. The rest of the save is then waited for, as the next save
would, and counts as blocking. ``Job`` describes the argument.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.prepared import Size, load, prepare
from benchmarks.process import Peak, cpu_seconds, trim
from benchmarks.rivals import RIVALS, Rival, sync_tree
from benchmarks.ways import Run
from deltacheck.profile import Profile

MAX_WARMUP_SAVES = 10  # until a rival is in its steady state


@dataclass(frozen=True, slots=True)
class Job:
    """The task of a measuring process.

    ``prepared``: the folder of the run. ``rival``: its name; empty: prepare the run. ``root``: a
    new folder for the saves.
    """

    framework: str
    state: str
    size: Size
    prepared: str
    root: str = ""
    rival: str = ""
    repeats: int = 5

    def as_argument(self) -> str:
        """Return the job as a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, argument: str) -> Job:
        """Read what ``as_argument`` has returned."""
        fields = json.loads(argument)
        return cls(**(fields | {"size": Size(**fields["size"])}))


class Update:
    """The time that a rival and its own hooks take before an optimizer step."""

    def __init__(self, framework: str) -> None:
        self.seconds = 0.0
        self._before = 0.0
        self._rival: Rival | None = None
        self._hooks: list[Any] = []
        self._register: Callable[..., Any] | None = None
        if framework == "torch":
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            self._register = register_optimizer_step_pre_hook
            self._hooks.append(self._register(self._begin))

    def enclose(self, rival: Rival) -> None:
        """Measure the hooks of a rival from now on. Call this once, after the rival's creation."""
        self._rival = rival
        if self._register is not None:
            self._hooks.append(self._register(self._end))

    def remove(self) -> None:
        """Remove the hooks, after the last save."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: object) -> None:
        self._before = time.perf_counter()

    def _end(self, *_: object) -> None:
        assert self._rival is not None
        self._rival.before_update()
        self.seconds += time.perf_counter() - self._before


@dataclass(slots=True)
class Watch:
    """A thread that waits until a save is on disk, and syncs what the rival does not sync."""

    start_time: float
    durable: float = 0.0
    failure: BaseException | None = None
    _thread: threading.Thread | None = None

    def start(self, wait: Callable[[], object], unsynced: Path | None) -> None:
        """Begin to wait."""

        def watch() -> None:
            try:
                wait()
                if unsynced is not None:
                    sync_tree(unsynced)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that joins
                self.failure = error
            self.durable = time.perf_counter() - self.start_time

        self._thread = threading.Thread(target=watch)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread, and raise its failure."""
        assert self._thread is not None
        self._thread.join()
        if self.failure is not None:
            raise self.failure


def measure(job: Job) -> dict[str, Any]:
    """Measure the rival of a job, on the run that ``prepare`` has left."""
    rival_type = next(kind for kind in RIVALS[job.framework] if kind.name == job.rival)
    run, profile = load(job.framework, job.state, job.size, Path(job.prepared))
    return measure_run(run, profile, rival_type, Path(job.root), job.size.every, job.repeats)


def measure_run(
    run: Run,
    profile: Profile,
    rival_type: type[Rival],
    root: Path,
    every: int,
    repeats: int,
    max_warmup_saves: int = MAX_WARMUP_SAVES,
) -> dict[str, Any]:
    """Measure a rival on a run, whose state is lost.

    Args:
        run: A run in its steady state.
        profile: Its profile.
        rival_type: The way of saving.
        root: A new folder for the saves, on the disk to measure.
        every: Training steps between two saves.
        repeats: Measured saves and restores.
        max_warmup_saves: Saves before them, until the rival is in its steady state. Fewer: less
            space on the disk; the result then says that the state is not steady.

    Returns:
        Seconds and bytes: lists with a value for each repeat, and single values of the run.
    """
    run.train(2)  # compiles, and fills the caches of allocators
    gc.collect()
    trim()
    training_peaks = []
    for _ in range(2):
        with Peak() as peak:
            run.train(every)
        training_peaks.append(peak.bytes)
    # Before the saves, so that the disk need not hold both.
    raw_bytes, baseline = _raw_bytes(run), root.parent / "baseline.pt"
    torch_save_bytes = run.torch_save(baseline)
    baseline.unlink()
    update = Update(run.framework)
    rival = rival_type(root.absolute(), run, profile)
    update.enclose(rival)
    peaks: list[int] = []
    first_bytes: int | None = None
    steady = False
    warmup_saves = 0
    while not steady and warmup_saves < max_warmup_saves:
        rival.delete_earlier()
        *_, peak_bytes = _save(rival, run, update, 1)
        peaks.append(peak_bytes)
        stored_bytes = rival.stored(run.workload.step - 1)
        first_bytes = stored_bytes if first_bytes is None else first_bytes
        steady = rival.settled() and warmup_saves > 0
        warmup_saves += 1
    samples: dict[str, list[float]] = {
        name: [] for name in ("blocking", "loop loses", "durable", "cpu", "bytes")
    }
    reported_blocking: list[float] = []
    for _ in range(repeats):
        # Before the training and not right before the save: while files are deleted, JAX frees the
        # arrays of the last step, and a save that comes at once would wait for that.
        rival.delete_earlier()
        start, cpu = time.perf_counter(), cpu_seconds()
        run.train(every)
        bare, bare_cpu = time.perf_counter() - start, cpu_seconds() - cpu
        step = run.workload.step
        cpu = cpu_seconds()
        watch, blocking, seconds, peak_bytes = _save(rival, run, update, every)
        samples["cpu"].append(cpu_seconds() - cpu - bare_cpu)
        samples["blocking"].append(blocking)
        samples["loop loses"].append(seconds - bare)
        samples["durable"].append(watch.durable)
        samples["bytes"].append(rival.stored(step))
        blocking_seconds = rival.reported_blocking()
        if blocking_seconds is not None:
            reported_blocking.append(blocking_seconds)
        peaks.append(peak_bytes)
    rival.delete_earlier()
    _save(rival, run, update, 0)
    rival.close()
    update.remove()
    samples |= _time_restores(rival, run, repeats)
    return {
        "samples": samples,
        "told_blocking": reported_blocking,
        "peak": max(peaks) - max(training_peaks),
        "first_bytes": first_bytes,
        "saves_before": warmup_saves,
        "steady": steady,
        "step_seconds": bare / every,
        "raw_bytes": raw_bytes,
        "torch_save_bytes": torch_save_bytes,
    }


def _save(rival: Rival, run: Run, update: Update, steps: int) -> tuple[Watch, float, float, int]:
    """Delete earlier saves, save, and train.

    Returns:
        The watch, the seconds that the training thread waited, all seconds, the largest memory.
    """
    state, step, metrics = run.workload.state(), run.workload.step, run.metrics(0.0)
    metrics.pop("loss")
    with Peak() as peak:
        update.seconds = 0.0
        start = time.perf_counter()
        watch = Watch(start)
        wait = rival.save(step, state, metrics)
        call_seconds = time.perf_counter() - start
        watch.start(wait, rival.unsynced(step))
        run.train(steps)
        training_end = time.perf_counter()
        watch.join()
        end = time.perf_counter()
    blocking = call_seconds + update.seconds + end - training_end
    return watch, blocking, end - start, peak.bytes


def _time_restores(rival: Rival, run: Run, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of restores of the newest step, which is the live state.

    The run is over. Without overlap, the first forward pass and the first step can begin when the
    restore is complete, so all three times are equal.

    Raises:
        AssertionError: A lossless rival restored another state.
    """
    step, live = run.workload.step, _digests(_flat(run, run.workload.state()))
    times = []
    for _ in range(repeats):
        like = _emptied(run)
        gc.collect()
        trim()  # a new program has no memory that an earlier restore has freed
        start = time.perf_counter()
        state = rival.restore(step, like)
        leaves = _flat(run, state)
        _touch(leaves)
        seconds = time.perf_counter() - start
        if rival.lossless and (wrong := sorted(live.items() - _digests(leaves).items())):
            raise AssertionError(
                f"{rival.name} does not restore {wrong[0][0]!r} and {len(wrong) - 1} more"
            )
        start = time.perf_counter()
        rival.place(state, run)
        times.append(seconds + time.perf_counter() - start)
        del state, like, leaves
    if not rival.overlaps:
        return {"forward": times, "step": times, "complete": times}
    forward, first_step = _time_early_restores(rival, run, step, repeats)
    return {"forward": forward, "step": first_step, "complete": times}


def _time_early_restores(
    rival: Rival, run: Run, step: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Return seconds until the first forward pass can begin, and until the first step can.

    The latter is the time until the first step has ended, without the time of the next step.
    """
    forward, first_step = [], []
    for _ in range(repeats):
        _emptied(run)
        gc.collect()
        trim()
        start = time.perf_counter()
        finish = rival.restore_early(step, run)
        forward.append(time.perf_counter() - start)
        run.train(1)
        ended = time.perf_counter()
        finish()
        begin = time.perf_counter()
        run.train(1)
        first_step.append(ended - start - (time.perf_counter() - begin))
    return forward, first_step


def _flat(run: Run, state: Any) -> Mapping[str, Any]:
    """Return the tensors or arrays by path that every rival saves."""
    if run.framework == "torch":
        from benchmarks import states

        return states.leaves_of(state)
    return run.arrays(state)


def _emptied(run: Run) -> Any:
    """Return the target that a restarted program restores into.

    In torch this is the run's own state, zeroed. In JAX it is the shapes of a deleted state.
    """
    state = run.workload.state()
    if run.framework == "torch":
        for tensor in _flat(run, state).values():
            tensor.detach().zero_()
        return state
    import jax

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        leaf.delete()
        struct: Any = jax.ShapeDtypeStruct
        return struct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(shape, state)


def _touch(arrays: Mapping[str, Any]) -> None:
    """Read a byte of every page, because a file that is only mapped is not restored."""
    for array in arrays.values():
        if hasattr(array, "detach"):
            array.detach().reshape(-1).view(_bytes())[::4096].sum().item()
        else:
            np.asarray(array).reshape(-1).view(np.uint8)[::4096].sum()


def _bytes() -> Any:
    import torch

    return torch.uint8


def _digests(arrays: Mapping[str, Any]) -> dict[str, bytes]:
    from benchmarks.entropy import words_of

    return {path: xxhash.xxh3_128_digest(words_of(array)) for path, array in arrays.items()}


def _raw_bytes(run: Run) -> int:
    return sum(array.nbytes for array in _flat(run, run.workload.state()).values())


def perform(job: Job) -> dict[str, Any] | None:
    """Prepare the run, or measure the rival that the job names."""
    if not job.rival:
        prepare(job.framework, job.state, job.size, Path(job.prepared))
        return None
    return measure(job)


if __name__ == "__main__":
    print(json.dumps(perform(Job.read(sys.argv[1]))))
