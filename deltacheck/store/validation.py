"""The rules that a decoded manifest, segment table or tag must follow before it is used.

They bound all that a reader computes from a document: a forged one can neither make it allocate nor
lead it out of the root (``docs/how-to/read.md``).
"""

from __future__ import annotations

import graphlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from deltacheck.codec import derivation
from deltacheck.codec.base import STREAMS
from deltacheck.codec.derivation import Derived
from deltacheck.leaf import grid, tiles, tree
from deltacheck.leaf.contracts import Bounded, Promise, Reused, weakest_of
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafSpec
from deltacheck.store import layout
from deltacheck.store.manifest import (
    CHUNK_DIGEST_BYTES,
    DIGEST_DIGITS,
    INDEX_ROW_BYTES,
    STAGES,
    TILES,
    LeafEntry,
    LeafRecord,
    Manifest,
    ManifestHead,
    SegmentTable,
    Tag,
    Tiles,
    segment_features,
)

# Elements have at most 16 bytes, so byte counts stay below 2^63.
_MAX_ELEMENTS = 1 << 56
_MAX_RANK = 64  # NumPy's
_MAX_ARRAY_RANK = 32  # TensorStore's
# A reader holds a chunk or two beside the result; writers make chunks of about 1 MiB.
_MAX_CHUNK_BYTES = 64 << 20
_GROUP_ITEM_BYTES = 4  # of float32
_MAX_DERIVED_DEPTH = 8  # leaves that follow from one another
_MAX_SEQ = 10**10  # ten digits of a name
_MAX_TILES = 1 << 24  # of a leaf


def check_manifest(manifest: Manifest) -> None:
    """Raise an error unless a manifest is consistent in itself."""
    check_head(manifest)
    for path, record in manifest.leaves.items():
        _check_leaf(path, record)
    _check_segments(manifest)
    owners = {node.owner for node in manifest.arrays.values()}
    if owners != manifest.leaves.keys() | manifest.derived.keys() | manifest.tiles.keys():
        raise ValueError("its tree and its leaves do not match")
    _check_tiles(manifest)
    if manifest.absent:
        _check_absent(manifest)
    if manifest.derived:
        _check_rules(manifest)
    if manifest.derived or manifest.tiles:
        _check_order(manifest)
    if manifest.contracts:
        _check_contracts(manifest, owners)
    weakest = weakest_of(manifest.contracts.values())
    if manifest.contract != weakest or manifest.stage not in STAGES:
        raise ValueError(
            f"its contract is {manifest.contract!r} at stage {manifest.stage!r}, that of its leaves"
            f" is {weakest!r}"
        )
    # In both directions: an older reader would misread a step whose feature is not listed.
    if set(manifest.features) != set(manifest.must_understand):
        raise ValueError(f"its leaves and the features {manifest.must_understand} do not match")


def _check_rules(manifest: Manifest) -> None:
    """Check the rules by which leaves that are not in tiles follow from stored content."""
    specs = manifest.specs
    for path, derived in manifest.derived.items():
        if derived.is_part and derived.of and not _is_group(manifest.derived.get(derived.of)):
            raise ValueError(f"leaf {path!r} is a part of a group that is none: {derived}")
        _check_derived(path, derived, manifest.leaves.get(path), specs)


def _is_group(rule: Derived | None) -> bool:
    """Return True if what follows by a rule is stored as a group that other leaves are part of."""
    return rule is not None and rule.is_part and not rule.of


def _check_contracts(manifest: Manifest, owners: Set[str]) -> None:
    for path, promise in manifest.contracts.items():
        if path not in owners or not _is_possible(promise):
            raise ValueError(f"the contract of leaf {path!r} is not one that a leaf can have")


def check_head(manifest: Manifest | ManifestHead) -> None:
    """Raise an error unless a listing and a collection can use a manifest."""
    if not 0 <= manifest.seq < _MAX_SEQ or manifest.step < 0:
        raise ValueError(f"its sequence number is {manifest.seq}, its step {manifest.step}")
    # Above all names of segments of this save, and below those of later ones.
    end = f"s{manifest.seq:010d}."
    for ref in manifest.segments:
        if not layout.is_segment_id(ref.id) or ref.id > end:
            raise ValueError(f"it cannot need the segment {ref.id!r}")


