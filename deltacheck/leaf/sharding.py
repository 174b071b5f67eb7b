"""Distribution of tiles over ranks: the choice of the rank that writes each tile.

One rank decides this for all ranks, from the boxes that each holds. All functions are pure.

A run of 1,024 ranks with 1,000 leaves has a million shards. Therefore everything that grows with
ranks times leaves is an array of numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltacheck.errors import RankFailed
from deltacheck.leaf import tiles
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, Cuts

I64: TypeAlias = NDArray[np.int64]

# A leaf that several ranks hold whole is cut into parts of at least this size, so that these ranks
# share the work. Smaller parts would make more files without saving time.
_SPREAD_BYTES = 8 << 20
# After a change of the ranks, old cuts are kept beside the new ones, so that chains continue. They
# are dropped if this would give more than this many tiles for each that is needed.
_MOST_TILES_EACH = 4


class HeldShards(NamedTuple):
    """The shards of one leaf that a rank holds.

    Attributes:
        dtype: The element type of the leaf.
        shape: The shape of the leaf.
        boxes: One box for each shard. The box of the whole leaf is ``tiles.whole(shape)``.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Holdings(msgspec.Struct, frozen=True):
    """The shards of all leaves that a rank holds, as a message to rank 0.

    Attributes:
        leaves: Path, dtype and shape of each leaf, encoded.
        counts: The number of boxes of each leaf, int32.
        boxes: Start and stop of each box along each axis, int64.
    """

    leaves: bytes
    counts: bytes
    boxes: bytes

    @classmethod
    def of(cls, held: Mapping[str, HeldShards]) -> Holdings:
        """Encode the shards of a rank, given by leaf path."""
        # Sorted, so that ranks with the same leaves send equal bytes, which rank 0 decodes only
        # once.
        order = sorted(held)
        leaves = msgspec.msgpack.encode(
            [(path, held[path].dtype, held[path].shape) for path in order]
        )
        counts = np.array([len(held[path].boxes) for path in order], np.int32)
        numbers = [
            edge
            for path in order
            for box in held[path].boxes
            for s in box
            for edge in (s.start, s.stop)
        ]
        return cls(leaves, counts.tobytes(), np.array(numbers, np.int64).tobytes())

    def held(self) -> dict[str, HeldShards]:
        """Return the shards by leaf path, as ``of`` was given them."""
        leaves = msgspec.msgpack.decode(self.leaves, type=list[tuple[str, str, tuple[int, ...]]])
        edges = iter(np.frombuffer(self.boxes, np.int64).tolist())
        return {
            path: HeldShards(
                dtype,
                shape,
                tuple(tuple(slice(next(edges), next(edges)) for _ in shape) for _ in range(count)),
            )
            for (path, dtype, shape), count in zip(
                leaves, np.frombuffer(self.counts, np.int32).tolist(), strict=True
            )
        }


@dataclass(frozen=True, slots=True)
class Planned:
    """The decision for one leaf.

    Args:
        dtype: Its element type.
        shape: Its shape.
        cuts: The cuts into tiles; ``None``: it is stored whole.
        owners: The rank that writes each tile, int64 ``(tiles,)``.
    """

    dtype: str
    shape: tuple[int, ...]
    cuts: Cuts | None
    owners: I64


Plan: TypeAlias = Mapping[str, Planned]  # by leaf path, ascending


