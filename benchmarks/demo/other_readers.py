"""Comparison of a restore with what JAX and plain zarr read."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import deltacheck
from benchmarks.workloads import equality
from benchmarks.workloads.equality import EqualityVerdict


def in_jax(claim: str, expected: Any, root: Path, step: int) -> EqualityVerdict:
    """Restore a step as a JAX pytree, on the CPU, and compare it."""
    if importlib.util.find_spec("orbax") is None:
        return EqualityVerdict(claim, True, "not tried: jax and orbax are not installed")
    import jax

    from deltacheck.backends import orbax

    # With x64, 64-bit leaves keep their width.
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return equality.compare(claim, expected, orbax.load(root, step))


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
