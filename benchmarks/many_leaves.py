"""Time of saves and restores of many small leaves, with Orbax's handler and with deltacheck.

``python -m benchmarks.many_leaves [LEAVES [PAIRS]]`` runs pairs of processes, one way each, in
alternating order. A process saves two steps and restores the second one.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.record import Cell, Figure, Result, Table, Unit

_WAYS = ("Orbax", "deltacheck")
_PHASES = ("first save", "second save", "restore")
_COLUMNS: dict[str, Unit] = {
    "phase": "text",
    "Orbax, processor": "seconds",
    "deltacheck, processor": "seconds",
    "ratio, processor": "ratio",
    "Orbax, wall": "seconds",
    "deltacheck, wall": "seconds",
    "ratio, wall": "ratio",
}
_LEAF_ELEMENTS = 256


def measure(way: str, root: Path, leaves: int) -> dict[str, dict[str, float]]:
    """Return the processor time and the wall time of each phase, in seconds.

    Args:
        way: ``"Orbax"`` or ``"deltacheck"``.
        root: A new folder.
        leaves: The number of arrays, of 1 KiB each.
    """
    import jax
    import orbax.checkpoint as ocp

    from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager

    first, second = (jax.block_until_ready(_state(leaves, step)) for step in range(2))
    is_ours = way == "deltacheck"
    save = DeltaSaveArgs if is_ours else ocp.args.StandardSave
    restore = DeltaRestoreArgs if is_ours else ocp.args.StandardRestore
    make: Callable[[Path], Any] = manager if is_ours else ocp.CheckpointManager
    seconds: dict[str, dict[str, float]] = {}

    def timed(phase: str, call: Callable[[], Any]) -> Any:
        wall, processor = time.perf_counter(), _processor_seconds()
        result = call()
        seconds[phase] = {
            "processor": _processor_seconds() - processor,
            "wall": time.perf_counter() - wall,
        }
        return result

    with make(root) as open_manager:
        for step, state in enumerate((first, second)):

            def finish(step: int = step, state: Any = state) -> None:
                open_manager.save(step, args=save(state))
                open_manager.wait_until_finished()

            timed(_PHASES[step], finish)
    with make(root) as open_manager:
        restored = timed(
            "restore",
            lambda: jax.block_until_ready(open_manager.restore(1, args=restore(first))),
        )
    sample = restored["layers"]["block 0"]["leaf 0"]
    if not (sample == second["layers"]["block 0"]["leaf 0"]).all():
        raise AssertionError(f"{way} has restored another state")
    return seconds


def _state(leaves: int, step: int) -> Any:
    import jax.numpy as jnp
    import numpy as np

    random = np.random.default_rng(0)
    return {
        "layers": {
            f"block {block}": {
                f"leaf {leaf}": jnp.asarray(random.standard_normal(_LEAF_ELEMENTS, np.float32))
                + step
                for leaf in range(min(100, leaves - block * 100))
            }
            for block in range(-(-leaves // 100))
        }
    }


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(leaves: int, pairs: int) -> Result:
    """Measure pairs of processes, and return medians and the medians of the ratios of pairs."""
    times: dict[str, list[dict[str, dict[str, float]]]] = {way: [] for way in _WAYS}
    count = str(leaves)
    for pair in range(pairs):
        for way in _WAYS if pair % 2 == 0 else reversed(_WAYS):
            root = Path(tempfile.mkdtemp(prefix="many_leaves"))
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.many_leaves", way, f"{root}/root", count],
                    capture_output=True,
                    check=True,
                )
                times[way].append(json.loads(done.stdout.splitlines()[-1]))
            finally:
                shutil.rmtree(root)
    rows: list[list[Cell]] = []
    figures: list[Figure] = []
    for phase in _PHASES:
        row: list[Cell] = [phase]
        for kind in ("processor", "wall"):
            plain, ours = ([run[phase][kind] for run in times[way]] for way in _WAYS)
            ratio = median(b / a for a, b in zip(plain, ours, strict=True))
            row += [median(plain), median(ours), ratio]
            figures.append(Figure(f"{phase}, {kind} time, of Orbax", ratio, 1.0))
        rows.append(row)
    about = f"{leaves:,} arrays of 1 KiB, medians of {pairs} pairs of processes"
    return Result("many_leaves", about, [Table("time of each phase", _COLUMNS, rows)], figures)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _WAYS:
        print(json.dumps(measure(arguments[0], Path(arguments[1]), int(arguments[2]))))
    else:
        counts = [int(argument) for argument in arguments]
        run(*(counts + [10_000, 3][len(counts) :])).show(Console())
