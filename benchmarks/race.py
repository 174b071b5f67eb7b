"""One rival on one state, in a process of its own: what its saves cost a training that goes on, and
what a restore takes.

``python -m benchmarks.race JSON``; see ``Job``. In turns: the training alone, then the same number
of steps that begin with a save. What is left of the save after them is waited for, as the next one
would, and counts as blocking.
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

from benchmarks.prepared import Size, loaded, prepare
from benchmarks.process import Peak, cpu_seconds, trim
from benchmarks.rivals import RIVALS, Rival, sync_tree
from benchmarks.ways import Run

MOST_SAVES_BEFORE = 10  # until a rival is in its steady state


@dataclass(frozen=True, slots=True)
class Job:
    """What a measuring process is asked. ``prepared``: the run's folder; ``rival``: ``""`` asks to
    prepare it; ``root``: for the saves, new.
    """

    framework: str
    state: str
    size: Size
    prepared: str
    root: str = ""
    rival: str = ""
    repeats: int = 5

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, argument: str) -> Job:
        fields = json.loads(argument)
        return cls(**(fields | {"size": Size(**fields["size"])}))


class Update:
    """The time that rivals take before an optimizer step, theirs and what their own hooks
    wait for.
    """

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
        """Call this once the rival exists: what its own hooks take is measured from now on."""
        self._rival = rival
        if self._register is not None:
            self._hooks.append(self._register(self._end))

    def _begin(self, *_: object) -> None:
        self._before = time.perf_counter()

    def _end(self, *_: object) -> None:
        assert self._rival is not None
        self._rival.before_update()
        self.seconds += time.perf_counter() - self._before


@dataclass(slots=True)
class Watch:
    """Waits on a thread of its own until a save is on disk, and syncs what the rival does not."""

    began: float
    durable: float = 0.0
    failure: BaseException | None = None
    _thread: threading.Thread | None = None

    def start(self, wait: Callable[[], object], unsynced: Path | None) -> None:
        def watch() -> None:
            try:
                wait()
                if unsynced is not None:
                    sync_tree(unsynced)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that joins
                self.failure = error
            self.durable = time.perf_counter() - self.began

        self._thread = threading.Thread(target=watch)
        self._thread.start()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join()
        if self.failure is not None:
            raise self.failure


def measure(job: Job) -> dict[str, Any]:
    """Everything one process finds, in seconds and bytes: of each repeat, in lists; of the run,
    alone.
    """
    kind = next(kind for kind in RIVALS[job.framework] if kind.name == job.rival)
    run, profile = loaded(job.framework, job.state, job.size, Path(job.prepared))
    run.train(2)  # compiles, and fills what allocators keep
    gc.collect()
    trim()
    alone = []
    for _ in range(2):
        with Peak() as peak:
            run.train(job.size.every)
        alone.append(peak.bytes)
    update = Update(job.framework)
    rival = kind(Path(job.root).absolute(), run, profile)
    update.enclose(rival)
    peaks: list[int] = []
    first: int | None = None
    steady = False
    before = 0
    while not steady and before < MOST_SAVES_BEFORE:
        *_, peak_bytes = _save(rival, run, update, 1)
        peaks.append(peak_bytes)
        stored = rival.stored(run.workload.step - 1)
        first = stored if first is None else first
        steady = rival.settled() and before > 0
        before += 1
    found: dict[str, list[float]] = {
        name: [] for name in ("blocking", "loop loses", "durable", "cpu", "bytes")
    }
    told: list[float] = []
    for _ in range(job.repeats):
        began, cpu = time.perf_counter(), cpu_seconds()
        run.train(job.size.every)
        bare, bare_cpu = time.perf_counter() - began, cpu_seconds() - cpu
        step = run.workload.step
        cpu = cpu_seconds()
        watch, blocking, seconds, peak_bytes = _save(rival, run, update, job.size.every)
        found["cpu"].append(cpu_seconds() - cpu - bare_cpu)
        found["blocking"].append(blocking)
        found["loop loses"].append(seconds - bare)
        found["durable"].append(watch.durable)
        found["bytes"].append(rival.stored(step))
        said = rival.told_blocking()
        if said is not None:
            told.append(said)
        peaks.append(peak_bytes)
    _save(rival, run, update, 0)
    rival.close()
    raw_bytes, baseline = _raw_bytes(run), Path(job.root).parent / "baseline.pt"
    torch_save_bytes = run.torch_save(baseline)
    baseline.unlink()
    found["restore"] = _restored(rival, run, job.repeats)
    return {
        "samples": found,
        "told_blocking": told,
        "peak": max(peaks) - max(alone),
        "first_bytes": first,
        "saves_before": before,
        "steady": steady,
        "step_seconds": bare / job.size.every,
        "raw_bytes": raw_bytes,
        "torch_save_bytes": torch_save_bytes,
    }


def _save(rival: Rival, run: Run, update: Update, steps: int) -> tuple[Watch, float, float, int]:
    """Delete earlier saves, save and train. The watch, seconds that the training thread waited,
    seconds of all of it, the most memory.
    """
    state, step, metrics = run.workload.state(), run.workload.step, run.metrics(0.0)
    metrics.pop("loss")
    rival.delete_earlier()
    with Peak() as peak:
        update.seconds = 0.0
        began = time.perf_counter()
        watch = Watch(began)
        wait = rival.save(step, state, metrics)
        called = time.perf_counter() - began
        watch.start(wait, rival.unsynced(step))
        run.train(steps)
        trained = time.perf_counter()
        watch.join()
        ended = time.perf_counter()
    return watch, called + update.seconds + ended - trained, ended - began, peak.bytes


def _restored(rival: Rival, run: Run, repeats: int) -> list[float]:
    """Seconds of restores of the newest step, which is the live state: the run is over. Raises
    where a lossless rival gives another.
    """
    step, live = run.workload.step, _digests(_flat(run, run.workload.state()))
    times = []
    for _ in range(repeats):
        like = _emptied(run)
        gc.collect()
        trim()  # a new program has no memory at hand that an earlier restore has left
        began = time.perf_counter()
        state = rival.restore(step, like)
        found = _flat(run, state)
        _touch(found)
        times.append(time.perf_counter() - began)
        if rival.lossless and (wrong := sorted(live.items() - _digests(found).items())):
            raise AssertionError(
                f"{rival.name} does not give back {wrong[0][0]!r} and {len(wrong) - 1} more"
            )
        del state, like, found
    return times


def _flat(run: Run, state: Any) -> Mapping[str, Any]:
    """Tensors or arrays by path, as much as every rival keeps."""
    if run.framework == "torch":
        from benchmarks import states

        return states.leaves_of(state)
    return run.arrays(state)


def _emptied(run: Run) -> Any:
    """What a program has that was started again: in torch the run's own state, all zeros; in JAX
    the shapes of a state that is gone.
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
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]

    return jax.tree.map(shape, state)


def _touch(arrays: Mapping[str, Any]) -> None:
    """Read a byte of every page: a file that is only mapped is not restored."""
    for array in arrays.values():
        if hasattr(array, "detach"):
            array.detach().reshape(-1).view(_bytes()).numpy()[::4096].sum()
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


def answer(job: Job) -> dict[str, Any] | None:
    """Do what the job asks: prepare the run, or measure the rival that it names."""
    if not job.rival:
        prepare(job.framework, job.state, job.size, Path(job.prepared))
        return None
    return measure(job)


if __name__ == "__main__":
    print(json.dumps(answer(Job.read(sys.argv[1]))))
