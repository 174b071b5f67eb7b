"""Records of the documents of a root: segment tables, manifests and tags.

``docs/reference/format.md``, sections 2 and 3, defines them; ``documents.py`` encodes and reads
them, ``validation.py`` checks them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, ItemsView, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from deltacheck.codec.base import LAWS, U32
from deltacheck.codec.base import ORDERED as ORDERED_METHODS
from deltacheck.codec.derivation import Derived, code_shape
from deltacheck.leaf import grid, tiles
from deltacheck.leaf.containers import has_types
from deltacheck.leaf.contracts import PeakRate, Promise
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import ArrayNode, array_nodes

# Hexadecimal digits of an xxh3_128.
DIGEST_DIGITS = 32
CHUNK_DIGEST_BYTES = 16
INDEX_ROW_BYTES = 32
# Stands for the digest of a tile that has none (docs/reference/format.md, section 3).
NO_DIGEST = "0" * DIGEST_DIGITS

# The names of features and stages are permanent: existing roots hold them.
DERIVED = "derived"  # of manifests whose leaves are not all stored, or not all exact
TILES = "tiles"  # of manifests with leaves, or several segments, that ranks have written together
TYPES = "types"  # of manifests with containers or arrays of types that older readers would change
PARTIAL = "partial"  # of manifests of which retention has removed leaves
MERGED = "merged"  # of segments with deltas that replace several earlier ones
ORDERED = "ordered"  # of segments with chunks whose words are in the order of their classes
LAW = "law"  # of segments with chunks that are predicted, and manifests with parts of groups
FEATURES = (
    DERIVED,
    TILES,
    TYPES,
    MERGED,
    ORDERED,
    PARTIAL,
    LAW,
)
STAGES = ("", "warm", "stable", "degraded")


# Records that refer to nothing but values have gc=False: a restore reads thousands of them, and
# each would count towards the next collection of Python's garbage collector.
class KeyframeAt(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The place of a whole leaf: an array of its own, or a part of a packed one.

    Attributes:
        array: Name of the leaf's own array; empty if the leaf is packed.
        packed: Storage type of the packed array ``packed/<packed>``.
        offset: First element in the packed array.
    """

    array: str = ""
    packed: str = ""
    offset: int = 0


class LeafEntry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The content of a segment for one leaf.

    Attributes:
        dtype: Element type, as ``leaf.dtypes`` names it.
        shape: Shape of the leaf.
        chunk: Shape of a chunk.
        digest: Digest of the leaf after this segment.
        digests: Row of the leaf's first chunk digest in the segment's digest table. A keyframe has
            one row for every chunk, a delta one for every stored row.
        base: Digest of the leaf before this segment, of a delta only.
        key: Place of a keyframe; ``None`` for a delta.
        delta: Runs of rows, ``(part, first row, rows)``. Without a ``base`` they encode the whole
            leaf.
        since: Of a merged delta, the sequence number of the oldest segment whose entry of the leaf
            it replaces; -1: it replaces none.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    digest: str
    digests: int
    base: str = ""
    key: KeyframeAt | None = None
    delta: tuple[tuple[int, int, int], ...] = ()
    since: int = -1

    @property
    def is_whole(self) -> bool:
        """``True`` if the entry needs no earlier segment."""
        return self.key is not None or not self.base

    def spec(self, path: str) -> LeafSpec:
        """Return the description of the leaf at ``path``."""
        return LeafSpec(path, self.shape, self.dtype, self.chunk)

    def record(self, digest: str) -> LeafRecord:
        """Return what a step promises of the leaf with this digest."""
        return LeafRecord(self.dtype, self.shape, self.chunk, digest)


