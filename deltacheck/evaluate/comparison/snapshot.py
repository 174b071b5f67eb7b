"""A copy of the live state at a save, to compare a restored state with.

Written to a file, it outlives the process that trains.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacheck.leaf import tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.policy import roles
from deltacheck.policy.parameters import Roles

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Snapshot:
    """A flattened state in host memory.

    ``arrays``: values by path, 1-D, of the leaf's own type, tied leaves once. ``values``: its
    Python values by path, as text. ``ties``: for every path of an array, the path that holds its
    bytes. ``numbers``: the Python values themselves, and leaves of one number. ``run_rate``: the
    learning rate that the run itself reports, or ``None``.
    """

    specs: Mapping[str, LeafSpec]
    arrays: Mapping[str, Array]
    values: Mapping[str, str]
    ties: Mapping[str, str]
    numbers: Mapping[str, object]
    run_rate: float | None = None

    @cached_property
    def roles(self) -> Roles:
        """The roles of the leaves, by their names."""
        return roles.find(self.specs, self.numbers)


def take(
    flat: Flat, bytes_of: Callable[[Any], NDArray[np.uint8]], run_rate: float | None = None
) -> Snapshot:
    """Copy a state, so that training cannot change it.

    Args:
        flat: The flattened state.
        bytes_of: Returns the bytes of one of the framework's arrays.
        run_rate: The learning rate that the run reports.
    """
    specs = {path: LeafSpec.of(path, leaf.shape, leaf.dtype) for path, leaf in flat.leaves.items()}
    # The bytes may be those of the live tensors, which the next step of the training changes.
    raw = {path: np.array(bytes_of(array), copy=True) for path, array in flat.arrays.items()}
    return _snapshot(specs, raw, flat.skeleton, run_rate)


def write(
    flat: Flat, bytes_of: Callable[[Any], NDArray[np.uint8]], run_rate: float | None, file: Path
) -> None:
    """Write a state for ``read``.

    The file is renamed into place, so that a killed process leaves no incomplete one.
    """
    leaves = {path: [leaf.dtype, list(leaf.shape)] for path, leaf in flat.leaves.items()}
    header = {"leaves": leaves, "skeleton": flat.skeleton, "run_rate": run_rate}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    # Arrays are named by number, because a leaf path may have any characters.
    parts = {str(number): bytes_of(flat.arrays[path]) for number, path in enumerate(leaves)}
    incomplete = file.with_name(file.name + ".tmp")
    with incomplete.open("wb") as out:
        np.savez(out, header=text, **parts)  # type: ignore[arg-type]
    os.replace(incomplete, file)


def read(file: Path) -> Snapshot:
    """Read what ``write`` has written.

    Raises:
        OSError: There is no such file.
    """
    # All arrays are bytes. Types that NumPy's format lacks, such as bfloat16, are in the header.
    with np.load(file, allow_pickle=False) as parts:
        header = json.loads(parts["header"].tobytes())
        specs = {
            path: LeafSpec.of(path, tuple(shape), dtype)
            for path, (dtype, shape) in header["leaves"].items()
        }
        raw = {path: parts[str(number)] for number, path in enumerate(specs)}
    return _snapshot(specs, raw, header["skeleton"], header["run_rate"])


def digests(snapshot: Snapshot) -> dict[str, str]:
    """Return a digest of every array, at every path of a tie, and of every Python value."""
    by_owner = {
        owner: xxhash.xxh3_128_hexdigest(snapshot.arrays[owner].tobytes())
        for owner in snapshot.specs
    }
    by_path = {path: by_owner[owner] for path, owner in snapshot.ties.items()}
    return by_path | {path: f"value {value}" for path, value in snapshot.values.items()}


def _snapshot(
    specs: Mapping[str, LeafSpec],
    raw: Mapping[str, NDArray[np.uint8]],
    skeleton: tree.Node,
    run_rate: float | None,
) -> Snapshot:
    arrays: dict[str, Array] = {
        path: raw[path].view(spec.element.numpy) for path, spec in specs.items()
    }
    values = tree.scalars(skeleton)
    # Optimizers keep their step and sometimes their rate in arrays of one element.
    single = {p: float(a[0]) for p, a in arrays.items() if a.size == 1 and a.dtype.kind in "iuf"}
    value_texts = {path: f"{type(value).__name__} {_text(value)}" for path, value in values.items()}
    return Snapshot(
        specs, arrays, value_texts, tree.array_paths(skeleton), {**values, **single}, run_rate
    )


def _text(value: object) -> str:
    # hex() shows all bits of a float, but is the same for every NaN.
    return value.hex() if isinstance(value, float) else repr(value)
