"""The compact form of manifests with many tiles, and the digests that they leave to segments.

A step of a thousand ranks has a million tiles. Their places follow a few rules, and their digests
are in the tables of the segments that hold them. ``docs/reference/format.md``, section 3, defines
the form (key ``compact``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacheck.codec.derivation import Derived
from deltacheck.codec.regular import Axis, Series, length, numbers, series
from deltacheck.errors import ChainBroken, Damaged
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.structs import inspect_types
from deltacheck.leaf.tiles import Cuts
from deltacheck.store import layout
from deltacheck.store.manifest import (
    DIGEST_DIGITS,
    LeafEntry,
    Manifest,
    SegmentRef,
    SegmentTable,
    Tiles,
)

# From this number of tiles on, a step is written in the compact form. Fewer: the manifest has the
# digests itself, so a lost table follows without the chunk digests; they take 0.7 MB at most.
COMPACT_TILES = 1 << 14
# Tiles of all leaves for each byte of the file: a forged rule must not stand for much more work
# than honest ones of its size. A thousand leaves on a thousand ranks have 2 to 7.
_TILES_PER_BYTE = 64
_NONCE_DIGITS = 8


class CompactLeaf(msgspec.Struct, frozen=True, omit_defaults=True):
    """A leaf in tiles; the fields that are not explained here are those of ``Tiles``.

    Attributes:
        dtype: Element type.
        cuts: The number of its cuts in ``Compact.cuts``.
        lanes: The number of its lanes in ``Compact.places``.
        digests: Empty: those of the last entries in the tables of the tiles' lanes.
        forms: Rules of its tiles.
        codes: Element types of codes.
        form: The number of the rule of each tile.
        from_steps: The step of each tile.
    """

    dtype: str
    cuts: int
    lanes: int
    digests: str = ""
    forms: tuple[Derived, ...] = ()
    codes: tuple[str, ...] = ()
    form: Series = ()
    from_steps: Series = ()


class Compact(msgspec.Struct, frozen=True):
    """The key ``compact`` of a manifest: its segments and its leaves in tiles.

    Attributes:
        seqs: The sequence number of each segment.
        nonces: Their nonces, 8 digits each.
        digests: Their digests, 32 digits each.
        stored_bytes: Their bytes.
        axes: Cuts of an axis, each once.
        cuts: Cuts of a leaf, each once: the number of each axis in ``axes``.
        places: Lanes of the tiles of a leaf, each once.
        leaves: The leaves in tiles by path.
    """

    seqs: Series
    nonces: str
    digests: str
    stored_bytes: Series
    axes: tuple[Axis, ...]
    cuts: tuple[tuple[int, ...], ...]
    places: tuple[Series, ...]
    leaves: dict[str, CompactLeaf]


# Here, before several threads decode documents.
inspect_types(Compact)


def pays(leaves: Mapping[str, Tiles]) -> bool:
    """Return True if a step with these leaves in tiles is written in the compact form."""
    return sum(len(cut.lanes) for cut in leaves.values()) >= COMPACT_TILES


def packed(manifest: Manifest) -> dict[str, Any]:
    """Return the body of a manifest in the compact form."""
    axes: dict[Axis, int] = {}
    cuts: dict[Cuts, int] = {}
    cut_numbers: dict[tuple[int, ...], int] = {}
    places: dict[tuple[int, ...], int] = {}
    leaves: dict[str, CompactLeaf] = {}
    for path, cut in manifest.tiles.items():
        if cut.cuts not in cuts:
            axis_numbers = tuple(axes.setdefault(Axis.of(edges), len(axes)) for edges in cut.cuts)
            cuts[cut.cuts] = cut_numbers.setdefault(axis_numbers, len(cut_numbers))
        leaves[path] = CompactLeaf(
            cut.dtype,
            cuts[cut.cuts],
            places.setdefault(cut.lanes, len(places)),
            cut.digests,
            cut.forms,
            cut.codes,
            series(cut.form),
            series(cut.from_steps),
        )
    refs = manifest.segments
    compact = Compact(
        series([layout.seq_of(ref.id) for ref in refs]),
        "".join(ref.id[-_NONCE_DIGITS:] for ref in refs),
        "".join(ref.digest for ref in refs),
        series([ref.stored_bytes for ref in refs]),
        tuple(axes),
        tuple(cut_numbers),
        tuple(map(series, places)),
        leaves,
    )
    head = msgspec.structs.replace(manifest, segments=(), tiles={})
    return {**msgspec.to_builtins(head), "compact": msgspec.to_builtins(compact)}


def unpacked(body: Mapping[str, Any], file_bytes: int) -> Manifest:
    """Return the manifest of a body that ``packed`` returned.

    Args:
        body: The body, which anyone may have made.
        file_bytes: The bytes of its file.

    Raises:
        ValueError: The fields contradict each other, or stand for too many tiles.
        LookupError: A number is that of nothing.
        msgspec.ValidationError: A field has the wrong type.
    """
    head = msgspec.convert(body, Manifest)
    compact = msgspec.convert(body["compact"], Compact)
    if head.segments or head.tiles:
        raise ValueError("it has segments or tiles outside its compact form")
    return msgspec.structs.replace(
        head, segments=_segments(compact), tiles=_tiles(compact, _TILES_PER_BYTE * file_bytes)
    )


def _segments(compact: Compact) -> tuple[SegmentRef, ...]:
    count = len(compact.nonces) // _NONCE_DIGITS
    lengths = (length(compact.seqs), length(compact.stored_bytes))
    if (
        lengths != (count, count)
        or len(compact.nonces) != count * _NONCE_DIGITS
        or len(compact.digests) != count * DIGEST_DIGITS
    ):
        raise ValueError("the columns of its segments differ in length")
    return tuple(
        SegmentRef(
            f"s{seq:010d}-{compact.nonces[_NONCE_DIGITS * i : _NONCE_DIGITS * (i + 1)]}",
            compact.digests[DIGEST_DIGITS * i : DIGEST_DIGITS * (i + 1)],
            stored_bytes,
        )
        for i, (seq, stored_bytes) in enumerate(
            zip(numbers(compact.seqs), numbers(compact.stored_bytes), strict=True)
        )
    )


def _tiles(compact: Compact, most_tiles: int) -> dict[str, Tiles]:
    """Return the leaves in tiles. Each rule is carried out once, after a check of its result."""
    _require_possible(compact, most_tiles)
    # Cuts and lanes that no leaf has are not made.
    cuts = {
        number: tuple(compact.axes[axis].cuts() for axis in compact.cuts[number])
        for number in {leaf.cuts for leaf in compact.leaves.values()}
    }
    lanes = {
        number: numbers(compact.places[number])
        for number in {leaf.lanes for leaf in compact.leaves.values()}
    }
    return {
        path: Tiles(
            leaf.dtype,
            cuts[leaf.cuts],
            leaf.digests,
            lanes[leaf.lanes],
            leaf.forms,
            leaf.codes,
            numbers(leaf.form),
            numbers(leaf.from_steps),
        )
        for path, leaf in compact.leaves.items()
    }


def _require_possible(compact: Compact, most_tiles: int) -> None:
    """Raise an error unless the leaves in tiles can be made: no rule is carried out before."""
    leaves = compact.leaves.values()
    used = itertools.chain(*compact.cuts, *((leaf.cuts, leaf.lanes) for leaf in leaves))
    if min(used, default=0) < 0:
        raise LookupError("a number of it is negative")
    if not all(axis.is_possible for axis in compact.axes):
        raise ValueError("one of its axes cannot be cut as it says")
    counts = [
        math.prod(compact.axes[number].count for number in axis_numbers)
        for axis_numbers in compact.cuts
    ]
    place_counts = [length(place) for place in compact.places]
    total = sum(counts[leaf.cuts] for leaf in leaves)
    if total > most_tiles:
        raise ValueError(f"its {total} tiles are more than the {most_tiles} of a file of its size")
    for path, leaf in compact.leaves.items():
        count = counts[leaf.cuts]
        if place_counts[leaf.lanes] != count or any(
            short and length(short) != count for short in (leaf.form, leaf.from_steps)
        ):
            raise ValueError(f"leaf {path!r} has {count} tiles, and other numbers for them")


def lane_digest(digests: str) -> str:
    """Return the digest of a lane, from the digests of its tiles, one after the other."""
    return str(xxhash.xxh3_128_hexdigest(digests.encode("ascii")))


class LaneTables:
    """The digests of tiles, from the tables of the segments of their lanes.

    A lane is read when a tile of it is asked for, and proven by its digest in the manifest.

    Args:
        manifest: A manifest in the compact form.
        table_of: Return the table of a segment.
    """

    def __init__(self, manifest: Manifest, table_of: Callable[[SegmentRef], SegmentTable]) -> None:
        self._table_of = table_of
        # Not the manifest itself, which refers to this object.
        self._step, self._refs, self._lanes = manifest.step, manifest.segments, manifest.lanes
        self._lane_digests = manifest.lane_digests
        self._tiles = {path: cut for path, cut in sorted(manifest.tiles.items()) if not cut.digests}
        self._digests: dict[str, NDArray[np.bytes_]] = {}
        self._read: dict[int, Damaged | None] = {}
        # Many leaves are written by the same lanes, tile by tile. Their tuples are then one object.
        self._by_lane: dict[int, dict[int, list[int]]] = {}

    def digest(self, path: str, number: int) -> str:
        """Return the digest of one tile of a leaf.

        Raises:
            ChainBroken: A segment of its lane is missing, or has no entry of one of its tiles.
            Damaged: The tables of its lane are not those of the step.
        """
        self._require(self._tiles[path].lanes[number])
        return bytes(self._digests[path][number]).decode("ascii")

    def digests(self, path: str) -> str:
        """Return the digests of all tiles of a leaf, one after the other; raises as ``digest``."""
        for lane in self._of_lanes(path):
            self._require(lane)
        return self._digests[path].tobytes().decode("ascii")

    def _of_lanes(self, path: str) -> dict[int, list[int]]:
        """Return the numbers of the tiles of a leaf by lane."""
        lanes = self._tiles[path].lanes
        if id(lanes) not in self._by_lane:
            by_lane: dict[int, list[int]] = {}
            for number, lane in enumerate(lanes):
                by_lane.setdefault(lane, []).append(number)
            self._by_lane[id(lanes)] = by_lane
        return self._by_lane[id(lanes)]

    def require(self, path: str, tile_numbers: Sequence[int]) -> None:
        """Read the digests of some tiles of a leaf; raises as ``digest``."""
        lanes = self._tiles[path].lanes
        for lane in {lanes[number] for number in tile_numbers}:
            self._require(lane)

    def _require(self, lane: int) -> None:
        """Read a lane, once, also if it is damaged."""
        if lane not in self._read:
            try:
                self._read_lane(lane)
            except Damaged as error:
                self._read[lane] = error
            else:
                self._read[lane] = None
        problem = self._read[lane]
        if problem is not None:
            raise problem

    def _read_lane(self, lane: int) -> None:
        entries = self._last_entries(lane)
        count = sum(len(self._of_lanes(path).get(lane, ())) for path in self._tiles)
        # Before their names are made: a forged rule stands for many.
        if count > len(entries):
            raise ChainBroken(
                f"step {self._step}: lane {lane} has {count} tiles, the tables of its segments have"
                f" {len(entries)} entries"
            )
        names = {
            path: sharding.names_of(path, cut.cuts, self._of_lanes(path)[lane])
            for path, cut in self._tiles.items()
            if lane in self._of_lanes(path)
        }
        try:
            digests = {
                path: [entries[name].digest for name in tile_names]
                for path, tile_names in names.items()
            }
        except KeyError as error:
            path = tiles.leaf_of(error.args[0])
            raise ChainBroken(
                f"step {self._step}, leaf {path!r}: no segment of its lane {lane} has the tile"
                f" {error.args[0]!r}",
                leaf=path,
            ) from None
        digest = lane_digest("".join(itertools.chain.from_iterable(digests.values())))
        if digest != self._lane_digests[lane]:
            raise Damaged(
                f"step {self._step}: the tiles of lane {lane} have the digest {digest} in the"
                f" tables of its segments, recorded is {self._lane_digests[lane]}"
            )
        for path, leaf_digests in digests.items():
            if path not in self._digests:
                count = len(self._tiles[path].lanes)
                self._digests[path] = np.zeros(count, f"S{DIGEST_DIGITS}")
            self._digests[path][self._of_lanes(path)[lane]] = leaf_digests

    def _last_entries(self, lane: int) -> Mapping[str, LeafEntry]:
        """Return the newest entry of each path in the segments of a lane."""
        entries: dict[str, LeafEntry] = {}
        for number in self._lanes[lane]:
            entries.update(self._table_of(self._refs[number]).leaves)
        return entries


def is_compact(body: Mapping[str, Any]) -> bool:
    """Return True if the body of a manifest states rules instead of lists of tiles."""
    return "compact" in body
