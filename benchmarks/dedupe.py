"""Bytes of a run in deltacheck, beside stores that deduplicate or compress the files of torch.save.

A deduplicating store cuts files at places that their content decides, keeps each chunk once and
compresses it (restic, and Xet of Hugging Face, which both cut at 64 KiB in the mean). The cutter is
FastCDC (Xia et al., "The design of fast content-defined chunking for data deduplication based
storage systems", 2020), of the package pyfastcdc.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from statistics import mean

import torch
import xxhash
from numcodecs import Zstd  # type: ignore[import-untyped]

from benchmarks import schedules
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.schedules import EXACT, STORED, Course
from benchmarks.ways import Chain
from deltacheck import Policy

CHUNK_BYTES = 64 << 10
SAVES = 30
_COURSES = ("RL, 3 M", "3.3 M (46 MB)")
_DEDUPLICATED, _COMPRESSED = "chunks of 64 KiB, zstd-3", "zstd-3 of each file"
_zstd = Zstd(level=3)


class Chunks:
    """A deduplicating store: it keeps every chunk once."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def add(self, content: bytes) -> int:
        """Store a file; return the compressed bytes of the chunks that are new."""
        added = 0
        for chunk in cut(content):
            digest = xxhash.xxh3_128_digest(chunk)
            if digest not in self._known:
                self._known.add(digest)
                added += len(_zstd.encode(chunk))
        return added


def cut(content: bytes) -> Iterator[bytes]:
    """Yield the chunks of a file, in order."""
    from pyfastcdc import FastCDC

    for chunk in FastCDC(CHUNK_BYTES).cut_buf(content):
        yield content[chunk.offset : chunk.offset + chunk.length]


def run(settings: Settings) -> Result:
    """Measure each course that is installed."""
    saves = 4 if settings.quick else SAVES
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    for number, course in enumerate(schedules.courses(settings)):
        if not settings.quick and not any(name in course.name for name in _COURSES):
            continue
        folder = settings.folder / str(number)
        folder.mkdir()
        shares = measure(course, saves, Settings(settings.quick, folder))
        totals = {way: mean(values) for way, values in shares.items()}
        for way, values in shares.items():
            rows.append([course.name, way, values[0], mean(values[1:]), totals[way]])
        others = [totals[way] for way in (_DEDUPLICATED, _COMPRESSED) if way in totals]
        figures.append(
            Figure(f"{course.name}: exact over the best other way", totals[EXACT] / min(others), 1)
        )
    columns: dict[str, Unit] = {
        "run": "text",
        "way": "text",
        "first": "ratio",
        "later": "ratio",
        "all saves": "ratio",
    }
    about = (
        f"{saves} saves of each run; bytes that a save adds, over the file of torch.save, keyframes"
        " included: the first, the mean of the others, the mean of all"
        + schedules.left_out(settings)
    )
    if find_spec("pyfastcdc") is None:
        about += ". pyfastcdc is not installed, so nothing was cut into chunks"
    return Result("dedupe", about, [Table("bytes of whole runs", columns, rows)], figures)


def measure(course: Course, saves: int, settings: Settings) -> dict[str, list[float]]:
    """Train a course, save it in every way, and return the bytes of each save over torch.save."""
    training = course.start(settings.folder)
    chains = {
        EXACT: Chain("torch", settings.folder / "exact", Policy.exact()),
        STORED: Chain("torch", settings.folder / "stored", Policy.auto(derive=False)),
    }
    others: dict[str, Callable[[bytes], int]] = {
        _COMPRESSED: lambda content: len(_zstd.encode(content))
    }
    if find_spec("pyfastcdc") is not None:
        others[_DEDUPLICATED] = Chunks().add
    sizes: dict[str, list[int]] = {way: [] for way in others}
    peer_bytes = []
    for _ in range(saves):
        loss = mean(training.train_step() for _ in range(course.every))
        metrics = {"loss": loss, "learning_rate": training.rate}
        file = io.BytesIO()
        torch.save(training.state(), file)
        peer_bytes.append(file.tell())
        for way, store in others.items():
            sizes[way].append(store(file.getvalue()))
        for chain in chains.values():
            chain.save(training.step, training.state(), metrics)
    for way, chain in chains.items():
        chain.close()
        sizes[way] = list(chain.bytes.values())
    return {
        way: [size / peer for size, peer in zip(added, peer_bytes, strict=True)]
        for way, added in sizes.items()
    }
