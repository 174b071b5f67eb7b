"""Reads of single arrays, as a joined read of the package makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.errors import Damaged
from deltacheck.store.files.arrays import ArraySpec, Reading
from deltacheck.store.files.native_files import JoinedRead, StoredArray
from deltacheck.store.files.storage import Place


class ReadableArray:
    """An array of a committed segment, read as the metadata says that it must have."""

    def __init__(self, path: Place, spec: ArraySpec) -> None:
        self._path = path
        self._spec = spec

    def read(self, box: Sequence[slice] = ()) -> NDArray[Any]:
        """Return the values of a box; ``Damaged`` if a chunk is missing or fails its checksum."""
        values: NDArray[Any] = self.start(box).result()
        return values

    def start(self, box: Sequence[slice] = ()) -> Reading:
        """Begin to read a box, which is rows of chunks, one chunk, or the whole array."""
        path, full_box = self._path, self._checked(box)
        out = np.empty([s.stop - s.start for s in full_box], self._spec.dtype)
        read, data = JoinedRead(path), out.reshape(-1).view(np.uint8)
        read.add_box(StoredArray(path, self._spec.cells, self._spec.codec), full_box, data)
        return Reading(read, path, out, data.size)

    def _checked(self, box: Sequence[slice]) -> Sequence[slice]:
        """Return a box, by default the whole array; ``Damaged`` if it exceeds the array."""
        shape = self._spec.shape
        full_box = box or [slice(0, size) for size in shape]
        # The arithmetic of ``Cells`` does not look at bounds.
        if any(not 0 <= s.start <= s.stop <= size for s, size in zip(full_box, shape, strict=True)):
            raise Damaged(
                f"array {self._path} of shape {shape} has no part"
                f" {[(s.start, s.stop) for s in full_box]}"
            )
        return full_box
