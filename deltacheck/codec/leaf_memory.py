"""Work on leaves in the memory in which they lie, so that no leaf crosses to the host for it.

A content is the bytes of a leaf, uint8, 1-D: a NumPy array, or what the codec of a device takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import adam_law, derivation
from deltacheck.codec.adam_law import Places
from deltacheck.codec.base import U8, U64, Codec
from deltacheck.leaf.digest import all_chunk_digests
from deltacheck.leaf.spec import LeafSpec


class LeafMemory(Protocol):
    """A memory that leaves lie in. Two are equal if they are the same memory."""

    def host(self, content: Any) -> U8:
        """Return content in host memory, without a copy if possible."""
        ...

    def held(self, content: Any, *, is_own: bool) -> Any:
        """Return content that stays as it is.

        Args:
            content: The content.
            is_own: True: nothing writes to it, so that it needs no copy.
        """
        ...

    def digests(self, content: Any, spec: LeafSpec) -> U64:
        """Return the digests of all chunks of a leaf, uint64 ``(chunks, 2)``."""
        ...

    def picked(self, content: Any, element: np.dtype[Any], places: Places) -> NDArray[Any]:
        """Return some elements in host memory, in the shape of their places."""
        ...

    def grouped(self, parts: Sequence[Any]) -> Any:
        """Return weight, m and v, whose contents lie here, as one group (``adam_law.grouped``)."""
        ...

    def is_cast(self, narrow: Any, wide: Any, element: np.dtype[Any]) -> bool:
        """Return true if one content is the cast of another one, bit for bit.

        Args:
            narrow: Elements of 16 bits.
            wide: As many float32.
            element: The type of the narrow elements.
        """
        ...


@runtime_checkable
class PlacedCodec(Protocol):
    """A codec that works on leaves where they lie."""

    def memory_of(self, content: Any) -> LeafMemory:
        """Return the memory that a content or a base lies in."""
        ...


def memories_of(codec: Codec[Any]) -> Callable[[Any], LeafMemory]:
    """Return a function that returns the memory that a content or a base of a codec lies in."""
    if isinstance(codec, PlacedCodec):
        return codec.memory_of
    host = HostMemory(codec.host)
    return lambda content: host


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of the host, as ``LeafMemory`` describes it.

    Args:
        bring: Return a content in host memory.
    """

    bring: Callable[[Any], U8]

    def host(self, content: Any) -> U8:
        return self.bring(content)

    def held(self, content: Any, *, is_own: bool) -> U8:
        return self.bring(content) if is_own else self.bring(content).copy()

    def digests(self, content: Any, spec: LeafSpec) -> U64:
        return all_chunk_digests(spec, self.bring(content))

    def picked(self, content: Any, element: np.dtype[Any], places: Places) -> NDArray[Any]:
        values: NDArray[Any] = self.bring(content).view(element)[places]
        return values

    def grouped(self, parts: Sequence[Any]) -> U8:
        group = adam_law.grouped([self.bring(part).view(np.float32) for part in parts])
        content: U8 = group.reshape(-1).view(np.uint8)
        return content

    def is_cast(self, narrow: Any, wide: Any, element: np.dtype[Any]) -> bool:
        restored = derivation.cast(self.bring(wide).view(np.float32), element)
        # Bits are compared: a NaN differs from itself, and -0.0 equals 0.0.
        return np.array_equal(restored.view(np.uint8), self.bring(narrow))
