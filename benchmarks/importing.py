"""Time of `import deltacheck` in fresh processes, beside `import numpy` in the same run."""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from benchmarks.record import Figure, Result, Settings, Table, Unit

# Statements that are timed inside a process that has imported only `time` and `sys`
_STATEMENTS = {
    "numpy": "import numpy",
    "deltacheck": "import deltacheck",
    "deltacheck, and what reads a root": "import deltacheck; deltacheck.open",
}
_PROGRAM = """
import sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
packages = {{"torch", "jax", "flax", "orbax", "tensorstore", "numpy"}}
print(seconds, *sorted(packages & set(sys.modules)))
"""


def run(settings: Settings) -> Result:
    """Measure every statement."""
    repetitions = 3 if settings.quick else 11
    seconds: dict[str, list[float]] = {name: [] for name in _STATEMENTS}
    loaded: dict[str, str] = {}
    for _ in range(1 + repetitions):  # the first fills the file cache and is dropped
        for name, statement in _STATEMENTS.items():
            code = _PROGRAM.format(statement=statement)
            result = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            )
            elapsed, *modules = result.stdout.split()
            seconds[name].append(float(elapsed))
            loaded[name] = ", ".join(modules)
    middle = {name: median(values[1:]) for name, values in seconds.items()}
    rows = [
        (name, middle[name], middle[name] / middle["numpy"], loaded[name]) for name in _STATEMENTS
    ]
    columns: dict[str, Unit] = {
        "import of": "text",
        "median": "seconds",
        "of numpy": "ratio",
        "brings in": "text",
    }
    return Result(
        "importing",
        f"wall time of an import in a fresh process, file cache warm, median of {repetitions}",
        [Table("import time", columns, rows)],
        [Figure("import deltacheck without frameworks", middle["deltacheck"], 0.150, "seconds")],
    )
