"""Leaves that are computed at a restore: the formulas behind ``Derived``, element by element, the
same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from deltacheck.codec import lattice, octaves
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.policy import adam
from deltacheck.store.manifest import Derived

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Elements that are adjusted at once: what lies in between stays in the cache, and takes no memory
# of a leaf's size.
_BLOCK = 1 << 15


def compute(
    derived: Derived,
    codes: Array | None,
    sources: Mapping[str, Array],
    first: int,
    count: int,
    out: Array | None = None,
) -> Array:
    """Elements ``first`` to ``first + count`` of a derived leaf, 1-D, in memory of their own or
    that
    of what they equal.

    ``codes``: of what is stored under the leaf's path, ``sources``: of the leaves that it names,
    the same elements, 1-D. ``out``: memory for what is made of codes, of the leaf's type; else it
    is new.
    """
    element = dtype_named(derived.dtype).numpy
    match derived.how:
        case "same":
            values = sources[derived.of]
        case "cast":
            values = cast(sources[derived.of], element)
        case "zeros":
            values = np.zeros(count, element)
        case "lattice":
            assert codes is not None  # the manifest was checked
            values = lattice.values(
                codes,
                derived.spacing,
                derived.seed,
                weights=sources.get(derived.of),
                out=out,
                start=first,
            )
        case _:
            assert codes is not None
            values = octaves.values(
                codes, fraction_bits=derived.fraction_bits, signed=derived.signed, out=out
            )
    if derived.scale == 1.0 and not derived.first:
        return values
    if derived.how == "same":
        values = values.copy()
    with np.errstate(all="ignore"):  # of numbers that nobody has saved
        for begin in range(0, count, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            if derived.scale != 1.0:
                np.multiply(values[block], np.float32(derived.scale), out=values[block])
            if derived.first:
                adam.repair(
                    values[block], sources[derived.first][block], derived.limit, out=values[block]
                )
    return values


def cast(values: Array, element: np.dtype[Any]) -> Array:
    """Round to another floating type, to nearest, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN go where they go
        return values.astype(element)
