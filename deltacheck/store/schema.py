"""The two JSON documents of the format, checked whole when they are read: a segment's table and a step's manifest.

Both lie in the attributes of a zarr group under the key ``deltacheck``. Unknown keys are ignored, unknown ``must_understand``
features are refused (``docs/reference/format.md``, sections 2 and 3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import xxhash

from deltacheck import grid, tree
from deltacheck.codec.base import STREAMS
from deltacheck.dtypes import dtype_named
from deltacheck.errors import Damaged, UnsupportedFormat, UnsupportedLeaf
from deltacheck.records import LeafSpec
from deltacheck.store import layout

MAX_DOCUMENT_BYTES = 256 << 20  # of one zarr.json; a larger one is refused before it is parsed
_MAX_ELEMENTS = 1 << 56
REPLAY = "replay"  # permanent: the feature of a manifest whose leaves are the input of a replay
_KNOWN_FEATURES = frozenset({REPLAY})


class KeyframeAt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a whole leaf lies: in an array of its own (``array``), or in ``packed/<packed>`` from element ``offset`` on."""

    array: str = ""
    packed: str = ""
    offset: int = 0


class LeafEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a segment holds of one leaf.

    ``digest``: of the leaf after this segment; ``base``: before it (a delta only). ``digests``: row of its first chunk digest
    in the segment's digest table; a keyframe has one for every chunk, a delta one for every row. ``delta``: runs of rows,
    ``(part, first row, rows)``; without a ``base`` they are the whole leaf, encoded.
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
    """A closed group of delta rows and their streams: bounds the memory that writing and reading takes."""

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


class SegmentRef(msgspec.Struct, frozen=True):
    """A segment as a manifest names it. ``digest``: xxh3_128 of its ``zarr.json``. ``stored_bytes``: of all its files."""

    id: str
    digest: str
    stored_bytes: int


class LeafRecord(msgspec.Struct, frozen=True):
    """What a step promises of one leaf. ``digest``: xxh3_128 of its chunks' digests in order (16 bytes each)."""

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    digest: str

    def spec(self, path: str) -> LeafSpec:
        return LeafSpec(path, self.shape, self.dtype, self.chunk)


class ReplayStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One update to replay. ``inputs``: name -> leaf path of what it consumes. ``options``: skeleton of the numbers that it depends on."""

    inputs: dict[str, str]
    options: dict[str, Any]


class Replay(msgspec.Struct, frozen=True):
    """How the leaves of a tree are computed from what is stored: an optimizer's updates, one after the other.

    ``base_seq``, ``base_step``: the checkpoint whose content the stored leaves have, for people (all that is needed of it is
    among this manifest's own segments). ``update``: what computed it, for people. ``memory``: skeleton of what the update works
    on; ``places``: array path in it -> leaf path. ``digests``: leaf path -> the digest that the leaf has after the last update.
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


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step: the segments that it is made of in order, its tree, and the digest of every leaf.

    ``seq`` orders checkpoints; ``step`` is the training step, which a resumed run may repeat. ``time``: seconds since the
    epoch, for people only. ``contract``: what a restore gives; version 1 knows ``exact``.
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
    replay: Replay | None = None  # None: every leaf is stored as it was

    @property
    def raw_bytes(self) -> int:
        """Bytes of all leaves of the tree in memory."""
        inputs = set() if self.replay is None else self.replay.inputs
        return sum(record.spec(path).raw_bytes for path, record in self.leaves.items() if path not in inputs)

    def digest_of(self, path: str) -> str:
        """The digest that a leaf has in this step, be it stored or replayed."""
        replayed = {} if self.replay is None else self.replay.digests
        return replayed.get(path, self.leaves[path].digest)


Document = TypeVar("Document", SegmentTable, Manifest)


def to_attributes(document: SegmentTable | Manifest) -> dict[str, Any]:
    """The group attributes that carry ``document``, its checksum included."""
    body = msgspec.to_builtins(document)
    return {layout.ATTRIBUTE: {**body, "checksum": _checksum(body)}}


def from_zarr_json(content: bytes, kind: type[Document], where: str) -> Document:
    """Decode and check a group's ``zarr.json``.

    ``where`` names the file in errors. Raises ``Damaged`` (not JSON, checksum, schema, impossible values) or
    ``UnsupportedFormat``.
    """
    if len(content) > MAX_DOCUMENT_BYTES:
        raise Damaged(f"{where} has {len(content)} bytes, more than the {MAX_DOCUMENT_BYTES} that a document may have")
    try:
        group = json.loads(content, object_pairs_hook=_no_duplicates)
        body = group["attributes"][layout.ATTRIBUTE]
        checksum = body.pop("checksum")
        if not isinstance(checksum, str):
            raise TypeError("its checksum is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where} is damaged: {error}") from error
    check_version(body, where)
    if checksum != _checksum(body):
        raise Damaged(f"{where} is damaged: its checksum is {_checksum(body)}, recorded is {checksum}")
    try:
        document = msgspec.convert(body, kind)
        _CHECKS[kind](document)
    except (msgspec.ValidationError, ValueError, TypeError, UnsupportedLeaf) as error:
        raise Damaged(f"{where} is damaged: {error}") from error
    return document


def check_version(body: Mapping[str, Any], where: str) -> None:
    """Refuse another format, a later version, or a feature that we do not know."""
    if body.get("format") != layout.FORMAT:
        raise Damaged(f"{where} is not a document of the {layout.FORMAT} format")
    version = body.get("version")
    if version != layout.VERSION:
        raise UnsupportedFormat(
            f"{where} has format version {version!r}; this deltacheck reads version {layout.VERSION}. Install the deltacheck that wrote it"
        )
    unknown = [feature for feature in body.get("must_understand", []) if feature not in _KNOWN_FEATURES]
    if unknown:
        raise UnsupportedFormat(
            f"{where} needs the features {unknown!r}, which this deltacheck does not know. Install a newer one"
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return str(xxhash.xxh3_128_hexdigest(canonical.encode()))


def _check_leaf(path: str, leaf: LeafEntry | LeafRecord) -> None:
    if (
        any(s < 0 for s in leaf.shape)
        or math.prod(leaf.shape) > _MAX_ELEMENTS
        or not grid.is_contiguous(leaf.shape, leaf.chunk)
    ):
        raise ValueError(f"leaf {path!r} has the impossible shape {leaf.shape} or chunk {leaf.chunk}")
    dtype_named(leaf.dtype)


def _check_manifest(manifest: Manifest) -> None:
    for path, record in manifest.leaves.items():
        _check_leaf(path, record)
    seqs = [layout.seq_of(ref.id) if layout.is_segment_id(ref.id) else -1 for ref in manifest.segments]
    if any(a >= b for a, b in zip([-1, *seqs], seqs, strict=False)) or any(seq > manifest.seq for seq in seqs):
        raise ValueError("its segments are not in ascending order")
    owners = set(tree.array_paths(manifest.tree).values())
    inputs = set() if manifest.replay is None else _check_replay(manifest, manifest.replay, owners)
    if owners | inputs != set(manifest.leaves):
        raise ValueError("its tree and its leaves do not match")
    if (manifest.replay is None) == (REPLAY in manifest.must_understand):
        raise ValueError("it must ask for the feature 'replay' where it has a replay, and only there")


def _check_replay(manifest: Manifest, replay: Replay, owners: set[str]) -> set[str]:
    """The leaves that a replay consumes, once everything that it names is known to be there."""
    if not replay.steps or owners & replay.inputs:
        raise ValueError("its replay has no step, or consumes leaves of the tree")
    if set(replay.places.values()) != set(replay.digests) or not set(replay.digests) <= owners:
        raise ValueError("its replay gives other leaves than it promises")
    memory = {path for path, owner in tree.array_paths(replay.memory).items() if path == owner}
    if memory != set(replay.places) or len(set(replay.places.values())) != len(replay.places):
        raise ValueError("its replay works on other arrays than it names")
    return replay.inputs


def _check_segment(table: SegmentTable) -> None:
    """Everything that a table declares must follow from its leaves: nothing in it can make a reader allocate or open more than they need."""
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
            if entry.key.array in names or "/" in entry.key.array or entry.key.array.startswith("."):
                raise ValueError(f"{entry.key.array!r} is not an array name, or stands twice")
            names.add(entry.key.array)
        elif entry.key is not None:
            if entry.key.packed != spec.element.storage:
                raise ValueError(
                    f"leaf {path!r} is packed as {entry.key.packed!r}, but its type is stored as {spec.element.storage!r}"
                )
            packed.setdefault(entry.key.packed, []).append((entry.key.offset, spec.raw_bytes // spec.element.item_bytes))
    _check_covers(digests, table.digests, "digests")
    if packed.keys() != table.packed.keys() or rows.keys() != set(range(len(table.parts))):
        raise ValueError("its packed arrays or its parts are not those that its leaves name")
    for storage, ranges in packed.items():
        _check_covers(ranges, table.packed[storage], f"packed/{storage}")
    for number, declared in enumerate(table.parts):
        _check_covers(rows[number], declared.rows, f"delta/{number}")
        limit = 2 * raw_bytes[number] + 1024 * declared.rows
        for name, stream in declared.streams.items():
            if name not in STREAMS or stream.codec not in ("stream", "store") or not 0 < stream.length <= limit:
                raise ValueError(f"part {number} has the impossible stream {name!r} of {stream.length} bytes")


def _check_covers(ranges: list[tuple[int, int]], total: int, what: str) -> None:
    """Ranges ``(first, count)`` must cover ``total`` exactly, without a gap or an overlap."""
    at = 0
    for first, count in sorted(ranges):
        if first != at or count < 0:
            raise ValueError(f"its leaves do not cover {what} exactly: a range begins at {first}, not {at}")
        at += count
    if at != total:
        raise ValueError(f"its leaves need {at} rows or elements of {what}, it declares {total}")


_CHECKS: Mapping[type[Any], Any] = {Manifest: _check_manifest, SegmentTable: _check_segment}