class Share(msgspec.Struct, frozen=True):
    """The part of a plan that one rank needs, as a message to it.

    Attributes:
        plan: For each leaf its path and the number of its cuts, then all different cuts, encoded.
        own: The tiles that the rank writes, counted through all leaves, int64.
        copies: The tiles that it holds while another rank writes them, in the same form.
    """

    plan: bytes
    own: bytes
    copies: bytes = b""

    def tiles(self) -> dict[str, tuple[Cuts | None, list[int]]]:
        """Return the cuts and the tile numbers of each leaf of which this rank writes tiles."""
        return self._by_leaf(self.own)

    def copied_tiles(self) -> dict[str, tuple[Cuts | None, list[int]]]:
        """Return the tiles that this rank holds while another one writes them, as ``tiles``."""
        return self._by_leaf(self.copies)

    def _by_leaf(self, tile_numbers: bytes) -> dict[str, tuple[Cuts | None, list[int]]]:
        leaves, cuts = _decoded_plan(self.plan)
        counts = [_tile_count(cuts[number]) for _, number in leaves]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        counted = np.frombuffer(tile_numbers, np.int64)
        numbers: dict[str, tuple[Cuts | None, list[int]]] = {}
        leaf_of = np.searchsorted(starts, counted, "right") - 1
        for leaf, number in zip(
            leaf_of.tolist(), (counted - starts[leaf_of]).tolist(), strict=True
        ):
            path, cuts_number = leaves[leaf]
            numbers.setdefault(path, (cuts[cuts_number], []))[1].append(number)
        return numbers


def _tile_count(cuts: Cuts | None) -> int:
    return 1 if cuts is None else tiles.count(cuts)


def _decoded_plan(plan: bytes) -> tuple[list[tuple[str, int]], list[Cuts | None]]:
    return msgspec.msgpack.decode(plan, type=tuple[list[tuple[str, int]], list[Cuts | None]])


@dataclass(frozen=True, slots=True)
class Before:
    """The plan of a leaf in an earlier step, which is kept if possible so that chains continue.

    Args:
        cuts: The cuts; ``None``: it was stored whole.
        owners: The rank that wrote each tile; empty if no rank of this run did.
    """

    cuts: Cuts | None
    owners: I64 = field(default_factory=lambda: np.zeros(0, np.int64))


def plan(
    holdings: Sequence[Holdings],
    before: Mapping[str, Before] | None = None,
    groups: Iterable[Sequence[str]] = (),
) -> dict[str, Planned]:
    """Cut each leaf into tiles that lie in one shard each, and choose a writer for each tile.

    A tile that several ranks hold is written by the rank that wrote it before, otherwise by the
    rank with the fewest bytes to write. Tiles are assigned by decreasing size, which is the greedy
    algorithm LPT (Graham, 1969).

    Args:
        holdings: The shards of each rank, by rank.
        before: The earlier plan of leaves, by path.
        groups: Paths of leaves of one shape that should be cut alike, with one writer for all tiles
            at one place. Leaves that the ranks hold in different ways are not.

    Returns:
        The decisions by leaf path, ascending.

    Raises:
        RankFailed: Ranks disagree on a leaf, or no rank holds a part of it; names leaf and ranks.
    """
    by_leaf = _by_leaf(holdings)
    first_of = {path: group[0] for group in _groups_of_one_shape(groups, by_leaf) for path in group}
    item_bytes: dict[str, int] = {}
    for path, (dtype, *_) in by_leaf.items():
        first_path = first_of.get(path, path)
        largest = item_bytes.get(first_path, 0)
        item_bytes[first_path] = max(largest, dtype_named(dtype).item_bytes)
    loads = np.zeros(len(holdings), np.int64)
    decisions: dict[str, Planned] = {}
    # The tiles that several ranks hold: place -> the leaves that have a tile there, and its bytes.
    shared: dict[_Shared, list[tuple[str, int]]] = {}
    for path, (dtype, shape, ranks, boxes) in sorted(by_leaf.items()):
        first_path = first_of.get(path, path)
        prior = _prior(before or {}, path, first_path)
        try:
            cuts, numbers, holders = _cut(
                shape,
                item_bytes[first_path],
                ranks.tobytes(),
                boxes.tobytes(),
                _cuts_before(prior, shape),
            )
        except ValueError as error:
            raise RankFailed(f"leaf {path!r} of shape {list(shape)}: {error}") from None
        sizes = _tile_bytes(cuts, shape, dtype)
        first = np.searchsorted(numbers, np.arange(_tile_count(cuts) + 1))
        owners = _settled_owners(cuts, first, holders, prior)
        decided = np.flatnonzero(owners >= 0)
        # A rank may own several of these tiles, and ``loads[...] +=`` would count only one of them.
        np.add.at(loads, owners[decided], sizes[decided])
        for number in np.flatnonzero(owners < 0).tolist():
            candidates = holders[first[number] : first[number + 1]]
            if candidates.size:
                place = _Shared(first_path, cuts, number, candidates.tobytes())
                shared.setdefault(place, []).append((path, int(sizes[number])))
        decisions[path] = Planned(dtype, shape, cuts, owners)
    _assign_shared(shared, decisions, loads)
    return decisions


