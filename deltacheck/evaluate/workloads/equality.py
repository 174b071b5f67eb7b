"""Comparison of states bit for bit, whichever framework holds them."""

from __future__ import annotations

import importlib.util
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import deltacheck


@dataclass(frozen=True, slots=True)
class EqualityVerdict:
    """The result of one comparison; ``detail`` is its extent or the first differences."""

    claim: str
    holds: bool
    detail: str


def compare(claim: str, expected: Any, actual: Any) -> EqualityVerdict:
    """Compare the paths of two nested states and, leaf by leaf, shape, dtype and bits."""
    expected_leaves, actual_leaves = dict(_leaves(expected)), dict(_leaves(actual))
    # A path that only one side has is a difference too, so both sides are listed.
    paths = {**expected_leaves, **actual_leaves}
    wrong = [path for path in paths if expected_leaves.get(path) != actual_leaves.get(path)]
    if wrong:
        return EqualityVerdict(
            claim,
            False,
            f"{len(wrong)} of {len(expected_leaves)} leaves differ, first {', '.join(wrong[:3])}",
        )
    size = sum(len(leaf[-1]) for leaf in expected_leaves.values())
    return EqualityVerdict(
        claim, True, f"{len(expected_leaves)} leaves, {size / 1e6:.1f} MB, equal"
    )


def in_jax(claim: str, expected: Any, root: Path, step: int) -> EqualityVerdict:
    """Restore a step as a JAX pytree, on the CPU, and compare it."""
    if importlib.util.find_spec("orbax") is None:
        return EqualityVerdict(claim, True, "not tried: jax and orbax are not installed")
    import jax

    from deltacheck.backends import orbax

    # With x64, 64-bit leaves keep their width.
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return compare(claim, expected, orbax.load(root, step))


def in_plain_zarr(claim: str, root: Path, step: int) -> EqualityVerdict:
    """Open a root with zarr alone, and compare every array of its first step.

    Any warning of zarr is an error.

    Args:
        claim: The name of the comparison.
        root: The root.
        step: Its first step, all of whose leaves are keyframes: zarr alone reads no deltas.
    """
    if importlib.util.find_spec("zarr") is None:
        return EqualityVerdict(claim, True, "not tried: zarr is not installed")
    import zarr

    checkpoints = deltacheck.open(root)
    # The first step of a root has a single segment, the one of its own save.
    (segment,) = checkpoints.manifest(step).segments
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A save that was killed before its segment was complete has left it without a document;
        # no step needs it.
        warnings.filterwarnings(
            "ignore", r"Object at s\d{10}-[0-9a-f]{8} is not recognized as a component"
        )
        zarr.open_group(root, mode="r").tree()
        leaves = zarr.open_group(root / "segments" / segment.id / "leaves", mode="r")
        arrays = {
            str(array.attrs["leaf_path"]): np.asarray(array[...]) for _, array in leaves.arrays()
        }
    expected = checkpoints.restore(step, leaves=arrays)
    wrong = [
        path
        for path in arrays
        if arrays[path].shape != expected[path].shape
        or arrays[path].tobytes() != expected[path].tobytes()
    ]
    if wrong or not arrays:
        first = f", first {wrong[0]}" if wrong else ""
        return EqualityVerdict(claim, False, f"{len(wrong)} of {len(arrays)} arrays differ{first}")
    size = sum(array.nbytes for array in arrays.values())
    return EqualityVerdict(claim, True, f"{len(arrays)} arrays, {size / 1e6:.1f} MB, equal")


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, tuple[str, tuple[int, ...], bytes]]]:
    """Yield path, then kind, shape and bytes, of every leaf.

    The kind of a dtype is the same in all frameworks.
    """
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, f"{path}/{key}")
    elif isinstance(node, list | tuple):
        for position, child in enumerate(node):
            yield from _leaves(child, f"{path}/{position}")
    elif hasattr(node, "dtype"):
        array = _bits(node)
        yield path, (str(node.dtype).removeprefix("torch."), tuple(node.shape), array.tobytes())
    else:  # a Python scalar; a float by its bits
        bits = struct.pack("<d", node) if isinstance(node, float) else repr(node).encode()
        yield path, (type(node).__name__, (), bits)


def _bits(array: Any) -> NDArray[np.uint8]:
    if hasattr(array, "detach"):  # torch
        import torch

        tensor: torch.Tensor = array.detach().contiguous().reshape(-1)
        return tensor.view(torch.uint8).cpu().numpy()
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
