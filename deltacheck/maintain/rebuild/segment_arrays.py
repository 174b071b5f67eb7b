"""The arrays of a segment without a table, and the chunk digests of its leaves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import PLANES, RAW, U8, U32, U64
from deltacheck.errors import Damaged
from deltacheck.leaf.digest import digest_of, leaf_digest
from deltacheck.leaf.spec import LeafSpec
from deltacheck.maintain.rebuild.facts import SegmentFacts
from deltacheck.store import documents, layout
from deltacheck.store import segment as columns
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import ArraySpec, ReadableArray
from deltacheck.store.files.storage import Place, subdirectories
from deltacheck.store.manifest import LeafEntry, LeafRecord, Part, Stream, method_features
from deltacheck.store.segment import (
    digests_spec,
    index_spec,
    natural_spec,
    packed_spec,
    stream_sizes,
)

# Errors of arrays whose own metadata is damaged.
WRONG = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, Damaged)

# Runs of rows of a leaf: ``(part, first row, rows)``.
Runs: TypeAlias = list[tuple[int, int, int]]


class Natural(NamedTuple):
    """A keyframe with an array of its own: the array's name, and the leaf with its digest."""

    name: str
    record: LeafRecord


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """The arrays of a segment.

    Attributes:
        folder: The segment.
        natural: Leaf path -> its array.
        packed: Storage type -> number of elements.
        indexes: The index of each part.
        parts: The parts.
        digests: The chunk digests, uint64 ``(rows, 2)``; ``None`` if they cannot be read.
    """

    folder: Place
    natural: dict[str, Natural]
    packed: dict[str, int]
    indexes: list[U32]
    parts: list[Part]
    digests: U64 | None
    _packed_content: dict[str, U8] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Place, facts: SegmentFacts) -> SegmentArrays:
        """Read the metadata of all arrays, the indexes and the chunk digests."""
        # An array that says more rows than all leaves together can have is damaged.
        most_rows = sum(record.spec(path).chunk_count for path, record in facts.records.items())
        digests = None
        with suppress(*WRONG):
            digests = _content(
                folder / layout.DIGESTS, digests_spec(_rows(folder / layout.DIGESTS, most_rows))
            )
        result = cls(folder, {}, {}, [], [], digests)
        for path in subdirectories(folder / layout.LEAVES):
            leaf, record = _natural(path, facts)
            result.natural[leaf] = Natural(path.name, record)
        for path in subdirectories(folder / layout.PACKED):
            result.packed[path.name] = int(_metadata(path)["shape"][0])
        for number in range(len(subdirectories(folder / layout.DELTA))):
            part = folder / layout.DELTA / str(number)
            rows = _rows(part / "index", most_rows)
            index = _content(part / "index", index_spec(rows))
            result.indexes.append(index)
            codecs = {
                name: path.name
                for path in subdirectories(part)
                if path.name != "index"
                for name in _metadata(path)["attributes"]["streams"]
            }
            streams = {
                name: Stream(int(sizes.sum()), codecs[name])
                for name, sizes in stream_sizes(index).items()
                if sizes.any()
            }
            result.parts.append(Part(rows, streams))
        return result

    def runs(self) -> dict[int, Runs]:
        """Return the rows of each leaf, by the number that they have for it, ascending."""
        runs: dict[int, Runs] = {}
        for part, index in enumerate(self.indexes):
            numbers = index[:, columns.LEAF].astype(np.int64)
            edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), index.shape[0]]
            for first, stop in itertools.pairwise(edges):
                runs.setdefault(int(numbers[first]), []).append((part, first, stop - first))
        return dict(sorted(runs.items()))

    def chunks(self, runs: Runs) -> NDArray[np.int64]:
        """Return the chunks of some runs."""
        return self._rows(runs)[:, columns.CHUNK].astype(np.int64)

    @property
    def features(self) -> set[str]:
        """Return the features that its chunks need."""
        return {
            name for index in self.indexes for name in method_features(index[:, columns.METHOD])
        }

    def needs_no_base(self, runs: Runs, chunk_count: int) -> bool:
        """Return true if some runs give every chunk of a leaf without a base."""
        rows = self._rows(runs)
        return rows.shape[0] == chunk_count and bool(
            np.isin(rows[:, columns.METHOD], (PLANES, RAW)).all()
        )

    def words(self, runs: Runs) -> U32:
        """Return the number of words, and the bytes of each word, of the chunks of some runs."""
        return self._rows(runs)[:, [columns.WORDS, columns.WORD_BYTES]]

    def _rows(self, runs: Runs) -> U32:
        """Return the index rows of some runs."""
        return np.concatenate(
            [self.indexes[part][first : first + count] for part, first, count in runs]
        )

    def packed_content(self, storage: str) -> U8:
        """Return the bytes of a packed array."""
        if storage not in self._packed_content:
            spec = packed_spec(storage, self.packed[storage])
            content = _content(self.folder / layout.PACKED / storage, spec)
            self._packed_content[storage] = content.view(np.uint8)
        return self._packed_content[storage]


