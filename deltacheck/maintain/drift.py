"""Measure the change of a leaf between two steps.

Changed elements are counted by their bits. Norms are computed in float64, one batch of chunks at a
time.
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
from deltacheck.restore.content import element_runs
from deltacheck.restore.leaf_kinds import Leaf
from deltacheck.restore.values import load_leaves

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Drift:
    """The change of one leaf.

    The norms cover the elements that are finite before and after. They are ``None`` if there are
    no such elements.

    Attributes:
        elements: Number of elements.
        changed: Number of elements whose bits differ.
        relative_l2: L2 norm of the difference, divided by the norm before; infinite if that is 0.
        max_abs: Largest absolute difference, exact for integers.
        nonfinite_before: Number of elements that are NaN or infinite before.
        nonfinite_after: The same after.
    """

    elements: int
    changed: int
    relative_l2: float | None
    max_abs: float | int | None
    nonfinite_before: int
    nonfinite_after: int

    @property
    def density(self) -> float:
        """The share of elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


def measure(before: Leaf, after: Leaf) -> Drift:
    """Compare a leaf at two steps, which must have the same shape and dtype.

    Chunks of stored leaves whose digests are equal are read once, for the norm.

    Raises:
        Damaged: If a chunk cannot be read; names the leaf.
    """
    sums = _Sums()
    # The parts of equally cut leaves have chunk digests that can be compared, so equal chunks are
    # read once. Otherwise every element is read twice.
    if before.tile_cuts == after.tile_cuts:
        for part_before, part_after in zip(before.parts, after.parts, strict=True):
            _add_leaf(part_before, part_after, sums)
    else:
        _add_leaf(before, after, sums)
    return sums.drift()


def changed_elements(before: Leaf, after: Leaf) -> Iterator[NDArray[np.int64]]:
    """Yield the elements whose bits differ between two steps, as positions in C order, ascending.

    Both leaves must have the same shape and dtype. Chunks whose digests are equal are not read.

    Yields:
        int64, 1-D: the changed elements of one batch of chunks.

    Raises:
        Damaged: If a chunk cannot be read; names the leaf.
    """
    item_bytes = before.spec.element.item_bytes
    for chunks in _batches(before, np.flatnonzero(_differs(before, after)).tolist()):
        rows, other_rows = (_load(leaf, chunks).reshape(-1, item_bytes) for leaf in (before, after))
        changed = np.flatnonzero((rows != other_rows).any(axis=1))
        # Loaded chunks lie one behind the other, so a run of them is moved as a whole.
        runs = np.array(element_runs(before.spec, chunks), np.int64)
        ends = np.cumsum(runs[:, 1] - runs[:, 0])
        yield changed + (runs[:, 1] - ends)[np.searchsorted(ends, changed, "right")]


def _differs(before: Leaf, after: Leaf) -> NDArray[np.bool_]:
    """Return for each chunk if its content may differ."""
    if before.chunk_digests is None or after.chunk_digests is None:
        return np.ones(before.spec.chunk_count, np.bool_)
    differs: NDArray[np.bool_] = (before.chunk_digests != after.chunk_digests).any(axis=1)
    return differs


def _add_leaf(before: Leaf, after: Leaf, sums: _Sums) -> None:
    element = before.spec.element
    differs = _differs(before, after)
    for chunks in _batches(before, np.flatnonzero(~differs).tolist()):
        # Passing the same array twice says that nothing changed. The norm still needs the values.
        values = _load(before, chunks)
        sums.add(values, values, element)
    for chunks in _batches(before, np.flatnonzero(differs).tolist()):
        sums.add(_load(before, chunks), _load(after, chunks), element)


