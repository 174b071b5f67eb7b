"""Frozen records that travel between the rooms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deltacheck.leaf import grid
from deltacheck.leaf.dtypes import DType, dtype_named

_T = TypeVar("_T")


@lru_cache(1 << 12)  # leaves have few shapes
def _standard_chunk(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    return grid.chunk_shape(shape, dtype_named(dtype).item_bytes)


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What one leaf is: its path, shape, element type and chunk shape."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]

    @classmethod
    def of(cls, path: str, shape: tuple[int, ...], dtype: str) -> LeafSpec:
        """The spec of a leaf cut the standard way."""
        return cls(path, shape, dtype, _standard_chunk(shape, dtype))

    @property
    def element(self) -> DType:
        """The element type by its name. Raises ``UnsupportedLeaf`` for a name that the format does
        not have.
        """
        return dtype_named(self.dtype)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the leaf in memory."""
        return math.prod(self.shape) * self.element.item_bytes

    @property
    def word_bytes(self) -> int:
        """Bytes of a word, which is what the encoder compares: 1, 2, 4 or 8."""
        return self.element.word_bytes

    @property
    def chunk_count(self) -> int:
        """Chunks that the leaf is cut into; 0 for a leaf without elements."""
        return grid.chunk_count(self.shape, self.chunk)

    def bounds(self) -> NDArray[np.uint64]:
        """Word offsets of the leaf's chunks, uint64 ``(chunks + 1,)``."""
        if self.raw_bytes == 0:
            return np.zeros(1, np.uint64)
        return grid.bounds(self.shape, self.chunk, self.element.item_bytes // self.word_bytes)

    def element_bounds(self) -> NDArray[np.uint64]:
        """Offsets of the leaf's chunks in elements, as ``bounds`` gives them in words."""
        return self.bounds() // np.uint64(self.element.item_bytes // self.word_bytes)


class LeafKind(StrEnum):
    """How one save stored a leaf."""

    KEYFRAME = "keyframe"
    DELTA = "delta"
    UNCHANGED = "unchanged"
    DERIVED = "derived"  # nothing is stored of it


@dataclass(frozen=True, slots=True)
class LeafReport:
    """One leaf of one save. ``words`` and ``changed`` count the encoder's words; a keyframe counts
    all
    as changed.

    ``encoded_bytes``: bytes of its streams (a keyframe: of its values) before the entropy stage.
    """

    path: str
    kind: LeafKind
    raw_bytes: int
    encoded_bytes: int
    words: int
    changed: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one committed save cost.

    ``raw_bytes``: bytes of all leaves in memory. ``stored_bytes``: bytes of all files that this
    save added. ``blocking_seconds``: wall time that the training thread lost, waits before the next
    optimizer step included. ``durable_seconds``: from the call to the commit. ``replayed_steps``:
    updates that a restore of this step replays; 0: none, the state itself is stored. ``digest``: of
    the manifest, ``"sha256:..."``; whoever keeps it elsewhere can ask a restore for this very step
    (``expected_digest``). ``note``: what else there is to say, such as why a gradient log stored
    the state itself. ``durability``: what the save survives from now on, a cut of ``"power"`` or
    only the end of its ``"process"``.
    """

    step: int
    seq: int
    raw_bytes: int
    stored_bytes: int
    blocking_seconds: float
    durable_seconds: float
    leaves: tuple[LeafReport, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    replayed_steps: int = 0
    note: str = ""
    durability: str = "power"
    digest: str = ""


def batches(items: Iterable[_T], size: Callable[[_T], int], most_bytes: int) -> Iterator[list[_T]]:
    """Items in order, in groups of at most ``most_bytes`` by their ``size``, or of one item."""
    batch: list[_T] = []
    held = 0
    for item in items:
        if batch and held + size(item) > most_bytes:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size(item)
    if batch:
        yield batch
