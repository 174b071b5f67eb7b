"""Part 3: saves of a PyTorch training on the device, and what part 9 compares them with."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.prepared import SIZES, Size, recipe_of, settle
from benchmarks.record import Cell, Figure, Result, Table, Unit
from benchmarks.rivals import AUTO, EXACT, RIVALS, DcpPinned, Rival
from tests.gpu_kit.stand_in import accelerator, require_device
from tests.gpu_kit.steps import Context, Skipped, Step

LOST_AT_MOST = 1.0  # of what DCP's async_save loses
_DCP = "torch DCP async_save"
WAYS = ("torch.save", _DCP, DcpPinned.name, "torch_checkpointing", EXACT, AUTO)
_KINDS = {kind.name: kind for kind in (*RIVALS["torch"], DcpPinned)}
# 2 decimal gigabytes of state: 14 bytes for each parameter. A save every few seconds, so that most
# ways have ended before the next.
_SIZE = Size(1024, 11, 8, 1e-3, 8, 64)


def block(context: Context, gigabytes: int, way: str) -> Result:
    """Measure how long the saves of one way block, of a state of some size."""
    from benchmarks import device as saves

    kind = _kind(context, way)
    state_bytes = gigabytes * 10**9
    _require_memory(context, state_bytes)
    # Whole leaves and deltas that are nearly as large. Blocking does not depend on the disk.
    with tempfile.TemporaryDirectory(
        prefix="way-", dir=context.fast_folder(4 * state_bytes)
    ) as folder:
        try:
            with accelerator(context):
                return saves.blocking(
                    kind, gigabytes, Path(folder), context.device, quick=context.rehearse
                )
        finally:
            _free(context)


def _kind(context: Context, way: str) -> type[Rival]:
    """Return a way of saving, if it can run here."""
    kind = _KINDS[way]
    if kind.needs and find_spec(kind.needs) is None:
        raise Skipped(f"{kind.needs} is not installed")
    if kind is DcpPinned and context.rehearse:
        raise Skipped("needs a GPU")
    if kind.name == EXACT:
        require_device(context)
    return kind


def compare(context: Context, state: str) -> Result:
    """Measure ways of saving 2 GB of a real training, each with a new run."""
    require_device(context)
    size = SIZES["tiny"] if context.rehearse else _SIZE
    measured = {}
    with accelerator(context):
        for way in WAYS:
            # What was measured until then is kept.
            if context.seconds_left() < 15 and not context.rehearse:
                break
            try:
                measured[way] = measure(context, "torch", state, size, _kind(context, way))
            except Skipped:
                continue
    return summarize(f"{state}, 2 GB", "torch.save", measured)


def _require_memory(context: Context, state_bytes: int) -> None:
    """Skip a size that does not fit: state, shadow, a copy, gradients and temporaries."""
    if context.rehearse:
        return
    import torch

    free, needed = torch.cuda.mem_get_info()[0], 4 * state_bytes
    if free < needed:
        raise Skipped(f"needs {needed / 1e9:.0f} GB of device memory, {free / 1e9:.0f} are free")


def _free(context: Context) -> None:
    """Give back the device memory of a run that nothing refers to."""
    gc.collect()
    if not context.rehearse:
        import torch

        torch.cuda.empty_cache()


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
        return measure_run(
            run, profile, kind, folder / "root", size.every, repeats=2, max_warmup_saves=2
        )
    finally:
        run = profile = None  # type: ignore[assignment]
        gc.collect()
        if framework == "torch":
            _free(context)
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
    if EXACT in measured and _DCP in measured:
        ours, theirs = (median(measured[way]["samples"]["loop loses"]) for way in (EXACT, _DCP))
        figures.append(Figure(f"loop loses, {title}, of {_DCP}", ours / theirs, LOST_AT_MOST))
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
        case = every_step.Case(model, "cuda", steps=4, rounds=1)
    with accelerator(context):
        return every_step.measure(case, context.folder, (every_step.MEMORY, every_step.LAW))


def blocking_steps(
    sizes: Sequence[int], ways: Sequence[str], seconds_per_gigabyte: float
) -> Iterator[Step]:
    """Yield a step for each size in GB and way: a time limit loses no result."""
    for gigabytes in sizes:
        for way in ways:
            yield Step(
                f"blocking, {gigabytes} GB, {way}",
                partial(block, gigabytes=gigabytes, way=way),
                needs=("torch",),
                seconds=5 + seconds_per_gigabyte * gigabytes,
            )


STEPS = (
    *blocking_steps((2, 8, 16), (EXACT,), 2.0),
    *blocking_steps((2,), WAYS[:4], 1.5),
    Step("a save at every step", save_every_step, needs=("torch",), seconds=60),
)
