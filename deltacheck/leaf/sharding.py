"""Which rank writes which tile of which leaf: decided once for all ranks from what each holds. Pure
functions over frozen records.

A run of 1,024 ranks with 1,000 leaves has a million shards, so what grows with ranks times leaves
is arrays of numbers throughout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltacheck.errors import RankFailed
from deltacheck.leaf import tiles
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.tiles import Box, Cuts

I64: TypeAlias = NDArray[np.int64]

# A leaf that several ranks hold whole is written in parts of at least this size, by as many of them
# as that gives work to.
_SPREAD_BYTES = 8 << 20
# After a change of the ranks, old cuts are kept beside the new ones unless that makes more tiles
# than this for each that is needed.
_MOST_TILES_EACH = 4


class Held(NamedTuple):
    """What a rank holds of a leaf. ``boxes``: one for each shard; all of the leaf is
    ``whole(shape)``.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a leaf."""
    return tuple(slice(0, size) for size in shape)


class Holdings(msgspec.Struct, frozen=True):
    """What a rank holds of all leaves, for its way to rank 0. ``leaves``: path, dtype and shape of
    each, encoded; ``counts``: boxes of each, int32; ``boxes``: start and stop along each axis,
    int64.
    """

    leaves: bytes
    counts: bytes
    boxes: bytes

    @classmethod
    def of(cls, held: Mapping[str, Held]) -> Holdings:
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


@dataclass(frozen=True, slots=True)
class Planned:
    """How a leaf is stored. ``cuts``: ``None`` where it is stored whole. ``owners``: the rank that
    writes each tile, int64 ``(tiles,)``.
    """

    dtype: str
    shape: tuple[int, ...]
    cuts: Cuts | None
    owners: I64


Plan: TypeAlias = Mapping[str, Planned]  # by leaf path, ascending


class Share(msgspec.Struct, frozen=True):
    """What of a plan one rank needs. ``plan``: path and number of its cuts, of every leaf, encoded;
    ``own``: its tiles, counted through all leaves, int64.
    """

    plan: bytes
    own: bytes

    def tiles(self) -> dict[str, tuple[Cuts | None, list[int]]]:
        """The cuts of the leaves that this rank writes tiles of, and the numbers of these, paths
        ascending.
        """
        leaves, cuts = _decoded_plan(self.plan)
        counts = [1 if (of := cuts[number]) is None else tiles.count(of) for _, number in leaves]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        own = np.frombuffer(self.own, np.int64)
        found: dict[str, tuple[Cuts | None, list[int]]] = {}
        at = np.searchsorted(starts, own, "right") - 1
        for leaf, number in zip(at.tolist(), (own - starts[at]).tolist(), strict=True):
            path, which = leaves[leaf]
            found.setdefault(path, (cuts[which], []))[1].append(number)
        return found


def _decoded_plan(plan: bytes) -> tuple[list[tuple[str, int]], list[Cuts | None]]:
    return msgspec.msgpack.decode(plan, type=tuple[list[tuple[str, int]], list[Cuts | None]])


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of a leaf from an earlier plan or step, so that its chains go on. ``owners``:
    empty where nobody has them yet.
    """

    cuts: Cuts | None
    owners: I64 = field(default_factory=lambda: np.zeros(0, np.int64))