class ChunkDigests:
    """The chunk digests of leaves after each segment, from the tables and arrays of segments."""

    def __init__(self, segments: Place, facts: SegmentFacts) -> None:
        self._segments, self._facts = segments, facts
        self._arrays: dict[Place, Any] = {}
        self._last: tuple[str, dict[str, U64]] = ("", {})

    def by_leaf_digest(self, path: str) -> Mapping[str, U64]:
        """Return the chunk digests of a leaf after each earlier entry, by its leaf digest then.

        Entries whose arrays cannot be read, and deltas to them, are left out.
        """
        if self._last[0] != path:
            states: dict[str, U64] = {}
            count = self._facts.records[path].spec(path).chunk_count
            for name, entry in self._facts.earlier_entries(path):
                with suppress(*WRONG):
                    states[entry.digest] = self._after(name, entry, states, count)
            self._last = (path, states)
        return self._last[1]

    def _after(self, name: str, entry: LeafEntry, states: Mapping[str, U64], count: int) -> U64:
        table = self._facts.tables[name]
        digests = self._array(self._segments / name / layout.DIGESTS, digests_spec(table.digests))
        if entry.key is not None:
            return np.asarray(digests[entry.digests : entry.digests + count])
        rows = []
        for part, first, length in entry.delta:
            index = self._segments / name / layout.DELTA / str(part) / "index"
            content = self._array(index, index_spec(table.parts[part].rows))
            rows.append(content[first : first + length, columns.CHUNK])
        chunks = np.concatenate(rows).astype(np.int64)
        before = states[entry.base] if entry.base else np.zeros((count, 2), np.uint64)
        return replaced(before, chunks, digests[entry.digests : entry.digests + chunks.size])

    def _array(self, path: Place, spec: ArraySpec) -> Any:
        if path not in self._arrays:
            self._arrays[path] = _content(path, spec)
        return self._arrays[path]


def replaced(before: U64, chunks: NDArray[np.int64], digests: U64) -> U64:
    """Return chunk digests of which some have been replaced."""
    after = before.copy()
    after[chunks] = digests
    return after


def digest_after(before: U64 | None, count: int, chunks: NDArray[np.int64], digests: U64) -> str:
    """Return the digest of a leaf after some of its chunks have changed.

    Args:
        before: Its chunk digests before; ``None`` if it did not exist.
        count: The number of its chunks.
        chunks: The chunks that changed.
        digests: Their digests, uint64 ``(chunks, 2)``.

    Returns:
        The digest; empty if the chunks are not those of the leaf.
    """
    if before is None:
        before = np.zeros((count, 2), np.uint64)
    if digests.shape[0] != chunks.size or (chunks.size and int(chunks.max()) >= count):
        return ""
    return leaf_digest(replaced(before, chunks, digests))


def _natural(array: Place, facts: SegmentFacts) -> tuple[str, LeafRecord]:
    """Return the leaf of an array and its record, with a digest of the content if none is known."""
    metadata = _metadata(array)
    attributes, shape = metadata["attributes"], tuple(map(int, metadata["shape"]))
    leaf, dtype = str(attributes["leaf_path"]), str(attributes["dtype"])
    record = facts.records.get(leaf)
    if record is not None and (record.dtype, record.shape) == (dtype, shape) and record.digest:
        return leaf, record
    # Shards are whole chunks; without shards, the chunks are those of the grid.
    grid = metadata["chunk_grid"]["configuration"]
    inner = metadata["codecs"][0].get("configuration", {})
    chunk = tuple(map(int, inner.get("chunk_shape", grid["chunk_shape"])))
    spec = LeafSpec(leaf, shape, dtype, chunk)
    content = _content(array, natural_spec(spec))
    return leaf, LeafRecord(
        dtype, shape, chunk, digest_of(spec, content.reshape(-1).view(np.uint8))
    )


# --- files ----------------------------------------------------------------------------------------


def _content(path: Place, spec: ArraySpec) -> Any:
    return ReadableArray(path, spec).read()


def _rows(path: Place, most_rows: int) -> int:
    rows = int(_metadata(path)["shape"][0])
    if rows > most_rows:
        raise ValueError(f"{path} has {rows} rows, more than {most_rows}")
    return rows


def _metadata(path: Place) -> Any:
    return json.loads(arrays.read_file(path / "zarr.json", documents.MAX_DOCUMENT_BYTES))
