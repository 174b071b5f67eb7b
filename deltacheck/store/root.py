"""The segments and committed steps of a root, and the opening and creation of roots.

Two arrangements share all code below this module. An *engine root* holds its manifests under
``checkpoints/``. A *manager root* belongs to Orbax's ``CheckpointManager``: its manifests lie in
the step directories that Orbax commits by renaming, and the segments lie in the directory
``deltacheck`` beside them. ``docs/reference/format.md``, section 1, lists both.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import tensorstore as ts

from deltacheck.codec.base import U64
from deltacheck.errors import (
    ChainBroken,
    Damaged,
    NotACheckpointRoot,
    StepNotFound,
    StorageFailed,
    UnsupportedFormat,
)
from deltacheck.store import documents, layout, manager_steps, tags
from deltacheck.store.compact import LaneTables
from deltacheck.store.files import arrays
from deltacheck.store.files import storage as places
from deltacheck.store.files.arrays import Spent, StreamWriter
from deltacheck.store.files.containment import inside
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.effort import Effort
from deltacheck.store.files.local_storage import list_directory
from deltacheck.store.files.object_path import ObjectPath, ObjectStore, existing
from deltacheck.store.files.storage import Place, storage_of, subdirectories
from deltacheck.store.manager_steps import MANAGER_STORE
from deltacheck.store.manifest import Brief, Manifest, SegmentRef, SegmentTable
from deltacheck.store.manifest_cache import ManifestCache
from deltacheck.store.segment import Segment, SegmentWriter, TableRead, digests_spec, start_table


class Store:
    """The segments of a root.

    Args:
        path: The directory that holds ``segments/`` and ``control/``.
        threads: Size of TensorStore's pools; ``None``: its default.
        durability: What a written file survives.
    """

    def __init__(
        self, path: Place, threads: int | None = None, durability: Durability = Durability.POWER
    ) -> None:
        self.path = path
        self.threads = threads
        self.durability = durability
        # Steps share most of their segments. The weak references keep none in memory that no caller
        # uses.
        self._open: WeakValueDictionary[SegmentRef, Segment] = WeakValueDictionary()

    @cached_property
    def _writing(self) -> ts.Context:
        return arrays.context(self.threads, self.durability, places.context(self.path))

    @cached_property
    def _streams(self) -> StreamWriter:
        return StreamWriter(self.path, self.durability)

    def start_threads(self) -> None:
        """Start the threads that write files, unless they run.

        From Python 3.12 on, none can be started while the interpreter ends and saves finish.
        """
        _ = self._streams

    @classmethod
    def create(
        cls,
        path: Place,
        threads: int | None = None,
        durability: Durability = Durability.POWER,
        *,
        is_managers: bool = False,
    ) -> Store:
        """Create the directories of a store, unless they exist, and sync the way to them.

        ``is_managers``: it is the store in a manager root, which no other caller may write to.

        Raises:
            OSError: The path cannot be written.
            NotACheckpointRoot: The path holds something else.
            UnsupportedFormat: Another version has made the root.
            Damaged: The path holds segments and has lost its own ``zarr.json``.
            StorageFailed: An object store does not answer or honours no conditional writes.
        """
        if not is_managers:
            refuse_manager_store(path)
        is_root = is_root_or_fresh(path)
        # First, so that a place that cannot have a root stays as it is.
        storage_of(path).check_writable()
        if not is_root:
            _make_folders(path, durability)
            attributes = {"format": layout.FORMAT, "version": layout.VERSION, "must_understand": []}
            arrays.create_file(
                path, "zarr.json", layout.group_json({layout.ATTRIBUTE: attributes}), durability
            )
        check_root(path)
        # An existing root is synced too: the process that made it or its parents may have been
        # killed before its sync.
        durability.sync_directory(path)
        durability.sync_ancestors(path)
        return cls(path, threads, durability)

    def segment_ids(self) -> list[str]:
        """Return the name of every segment directory, committed or not, ascending."""
        return sorted(
            entry.name
            for entry in subdirectories(self.path / layout.SEGMENTS)
            if layout.is_segment_id(entry.name)
        )

    def missing_segments(self, names: Iterable[str]) -> list[str]:
        """Return those of some committed segments that have no table any more, ascending.

        This costs one look at a name for each segment, on a local file system. For object stores,
        see ``listed_losses``.
        """
        folder = self.path / layout.SEGMENTS

        def is_there(name: str) -> bool:
            try:
                return storage_of(folder / name / "zarr.json").name_exists()
            except Damaged:  # no restore can read it
                return False

        return [name for name in sorted(names) if not is_there(name)]

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
            _make_folders(self.path, self.durability)

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

    def take_spent(self) -> Spent:
        """Return the times of the streams written since the last call."""
        return self._streams.take_spent()

    def writer(self, seq: int, effort: Effort = Effort.NORMAL) -> SegmentWriter:
        """Return the writer of a new segment of the save ``seq``."""
        return SegmentWriter(
            self.path, layout.segment_id(seq), self._writing, self._streams, effort, self.durability
        )

    def write_digests(self, segment: Segment, digests: U64) -> None:
        """Write the array of chunk digests of a segment, which must not exist, and sync it.

        For repair only: nothing else writes to a committed segment.
        """
        folder = inside(self.path, segment.path / layout.DIGESTS)
        arrays.write(folder, digests_spec(digests.shape[0]), digests, self._writing).result()
        self.durability.sync_tree(folder)

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
            inside(self.path, self.path / layout.SEGMENTS / ref.id)
            # The pin comes first: from here on no collection removes what is read.
            pin = storage_of(self.path / layout.SEGMENTS / ref.id / "zarr.json").pin()
            segment = self._open[ref] = Segment(self.path, ref, table)
            segment.pin = pin
        return segment


@dataclass(frozen=True, slots=True)
class StepRef:
    """A committed checkpoint: its training step, sequence number and manifest file."""

    step: int
    seq: int
    manifest_path: Place


class Root:
    """A root opened for reading. It takes no lock and writes nothing; ``open_root`` makes one.

    Args:
        path: The root.
        store: Its segments: the root's own, or those in ``deltacheck/`` of a manager root.
        item: In a manager root, the item whose manifests are meant; ``None``: of any item.
    """

    def __init__(self, path: Place, store: Store, item: str | None = None) -> None:
        self.path = path
        self.store = store
        self.is_manager_root = store.path != path
        self._item = item
        self._cache = ManifestCache()

    def afresh(self) -> Root:
        """Return the same root with nothing cached, so that all is read from the storage."""
        return Root(
            self.path, Store(self.store.path, self.store.threads, self.store.durability), self._item
        )

    def manifest_paths(self) -> list[Place]:
        """Return every committed manifest file, readable or not."""
        if not self.is_manager_root:
            return storage_of(self.path / layout.CHECKPOINTS).manifests(self._cache.known())
        known = {_local(path) for path in self._cache.known()}
        return [*manager_steps.step_manifests(_local(self.path), self._item, known)]

    def other_manifest_paths(self, own: Collection[Place]) -> list[Place]:
        """Return files of a manager root that may be manifests and belong to no step of it.

        Their segments may still be needed; see ``manager_steps.other_manifests``.

        Args:
            own: The manifests of its steps.
        """
        if not self.is_manager_root:
            return []
        return [*manager_steps.other_manifests(_local(self.path), [_local(path) for path in own])]

    def unwritten_folders(self, own: Collection[Place]) -> list[Place]:
        """Return the folders of steps that have no manifest, as a deletion leaves them.

        Args:
            own: The manifests of the steps.
        """
        if not self.is_manager_root:
            folders = subdirectories(self.path / layout.CHECKPOINTS)
            return [e for e in folders if not storage_of(e / "zarr.json").name_exists()]
        return [*manager_steps.unwritten_folders(_local(self.path), [_local(path) for path in own])]

    def checkpoints(self) -> list[StepRef]:
        """Return the checkpoints with an undamaged manifest, ascending by sequence number.

        Damaged ones cannot be restored and are left out; ``verify`` names them.
        """
        return self.read_all()[0]

    def steps(self) -> list[int]:
        """Return the committed training steps, ascending."""
        return sorted({ref.step for ref in self.checkpoints()})

    def latest_step(self) -> int | None:
        """Return the training step of the newest checkpoint; ``None`` if there is none."""
        try:
            return self.manifest().step
        except StepNotFound:
            return None

    def manifest(self, step: int | str | None = None) -> Manifest:
        """Return the manifest of a step.

        Args:
            step: A training step (its newest save, if a resumed run repeated the step), a tag, or
                ``None`` or ``"latest"`` for the newest checkpoint.

        Raises:
            StepNotFound: There is no such step; the message names the existing ones.
            Damaged: A manifest that cannot be read may be the one that is meant. Only the caller
                can decide to use an older step instead.
        """
        if step == layout.LATEST:
            step = None
        if isinstance(step, str):
            return self._tagged(step)
        newest = self._newest(step)
        if newest is not None:
            return newest
        checkpoints, damaged = self.read_all()
        matching = [ref for ref in checkpoints if step is None or ref.step == step]
        # A damaged manifest may be the step that is meant: any of them if none matches, a newer one
        # if the newest is asked for.
        suspects = [
            p
            for p in damaged
            if not matching or (step is None and _age(p) > _age(checkpoints[-1].manifest_path))
        ]
        if suspects:
            error = damaged[max(suspects, key=_age)]
            target = "the newest step" if step is None else f"step {step}"
            raise type(error)(f"{target} of {self.path}: {error}. {way_out(whole_steps(self))}")
        if not matching:
            raise StepNotFound(
                f"{self.path} has no step {'at all' if step is None else step}."
                f" {describe_steps(self.steps())}"
            )
        match = max(matching, key=lambda ref: ref.seq)
        if self.is_manager_root and self._item is None:
            items = sorted(
                {ref.manifest_path.parent.name for ref in matching if ref.step == match.step}
            )
            if len(items) > 1:
                raise StepNotFound(
                    f"step {match.step} of {self.path} has the items {', '.join(items)}; say which:"
                    " open(root, item=...) or --item"
                )
        return self.read(match.manifest_path)

    def _tagged(self, name: str) -> Manifest:
        """Return the manifest of a tag's save, even if its step number was saved again since."""
        tag = tags.find(self.store.path, name)
        own_path = self.path / layout.CHECKPOINTS / layout.checkpoint_id(tag.seq) / "zarr.json"
        paths = (
            []
            if self.is_manager_root
            else [own_path, *(path for path in reversed(self.manifest_paths()) if path != own_path)]
        )
        problem = None
        for path in paths:
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue
            except (Damaged, UnsupportedFormat) as error:
                problem = problem or error
                continue
            if manifest.nonce == tag.nonce:
                return manifest
        if problem is not None:
            raise problem
        raise StepNotFound(
            f"tag {name!r} is step {tag.step} (seq {tag.seq}), which is not there any more."
            f" {describe_steps(self.steps())}"
        )

    def _newest(self, step: int | None) -> Manifest | None:
        """Return the result of ``manifest`` without reading every other manifest.

        In an engine root the directories' names are the sequence numbers, so the first match, from
        the newest down, is the result. ``None``: a manifest on the way cannot be read or lies under
        another number, so all must be read.
        """
        for path in () if self.is_manager_root else reversed(self.manifest_paths()):
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            # The damaged manifest may be the one that is meant. ``manifest`` decides that with all
            # of them.
            except (Damaged, UnsupportedFormat):
                return None
            if step is None or manifest.step == step:
                return manifest
        return None

    def read_all(self) -> tuple[list[StepRef], dict[Place, Damaged | UnsupportedFormat]]:
        """Return the checkpoints by sequence number, and the errors of unreadable manifests."""
        checkpoints: list[StepRef] = []
        damaged: dict[Place, Damaged | UnsupportedFormat] = {}
        paths = self.manifest_paths()
        self._cache.start(paths, whole=True)
        for path in paths:
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (Damaged, UnsupportedFormat) as error:
                damaged[path] = error
            else:
                checkpoints.append(StepRef(manifest.step, manifest.seq, path))
        self._cache.forget_manifests(paths)
        return sorted(checkpoints, key=lambda ref: ref.seq), damaged

    def read(self, path: Place) -> Manifest:
        """Return a committed manifest; it is decoded again only if its file has changed.

        Raises:
            FileNotFoundError: There is no such file.
            Damaged: It is not the manifest of this checkpoint.
        """
        storage_of(path.parent).check_directory()
        manifest = self.with_tables(self._cache.read(path))
        # A handler of its own may keep a manifest elsewhere, where no name tells its step.
        if not self.is_manager_root or path.parents[2] == self.path:
            documents.check_place(path, manifest, self.is_manager_root)
        return manifest

    def with_tables(self, manifest: Manifest) -> Manifest:
        """Let a manifest of this root find the digests that it leaves to its segments."""
        if not manifest.lane_digests or manifest.tables is not None:
            return manifest
        # Not the manifest, which would then refer to itself.
        brief = Brief.of(manifest)

        def table_of(ref: SegmentRef) -> SegmentTable:
            try:
                return self.store.segment(ref).table
            except ChainBroken as error:
                _refuse_deleted(self, brief, error)
                raise

        return manifest.read_with(LaneTables(manifest, table_of))

    def brief(self, path: Place) -> Brief:
        """Return the part of a manifest that collection needs. Raises what ``read`` raises."""
        storage_of(path.parent).check_directory()
        brief = self._cache.brief(path)
        if not storage_of(path).listing_is_current:
            # Sequence numbers are taken from names there, so the name must be right.
            documents.check_place(path, brief, self.is_manager_root)
        return brief

    def briefs(self) -> tuple[dict[Place, Brief], dict[Place, Damaged | UnsupportedFormat]]:
        """Return the brief of every committed manifest, and the errors of unreadable ones."""
        briefs: dict[Place, Brief] = {}
        damaged: dict[Place, Damaged | UnsupportedFormat] = {}
        paths = self.manifest_paths()
        self._cache.start(paths, whole=False)
        for path in paths:
            try:
                briefs[path] = self.brief(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (Damaged, UnsupportedFormat) as error:
                damaged[path] = error
        self._cache.forget_briefs(briefs)
        return briefs, damaged

    def digest_of(self, manifest: Manifest) -> str:
        """Return the ``manifest_digest`` of the file that this root has read ``manifest`` from."""
        return self._cache.digest_of(manifest)

    def require_digest(
        self, manifest: Manifest, expected: str | None, digest: str | None = None
    ) -> None:
        """Raise ``Damaged`` unless the manifest has the digest that the caller has kept.

        Args:
            manifest: A manifest that this root has read.
            expected: The digest that the caller has kept; ``None`` accepts any.
            digest: The digest that the manifest counts as; ``None``: ``digest_of``.
        """
        if expected is None:
            return
        digest = self.digest_of(manifest) if digest is None else digest
        if digest != expected:
            raise Damaged(
                f"step {manifest.step} of {self.path} is not the one that is expected: its manifest"
                f" has digest {digest}, expected is {expected}. Ask for the step that the digest"
                " was kept of"
            )

    def next_seq(self) -> int:
        """Return one more than any sequence number that this root has used."""
        if not storage_of(self.store.path).listing_is_current:
            # Committed numbers only: manifests are found by asking for the next few numbers, so
            # failed saves must not leave long gaps.
            committed = (layout.seq_of(path.parent.name) for path in self.manifest_paths())
            return max(committed, default=-1) + 1
        names = [
            *self.store.segment_ids(),
            *(e.name for e in list_directory(Path(str(self.store.path)) / layout.CHECKPOINTS)),
        ]
        used_seqs = [
            layout.seq_of(name)
            for name in names
            if layout.is_segment_id(name) or layout.is_checkpoint_id(name)
        ]
        if self.is_manager_root:
            used_seqs += [ref.seq for ref in self.checkpoints()]
        return max(used_seqs, default=-1) + 1


def open_root(
    path: str | os.PathLike[str] | ObjectPath,
    item: str | None = None,
    threads: int | None = None,
    storage: ObjectStore | None = None,
) -> Root:
    """Open an engine root or a manager root.

    Args:
        path: A local directory, or the address of a prefix of an object store. A folder with an
            engine root in ``deltacheck/``, as trainers make it, means that root.
        item: In a manager root, the item that is meant; ``None``: any.
        threads: Size of TensorStore's pools; ``None``: its default.
        storage: How an object store is reached; ``None``: the defaults.

    Raises:
        NotACheckpointRoot: There is no root; the message says what was found instead.
        UnsupportedFormat: Another version has made the root.
        Damaged: Only the root's own ``zarr.json`` is lost.
        StorageFailed: An object store does not answer.
    """
    directory = places.of(path, storage)
    missing = storage_of(directory).missing_directory()
    if missing:
        raise NotACheckpointRoot(f"{directory} {missing}")
    refuse_manager_store(directory)
    for store in (directory, directory / MANAGER_STORE):
        if store != directory:
            storage_of(store).check_directory()
        attributes = _group_attributes(store)
        if attributes is not None and attributes.get("format") == layout.FORMAT:
            check_root(store)
            return Root(_root_of(directory, store), Store(store, threads), item)
    for store in (directory, directory / MANAGER_STORE):
        _refuse_lost(_root_of(directory, store), Store(store, threads), item)
    if isinstance(directory, Path):
        _refuse_copied_step(directory)
    raise NotACheckpointRoot(
        f"{directory} is not a deltacheck root: it has no zarr.json of ours, nor has"
        f" {MANAGER_STORE}/ in it"
    )


def _refuse_copied_step(directory: Path) -> None:
    """Raise ``NotACheckpointRoot`` for steps of a manager without their segments, or for one step.

    Orbax names steps by folders, so one of them is easily copied or given alone.
    """
    parent = directory.parent
    manifests = [
        path
        for root in (directory, parent)
        for path in manager_steps.step_manifests(root, None)
        if path.is_relative_to(directory)
    ]
    if not manifests:
        return
    if (parent / MANAGER_STORE).is_dir():
        raise NotACheckpointRoot(
            f"{directory} is a step of the root {parent}: give that root, and the step"
        )
    raise NotACheckpointRoot(
        f"{manifests[0]} is there without the segments that it needs: they are in {MANAGER_STORE}/"
        " of the root that it was copied from. Read the step there, or copy the whole root"
    )


def _root_of(directory: Place, store: Place) -> Place:
    """Return the path of the root whose segments are in ``store``.

    A trainer's output folder has the root of an ``Engine`` in the place in which a manager root has
    its segments.
    """
    return store if store != directory and _has_checkpoints(store) else directory


def _has_checkpoints(store: Place) -> bool:
    """Return whether a store has checkpoints of an ``Engine``; those of a manager lie beside it."""
    names = storage_of(store / layout.CHECKPOINTS).directory_names()
    return any(map(layout.is_checkpoint_id, names))


def _local(path: Place) -> Path:
    """Return a path of a manager root, which is always local."""
    return path if isinstance(path, Path) else Path(str(path))


def _make_folders(path: Place, durability: Durability) -> None:
    for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
        inside(path, path / name).mkdir(parents=True, exist_ok=True)
        arrays.create_file(path / name, "zarr.json", layout.group_json({}), durability)
    # A power cut must not leave a root without the directories that its file stands for.
    durability.sync_directory(path)


def _refuse_lost(root: Place, store: Store, item: str | None = None) -> None:
    """Raise ``Damaged`` if segments show that the path has been a root."""
    segments = store.segment_ids()
    if segments:
        raise Damaged(
            f"{store.path / 'zarr.json'} is missing or damaged, but {len(segments)} segments lie"
            f" beside it. `deltacheck repair {root}` writes it again; steps that restore then:"
            f" {listed(Root(root, store, item).steps()) or 'none'}",
            file=store.path / "zarr.json",
        )


def is_root_or_fresh(path: Place) -> bool:
    """Return True if a path is a root, and False if a root can be made there.

    Raises:
        NotACheckpointRoot: The path holds something else.
        Damaged: The path holds segments and has lost its own ``zarr.json``.
    """
    refuse_file(path)
    if _is_root(path):
        return True
    _refuse_lost(path, Store(path))
    if path.is_dir() and not storage_of(path).is_fresh_root():
        raise NotACheckpointRoot(
            f"{path} is not empty and not a deltacheck root; give an empty or new directory"
        )
    return False


def refuse_file(path: Place) -> None:
    """Raise ``NotACheckpointRoot`` if a path, or a part of it, is a file or a dangling link."""
    if isinstance(path, Path):
        for part in (path, *path.parents):
            # One look: another process may make the directory at the same moment.
            try:
                if stat.S_ISDIR(os.stat(part).st_mode):
                    return
                kind = "a file"
            except OSError:
                if not os.path.islink(part):
                    continue
                kind = "a link to a directory that does not exist"
            raise NotACheckpointRoot(f"{part} is {kind}; give an empty or new directory")


def check_root(path: Place) -> None:
    """Raise an error for a root of another format or version, or with unknown features."""
    attributes = _group_attributes(path)
    if attributes is None or attributes.get("format") != layout.FORMAT:
        raise NotACheckpointRoot(f"{path} is not a deltacheck root")
    documents.check_version(attributes, str(path / "zarr.json"))
    for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
        storage_of(path / name).check_directory()


def create_manager_store(
    root: Path, threads: int | None = None, durability: Durability = Durability.POWER
) -> Store:
    """Create the store beside the steps of a ``CheckpointManager``, unless it exists.

    Raises what ``Store.create`` and ``refuse_engine_root`` raise.
    """
    refuse_engine_root(root)
    path = root / MANAGER_STORE
    storage_of(path).check_directory()
    path.mkdir(parents=True, exist_ok=True)
    mark = path / layout.COMMIT_MARK
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(mark, flags, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise Damaged(f"{mark} is a link; remove it", file=mark) from error
    return Store.create(path, threads, durability, is_managers=True)


def refuse_engine_root(root: Path) -> None:
    """Raise ``NotACheckpointRoot`` if a directory for a manager is or has an engine root.

    Two writers that do not know of each other's steps would delete each other's segments.
    """
    refuse_file(root)
    engine_root = root
    if not _is_root(root):
        engine_root = root / MANAGER_STORE
        if not _is_root(engine_root) or not _has_checkpoints(engine_root):
            return
    raise NotACheckpointRoot(
        f"{engine_root} is the root of an Engine, with whose segments a CheckpointManager in {root}"
        " would interfere. Give the manager another directory"
    )


def refuse_manager_store(path: Place) -> None:
    """Raise ``NotACheckpointRoot`` if a path is the store in a manager root.

    Its steps lie beside it: as a root of its own it has none, and needs none of its segments.
    """
    if path.name == MANAGER_STORE and storage_of(path / layout.COMMIT_MARK).name_exists():
        raise NotACheckpointRoot(
            f"{path} holds the segments of a CheckpointManager, whose root is {path.parent}: give"
            " that, or another directory"
        )


def describe_steps(steps: list[int]) -> str:
    """Return the steps of a root in words short enough for an error."""
    return f"Steps that it has: {listed(steps)}" if steps else "It has no committed step"


def listed(steps: list[int]) -> str:
    """Return steps in words short enough for a line."""
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ..., {', '.join(map(str, steps[-3:]))}"


def whole_steps(
    root: Root,
    needs: Callable[[Manifest, Sequence[Segment]], bool] = lambda manifest, segments: False,
) -> list[int]:
    """Return the training steps whose segments all exist with the right tables, ascending.

    Args:
        root: The root.
        needs: A condition under which a step is left out, such as a need of a damaged file.
    """
    is_whole = {}
    # Of a step that was saved again the newest save counts, whole or not.
    for ref in root.checkpoints():
        try:
            manifest = root.read(ref.manifest_path)
            is_whole[ref.step] = not needs(manifest, open_segments(root, manifest))
        except (Damaged, FileNotFoundError):
            is_whole[ref.step] = False
    return sorted(step for step, restores in is_whole.items() if restores)


def open_segments(
    root: Root, manifest: Manifest, stored: Sequence[str] | None = None
) -> list[Segment]:
    """Open the segments of a step, in order.

    Args:
        root: The root of the step.
        manifest: The step.
        stored: Paths of stored leaves and tiles; only segments that these may need are opened.
            ``None``: all segments.

    Raises:
        ChainBroken: A segment is missing.
        Damaged: A segment's table is not the committed one.
        StepNotFound: The step was deleted meanwhile.
    """
    try:
        return root.store.segments(
            manifest.segments if stored is None else manifest.refs_of(stored)
        )
    except ChainBroken as error:
        _refuse_deleted(root, manifest, error)
        raise


def _refuse_deleted(root: Root, manifest: Manifest | Brief, error: ChainBroken) -> None:
    """Raise ``StepNotFound`` if a step with a missing segment does not exist any more."""
    if not _still_exists(root, manifest):
        raise StepNotFound(
            f"step {manifest.step} of {root.path} was deleted while it was being opened."
            f" {describe_steps(root.steps())}. A longer grace_seconds leaves more time"
        ) from error


def way_out(steps: list[int]) -> str:
    """Return the steps that remain, in words for the end of an error."""
    return f"Steps that still restore: {listed(steps)}" if steps else "No other step restores"


def _still_exists(root: Root, manifest: Manifest | Brief) -> bool:
    """Return whether a step that was read still exists, in the form that was read."""
    paths = root.manifest_paths()
    if not root.is_manager_root:
        return any(path.parent.name == layout.checkpoint_id(manifest.seq) for path in paths)
    return any(brief.nonce == manifest.nonce for brief in root.briefs()[0].values()) or bool(
        root.briefs()[1]
    )


def _age(manifest_path: Place) -> tuple[int, str]:
    """Return a sort key for manifests that cannot be read: the number in a directory's name."""
    name = next((p.name for p in manifest_path.parents if p.name.lstrip("c").isdigit()), "")
    return int(name.lstrip("c") or 0), name


def _is_root(path: Place) -> bool:
    attributes = _group_attributes(path)
    return attributes is not None and attributes.get("format") == layout.FORMAT


def _group_attributes(path: Place) -> dict[str, Any] | None:
    """Return our attributes of a group; ``None`` if it is not one of ours."""
    try:
        # A root's own document is small, so a large file is none of ours.
        attributes = json.loads(arrays.read_file(path / "zarr.json", 1 << 20))["attributes"][
            layout.ATTRIBUTE
        ]
    except StorageFailed:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Damaged):
        return None
    return attributes if isinstance(attributes, dict) else None
