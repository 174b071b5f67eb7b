"""Checks of the arguments of the host codecs, made once at the border."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import host_memory
from deltacheck.codec.base import U8, U64

WORD_BYTES = (1, 2, 4, 8)
_MOST_WORDS = (1 << 32) - 1  # a row counts words in uint32


def as_bytes(name: str, array: NDArray[np.generic]) -> U8:
    """Return the bytes of a C-contiguous array, uint8 1-D, never a copy.

    Raises:
        ValueError: The argument is no such array; the message names it.
    """
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be a C-contiguous numpy array, not {_described(array)}")
    # One axis first: NumPy cannot view an array without axes as another type.
    return array.reshape(-1).view(np.uint8)


def checked_bounds(bounds: U64, total_bytes: int, word_bytes: int) -> U64:
    """Return ``bounds`` after a check that they cut ``total_bytes`` into whole words."""
    if word_bytes not in WORD_BYTES:
        raise ValueError(f"word_bytes must be one of {WORD_BYTES}, not {word_bytes!r}")
    if (
        not isinstance(bounds, np.ndarray)
        or bounds.dtype != np.uint64
        or bounds.ndim != 1
        or bounds.size == 0
    ):
        raise ValueError(f"bounds must be uint64 of shape (chunks + 1,), not {_described(bounds)}")
    longest = int((bounds[1:] - bounds[:-1]).max(initial=0))
    # Differences of uint64 wrap, so that a bound below the one before gives a large one.
    if bounds[0] != 0 or (longest > _MOST_WORDS and np.any(bounds[1:] < bounds[:-1])):
        raise ValueError("bounds must ascend from 0")
    # As Python integers, because the product may exceed 64 bits.
    if int(bounds[-1]) * word_bytes != total_bytes:
        raise ValueError(
            f"bounds end at {int(bounds[-1])} words of {word_bytes} bytes, but there are"
            f" {total_bytes} bytes"
        )
    if longest > _MOST_WORDS:
        raise ValueError("a chunk must have fewer than 2^32 words")
    return np.ascontiguousarray(bounds)


def checked_base(base: NDArray[np.generic], total_bytes: int) -> U8:
    """Return the bytes of a base after a check: writable, and as many as the current array has."""
    view = as_bytes("base", base)
    if not view.flags.writeable:
        raise ValueError("base must be writable: it is updated in place")
    if view.size != total_bytes:
        raise ValueError(f"base has {view.size} bytes, current has {total_bytes}")
    return view


def copied(current: NDArray[np.generic], out: NDArray[np.generic] | None) -> U8:
    """Return a base that holds ``current``, in ``out`` if that has the same number of bytes."""
    source = as_bytes("current", current)
    if (
        out is None
        or out.nbytes != source.size
        or not out.flags.writeable
        or not out.flags.c_contiguous
    ):
        return host_memory.copied(source)
    # The memory of an earlier base is used again, because fresh pages cost a fault each.
    target = as_bytes("out", out)
    np.copyto(target, source)
    return target


def checked_array(name: str, array: NDArray[np.generic], dtype: type[np.generic]) -> None:
    """Raise ``ValueError`` unless the argument is C-contiguous and of this dtype."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be a C-contiguous numpy array of {np.dtype(dtype).name}, not"
            f" {_described(array)}"
        )


def checked_out(
    out: NDArray[Any] | None, like: NDArray[np.generic], dtype: type[np.generic]
) -> NDArray[Any]:
    """Return the array for results: ``out`` if it fits, or a new one if ``out`` is ``None``.

    Raises:
        ValueError: ``out`` has another dtype or shape than results of ``dtype`` in the shape of
            ``like``.
    """
    if out is None:
        return np.empty(like.shape, dtype)
    if (
        not isinstance(out, np.ndarray)
        or out.dtype != dtype
        or out.shape != like.shape
        or not out.flags.c_contiguous
    ):
        raise ValueError(
            f"out must be a C-contiguous numpy array of {np.dtype(dtype).name}, shape {like.shape},"
            f" not {_described(out)}"
        )
    if not out.flags.writeable:
        raise ValueError("out must be writable")
    return out


def _described(array: object) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype} of shape {array.shape}, strides {array.strides}"
    return type(array).__name__
