"""How fast the encoder is, as a fraction of reading its two arrays: `python -m benchmarks.encode [--json FILE]` runs it alone."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.record import Cell, Result, Settings, Table
from deltacheck import _native
from deltacheck.codec import METHOD, METHOD_NAMES, Encoded, NativeCodec

DENSITIES = (0.0, 0.001, 0.01, 0.1, 1.0)
CHUNK_BYTES = 1 << 20
_memcmp = ctypes.CDLL(None).memcmp  # releases the GIL
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def run(settings: Settings) -> Result:
    size = 8 << 20 if settings.quick else 256 << 20
    repetitions = 3 if settings.quick else 7
    rows: list[list[Cell]] = []
    before = _native.threads()
    try:
        for name in ("float32", "bfloat16"):
            for density in DENSITIES:
                current, base = _state(name, density, size)
                for threads in (1, 2):
                    rows.append([name, density, threads, *_measure(current, base, threads, repetitions)])
    finally:
        _native.set_threads(before)
    columns = {
        "dtype": "text",
        "changed": "ratio",
        "threads": "count",
        "method": "text",
        "of a plain read": "ratio",
        "MB/s": "count",
        "decode, of a plain read": "ratio",
        "streams, of raw": "ratio",
    }
    about = (
        f"encoding {size >> 20} MiB against its base, which is updated, in calls of at most {(NativeCodec.run_bytes or size) >> 20} MiB; "
        f"beside reading both arrays once on as many threads, interleaved, median of {repetitions}; instruction set {_native.instruction_set()}. Changes lie at random: "
        "+-1..3 units in the last place (bfloat16), 1e-5 of the spread (float32). Without the entropy stage and the disk"
    )
    return Result("encode", about, [Table("encoder", columns, rows)])


def _state(name: str, density: float, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """(current, base) as words."""
    random = np.random.default_rng(7)
    spread = 0.02
    count = size // (4 if name == "float32" else 2)
    values = random.standard_normal(count, np.float32) * np.float32(spread)
    if name == "float32":
        base = values.view(np.uint32)
        step = random.standard_normal(count, np.float32) * np.float32(spread * 1e-5)
        moved = (values + step).view(np.uint32)
    else:
        base = (values.view(np.uint32) >> 16).astype(np.uint16)
        ulps = random.integers(1, 4, count, np.uint16) * random.choice(np.array([1, 0xFFFF], np.uint16), count)
        moved = base + ulps
    changed = random.random(count, np.float32) < density
    return np.where(changed, moved, base), base


def _measure(current: NDArray[Any], base: NDArray[Any], threads: int, repetitions: int) -> list[Cell]:
    codec, words = NativeCodec(), current.itemsize
    step = codec.run_bytes or current.nbytes
    bounds = [
        np.arange(0, min(step, current.nbytes - at) + 1, CHUNK_BYTES, np.uint64) // np.uint64(words)
        for at in range(0, current.nbytes, step)
    ]
    now, shadow = current.view(np.uint8), base.view(np.uint8).copy()
    methods: set[str] = set()
    streams = 0

    def encode() -> None:
        nonlocal streams
        streams = 0
        for number, edges in enumerate(bounds):
            part = slice(number * step, (number + 1) * step)
            encoded, _ = codec.encode(now[part], shadow[part], edges, words)
            methods.update(METHOD_NAMES[m] for m in encoded.rows[:, METHOD])
            streams += sum(stream.size for stream in encoded.streams.values())

    def encoded_parts() -> list[Encoded]:
        return [
            codec.encode(now[n * step : (n + 1) * step], shadow[n * step : (n + 1) * step], edges, words)[0]
            for n, edges in enumerate(bounds)
        ]

    def decode(parts: list[Encoded]) -> None:
        for number, (edges, part) in enumerate(zip(bounds, parts, strict=True)):
            codec.apply(part, shadow[number * step : (number + 1) * step], edges, words)

    _native.set_threads(threads)
    forward, back, seconds = [], [], []
    original = base.view(np.uint8)
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            np.copyto(shadow, original)
            read = _timed(lambda: _read(shadow, original, threads, pool))
            seconds.append(_timed(encode))
            forward.append(read / seconds[-1])
            np.copyto(shadow, original)
            parts = encoded_parts()
            np.copyto(shadow, original)
            back.append(read / _timed(lambda kept=parts: decode(kept)))  # type: ignore[misc]
            del parts
    rate = int(current.nbytes / median(seconds) / 1e6)
    return ["+".join(sorted(methods)) or "unchanged", median(forward), rate, median(back), streams / current.nbytes]


def _read(one: NDArray[Any], other: NDArray[Any], threads: int, pool: ThreadPoolExecutor) -> None:
    """Read two equal arrays."""
    share = one.nbytes // threads

    def part(number: int) -> int:
        return int(_memcmp(one.ctypes.data + number * share, other.ctypes.data + number * share, share))

    different = part(0) if threads == 1 else sum(map(abs, pool.map(part, range(threads))))
    if different:
        raise AssertionError("the arrays to be read are not equal")


def _timed(work: Callable[[], None]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small arrays: whether it runs.")] = False,
) -> None:
    """Measure the encoder alone."""
    result = run(Settings(quick, Path()))
    result.show(Console())
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
