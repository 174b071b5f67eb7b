"""Element types: the name that a manifest carries, its NumPy type, and how plain zarr stores it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from deltacheck.errors import UnsupportedLeaf

_NATIVE = (
    # Zarr-python has these
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
    """One element type.

    ``name``: as JAX and ml_dtypes spell it. ``item_bytes``: bytes of one element in memory
    (sub-byte types take one). ``word_bytes``: what the encoder compares (1, 2, 4 or 8).
    ``storage``: the zarr data type of a natural array; a type that zarr-python lacks is stored as
    the unsigned integer of the same size, so that plain zarr opens it and ``.view()`` brings it
    back.
    """

    name: str
    item_bytes: int
    word_bytes: int
    storage: str

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy type (from ml_dtypes where NumPy has none)."""
        return np.dtype(self.name if self.name in _NATIVE else getattr(ml_dtypes, self.name))


@cache
def dtype_named(name: str) -> DType:
    """The element type called ``name``; ``UnsupportedLeaf`` where there is none."""
    if name in _NATIVE:
        size = np.dtype(name).itemsize
        return DType(name, size, min(size, 8), name)
    if name in _EXTENDED and hasattr(ml_dtypes, name):
        size = np.dtype(getattr(ml_dtypes, name)).itemsize
        return DType(name, size, size, f"uint{8 * size}")
    raise UnsupportedLeaf(f"element type {name!r} is not one that deltacheck can keep exactly")
