"""Space of runs that begin from one base model (``Engine(base=)``)."""

from __future__ import annotations

from pathlib import Path

from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table
from deltacheck.backends.torch import Engine

RATES = (1e-7, 1e-6)
RUNS = 8
STEPS = 10  # of training between the base and the first save
LIMIT = 1.5


def run(settings: Settings) -> Result:
    """Save eight runs of one base, and count the bytes of files, each once."""
    size, steps = (1 << 20, 2) if settings.quick else (28 << 20, STEPS)
    rows: list[list[Cell]] = []
    for rate in RATES[1:] if settings.quick else RATES:
        folder = settings.folder / f"{rate:g}"
        for kind in ("weights", "weights and optimizer"):
            rows.append([rate, kind, *_sizes(folder / kind, kind == "weights", size, rate, steps)])
    return Result(
        "base_model",
        f"the first save of {RUNS} runs, {steps} steps of random gradients after one base. Bytes on"
        " disk, of one model: the base and a run, the base and all runs, and all runs without a"
        " base",
        [
            Table(
                "base_model",
                {
                    "learning rate": "number",
                    "saved": "text",
                    "one run": "number",
                    "eight runs": "number",
                    "eight, of one": "ratio",
                    "eight without a base": "number",
                },
                rows,
            )
        ],
        [
            Figure(
                "bytes of eight runs that save weights, of one, at lr 1e-6",
                float(str(rows[-2][4])),
                LIMIT,
                "ratio",
            )
        ],
    )


def _sizes(folder: Path, weights_only: bool, size: int, rate: float, steps: int) -> list[Cell]:
    base = folder / "base"
    model = states.Synthetic(size, rate)
    model_bytes = sum(weight.nbytes for weight in model.weights.values())
    with Engine(base) as engine:
        engine.save(0, {"model": model.state()["model"]}).wait()
    for number in range(RUNS):
        training = states.Synthetic(size, rate)
        training.seed_gradients(number + 1)
        for _ in range(steps):
            training.train_step()
        state = training.state()
        if weights_only:
            state = {"model": state["model"], "step": steps}
        with Engine(folder / f"run-{number}", base=base) as engine:
            engine.save(steps, state).wait()
        with Engine(folder / f"alone-{number}") as engine:
            engine.save(steps, state).wait()
    runs = [folder / f"run-{number}" for number in range(RUNS)]
    one, eight = disk_bytes(base, runs[0]), disk_bytes(base, *runs)
    alone = disk_bytes(*(folder / f"alone-{number}" for number in range(RUNS)))
    return [one / model_bytes, eight / model_bytes, eight / one, alone / model_bytes]


def disk_bytes(*roots: Path) -> int:
    """Return the bytes of the files of roots; a file of several links counts once."""
    sizes = {}
    for root in roots:
        for file in root.rglob("*"):
            if file.is_file():
                info = file.stat()
                sizes[info.st_dev, info.st_ino] = info.st_size
    return sum(sizes.values())