def _check_absent(manifest: Manifest) -> None:
    """Check that the tree has ``None`` in place of everything that was removed."""
    scalars = tree.scalars(manifest.tree)
    if list(manifest.absent) != sorted(set(manifest.absent)) or any(
        scalars.get(path, path) is not None for path in manifest.absent
    ):
        raise ValueError("it has leaves that it declares absent")


def _is_possible(promise: Promise) -> bool:
    """Return True if a leaf can have a contract."""
    terms = promise.terms
    if isinstance(terms, Reused):
        return promise.from_step is not None and (promise.age_steps or 0) >= 0
    if promise.from_step is not None or promise.age_steps is not None:
        return False
    if not isinstance(terms, Bounded) or terms.rate is None:
        return True
    # A learning rate can only be the unit of an error.
    return terms.norm == "lr" and 0 < terms.rate < math.inf


def _check_segments(manifest: Manifest) -> None:
    """Check the order of the segments and the lanes.

    Segments ascend. Only ranks write several of one save.
    """
    ids = [ref.id for ref in manifest.segments]
    seqs = [layout.seq_of(name) for name in ids]
    if not _ascends(zip(seqs, ids, strict=True) if TILES in manifest.must_understand else seqs):
        raise ValueError("its segments are not in ascending order")
    numbers = set(range(len(ids)))
    for lane in manifest.lanes:
        if not (_ascends(lane) and numbers.issuperset(lane)):
            raise ValueError("one of its lanes is not a list of its segments in order")
    if manifest.lanes and numbers != set().union(*manifest.lanes):
        raise ValueError("its lanes do not use all of its segments")


def _ascends(values: Iterable[Any]) -> bool:
    """Return True if each value is larger than the one before it."""
    return all(a < b for a, b in itertools.pairwise(values))


def _check_tiles(manifest: Manifest) -> None:
    _check_lanes(manifest)
    # Leaves of a compact manifest share the objects of their cuts and lanes: each is checked once.
    checked: set[int] = set()
    kinds: set[tuple[int, str, tuple[str, ...]]] = set()
    for path, cut in manifest.tiles.items():
        is_whole = path in manifest.leaves or path in manifest.derived
        are_cuts_possible = id(cut.cuts) in checked or tiles.is_possible(cut.cuts)
        if is_whole or not are_cuts_possible or not _is_a_shape(cut.shape):
            raise ValueError(f"leaf {path!r} cannot be cut as it says")
        _check_places(path, cut, manifest, are_lanes_checked=id(cut.lanes) in checked)
        checked |= {id(cut.cuts), id(cut.lanes)}
        _check_forms(path, cut, manifest)
        # A check for each shape is enough, and a leaf may have millions of tiles.
        kind = (id(cut.cuts), cut.dtype, cut.codes)
        if kind not in kinds:
            kinds.add(kind)
            for record in _kinds(cut):
                _check_leaf(path, record)


def _check_lanes(manifest: Manifest) -> None:
    """Check the lanes of whole leaves, the names of leaves beside tiles, and digests of lanes."""
    lane_count = len(manifest.lanes)
    if any(not -1 <= record.lane < lane_count for record in manifest.leaves.values()):
        raise ValueError("a leaf lies in a lane that it does not have")
    if manifest.tiles and any(tiles.is_name(path) for path in (*manifest.leaves, *manifest.tiles)):
        raise ValueError("one of its leaves has the name of a tile")
    if manifest.lane_digests and (
        len(manifest.lane_digests) != lane_count
        or not all(_is_digests(digest, 1) for digest in manifest.lane_digests)
    ):
        raise ValueError(f"it has {lane_count} lanes and other digests of lanes")