def _batches(leaf: Leaf, chunks: list[int]) -> Iterator[list[int]]:
    # An empty leaf has no bounds to take a maximum of, and the quotient below must not divide by
    # zero.
    largest = int(np.diff(leaf.spec.bounds()).max(initial=np.uint64(1))) * leaf.spec.word_bytes
    count = max(1, export.BATCH_BYTES // largest)
    return (chunks[first : first + count] for first in range(0, len(chunks), count))


def _load(leaf: Leaf, chunks: Sequence[int]) -> U8:
    path = leaf.spec.path
    return load_leaves({path: leaf}, {path: list(chunks)})[path].data


class _Sums:
    """Sums over the batches of a leaf."""

    def __init__(self) -> None:
        self.elements = 0
        self.changed = 0
        self.finite = 0
        self.nonfinite_before = 0
        self.nonfinite_after = 0
        self.norm_before = 0.0
        self.norm_difference = 0.0
        self.max_abs: float | int = 0

    def add(self, before: U8, after: U8, element: DType) -> None:
        """Add a batch; ``before is after`` if its bytes are equal."""
        # Bytes and not values are compared: NaN differs from itself, and -0.0 equals 0.0.
        rows_before, rows_after = (data.reshape(-1, element.item_bytes) for data in (before, after))
        self.elements += rows_before.shape[0]
        if after is not before:
            self.changed += int((rows_before != rows_after).any(axis=1).sum())
        # NaN and infinities are counted and then left out, so their warnings say nothing new.
        with np.errstate(all="ignore"):
            self._add_norms(_widen(before, element), _widen(after, element))

    def _add_norms(self, before: Numbers, after: Numbers) -> None:
        is_finite_before, is_finite_after = np.isfinite(before), np.isfinite(after)
        self.nonfinite_before += int((~is_finite_before).sum())
        self.nonfinite_after += int((~is_finite_after).sum())
        is_finite = is_finite_before & is_finite_after
        if not is_finite.all():
            before, after = before[is_finite], after[is_finite]
        if before.size == 0:
            return
        self.finite += before.size
        # ``hypot`` adds the norms of batches without an overflow of their squares.
        self.norm_before = math.hypot(self.norm_before, _norm(_magnitude(before)))
        difference = _difference(before, after)
        self.norm_difference = math.hypot(self.norm_difference, _norm(difference))
        self.max_abs = max(self.max_abs, difference.max().item())

    def drift(self) -> Drift:
        """Return the result for all batches."""
        relative: float | None = None
        if self.finite and self.norm_before > 0:
            relative = self.norm_difference / self.norm_before
        elif self.finite:
            relative = math.inf if self.norm_difference > 0 else 0.0
        return Drift(
            self.elements,
            self.changed,
            relative,
            self.max_abs if self.finite else None,
            self.nonfinite_before,
            self.nonfinite_after,
        )


def _widen(data: U8, element: DType) -> Numbers:
    """Convert elements to float64, complex128 or 64-bit integers, to compute differences."""
    values = data.view(element.numpy)
    if element.name.startswith(("int", "bool")):
        return values.astype(np.int64)
    if element.name.startswith("uint"):
        return values.astype(np.uint64)
    return values.astype(np.complex128 if element.name.startswith("complex") else np.float64)


def _magnitude(values: Numbers) -> Numbers:
    if values.dtype == np.int64:
        # The absolute value of the most negative integer does not fit its own type.
        return np.abs(values.astype(np.float64))
    return np.abs(values)


def _difference(before: Numbers, after: Numbers) -> Numbers:
    """Return ``|after - before|``, exact for integers: modulo 2^64 it fits an unsigned number."""
    if before.dtype.kind not in "iu":
        return np.abs(np.subtract(after, before))
    return np.subtract(
        np.maximum(before, after).view(np.uint64), np.minimum(before, after).view(np.uint64)
    )


def _norm(magnitudes: Numbers) -> float:
    """Return the Euclidean norm, scaled by the maximum so that squares do not overflow or vanish.

    The scaling is that of the BLAS routine ``dnrm2``.
    """
    values = magnitudes.astype(np.float64)
    largest = float(values.max())
    if largest == 0 or math.isinf(largest):
        return largest
    values /= largest
    return largest * math.sqrt(float(np.dot(values, values)))
