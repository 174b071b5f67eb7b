"""The two JSON documents of the format, checked whole when they are read: a segment's table and a
step's manifest.

Both lie in the attributes of a zarr group under the key ``deltacheck``. Unknown keys are ignored,
unknown ``must_understand`` features are refused (``docs/reference/format.md``, sections 2 and 3).
"""

from __future__ import annotations

import itertools
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from deltacheck.leaf import grid, tiles
from deltacheck.leaf.contracts import Promise
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafSpec

DIGEST_DIGITS = 32

# Permanent: the feature of manifests whose leaves are not all simply stored, or not all exact
DERIVED = "derived"
REPLAY = "replay"  # permanent: the feature of manifests whose leaves are the input of a replay
# Permanent: the feature of manifests with leaves, or several segments of one save, that ranks have
# written together
TILES = "tiles"
FEATURES = (DERIVED, REPLAY, TILES)
STAGES = ("", "warm", "stable", "degraded")  # permanent names


class KeyframeAt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a whole leaf lies: in an array of its own (``array``), or in ``packed/<packed>`` from
    element ``offset`` on.
    """

    array: str = ""
    packed: str = ""
    offset: int = 0


class LeafEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a segment holds of one leaf.

    ``digest``: of the leaf after this segment; ``base``: before it (a delta only). ``digests``: row
    of its first chunk digest in the segment's digest table; a keyframe has one for every chunk, a
    delta one for every row. ``delta``: runs of rows, ``(part, first row, rows)``; without a
    ``base`` they are the whole leaf, encoded.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    digest: str
    digests: int
    base: str = ""
    key: KeyframeAt | None = None
    delta: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the entry needs nothing before it."""
        return self.key is not None or not self.base

    def spec(self, path: str) -> LeafSpec:
        return LeafSpec(path, self.shape, self.dtype, self.chunk)


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """Length in bytes and codec of one stream array."""

    length: int
    codec: str


class Part(msgspec.Struct, frozen=True):
    """A closed group of delta rows and their streams: bounds the memory that writing and reading
    takes.
    """

    rows: int
    streams: dict[str, Stream]


class SegmentTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """The table of a segment."""

    format: str
    version: int
    id: str
    leaves: dict[str, LeafEntry]
    digests: int
    packed: dict[str, int] = {}
    parts: tuple[Part, ...] = ()
    must_understand: tuple[str, ...] = ()

    @property
    def delta_arrays(self) -> int:
        """Arrays that its deltas are made of."""
        return arrays_of(self.parts)


def arrays_of(parts: Sequence[Part]) -> int:
    """Arrays that some parts are made of: an index each, and streams."""
    return sum(1 + len(part.streams) for part in parts)


class SegmentRef(msgspec.Struct, frozen=True):
    """A segment as a manifest names it. ``digest``: xxh3_128 of its ``zarr.json``.
    ``stored_bytes``: of all its files.
    """

    id: str
    digest: str
    stored_bytes: int


class LeafRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step promises of one leaf. ``digest``: xxh3_128 of its chunks' digests in order (16
    bytes
    each). ``lane``: in which of the manifest's lanes all of its segments are; -1: in any.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    digest: str
    lane: int = -1

    def spec(self, path: str) -> LeafSpec:
        return LeafSpec(path, self.shape, self.dtype, self.chunk)


class Tiles(msgspec.Struct, frozen=True):
    """What a step promises of a leaf that is stored in tiles, each under a path of its own
    (``tiles.name``).

    ``cuts``: per axis, where the leaf is cut, from 0 to its size. ``digests``: those of the tiles
    in C order, 32 digits each; ``lanes``: as of ``LeafRecord``, per tile.
    """

    dtype: str
    cuts: tiles.Cuts
    digests: str
    lanes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tiles.shape_of(self.cuts)

    def names(self, path: str) -> list[str]:
        """What the tiles of the leaf ``path`` are stored as, in C order."""
        starts = (along[:-1] for along in self.cuts)
        return [
            tiles.name(path, tuple(slice(at, at) for at in origin))
            for origin in itertools.product(*starts)
        ]

    def record(self, number: int) -> LeafRecord:
        """What the step promises of one tile."""
        shape = tuple(s.stop - s.start for s in tiles.box(self.cuts, number))
        digest = self.digests[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]
        return LeafRecord(
            self.dtype,
            shape,
            grid.chunk_shape(shape, dtype_named(self.dtype).item_bytes),
            digest,
            self.lanes[number],
        )

    def records(self) -> list[LeafRecord]:
        """What the step promises of each tile, in C order."""
        sizes = ([b - a for a, b in itertools.pairwise(along)] for along in self.cuts)
        item_bytes = dtype_named(self.dtype).item_bytes
        found, chunks = [], {}
        for number, shape in enumerate(itertools.product(*sizes)):
            if shape not in chunks:
                chunks[shape] = grid.chunk_shape(shape, item_bytes)
            digest = self.digests[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]
            found.append(LeafRecord(self.dtype, shape, chunks[shape], digest, self.lanes[number]))
        return found