def _check_places(path: str, cut: Tiles, manifest: Manifest, *, are_lanes_checked: bool) -> None:
    """Check that a leaf has a lane and a digest for each of its tiles."""
    count = tiles.count(cut.cuts)
    is_left = bool(manifest.lane_digests) and not cut.digests
    if (
        count > _MAX_TILES
        or len(cut.lanes) != count
        or not (is_left or _is_digests(cut.digests, count))
    ):
        raise ValueError(
            f"leaf {path!r} has {count} tiles, {len(cut.lanes)} lanes and {len(cut.digests)}"
            " digits of digests"
        )
    lane_count = len(manifest.lanes)
    if not are_lanes_checked and not -1 <= min(cut.lanes) <= max(cut.lanes) < lane_count:
        raise ValueError(f"leaf {path!r} has a tile in a lane that it does not have")
    # Tables have the digests of what is stored, and each belongs to a lane.
    if is_left and (not all(cut.codes) or -1 in cut.lanes):
        raise ValueError(f"leaf {path!r} leaves digests to tables that do not have them")


def _check_forms(path: str, cut: Tiles, manifest: Manifest) -> None:
    """Check the rules by which the tiles of a leaf follow from stored content."""
    count = len(cut.lanes)
    if cut.form and (
        len(cut.form) != count or any(not -1 <= number < len(cut.forms) for number in cut.form)
    ):
        raise ValueError(f"leaf {path!r} has tiles of rules that it does not have")
    if len(cut.codes) != len(cut.forms):
        raise ValueError(f"leaf {path!r} has {len(cut.forms)} rules and {len(cut.codes)} codes")
    if cut.from_steps:
        promise = manifest.contracts.get(path)
        # The contract names the oldest of them, so that no tile is older than promised.
        oldest = None if promise is None else promise.from_step
        if len(cut.from_steps) != count or min(cut.from_steps) != oldest:
            raise ValueError(f"leaf {path!r} has tiles of other steps than its contract names")
    for rule, codes in zip(cut.forms, cut.codes, strict=True):
        _check_form(path, cut, rule, codes, manifest)
    if any(rule.is_part and rule.of for rule in cut.forms):
        _check_tiles_of_groups(path, cut, manifest)


def _check_form(path: str, cut: Tiles, rule: Derived, codes: str, manifest: Manifest) -> None:
    """Check a rule of some tiles of a leaf, and the element type of what is stored of them."""
    sources = [manifest.tiles.get(source) for source in rule.sources]
    # A tile follows from tiles at the same place, so all of these leaves are cut alike.
    are_cut_alike = all(source is not None and source.cuts == cut.cuts for source in sources)
    form = (rule.dtype, rule.shape, rule.digest)
    if form != (cut.dtype, cut.shape, "") or not are_cut_alike:
        raise ValueError(f"the tiles of leaf {path!r} cannot be derived as they say: {rule}")
    # A rule that is not known is refused below.
    shape = derivation.code_shape(rule) if rule.how in derivation.RULES else cut.shape
    record = LeafRecord(codes, shape, (), "") if codes else None
    specs = {source: manifest.spec(source) for source in rule.sources}
    _check_derived(path, rule, record, specs)


def _check_tiles_of_groups(path: str, cut: Tiles, manifest: Manifest) -> None:
    """Check that each tile that is a part of a group names a tile that is stored as one."""
    for number in range(len(cut.lanes)):
        rule = cut.rule(number)
        if rule is None or not (rule.is_part and rule.of):
            continue
        if not _is_group(manifest.tiles[rule.of].rule(number)):
            raise ValueError(f"a tile of leaf {path!r} is a part of a group that is none: {rule}")


def _is_digests(text: str, count: int) -> bool:
    return len(text) == count * DIGEST_DIGITS and re.fullmatch("[0-9a-f]*", text) is not None


def _kinds(cut: Tiles) -> list[LeafRecord]:
    """Return the record of one tile of each shape and stored type that can occur."""
    sizes = [sorted({b - a for a, b in itertools.pairwise(edges)}) for edges in cut.cuts]
    stored_dtypes = {cut.dtype, *filter(None, cut.codes)}
    return [
        LeafRecord(dtype, shape, grid.chunk_shape(shape, dtype_named(dtype).item_bytes), "")
        for shape in itertools.product(*sizes)
        for dtype in sorted(stored_dtypes)
    ]


