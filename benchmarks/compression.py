"""Compression of real AdamW snapshots on one thread, beside other methods in the same run.

The rows are those of a table that was measured before on another model of the same size. Its best
values are the promised figures. The state after `post_trained` is compared with itself some steps
later, at a rate at which one step changes about 2 % of the bf16 weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numcodecs import Zstd  # type: ignore[import-untyped]
from numpy.typing import NDArray

from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.workloads.torch_workloads import Workload
from deltacheck import _native
from deltacheck.backends.torch import Engine
from deltacheck.codec import NativeCodec
from deltacheck.leaf.spec import LeafKind
from deltacheck.store import layout
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import ArraySpec
from deltacheck.store.segment import stream_codec

RATE = 3.4e-6
WEIGHTS, MASTER = "bf16 weights", "fp32 master"
DENSITIES = (0.022, 0.137, 0.527)  # shares of changed bf16 weights to measure at
MAX_STEPS = 150
BEST = (81.0, 17.6, 5.8)  # times smaller, of the earlier table, at these densities
BEST_OF = {MASTER: 2.63, "exp_avg": 1.34, "exp_avg_sq": 1.52}  # after one step
LIMIT_SECONDS_PER_GB = 1 / 1.5  # of raw AdamW state, one thread, in memory

CHUNK_BYTES = 1 << 20
TIMED_BYTES = 64 << 20  # a snapshot is repeated up to this, more than caches hold
REPETITIONS = 5

Leaves = dict[str, torch.Tensor]
Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class Pair:
    """One class of leaves at two steps."""

    name: str
    before: Leaves
    now: Leaves
    best: float  # times smaller, in the earlier table
    word_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.word_bytes = next(iter(self.now.values())).element_size()

    @property
    def raw(self) -> int:
        """Bytes in memory."""
        return sum(leaf.nbytes for leaf in self.now.values())

    def words(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the words of all leaves, before and now."""
        return _words(self.before, self.word_bytes), _words(self.now, self.word_bytes)


def run(settings: Settings) -> Result:
    """Measure every pair."""
    recipe = states.QUICK if settings.quick else states.REAL
    training = states.post_trained(
        recipe, RATE, settle_steps=2 if settings.quick else states.SETTLE_STEPS
    )
    parameters = sum(p.numel() for p in training.model.parameters())
    pairs = list(_pairs(training, 4 if settings.quick else MAX_STEPS))
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    seconds: dict[str, float] = {}
    threads = _native.threads()
    _native.set_threads(1)
    try:
        for number, pair in enumerate(pairs):
            measured = _methods(pair, settings, settings.folder / str(number))
            before, now = pair.words()
            rows += [
                [
                    pair.name,
                    float(np.mean(before != now)),
                    method,
                    round(pair.raw / size, 2),
                    _rate(pair.raw, time),
                ]
                for method, (size, time) in measured.items()
            ]
            figures.append(
                Figure(
                    f"{pair.name}: ours, on disk, of raw",
                    measured[_OURS][0] / pair.raw,
                    1 / pair.best,
                )
            )
            seconds[pair.name] = (measured[_OURS][1] or 0.0) / pair.raw
    finally:
        _native.set_threads(threads)
    pipeline = _pipeline(pairs, seconds)
    figures.append(
        Figure(
            "encoding and compressing 1 GB of AdamW state on one thread",
            pipeline,
            LIMIT_SECONDS_PER_GB,
            "seconds",
        )
    )
    columns: dict[str, Unit] = {
        "leaves": "text",
        "words changed": "ratio",
        "method": "text",
        "times smaller": "count",
        "MB/s": "count",
    }
    about = (
        f"post-training {parameters / 1e6:.1f} M parameters at rate {RATE:g}, each class of leaves"
        " against itself some steps before; MB/s of raw bytes, one thread, in memory, interleaved,"
        f" median of {REPETITIONS}; others: zstd-1. Ours: all files of the segment on disk"
        " (streams, indexes, digests, table, zarr.json), not the manifest"
    )
    return Result(
        "compression",
        about,
        [Table("times smaller", columns, rows)],
        figures,
    )


_BYTE_GROUPS, _XOR, _OURS, _STREAMS = "byte groups, no delta", "xor", "ours", "ours, streams alone"


def _pairs(training: Workload, max_steps: int) -> Iterator[Pair]:
    """Yield the state after one step, and the weights when given shares of them have changed."""
    start = _snapshot(training)
    training.train_step()
    now = _snapshot(training)
    for name, best in BEST_OF.items():
        yield Pair(f"{name}, 1 step", start[name], now[name], best)
    weights, steps = now[WEIGHTS], 1
    for density, best in zip(DENSITIES, BEST, strict=True):
        while steps < max_steps and _changed(start[WEIGHTS], weights) < 0.95 * density:
            training.train_step()
            steps += 1
            weights = _snapshot(training)[WEIGHTS]
        yield Pair(
            f"{WEIGHTS}, {steps} step{'s' if steps > 1 else ''}", start[WEIGHTS], weights, best
        )


