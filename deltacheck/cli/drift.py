"""How far a leaf has moved between two steps: counted on bits, measured in float64, a batch of
chunks at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import U8
from deltacheck.leaf.dtypes import DType
from deltacheck.restore import export
from deltacheck.restore.chain import Chain
from deltacheck.restore.resolve import Leaf, Tiled
from deltacheck.restore.values import load_leaves

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Drift:
    """What happened to one leaf.

    ``changed``: elements whose bits differ. ``relative_l2``: norm of the difference / norm before
    (infinite where that is 0). ``max_abs``: the largest difference, exact for integers. Both over
    the elements that are finite before and after, ``None`` where there is none.
    ``nonfinite_before``, ``nonfinite_after``: elements that are NaN or infinite.
    """

    elements: int
    changed: int
    relative_l2: float | None
    max_abs: float | int | None
    nonfinite_before: int
    nonfinite_after: int

    @property
    def density(self) -> float:
        """Changed elements / elements."""
        return self.changed / self.elements if self.elements else 0.0


def measure(before: Leaf, after: Leaf) -> Drift:
    """Compare a leaf at two steps. Chunks of stored leaves whose digests are equal are read once,
    for
    the norm.

    REQUIRES: the same shape and dtype. Raises ``Damaged`` naming the leaf.
    """
    total = _Total()
    if isinstance(before, Tiled) and isinstance(after, Tiled) and before.cuts == after.cuts:
        for number, chain in before.chains.items():
            _add(chain, after.chains[number], total)
    else:
        _add(before, after, total)
    return total.drift()


def _add(before: Leaf, after: Leaf, total: _Total) -> None:
    element = before.spec.element
    moved = np.ones(before.spec.chunk_count, np.bool_)
    if isinstance(before, Chain) and isinstance(after, Chain):
        moved = (before.digests != after.digests).any(axis=1)
    for chunks in _batches(before, np.flatnonzero(~moved).tolist()):
        still = _load(before, chunks)
        total.add(still, still, element)
    for chunks in _batches(before, np.flatnonzero(moved).tolist()):
        total.add(_load(before, chunks), _load(after, chunks), element)


def _batches(leaf: Leaf, chunks: list[int]) -> Iterator[list[int]]:
    largest = int(np.diff(leaf.spec.bounds()).max(initial=np.uint64(1))) * leaf.spec.word_bytes
    count = max(1, export.BATCH_BYTES // largest)
    return (chunks[first : first + count] for first in range(0, len(chunks), count))


def _load(leaf: Leaf, chunks: Sequence[int]) -> U8:
    path = leaf.spec.path
    return load_leaves({path: leaf}, {path: list(chunks)})[path].data


class _Total:
    """The sums over a leaf's batches."""

    def __init__(self) -> None:
        self.elements = self.changed = self.finite = self.nonfinite_before = (
            self.nonfinite_after
        ) = 0
        self.norm_before = self.norm_difference = 0.0
        self.max_abs: float | int = 0

    def add(self, before: U8, after: U8, element: DType) -> None:
        rows_before, rows_after = (data.reshape(-1, element.item_bytes) for data in (before, after))
        self.elements += rows_before.shape[0]
        if after is not before:
            self.changed += int((rows_before != rows_after).any(axis=1).sum())
        with np.errstate(all="ignore"):  # NaN and infinity are counted, and then left out
            self._measure(_wide(before, element), _wide(after, element))

    def _measure(self, before: Numbers, after: Numbers) -> None:
        ok_before, ok_after = np.isfinite(before), np.isfinite(after)
        self.nonfinite_before += int((~ok_before).sum())
        self.nonfinite_after += int((~ok_after).sum())
        both = ok_before & ok_after
        if not both.all():
            before, after = before[both], after[both]
        if before.size == 0:
            return
        self.finite += before.size
        self.norm_before = math.hypot(self.norm_before, _norm(_magnitude(before)))
        difference = _difference(before, after)
        self.norm_difference = math.hypot(self.norm_difference, _norm(difference))
        self.max_abs = max(self.max_abs, difference.max().item())

    def drift(self) -> Drift:
        relative: float | None = None
        if self.finite and self.norm_before > 0:
            relative = self.norm_difference / self.norm_before
        elif self.finite:
            relative = math.inf if self.norm_difference > 0 else 0.0
        largest = self.max_abs if self.finite else None
        return Drift(
            self.elements,
            self.changed,
            relative,
            largest,
            self.nonfinite_before,
            self.nonfinite_after,
        )


def _wide(data: U8, element: DType) -> Numbers:
    """The numbers in a type that differences can be taken in: float64, complex128, or 64-bit
    integers.
    """
    values = data.view(element.numpy)
    if element.name.startswith(("int", "bool")):
        return values.astype(np.int64)
    if element.name.startswith("uint"):
        return values.astype(np.uint64)
    return values.astype(np.complex128 if element.name.startswith("complex") else np.float64)


def _magnitude(values: Numbers) -> Numbers:
    if values.dtype == np.int64:  # the most negative one has no positive in its own type
        return np.abs(values.astype(np.float64))
    return np.abs(values)


def _difference(before: Numbers, after: Numbers) -> Numbers:
    """``|after - before|``, exact for integers: modulo 2^64 it fits an unsigned number."""
    if before.dtype.kind not in "iu":
        return np.abs(np.subtract(after, before))
    return np.subtract(
        np.maximum(before, after).view(np.uint64), np.minimum(before, after).view(np.uint64)
    )


def _norm(magnitudes: Numbers) -> float:
    """Euclidean norm; scaled, so that squares neither overflow nor vanish."""
    values = magnitudes.astype(np.float64)
    largest = float(values.max())
    if largest == 0 or math.isinf(largest):
        return largest
    values /= largest
    return largest * math.sqrt(float(np.dot(values, values)))
