"""Element types: their names in a manifest, their NumPy types and their storage in zarr."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from deltacheck.errors import UnsupportedLeaf

_NATIVE = (
    # zarr-python stores these types as they are.
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64"
    " complex128"
).split()
_EXTENDED = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2"
    " float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int2 int4 uint2"
    " uint4"
).split()


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Args:
        name: The name, as JAX and ml_dtypes spell it.
        item_bytes: Bytes of one element in memory; a type below 8 bits takes one byte.
        word_bytes: Bytes of a word, the unit that the encoder compares: 1, 2, 4 or 8.
        storage: The zarr data type of a natural array. A type that zarr-python lacks is stored as
            the unsigned integer of the same size, so that plain zarr opens it, and ``.view()``
            restores the type.
    """

    name: str
    item_bytes: int
    word_bytes: int
    storage: str

    @property
    def is_short_float(self) -> bool:
        """Return true for floats of 16 bits: the smaller such a weight, the more it changes."""
        return self.name in ("bfloat16", "float16")

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """Return the NumPy type, from ml_dtypes if NumPy lacks it."""
        return np.dtype(self.name if self.name in _NATIVE else getattr(ml_dtypes, self.name))


@cache
def dtype_named(name: str) -> DType:
    """Return the element type of this name.

    Raises:
        UnsupportedLeaf: The format has no such type.
    """
    if name in _NATIVE:
        size = np.dtype(name).itemsize
        # The encoder has no words of 16 bytes: an element of complex128 is two of 8.
        return DType(name, size, min(size, 8), name)
    # Releases of ml_dtypes differ in the types that they have.
    if name in _EXTENDED and hasattr(ml_dtypes, name):
        size = np.dtype(getattr(ml_dtypes, name)).itemsize
        return DType(name, size, size, f"uint{8 * size}")
    raise UnsupportedLeaf(f"element type {name!r} is not one that deltacheck can keep exactly")
