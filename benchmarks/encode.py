"""Time to encode, beside a plain read of the same arrays, by the share of changed words."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from deltacheck import _native
from deltacheck.codec import NativeCodec, memory
from deltacheck.codec.base import METHOD_NAMES, ROW_METHOD

DENSITIES = (0.0, 0.001, 0.01, 0.1, 1.0)
CHUNK_BYTES = 1 << 20
WARM_BYTES = 8 << 20  # small enough for a call's output to stay in memory already mapped
PLANES = METHOD_NAMES.index("planes")

# Processor seconds over those of a plain read.
PROMISES = {
    "nothing changed": 1 / 0.95,
    "one pass, 0.1 % changed": 1 / 0.95,
    "one pass, 1 % changed": 1 / 0.95,
}
PROMISES |= {"one pass, 10 % changed": 1 / 0.90, "planes of a first save": 1 / 0.90}

_memcmp = ctypes.CDLL(None).memcmp  # ctypes releases the interpreter lock
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def run(settings: Settings) -> Result:
    """Measure both dtypes at several densities of changes, on one and two threads."""
    size = 8 << 20 if settings.quick else 128 << 20
    repetitions = 3 if settings.quick else 5
    rows: list[list[Cell]] = []
    speeds: dict[str, float] = {}
    with threads_restored():
        for name in ("float32", "bfloat16"):
            for density in DENSITIES:
                current, base = state(name, density, size)
                for threads in (1, 2):
                    row = measure(current, base, threads, repetitions)
                    rows.append([name, density, threads, *row])
                    changes = f"one pass, {100 * density:g} % changed"
                    case = "nothing changed" if density == 0 else changes
                    value = row[3 if density == 0 else 1]
                    if case in PROMISES and isinstance(value, float):
                        speeds[f"{case}, {name}, {threads} threads"] = 1 / value
            for threads in (1, 2):
                speeds[f"planes of a first save, {name}, {threads} threads"] = 1 / first_save(
                    current, base, threads, repetitions
                )
    columns: dict[str, Unit] = {
        "dtype": "text",
        "changed": "ratio",
        "threads": "count",
        "method": "text",
        "one pass": "ratio",
        "with the choice": "ratio",
        "as a save calls it": "ratio",
        "by the clock": "ratio",
        "page faults": "count",
        "decode": "ratio",
        "streams, of raw": "ratio",
        "plain read, MB/s": "count",
    }
    about = (
        f"speed as a share of a plain read (memcmp) of the same two arrays of {size >> 20} MiB on"
        f" as many threads, interleaved, median of {repetitions}, in processor time, which other"
        f" programs disturb less; {_native.instruction_set()}. One pass: compare, compact, update"
        f" the base; the method is given, calls of {WARM_BYTES >> 20} MiB, whose output stays in"
        " warm memory. With the choice: the same and the sampling that chooses the method. As a"
        f" save calls it: {(NativeCodec.run_bytes or size) >> 20} MiB at a time, including the page"
        " faults of its output; the same by the clock. Changes are at random positions: +-1..3"
        " units in the last place (bfloat16), 1e-5 of the spread (float32). Without the entropy"
        " stage and the disk"
    )
    limits = [
        Figure(f"time over a plain read: {name}", value, limit)
        for name, value in speeds.items()
        for case, limit in PROMISES.items()
        if name.startswith(case)
    ]
    return Result("encode", about, [Table("encoder", columns, rows)], limits)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Restore the codec's number of threads at the end."""
    before = _native.threads()
    try:
        yield
    finally:
        _native.set_threads(before)


