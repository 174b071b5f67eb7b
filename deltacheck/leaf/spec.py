"""Records that describe leaves and saves."""

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
    """The path, shape, element type and chunk shape of a leaf.

    Args:
        path: The keys from the root of the tree to the leaf, escaped and joined by ``/``.
        shape: The length of each axis.
        dtype: The element type, as JAX and ml_dtypes name it (``"bfloat16"``).
        chunk: The shape of a chunk, which is the unit that is encoded, hashed and read.
            ``LeafSpec.of`` chooses the standard one.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]

    @classmethod
    def of(cls, path: str, shape: tuple[int, ...], dtype: str) -> LeafSpec:
        """Return the spec of a leaf with the standard chunk shape.

        Args:
            path: The path of the leaf.
            shape: The length of each axis.
            dtype: The name of the element type.

        Returns:
            The spec.

        Raises:
            UnsupportedLeaf: The format does not have this element type.
        """
        return cls(path, shape, dtype, _standard_chunk(shape, dtype))

    @property
    def element(self) -> DType:
        """Return the element type.

        Raises:
            UnsupportedLeaf: The format does not have a type of this name.
        """
        return dtype_named(self.dtype)

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of the leaf in memory."""
        return math.prod(self.shape) * self.element.item_bytes

    @property
    def word_bytes(self) -> int:
        """Return the bytes of a word, the unit that the encoder compares: 1, 2, 4 or 8."""
        return self.element.word_bytes

    @property
    def chunk_count(self) -> int:
        """Return the number of chunks; 0 for a leaf without elements."""
        return grid.chunk_count(self.shape, self.chunk)

    def bounds(self) -> NDArray[np.uint64]:
        """Return the offset of each chunk and the end of the last one, in words.

        Returns:
            A uint64 array of shape ``(chunks + 1,)``, read-only.
        """
        # A leaf without elements has no chunk, whatever its other axes are.
        if self.raw_bytes == 0:
            return np.zeros(1, np.uint64)
        return grid.bounds(self.shape, self.chunk, self.element.item_bytes // self.word_bytes)


class LeafKind(StrEnum):
    """The way in which one save stored a leaf."""

    KEYFRAME = "keyframe"
    DELTA = "delta"  # its changes, or all of it encoded because that takes hardly more bytes
    UNCHANGED = "unchanged"
    DERIVED = "derived"  # a restore computes it from other leaves


@dataclass(frozen=True, slots=True)
class LeafReport:
    """The result of one save for one leaf.

    Args:
        path: The path of the leaf.
        kind: The way in which it was stored.
        raw_bytes: Bytes of the leaf in memory.
        encoded_bytes: Bytes of its streams before the entropy stage; of a keyframe, its values.
        words: Words that the encoder compared.
        changed: Words that differed from the step before. In a keyframe all words count.
        cause: Why it was written: ``"keyframe"`` (new, or its chain is full), ``"lattice"`` (the
            learning rate asks for another lattice), ``"refresh"`` (moments too old to reuse),
            ``"event"`` (exact again), ``"changed"``; empty if nothing was written.
    """

    path: str
    kind: LeafKind
    raw_bytes: int
    encoded_bytes: int
    words: int
    changed: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The cost and the result of one committed save.

    Args:
        step: The training step.
        seq: The number of the save in its root, from 0.
        raw_bytes: Bytes of all leaves in memory.
        stored_bytes: Bytes of all files that the save added.
        blocking_seconds: Wall time that the training thread lost, including waits before the next
            optimizer step.
        durable_seconds: Wall time from the call to the commit.
        leaves: One report for each leaf.
        metrics: The metrics that the caller passed.
        note: Further information, such as the reason for which whole leaves were written.
        durability: The failure that the checkpoint survives: a loss of ``"power"``, or only the end
            of the ``"process"``.
        digest: The digest of the manifest, ``"sha256:..."``, for use as ``expected_digest``.
        failed_saves: Saves that failed between the last commit of this process and this save.
        merged_bytes: Bytes that were written behind the training to shorten chains, between the
            last commit of this process and this save. ``stored_bytes`` does not count them.
    """

    step: int
    seq: int
    raw_bytes: int
    stored_bytes: int
    blocking_seconds: float
    durable_seconds: float
    leaves: tuple[LeafReport, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    durability: str = "power"
    digest: str = ""
    failed_saves: int = 0
    merged_bytes: int = 0

    @property
    def causes(self) -> dict[str, int]:
        """The reasons for the size of the save.

        Returns:
            The causes of its leaves, and the bytes of each before the entropy stage, the largest
            first. ``deltacheck log`` shows stored bytes.
        """
        sizes: dict[str, int] = {}
        for leaf in self.leaves:
            if leaf.cause:
                sizes[leaf.cause] = sizes.get(leaf.cause, 0) + leaf.encoded_bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def batches(items: Iterable[_T], size: Callable[[_T], int], most_bytes: int) -> Iterator[list[_T]]:
    """Group items in order, so that each group has at most ``most_bytes``, or one item.

    Args:
        items: The items.
        size: Returns the bytes of an item.
        most_bytes: The limit. Larger: fewer groups; smaller: less memory at a time.
    """
    batch: list[_T] = []
    batch_bytes = 0
    for item in items:
        if batch and batch_bytes + size(item) > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size(item)
    if batch:
        yield batch
