"""Speed of the CUDA encoder relative to the device's own copy, and blocking of its saves.

Without a CUDA device there is nothing to measure, and the result says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.rivals import BLOCKING_SECONDS, EXACT, OursTorch, Rival, TorchSave
from deltacheck.backends.torch.capture import tensor_codec, windows
from deltacheck.codec import adam_law
from deltacheck.codec.base import (
    GRADIENT_LAW,
    LAW_PARTS,
    METHOD_NAMES,
    MORE_PIECES,
    ROW_METHOD,
    STREAMS,
    GroupJob,
)

REPETITIONS = 9
CHUNK_BYTES = 1 << 20
DENSITIES = (0.0, 0.001, 0.02, 0.1, 1.0)

_WORDS = {"bfloat16": torch.int16, "bfloat16, ordered": torch.int16, "float32": torch.int32}
_GROUP = "float32, by the law"

ENCODE_AT_LEAST = 0.70  # of the copy bandwidth, at 2 % of bfloat16
DENSE_AT_LEAST = 0.75  # planes of float32, all changed
HOST_AT_MOST = 0.05  # of the raw bytes, at 2 % of bfloat16

# Each has a bfloat16 weight, a float32 master, two moments and a step counter on the host.
_PARAMETERS = 100
_BYTES_A_PARAMETER = 14
_QUICK_BYTES = 140_000
# The first save writes whole leaves, and the second creates the pools.
_SAVES, _WARMUP_SAVES = 5, 2


def run(settings: Settings) -> Result:
    """Measure encoding and saves if there is a CUDA device."""
    if not torch.cuda.is_available():
        return Result("device", "not measured: there is no CUDA device", [])
    device = tensor_codec.accelerator_of(torch.empty(1, device="cuda"))
    if device is None or device.native is None:
        return Result(
            "device", "not measured: the CUDA encoder cannot be used here, see the log", []
        )
    encoded = encoding(settings, device, "cuda")
    kinds: tuple[type[Rival], ...] = (OursTorch, TorchSave)
    saves = [
        blocking(kind, 2, settings.folder / str(number), "cuda", quick=settings.quick)
        for number, kind in enumerate(kinds)
    ]
    return Result(
        "device",
        f"{encoded.about}. {saves[0].about}",
        [*encoded.tables, *(table for result in saves for table in result.tables)],
        [*encoded.figures, *(figure for result in saves for figure in result.figures)],
    )


def encoding(settings: Settings, device: Any, place: str) -> Result:
    """Measure the encoder against the device's own copy.

    Args:
        settings: With ``quick``, tiny states.
        device: The accelerator that the engine uses, with a device encoder.
        place: Its device in torch. In a rehearsal this is ``"cpu"``, with the emulator.
    """
    size = 8 << 20 if settings.quick else 1 << 30
    if place == "cpu":  # an emulated thread is a thousand times slower than a real one
        size = 256 << 10
    rows, figures = _encoding(device, size, place)
    name = torch.cuda.get_device_name() if place == "cuda" else "emulator"
    about = (
        f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda};"
        f" medians of {REPETITIONS}, by CUDA events. Bytes moved: both arrays once, the streams"
        " once, under diff and planes the base once more; a copy moves two for each of its bytes."
        " With the choice of methods and the placement of streams, without digests"
    )
    columns: dict[str, Unit] = {
        "dtype": "text",
        "changed": "ratio",
        "method": "text",
        "time per GB": "seconds",
        "of copy bandwidth": "ratio",
        "with digests": "seconds",
        "to the host, of raw": "ratio",
    }
    return Result("encoder", about, [Table(f"encoding {size >> 20} MiB", columns, rows)], figures)


def _encoding(device: Any, size: int, place: str) -> tuple[list[list[Cell]], list[Figure]]:
    source, target = (torch.empty(size, dtype=torch.uint8, device=place) for _ in range(2))
    copy_bandwidth = 2 * size / _seconds(place, lambda: target.copy_(source))
    rows: list[list[Cell]] = []
    figures = []
    for name in (*_WORDS, _GROUP):
        for density in DENSITIES if name in _WORDS else (1.0,):
            job = _job(name, density, size, place)
            base = job.base
            original = base.clone()
            device.begin()
            # No group if nothing changed.
            window = MORE_PIECES * size
            groups = list(windows.encode(device, [job], window, lambda used: None, lambda: None))
            encoded = [group.encoded for group in groups]
            streams = sum(stream.size for part in encoded for stream in part.streams.values())
            names = {METHOD_NAMES[m] for part in encoded for m in part.rows[:, ROW_METHOD]}
            methods = "+".join(sorted(names)) or "unchanged"
            plain = _kernels(
                device, place, job, digests=False, before=lambda b=base, o=original: b.copy_(o)
            )
            digested = _kernels(
                device, place, job, digests=True, before=lambda b=base, o=original: b.copy_(o)
            )
            dense = methods in ("diff", "planes", "raw")
            share = ((3 if dense else 2) * size + streams) / plain / copy_bandwidth
            per_gb = 1e9 / size
            rows.append(
                [name, density, methods, plain * per_gb, share, digested * per_gb, streams / size]
            )
            if (name, density) == ("bfloat16", 0.02):
                figures += [
                    Figure(
                        "encode at 2 % of bfloat16, of copy bandwidth",
                        share,
                        ENCODE_AT_LEAST,
                        at_least=True,
                    ),
                    Figure(
                        "bytes to the host at 2 % of bfloat16, of raw", streams / size, HOST_AT_MOST
                    ),
                ]
            if (name, density) == ("float32", 1.0):
                figures.append(
                    Figure(
                        "dense float32, of copy bandwidth",
                        share,
                        DENSE_AT_LEAST,
                        at_least=True,
                    )
                )
    return rows, figures


def encoded_once(device: Any, size: int, place: str, name: str, density: float) -> None:
    """Encode a state once, for a profiler."""
    job = _job(name, density, size, place)
    device.begin()
    window = MORE_PIECES * size
    for _ in windows.encode(device, [job], window, lambda used: None, lambda: None):
        pass


def _job(name: str, density: float, size: int, place: str) -> GroupJob:
    if name == _GROUP:
        return _group(size, place)
    current, base = _state(_WORDS[name], density, size, place)
    width = _WORDS[name].itemsize
    # A small state in a rehearsal is one chunk.
    bounds = np.arange(0, size + 1, min(size, CHUNK_BYTES), np.uint64) // np.uint64(width)
    return GroupJob(current, base, bounds, width, ordered=name == "bfloat16, ordered")


def _group(size: int, place: str) -> GroupJob:
    """Return weights, m and v of float32 in blocks, one step of AdamW after their base."""
    random = torch.Generator(place).manual_seed(7)
    block = min(adam_law.MOST_BLOCK, size // (4 * LAW_PARTS))
    shape = (size // (4 * LAW_PARTS * block), block)
    w, m, v, g = (torch.randn(shape, generator=random, device=place) for _ in range(4))
    w, m, v, g = 0.02 * w, 1e-3 * m, 1e-6 * v * v, (1e-3 * g).bfloat16().float()
    law = adam_law.Law(GRADIENT_LAW, mean=2, square=2, eps=1e-8, rate=-1e-6)
    base = torch.stack((w, m, v), 1)
    m = law.beta1 * m + (1 - law.beta1) * g
    v = law.beta2 * v + (1 - law.beta2) * (g * g)
    current = torch.stack((w + law.rate * (m / (v.sqrt() + law.eps)), m, v), 1)
    words = LAW_PARTS * block
    bounds = np.arange(0, base.numel() + 1, words, np.uint64)
    now, before = (group.reshape(-1).view(torch.uint8) for group in (current, base))
    return GroupJob(now, before, bounds, 4, law=(law.method, law.content()))


def _state(
    dtype: torch.dtype, density: float, size: int, place: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return current and base values as bytes on the device."""
    random = torch.Generator(place).manual_seed(7)
    count = size // dtype.itemsize
    values = torch.randn(count, generator=random, device=place) * 0.02
    if dtype == torch.int16:
        base = values.to(torch.bfloat16).view(dtype)
        moved = base + torch.randint(1, 4, (count,), generator=random, device=place).to(dtype)
    else:
        base = values.view(dtype)
        moved = (values + torch.randn(count, generator=random, device=place) * 2e-7).view(dtype)
    changed = torch.rand(count, generator=random, device=place) < density
    return torch.where(changed, moved, base).view(torch.uint8), base.clone().view(torch.uint8)


