"""The segments of a root."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from weakref import WeakValueDictionary

import tensorstore as ts

from deltacheck.store import layout
from deltacheck.store.files import arrays
from deltacheck.store.files import storage as places
from deltacheck.store.files.arrays import StreamWriter
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.object_path import existing
from deltacheck.store.files.storage import Place, inside, storage_of, subdirectories
from deltacheck.store.manifest import SegmentRef
from deltacheck.store.segment import Segment, SegmentWriter, TableRead, start_table


class Store:
    """The segments of a root.

    Args:
        path: The directory that holds ``segments/`` and ``control/``.
        durability: What a written file survives.
    """

    def __init__(self, path: Place, durability: Durability = Durability.POWER) -> None:
        self.path = path
        self.durability = durability
        # Steps share most of their segments. The weak references keep none in memory that no caller
        # uses.
        self._open: WeakValueDictionary[SegmentRef, Segment] = WeakValueDictionary()

    @cached_property
    def _writing(self) -> ts.Context:
        return arrays.context(self.durability, places.context(self.path))

    @cached_property
    def _streams(self) -> StreamWriter:
        return StreamWriter(self.path, self.durability)

    def start_threads(self) -> None:
        """Start the threads that write files, unless they run.

        From Python 3.12 on, none can be started while the interpreter ends and saves finish.
        """
        _ = self._streams

    def segment_ids(self) -> list[str]:
        """Return the name of every segment directory, committed or not, ascending."""
        return sorted(
            entry.name
            for entry in subdirectories(self.path / layout.SEGMENTS)
            if layout.is_segment_id(entry.name)
        )

    def missing_segments(self, names: Iterable[str]) -> list[str]:
        """Return those of some committed segments that have no table any more, ascending.

        This costs one look at a name for each segment, or a listing of an object store.
        """
        if not isinstance(self.path, Path):
            return self.listed_losses(sorted(names), {})[0]
        # Text and not paths: each save looks at every segment of the chains.
        folder = str(self.path / layout.SEGMENTS)
        # What cannot be looked at, no restore can read.
        return [name for name in sorted(names) if not os.path.lexists(f"{folder}/{name}/zarr.json")]

    def listed_losses(
        self, names: Sequence[str], seen: Mapping[str, Set[str]]
    ) -> tuple[list[str], dict[str, set[str]]]:
        """Return the segments of an object store that have lost objects, and the objects of all.

        One listing takes all segments between the first and the last. What it lacks is asked for by
        name, since a listing may lag.

        Args:
            names: The segments, ascending.
            seen: Keys of objects that they had, by segment.

        Returns:
            The segments without a table or one of the objects that they had, ascending; the keys of
            their objects, by segment.
        """
        folder = self.path / layout.SEGMENTS
        if not names or isinstance(folder, Path):
            return [], {}
        listed: dict[str, set[str]] = {name: set() for name in names}
        for key in folder.keys(names[0], names[-1]):
            name = key.removeprefix(f"{folder.key}/").partition("/")[0]
            if name in listed:
                listed[name].add(key)
        unlisted: dict[str, str] = {}
        for name, keys in listed.items():
            expected = {str((folder / name / "zarr.json").key), *seen.get(name, ())}
            unlisted |= dict.fromkeys(expected - keys, name)
        paths = [replace(folder, key=key) for key in sorted(unlisted)]
        present = {path.key for path in existing(paths)}
        for key in present:
            listed[unlisted[key]].add(key)
        return sorted({name for key, name in unlisted.items() if key not in present}), listed

    def segment_bytes(self, name: str) -> int | None:
        """Return the bytes of the files of a segment; ``None`` if that cannot be told.

        For a local file system: a listing of an object store has no sizes.
        """
        try:
            return storage_of(self.path / layout.SEGMENTS / name).bytes_below()
        except OSError:  # it is being removed
            return None

    def renew_folders(self) -> None:
        """Make the directories of the root again that were deleted, and sync their names.

        A root that is itself gone is not made: its path may mean another disk by now.
        """
        if storage_of(self.path / "zarr.json").name_exists():
            make_folders(self.path, self.durability)

    def group_paths(self) -> list[Place]:
        """Return the groups that plain zarr passes through on its way to any segment or step."""
        return [self.path / name for name in (layout.SEGMENTS, layout.CHECKPOINTS)]

    def close(self) -> None:
        """End the writing threads. No save may be under way; a later one starts them again."""
        # The entry of ``cached_property``: reading the attribute would start threads.
        streams = self.__dict__.pop("_streams", None)
        if streams is not None:
            streams.close()

    def renew(self) -> None:
        """Write from now on with new threads. The present ones may hang; they end when they can."""
        self.__dict__.pop("_streams", None)

    def writer(self, seq: int) -> SegmentWriter:
        """Return the writer of a new segment of the save ``seq``."""
        return SegmentWriter(
            self.path, layout.segment_id(seq), self._writing, self._streams, self.durability
        )

    def segments(self, refs: Iterable[SegmentRef]) -> list[Segment]:
        """Open committed segments. An object store reads all tables at the same time.

        Raises what ``segment`` raises.
        """
        refs = list(refs)
        reads = {ref: start_table(self.path, ref) for ref in refs if ref not in self._open}
        return [self.segment(ref, reads.get(ref)) for ref in refs]

    def segment(self, ref: SegmentRef, table: TableRead | None = None) -> Segment:
        """Open a committed segment, or return the one that is still open.

        Args:
            ref: Its reference in a checked manifest.
            table: The result of ``start_table``; ``None``: it is read now.

        Raises:
            ChainBroken: The segment is missing.
            Damaged: Its table is not the committed one.
        """
        segment = self._open.get(ref)
        if segment is None:
            # A lock, too, is an effect, which a link must not lead out of the root.
            path = inside(self.path, self.path / layout.SEGMENTS / ref.id)
            # The pin comes first: from here on no collection removes what is read.
            pin = storage_of(path / "zarr.json").pin()
            segment = self._open[ref] = Segment(self.path, ref, table)
            segment.pin = pin
        return segment


def make_folders(path: Place, durability: Durability) -> None:
    """Make the directories of a root with their groups, unless they exist, and sync their names."""
    for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
        inside(path, path / name).mkdir(parents=True, exist_ok=True)
        arrays.create_file(path / name, "zarr.json", layout.group_json({}), durability)
    # A power cut must not leave a root without the directories that its file stands for.
    durability.sync_directory(path)