def _snapshot(training: Workload) -> dict[str, Leaves]:
    classes = states.by_class(training.state())
    return {
        name: {path: leaf.detach().clone() for path, leaf in classes[name].items()}
        for name in (WEIGHTS, *BEST_OF)
    }


def _changed(before: Leaves, now: Leaves) -> float:
    return float(np.mean(_words(before, 2) != _words(now, 2)))


def _words(leaves: Leaves, word_bytes: int) -> NDArray[Any]:
    joined = np.concatenate(
        [leaf.contiguous().reshape(-1).view(torch.uint8).numpy() for leaf in leaves.values()]
    )
    return joined.view(f"u{word_bytes}")


def _methods(pair: Pair, settings: Settings, folder: Path) -> dict[str, tuple[int, float | None]]:
    """Return bytes for each method, and seconds if they are meaningful."""
    before, now = pair.words()
    times = 1 if settings.quick else -(-TIMED_BYTES // now.nbytes)
    long_before, long_now = np.tile(before, times), np.tile(now, times)
    shadow = long_before.copy()

    ways: dict[str, Callable[[], int]] = {
        _BYTE_GROUPS: lambda: _zstd(_byte_groups(long_now)),
        _XOR: lambda: _zstd((long_now ^ long_before).view(np.uint8)),
        _OURS: lambda: _encode(long_now, shadow),
    }
    sizes: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 if settings.quick else REPETITIONS):
        for name, way in ways.items():
            np.copyto(shadow, long_before)
            start = perf_counter()
            sizes[name] = way()
            seconds[name].append(perf_counter() - start)
    results: dict[str, tuple[int, float | None]] = {
        name: (sizes[name] // times, median(seconds[name]) / times) for name in ways
    }
    segment_bytes, stream_bytes = _on_disk(pair, folder)
    results[_OURS] = (segment_bytes, results[_OURS][1])
    return results | {_STREAMS: (stream_bytes, None)}


def _byte_groups(words: NDArray[Any]) -> Bytes:
    """Return the byte planes of the words, rotated so that the top one has all exponent bits.

    ZipNN (Hershcovitch et al., 2024) arranges bytes like this.
    """
    rotated = (words << 1) | (words >> (8 * words.itemsize - 1))
    return np.ascontiguousarray(rotated.view(np.uint8).reshape(-1, words.itemsize).T).reshape(-1)


def _zstd(data: Bytes) -> int:
    compressor = Zstd(level=1)
    return sum(
        len(compressor.encode(data[start : start + CHUNK_BYTES]))
        for start in range(0, data.size, CHUNK_BYTES)
    )


def _encode(now: NDArray[Any], shadow: NDArray[Any]) -> int:
    """Encode in the runs that a save uses, write the streams to /dev/null, and return their bytes.

    The bytes are those before the entropy stage.
    """
    codec, words = NativeCodec(), now.itemsize
    run = codec.run_bytes or now.nbytes
    total = 0
    with open(os.devnull, "wb") as sink:
        for start in range(0, now.nbytes, run):
            part = slice(start // words, min(now.nbytes, start + run) // words)
            count = part.stop - part.start
            bounds = np.append(np.arange(0, count, CHUNK_BYTES // words), count).astype(np.uint64)
            encoded, _ = codec.encode(now[part], shadow[part], bounds, words)
            for data in encoded.streams.values():
                spec = ArraySpec.flat(data.size, "uint8", stream_codec([data]), {})
                for number in range(spec.file_count):
                    arrays.write_stream_file(sink.fileno(), spec, [data], number)
                total += data.size
    return total


def _on_disk(pair: Pair, folder: Path) -> tuple[int, int]:
    """Return the bytes of all files and of the streams alone in the segment of a save."""
    with Engine(folder) as engine:
        engine.save(0, pair.before).result()
        report = engine.save(1, pair.now).result()
    assert report is not None
    assert all(leaf.kind is not LeafKind.KEYFRAME for leaf in report.leaves)
    newest = max((folder / layout.SEGMENTS).glob("s*"))
    streams = newest.glob(f"{layout.DELTA}.*/c.*")
    return arrays.bytes_on_disk(newest), sum(file.stat().st_size for file in streams)


def _pipeline(pairs: list[Pair], seconds_per_byte: dict[str, float]) -> float:
    """Return the seconds for 1 GB of a state after one step.

    A parameter has 2 bytes of weights and 12 bytes of float32.
    """
    one_step = {pair.word_bytes: 0.0 for pair in pairs}
    for pair in pairs:
        if pair.name.endswith(", 1 step"):
            one_step[pair.word_bytes] += pair.word_bytes * seconds_per_byte[pair.name]
    return sum(one_step.values()) / 14 * 1e9


def _rate(raw: int, seconds: float | None) -> int | None:
    return None if seconds is None else round(raw / seconds / 1e6)
