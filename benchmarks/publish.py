"""Bytes and processor time of published versions, beside full weights and slime's encoder."""

from __future__ import annotations

import contextlib
import json
import resource
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from numcodecs import Zstd  # type: ignore[import-untyped]

import deltacheck
from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from deltacheck.backends.torch import Engine
from deltacheck.restore.export import safetensors_header

# From reinforcement learning to fine-tuning.
RATES = (1e-7, 1e-6, 1e-5, 1e-4)
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
    return Result(
        "publish",
        f"a run of random gradients that publishes each step: medians of {steps} versions. Bytes of"
        " all files of a version, of full weights and for each changed bf16 element, beside those"
        " of slime's encoder (old XOR new in zstd-1, with header and index); processor seconds of"
        " this process for each GB of weights, with reading the step from the root and digests",
        [Table("published versions", columns, rows)],
        [
            Figure(
                f"bytes for a changed element at lr {rate:g}, compact, of slime's",
                median(course.ways["compact"].of_slime),
                0.5,
            )
            for rate, course in zip(RATES, courses, strict=True)
        ],
    )


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
