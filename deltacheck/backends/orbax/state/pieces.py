"""What one of several processes has of a tree: which boxes of each array lie on its devices, its
tiles as leaves, and arrays from boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from deltacheck.backends.orbax.state import leaves
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.sharding import Held, whole
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, Cuts
from deltacheck.leaf.tree import ArrayLeaf, Flat
from deltacheck.save.job.source import LeafSource


class Piece(NamedTuple):
    """A part of a leaf that this process has. ``values``: on one device, of the box's shape; or a
    NumPy array or scalar, which is whole.
    """

    box: Box
    values: Any


def describe(value: object) -> ArrayLeaf | None:
    """As ``leaves.describe``, in a run of several processes: arrays of all of them, and NumPy
    arrays
    that each has alike.

    Raises ``UnsupportedLeaf`` for an array of this process alone, of which the others know nothing.
    """
    found = leaves.describe(value, of_all=True)
    if isinstance(value, jax.Array) and value.is_fully_addressable:
        raise UnsupportedLeaf(
            f"it is an array of process {jax.process_index()} alone ({value.sharding}), in a run of"
            f" {jax.process_count()}; make it one of all, for example with jax.device_put(x,"
            " NamedSharding(mesh, PartitionSpec()))"
        )
    return found


def pieces(value: object, shape: tuple[int, ...]) -> list[Piece]:
    """The parts of a leaf that lie on this process's devices, each once. ``shape``: of the leaf;
    typed keys have an axis less.
    """
    if not isinstance(value, jax.Array):
        return [Piece(whole(shape), value)]
    found: dict[tuple[tuple[int, int], ...], Piece] = {}
    for shard in value.addressable_shards:
        box = _box(shard.index, shape)
        if all(s.start < s.stop for s in box) or 0 in shape:
            found.setdefault(tuple((s.start, s.stop) for s in box), Piece(box, shard.data))
    return list(found.values())


def _box(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    return (*(slice(start, stop) for start, stop in bounds), *whole(shape[len(index) :]))


def held(flat: Flat) -> dict[str, Held]:
    """What this process has of each leaf."""
    return {
        path: Held(
            leaf.dtype,
            leaf.shape,
            tuple(piece.box for piece in pieces(flat.arrays[path], leaf.shape)),
        )
        for path, leaf in flat.leaves.items()
    }


def alike(flat: Flat) -> dict[str, str]:
    """A digest of each leaf that every process must have alike and that JAX does not keep so: those
    in host memory.
    """
    return {
        path: str(xxhash.xxh3_128_hexdigest(leaves.bytes_of(value).data))
        for path, value in flat.arrays.items()
        if not isinstance(value, jax.Array)
    }


def sources(
    flat: Flat, own: Mapping[str, tuple[Cuts | None, list[int]]], lazy: bool
) -> dict[str, LeafSource]:
    """The tiles that this process writes, as leaves. ``own``: leaf path -> its cuts, and the
    numbers
    of these tiles. ``lazy``: read shards that lie whole in host memory, and are a tile, behind the
    training.
    """
    made: dict[str, LeafSource] = {}
    for path, (cuts, numbers) in own.items():
        leaf = flat.leaves[path]
        parts = pieces(flat.arrays[path], leaf.shape)
        boxes = (
            [whole(leaf.shape)] if cuts is None else [tiles.box(cuts, number) for number in numbers]
        )
        for name, box in zip(sharding.names_of(path, cuts, numbers), boxes, strict=True):
            spec = LeafSpec.of(name, tuple(s.stop - s.start for s in box), leaf.dtype)
            number = sharding.find(box, (part.box for part in parts))
            # None: it has no elements, or else it would not be this process's.
            piece = (
                Piece(box, np.empty(spec.shape, spec.element.numpy))
                if number is None
                else parts[number]
            )
            view = leaves.view_of(piece.values) if lazy and piece.box == box else None
            made[name] = LeafSource(
                spec,
                partial(_cut, piece if view is None else Piece(box, view), box),
                view is not None,
            )
    return dict(sorted(made.items()))


def _cut(piece: Piece, box: Box) -> Any:
    """A tile, on the device that it lies on."""
    if piece.box == box:
        return piece.values
    values = piece.values
    if isinstance(values, jax.Array) and leaves.is_key(values.dtype):
        values = jax.random.key_data(values)
    return values[sharding.inside(box, piece.box)]


# --- the way back ---------------------------------------------------------------------------------


def spans_processes(placed: Sharding | None) -> bool:
    """Whether an array so placed lies in other processes, too."""
    return placed is not None and not placed.is_fully_addressable


def boxes_of(
    placed: Sharding, shape: tuple[int, ...], tail: tuple[int, ...] = ()
) -> dict[jax.Device, Box]:
    """Which box of an array goes to which device of this process. ``tail``: sizes of the axes that
    typed keys hide.
    """
    return {
        device: _box(index or (), (*shape, *tail))
        for device, index in placed.addressable_devices_indices_map(shape).items()
    }


def assembled(
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Mapping[str, Sharding],
    parts: Mapping[str, Mapping[jax.Device, NDArray[Any]]],
    dtypes: Mapping[str, Any],
    tags: Mapping[str, str | None],
) -> dict[str, jax.Array]:
    """Arrays of all processes from what goes to the devices of this one, in buffers of their own,
    fit
    to be donated.

    ``shapes``, ``dtypes``: as JAX has them; ``tags``: of typed keys.
    """
    host = {
        f"{path}\0{device.id}": values
        for path, of in parts.items()
        for device, values in of.items()
    }
    where: dict[str, Sharding | None] = {
        f"{path}\0{device.id}": SingleDeviceSharding(
            device, memory_kind=shardings[path].memory_kind
        )
        for path, of in parts.items()
        for device in of
    }
    placed = leaves.on_devices(host, where)
    made: dict[str, jax.Array] = {}
    for path, of in parts.items():
        arrays = [placed[f"{path}\0{device.id}"] for device in of]
        if leaves.is_key_tag(tags.get(path)):
            arrays = [leaves.key_of(array, tags[path], None) for array in arrays]
        nothing = (
            {} if arrays else {"dtype": dtypes[path]}
        )  # where no device of this process has a part
        made[path] = jax.make_array_from_single_device_arrays(
            shapes[path], shardings[path], arrays, **nothing
        )
    return made


def spread(array: NDArray[Any], placed: Sharding) -> jax.Array:
    """A host array that every process has alike as one of all of them."""
    parts = {
        device: np.ascontiguousarray(array[box])
        for device, box in boxes_of(placed, array.shape).items()
    }
    return assembled({"": array.shape}, {"": placed}, {"": parts}, {"": array.dtype}, {})[""]
