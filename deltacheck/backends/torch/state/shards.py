"""What a rank holds of a leaf: the whole of a plain tensor, its part of a DTensor, or what a
descriptor says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from deltacheck.backends.torch.state import leaves
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import sharding, tiles, tree
from deltacheck.leaf.sharding import Held, whole
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, Cuts
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node
from deltacheck.restore.fill import leaf_of_box


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's part of a leaf whose placement torch does not know: tensor, pipeline or expert
    parallel
    code of one's own.

    ``data``: the part, a tensor; ``global_shape``: of the leaf; ``global_offset``: where the part
    begins in it, along each axis. Ranks that hold the same part are replicas: one of them writes
    it.
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
    """Neighbouring elements of a leaf in C order: what an optimizer has that flattens parameters
    and
    gives each rank an equal run of them.

    ``data``: 1-D; ``global_shape``: the number of the leaf's elements; ``global_offset``: that of
    the first one here. The leaf is stored flat, cut where the ranks' parts end; ``shape``: the one
    it has for whoever reads it whole.
    """

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Several parts of one leaf on one rank. Raises ``ValueError`` where they are not of one
    leaf.
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
        """Of the first part."""
        return self.parts[0].data

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.parts[0].global_shape


class Piece(NamedTuple):
    """A dense part of a leaf in this process. ``values``: a tensor of the box's shape, or a NumPy
    array or scalar, which is whole.
    """

    box: Box
    values: object


def describe(value: object) -> ArrayLeaf | None:
    """As ``leaves.describe``, of leaves that are sharded too: their global shape."""
    if not isinstance(value, DTensor | Shard | Shards):
        return leaves.describe(value)
    described = leaves.describe(_dense(value))
    assert described is not None
    shape = tuple(value.shape) if isinstance(value, DTensor) else tuple(value.global_shape)
    for _ in pieces(value):  # refuses placements that are no parts
        break
    if isinstance(value, Fragment):  # two ranks may have different ties, so these have none
        return described._replace(shape=shape, identity=None, tag=tree.flat_tag(value.shape))
    return described._replace(shape=shape)


def pieces(value: object) -> Iterator[Piece]:
    """The parts of a leaf that this process has; none where it has none.

    Raises ``UnsupportedLeaf`` for a DTensor with a partial placement, whose parts are summands.
    """
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise UnsupportedLeaf(
                f"its placements {value.placements} are partial: each rank has a summand;"
                " redistribute it before it is saved"
            )
        local = value._local_tensor
        shape, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        if tuple(shape) != tuple(local.shape):
            raise UnsupportedLeaf(
                f"its shard has shape {tuple(local.shape)}, its placements {value.placements} say"
                f" {tuple(shape)}"
            )
        if local.numel():
            yield Piece(tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True)), local)
    elif isinstance(value, Shard | Shards):
        for part in (value,) if isinstance(value, Shard) else value.parts:
            if part.data.numel():
                yield Piece(
                    tuple(
                        slice(o, o + n)
                        for o, n in zip(part.global_offset, part.data.shape, strict=True)
                    ),
                    part.data,
                )
    else:
        shape = value.shape if isinstance(value, torch.Tensor | np.ndarray) else ()
        yield Piece(whole(shape), value)


def held(flat: Flat) -> dict[str, Held]:
    """What this process holds of each leaf of a state."""
    return {
        path: Held(leaf.dtype, leaf.shape, tuple(piece.box for piece in pieces(flat.arrays[path])))
        for path, leaf in flat.leaves.items()
    }


def local_flat(
    flat: Flat, own: Mapping[str, tuple[Cuts | None, list[int]]], skeleton: Node
) -> Flat:
    """The tiles that this rank writes, as leaves. ``own``: leaf path -> its cuts, and the numbers
    of these tiles.
    """
    arrays: dict[str, object] = {}
    described: dict[str, ArrayLeaf] = {}
    for path, (cuts, numbers) in own.items():
        leaf, parts = flat.leaves[path], list(pieces(flat.arrays[path]))
        boxes = (
            [whole(leaf.shape)] if cuts is None else [tiles.box(cuts, number) for number in numbers]
        )
        for name, box in zip(sharding.names_of(path, cuts, numbers), boxes, strict=True):
            number = sharding.find(box, (part.box for part in parts))
            arrays[name] = _dense(flat.arrays[path]) if number is None else _cut(parts[number], box)
            described[name] = ArrayLeaf(
                tuple(s.stop - s.start for s in box), leaf.dtype, None, leaf.tag
            )
    order = sorted(arrays)
    return Flat(
        skeleton, {name: arrays[name] for name in order}, {name: described[name] for name in order}
    )


def _dense(value: object) -> object:
    """What this process has of a leaf, as a plain tensor or array; of several parts the first."""
    return value.data if isinstance(value, Shard | Shards) else leaves.local_of(value)


def _cut(piece: Piece, box: Box) -> object:
    if piece.box == box:
        return piece.values
    assert isinstance(piece.values, torch.Tensor | np.ndarray)  # scalars are never cut
    return piece.values[sharding.inside(box, piece.box)]


def fill(piece: Piece, spec: LeafSpec, array: NDArray[Any]) -> object:
    """The piece with its restored content: filled in place, but for NumPy scalars, which cannot be.
    ``spec``: of the leaf.
    """
    if isinstance(piece.values, torch.Tensor):
        with torch.no_grad():
            piece.values.copy_(leaves.tensor_of(leaf_of_box(spec, array)))
        return piece.values
    if isinstance(piece.values, np.ndarray):
        np.copyto(piece.values, array)
        return piece.values
    return array[()]