class _Shared(NamedTuple):
    """A place at which several ranks hold a tile of a leaf, or of each leaf of a group."""

    first_path: str
    cuts: Cuts | None
    number: int
    candidates: bytes


def _cuts_before(prior: Before | None, shape: tuple[int, ...]) -> Cuts | None:
    """Return the earlier cuts of a leaf, ``None`` without any and for another shape."""
    if prior is None or prior.cuts is None or tiles.shape_of(prior.cuts) != shape:
        return None
    return prior.cuts


def _settled_owners(cuts: Cuts | None, first: I64, holders: I64, prior: Before | None) -> I64:
    """Return the writers of the tiles that one rank holds, or that a holder wrote before.

    Args:
        cuts: The cuts of the leaf.
        first: For each tile the position of its first holder, and the number of all.
        holders: The ranks that hold the tiles, tile by tile.
        prior: The earlier plan of the leaf.

    Returns:
        The rank of each tile, -1 if it is not decided.
    """
    count = first.size - 1
    owners = np.full(count, -1, np.int64)
    unshared = np.flatnonzero(np.diff(first) == 1)
    owners[unshared] = holders[first[unshared]]
    # Owners are numbered by tile, so they mean nothing under other cuts.
    if prior is None or prior.cuts != cuts or prior.owners.size != count:
        return owners
    for number in np.flatnonzero(np.diff(first) > 1).tolist():
        if prior.owners[number] in holders[first[number] : first[number + 1]]:
            owners[number] = prior.owners[number]
    return owners


def _assign_shared(
    shared: Mapping[_Shared, list[tuple[str, int]]], decisions: Mapping[str, Planned], loads: I64
) -> None:
    """Give each shared tile to the candidate with the fewest bytes, the largest tiles first.

    Args:
        shared: The places, and the leaves that have a tile there with its bytes.
        decisions: The plan; the owners of these tiles are set.
        loads: The bytes that each rank writes; those of these tiles are added.
    """
    # Path and number decide between equal sizes, so that the plan does not depend on an order of
    # dicts.
    for place, members in sorted(
        shared.items(),
        key=lambda item: (-sum(size for _, size in item[1]), item[0].first_path, item[0].number),
    ):
        candidates = np.frombuffer(place.candidates, np.int64)
        rank = int(candidates[np.argmin(loads[candidates])])
        for path, size in members:
            decisions[path].owners[place.number] = rank
            # Tiles without elements count too, so that not all of them go to one rank.
            loads[rank] += max(size, 1)


def _groups_of_one_shape(
    groups: Iterable[Sequence[str]], leaves: Mapping[str, tuple[Any, ...]]
) -> Iterator[list[str]]:
    """Yield the leaves of each group that the ranks hold, if all of them have one shape."""
    for group in groups:
        present = sorted(path for path in set(group) if path in leaves)
        if len(present) > 1 and len({leaves[path][1] for path in present}) == 1:
            yield present


def _prior(before: Mapping[str, Before], path: str, first_path: str) -> Before | None:
    """Return the earlier plan of a leaf, with the cuts of the first leaf of its group."""
    own, first = before.get(path), before.get(first_path)
    if first is None or (own is not None and own.cuts == first.cuts):
        return own
    return Before(first.cuts)


