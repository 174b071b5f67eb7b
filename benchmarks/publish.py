"""Bytes and processor time of published versions, beside full weights and slime's encoder.

The second table has the compact encoding alone, beside the entropy of the changes of real runs.
"""

from __future__ import annotations

import contextlib
import json
import resource
from dataclasses import dataclass, field
from statistics import median
from time import process_time

import numpy as np
import torch
from numcodecs import Zstd  # type: ignore[import-untyped]
from numpy.typing import NDArray

import deltacheck
from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from deltacheck.backends.torch import Engine
from deltacheck.codec import changed_words
from deltacheck.restore.export import safetensors_header

# From reinforcement learning to fine-tuning.
RATES = (1e-7, 1e-6, 1e-5, 1e-4)
# Real runs: learning rate, steps between two versions, bytes of a changed element promised.
REAL = ((1e-6, 1, 0.8), (1e-6, 10, 0.65), (1e-5, 10, 0.5))
# slime (August 2026): zstd of level 1 of the bytes of old XOR new, a frame for each tensor.
_zstd = Zstd(level=1)


def run(settings: Settings) -> Result:
    """Publish every step of a run at each learning rate."""
    size, steps = (1 << 20, 2) if settings.quick else (112 << 20, 5)
    courses = [_course(settings, rate, size, steps) for rate in RATES]
    rows: list[list[Cell]] = []
    for rate, course in zip(RATES, courses, strict=True):
        for name, way in course.ways.items():
            rows.append(
                [
                    f"{rate:g}",
                    name,
                    median(course.shares),
                    median(way.sizes) / course.raw,
                    median(way.per_element),
                    median(way.of_slime),
                    median(way.publishing) if way.publishing else None,
                    median(way.receiving) if way.receiving else None,
                ]
            )
    columns: dict[str, Unit] = {
        "learning rate": "text",
        "encoding": "text",
        "changed": "ratio",
        "of full weights": "ratio",
        "a changed element": "number",
        "of slime's": "ratio",
        "publish, s per GB": "number",
        "receive, s per GB": "number",
    }
    real = [_Real.of(settings, rate, steps) for rate, steps, _ in REAL]
    real_columns: dict[str, Unit] = {
        "learning rate": "text",
        "steps": "text",
        "changed": "ratio",
        "a changed element": "number",
        "entropy given exponents": "number",
        "entropy alone": "number",
        "encode, s per GB": "number",
        "decode, s per GB": "number",
    }
    real_rows: list[list[Cell]] = [
        [f"{rate:g}", f"{steps}", *course.cells()]
        for (rate, steps, _), course in zip(REAL, real, strict=True)
    ]
    return Result(
        "publish",
        f"a run of random gradients that publishes each step: medians of {steps} versions. Bytes of"
        " all files of a version, of full weights and for each changed bf16 element, beside those"
        " of slime's encoder (old XOR new in zstd-1, with header and index); processor seconds of"
        " this process for each GB of weights, with reading the step from the root and digests",
        [
            Table("published versions", columns, rows),
            Table("compact encoding of real runs, tensor by tensor", real_columns, real_rows),
        ],
        [
            Figure(
                f"bytes for a changed element at lr {rate:g}, compact, of slime's",
                median(course.ways["compact"].of_slime),
                0.5,
            )
            for rate, course in zip(RATES, courses, strict=True)
        ]
        + [
            Figure(
                f"bytes for a changed element at lr {rate:g}, {steps} steps, compact",
                course.encoded / course.changed,
                goal,
            )
            for (rate, steps, goal), course in zip(REAL, real, strict=True)
        ],
    )


@dataclass
class _Real:
    """Bytes and processor seconds of one version of a real run, and entropies in bytes."""

    weights: int = 0
    changed: int = 0
    encoded: int = 0
    entropy: float = 0
    entropy_alone: float = 0
    encoding: float = 0
    decoding: float = 0

    @classmethod
    def of(cls, settings: Settings, rate: float, steps: int) -> _Real:
        training = states.post_trained(states.QUICK if settings.quick else states.REAL, rate)

        def weights() -> dict[str, NDArray[np.uint16]]:
            model = training.state()["model"]
            return {name: _bits(weight).copy() for name, weight in model.items()}

        before = weights()
        for _ in range(steps):
            training.train_step()
        now = weights()
        course = cls()
        for name, old in before.items():
            course.add(old, now[name])
        return course

    def add(self, old: NDArray[np.uint16], new: NDArray[np.uint16]) -> None:
        self.weights += old.size
        if np.array_equal(old, new):
            return
        self.changed += int(np.count_nonzero(old != new))
        self.entropy += _entropy(new - old, old >> 7 & 255) / 8
        self.entropy_alone += _entropy(new - old, np.zeros_like(old)) / 8
        times = []
        for _ in range(5):
            begin = process_time()
            payload = changed_words.encode(old.view(np.uint8), new.view(np.uint8), 2)
            between = process_time()
            decoded = changed_words.decode(payload, old.view(np.uint8), 2)
            times.append((between - begin, process_time() - between))
        assert (decoded.view(np.uint16) == new).all()
        self.encoded += payload.size
        self.encoding += median(encoding for encoding, _ in times)
        self.decoding += median(decoding for _, decoding in times)

    def cells(self) -> list[Cell]:
        sizes = (self.encoded, self.entropy, self.entropy_alone)
        return [
            self.changed / self.weights,
            *(size / self.changed for size in sizes),
            *(seconds / (2 * self.weights) * 1e9 for seconds in (self.encoding, self.decoding)),
        ]


