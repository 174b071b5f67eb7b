"""Parts of arrays on the devices of one of several processes, and arrays from such parts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
import xxhash
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from deltacheck.backends.orbax.state import leaves
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.sharding import HeldShards
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, Cuts, inside, whole
from deltacheck.leaf.tree import ArrayLeaf, Flat
from deltacheck.save.job.source import LeafSource, host_content_check
from deltacheck.save.ranks.group import DensePart, own_tiles, pieces_held
from deltacheck.save.treatment.signals import HeldState

# Copies those of the values that lie on accelerators, and returns functions that return the copies.
Copied: TypeAlias = "Callable[[Mapping[str, Any]], Mapping[str, Callable[[], jax.Array]]]"


def describe(value: object) -> ArrayLeaf | None:
    """Describe a leaf in a run of several processes.

    Accepted are arrays of all processes, and NumPy arrays that are equal on every process.

    Raises:
        UnsupportedLeaf: The array belongs to this process alone, so the others do not know it.
    """
    leaf = leaves.describe(value, of_all=True)
    if isinstance(value, jax.Array) and value.is_fully_addressable:
        raise UnsupportedLeaf(
            f"it is an array of process {jax.process_index()} alone ({value.sharding}), in a run of"
            f" {jax.process_count()}; make it one of all, for example with jax.device_put(x,"
            " NamedSharding(mesh, PartitionSpec()))"
        )
    return leaf


def pieces(value: object, shape: tuple[int, ...]) -> list[DensePart]:
    """Return the parts of a leaf on this process's devices, each once.

    Args:
        value: The leaf.
        shape: The shape of the stored leaf. Typed keys have one axis less.
    """
    if not isinstance(value, jax.Array):
        return [DensePart(whole(shape), value)]
    by_box: dict[tuple[tuple[int, int], ...], DensePart] = {}
    for shard in value.addressable_shards:
        box = _box(shard.index, shape)
        # A device may hold nothing of a leaf that does not divide evenly. A leaf without elements
        # keeps its empty piece, so that it has a holder.
        if all(s.start < s.stop for s in box) or 0 in shape:
            by_box.setdefault(tuple((s.start, s.stop) for s in box), DensePart(box, shard.data))
    return list(by_box.values())


def _box(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    # Not strict: the index of typed keys lacks the axis of their data, which is always whole.
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    return (*(slice(start, stop) for start, stop in bounds), *whole(shape[len(index) :]))


def held(flat: Flat) -> dict[str, HeldShards]:
    """Return the boxes of each leaf that this process holds."""
    return pieces_held(flat, lambda path: pieces(flat.arrays[path], flat.leaves[path].shape))


def alike(flat: Flat) -> dict[str, str]:
    """Return the digest of each leaf in host memory, which must be equal on every process.

    JAX keeps its own arrays consistent, so they need no digest.
    """
    return {
        path: str(xxhash.xxh3_128_hexdigest(leaves.bytes_of(value).data))
        for path, value in flat.arrays.items()
        if not isinstance(value, jax.Array)
    }


def held_state(flat: Flat, metrics: Mapping[str, float]) -> HeldState:
    """Return the state of which this process holds a part, for the decisions of a policy.

    Args:
        flat: The state of this process.
        metrics: Values that the caller reports.
    """
    specs = {path: LeafSpec.of(path, leaf.shape, leaf.dtype) for path, leaf in flat.leaves.items()}

    def values(path: str) -> Iterator[NDArray[Any]]:
        for piece in pieces(flat.arrays[path], flat.leaves[path].shape):
            yield leaves.bytes_of(piece.values).view(specs[path].element.numpy)

    return HeldState.of(specs, flat.skeleton, metrics, values)


def sources(
    flat: Flat, own: Mapping[str, tuple[Cuts | None, list[int]]], copied: Copied | None
) -> dict[str, LeafSource]:
    """Return the tiles that this process writes, as sources of leaves.

    Args:
        flat: The state of this process.
        own: Leaf path -> cuts of the leaf and numbers of this process's tiles.
        copied: Read in the background what is a whole shard in host memory, and what this copies
            on accelerators; ``None``: read all tiles before ``save`` returns.
    """
    result: dict[str, LeafSource] = {}
    unviewed: dict[str, Any] = {}
    seed = secrets.randbits(62)
    tiles = own_tiles(flat, own, lambda path: pieces(flat.arrays[path], flat.leaves[path].shape))
    for path, tile in tiles:
        spec = LeafSpec.of(tile.name, tile.shape, flat.leaves[path].dtype)
        # Without a piece the leaf has no elements, else this process would not write the tile.
        piece = tile.piece or DensePart(tile.box, np.empty(spec.shape, spec.element.numpy))
        # A part of a shard is cut by JAX into a new array, so only a whole shard can be viewed.
        is_whole = copied is not None and piece.box == tile.box
        view = leaves.view_of(piece.values) if is_whole else None
        result[tile.name] = LeafSource(
            spec,
            partial(_cut, piece if view is None else DensePart(tile.box, view), tile.box),
            view is not None,
            check_content=None if view is None else host_content_check(tile.name, view, seed),
        )
        if copied is not None and leaves.is_on_accelerators(piece.values):
            unviewed[tile.name] = _cut(piece, tile.box)
    if copied is not None:
        for name, current in copied(unviewed).items():
            result[name] = LeafSource(result[name].spec, current, lazy=True, is_own=True)
    return dict(sorted(result.items()))


def _cut(piece: DensePart, box: Box) -> Any:
    """Return a tile, on the device that holds it."""
    if piece.box == box:
        return piece.values
    values = piece.values
    if isinstance(values, jax.Array) and leaves.is_key(values.dtype):
        # The box has the axis of the data, the keys do not.
        values = jax.random.key_data(values)
    return values[inside(box, piece.box)]


# --- arrays from boxes ----------------------------------------------------------------------------


def spans_processes(placed: Sharding | None) -> bool:
    """Return ``True`` if an array with this sharding also lies in other processes."""
    return placed is not None and not placed.is_fully_addressable


def boxes_of(
    placed: Sharding, shape: tuple[int, ...], tail: tuple[int, ...] = ()
) -> dict[jax.Device, Box]:
    """Return the box of an array for each device of this process.

    Args:
        placed: The sharding of the array.
        shape: The shape of the array.
        tail: Sizes of the axes that typed keys hide.
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
    """Return arrays of all processes, in buffers of their own that can be donated.

    All arguments are by leaf path.

    Args:
        shapes: The shapes as JAX has them.
        shardings: The shardings.
        parts: The content for each device of this process.
        dtypes: The dtypes as JAX has them.
        tags: The tags of typed keys and weakly typed arrays.
    """
    host: dict[str, NDArray[Any]] = {}
    placements: dict[str, Sharding | None] = {}
    for path, by_device in parts.items():
        for device, values in by_device.items():
            # Paths have no NUL: it is escaped in them.
            name = f"{path}\0{device.id}"
            host[name] = values
            placements[name] = SingleDeviceSharding(device, memory_kind=shardings[path].memory_kind)
    device_arrays = leaves.on_devices(host, placements)
    result: dict[str, jax.Array] = {}
    for path, by_device in parts.items():
        arrays = [device_arrays[f"{path}\0{device.id}"] for device in by_device]
        if leaves.is_key_tag(tags.get(path)):
            # Each part lies on its device already, so it needs no sharding.
            arrays = [leaves.key_of(array, tags[path], None) for array in arrays]
        # JAX needs the dtype if no device of this process has a part.
        options = {} if arrays else {"dtype": dtypes[path]}
        result[path] = jax.make_array_from_single_device_arrays(
            shapes[path], shardings[path], arrays, **options
        )
        # Weak types are of the whole. A process without a part cannot compute with it.
        if arrays and not leaves.is_key_tag(tags.get(path)):
            result[path] = leaves.tagged(result[path], tags.get(path), None)
    return result


def spread(array: NDArray[Any], sharding: Sharding, tag: str | None) -> jax.Array:
    """Return a host array, equal on every process, as an array of all processes."""
    parts = {
        device: np.ascontiguousarray(array[box])
        for device, box in boxes_of(sharding, array.shape).items()
    }
    return assembled({"": array.shape}, {"": sharding}, {"": parts}, {"": array.dtype}, {"": tag})[
        ""
    ]