# A list of two in JSON (section 2 of the format).
class Stream(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The length in bytes of a stream, and the codec of the array that has it."""

    length: int
    codec: str


class Part(msgspec.Struct, frozen=True):
    """A closed group of delta rows and their streams; it bounds the memory of a write or read.

    Attributes:
        index: The rows, uint32 little-endian, ``INDEX_ROW_BYTES`` each.
        streams: The streams of the rows by name.
    """

    index: bytes
    streams: dict[str, Stream]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.index) // INDEX_ROW_BYTES


def method_features(methods: U32) -> set[str]:
    """Return the features that the methods of some chunks need."""
    needed = {ORDERED: [*ORDERED_METHODS.values()], LAW: LAWS}
    return {name for name, numbers in needed.items() if np.isin(methods, numbers).any()}


def segment_features(leaves: Mapping[str, LeafEntry], chunks: Collection[str]) -> tuple[str, ...]:
    """Return the features that the table of a segment lists.

    Args:
        leaves: Its entries by path.
        chunks: The features of its chunks (``method_features``).
    """
    is_merged = any(entry.since >= 0 for entry in leaves.values())
    merged = (MERGED,) if is_merged else ()
    return merged + tuple(name for name in (ORDERED, LAW) if name in chunks)


class SegmentTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """The table of a segment: its leaves, packed arrays and parts.

    Attributes:
        format: Of all documents.
        version: Of all documents.
        id: The name of the segment.
        leaves: Its entries by path.
        digests: The digests of the stored chunks, ``CHUNK_DIGEST_BYTES`` each: the upper and the
            lower 64 bits, little-endian.
        packed: The elements of each packed array.
        parts: The parts of its deltas.
        must_understand: The features that a reader needs.
    """

    format: str
    version: int
    id: str
    leaves: dict[str, LeafEntry]
    digests: bytes
    packed: dict[str, int] = {}
    parts: tuple[Part, ...] = ()
    must_understand: tuple[str, ...] = ()

    @property
    def digest_count(self) -> int:
        """The number of digests."""
        return len(self.digests) // CHUNK_DIGEST_BYTES

    @property
    def delta_arrays(self) -> int:
        """The number of arrays of its deltas."""
        return sum(len({stream.codec for stream in part.streams.values()}) for part in self.parts)


class SegmentRef(msgspec.Struct, frozen=True, gc=False):
    """A segment as a manifest names it.

    Attributes:
        id: Name of the segment.
        digest: xxh3_128 of its ``zarr.json``.
        stored_bytes: Bytes of all its files.
    """

    id: str
    digest: str
    stored_bytes: int


class LeafRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The promise of a step about one stored leaf.

    Attributes:
        dtype: Element type.
        shape: Shape of the leaf.
        chunk: Shape of a chunk.
        digest: xxh3_128 of the digests of its chunks in order, 16 bytes each.
        lane: Number of the manifest's lane that holds all of its segments; -1: any lane.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    digest: str
    lane: int = -1

    def spec(self, path: str) -> LeafSpec:
        """Return the description of the leaf at ``path``."""
        return LeafSpec(path, self.shape, self.dtype, self.chunk)


class Tiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """The promise of a step about a leaf that is stored in tiles, each under its own path.

    Attributes:
        dtype: Element type.
        cuts: Per axis the positions of the cuts, from 0 to the size.
        digests: Digests of the tiles in C order, 32 digits each: of what is stored. If nothing is
            stored of a tile, of its content, or zeros if its content is not exact. Empty: they are
            those of the last entries in the tables of the tiles' lanes.
        lanes: Per tile, as in ``LeafRecord``.
        forms: The rules by which tiles follow from stored content. They name leaves; a tile follows
            from the tiles of these at the same place. Their shape is that of the leaf.
        codes: Per rule, the element type of its codes; empty if nothing is stored.
        form: Per tile, the number of its rule, -1 for a tile that is stored as it is. Empty: all
            tiles have the first rule, if there is one.
        from_steps: Per tile of a reused leaf, the step whose values it has. Empty: all tiles have
            those of the step that the leaf's contract names.
    """

    dtype: str
    cuts: tiles.Cuts
    digests: str
    lanes: tuple[int, ...]
    forms: tuple[Derived, ...] = ()
    codes: tuple[str, ...] = ()
    form: tuple[int, ...] = ()
    from_steps: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return tiles.shape_of(self.cuts)

    @property
    def is_content(self) -> bool:
        """True if the digests are those of the leaf's bytes, tile by tile."""
        return NO_DIGEST not in self.digests and not any(self.codes)

    @property
    def sources(self) -> tuple[str, ...]:
        """The leaves of the tree that tiles of this one are computed from."""
        return tuple(dict.fromkeys(path for rule in self.forms for path in rule.sources))

    def names(self, path: str) -> list[str]:
        """Return the paths of the tiles of the leaf ``path``, stored or not, in C order."""
        starts = (edges[:-1] for edges in self.cuts)
        return [
            # Only the start of each slice is part of a name.
            tiles.name(path, tuple(slice(start, start) for start in origin))
            for origin in itertools.product(*starts)
        ]

    def rule(self, number: int) -> Derived | None:
        """Return the rule by which a tile follows from others, with the tile's shape and digest.

        ``None`` for a tile that is stored as it is.
        """
        number_of_rule = self._rule_number(number)
        if number_of_rule < 0:
            return None
        form = self.forms[number_of_rule]
        shape = tuple(s.stop - s.start for s in tiles.box(self.cuts, number))
        digest = "" if self.codes[number_of_rule] else self._digest(number)
        return msgspec.structs.replace(
            form, shape=shape, digest="" if digest == NO_DIGEST else digest
        )

    def stored_dtype(self, number: int) -> str | None:
        """Return the element type of what is stored of a tile; ``None``: nothing is."""
        number_of_rule = self._rule_number(number)
        return self.dtype if number_of_rule < 0 else self.codes[number_of_rule] or None

    def record(self, number: int) -> LeafRecord:
        """Return the promise about what is stored of one tile.

        Raises:
            LookupError: Nothing is stored of the tile.
        """
        dtype = self.stored_dtype(number)
        if dtype is None:
            raise LookupError(number)
        shape = self._stored_shape(
            number, tuple(s.stop - s.start for s in tiles.box(self.cuts, number))
        )
        chunk = grid.chunk_shape(shape, dtype_named(dtype).item_bytes)
        return LeafRecord(dtype, shape, chunk, self._digest(number), self.lanes[number])

    def records(self) -> list[LeafRecord | None]:
        """Return the promise about each tile, in C order; ``None`` if nothing is stored of it."""
        sizes = ([b - a for a, b in itertools.pairwise(edges)] for edges in self.cuts)
        # A leaf has many tiles of few shapes, so each chunk shape is computed once.
        records: list[LeafRecord | None] = []
        chunks: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {}
        for number, shape in enumerate(itertools.product(*sizes)):
            dtype = self.stored_dtype(number)
            if dtype is None:
                records.append(None)
                continue
            shape = self._stored_shape(number, shape)
            if (shape, dtype) not in chunks:
                chunks[shape, dtype] = grid.chunk_shape(shape, dtype_named(dtype).item_bytes)
            digest = self._digest(number)
            lane = self.lanes[number]
            records.append(LeafRecord(dtype, shape, chunks[shape, dtype], digest, lane))
        return records

    def _stored_shape(self, number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what is stored of a tile of some shape."""
        number_of_rule = self._rule_number(number)
        if number_of_rule < 0:
            return shape
        rule = msgspec.structs.replace(self.forms[number_of_rule], shape=shape)
        return code_shape(rule)

    def _rule_number(self, number: int) -> int:
        """Return the number of the rule of a tile, -1 if it is stored as it is."""
        return self.form[number] if self.form else 0 if self.forms else -1

    def _digest(self, number: int) -> str:
        return self.digests[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]


class Stored(Mapping[str, LeafRecord]):
    """The stored leaves of a step by path, each tile counted as a leaf.

    A record is made when it is asked for: a step of a thousand ranks has a million, and one rank
    needs a thousand of them.

    Args:
        leaves: The leaves that are stored whole.
        cut: The leaves in tiles.
        tables: Return the digests of tiles that ``cut`` leaves to the tables of segments.
    """

    def __init__(
        self,
        leaves: Mapping[str, LeafRecord],
        cut: Mapping[str, Tiles],
        tables: TileDigests | None = None,
    ) -> None:
        self._leaves = leaves
        self._cut = cut
        self._tables = tables

    def __getitem__(self, name: str) -> LeafRecord:
        record, path, number = self._at(name)
        if not record.digest:
            digest = _known(self._tables).digest(path, number)
            record = msgspec.structs.replace(record, digest=digest)
        return record

    # That of ``Mapping`` would ask for the digest.
    def __contains__(self, name: object) -> bool:
        try:
            self._at(str(name))
        except KeyError:
            return False
        return True

    def lane_of(self, name: str) -> int:
        """Return the lane of a stored path, without its digest."""
        return self._at(name)[0].lane

    def _at(self, name: str) -> tuple[LeafRecord, str, int]:
        """Return the record of a path, its leaf and its number; the digest may be missing."""
        if name in self._leaves:
            return self._leaves[name], name, 0
        path = tiles.leaf_of(name)
        cut = self._cut[path]
        try:
            number = tiles.numbered(cut.cuts, name)
            return cut.record(number), path, number
        except LookupError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        yield from self._leaves
        for path, cut in self._cut.items():
            yield from stored_tiles(path, cut)

    def __len__(self) -> int:
        return len(self._leaves) + sum(
            sum(cut.stored_dtype(number) is not None for number in range(len(cut.lanes)))
            for cut in self._cut.values()
        )

    # The view of ``Mapping`` would search the tile of each name.
    def items(self) -> ItemsView[str, LeafRecord]:
        return _StoredItems(self)

    def pairs(self) -> Iterator[tuple[str, LeafRecord]]:
        """Yield all paths and records in order, without a search for each."""
        yield from self._leaves.items()
        for path, cut in self._cut.items():
            # The digests first: they are missing in a forged document, which costs no names then.
            complete = with_digests(path, cut, self._tables)
            for name, record in zip(cut.names(path), complete.records(), strict=True):
                if record is not None:
                    yield name, record


class TileDigests(Protocol):
    """The digests of tiles that a manifest leaves to the tables of segments."""

    def require(self, path: str, tile_numbers: Sequence[int]) -> None:
        """Read the digests of some tiles of a leaf."""

    def digest(self, path: str, number: int) -> str:
        """Return the digest of one tile of a leaf."""

    def digests(self, path: str) -> str:
        """Return the digests of all tiles of a leaf, one after the other."""


def with_digests(path: str, cut: Tiles, tables: TileDigests | None) -> Tiles:
    """Return a leaf in tiles with the digest of each, which may be in the tables of segments."""
    if cut.digests:
        return cut
    return msgspec.structs.replace(cut, digests=_known(tables).digests(path))


def _known(tables: TileDigests | None) -> TileDigests:
    if tables is None:
        raise RuntimeError(
            "the digests of this step's tiles are in its segments, and its manifest was read"
            " without them; this is a defect, please report it"
        )
    return tables


def stored_tiles(path: str, cut: Tiles) -> list[str]:
    """Return the paths of those tiles of a leaf of which something is stored, in C order."""
    names = cut.names(path)
    if not cut.forms:
        return names
    return [name for number, name in enumerate(names) if cut.stored_dtype(number) is not None]


class _StoredItems(ItemsView[str, LeafRecord]):
    _mapping: Stored

    def __iter__(self) -> Iterator[tuple[str, LeafRecord]]:
        return self._mapping.pairs()


class SavedSharding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sharding of JAX arrays, which a reader without JAX ignores.

    Attributes:
        axes: Names of the axes of the mesh.
        shape: Their lengths.
        types: Their types: ``Auto``, ``Explicit`` or ``Manual``.
        devices: Numbers of the devices, from the last axis of the mesh to the first.
        spec: For each axis of the array: ``None``, or the axes of the mesh that divide it.
        leaves: The arrays that have it.
        memory: The kind of memory; empty: the default of the devices.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    types: tuple[str, ...]
    devices: tuple[int, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]
    leaves: tuple[str, ...]
    memory: str = ""


# ``dict=True``: cached properties need a place to be kept in.
class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A step: its segments in order, its tree, and the digest of every leaf.

    Attributes:
        format: ``"deltacheck"``.
        version: Version of the format.
        seq: Order of the checkpoints of a root.
        step: Training step, which a resumed run may repeat.
        nonce: Identity of the save.
        time: Seconds since the epoch, for people only.
        writer: The process that wrote the step, for people only.
        contract: The weakest contract of a leaf.
        segments: The segments that the step needs.
        tree: Skeleton of the tree.
        leaves: The leaves stored whole.
        metrics: Metrics of the save; NaN and infinities are text, since JSON has none.
        must_understand: Features that a reader must know.
        derived: Leaves that are computed from stored ones.
        contracts: Contracts of leaves that are not exact.
        stage: Stage of the policy, ``warm``, ``stable`` or ``degraded``; empty under the exact one.
        durability: The event that the save survived when it was acknowledged: a cut of ``power`` or
            the end of its ``process``.
        tiles: Leaves that several ranks have stored parts of.
        lanes: By writer, the numbers of the segments that its leaves and tiles need. A reader of
            some leaves opens only these.
        failed_saves: Saves of the process that failed since its last commit, for people only.
        stage_reason: Why the policy is in its stage, for people only.
        merged_bytes: Bytes that the process wrote to merge deltas since its last commit, for people
            only.
        rates: The course of the learning rate of each parameter group, for later saves.
        lane_digests: By lane, the xxh3_128 of the digests of its tiles in leaves that state none.
            Empty: all leaves in tiles state them.
        custom_metadata: JSON that the user stored with the item.
        shardings: The shardings of JAX arrays that lie on a mesh.
        absent: Paths of arrays, or of containers with all of their arrays, that retention has
            removed from the step. The tree has ``None`` there.
        course: The nonce of the save that began the course of the run; empty: the course that began
            the root.
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
    durability: str = "power"
    tiles: dict[str, Tiles] = {}
    lanes: tuple[tuple[int, ...], ...] = ()
    failed_saves: int = 0
    stage_reason: str = ""
    merged_bytes: int = 0
    rates: dict[str, PeakRate] = {}
    lane_digests: tuple[str, ...] = ()
    custom_metadata: Any = None
    shardings: tuple[SavedSharding, ...] = ()
    absent: tuple[str, ...] = ()
    course: str = ""

    def read_with(self, tables: TileDigests) -> Manifest:
        """Let ``stored`` find digests in the tables of segments; return the manifest itself."""
        self.__dict__["tables"] = tables
        self.__dict__.pop("stored", None)
        return self

    @property
    def tables(self) -> TileDigests | None:
        """The digests that the manifest leaves to the tables of segments, if they can be read."""
        return self.__dict__.get("tables")

    @cached_property
    def stored(self) -> Mapping[str, LeafRecord]:
        """The stored leaves and tiles by the path that they are stored under.

        The digests of some tiles may be read from segments when they are asked for.
        """
        return Stored(self.leaves, self.tiles, self.tables) if self.tiles else self.leaves

    @cached_property
    def arrays(self) -> Mapping[str, ArrayNode]:
        """The arrays of the tree by path; ``Damaged`` if the tree does not follow the format."""
        return array_nodes(self.tree)

    def tiling(self, path: str) -> Tiles | None:
        """Return a leaf in tiles with the digest of each, or ``None`` if it is not in tiles."""
        cut = self.tiles.get(path)
        return None if cut is None else with_digests(path, cut, self.tables)

    def names_of(self, path: str) -> list[str]:
        """Return the paths under which a leaf of the tree is stored: one, its tiles, or none."""
        cut = self.tiles.get(path)
        if cut is not None:
            return stored_tiles(path, cut)
        return [path] if path in self.leaves else []

    @property
    def features(self) -> tuple[str, ...]:
        """The features that its content needs: a reader that ignored one would misread it."""
        forms = [rule for cut in self.tiles.values() for rule in cut.forms]
        needed = {
            DERIVED: bool(self.derived or self.contracts or forms),
            TILES: bool(self.tiles or self.lanes),
            TYPES: has_types(self.tree),
            PARTIAL: bool(self.absent),
            LAW: any(rule.is_part for rule in (*self.derived.values(), *forms)),
        }
        return tuple(name for name, is_used in needed.items() if is_used)

    def on(
        self, segments: Sequence[SegmentRef], replaced: Mapping[str, str] | None = None
    ) -> Manifest:
        """Return the same content on other segments, each of which may hold any of it.

        The form stays: digests that are left to the tables of segments are not read.

        Args:
            segments: The segments, of which a new one belongs to every lane.
            replaced: Names of new segments -> the name of the segment whose lanes each one has
                instead. Given: fewer tables are read by a reader of some leaves.
        """
        # Several segments of one save have new names, and so another order.
        refs = tuple(sorted(segments, key=lambda ref: ref.id))
        if self.lane_digests:
            lanes = self._lanes_on([ref.id for ref in refs], replaced or {})
            return msgspec.structs.replace(self, segments=refs, lanes=lanes)
        return msgspec.structs.replace(
            self,
            segments=refs,
            # Section 3 of the format allows one lane of all segments in a manifest that is written
            # again.
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

    def _lanes_on(
        self, names: Sequence[str], replaced: Mapping[str, str]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the lanes of the same ranks in other segments."""
        before = {ref.id: number for number, ref in enumerate(self.segments)}
        old_numbers = [before.get(replaced.get(name, name)) for name in names]
        of_all = [number for number, old in enumerate(old_numbers) if old is None]
        position = {old: number for number, old in enumerate(old_numbers) if old is not None}
        return tuple(
            tuple(sorted([*(position[old] for old in lane if old in position), *of_all]))
            for lane in self.lanes
        )

    def refs_of(self, stored: Sequence[str]) -> list[SegmentRef]:
        """Return the segments, in order, that some stored paths may need."""
        records = self.stored
        lanes = {
            records.lane_of(path) if isinstance(records, Stored) else records[path].lane
            for path in stored
        }
        if not self.lanes or -1 in lanes:
            return list(self.segments)
        return [
            self.segments[number]
            for number in sorted({number for lane in lanes for number in self.lanes[lane]})
        ]

    @property
    def raw_bytes(self) -> int:
        """Bytes of all leaves of the tree in memory."""
        return _raw_bytes(self)

    @property
    def stored_bytes(self) -> int:
        """Size of the segments that the save of the step wrote; 0 if nothing had changed."""
        return _stored_bytes(self)

    def spec(self, path: str) -> LeafSpec:
        """Return the description of a leaf of the tree."""
        computed = self.derived.get(path) or self.tiles.get(path)
        return (
            self.leaves[path].spec(path)
            if computed is None
            else LeafSpec.of(path, computed.shape, computed.dtype)
        )

    @property
    def specs(self) -> dict[str, LeafSpec]:
        """Descriptions of all leaves of the tree by path, ties once."""
        return {
            path: self.spec(path)
            for path in dict.fromkeys([*self.leaves, *self.derived, *self.tiles])
        }

    def digest_of(self, path: str) -> str:
        """Return the digest of a leaf's bytes.

        It is empty if none is recorded, as for bounded leaves and for leaves in tiles.
        """
        if path in self.tiles:
            return ""
        derived = self.derived.get(path)
        return self.leaves[path].digest if derived is None else derived.digest

    def require_digests(self, path: str, tile_numbers: Sequence[int]) -> None:
        """Read those digests of tiles of a leaf that the manifest leaves to segments.

        This is cheaper than what follows, and fails if a forged document has no such tiles.
        """
        if path in self.tiles and not self.tiles[path].digests:
            _known(self.tables).require(path, tile_numbers)

    def mark_of(self, path: str) -> object:
        """Return a value that two steps share only if they hold the same bytes of a leaf.

        ``None``: nothing tells.
        """
        cut = self.tiling(path)
        if cut is None:
            return self.digest_of(path) or None
        return (cut.dtype, cut.cuts, cut.digests) if cut.is_content else None

    def lacks(self, path: str) -> bool:
        """Return True if retention has removed a leaf, or any leaf of a container."""
        return any(f"{path}/".startswith(f"{n}/") or n.startswith(f"{path}/") for n in self.absent)

    def sources_of(self, path: str) -> tuple[str, ...]:
        """Return the leaves of the tree that a leaf, or any tile of it, is computed from."""
        rule = self.derived.get(path) or self.tiles.get(path)
        return () if rule is None else rule.sources


class _Form(msgspec.Struct, frozen=True, gc=False):
    """The type and the shape of a leaf."""

    dtype: str
    shape: tuple[int, ...]


class ManifestHead(msgspec.Struct, frozen=True):
    """The fields of a manifest that a brief is made of."""

    format: str
    version: int
    seq: int
    step: int
    nonce: str
    time: float
    leaves: dict[str, _Form]
    segments: tuple[SegmentRef, ...]
    derived: dict[str, _Form] = {}
    tiles: dict[str, _Form] = {}
    metrics: dict[str, float | str] = {}
    must_understand: tuple[str, ...] = ()
    course: str = ""
    durability: str = "power"


def _raw_bytes(manifest: Manifest | ManifestHead) -> int:
    """Return the bytes of all leaves of the tree in memory."""
    # A listing sums those of every step, and leaves have few forms.
    leaves: dict[str, Any] = {**manifest.leaves, **manifest.derived, **manifest.tiles}
    return sum(_form_bytes(leaf.dtype, leaf.shape) for leaf in leaves.values())


def _stored_bytes(manifest: Manifest | ManifestHead) -> int:
    """Return the size of the segments that the save of a step wrote."""
    own = f"s{manifest.seq:010d}"  # the beginning of their names (format.md, section 1)
    return sum(ref.stored_bytes for ref in manifest.segments if ref.id.startswith(own))


@lru_cache(1024)
def _form_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return LeafSpec.of("", shape, dtype).raw_bytes


class Brief(NamedTuple):
    """The part of a manifest that listings, retention and collection need.

    Attributes:
        seq: Sequence number.
        step: Training step.
        nonce: Identity of the save.
        metrics: As the manifest has them.
        segments: Ids of the segments that the step needs.
        course: As the manifest has it.
        time: Seconds since the epoch.
        durability: As the manifest has it.
        raw_bytes: Bytes of all leaves of the tree in memory.
        stored_bytes: Size of the segments that the save wrote; 0 if nothing had changed.
    """

    seq: int
    step: int
    nonce: str
    metrics: Mapping[str, float | str]
    segments: frozenset[str]
    course: str = ""
    time: float = 0.0
    durability: str = "power"
    raw_bytes: int = 0
    stored_bytes: int = 0

    @classmethod
    def of(cls, manifest: Manifest | ManifestHead) -> Brief:
        """Return the brief of a manifest.

        Raises:
            UnsupportedLeaf: A leaf has a type that does not exist.
        """
        return cls(
            manifest.seq,
            manifest.step,
            manifest.nonce,
            manifest.metrics,
            frozenset(ref.id for ref in manifest.segments),
            manifest.course,
            manifest.time,
            manifest.durability,
            _raw_bytes(manifest),
            _stored_bytes(manifest),
        )


class Tag(msgspec.Struct, frozen=True, omit_defaults=True):
    """A name for the save whose manifest has ``nonce``.

    Attributes:
        format: ``"deltacheck"``.
        version: Version of the format.
        name: The tag.
        step: Training step of the save.
        seq: Sequence number of its manifest when it was tagged.
        nonce: Identity of the save.
        must_understand: Features that a reader must know.
    """

    format: str
    version: int
    name: str
    step: int
    seq: int
    nonce: str
    must_understand: tuple[str, ...] = ()