def plan(
    holdings: Sequence[Holdings], before: Mapping[str, Before] | None = None
) -> dict[str, Planned]:
    """Cut every leaf into tiles that lie whole in some rank's shard, and choose a writer for each.

    ``holdings``: by rank. A tile that several ranks hold is written by the one of them that has
    least to write, or by the one that did before. Raises ``RankFailed`` naming the leaf and the
    ranks where they disagree on it, or where nobody holds a part of it.
    """
    known = before or {}
    loads = np.zeros(len(holdings), np.int64)
    planned: dict[str, Planned] = {}
    shared: list[tuple[int, str, int, I64]] = []  # bytes, path, tile, ranks that hold it
    for path, (dtype, shape, ranks, boxes) in sorted(_by_leaf(holdings).items()):
        prior = known.get(path)
        prior_cuts = (
            prior.cuts
            if prior is not None and prior.cuts is not None and tiles.shape_of(prior.cuts) == shape
            else None
        )
        try:
            cuts, numbers, holders = _cut(
                shape, dtype_named(dtype).item_bytes, ranks.tobytes(), boxes.tobytes(), prior_cuts
            )
        except ValueError as error:
            raise RankFailed(f"leaf {path!r} of shape {list(shape)}: {error}") from None
        count = 1 if cuts is None else tiles.count(cuts)
        sizes = _tile_bytes(cuts, shape, dtype)
        owners = np.full(count, -1, np.int64)
        first = np.searchsorted(numbers, np.arange(count + 1))
        alone = np.flatnonzero(np.diff(first) == 1)
        owners[alone] = holders[first[alone]]
        np.add.at(loads, owners[alone], sizes[alone])
        kept = (
            prior.owners
            if prior is not None and prior.cuts == cuts and prior.owners.size == count
            else None
        )
        for number in np.flatnonzero(np.diff(first) > 1).tolist():
            of = holders[first[number] : first[number + 1]]
            if kept is not None and kept[number] in of:
                owners[number] = kept[number]
                loads[kept[number]] += sizes[number]
            else:
                shared.append((int(sizes[number]), path, number, of))
        planned[path] = Planned(dtype, shape, cuts, owners)
    for size, path, number, of in sorted(shared, key=lambda one: (-one[0], one[1], one[2])):
        rank = int(of[np.argmin(loads[of])])
        planned[path].owners[number] = rank
        loads[rank] += max(size, 1)
    return planned


def shares(planned: Plan, size: int) -> list[Share]:
    """What each rank needs of a plan."""
    kinds: dict[Cuts | None, int] = {}
    leaves = [(path, kinds.setdefault(one.cuts, len(kinds))) for path, one in planned.items()]
    common = msgspec.msgpack.encode((leaves, list(kinds)))
    every = owners_of(planned)
    order = np.argsort(every, kind="stable")
    edges = np.searchsorted(every[order], np.arange(size + 1))
    return [
        Share(common, order[edges[rank] : edges[rank + 1]].astype(np.int64).tobytes())
        for rank in range(size)
    ]


def owners_of(planned: Plan) -> I64:
    """The writers of all tiles, leaf by leaf."""
    return np.concatenate([np.zeros(0, np.int64), *[one.owners for one in planned.values()]])


def names_of(path: str, cuts: Cuts | None, numbers: Sequence[int]) -> list[str]:
    """What some tiles of a leaf are stored as."""
    return (
        [path]
        if cuts is None
        else [tiles.name(path, tiles.box(cuts, number)) for number in numbers]
    )


def _tile_bytes(cuts: Cuts | None, shape: tuple[int, ...], dtype: str) -> I64:
    item_bytes = dtype_named(dtype).item_bytes
    if cuts is None:
        return np.array([math.prod(shape) * item_bytes], np.int64)
    sizes = np.full(1, item_bytes, np.int64)
    for along in cuts:
        sizes = np.multiply.outer(sizes, np.diff(along)).reshape(-1)
    return sizes


def _by_leaf(holdings: Sequence[Holdings]) -> dict[str, tuple[str, tuple[int, ...], I64, I64]]:
    """Per leaf its dtype, its shape, and for each shard its rank and its box, int64 ``(shards,)``
    and ``(shards, axes, 2)``.
    """
    alike: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, one in enumerate(holdings):
        alike.setdefault((one.leaves, one.counts), []).append(rank)
    what: dict[str, tuple[str, tuple[int, ...], int]] = {}
    rows: dict[str, list[tuple[I64, I64]]] = {}
    for (encoded, counted), ranks in alike.items():
        leaves = msgspec.msgpack.decode(encoded, type=list[tuple[str, str, tuple[int, ...]]])
        counts = np.frombuffer(counted, np.int32).tolist()
        numbers = np.stack([np.frombuffer(holdings[rank].boxes, np.int64) for rank in ranks])
        at = 0
        for (path, dtype, shape), count in zip(leaves, counts, strict=True):
            known = what.setdefault(path, (dtype, shape, ranks[0]))
            if known[:2] != (dtype, shape):
                raise RankFailed(
                    f"leaf {path!r} is {known[0]}{list(known[1])} on rank {known[2]},"
                    f" {dtype}{list(shape)} on rank {ranks[0]}"
                )
            width = 2 * len(shape) * count
            boxes = numbers[:, at : at + width].reshape(len(ranks) * count, len(shape), 2)
            rows.setdefault(path, []).append((np.repeat(np.array(ranks, np.int64), count), boxes))
            at += width
    return {
        path: (
            dtype,
            shape,
            np.concatenate([r for r, _ in rows[path]]),
            np.concatenate([b for _, b in rows[path]]),
        )
        for path, (dtype, shape, _) in what.items()
    }