def _kernels(
    device: Any, place: str, job: GroupJob, digests: bool, before: Callable[[], object]
) -> float:
    """Return the seconds of the encoder's kernels alone."""
    table = windows.chunk_table(job.current.data_ptr(), job.bounds, job.word_bytes)
    offsets = job.bounds[:-1] * np.uint64(job.word_bytes)
    table["base"] = np.uint64(job.base.data_ptr()) + offsets
    table["ordered"] = job.ordered
    total, chunks = job.current.numel(), table.size
    scratch_bytes = total
    if job.law is not None:
        table["method"], table["law"] = job.law[0], np.void(job.law[1])
    if job.ordered or job.law is not None:
        scratch_bytes *= MORE_PIECES
    host_table = device.pinned(table.nbytes)
    host_table.numpy()[:] = table.view(np.uint8)
    workspace = torch.empty(
        device.native.workspace_bytes(chunks, scratch_bytes), dtype=torch.uint8, device=place
    )
    payload = torch.empty(total, dtype=torch.uint8, device=place)
    small = torch.empty(3, chunks * 32 + len(STREAMS) * 8 + 1024, dtype=torch.uint8, device=place)

    def call() -> None:
        device.native.encode(
            table=host_table.data_ptr(),
            chunks=chunks,
            bytes=scratch_bytes,
            workspace=workspace.data_ptr(),
            rows=small[0].data_ptr(),
            head=small[1].data_ptr(),
            payload=payload.data_ptr(),
            payload_bytes=total,
            digests=small[2].data_ptr() if digests else 0,
            stream=torch.cuda.current_stream().cuda_stream if place == "cuda" else 0,
        )

    return _seconds(place, call, before)


