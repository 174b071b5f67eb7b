"""Bytes and processor time of published versions, beside full weights and slime's encoder."""

from __future__ import annotations

import resource
from statistics import median

import numpy as np
import torch
from numcodecs import Zstd  # type: ignore[import-untyped]

import deltacheck
from benchmarks import states
from benchmarks.record import Cell, Result, Settings, Table
from deltacheck.backends.torch import Engine
from deltacheck.restore.export import safetensors_header

# From reinforcement learning to fine-tuning.
RATES = (1e-7, 1e-6, 1e-5, 1e-4)
# slime (August 2026): zstd of level 1 of the bytes of old XOR new, a frame for each tensor.
_zstd = Zstd(level=1)


def run(settings: Settings) -> Result:
    """Publish every step of a run at each learning rate."""
    size, steps = (1 << 20, 2) if settings.quick else (112 << 20, 5)
    rows = [_course(settings, rate, size, steps) for rate in RATES]
    columns = {
        "learning rate": "text",
        "weights": "bytes",
        "changed": "ratio",
        "version": "bytes",
        "of full weights": "ratio",
        "a changed element": "number",
        "the same, slime": "number",
        "of slime's": "ratio",
        "publish, s per GB": "number",
        "receive, s per GB": "number",
    }
    return Result(
        "publish",
        f"a run of random gradients that publishes each step: medians of {steps} versions. Bytes of"
        " the files of a version; bytes for a changed bf16 element, beside those of slime's encoder"
        " (the same differences in zstd-1, with the header); processor seconds of this process for"
        " each GB of weights, with all that a step needs: to read it from the root, and digests",
        [Table("published versions", columns, rows)],
    )


def _course(settings: Settings, rate: float, size: int, steps: int) -> list[Cell]:
    folder = settings.folder / f"{rate:g}"
    training = states.Synthetic(size, rate)
    weights = {name: weight.detach() for name, weight in training.weights.items()}
    raw = sum(weight.nbytes for weight in weights.values())
    shares, sizes, theirs, publishing, receiving = [], [], [], [], []
    with (
        Engine(folder / "run") as engine,
        deltacheck.Publisher(folder / "run", folder / "to", full_every=1000) as publisher,
    ):
        receiver = None
        for step in range(2 + steps):
            before = {name: _bits(weight).copy() for name, weight in weights.items()}
            training.train_step()
            engine.save(step, {"model": weights}).wait()
            begin = _seconds()
            version = publisher.poll()
            publish_seconds = _seconds() - begin
            assert version is not None
            receiver = receiver or deltacheck.Receiver(folder / "to")
            begin = _seconds()
            update = receiver.poll()
            receive_seconds = _seconds() - begin
            assert update is not None
            # The first is full; the second begins with moments of zero.
            if step < 2:
                continue
            after = {name: _bits(weight) for name, weight in weights.items()}
            for name, array in receiver.tensors.items():
                assert (array.view(np.uint16).ravel() == after[name]).all()
            changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in after)
            frames = {
                name: _zstd.encode((before[name] ^ after[name]).view(np.uint8)) for name in after
            }
            header = safetensors_header(
                {name: ("uint8", (len(frame),), len(frame)) for name, frame in frames.items()},
                dict.fromkeys(frames, "0" * 32),
            )
            shares.append(changed / (raw // 2))
            sizes.append(version.file_bytes / changed)
            theirs.append((len(header) + sum(map(len, frames.values()))) / changed)
            publishing.append(publish_seconds / raw * 1e9)
            receiving.append(receive_seconds / raw * 1e9)
    bytes_of_version = median(s * c for s, c in zip(sizes, shares, strict=True)) * (raw // 2)
    return [
        f"{rate:g}",
        raw,
        median(shares),
        int(bytes_of_version),
        bytes_of_version / raw,
        median(sizes),
        median(theirs),
        median(sizes) / median(theirs),
        median(publishing),
        median(receiving),
    ]


def _bits(weight: torch.Tensor) -> np.ndarray:
    return weight.view(torch.int16).numpy().view(np.uint16).ravel()


def _seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
