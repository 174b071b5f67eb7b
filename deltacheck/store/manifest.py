"""The two JSON documents of the format, checked whole when they are read: a segment's table and a
step's manifest.

Both lie in the attributes of a zarr group under the key ``deltacheck``. Unknown keys are ignored,
unknown ``must_understand`` features are refused (``docs/reference/format.md``, sections 2 and 3).
"""

from __future__ import annotations

import graphlib
import itertools
import json
import math
import re
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import msgspec
import xxhash

from deltacheck.codec.base import STREAMS
from deltacheck.errors import Damaged, UnsupportedFormat, UnsupportedLeaf
from deltacheck.leaf import grid, tiles, tree
from deltacheck.leaf.contracts import RANK, Promise, name_of
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.structs import known
from deltacheck.store import layout

MAX_DOCUMENT_BYTES = 256 << 20  # of one zarr.json; a larger one is refused before it is parsed
_MAX_ELEMENTS = 1 << 56
_MAX_RANK = 64  # NumPy's
_MAX_ARRAY_RANK = 32  # TensorStore's
_MAX_CHUNK_BYTES = (
    64 << 20
)  # a reader holds a chunk or two beside what it gives; writers make them of about 1 MiB
_MAX_DERIVED_DEPTH = 8  # leaves that follow from one another
_MAX_SEQ = 10**10  # ten digits of a name
_MAX_TILES = 1 << 24  # of a leaf
_DIGEST_DIGITS = 32
_WRONG = (
    msgspec.ValidationError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

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
        digest = self.digests[number * _DIGEST_DIGITS : (number + 1) * _DIGEST_DIGITS]
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
            digest = self.digests[number * _DIGEST_DIGITS : (number + 1) * _DIGEST_DIGITS]
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


Document = TypeVar("Document", SegmentTable, Manifest, Tag)


def to_attributes(document: SegmentTable | Manifest | Tag) -> dict[str, Any]:
    """The group attributes that carry ``document``, its checksum included."""
    body = msgspec.to_builtins(document)
    return {layout.ATTRIBUTE: {**body, "checksum": _checksum(body)}}


def from_zarr_json(content: bytes, kind: type[Document], where: str) -> Document:
    """Decode and check a group's ``zarr.json``.

    ``where`` names the file in errors. Raises ``Damaged`` (not JSON, checksum, schema, impossible
    values) or ``UnsupportedFormat``.
    """
    if len(content) > MAX_DOCUMENT_BYTES:
        raise Damaged(
            f"{where} has {len(content)} bytes, more than the {MAX_DOCUMENT_BYTES} that a document"
            " may have"
        )
    try:
        group, is_canonical = _parse(content)
        body = group["attributes"][layout.ATTRIBUTE]
        checksum = body.pop("checksum")
        if not isinstance(checksum, str):
            raise TypeError("its checksum is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where} is damaged: {error}") from error
    check_version(body, where)
    if not (is_canonical and checksum == _quick_checksum(body)) and checksum != _checksum(body):
        raise Damaged(
            f"{where} is damaged: its checksum is {_checksum(body)}, recorded is {checksum}"
        )
    try:
        document = msgspec.convert(body, kind)
        _CHECKS[kind](document)
    except (*_WRONG, UnsupportedLeaf, Damaged) as error:
        raise Damaged(f"{where} is damaged: {error}") from error
    return document


def check_version(body: Mapping[str, Any], where: str) -> None:
    """Refuse another format, a later version, or a feature that we do not know."""
    if body.get("format") != layout.FORMAT:
        raise Damaged(f"{where} is not a document of the {layout.FORMAT} format")
    version = body.get("version")
    if version != layout.VERSION:
        raise UnsupportedFormat(
            f"{where} has format version {version!r}; this deltacheck reads version"
            f" {layout.VERSION}. Install the deltacheck that wrote it"
        )
    wanted = body.get("must_understand", [])
    unknown = (
        [feature for feature in wanted if feature not in FEATURES]
        if isinstance(wanted, list)
        else wanted
    )
    if unknown:
        raise UnsupportedFormat(
            f"{where} needs the features {unknown!r}, which this deltacheck does not know. Install"
            " a newer one"
        )


def _parse(content: bytes) -> tuple[Any, bool]:
    """The JSON value, and whether it was read the quick way, which takes only what encodes to the
    same
    bytes again.

    So the quick way cannot hide what the other one refuses: of two equal keys it would keep one,
    and give fewer bytes.
    """
    try:
        group = msgspec.json.decode(content)
        if msgspec.json.encode(group) == content:
            return group, True
    except (
        ValueError,
        RecursionError,
        msgspec.MsgspecError,
    ):  # the other way says what is wrong, if anything is
        pass
    return json.loads(content, object_pairs_hook=_no_duplicates, parse_constant=_no_constant), False


def _quick_checksum(body: Mapping[str, Any]) -> str:
    """``_checksum`` of bodies that are plain ASCII with numbers as Python writes them; of others,
    none that anything has.
    """
    return str(xxhash.xxh3_128_hexdigest(msgspec.json.encode(body, order="deterministic")))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return str(xxhash.xxh3_128_hexdigest(canonical.encode()))


def _check_leaf(path: str, leaf: LeafEntry | LeafRecord) -> None:
    if not _is_possible(leaf.shape, leaf.chunk):
        raise ValueError(
            f"leaf {path!r} has the impossible shape {leaf.shape} or chunk {leaf.chunk}"
        )
    chunk_bytes = math.prod(leaf.chunk) * dtype_named(leaf.dtype).item_bytes
    if chunk_bytes > _MAX_CHUNK_BYTES:
        raise ValueError(
            f"leaf {path!r} has chunks of {chunk_bytes} bytes, more than the {_MAX_CHUNK_BYTES}"
            " that they may have"
        )


@lru_cache(1024)  # leaves have few shapes
def _is_possible(shape: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    return _is_a_shape(shape) and grid.is_contiguous(shape, chunk)


def _is_a_shape(shape: tuple[int, ...]) -> bool:
    """Whether any leaf can have it: an empty one, too, must have a size along each of its other
    axes.
    """
    return (
        len(shape) <= _MAX_RANK
        and all(s >= 0 for s in shape)
        and math.prod(max(s, 1) for s in shape) <= _MAX_ELEMENTS
    )


def _check_manifest(manifest: Manifest) -> None:
    if not 0 <= manifest.seq < _MAX_SEQ or manifest.step < 0:
        raise ValueError(f"its sequence number is {manifest.seq}, its step {manifest.step}")
    for path, record in manifest.leaves.items():
        _check_leaf(path, record)
    _check_segments(manifest)
    owners = set(tree.array_paths(manifest.tree).values())
    inputs = set() if manifest.replay is None else _check_replay(manifest, manifest.replay, owners)
    if owners | inputs != manifest.leaves.keys() | manifest.derived.keys() | manifest.tiles.keys():
        raise ValueError("its tree and its leaves do not match")
    _check_tiles(manifest)
    specs = manifest.specs
    for path, derived in manifest.derived.items():
        _check_derived(path, derived, manifest.leaves.get(path), specs)
    _check_order(manifest.derived)
    for path, promise in manifest.contracts.items():
        if path not in owners or (promise.from_step is None) != (
            name_of(promise.terms) != "reused"
        ):
            raise ValueError(f"the contract of leaf {path!r} is not one that a leaf can have")
    weakest = max(
        (name_of(promise.terms) for promise in manifest.contracts.values()),
        key=RANK.index,
        default="exact",
    )
    if manifest.contract != weakest or manifest.stage not in STAGES:
        raise ValueError(
            f"its contract is {manifest.contract!r} at stage {manifest.stage!r}, that of its leaves"
            f" is {weakest!r}"
        )
    has = {
        DERIVED: manifest.derived or manifest.contracts,
        REPLAY: manifest.replay is not None,
        TILES: manifest.tiles or manifest.lanes,
    }
    if {feature for feature, there in has.items() if there} != set(manifest.must_understand):
        raise ValueError(f"its leaves and the features {manifest.must_understand} do not match")


def _check_segments(manifest: Manifest) -> None:
    """In order, of at most this save, and but for those of several ranks one a save."""
    ids = [ref.id for ref in manifest.segments]
    seqs = [layout.seq_of(name) if layout.is_segment_id(name) else -1 for name in ids]
    alone = TILES not in manifest.must_understand
    if any(seq < 0 or seq > manifest.seq for seq in seqs) or any(
        a > b or (a == b and (alone or x >= y))
        for (a, x), (b, y) in itertools.pairwise(zip(seqs, ids, strict=True))
    ):
        raise ValueError("its segments are not in ascending order")
    for lane in manifest.lanes:
        if any(a >= b for a, b in itertools.pairwise(lane)) or any(
            not 0 <= number < len(ids) for number in lane
        ):
            raise ValueError("one of its lanes is not a list of its segments in order")
    if manifest.lanes and {number for lane in manifest.lanes for number in lane} != set(
        range(len(ids))
    ):
        raise ValueError("its lanes do not use all of its segments")


def _check_tiles(manifest: Manifest) -> None:
    if manifest.tiles and (manifest.derived or manifest.contracts or manifest.replay is not None):
        raise ValueError("its leaves lie in tiles, and are derived, bounded or replayed")
    most = len(manifest.lanes)
    if any(not -1 <= record.lane < most for record in manifest.leaves.values()):
        raise ValueError("a leaf lies in a lane that it does not have")
    if manifest.tiles and any(tiles.is_name(path) for path in (*manifest.leaves, *manifest.tiles)):
        raise ValueError("one of its leaves has the name of a tile")
    for path, cut in manifest.tiles.items():
        if path in manifest.leaves or not tiles.is_possible(cut.cuts) or not _is_a_shape(cut.shape):
            raise ValueError(f"leaf {path!r} cannot be cut as it says")
        count = tiles.count(cut.cuts)
        if count > _MAX_TILES or len(cut.lanes) != count or not _is_digests(cut.digests, count):
            raise ValueError(
                f"leaf {path!r} has {count} tiles, {len(cut.lanes)} lanes and {len(cut.digests)}"
                " digits of digests"
            )
        if any(not -1 <= lane < most for lane in cut.lanes):
            raise ValueError(f"leaf {path!r} has a tile in a lane that it does not have")
        for record in _kinds(cut):
            _check_leaf(path, record)


def _is_digests(text: str, count: int) -> bool:
    return len(text) == count * _DIGEST_DIGITS and re.fullmatch("[0-9a-f]*", text) is not None


def _kinds(cut: Tiles) -> list[LeafRecord]:
    """A tile of each shape that there is."""
    sizes = [sorted({b - a for a, b in itertools.pairwise(along)}) for along in cut.cuts]
    item_bytes = dtype_named(cut.dtype).item_bytes
    return [
        LeafRecord(cut.dtype, shape, grid.chunk_shape(shape, item_bytes), "")
        for shape in itertools.product(*sizes)
    ]


def _check_order(derived: Mapping[str, Derived]) -> None:
    """No leaf may follow from itself, and none from too long a row of others: what each needs is
    walked without a memory.
    """
    depths: dict[str, int] = {}
    for path in graphlib.TopologicalSorter(
        {path: one.sources for path, one in derived.items()}
    ).static_order():
        depths[path] = (
            1 + max((depths[source] for source in derived[path].sources), default=0)
            if path in derived
            else 0
        )
        if depths[path] > _MAX_DERIVED_DEPTH:
            raise ValueError(
                f"leaf {path!r} follows from more than {_MAX_DERIVED_DEPTH} others in a row"
            )


def _check_replay(manifest: Manifest, replay: Replay, owners: set[str]) -> set[str]:
    """The leaves that a replay consumes, once everything that it names is known to be there."""
    if not replay.steps or owners & replay.inputs:
        raise ValueError("its replay has no step, or consumes leaves of the tree")
    if (
        set(replay.places.values()) != set(replay.digests)
        or not set(replay.digests) <= owners & manifest.leaves.keys() - manifest.derived.keys()
    ):
        raise ValueError("its replay gives other leaves than it promises")
    memory = {path for path, owner in tree.array_paths(replay.memory).items() if path == owner}
    if memory != set(replay.places) or len(set(replay.places.values())) != len(replay.places):
        raise ValueError("its replay works on other arrays than it names")
    for step in replay.steps:
        tree.array_paths(step.options)
    return replay.inputs


def _check_derived(
    path: str, derived: Derived, record: LeafRecord | None, specs: Mapping[str, LeafSpec]
) -> None:
    if not _is_a_shape(derived.shape):
        raise ValueError(f"leaf {path!r} has the impossible shape {derived.shape}")
    dtype_named(derived.dtype)
    stored = None if record is None else record.dtype
    codes = {
        "lattice": "int32",
        "octaves": "uint8" if derived.fraction_bits == 0 else "uint16",
    }.get(derived.how)
    shapes = {specs[source].shape for source in derived.sources if source in specs}
    fits = (
        derived.how in ("cast", "same", "zeros", "lattice", "octaves")
        and stored == codes
        and (record is None or record.shape == derived.shape)
        and all(source in specs for source in derived.sources)
        and shapes <= {derived.shape}
        and (derived.how not in ("cast", "same") or bool(derived.of))
        and (
            derived.how != "cast"
            or (_is_float(derived.dtype) and _is_float(specs[derived.of].dtype))
        )
        and (
            derived.how != "lattice"
            or (derived.dtype == "float32" and 2.0**-149 <= derived.spacing < 2.0**128)
        )
        and (derived.how != "lattice" or not derived.of or specs[derived.of].dtype == "bfloat16")
        and (
            derived.how != "octaves"
            or (derived.dtype == "float32" and 0 <= derived.fraction_bits <= 7)
        )
        and 0 <= derived.seed < 1 << 64
        and 0 < derived.scale < 2.0**128
        and (derived.scale == 1.0 or derived.dtype == "float32")
        and (not derived.first or derived.dtype == specs[derived.first].dtype == "float32")
        and (not derived.first or 0 < derived.limit < math.inf)
        and (derived.how != "same" or specs[derived.of].dtype == derived.dtype)
    )
    if not fits:
        raise ValueError(f"leaf {path!r} cannot be derived as it says: {derived}")


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _check_segment(table: SegmentTable) -> None:
    """Everything that a table declares must follow from its leaves: nothing in it can make a reader
    allocate or open more than they need.
    """
    if not layout.is_segment_id(table.id):
        raise ValueError(f"{table.id!r} is not the name of a segment")
    names: set[str] = set()
    packed: dict[str, list[tuple[int, int]]] = {}
    digests: list[tuple[int, int]] = []
    rows: dict[int, list[tuple[int, int]]] = {}
    raw_bytes: dict[int, int] = {}
    for path, entry in table.leaves.items():
        _check_leaf(path, entry)
        spec = entry.spec(path)
        if (entry.key is None) == (not entry.delta):
            raise ValueError(f"leaf {path!r} must be either a keyframe or a delta")
        chunks = spec.chunk_count
        stored = chunks if entry.key is not None else sum(count for _, _, count in entry.delta)
        if stored > chunks or (entry.is_whole and stored != chunks):
            raise ValueError(f"leaf {path!r} has {stored} rows for {chunks} chunks")
        digests.append((entry.digests, stored))
        for part, first, count in entry.delta:
            rows.setdefault(part, []).append((first, count))
            raw_bytes[part] = raw_bytes.get(part, 0) + spec.raw_bytes
        if entry.key is not None and entry.key.array:
            if entry.key.array in names or not layout.is_array_name(entry.key.array):
                raise ValueError(f"{entry.key.array!r} is not an array name, or stands twice")
            if len(spec.shape) > _MAX_ARRAY_RANK:
                raise ValueError(
                    f"leaf {path!r} is an array of {len(spec.shape)} axes, more than"
                    f" {_MAX_ARRAY_RANK}"
                )
            names.add(entry.key.array)
        elif entry.key is not None:
            if entry.key.packed != spec.element.storage:
                raise ValueError(
                    f"leaf {path!r} is packed as {entry.key.packed!r}, but its type is stored as"
                    f" {spec.element.storage!r}"
                )
            packed.setdefault(entry.key.packed, []).append(
                (entry.key.offset, spec.raw_bytes // spec.element.item_bytes)
            )
    _check_covers(digests, table.digests, "digests")
    if packed.keys() != table.packed.keys() or rows.keys() != set(range(len(table.parts))):
        raise ValueError("its packed arrays or its parts are not those that its leaves name")
    for storage, ranges in packed.items():
        _check_covers(ranges, table.packed[storage], f"packed/{storage}")
    for number, declared in enumerate(table.parts):
        _check_covers(rows[number], declared.rows, f"delta/{number}")
        limit = 2 * raw_bytes[number] + 1024 * declared.rows
        for name, stream in declared.streams.items():
            if (
                name not in STREAMS
                or stream.codec not in ("stream", "store")
                or not 0 < stream.length <= limit
            ):
                raise ValueError(
                    f"part {number} has the impossible stream {name!r} of {stream.length} bytes"
                )


def _check_covers(ranges: list[tuple[int, int]], total: int, what: str) -> None:
    """Ranges ``(first, count)`` must cover ``total`` exactly, without a gap or an overlap."""
    at = 0
    for first, count in sorted(ranges):
        if first != at or count < 0:
            raise ValueError(
                f"its leaves do not cover {what} exactly: a range begins at {first}, not {at}"
            )
        at += count
    if at != total:
        raise ValueError(f"its leaves need {at} rows or elements of {what}, it declares {total}")


def _check_tag(tag: Tag) -> None:
    if not layout.is_tag(tag.name) or tag.step < 0 or tag.seq < 0 or not tag.nonce:
        raise ValueError(f"{tag} is not a tag")


_CHECKS: Mapping[type[Any], Any] = {
    Manifest: _check_manifest,
    SegmentTable: _check_segment,
    Tag: _check_tag,
}


known(*_CHECKS)