def _check_order(manifest: Manifest) -> None:
    """Refuse leaves that follow from themselves, or from too long a row of others.

    A restore walks the sources of a leaf without remembering which it has visited.
    """
    depths: dict[str, int] = {}
    # A leaf that follows from itself raises CycleError, which is a ValueError.
    sources = {path: rule.sources for path, rule in manifest.derived.items()}
    sources |= {path: cut.sources for path, cut in manifest.tiles.items() if cut.forms}
    for path in graphlib.TopologicalSorter(sources).static_order():
        depths[path] = (
            1 + max((depths[source] for source in sources[path]), default=0)
            if path in sources
            else 0
        )
        if depths[path] > _MAX_DERIVED_DEPTH:
            raise ValueError(
                f"leaf {path!r} follows from more than {_MAX_DERIVED_DEPTH} others in a row"
            )


def _check_derived(
    path: str, derived: Derived, record: LeafRecord | None, specs: Mapping[str, LeafSpec]
) -> None:
    if not _is_a_shape(derived.shape):
        raise ValueError(f"leaf {path!r} has the impossible shape {derived.shape}")
    dtype_named(derived.dtype)
    source = specs.get(derived.of) if derived.of else None
    is_known = source is not None or not derived.of
    shapes = set() if source is None else {source.shape}
    if record is not None and derived.how in derivation.RULES:
        is_known = is_known and record.shape == derivation.code_shape(derived)
        # A chunk of a group is one block.
        is_standard = record.chunk in ((), grid.chunk_shape(record.shape, _GROUP_ITEM_BYTES))
        is_known = is_known and (is_standard or not derived.is_part)
    codes, source_dtype = ("" if leaf is None else leaf.dtype for leaf in (record, source))
    is_possible = derivation.is_possible(derived, codes, source_dtype)
    if not (is_known and shapes <= {derived.shape} and is_possible):
        raise ValueError(f"leaf {path!r} cannot be derived as it says: {derived}")


class _Form(NamedTuple):
    """The sizes of a leaf; ``problem`` says why it is impossible."""

    problem: str
    raw_bytes: int = 0
    chunks: int = 0
    elements: int = 0
    storage: str = ""


def _check_leaf(path: str, leaf: LeafEntry | LeafRecord) -> _Form:
    form = _form_of(leaf.dtype, leaf.shape, leaf.chunk)
    if form.problem:
        raise ValueError(f"leaf {path!r} has {form.problem}")
    return form