def _seconds(
    place: str, work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    """Return the median device time of ``work``; ``before`` runs each time and is not counted."""
    times = []
    for _ in range(REPETITIONS + 2):
        before()
        if place == "cpu":
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
            continue
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()  # type: ignore[no-untyped-call]
        work()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)  # type: ignore[no-untyped-call]
    return median(times[2:])


class _Training:
    """An AdamW training of random gradients, whose whole state changes at every step."""

    def __init__(self, state_bytes: int, place: str) -> None:
        count = max(1, state_bytes // _BYTES_A_PARAMETER // _PARAMETERS)
        self._place = place
        self._weights = [
            torch.randn(count, device=place).to(torch.bfloat16) for _ in range(_PARAMETERS)
        ]
        self.model = torch.nn.ParameterList(weight.float() for weight in self._weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self, rival: Rival) -> float:
        """Train, and return the seconds of the host within the optimizer's step."""
        for parameter in self.model:
            parameter.grad = torch.randn_like(parameter)
        start = time.perf_counter()
        rival.before_update()
        self.optimizer.step()
        seconds = time.perf_counter() - start
        torch._foreach_copy_(self._weights, [parameter.detach() for parameter in self.model])
        return seconds

    def state(self) -> dict[str, Any]:
        """Return the whole state."""
        return {
            "weights": dict(enumerate(self._weights)),
            "master": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
        }

    def finish(self) -> None:
        """Wait for the device."""
        if self._place == "cuda":
            torch.cuda.synchronize()


def blocking(
    kind: type[Rival], gigabytes: int, folder: Path, place: str, *, quick: bool = False
) -> Result:
    """Measure how long a save blocks the host, and how long it delays the loop.

    Args:
        kind: The way of saving. It may not need a profile.
        gigabytes: The size of the state.
        folder: A new folder for the saves.
        place: The device in torch.
        quick: Use a tiny state in place of this size.
    """
    training = _Training(_QUICK_BYTES if quick else gigabytes * 10**9, place)
    workload = SimpleNamespace(optimizer=training.optimizer, model=training.model)
    profile: Any = None
    rival = kind(folder / "root", SimpleNamespace(workload=workload), profile)
    bare_steps, bare_loops, calls, waits, loops = [], [], [], [], []
    for number in range(_SAVES):
        rival.delete_earlier()
        training.finish()
        start = time.perf_counter()
        bare_steps.append(training.step(rival))
        training.finish()
        bare_loops.append(time.perf_counter() - start)
        start = time.perf_counter()
        wait = rival.save(number, training.state(), {})
        call = time.perf_counter() - start
        step = training.step(rival)
        training.finish()
        loop = time.perf_counter() - start
        wait()
        if number >= _WARMUP_SAVES:
            calls.append(call)
            waits.append(step)
            loops.append(loop)
    rival.close()
    # The first step makes the moments.
    bare_step, bare_loop = median(bare_steps[1:]), median(bare_loops[1:])
    waited = max(0.0, median(waits) - bare_step)
    seconds = median(calls) + waited
    size = f"{gigabytes} GB"
    columns: dict[str, Unit] = {
        "way": "text",
        "save": "seconds",
        "before the next step": "seconds",
        "blocking": "seconds",
        "the device's loop loses": "seconds",
    }
    row: list[Cell] = [kind.name, median(calls), waited, seconds, median(loops) - bare_loop]
    about = (
        f"{size} of AdamW state in {5 * _PARAMETERS} leaves, which changes everywhere; the device"
        f" is idle before each save; medians of {_SAVES - _WARMUP_SAVES}. 'before the next step':"
        f" the step of the optimizer on the host beyond {bare_step * 1e3:.1f} ms without a save."
        " 'the device's loop loses': from the save to the end of the next step on the device,"
        f" beyond {bare_loop * 1e3:.1f} ms"
    )
    figures = [Figure(f"blocking of a save, torch, {size}", seconds, BLOCKING_SECONDS, "seconds")]
    return Result(
        f"blocking, {size}",
        about,
        [Table("a save", columns, [row])],
        figures if kind.name == EXACT else [],
    )
