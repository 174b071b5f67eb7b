"""Time to find the changes of a model, beside a plain read and the same statistics in torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.encode import CHUNK_BYTES, plain_read, state, threads_restored
from benchmarks.record import Cell, Figure, Result, Settings, Table
from deltacheck import _native
from deltacheck.codec.statistics import statistics

DENSITIES = (0.0, 0.01, 1.0)
TORCH_AT_MOST = 1 / 5  # of torch's time, all tensors dirty
READ_AT_MOST = 1 / 0.95  # of a plain read, nothing dirty


def run(settings: Settings) -> Result:
    """Measure both dtypes at several densities of changes."""
    # Of each of two arrays, which are together a model of 1 GB.
    size = 8 << 20 if settings.quick else 512 << 20
    repetitions = 3 if settings.quick else 5
    rows: list[list[Cell]] = []
    figures = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threads_restored(), ThreadPoolExecutor(1) as pool:
            _native.set_threads(1)
            for name in ("float32", "bfloat16"):
                for density in DENSITIES:
                    current, base = state(name, density, size)
                    # memcmp stops at the first difference: it reads the base twice over.
                    of_read, of_torch = _measure(
                        name, current, base, base.copy(), repetitions, pool
                    )
                    rows.append([name, density, of_read, of_torch])
                    if density == 0:
                        figures.append(
                            Figure(
                                f"nothing dirty, {name}, time over a plain read",
                                of_read,
                                READ_AT_MOST,
                            )
                        )
                    if density == 1:
                        figures.append(
                            Figure(f"all dirty, {name}, time over torch's", of_torch, TORCH_AT_MOST)
                        )
    finally:
        torch.set_num_threads(before)
    about = (
        f"deltacheck.codec.statistics of two arrays of {size >> 20} MiB (changed words, non-finite"
        " values, sums of squares of differences and base, largest difference) on one thread,"
        " beside memcmp of the same bytes, and beside torch, which processes 1 MiB at a time in"
        f" its cache, in float32; interleaved, medians of {repetitions}, in processor time;"
        f" {_native.instruction_set()}"
    )
    columns = {
        "dtype": "text",
        "changed": "ratio",
        "time over a plain read": "ratio",
        "time over torch's": "ratio",
    }
    return Result("detection", about, [Table("statistics", columns, rows)], figures)


def _measure(
    name: str,
    current: NDArray[Any],
    base: NDArray[Any],
    equal: NDArray[Any],
    repetitions: int,
    pool: ThreadPoolExecutor,
) -> tuple[float, float]:
    bounds = np.arange(0, current.nbytes + 1, CHUNK_BYTES, dtype=np.uint64) // np.uint64(
        current.itemsize
    )
    kind = torch.float32 if name == "float32" else torch.bfloat16
    now, shadow = (
        torch.from_numpy(array.view(f"i{array.itemsize}")).view(kind) for array in (current, base)
    )
    times: dict[str, list[float]] = {"ours": [], "read": [], "torch": []}
    for _ in range(repetitions):
        times["read"].append(_seconds(lambda: plain_read(base, equal, 1, pool)))
        times["ours"].append(_seconds(lambda: statistics(current, base, bounds, name)))
        times["torch"].append(_seconds(lambda: _by_torch(now, shadow)))
    ours, read, by_torch = (median(times[way]) for way in ("ours", "read", "torch"))
    return ours / read, ours / by_torch


def _by_torch(current: torch.Tensor, base: torch.Tensor) -> list[torch.Tensor]:
    sums = []
    step = CHUNK_BYTES // current.element_size()
    for now, before in zip(current.split(step), base.split(step), strict=True):
        words = torch.int32 if now.element_size() == 4 else torch.int16
        changed = (now.view(words) != before.view(words)).sum()
        new, old = now.float(), before.float()
        finite = new.isfinite() & old.isfinite()
        difference = torch.where(finite, new - old, 0)
        finite_base = torch.where(finite, old, 0)
        sums += [
            changed,
            new.isfinite().logical_not().sum(),
            difference.square().sum(),
            finite_base.square().sum(),
            difference.abs().max(),
        ]
    return sums


def _seconds(work: Callable[[], object]) -> float:
    start = process_time()
    work()
    return process_time() - start
