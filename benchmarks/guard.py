"""Cost of the guard that keeps writes out of a save: in a training step, and in a save."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from benchmarks.record import Figure, Result, Settings, Table
from deltacheck.backends.torch import Engine
from deltacheck.leaf import fingerprint

PARAMETERS = 1000
AT_MOST = 0.01  # of a training step
WIDTH = 64


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
    with Engine(settings.folder / "root", durability="process") as engine:
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
    leaves = [
        tensor.detach().reshape(-1).view(torch.uint8).numpy()
        for parameter in parameters
        for tensor in (parameter, *optimizer.state[parameter].values())
    ]
    fingerprints = _seconds(
        lambda: [fingerprint.digest(fingerprint.sampled(leaf, 1)) for leaf in leaves], repetitions
    )
    cost = hook + max(0.0, guarded_data - bare_data)
    about = (
        f"A training step of {PARAMETERS} parameters ({PARAMETERS // 2} layers of width {WIDTH},"
        " AdamW, 32 samples) on the processor, and what an open Engine adds to it: the hook before"
        " the optimizer's step, and one access to .data of every parameter, over accesses without"
        f" an engine. Medians of {repetitions}. The fingerprints of {len(leaves)} leaves are taken"
        " once in a save, and are part of its blocking time"
    )
    rows: list[list[str | float | None]] = [
        ["training step", bare_step, 1.0],
        ["hook", hook, hook / bare_step],
        [f".data of {PARAMETERS} parameters, without an engine", bare_data, bare_data / bare_step],
        [f".data of {PARAMETERS} parameters, guarded", guarded_data, guarded_data / bare_step],
        [f"save: fingerprints of {len(leaves)} leaves", fingerprints, fingerprints / bare_step],
        ["save: blocking in all", median(blocking), median(blocking) / bare_step],
    ]
    columns = {"what": "text", "time": "seconds", "share of a step": "ratio"}
    return Result(
        "guard",
        about,
        [Table("guard", columns, rows)],
        [Figure("guard in a training step", cost / bare_step, AT_MOST)],
    )


def _seconds(work: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)
