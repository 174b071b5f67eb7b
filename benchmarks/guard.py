"""Cost of the guard that keeps writes out of a save: in a training step, and in a save."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter, thread_time

import numpy as np
import torch

from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.codec.fingerprints import fingerprints, sampled

PARAMETERS = 1000
AT_MOST = 0.01  # of a training step
WIDTH = 64
# Of leaves, and of contiguous writes to them, of which the fingerprint shows a share.
SIZES = (64 << 10, 1 << 20, 64 << 20)
WRITES = (4, 4 << 10, 64 << 10)
_TRIALS = 4000
# More than the caches of a processor have.
_ALL_BYTES = 128 << 20


def run(settings: Settings) -> Result:
    """Measure a step, the hook, accesses to ``.data`` and the fingerprints of a state."""
    repetitions = 3 if settings.quick else 15
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(PARAMETERS // 2)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(32, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    parameters = list(model.parameters())

    def data() -> None:
        for parameter in parameters:
            _ = parameter.data

    step()
    bare_step, bare_data = _seconds(step, repetitions), _seconds(data, repetitions)
    with Engine(settings.folder / "root", options=SaveOptions(durability="process")) as engine:
        engine.guard(optimizer)
        guarded_data = _seconds(data, repetitions)
        hook = _seconds(engine.before_update, repetitions)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        blocking = []
        for number in range(repetitions):
            step()
            handle = engine.save(number, state)
            blocking.append(handle.blocking_seconds)
            handle.wait()
    tensors = [
        tensor.detach()
        for parameter in parameters
        for tensor in (parameter, *optimizer.state[parameter].values())
    ]
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    sizes = np.array([tensor.nbytes for tensor in tensors], np.uint64)
    fingerprint_time = _seconds(lambda: fingerprints(addresses, sizes, 1), repetitions)
    cost = hook + max(0.0, guarded_data - bare_data)
    about = (
        f"A training step of {PARAMETERS} parameters ({PARAMETERS // 2} layers of width {WIDTH},"
        " AdamW, 32 samples) on the processor, and what an open Engine adds to it: the hook before"
        " the optimizer's step, and one access to .data of every parameter, over accesses without"
        f" an engine. Medians of {repetitions}. The fingerprints of {len(tensors)} leaves are taken"
        " once in a save, and are part of its blocking time. Below, the processor time of the"
        " fingerprint of a leaf that no cache has, in turns with a copy of it, and the share of"
        " random contiguous writes that it shows"
    )
    rows: list[list[str | float | None]] = [
        ["training step", bare_step, 1.0],
        ["hook", hook, hook / bare_step],
        [f".data of {PARAMETERS} parameters, without an engine", bare_data, bare_data / bare_step],
        [f".data of {PARAMETERS} parameters, guarded", guarded_data, guarded_data / bare_step],
        [
            f"save: fingerprints of {len(tensors)} leaves",
            fingerprint_time,
            fingerprint_time / bare_step,
        ],
        ["save: blocking in all", median(blocking), median(blocking) / bare_step],
    ]
    columns = {"what": "text", "time": "seconds", "share of a step": "ratio"}
    return Result(
        "guard",
        about,
        [Table("guard", columns, rows), _coverage(repetitions)],
        [Figure("guard in a training step", cost / bare_step, AT_MOST)],
    )


def _coverage(repetitions: int) -> Table:
    """Measure the time of a fingerprint and the writes that it shows, by the size of a leaf."""
    rows: list[list[Cell]] = []
    for size in SIZES:
        count = max(4, min(1000, _ALL_BYTES // size))
        leaves = np.ones((count, size), np.uint8)  # zeros would share one page
        addresses = leaves.__array_interface__["data"][0] + size * np.arange(count, dtype=np.uint64)
        sizes = np.full(count, size, np.uint64)
        copies, other = np.empty(size, np.uint8), np.zeros(_ALL_BYTES, np.uint8)
        sampled, copied = [], []
        for number in range(repetitions):
            np.add(other, 1, out=other)  # takes the leaves out of the caches
            begin = thread_time()
            fingerprints(addresses, sizes, number)
            middle = thread_time()
            for leaf in leaves:
                np.copyto(copies, leaf)
            sampled.append(1e6 * (middle - begin) / count)
            copied.append(1e6 * (thread_time() - middle) / count)
        shares = [_seen(size, write) for write in WRITES]
        rows.append([size, median(sampled), median(copied), *shares])
    columns: dict[str, Unit] = {
        "leaf": "bytes",
        "fingerprint, us": "number",
        "copy, us": "number",
    }
    columns |= {f"write of {write} B": "ratio" for write in WRITES}
    return Table("coverage", columns, rows)


def _seen(size: int, write: int) -> float:
    """Return the share of contiguous writes of some bytes that a fingerprint shows."""
    random = np.random.default_rng(0)
    content = np.zeros(size, np.uint8)
    seen = 0
    for _ in range(_TRIALS):
        begin = int(random.integers(size - write + 1))
        content[begin : begin + write] = 1
        seen += bool(sampled(content, int(random.integers(1 << 62))).any())
        content[begin : begin + write] = 0
    return seen / _TRIALS


def _seconds(work: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)