def specs(holdings: Sequence[Holdings]) -> dict[str, LeafSpec]:
    """Return the specs of the leaves that any rank holds, by path.

    Raises:
        RankFailed: Ranks disagree on a leaf.
    """
    return {
        path: LeafSpec.of(path, shape, dtype)
        for path, (dtype, shape, *_) in sorted(_by_leaf(holdings).items())
    }


class Copies(NamedTuple):
    """The tiles that ranks hold while other ranks write them, by rank, then by tile.

    Attributes:
        ranks: The rank of each copy, int64 ``(copies,)``.
        tiles: Its tile, counted through all leaves, int64 ``(copies,)``.
    """

    ranks: I64
    tiles: I64

    def of(self, rank: int) -> I64:
        """Return the tiles of which a rank holds a copy."""
        first, stop = np.searchsorted(self.ranks, [rank, rank + 1])
        return self.tiles[first:stop]


def copies(planned: Plan, holdings: Sequence[Holdings]) -> Copies:
    """Return the tiles of a plan that ranks hold while other ranks write them.

    Args:
        planned: The plan.
        holdings: The shards of each rank, by rank. Of leaves that none of them names, there are no
            copies.
    """
    by_leaf, first = _by_leaf(holdings), 0
    pairs: list[tuple[I64, I64]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for path, leaf in planned.items():
        start, first = first, first + leaf.owners.size
        if path not in by_leaf:
            continue
        _, shape, ranks, boxes = by_leaf[path]
        present = (boxes[:, :, 0] < boxes[:, :, 1]).all(axis=1) | (0 in shape)
        if leaf.cuts is None:
            holders = np.unique(ranks[present])
            numbers = np.zeros(holders.size, np.int64)
        else:
            numbers, holders = _cells(leaf.cuts, ranks[present], boxes[present])
        is_copy = holders != leaf.owners[numbers]
        pairs.append((holders[is_copy], numbers[is_copy] + start))
    holders, numbers = (np.concatenate(column) for column in zip(*pairs, strict=True))
    # Stable: the tiles of a rank stay ascending.
    order = np.argsort(holders, kind="stable")
    return Copies(holders[order], numbers[order])


def shares(planned: Plan, size: int, copied: Copies | None = None) -> list[Share]:
    """Return the part of a plan that each rank needs.

    Args:
        planned: The plan.
        size: The number of ranks.
        copied: The tiles that ranks are to compare with those that other ranks write.
    """
    # Many leaves have the same cuts, which are therefore sent once.
    cuts: dict[Cuts | None, int] = {}
    leaves = [(path, cuts.setdefault(leaf.cuts, len(cuts))) for path, leaf in planned.items()]
    common = msgspec.msgpack.encode((leaves, list(cuts)))
    return [
        Share(common, rank_tiles.tobytes(), b"" if copied is None else copied.of(rank).tobytes())
        for rank, rank_tiles in enumerate(by_rank(owners_of(planned), size))
    ]


def by_rank(owners: I64, size: int) -> list[I64]:
    """Return the tiles that each rank writes, ascending, from the writers of all tiles."""
    # Numbers of 16 bits are sorted by radix. Stable: the tiles of a rank stay in their order.
    short = owners.astype(np.uint16) if size <= 1 << 16 else owners
    order = np.argsort(short, kind="stable").astype(np.int64, copy=False)
    edges = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=size))])
    return [order[edges[rank] : edges[rank + 1]] for rank in range(size)]


def owners_of(planned: Plan) -> I64:
    """Return the writers of all tiles, leaf by leaf."""
    return np.concatenate([np.zeros(0, np.int64), *[leaf.owners for leaf in planned.values()]])


def names_of(path: str, cuts: Cuts | None, numbers: Sequence[int]) -> list[str]:
    """Return the stored paths of some tiles of a leaf, or its own path if it is stored whole."""
    return (
        [path]
        if cuts is None
        else [tiles.name(path, tiles.box(cuts, number)) for number in numbers]
    )


