"""Time to code master weights and to measure the errors, beside the same in vectorised NumPy."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import process_time

import ml_dtypes
import numpy as np

from benchmarks.encode import threads_restored
from benchmarks.record import Cell, Figure, Result, Settings, Table
from deltacheck import _native
from deltacheck.codec.lossy import lattice, nested
from tests.reference import codes as reference_codes

_STEP, _SEED = 1e-5, 7
# Of the time of one element in NumPy.
_NUMPY_AT_MOST = 0.1


def run(settings: Settings) -> Result:
    """Measure each call of the codes on one thread."""
    count = 1 << (17 if settings.quick else 23)
    repetitions = 3 if settings.quick else 9
    values = (np.random.default_rng(0).standard_normal(count) * 0.02).astype(np.float32)
    weights = values.astype(ml_dtypes.bfloat16)
    bits = weights.view(np.uint16)
    absolute = lattice.codes(values, _STEP, _SEED).codes
    coset = nested.codes(values, _STEP, _SEED, weights=weights).codes
    codes, cosets, floats = (np.empty_like(array) for array in (absolute, coset, values))
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "lattice codes and their errors": (
            lambda: lattice.codes(values, _STEP, _SEED, out=codes),
            lambda: reference_codes.lattice_codes(values, None, _STEP, _SEED),
        ),
        "values of lattice codes": (
            lambda: lattice.values(absolute, _STEP, _SEED, out=floats),
            lambda: reference_codes.lattice_values(absolute, None, _STEP, _SEED),
        ),
        "relative codes and their errors": (
            lambda: nested.codes(values, _STEP, _SEED, weights=weights, out=cosets),
            lambda: reference_codes.nested_codes(values, bits, _STEP, _SEED, 0, 0, coset.dtype),
        ),
        "values of relative codes": (
            lambda: nested.values(coset, _STEP, _SEED, weights=weights, out=floats),
            lambda: reference_codes.nested_values(coset, bits, _STEP, _SEED, 0, 0),
        ),
        "errors of weights cast from codes": (
            lambda: lattice.cast_errors(values, _STEP, _SEED, weights=weights),
            lambda: reference_codes.lattice_cast_errors(values, bits, _STEP, _SEED),
        ),
    }
    rows: list[list[Cell]] = []
    with threads_restored():
        _native.set_threads(1)
        for name, (ours, numpys) in calls.items():
            times = [(_seconds(ours), _seconds(numpys)) for _ in range(repetitions)]
            mine, theirs = (median(column) for column in zip(*times, strict=True))
            rows.append([name, mine / count * 1e9, theirs / count * 1e9, mine / theirs])
    about = (
        f"deltacheck.codec of {count} float32 masters with bfloat16 weights, spacing {_STEP}, on"
        f" one thread, beside NumPy; interleaved, medians of {repetitions}, in processor time;"
        f" {_native.instruction_set()}"
    )
    columns = {
        "call": "text",
        "ns per element": "number",
        "NumPy, ns": "number",
        "of NumPy": "ratio",
    }
    figures = [
        Figure(f"{row[0]}, time over NumPy's", float(row[3] or 0), _NUMPY_AT_MOST) for row in rows
    ]
    return Result("codes", about, [Table("codes of masters", columns, rows)], figures)


def _seconds(work: Callable[[], object]) -> float:
    start = process_time()
    work()
    return process_time() - start
