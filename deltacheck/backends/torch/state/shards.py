"""Describe the parts of leaves that one rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from deltacheck.backends.torch.state import leaves
from deltacheck.codec.base import U8
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.instances import name_of
from deltacheck.leaf.sharding import HeldShards
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, Cuts, inside, whole
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node
from deltacheck.restore.values import leaf_of_box
from deltacheck.save.ranks.group import DensePart, own_tiles, pieces_held
from deltacheck.save.treatment.signals import HeldState


# Without equality: a comparison of tensors has no single truth value.
@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's part of a leaf whose placement torch does not know.

    Use it for tensor, pipeline or expert parallel code of your own. Ranks that hold the same part
    are replicas, and one of them writes it.

    Args:
        data: The part, a dense tensor.
        global_shape: The shape of the whole leaf, with as many axes as ``data``.
        global_offset: The index of the part's first element in the leaf, along each axis.

    Raises:
        ValueError: The part does not lie in a leaf of this shape.
    """

    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]

    def __post_init__(self) -> None:
        fits = len(self.global_shape) == len(self.global_offset) == self.data.dim()
        if not fits or any(
            o < 0 or o + n > s
            for o, n, s in zip(self.global_offset, self.data.shape, self.global_shape, strict=True)
        ):
            raise ValueError(
                f"a shard of shape {tuple(self.data.shape)} at {tuple(self.global_offset)} is no"
                f" part of a leaf of shape {tuple(self.global_shape)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Fragment(Shard):
    """A run of elements of a leaf in C order.

    Optimizers that flatten parameters give each rank such runs. The leaf is stored flat, cut at the
    ends of the ranks' runs.

    Args:
        data: The run, 1-D.
        global_shape: The number of the leaf's elements, as a tuple.
        global_offset: The number of the first element of the run, as a tuple.
        shape: The shape in which the whole leaf is restored.
    """

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Several parts of one leaf on one rank.

    Args:
        parts: The parts.

    Raises:
        ValueError: The parts differ in dtype or global shape.
    """

    parts: tuple[Shard, ...]

    def __post_init__(self) -> None:
        kinds = {(part.data.dtype, tuple(part.global_shape)) for part in self.parts}
        if len(kinds) != 1:
            raise ValueError(
                "parts of one leaf have one dtype and one global shape, not"
                f" {sorted(map(str, kinds))}"
            )

    @property
    def data(self) -> torch.Tensor:
        """The tensor of the first part."""
        return self.parts[0].data

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return self.parts[0].global_shape


def describe(value: object) -> ArrayLeaf | None:
    """Describe a leaf that may be sharded, with its global shape.

    Raises:
        UnsupportedLeaf: As ``leaves.describe`` and ``pieces`` raise it.
    """
    if not isinstance(value, DTensor | Shard | Shards):
        return leaves.describe(value)
    description = leaves.describe(_dense(value))
    if description is None:
        # The protocol of wrappers does not say which of the inner tensors are cut as the leaf is
        # (codes), and which are the same on every rank (tables).
        local = "value.to_local()" if isinstance(value, DTensor) else "value.data"
        raise UnsupportedLeaf(
            f"its part on this rank is a {name_of(type(_dense(value)))}, which wraps tensors, and"
            f" their place in the whole leaf is not known; save {local} under a key of each rank,"
            " such as f'rank{rank}', and restore with the same number of ranks"
        )
    shape = tuple(value.shape) if isinstance(value, DTensor) else tuple(value.global_shape)
    next(pieces(value), None)  # raises for placements that are not parts of the leaf
    # Ties may differ between ranks, so fragments are never tied.
    if isinstance(value, Fragment):
        if description.tag is not None:
            raise UnsupportedLeaf(f"a fragment of {value.data.dtype} cannot be kept exactly")
        return description._replace(shape=shape, identity=None, tag=tree.flat_tag(value.shape))
    return description._replace(shape=shape)


def pieces(value: object) -> Iterator[DensePart]:
    """Yield the parts of a leaf that this process holds.

    Raises:
        UnsupportedLeaf: A DTensor has a partial placement, so that each rank holds a summand.
    """
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise UnsupportedLeaf(
                f"its placements {value.placements} are partial: each rank has a summand;"
                " redistribute it before it is saved"
            )
        # The field itself, because ``to_local`` takes part in autograd.
        local = value._local_tensor
        shape, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        # A tensor laid out in another way than torch computes would be stored at wrong offsets.
        if tuple(shape) != tuple(local.shape):
            raise UnsupportedLeaf(
                f"its shard has shape {tuple(local.shape)}, its placements {value.placements} say"
                f" {tuple(shape)}"
            )
        # A rank has nothing of a leaf that is shorter than the mesh.
        if local.numel():
            yield DensePart(
                tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True)), local
            )
    elif isinstance(value, Shard | Shards):
        for part in (value,) if isinstance(value, Shard) else value.parts:
            if part.data.numel():
                yield DensePart(
                    tuple(
                        slice(o, o + n)
                        for o, n in zip(part.global_offset, part.data.shape, strict=True)
                    ),
                    part.data,
                )
    else:
        shape = value.shape if isinstance(value, torch.Tensor | np.ndarray) else ()
        yield DensePart(whole(shape), value)


def held(flat: Flat) -> dict[str, HeldShards]:
    """Return the boxes of each leaf of a state that this process holds."""
    return pieces_held(flat, lambda path: pieces(flat.arrays[path]))


def held_state(flat: Flat, metrics: Mapping[str, float]) -> HeldState:
    """Return the state of which this process holds a part, for the decisions of a policy.

    Args:
        flat: The state of this rank.
        metrics: Values that the caller reports.
    """
    # A leaf that is stored flat is decided on by the shape that it is restored in.
    specs = {
        path: LeafSpec.of(
            path, tree.shape_in(leaf.tag, math.prod(leaf.shape), path) or leaf.shape, leaf.dtype
        )
        for path, leaf in flat.leaves.items()
    }

    def values(path: str) -> Iterator[NDArray[Any]]:
        for piece in pieces(flat.arrays[path]):
            yield leaves.bytes_of(piece.values).view(specs[path].element.numpy)

    return HeldState.of(specs, flat.skeleton, metrics, values)


def local_flat(
    flat: Flat, own: Mapping[str, tuple[Cuts | None, list[int]]], skeleton: Node
) -> Flat:
    """Return the tiles that this rank writes, as the leaves of a flat state.

    Args:
        flat: The state of this rank.
        own: Leaf path -> cuts of the leaf and numbers of this rank's tiles.
        skeleton: The skeleton of all ranks' states.
    """
    arrays: dict[str, object] = {}
    tile_leaves: dict[str, ArrayLeaf] = {}
    for path, tile in own_tiles(flat, own, lambda path: pieces(flat.arrays[path])):
        leaf = flat.leaves[path]
        arrays[tile.name] = (
            _dense(flat.arrays[path]) if tile.piece is None else _cut(tile.piece, tile.box)
        )
        # No identity: a tie was resolved when the whole state was flattened.
        tile_leaves[tile.name] = ArrayLeaf(tile.shape, leaf.dtype, None, leaf.tag)
    # The order of ``flatten``, in which a save reads its leaves.
    order = sorted(arrays)
    return Flat(
        skeleton,
        {name: arrays[name] for name in order},
        {name: tile_leaves[name] for name in order},
    )


class ShardCopy(NamedTuple):
    """A tile of a leaf that this rank holds and another one writes."""

    spec: LeafSpec
    values: object

    def content(self) -> U8:
        """Return its bytes, 1-D in C order."""
        return leaves.bytes_of(self.values)


def copies(flat: Flat, tiles: Mapping[str, tuple[Cuts | None, list[int]]]) -> Iterator[ShardCopy]:
    """Yield the tiles that this rank holds and other ranks write.

    Args:
        flat: The state of this rank.
        tiles: Leaf path -> cuts of the leaf and numbers of the tiles.
    """
    for path, tile in own_tiles(flat, tiles, lambda path: pieces(flat.arrays[path])):
        spec = LeafSpec.of(tile.name, tile.shape, flat.leaves[path].dtype)
        # A leaf without elements has no piece.
        value = _dense(flat.arrays[path]) if tile.piece is None else _cut(tile.piece, tile.box)
        yield ShardCopy(spec, value)


def _dense(value: object) -> object:
    """Return this process's part of a leaf as a plain tensor or array; the first of several."""
    return value.data if isinstance(value, Shard | Shards) else leaves.local_of(value)


def _cut(piece: DensePart, box: Box) -> object:
    if piece.box == box:
        return piece.values
    assert isinstance(piece.values, torch.Tensor | np.ndarray)  # scalars are never cut
    return piece.values[inside(box, piece.box)]


def fill(piece: DensePart, spec: LeafSpec, array: NDArray[Any]) -> object:
    """Fill a piece in place with restored content, and return it.

    NumPy scalars cannot be filled, so a new one is returned for them.

    Args:
        piece: The piece.
        spec: The spec of the whole leaf.
        array: The content, of the piece's shape.
    """
    if isinstance(piece.values, torch.Tensor):
        leaves.fill(piece.values, leaf_of_box(spec, array))
        return piece.values
    if isinstance(piece.values, np.ndarray):
        np.copyto(piece.values, array)
        return piece.values
    return array[()]