def _tile_bytes(cuts: Cuts | None, shape: tuple[int, ...], dtype: str) -> I64:
    """Return the bytes of each tile."""
    item_bytes = dtype_named(dtype).item_bytes
    if cuts is None:
        return np.array([math.prod(shape) * item_bytes], np.int64)
    sizes = np.full(1, item_bytes, np.int64)
    for edges in cuts:
        sizes = np.multiply.outer(sizes, np.diff(edges)).reshape(-1)
    return sizes


def _by_leaf(holdings: Sequence[Holdings]) -> dict[str, tuple[str, tuple[int, ...], I64, I64]]:
    """Return the shards of all ranks by leaf.

    Returns:
        For each leaf its dtype, its shape, the rank of each shard, int64 ``(shards,)``, and the box
        of each shard, int64 ``(shards, axes, 2)``.
    """
    # Ranks usually hold the same leaves with as many shards. These are decoded once, together.
    same_leaves: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, rank_holdings in enumerate(holdings):
        same_leaves.setdefault((rank_holdings.leaves, rank_holdings.counts), []).append(rank)
    kinds: dict[str, tuple[str, tuple[int, ...], int]] = {}
    rows: dict[str, list[tuple[I64, I64]]] = {}
    for (encoded, counted), ranks in same_leaves.items():
        leaves = msgspec.msgpack.decode(encoded, type=list[tuple[str, str, tuple[int, ...]]])
        counts = np.frombuffer(counted, np.int32).tolist()
        numbers = np.stack([np.frombuffer(holdings[rank].boxes, np.int64) for rank in ranks])
        position = 0
        for (path, dtype, shape), count in zip(leaves, counts, strict=True):
            kind = kinds.setdefault(path, (dtype, shape, ranks[0]))
            if kind[:2] != (dtype, shape):
                raise RankFailed(
                    f"leaf {path!r} is {kind[0]}{list(kind[1])} on rank {kind[2]},"
                    f" {dtype}{list(shape)} on rank {ranks[0]}"
                )
            width = 2 * len(shape) * count
            boxes = numbers[:, position : position + width].reshape(
                len(ranks) * count, len(shape), 2
            )
            rows.setdefault(path, []).append((np.repeat(np.array(ranks, np.int64), count), boxes))
            position += width
    return {
        path: (
            dtype,
            shape,
            np.concatenate([r for r, _ in rows[path]]),
            np.concatenate([b for _, b in rows[path]]),
        )
        for path, (dtype, shape, _) in kinds.items()
    }


@lru_cache(256)  # leaves have few shapes, and are sharded in few ways
def _cut(
    shape: tuple[int, ...],
    item_bytes: int,
    rank_bytes: bytes,
    box_bytes: bytes,
    before: Cuts | None,
) -> tuple[Cuts | None, I64, I64]:
    """Return the cuts of a leaf, and the pairs of a tile and a rank that holds it.

    The arrays are passed as bytes, so that the cache can hash them.

    Returns:
        The cuts, or ``None`` if the leaf is stored whole. Then two arrays of the same length with
        the tile number and the rank of each pair, sorted.
    """
    ranks = np.frombuffer(rank_bytes, np.int64)
    boxes = np.frombuffer(box_bytes, np.int64).reshape(len(ranks), len(shape), 2)
    # A leaf without axes or elements cannot be cut, so every rank that names it holds it whole.
    if not shape or 0 in shape:
        holders = np.unique(ranks)
        return None, np.zeros(holders.size, np.int64), holders
    wrong = np.flatnonzero(
        (boxes[:, :, 0] < 0)
        | (boxes[:, :, 1] > np.array(shape))
        | (boxes[:, :, 0] > boxes[:, :, 1])
    )
    if wrong.size:
        row = int(wrong[0]) // len(shape)
        raise ValueError(
            f"the shard of rank {ranks[row]} is {_text(boxes[row])}, which is not in it"
        )
    present = (boxes[:, :, 0] < boxes[:, :, 1]).all(axis=1)  # some ranks have empty shards
    ranks, boxes = ranks[present], boxes[present]
    cuts = tuple(
        tuple(np.unique(np.concatenate([[0, size], boxes[:, axis].reshape(-1)])).tolist())
        for axis, size in enumerate(shape)
    )
    cuts = _with_before(cuts, before)
    if before is None and tiles.count(cuts) == 1:
        cuts = _spread(shape, item_bytes, np.unique(ranks).size)
    numbers, holders = _cells(cuts, ranks, boxes)
    missing = np.setdiff1d(np.arange(tiles.count(cuts)), numbers)
    if missing.size:
        box = tiles.box(cuts, int(missing[0]))
        raise ValueError(f"no rank holds {_text(np.array([(s.start, s.stop) for s in box]))} of it")
    return (None if tiles.count(cuts) == 1 else cuts), numbers, holders