@lru_cache(256)  # leaves have few shapes, and are sharded in few ways
def _cut(
    shape: tuple[int, ...],
    item_bytes: int,
    rank_bytes: bytes,
    box_bytes: bytes,
    before: Cuts | None,
) -> tuple[Cuts | None, I64, I64]:
    """The cuts of a leaf, and for each tile its number and each rank that holds it, by number and
    rank.
    """
    ranks = np.frombuffer(rank_bytes, np.int64)
    boxes = np.frombuffer(box_bytes, np.int64).reshape(len(ranks), len(shape), 2)
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
    present = (boxes[:, :, 0] < boxes[:, :, 1]).all(axis=1)  # a rank may have an empty shard
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
    """The cuts with those of before as well, where tiles of before then stay as they were."""
    if before is None:
        return cuts
    if all(set(now) <= set(then) for now, then in zip(cuts, before, strict=True)):
        return before
    union = tuple(tuple(sorted({*now, *then})) for now, then in zip(cuts, before, strict=True))
    stays = all(
        any(not set(range(a + 1, b)) & set(now) for a, b in itertools.pairwise(then))
        for now, then in zip(cuts, before, strict=True)
    )
    return union if stays and tiles.count(union) <= _MOST_TILES_EACH * tiles.count(cuts) else cuts


def _spread(shape: tuple[int, ...], item_bytes: int, holders: int) -> Cuts:
    """The cuts of a leaf that so many ranks hold whole: along its first axis, a part for each where
    the parts are large enough.
    """
    parts = min(holders, math.prod(shape) * item_bytes // _SPREAD_BYTES, shape[0])
    edges = [shape[0] * part // parts for part in range(parts + 1)] if parts > 1 else [0, shape[0]]
    return (tuple(edges), *((0, size) for size in shape[1:]))


def _cells(cuts: Cuts, ranks: I64, boxes: I64) -> tuple[I64, I64]:
    """Each tile of each shard and its rank, by tile and rank, once."""
    edges = [np.array(along, np.int64) for along in cuts]
    first = np.stack(
        [np.searchsorted(along, boxes[:, axis, 0]) for axis, along in enumerate(edges)], axis=1
    )
    stop = np.stack(
        [np.searchsorted(along, boxes[:, axis, 1]) for axis, along in enumerate(edges)], axis=1
    )
    grid = tiles.grid_of(cuts)
    single = (stop - first == 1).all(axis=1)
    numbers = [np.ravel_multi_index(tuple(first[single].T), grid)]
    holders = [ranks[single]]
    for row in np.flatnonzero(~single).tolist():
        spans = [np.arange(a, b) for a, b in zip(first[row], stop[row], strict=True)]
        cells = np.ravel_multi_index(np.meshgrid(*spans, indexing="ij"), grid).reshape(-1)
        numbers.append(cells)
        holders.append(np.full(cells.size, ranks[row]))
    pairs = np.unique(np.stack([np.concatenate(numbers), np.concatenate(holders)], axis=1), axis=0)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def _text(box: I64) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box.tolist()) + "]"


def find(box: Box, among: Iterable[Box]) -> int | None:
    """The number of a shard that a tile lies in."""
    for number, one in enumerate(among):
        if all(a.start >= b.start and a.stop <= b.stop for a, b in zip(box, one, strict=True)):
            return number
    return None


def inside(box: Box, of: Box) -> Box:
    """A box in coordinates of another one that holds it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, of, strict=True))
