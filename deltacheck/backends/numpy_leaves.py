"""Describe, read and place NumPy arrays and scalars, which every backend accepts as leaves."""

from __future__ import annotations

import numpy as np

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import NUMPY_ARRAY, NUMPY_SCALAR, ArrayLeaf, Flat
from deltacheck.restore.content import Loaded

# NumPy marks the native order by "=" or "|", never by "<" or ">", so this is the other order.
_BYTE_SWAPPED = ">" if np.little_endian else "<"


def describe_numpy(value: object) -> ArrayLeaf | None:
    """Describe a NumPy array or scalar, with the tag by which it is restored as such.

    Args:
        value: Any value of a tree.

    Returns:
        The description, or ``None`` if the value is neither an array nor a scalar of NumPy.

    Raises:
        UnsupportedLeaf: The array is of a subclass, such as a masked array, or not in native byte
            order.
    """
    # NumPy's text and bytes scalars are text and bytes to Python, and void scalars have fields.
    if isinstance(value, np.generic) and not isinstance(value, np.str_ | np.bytes_ | np.void):
        return ArrayLeaf((), dtype_named(value.dtype.name).name, None, NUMPY_SCALAR)
    if not isinstance(value, np.ndarray):
        return None
    # A memmap is an array like any other, but a subclass such as a matrix has another meaning.
    if value.dtype.byteorder == _BYTE_SWAPPED or type(value) not in (np.ndarray, np.memmap):
        raise UnsupportedLeaf(
            f"a {type(value).__name__} of dtype {value.dtype.str} cannot be kept exactly; convert"
            " it to a plain array in native byte order, unmasked"
        )
    pointer = value.__array_interface__["data"][0]
    # Arrays of size 0 share pointers by chance, so they are never tied.
    identity = (pointer, value.strides) if value.size else None
    return ArrayLeaf(value.shape, dtype_named(value.dtype.name).name, identity, NUMPY_ARRAY)


def numpy_bytes(value: np.ndarray | np.generic) -> np.ndarray:
    """Return the bytes of a NumPy array, uint8 1-D in C order; a view if its memory allows it."""
    # As bytes, so that the codec never computes with a value and every NaN keeps its bits.
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def specs_of(flat: Flat) -> dict[str, LeafSpec]:
    """Return the leaf specs of a flattened tree, in its order."""
    return {path: LeafSpec.of(path, leaf.shape, leaf.dtype) for path, leaf in flat.leaves.items()}


def place_numpy(item: Loaded, tag: str | None) -> object | None:
    """Return a leaf that was saved from NumPy as an array or scalar with memory of its own.

    Args:
        item: The whole leaf.
        tag: The leaf's tag.

    Returns:
        The array or scalar, or ``None`` if the tag is not NumPy's.
    """
    if tag not in (NUMPY_ARRAY, NUMPY_SCALAR):
        return None
    spec = item.spec
    # A copy, because a saver may keep the loaded bytes as the base of its next save.
    array = item.data.copy().view(spec.element.numpy).reshape(spec.shape)
    return array if tag == NUMPY_ARRAY else array[()]
