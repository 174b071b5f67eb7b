"""Part 3: saves of a PyTorch training on the device, beside other ways of saving."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.prepared import SIZES, Size, recipe_of, settle
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.rivals import AUTO, EXACT, RIVALS, Rival
from tests.gpu_kit.stand_in import accelerator, require_device
from tests.gpu_kit.steps import Context, Skipped, Step

BLOCKING_AT_MOST = 0.0005  # of torch.save
_WAYS = ("torch.save", "torch DCP async_save", "torch_checkpointing", EXACT, AUTO)
# By decimal gigabytes of state: 14 bytes for each parameter. A save every few seconds, so that most
# ways have ended before the next.
_SIZES = {
    2: Size(1024, 11, 8, 1e-3, 8, 64),
    8: Size(2048, 11, 6, 5e-4, 6, 64),
    16: Size(2048, 22, 6, 5e-4, 6, 64),
}


def encode(context: Context) -> Result:
    """Measure the encoder against the device's own copy."""
    from benchmarks import device as encoder

    with accelerator(context) as device:
        if device.native is None:
            raise RuntimeError("the device fails its test, so there is nothing to measure")
        return encoder.measure(Settings(context.rehearse, context.folder), device, context.device)


def compare(context: Context, gigabytes: int, state: str, ways: Sequence[str]) -> Result:
    """Measure ways of saving the state of a real training, each with a new run."""
    require_device(context)
    if not context.rehearse:
        _require_space(context, gigabytes * 10**9)
    elif gigabytes > min(_SIZES):
        raise Skipped("the rehearsal has one size")
    size = SIZES["tiny"] if context.rehearse else _SIZES[gigabytes]
    kinds = [kind for kind in RIVALS["torch"] if kind.name in ways]
    measured = {}
    with accelerator(context):
        for kind in kinds:
            if not kind.needs or find_spec(kind.needs) is not None:
                measured[kind.name] = measure(context, "torch", state, size, kind)
    return summarize(f"{state}, {gigabytes} GB", "torch.save", measured)


def _require_space(context: Context, state_bytes: int) -> None:
    """Skip a size that does not fit, because every way of saving must be measured alike."""
    import torch

    # State, shadow, gradients and the largest temporaries; whole leaves and three deltas.
    needed = {"device memory": 3 * state_bytes, "free disk": 3 * state_bytes}
    available = {
        "device memory": torch.cuda.mem_get_info()[0],
        "free disk": shutil.disk_usage(context.folder).free,
    }
    for name, size in needed.items():
        if available[name] < size:
            sizes = f"{size / 1e9:.0f} GB, and {available[name] / 1e9:.0f} GB are free"
            raise Skipped(f"needs {name} of {sizes}")


def measure(
    context: Context, framework: str, state: str, size: Size, kind: type[Rival]
) -> Mapping[str, Any]:
    """Measure one way of saving, and release the memory of its run."""
    from benchmarks.race import measure_run
    from benchmarks.ways import Run

    # A new one each time: torch_checkpointing may still write to its own after it was closed.
    folder = Path(tempfile.mkdtemp(prefix="way-", dir=context.folder))
    try:
        run = Run(framework, recipe_of(state, size, context.device))
        profile, _ = settle(run, size)
        # As many saves as 64 GB of disk hold for the largest state.
        return measure_run(
            run,
            profile,
            kind,
            folder / "root",
            size.every,
            repeats=1 if size is _SIZES[16] else 2,
            max_warmup_saves=2,
        )
    finally:
        run = profile = None  # type: ignore[assignment]
        gc.collect()
        if framework == "torch" and not context.rehearse:
            import torch

            torch.cuda.empty_cache()
        shutil.rmtree(folder, ignore_errors=True)


def summarize(title: str, peer: str, measured: Mapping[str, Mapping[str, Any]]) -> Result:
    """Return a table of ways beside a peer, and the promised figure if it can be computed."""
    columns: dict[str, Unit] = {
        "way": "text",
        "blocking": "seconds",
        f"of {peer}": "ratio",
        "loop loses": "seconds",
        "until durable": "seconds",
        "processor": "seconds",
        "bytes": "ratio",
        "restore": "seconds",
        "restore, of it": "ratio",
        "host memory": "bytes",
    }
    reference = measured.get(peer)
    rows: list[list[Cell]] = [list(_cells(way, one, reference)) for way, one in measured.items()]
    figures = []
    if EXACT in measured and reference is not None and peer == "torch.save":
        share = _blocking(measured[EXACT]) / _blocking(reference)
        figures.append(Figure(f"blocking, {title}, of torch.save", share, BLOCKING_AT_MOST))
    any_measured = next(iter(measured.values()))
    about = (
        f"{any_measured['raw_bytes'] / 1e9:.2f} GB of state, a training step takes"
        f" {any_measured['step_seconds'] * 1e3:.0f} ms, a save every few steps; medians of 1 or 2"
        " (bytes: means), relative to the state's bytes in torch.save"
    )
    return Result(title, about, [Table("ways of saving", columns, rows)], figures)


def _cells(
    way: str, measured: Mapping[str, Any], reference: Mapping[str, Any] | None
) -> Iterator[Cell]:
    samples = measured["samples"]
    restore = median(samples["complete"])
    yield way
    yield _blocking(measured)
    yield None if reference is None else _blocking(measured) / _blocking(reference)
    for name in ("loop loses", "durable", "cpu"):
        yield median(samples[name])
    yield mean(samples["bytes"]) / measured["torch_save_bytes"]
    yield restore
    yield None if reference is None else restore / median(reference["samples"]["complete"])
    yield measured["peak"]


def _blocking(measured: Mapping[str, Any]) -> float:
    return float(median(measured["samples"]["blocking"]))


def save_every_step(context: Context) -> Result:
    """Measure a save at every step to the memory tier, with and without the law of Adam."""
    from benchmarks import every_step
    from benchmarks.workloads.recipe import demo

    case = every_step.QUICK
    if not context.rehearse:
        model = demo(seed=1, threads=4, width=1024, layers=16, heads=16, context=2048, batch=8)
        case = every_step.Case(model, "cuda", steps=8, rounds=3)
    with accelerator(context):
        return every_step.measure(case, context.folder, (every_step.MEMORY, every_step.LAW))


def profile(context: Context) -> Result:
    """Measure the profiler's share of a training step."""
    from benchmarks import profiling, states

    if context.rehearse:
        return profiling.measure(states.QUICK, looks=1)
    model = replace(states.REAL, width=1024, layers=11, heads=16, device="cuda")
    return profiling.measure(model, looks=3)


def _step(gigabytes: int, state: str, seconds: float, ways: Sequence[str] = _WAYS) -> Step:
    return Step(
        f"saves of {gigabytes} GB ({state})",
        partial(compare, gigabytes=gigabytes, state=state, ways=ways),
        needs=("torch",),
        seconds=seconds,
    )


STEPS = (
    Step("encoder against the device's copy", encode, needs=("torch",), seconds=40),
    _step(2, "adamw", 70),
    Step("a save at every step", save_every_step, needs=("torch",), seconds=60),
    _step(8, "adamw", 120, ("torch.save", "torch DCP async_save", "torch_checkpointing", EXACT)),
    _step(16, "adamw", 110, ("torch.save", EXACT)),
    Step("cost of the profiler", profile, needs=("torch",), seconds=20),
    _step(2, "rl_like", 50, ("torch.save", EXACT, AUTO)),
)