def _with_before(cuts: Cuts, before: Cuts | None) -> Cuts:
    """Return the cuts with the earlier ones added, if earlier tiles then remain as they were."""
    if before is None:
        return cuts
    if all(set(current) <= set(earlier) for current, earlier in zip(cuts, before, strict=True)):
        return before
    union = tuple(
        tuple(sorted({*current, *earlier})) for current, earlier in zip(cuts, before, strict=True)
    )
    keeps_tiles = all(
        any(not set(range(a + 1, b)) & set(current) for a, b in itertools.pairwise(earlier))
        for current, earlier in zip(cuts, before, strict=True)
    )
    return (
        union
        if keeps_tiles and tiles.count(union) <= _MOST_TILES_EACH * tiles.count(cuts)
        else cuts
    )


def _spread(shape: tuple[int, ...], item_bytes: int, holders: int) -> Cuts:
    """Return the cuts of a leaf that several ranks hold whole.

    It is cut along its first axis into one part for each rank, or fewer if parts become too small.
    """
    parts = min(holders, math.prod(shape) * item_bytes // _SPREAD_BYTES, shape[0])
    edges = [shape[0] * part // parts for part in range(parts + 1)] if parts > 1 else [0, shape[0]]
    return (tuple(edges), *((0, size) for size in shape[1:]))


def _cells(cuts: Cuts, ranks: I64, boxes: I64) -> tuple[I64, I64]:
    """Return all pairs of a tile and a rank that holds it, sorted, as two arrays."""
    edges = [np.array(axis_edges, np.int64) for axis_edges in cuts]
    first = np.stack(
        [np.searchsorted(axis_edges, boxes[:, axis, 0]) for axis, axis_edges in enumerate(edges)],
        axis=1,
    )
    stop = np.stack(
        [np.searchsorted(axis_edges, boxes[:, axis, 1]) for axis, axis_edges in enumerate(edges)],
        axis=1,
    )
    grid = tiles.grid_of(cuts)
    # Most shards are one tile, and need no loop in Python.
    single = (stop - first == 1).all(axis=1)
    numbers = [np.ravel_multi_index(tuple(first[single].T), grid)]
    holders = [ranks[single]]
    for row in np.flatnonzero(~single).tolist():
        spans = [np.arange(a, b) for a, b in zip(first[row], stop[row], strict=True)]
        cells = np.ravel_multi_index(np.meshgrid(*spans, indexing="ij"), grid).reshape(-1)
        numbers.append(cells)
        holders.append(np.full(cells.size, ranks[row]))
    # A rank may hold a tile in several shards, and is listed once.
    pairs = np.unique(np.stack([np.concatenate(numbers), np.concatenate(holders)], axis=1), axis=0)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def _text(box: I64) -> str:
    """Return a box as text, for error messages."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box.tolist()) + "]"


def find(box: Box, among: Iterable[Box]) -> int | None:
    """Return the number of the first box that contains a box; ``None`` if there is none."""
    for number, outer in enumerate(among):
        if all(a.start >= b.start and a.stop <= b.stop for a, b in zip(box, outer, strict=True)):
            return number
    return None