@lru_cache(1024)  # leaves have few shapes, and stand in the table of every segment
def _form_of(dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> _Form:
    if not _is_a_shape(shape) or not grid.is_contiguous(shape, chunk):
        return _Form(f"the impossible shape {shape} or chunk {chunk}")
    spec = LeafSpec("", shape, dtype, chunk)
    chunk_bytes = math.prod(chunk) * spec.element.item_bytes
    if chunk_bytes > _MAX_CHUNK_BYTES:
        return _Form(
            f"chunks of {chunk_bytes} bytes, more than the {_MAX_CHUNK_BYTES} that they may have"
        )
    return _Form("", spec.raw_bytes, spec.chunk_count, math.prod(shape), spec.element.storage)


def _is_a_shape(shape: tuple[int, ...]) -> bool:
    """Return whether any leaf can have this shape.

    An empty leaf must also have a size along each of its other axes.
    """
    return (
        len(shape) <= _MAX_RANK
        and all(s >= 0 for s in shape)
        and math.prod(max(s, 1) for s in shape) <= _MAX_ELEMENTS
    )


@dataclass(slots=True)
class _Needs:
    """The needs of the leaves of a segment. Its table must declare exactly these.

    Args:
        seq: The sequence number of the segment.
        packed: The ranges of elements in each packed array.
        rows: The ranges of rows in each part.
        raw_bytes: By part, the bytes of the leaves with rows in it.
        digests: The ranges of chunk digests.
        arrays: The names of arrays of one leaf.
    """

    seq: int
    packed: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    rows: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    raw_bytes: dict[int, int] = field(default_factory=dict)
    digests: list[tuple[int, int]] = field(default_factory=list)
    arrays: set[str] = field(default_factory=set)

    def add(self, path: str, entry: LeafEntry) -> None:
        """Add the needs of a leaf. Raise an error if no leaf can have such an entry."""
        form = _check_leaf(path, entry)
        key, stored_rows = entry.key, form.chunks
        if (key is None) == (not entry.delta):
            raise ValueError(f"leaf {path!r} must be either a keyframe or a delta")
        if key is None:
            stored_rows = self._add_delta(path, entry, form)
        elif key.array:
            self._add_array(path, key.array, len(entry.shape))
        elif key.packed == form.storage:
            self.packed.setdefault(key.packed, []).append((key.offset, form.elements))
        else:
            raise ValueError(
                f"leaf {path!r} is packed as {key.packed!r}, but its type is stored as"
                f" {form.storage!r}"
            )
        if entry.since != -1 and not (entry.base and 0 <= entry.since <= self.seq):
            raise ValueError(f"leaf {path!r} cannot replace entries since {entry.since}")
        self.digests.append((entry.digests, stored_rows))

    def _add_delta(self, path: str, entry: LeafEntry, form: _Form) -> int:
        """Add the rows of a delta, and return their number."""
        stored_rows = 0
        for part, first, count in entry.delta:
            self.rows.setdefault(part, []).append((first, count))
            self.raw_bytes[part] = self.raw_bytes.get(part, 0) + form.raw_bytes
            stored_rows += count
        if stored_rows > form.chunks or (not entry.base and stored_rows != form.chunks):
            raise ValueError(f"leaf {path!r} has {stored_rows} rows for {form.chunks} chunks")
        return stored_rows

    def _add_array(self, path: str, name: str, axes: int) -> None:
        if name in self.arrays or not layout.is_array_name(name):
            raise ValueError(f"{name!r} is not an array name, or stands twice")
        if axes > _MAX_ARRAY_RANK:
            raise ValueError(
                f"leaf {path!r} is an array of {axes} axes, more than {_MAX_ARRAY_RANK}"
            )
        self.arrays.add(name)


def check_segment(table: SegmentTable) -> None:
    """Raise an error unless everything that a table declares follows from its leaves.

    No table can then make a reader allocate or open more than its leaves need.
    """
    if not layout.is_segment_id(table.id):
        raise ValueError(f"{table.id!r} is not the name of a segment")
    needs = _Needs(layout.seq_of(table.id))
    for path, entry in table.leaves.items():
        needs.add(path, entry)
    # In both directions: an older reader would take what is replaced for a part of the chain.
    # The index of a part shows which features its chunks need.
    if table.must_understand != segment_features(table.leaves, table.must_understand):
        raise ValueError(f"its leaves and the features {table.must_understand} do not match")
    if len(table.digests) % CHUNK_DIGEST_BYTES or any(
        len(part.index) % INDEX_ROW_BYTES for part in table.parts
    ):
        raise ValueError("its digests or an index of it end within a row")
    _check_covers(needs.digests, table.digest_count, "digests")
    parts = set(range(len(table.parts)))
    if needs.packed.keys() != table.packed.keys() or needs.rows.keys() != parts:
        raise ValueError("its packed arrays or its parts are not those that its leaves name")
    for storage, ranges in needs.packed.items():
        _check_covers(ranges, table.packed[storage], f"packed/{storage}")
    for number, declared in enumerate(table.parts):
        _check_covers(needs.rows[number], declared.rows, f"{layout.DELTA}.{number}")
        # No chunk is stored in more than its own bytes. The bound is generous, and keeps a reader
        # from allocating what a forged length asks for.
        limit = 2 * needs.raw_bytes[number] + 1024 * declared.rows
        for name, stream in declared.streams.items():
            is_known = name in STREAMS and stream.codec in ("stream", "store")
            if not (is_known and 0 < stream.length <= limit):
                raise ValueError(
                    f"part {number} has the impossible stream {name!r} of {stream.length} bytes"
                )


def _check_covers(ranges: list[tuple[int, int]], total: int, what: str) -> None:
    """Check that ranges ``(first, count)`` cover ``total`` without a gap or an overlap."""
    position = 0
    for first, count in sorted(ranges):
        if first != position or count < 0:
            raise ValueError(
                f"its leaves do not cover {what} exactly: a range begins at {first}, not {position}"
            )
        position += count
    if position != total:
        raise ValueError(
            f"its leaves need {position} rows or elements of {what}, it declares {total}"
        )


def check_tag(tag: Tag) -> None:
    """Raise an error unless the fields of a tag are possible."""
    if not layout.is_tag(tag.name) or tag.step < 0 or tag.seq < 0 or not tag.nonce:
        raise ValueError(f"{tag} is not a tag")