def _entropy(differences: NDArray[np.uint16], classes: NDArray[np.uint16]) -> float:
    """Return the bits of differences, given the class of each."""
    pairs = classes.astype(np.uint32) << 16 | differences
    both = np.unique(pairs, return_counts=True)[1]
    alone = np.unique(classes, return_counts=True)[1]
    return float((alone * np.log2(alone)).sum() - (both * np.log2(both)).sum())


@dataclass
class _Way:
    """One encoding: bytes of versions, and processor seconds for each GB of weights."""

    sizes: list[float] = field(default_factory=list)
    per_element: list[float] = field(default_factory=list)
    of_slime: list[float] = field(default_factory=list)
    publishing: list[float] = field(default_factory=list)
    receiving: list[float] = field(default_factory=list)

    def add(self, size: int, changed: int, slime: int) -> None:
        self.sizes.append(size)
        self.per_element.append(size / changed)
        self.of_slime.append(size / slime)


@dataclass
class _Course:
    """One learning rate: bytes of the weights, shares of changed elements, and each encoding."""

    raw: int
    shares: list[float]
    ways: dict[str, _Way]


def _course(settings: Settings, rate: float, size: int, steps: int) -> _Course:
    folder = settings.folder / f"{rate:g}"
    training = states.Synthetic(size, rate)
    weights = {name: weight.detach() for name, weight in training.weights.items()}
    raw = sum(weight.nbytes for weight in weights.values())
    course = _Course(raw, [], {"slime's own": _Way(), "slime": _Way(), "compact": _Way()})
    with Engine(folder / "run") as engine, contextlib.ExitStack() as stack:
        publishers = {
            name: stack.enter_context(
                deltacheck.Publisher(folder / "run", folder / name, full_every=64, encoding=name)
            )
            for name in ("slime", "compact")
        }
        receivers: dict[str, deltacheck.Receiver] = {}
        for step in range(2 + steps):
            before = {name: _bits(weight).copy() for name, weight in weights.items()}
            training.train_step()
            engine.save(step, {"model": weights}).wait()
            after = {name: _bits(weight) for name, weight in weights.items()}
            changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in after)
            frames = {
                name: _zstd.encode((before[name] ^ after[name]).view(np.uint8)) for name in after
            }
            header = safetensors_header(
                {name: ("uint8", (len(frame),), len(frame)) for name, frame in frames.items()},
                dict.fromkeys(frames, "0" * 32),
            )
            index = json.dumps(dict.fromkeys(frames, "model-00000-of-00001.safetensors"))
            slime = len(header) + len(index) + sum(map(len, frames.values()))
            for name, publisher in publishers.items():
                begin = _seconds()
                version = publisher.poll()
                publish_seconds = _seconds() - begin
                assert version is not None
                if name not in receivers:
                    receivers[name] = deltacheck.Receiver(folder / name)
                begin = _seconds()
                receivers[name].poll()
                receive_seconds = _seconds() - begin
                for tensor, array in receivers[name].tensors.items():
                    assert (array.view(np.uint16).ravel() == after[tensor]).all()
                # The first is full; the second begins with moments of zero.
                if step < 2:
                    continue
                way = course.ways[name]
                files = (folder / name / f"weight_v{version.number:06d}").iterdir()
                way.add(sum(file.stat().st_size for file in files), changed, slime)
                way.publishing.append(publish_seconds / raw * 1e9)
                way.receiving.append(receive_seconds / raw * 1e9)
            if step >= 2:
                course.shares.append(changed / (raw // 2))
                course.ways["slime's own"].add(slime, changed, slime)
    return course


def _bits(weight: torch.Tensor) -> np.ndarray:
    return weight.view(torch.int16).numpy().view(np.uint16).ravel()


def _seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