class Derived(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a leaf of the tree follows from what is stored (``docs/reference/format.md``, section 3).

    ``how``: ``cast`` of the leaf ``of``, rounded to nearest, ties to even; ``same`` as the leaf
    ``of``; ``zeros``; ``lattice`` and ``octaves``: from the codes that are stored under the leaf's
    own path. ``spacing``, ``seed``: of the lattice, whose values lie in the cells of the leaf
    ``of`` where one is named. ``fraction_bits``, ``signed``: of the octaves. ``scale``: what second
    moments are multiplied with, after which none is below ``m^2 / limit`` of the first moment
    ``first``. ``digest``: of the leaf's bytes, of exact ones.
    """

    how: str
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""
    of: str = ""
    spacing: float = 0.0
    seed: int = 0
    fraction_bits: int = 0
    signed: bool = False
    scale: float = 1.0
    first: str = ""
    limit: float = 0.0

    @property
    def sources(self) -> tuple[str, ...]:
        """The leaves of the tree that this one is computed from."""
        return tuple(path for path in (self.of, self.first) if path)


class ReplayStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One update to replay. ``inputs``: name -> leaf path of what it consumes. ``options``:
    skeleton of the numbers that it depends on.
    """

    inputs: dict[str, str]
    options: dict[str, Any]


class Replay(msgspec.Struct, frozen=True):
    """How the leaves of a tree are computed from what is stored: an optimizer's updates, one after
    the
    other.

    ``base_seq``, ``base_step``: the checkpoint whose content the stored leaves have, for people
    (all that is needed of it is among this manifest's own segments). ``update``: what computed it,
    for people. ``memory``: skeleton of what the update works on; ``places``: array path in it ->
    leaf path. ``digests``: leaf path -> the digest that the leaf has after the last update.
    """

    base_seq: int
    base_step: int
    update: str
    memory: dict[str, Any]
    places: dict[str, str]
    steps: tuple[ReplayStep, ...]
    digests: dict[str, str]

    @property
    def inputs(self) -> set[str]:
        """Leaf paths of what the updates consume; no tree has them."""
        return {path for step in self.steps for path in step.inputs.values()}


class Stored(Mapping[str, LeafRecord]):
    """What a step stores, by path: its leaves, and each tile of those that are cut. A record is
    made
    when it is asked for: a step of a thousand ranks has a million, and a rank needs a thousand.
    """

    def __init__(self, leaves: Mapping[str, LeafRecord], cut: Mapping[str, Tiles]) -> None:
        self._leaves = leaves
        self._cut = cut

    def __getitem__(self, name: str) -> LeafRecord:
        if name in self._leaves:
            return self._leaves[name]
        cut = self._cut[tiles.leaf_of(name)]
        try:
            return cut.record(tiles.numbered(cut.cuts, name))
        except LookupError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        yield from self._leaves
        for path, cut in self._cut.items():
            yield from cut.names(path)

    def __len__(self) -> int:
        return len(self._leaves) + sum(len(cut.lanes) for cut in self._cut.values())

    def items(self) -> ItemsView[str, LeafRecord]:
        return _StoredItems(self)

    def pairs(self) -> Iterator[tuple[str, LeafRecord]]:
        """All of them in order, without a search for each."""
        yield from self._leaves.items()
        for path, cut in self._cut.items():
            yield from zip(cut.names(path), cut.records(), strict=True)


class _StoredItems(ItemsView[str, LeafRecord]):
    _mapping: Stored

    def __iter__(self) -> Iterator[tuple[str, LeafRecord]]:
        return self._mapping.pairs()


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A step: the segments that it is made of in order, its tree, and the digest of every leaf.

    ``seq`` orders checkpoints; ``step`` is the training step, which a resumed run may repeat.
    ``time``: seconds since the epoch, for people only. ``contract``: the weakest that a leaf has.
    ``derived``: leaves of the tree that are not simply stored. ``contracts``: of leaves that are
    not exact. ``stage``: of the policy, ``warm``, ``stable`` or ``degraded``; none under the exact
    one. ``durability``: what the save survived when it was acknowledged, a cut of ``power`` or the
    end of its ``process``. ``tiles``: leaves that several ranks have stored parts of. ``lanes``:
    numbers of the segments that the leaves and tiles of one writer need, by writer, so that a
    reader of some leaves need not open all.
    """

    format: str
    version: int
    seq: int
    step: int
    nonce: str
    time: float
    writer: str
    contract: str
    segments: tuple[SegmentRef, ...]
    tree: dict[str, Any]
    leaves: dict[str, LeafRecord]
    metrics: dict[str, float | str] = {}  # NaN and infinities as text: JSON has none
    must_understand: tuple[str, ...] = ()
    derived: dict[str, Derived] = {}
    contracts: dict[str, Promise] = {}
    stage: str = ""
    replay: Replay | None = None  # None: nothing is replayed
    durability: str = "power"
    tiles: dict[str, Tiles] = {}
    lanes: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def stored(self) -> Mapping[str, LeafRecord]:
        """What is stored, by the path that it is stored under: leaves, and the tiles of those that
        are cut.
        """
        return Stored(self.leaves, self.tiles) if self.tiles else self.leaves

    def names_of(self, path: str) -> list[str]:
        """What a leaf of the tree is stored as: under its own path, in tiles, or not at all."""
        cut = self.tiles.get(path)
        return cut.names(path) if cut is not None else [path] if path in self.leaves else []

    def on(self, segments: Sequence[SegmentRef]) -> Manifest:
        """The same content on other segments, each of which may hold any of it."""
        return msgspec.structs.replace(
            self,
            segments=tuple(
                sorted(segments, key=lambda ref: ref.id)
            ),  # several of one save have new names, and another order
            lanes=(tuple(range(len(segments))),) if TILES in self.must_understand else (),
            leaves={
                path: msgspec.structs.replace(record, lane=-1)
                for path, record in self.leaves.items()
            },
            tiles={
                path: msgspec.structs.replace(cut, lanes=(-1,) * len(cut.lanes))
                for path, cut in self.tiles.items()
            },
        )

    def refs_of(self, stored: Sequence[str]) -> list[SegmentRef]:
        """The segments, in order, that some of what is stored may need."""
        lanes = {self.stored[path].lane for path in stored}
        if not self.lanes or -1 in lanes:
            return list(self.segments)
        return [
            self.segments[number]
            for number in sorted({number for lane in lanes for number in self.lanes[lane]})
        ]

    @property
    def raw_bytes(self) -> int:
        """Bytes of all leaves of the tree in memory."""
        return sum(spec.raw_bytes for spec in self.specs.values())

    def spec(self, path: str) -> LeafSpec:
        """What a leaf of the tree is."""
        computed = self.derived.get(path) or self.tiles.get(path)
        return (
            self.leaves[path].spec(path)
            if computed is None
            else LeafSpec.of(path, computed.shape, computed.dtype)
        )

    @property
    def specs(self) -> dict[str, LeafSpec]:
        """What every leaf of the tree is, by path, ties once."""
        inputs = set() if self.replay is None else self.replay.inputs
        return {
            path: self.spec(path)
            for path in dict.fromkeys([*self.leaves, *self.derived, *self.tiles])
            if path not in inputs
        }

    def digest_of(self, path: str) -> str:
        """The digest of a leaf's bytes; empty where it is not kept, as of bounded leaves and of
        those in tiles.
        """
        if path in self.tiles:
            return ""
        if self.replay is not None and path in self.replay.digests:
            return self.replay.digests[path]
        derived = self.derived.get(path)
        return self.leaves[path].digest if derived is None else derived.digest

    def mark_of(self, path: str) -> object:
        """What two steps have in common only where they hold the same bytes of a leaf; ``None``
        where nothing tells that.
        """
        cut = self.tiles.get(path)
        return (self.digest_of(path) or None) if cut is None else (cut.dtype, cut.cuts, cut.digests)


class Brief(NamedTuple):
    """The part of a manifest that retention and collection need.

    Attributes:
        seq: Sequence number.
        step: Training step.
        nonce: Identity of the save.
        metrics: As the manifest has them.
        segments: Ids of the segments that the step needs.
    """

    seq: int
    step: int
    nonce: str
    metrics: Mapping[str, float | str]
    segments: frozenset[str]

    @classmethod
    def of(cls, manifest: Manifest) -> Brief:
        needed = frozenset(ref.id for ref in manifest.segments)
        return cls(manifest.seq, manifest.step, manifest.nonce, manifest.metrics, needed)


class Tag(msgspec.Struct, frozen=True, omit_defaults=True):
    """A name for one save: the one whose manifest has ``nonce``. ``step``: its training step;
    ``seq``: of its manifest when it was tagged.
    """

    format: str
    version: int
    name: str
    step: int
    seq: int
    nonce: str
    must_understand: tuple[str, ...] = ()
