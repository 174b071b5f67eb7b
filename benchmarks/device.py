"""Speed of the CUDA encoder relative to the device's own copy, and blocking of its saves.

Without a CUDA device there is nothing to measure, and the result says so.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.record import Cell, Figure, Result, Settings, Table
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture import tensor_codec, windows
from deltacheck.codec.base import METHOD_NAMES, ROW_METHOD, STREAMS, GroupJob

REPETITIONS = 9
CHUNK_BYTES = 1 << 20
DENSITIES = (0.0, 0.001, 0.02, 0.1, 1.0)

ENCODE_AT_LEAST = 0.70  # of the copy bandwidth, at 2 % of bfloat16
DENSE_AT_LEAST = 0.75  # planes of float32, all changed
HOST_AT_MOST = 0.05  # of the raw bytes, at 2 % of bfloat16
BLOCKING_AT_MOST = 0.0005  # of torch.save


def run(settings: Settings) -> Result:
    """Measure encoding and saves if there is a CUDA device."""
    if not torch.cuda.is_available():
        return Result("device", "not measured: there is no CUDA device", [])
    device = tensor_codec.accelerator_of(torch.empty(1, device="cuda"))
    if device is None or device.native is None:
        return Result(
            "device", "not measured: the CUDA encoder cannot be used here, see the log", []
        )
    return measure(settings, device, "cuda")


def measure(settings: Settings, device: Any, place: str) -> Result:
    """Measure encoding and saves.

    Args:
        settings: With ``quick``, tiny states.
        device: The accelerator that the engine uses, with a device encoder.
        place: Its device in torch. In a rehearsal this is ``"cpu"``, with the emulator.
    """
    size = 8 << 20 if settings.quick else 1 << 30
    if place == "cpu":  # an emulated thread is a thousand times slower than a real one
        size = 256 << 10
    rows, figures = _encoding(device, size, place)
    blocking_rows, blocking = _blocking(settings, 16 << 20 if settings.quick else 4 << 30, place)
    name = torch.cuda.get_device_name() if place == "cuda" else "emulator"
    about = (
        f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda};"
        f" medians of {REPETITIONS}, by CUDA events. Bytes moved: both arrays once, the streams"
        " once, under diff and planes the base once more; a copy moves two for each of its bytes."
        " With the choice of methods and the placement of streams, without digests"
    )
    columns = {
        "dtype": "text",
        "changed": "ratio",
        "method": "text",
        "time per GB": "seconds",
        "of copy bandwidth": "ratio",
    }
    more_columns = {"with digests": "seconds", "to the host, of raw": "ratio"}
    return Result(
        "device",
        about,
        [
            Table(f"encoding {size >> 20} MiB", columns | more_columns, rows),
            Table(
                "a save",
                {"way": "text", "blocking": "seconds", "of torch.save": "ratio"},
                blocking_rows,
            ),
        ],
        figures + blocking,
    )


def _encoding(device: Any, size: int, place: str) -> tuple[list[list[Cell]], list[Figure]]:
    source, target = (torch.empty(size, dtype=torch.uint8, device=place) for _ in range(2))
    copy_bandwidth = 2 * size / _seconds(place, lambda: target.copy_(source))
    rows: list[list[Cell]] = []
    figures = []
    for name, dtype in (("bfloat16", torch.int16), ("float32", torch.int32)):
        for density in DENSITIES:
            current, base = _state(dtype, density, size, place)
            width = dtype.itemsize
            job = GroupJob(
                current,
                base,
                np.arange(0, size + 1, CHUNK_BYTES, np.uint64) // np.uint64(width),
                width,
            )
            original = base.clone()
            device.begin()
            # No group if nothing changed.
            groups = list(windows.encode(device, [job], size, lambda used: None, lambda: None))
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
                        f"{methods} of float32, of copy bandwidth",
                        share,
                        DENSE_AT_LEAST,
                        at_least=True,
                    )
                )
    return rows, figures


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
    table = np.zeros(job.bounds.size - 1, windows.CHUNK)
    offsets = job.bounds[:-1] * np.uint64(job.word_bytes)
    table["current"], table["base"] = (
        np.uint64(job.current.data_ptr()) + offsets,
        np.uint64(job.base.data_ptr()) + offsets,
    )
    table["words"], table["word_bytes"] = np.diff(job.bounds), job.word_bytes
    total, chunks = job.current.numel(), table.size
    host_table = device.pinned(table.nbytes)
    host_table.numpy()[:] = table.view(np.uint8)
    workspace = torch.empty(
        device.native.workspace_bytes(chunks, total), dtype=torch.uint8, device=place
    )
    payload = torch.empty(total, dtype=torch.uint8, device=place)
    small = torch.empty(3, chunks * 32 + len(STREAMS) * 8 + 1024, dtype=torch.uint8, device=place)

    def call() -> None:
        device.native.encode(
            table=host_table.data_ptr(),
            chunks=chunks,
            bytes=total,
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


def _blocking(settings: Settings, size: int, place: str) -> tuple[list[list[Cell]], list[Figure]]:
    """Measure ``save`` and the wait before the next optimizer step.

    The state is a bfloat16 model with master weights and AdamW moments.
    """
    # 16 bytes per parameter, with both moments.
    parameters = [
        torch.nn.Parameter(torch.randn(size // 16 // 10, device=place)) for _ in range(10)
    ]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    weights = {str(i): p.detach().to(torch.bfloat16).repeat(2) for i, p in enumerate(parameters)}

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    def state() -> dict[str, Any]:
        return {
            "weights": weights,
            "master": dict(enumerate(parameters)),
            "optimizer": optimizer.state_dict()["state"],
        }

    def wait() -> None:
        if place == "cuda":
            torch.cuda.synchronize()

    step()
    saved, blocked = [], []
    for _ in range(3):
        wait()
        start = time.perf_counter()
        with Path(settings.folder / "state.pt").open(
            "wb", buffering=io.DEFAULT_BUFFER_SIZE
        ) as file:
            torch.save(state(), file)
        saved.append(time.perf_counter() - start)
    with Engine(settings.folder / "engine", options=SaveOptions(shadow="device")) as engine:
        engine.guard(optimizer)
        for number in range(REPETITIONS):
            wait()
            handle = engine.save(number, state())
            step()
            engine.wait()
            if number > 1:  # the first writes whole leaves, the second creates the pools
                blocked.append(handle.blocking_seconds)
    torch_seconds, blocking_seconds = median(saved), median(blocked)
    rows: list[list[Cell]] = [
        ["torch.save", torch_seconds, 1.0],
        ["engine, deltas", blocking_seconds, blocking_seconds / torch_seconds],
    ]
    share = blocking_seconds / torch_seconds
    return rows, [Figure("blocking of a save, of torch.save", share, BLOCKING_AT_MOST)]
