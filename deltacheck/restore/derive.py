"""Compute leaves that are not stored: the formulas of ``Derived``.

Each formula works element by element and gives the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from deltacheck.codec.lossy import lattice, nested, octaves, ratios
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.store.manifest import Derived

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def compute(
    derived: Derived,
    codes: Array | None,
    sources: Mapping[str, Array],
    first: int,
    out: Array | None = None,
) -> Array:
    """Compute elements of a derived leaf.

    Args:
        derived: The formula.
        codes: The same elements of the codes that are stored under the leaf's path, 1-D.
        sources: The same elements of the leaves that the formula names, 1-D, by path.
        first: The first element.
        out: Memory for elements that are computed from codes, in the leaf's dtype; ``None``: new
            memory.

    Returns:
        The elements, 1-D: ``out``, new memory, or a source that they equal.

    Raises:
        ValueError: A code stands for no value.
    """
    element = dtype_named(derived.dtype).numpy
    match derived.how:
        case "same":
            values = sources[derived.of]
        case "cast":
            values = cast(sources[derived.of], element)
        case "lattice":
            assert codes is not None  # checked when the manifest was decoded
            options: dict[str, Any] = {
                "halvings": derived.halvings,
                "spare_bits": derived.spare_bits,
                "weights": sources.get(derived.of),
                "out": out,
                "start": first,
            }
            values_of = lattice.values if codes.dtype == np.int32 else nested.values
            values = values_of(codes, derived.spacing, derived.seed, **options)
        case "drawn":
            values = nested.drawn(derived.seed, weights=sources[derived.of], out=out, start=first)
        case "ratio":
            assert codes is not None
            values = ratios.values(
                codes, sources[derived.of], derived.spacing, limit=derived.limit, out=out
            )
        case _:
            assert codes is not None
            values = octaves.values(codes, fraction_bits=derived.fraction_bits, out=out)
    if derived.scale == 1.0:
        return values
    if derived.how == "same":
        # The source is a leaf of its own and must not be scaled with this one.
        values = values.copy()
    with np.errstate(all="ignore"):  # overflows concern codes that no save wrote
        return np.multiply(values, np.float32(derived.scale), out=values)


def cast(values: Array, element: np.dtype[Any]) -> Array:
    """Round to another floating type, to nearest, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are kept
        return values.astype(element)