def state(name: str, density: float, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return current and base values as words."""
    random = np.random.default_rng(7)
    spread = 0.02
    count = size // (4 if name == "float32" else 2)
    values = random.standard_normal(count, np.float32) * np.float32(spread)
    if name == "float32":
        base: NDArray[Any] = values.view(np.uint32)
        steps = random.standard_normal(count, np.float32) * np.float32(spread * 1e-5)
        moved: NDArray[Any] = (values + steps).view(np.uint32)
    else:
        base = (values.view(np.uint32) >> 16).astype(np.uint16)
        ulps = random.integers(1, 4, count, np.uint16)
        moved = np.where(random.random(count, np.float32) < 0.5, base + ulps, base - ulps)
    changed = random.random(count, np.float32) < density
    return np.where(changed, moved, base), base


def bounds_of(size: int, step: int, word_bytes: int) -> list[NDArray[np.uint64]]:
    """Return the chunk bounds of every call, in words."""
    return [
        np.arange(0, min(step, size - start) + 1, CHUNK_BYTES, dtype=np.uint64)
        // np.uint64(word_bytes)
        for start in range(0, size, step)
    ]


def measure(
    current: NDArray[Any], base: NDArray[Any], threads: int, repetitions: int
) -> list[Cell]:
    """Return the cells of one dtype, density and number of threads."""
    codec, width, size = NativeCodec(), current.itemsize, current.nbytes
    step = min(codec.run_bytes or size, size)
    now, original = memory.as_bytes("current", current), memory.as_bytes("base", base)
    shadow = original.copy()

    def encode(step: int, method: int = 0) -> None:
        for number, bounds in enumerate(bounds_of(size, step, width)):
            part = slice(number * step, (number + 1) * step)
            _native.encode(now[part], shadow[part], bounds, width, method)

    _native.set_threads(threads)
    bounds = bounds_of(size, step, width)
    parts = [
        codec.encode(
            now[n * step : (n + 1) * step], shadow[n * step : (n + 1) * step], edges, width
        )[0]
        for n, edges in enumerate(bounds)
    ]
    methods = {int(m) for part in parts for m in part.rows[:, ROW_METHOD]} or {
        METHOD_NAMES.index("sparse")
    }
    method = max(methods)

    def decode() -> None:
        for number, (edges, part) in enumerate(zip(bounds, parts, strict=True)):
            codec.apply(part, shadow[number * step : (number + 1) * step], edges, width)

    works: dict[str, Callable[[], None]] = {
        "pass": lambda: encode(WARM_BYTES, method),
        "choice": lambda: encode(WARM_BYTES),
        "save": lambda: encode(step),
        "decode": decode,
    }
    shares: dict[str, list[float]] = {name: [] for name in works}
    clocks, rates, faults = [], [], []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            for name, work in works.items():
                np.copyto(shadow, original)
                read = timed(lambda: plain_read(shadow, original, threads, pool))
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                seconds = timed(work)
                shares[name].append(read[0] / seconds[0])
                rates.append(2 * size / read[1] / 1e6)
                if name == "save":
                    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
                    clocks.append(read[1] / seconds[1])
    if not np.array_equal(shadow, now):
        raise AssertionError("the decoded values differ from the encoded ones")
    streams = sum(stream.nbytes for part in parts for stream in part.streams.values())
    method_names = "+".join(METHOD_NAMES[m] for m in sorted(methods)) if streams else "unchanged"
    middle = [median(shares[name]) for name in works]
    return [
        method_names,
        *middle[:3],
        median(clocks),
        int(median(faults)),
        middle[3],
        streams / size,
        int(median(rates)),
    ]


def first_save(current: NDArray[Any], base: NDArray[Any], threads: int, repetitions: int) -> float:
    """Return the speed of encoding planes of values, without a base, over a plain read."""
    now, width = memory.as_bytes("current", current), current.itemsize
    original = memory.as_bytes("base", base).copy()
    copy = original.copy()
    bounds = bounds_of(now.nbytes, WARM_BYTES, width)

    def encode() -> None:
        for number, edges in enumerate(bounds):
            _native.encode(
                now[number * WARM_BYTES : (number + 1) * WARM_BYTES], None, edges, width, PLANES
            )

    _native.set_threads(threads)
    encode()
    with ThreadPoolExecutor(threads) as pool:
        return median(
            timed(lambda: plain_read(copy, original, threads, pool))[0] / timed(encode)[0]
            for _ in range(repetitions)
        )


def plain_read(
    left: NDArray[Any], right: NDArray[Any], threads: int, pool: ThreadPoolExecutor
) -> None:
    """Read two equal arrays with memcmp, which is within 4 % of the fastest known loop."""
    share = left.nbytes // threads

    def part(number: int) -> int:
        return int(
            _memcmp(left.ctypes.data + number * share, right.ctypes.data + number * share, share)
        )

    different = part(0) if threads == 1 else sum(map(abs, pool.map(part, range(threads))))
    if different:
        raise AssertionError("the arrays to be read are not equal")


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the processor seconds of the whole process, and the seconds by the clock."""
    start = process_time(), perf_counter()
    work()
    return process_time() - start[0], perf_counter() - start[1]
