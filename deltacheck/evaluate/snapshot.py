"""A state as bytes that outlive the process which trains it: what was live when a checkpoint was
taken, to compare a restore with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacheck.leaf import tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A flattened state in host memory. ``arrays``: path -> values, 1-D, of the leaf's own type;
    ties
    once. ``values``: its Python values by path.

    ``ties``: every array place -> the path that holds its bytes. ``numbers``: the Python values
    themselves, and leaves of one number. ``told_rate``: the learning rate as the run itself tells
    it, ``None`` where it does not.
    """

    specs: Mapping[str, LeafSpec]
    arrays: Mapping[str, Array]
    values: Mapping[str, str]
    ties: Mapping[str, str]
    numbers: Mapping[str, object]
    told_rate: float | None = None


def taken(
    flat: Flat, bytes_of: Callable[[Any], NDArray[np.uint8]], told_rate: float | None = None
) -> Snapshot:
    """A copy of a state that training can no longer touch. ``bytes_of``: of the framework whose
    arrays they are.
    """
    specs = {path: LeafSpec.of(path, leaf.shape, leaf.dtype) for path, leaf in flat.leaves.items()}
    raw = {path: np.array(bytes_of(array), copy=True) for path, array in flat.arrays.items()}
    return _snapshot(specs, raw, flat.skeleton, told_rate)


def written(
    flat: Flat, bytes_of: Callable[[Any], NDArray[np.uint8]], told_rate: float | None, file: Path
) -> None:
    """Write a state down for ``read``: whole or not at all, so that a killed process leaves no half
    of one.
    """
    leaves = {path: [leaf.dtype, list(leaf.shape)] for path, leaf in flat.leaves.items()}
    about = json.dumps(
        {"leaves": leaves, "skeleton": flat.skeleton, "told_rate": told_rate}
    ).encode()
    parts = {str(number): bytes_of(flat.arrays[path]) for number, path in enumerate(leaves)}
    fresh = file.with_name(file.name + ".tmp")
    with fresh.open("wb") as out:
        np.savez(out, about=np.frombuffer(about, np.uint8), **parts)  # type: ignore[arg-type]
    os.replace(fresh, file)


def read(file: Path) -> Snapshot:
    """Raises ``OSError`` where it is not there."""
    with np.load(file, allow_pickle=False) as parts:
        about = json.loads(parts["about"].tobytes())
        specs = {
            path: LeafSpec.of(path, tuple(shape), dtype)
            for path, (dtype, shape) in about["leaves"].items()
        }
        raw = {path: parts[str(number)] for number, path in enumerate(specs)}
    return _snapshot(specs, raw, about["skeleton"], about["told_rate"])


def digests(snapshot: Snapshot) -> dict[str, str]:
    """A digest of every leaf, at every place of a tie, and of every Python value, by path."""
    found = {
        owner: xxhash.xxh3_128_hexdigest(snapshot.arrays[owner].tobytes())
        for owner in snapshot.specs
    }
    placed = {path: found[owner] for path, owner in snapshot.ties.items()}
    return placed | {path: f"value {value}" for path, value in snapshot.values.items()}


def _snapshot(
    specs: Mapping[str, LeafSpec],
    raw: Mapping[str, NDArray[np.uint8]],
    skeleton: tree.Node,
    told_rate: float | None,
) -> Snapshot:
    arrays: dict[str, Array] = {
        path: raw[path].view(spec.element.numpy) for path, spec in specs.items()
    }
    values = tree.scalars(skeleton)
    single = {p: float(a[0]) for p, a in arrays.items() if a.size == 1 and a.dtype.kind in "iuf"}
    shown = {path: f"{type(value).__name__} {_text(value)}" for path, value in values.items()}
    return Snapshot(
        specs, arrays, shown, tree.array_paths(skeleton), {**values, **single}, told_rate
    )


def _text(value: object) -> str:
    return (
        value.hex() if isinstance(value, float) else repr(value)
    )  # all bits of a float, and the same for every NaN
