"""Measure Trainer on two ranks, with the callback and with its own checkpoints: python -m
tests.ranks.trainer_figures FOLDER [PAIRS].

Prints medians over interleaved pairs of runs: the time that a save blocks the training, the bytes
of a save, and the time from the start of a resume to the end of its first step.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Before transformers: it sets the environment.
from tests.ranks.trainer_jobs import ranks, trainer  # isort: skip

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.trainer import DeltaCheckCallback
from deltacheck.backends.torch.trainer.callback import _TrainCall

SAVES, EVERY = 3, 2  # the first save, which writes whole leaves, is not counted


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8000, num_attention_heads=8, **sizes))


# A restarted process imports again. The forked ones do not.
IMPORTS = time.process_time()


class Times(TrainerCallback):  # type: ignore[misc]
    """Records when each step ends, in wall and in processor seconds."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.processor: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.monotonic())
        self.processor.append(time.process_time())


@contextmanager
def timed(
    owner: Any,
    name: str,
    seconds: list[tuple[float, float]],
    counts: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Append the wall and processor seconds of each call of a method that counts."""
    inner = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic(), time.thread_time()
        try:
            return inner(*args, **kwargs)
        finally:
            if counts():
                seconds.append((time.monotonic() - begin[0], time.thread_time() - begin[1]))

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, inner)


def run(folder: Path, ours: bool, steps: int, resume: bool) -> dict[str, Any]:
    times, handles = Times(), []
    saving = [DeltaCheckCallback()] if ours else []
    one = trainer(
        folder,
        *saving,
        times,
        make=model,
        max_steps=steps,
        save_steps=EVERY,
        logging_steps=1000,
        learning_rate=1e-5,
    )
    kept = Engine.save

    def save(self: Engine, *args: Any, **kwargs: Any) -> Any:
        handles.append(kept(self, *args, **kwargs))
        return handles[-1]

    Engine.save = save  # type: ignore[method-assign]
    blocked: list[tuple[float, float]] = []
    waits: list[tuple[float, float]] = []
    begin = time.monotonic()
    # What saves, and the wait of the next step for it.
    saves = (
        timed(_TrainCall, "_log_save_evaluate", blocked, lambda: len(handles) > len(blocked))
        if ours
        else timed(one, "_save_checkpoint", blocked)
    )
    with saves, timed(Engine, "before_update", waits):
        one.train(resume_from_checkpoint=True if resume and not ours else None)
    wait = [sum(part) for part in zip(*waits, strict=True)] if waits else [0.0, 0.0]
    return {
        "blocked": [seconds for seconds, _ in blocked[1:]],
        "processor": [seconds for _, seconds in blocked[1:]],
        "wait": wait[0] / max(1, len(blocked)),
        "bytes": [handle.report.stored_bytes for handle in handles[1:]],
        "first step": times.ends[0] - begin,
        "restart, processor": IMPORTS + times.processor[0],
    }


def main(base: Path, pairs: int) -> None:
    results: dict[str, dict[str, list[float]]] = {"deltacheck": {}, "Trainer": {}}

    def add(name: str, key: str, values: list[float]) -> None:
        results[name].setdefault(key, []).extend(values)

    for pair in range(pairs):
        for name in ("deltacheck", "Trainer") if pair % 2 else ("Trainer", "deltacheck"):
            folder = base / f"{name}-{pair}"
            job = partial(run, folder, name == "deltacheck")
            first = _all(partial(job, SAVES * EVERY, False))
            again = _all(partial(job, SAVES * EVERY + 1, True))
            # A save ends with its slowest rank: Trainer writes on rank 0 alone.
            for key in ("blocked", "processor"):
                add(name, key, list(map(max, zip(*(r[key] for r in first), strict=True))))
            add(name, "wait", [max(of_rank["wait"] for of_rank in first)])
            # A rank reports the bytes that it wrote.
            add(
                name,
                "MB",
                [sum(each) / 1e6 for each in zip(*(r["bytes"] for r in first), strict=True)],
            )
            for key in ("first step", "restart, processor"):
                add(name, key, [max(of_rank[key] for of_rank in again)])
            if name == "Trainer":
                last = folder / f"checkpoint-{SAVES * EVERY}"
                size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
                add(name, "MB", [size / 1e6])
            shutil.rmtree(folder)
    for name, found in results.items():
        print(name, {key: round(statistics.median(each), 4) for key, each in found.items() if each})


def _all(do: Callable[[], Any]) -> list[dict[str, Any]]:
    found = ranks(do)
    failed = [result for result in found if "error" in result or "killed" in result]
    assert not failed, failed
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
