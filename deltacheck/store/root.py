"""A root on disk: where its segments lie, which steps are committed, and the one act that commits a
step.

Two arrangements share all code below this file. An *engine root* holds its manifests under
``checkpoints/``. A *manager root* belongs to Orbax's ``CheckpointManager``: manifests lie in the
step directories that Orbax commits by renaming, and our store is the directory ``deltacheck``
beside them.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import tensorstore as ts

from deltacheck.errors import (
    ChainBroken,
    Damaged,
    NotACheckpointRoot,
    StepNotFound,
    StorageFailed,
    UnsupportedFormat,
)
from deltacheck.store import documents, layout, object_root, tags
from deltacheck.store.files import arrays, chunk_files
from deltacheck.store.files import storage as place
from deltacheck.store.files.arrays import Spent, StreamWriter
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.effort import Effort
from deltacheck.store.files.storage import ObjectPath, ObjectStore, Place, scan
from deltacheck.store.files.storage import subdirectories as _entries
from deltacheck.store.lock.pins import Pin
from deltacheck.store.manifest import Manifest, SegmentRef
from deltacheck.store.segment import Segment, SegmentWriter

MANAGER_STORE = "deltacheck"  # our directory in a manager root
_CACHE_BYTES = 64 << 20  # of decoded zarr chunks while reading: packed leaves share chunks
_Stamp = tuple[int, int, int]
_COMMIT_MARK = (  # keeps Orbax's clean-up of unfinished steps away from our store
    "commit_success.txt"
)


class Store:
    """The segments of a root. ``threads``: of TensorStore's pools, ``None`` for its default.
    ``durability``: of what is written.
    """

    def __init__(
        self, path: Place, threads: int | None = None, durability: Durability = Durability.POWER
    ) -> None:
        self.path = path
        self.threads = threads
        self.durability = durability
        # Those that someone still works with: steps share most of theirs, and nothing stays in
        # memory because of this.
        self._open: WeakValueDictionary[SegmentRef, Segment] = WeakValueDictionary()

    @cached_property
    def _reading(self) -> ts.Context:
        return arrays.context(self.threads, _CACHE_BYTES, parent=place.context(self.path))

    @cached_property
    def _writing(self) -> ts.Context:
        # No cache: a cached chunk would go on referring to the source memory after its commit, and
        # show what training made of it since.
        return arrays.context(self.threads, 0, self.durability, place.context(self.path))

    @cached_property
    def _streams(self) -> StreamWriter:
        return StreamWriter(
            self._writing, self.durability, local=not isinstance(self.path, ObjectPath)
        )

    @classmethod
    def create(
        cls, path: Place, threads: int | None = None, durability: Durability = Durability.POWER
    ) -> Store:
        """Make the directories of a store where they are not there yet, and the way to them
        durable.

        Raises ``OSError`` where the path cannot be written, ``NotACheckpointRoot`` where it holds
        something else, ``UnsupportedFormat``, ``Damaged`` where it holds segments and has lost its
        own ``zarr.json``, ``StorageFailed`` where an object store does not answer or honours no
        conditional writes.
        """
        about = _group_attributes(path)
        if about is None or about.get("format") != layout.FORMAT:
            _refuse_lost(path, cls(path))
            if path.is_dir() and not _is_empty(path):
                raise NotACheckpointRoot(
                    f"{path} is not empty and not a deltacheck root; give an empty or new directory"
                )
            for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
                (path / name).mkdir(parents=True, exist_ok=True)
                arrays.create_file(path / name, "zarr.json", arrays.group_json({}), durability)
            # A power cut must not leave a root without the directories that its file stands for.
            durability.sync_directory(path)
            about = {"format": layout.FORMAT, "version": layout.VERSION, "must_understand": []}
            arrays.create_file(
                path, "zarr.json", arrays.group_json({layout.ATTRIBUTE: about}), durability
            )
        check_root(path)
        # Also of a root that is there: whoever made it may have been killed, or have made its
        # parents a moment ago, before a sync.
        durability.sync_directory(path)
        durability.sync_ancestors(path)
        if isinstance(path, ObjectPath):
            place.check_conditional_writes(path / layout.CONTROL)
            place.written.take()
        elif not os.access(path / layout.SEGMENTS, os.W_OK):
            raise PermissionError(errno.EACCES, "the root is not writable", str(path))
        return cls(path, threads, durability)

    def segment_ids(self) -> list[str]:
        """Every segment directory, committed or not, ascending."""
        return sorted(
            entry.name
            for entry in _entries(self.path / layout.SEGMENTS)
            if layout.is_segment_id(entry.name)
        )

    def group_paths(self) -> list[Place]:
        """The groups that plain zarr passes through on its way to any segment or step."""
        return [self.path / name for name in (layout.SEGMENTS, layout.CHECKPOINTS)]

    def close(self) -> None:
        """End the threads that write. REQUIRES: no save is under way; a later one starts them
        again.
        """
        streams = self.__dict__.pop("_streams", None)
        if streams is not None:
            streams.close()

    def renew(self) -> None:
        """Let what is written from now on go by new threads: those there are may hang. They end
        when they can.
        """
        self.__dict__.pop("_streams", None)

    def take_spent(self) -> Spent:
        """Where the time of the streams written since the last call went."""
        return self._streams.take_spent()

    def writer(self, seq: int, effort: Effort = Effort.NORMAL) -> SegmentWriter:
        return SegmentWriter(
            self.path, layout.segment_id(seq), self._writing, self._streams, effort, self.durability
        )

    def segment(self, ref: SegmentRef) -> Segment:
        """Open a committed segment; ``ChainBroken`` where it is missing, ``Damaged`` where its
        table
        is not what was committed.

        Where the last caller's is still in use, that one, whose table is not read again.
        """
        opened = self._open.get(ref)
        if opened is None:
            pin = Pin(
                self.path / layout.SEGMENTS / ref.id / "zarr.json"
            )  # first: what is read then stays
            opened = self._open[ref] = Segment(self.path, ref, self._reading)
            opened.pin = pin
        return opened


@dataclass(frozen=True, slots=True)
class StepRef:
    """A committed checkpoint: its training step, its sequence number and where its manifest
    lies.
    """

    step: int
    seq: int
    manifest_path: Place


class Brief(NamedTuple):
    """What retention and collection want of a manifest. ``segments``: the ids of those that it
    needs.
    """

    seq: int
    step: int
    nonce: str
    metrics: Mapping[str, float | str]
    segments: frozenset[str]


class Root:
    """A root opened for reading; takes no lock and writes nothing. ``open_root`` makes one."""

    def __init__(self, path: Place, store: Store, item: str | None = None) -> None:
        self.path = path
        self.store = store
        self.is_manager_root = store.path != path
        self._item = item
        # What tells the file's version, what it says, its digest.
        self._manifests: dict[Place, tuple[_Stamp | bytes, Manifest, str]] = {}
        self._briefs: dict[Place, tuple[_Stamp, Brief]] = {}
        self._reads: dict[ObjectPath, Any] = {}  # under way

    def afresh(self) -> Root:
        """The same root with nothing cached: what is read next comes from the disk."""
        return Root(
            self.path, Store(self.store.path, self.store.threads, self.store.durability), self._item
        )

    def manifest_paths(self) -> list[Place]:
        """Every committed manifest file."""
        if isinstance(self.path, ObjectPath):
            known = [path for path in self._manifests if isinstance(path, ObjectPath)]
            return [*object_root.manifests(self.path / layout.CHECKPOINTS, known)]
        if not self.is_manager_root:
            folder = self.path / layout.CHECKPOINTS
            # A link or a file in a checkpoint's place is damage: no step may go missing without a
            # word.
            ours = [entry for entry in scan(folder) if layout.is_checkpoint_id(entry.name)]
            found = {
                folder / entry.name / "zarr.json": entry.is_dir(follow_symlinks=False)
                for entry in ours
            }
            return [
                path for path, is_plain in found.items() if not is_plain or os.path.lexists(path)
            ]
        steps = [entry for entry in scan(self.path) if _is_manager_step(entry)]
        strange = [
            Path(e.path) / "zarr.json" for e in steps if e.is_symlink() and e.name[-1:].isdigit()
        ]
        plain = [entry for entry in steps if entry.is_dir(follow_symlinks=False)]
        return sorted(
            [*(path for entry in plain for path in _item_manifests(entry, self._item)), *strange]
        )

    def other_manifest_paths(self) -> list[Place]:
        """Manifests of a manager root that belong to no committed step: of saves under way or
        killed,
        of steps that Orbax has set aside (``todelete_subdir``, ``_SNAPSHOTS``). What they need may
        still be wanted.
        """
        if not self.is_manager_root:
            return []
        own = set(self.manifest_paths())
        folders = [e for e in _entries(self.path) if e.name != MANAGER_STORE]
        inner = [e for folder in folders for e in _entries(folder)]
        innermost = [e for folder in inner for e in _entries(folder)]
        return sorted(
            p for f in (*inner, *innermost) if (p := f / "zarr.json").is_file() and p not in own
        )

    def checkpoints(self) -> list[StepRef]:
        """Every committed checkpoint whose manifest is whole, ascending by sequence number."""
        return self.read_all()[
            0
        ]  # verify names the damaged ones; here they are simply not steps that can be restored

    def steps(self) -> list[int]:
        """The training steps that are committed, ascending."""
        return sorted({ref.step for ref in self.checkpoints()})

    def manifest(self, step: int | str | None = None) -> Manifest:
        """The manifest of a training step (its newest, where a resumed run repeated the step), of a
        tag's step, or of the newest checkpoint.

        Raises ``StepNotFound``, naming what there is, and ``Damaged`` where a manifest that cannot
        be read may be the one that is meant: falling back to an older step is the caller's choice.
        """
        if isinstance(step, str):
            return self._tagged(step)
        newest = self._newest(step)
        if newest is not None:
            return newest
        checkpoints, damaged = self.read_all()
        matching = [ref for ref in checkpoints if step is None or ref.step == step]
        # A damaged manifest may be the step that is meant: any of them where none matches, a newer
        # one where the newest is asked for.
        suspects = [
            p
            for p in damaged
            if not matching or (step is None and _age(p) > _age(checkpoints[-1].manifest_path))
        ]
        if suspects:
            error = damaged[max(suspects, key=_age)]
            asked = "the newest step" if step is None else f"step {step}"
            raise type(error)(f"{asked} of {self.path}: {error}. {way_out(whole_steps(self))}")
        if not matching:
            raise StepNotFound(
                f"{self.path} has no step {'at all' if step is None else step}."
                f" {describe_steps(self.steps())}"
            )
        found = max(matching, key=lambda ref: ref.seq)
        if self.is_manager_root and self._item is None:
            items = sorted(
                {ref.manifest_path.parent.name for ref in matching if ref.step == found.step}
            )
            if len(items) > 1:
                raise StepNotFound(
                    f"step {found.step} of {self.path} has the items {', '.join(items)}; say which:"
                    " open(root, item=...) or --item"
                )
        return self.read(found.manifest_path)

    def _tagged(self, name: str) -> Manifest:
        """The manifest of the save that a tag means, whatever has been saved under its number
        since.
        """
        tag = tags.find(self.store.path, name)
        own = self.path / layout.CHECKPOINTS / layout.checkpoint_id(tag.seq) / "zarr.json"
        paths = (
            []
            if self.is_manager_root
            else [own, *(path for path in reversed(self.manifest_paths()) if path != own)]
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
        """What ``manifest`` gives, found without reading every other manifest; ``None`` where only
        reading them all can tell.

        In an engine root the directories' names are the sequence numbers, so the first that fits,
        from the newest down, is meant. Anything unusual on the way (a manifest that cannot be read
        or lies under another number) is left to ``manifest``.
        """
        for path in () if self.is_manager_root else reversed(self.manifest_paths()):
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (Damaged, UnsupportedFormat):
                return None
            if step is None or manifest.step == step:
                return manifest
        return None

    def read_all(self) -> tuple[list[StepRef], dict[Place, Damaged | UnsupportedFormat]]:
        """The checkpoints, ascending by sequence number, and what is wrong with the manifests that
        cannot be read.
        """
        found: list[StepRef] = []
        damaged: dict[Place, Damaged | UnsupportedFormat] = {}
        paths = self.manifest_paths()
        self._start_reads(paths)
        for path in paths:
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (Damaged, UnsupportedFormat) as error:
                damaged[path] = error
            else:
                found.append(StepRef(manifest.step, manifest.seq, path))
        for gone in self._manifests.keys() - set(paths):  # a run that saves often deletes as often
            if isinstance(gone, Path):
                self._manifests.pop(gone, None)
        return sorted(found, key=lambda ref: ref.seq), damaged

    def read(self, path: Place) -> Manifest:
        """A committed manifest; read and checked again only where its file has changed. Raises
        ``FileNotFoundError``, ``Damaged``.
        """
        if isinstance(path, ObjectPath):
            return documents.check_place(path, self._read_object(path), False)
        chunk_files.check_directory(path.parent)
        stamp = _stamp(path)
        cached = self._manifests.get(path)
        if cached is None or cached[0] != stamp:
            content = arrays.read_file(path, documents.MAX_DOCUMENT_BYTES)
            manifest = documents.decode_manifest(content, path)
            if (
                not self.is_manager_root or path.parents[2] == self.path
            ):  # else it lies elsewhere, as a handler of its own may have it
                documents.check_place(path, manifest, self.is_manager_root)
            cached = (stamp, manifest, documents.manifest_digest(content))
            self._manifests[path] = cached
        return cached[1]

    def _start_reads(self, paths: list[Place]) -> None:
        self._reads = {
            path: path.start_read(self._known(path))
            for path in paths
            if isinstance(path, ObjectPath)
        }

    def _known(self, path: ObjectPath) -> bytes:
        """The generation of a manifest that was read before; empty where none was."""
        cached = self._manifests.get(path)
        return cached[0] if cached is not None and isinstance(cached[0], bytes) else b""

    def _read_object(self, path: ObjectPath) -> Manifest:
        cached = self._manifests.get(path)
        content, generation = path.finish_read(
            self._reads.pop(path, None) or path.start_read(self._known(path))
        )
        if content is None and cached is None:
            content, generation = path.read()
        if generation == place.ABSENT:
            self._manifests.pop(path, None)
            raise FileNotFoundError(f"{path} does not exist")
        if cached is None or content is not None:
            content = content or b""
            cached = (
                generation,
                documents.decode_manifest(content, path),
                documents.manifest_digest(content),
            )
            self._manifests[path] = cached
        return cached[1]

    def brief(self, path: Place) -> Brief:
        """What collection wants of a manifest, kept where the manifest itself need not be. Raises
        as ``read``.
        """
        if isinstance(path, ObjectPath):
            return _brief(self.read(path))
        stamp = _stamp(path)
        known = self._briefs.get(path)
        if known is None or known[0] != stamp:
            cached = self._manifests.get(path)
            known = (
                stamp,
                _brief(
                    cached[1]
                    if cached is not None and cached[0] == stamp
                    else documents.read_manifest(path)
                ),
            )
            self._briefs[path] = known
        return known[1]

    def briefs(self) -> tuple[dict[Place, Brief], dict[Place, Damaged | UnsupportedFormat]]:
        """Every committed manifest in brief, and what is wrong with those that cannot be read."""
        found: dict[Place, Brief] = {}
        damaged: dict[Place, Damaged | UnsupportedFormat] = {}
        paths = self.manifest_paths()
        self._start_reads(paths)
        for path in paths:
            try:
                found[path] = self.brief(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (Damaged, UnsupportedFormat) as error:
                damaged[path] = error
        self._briefs = {path: self._briefs[path] for path in found if path in self._briefs}
        return found, damaged

    def digest_of(self, manifest: Manifest) -> str:
        """``manifest_digest`` of the file that ``manifest`` was read from. REQUIRES: this root has
        read it.
        """
        return next(digest for _, known, digest in self._manifests.values() if known is manifest)

    def require_digest(
        self, manifest: Manifest, expected: str | None, found: str | None = None
    ) -> None:
        """Refuse (``Damaged``) a step whose manifest is not the one that the caller has kept the
        digest of; ``None`` takes any. ``found``: the digest that it counts as, where that is not
        ``digest_of``.
        """
        if expected is None:
            return
        found = self.digest_of(manifest) if found is None else found
        if found != expected:
            raise Damaged(
                f"step {manifest.step} of {self.path} is not the one that is expected: its manifest"
                f" has digest {found}, expected is {expected}. Ask for the step that the digest was"
                " kept of"
            )

    def next_seq(self) -> int:
        """One more than any sequence number that this root has seen. On an object store: that was
        committed (``object_root.py``).
        """
        if not isinstance(self.store.path, Path):
            return (
                max((layout.seq_of(path.parent.name) for path in self.manifest_paths()), default=-1)
                + 1
            )
        taken = [layout.seq_of(name) for name in self.store.segment_ids()]
        taken += [
            layout.seq_of(e.name)
            for e in scan(self.store.path / layout.CHECKPOINTS)
            if layout.is_checkpoint_id(e.name)
        ]
        if self.is_manager_root:
            taken += [ref.seq for ref in self.checkpoints()]
        return max(taken, default=-1) + 1


def open_root(
    path: str | os.PathLike[str] | ObjectPath,
    item: str | None = None,
    threads: int | None = None,
    storage: ObjectStore | None = None,
) -> Root:
    """Open an engine root or a manager root. Raises ``NotACheckpointRoot`` with what was found
    instead, ``UnsupportedFormat``, ``Damaged`` where only the root's own ``zarr.json`` is lost, or
    ``StorageFailed`` where an object store does not answer. ``storage``: how that is reached.
    """
    directory = place.of(path, storage)
    if not isinstance(directory, ObjectPath) and not directory.is_dir():
        raise NotACheckpointRoot(
            f"{directory} {'is not a directory' if directory.exists() else 'does not exist'}"
        )
    for store in (directory, directory / MANAGER_STORE):
        if store != directory:
            chunk_files.check_directory(store)
        about = _group_attributes(store)
        if about is not None and about.get("format") == layout.FORMAT:
            check_root(store)
            return Root(directory, Store(store, threads), item)
    for store in (directory, directory / MANAGER_STORE):
        _refuse_lost(directory, Store(store, threads), item)
    raise NotACheckpointRoot(
        f"{directory} is not a deltacheck root: it has no zarr.json of ours, nor has"
        f" {MANAGER_STORE}/ in it"
    )


def _refuse_lost(root: Place, store: Store, item: str | None = None) -> None:
    """Raise ``Damaged`` where segments show that this was a root of ours."""
    segments = store.segment_ids()
    if segments:
        raise Damaged(
            f"{store.path / 'zarr.json'} is missing or damaged, but {len(segments)} segments lie"
            f" beside it. `deltacheck repair {root}` writes it again; steps that restore then:"
            f" {_listed(Root(root, store, item).steps()) or 'none'}",
            file=store.path / "zarr.json",
        )


def check_root(path: Place) -> None:
    """Refuse a root of another format, version or with unknown features."""
    about = _group_attributes(path)
    if about is None or about.get("format") != layout.FORMAT:
        raise NotACheckpointRoot(f"{path} is not a deltacheck root")
    documents.check_version(about, str(path / "zarr.json"))
    for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
        chunk_files.check_directory(path / name)


def create_manager_store(
    root: Path, threads: int | None = None, durability: Durability = Durability.POWER
) -> Store:
    """The store beside the steps of a ``CheckpointManager``."""
    path = root / MANAGER_STORE
    chunk_files.check_directory(path)
    path.mkdir(parents=True, exist_ok=True)
    os.close(
        os.open(
            path / _COMMIT_MARK,
            os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o666,
        )
    )
    return Store.create(path, threads, durability)


def describe_steps(steps: list[int]) -> str:
    """What a root has, in words short enough for an error."""
    return f"Steps that it has: {_listed(steps)}" if steps else "It has no committed step"


def _listed(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ..., {', '.join(map(str, steps[-3:]))}"


def whole_steps(
    root: Root,
    needs: Callable[[Manifest, Sequence[Segment]], bool] = lambda manifest, segments: False,
) -> list[int]:
    """The training steps whose segments are all there with the right tables, ascending; those that
    ``needs`` tells of are left out.
    """
    found = {}
    for (
        ref
    ) in root.checkpoints():  # of a step that was saved again the newest is meant, whole or not
        try:
            manifest = root.read(ref.manifest_path)
            found[ref.step] = not needs(manifest, open_segments(root, manifest))
        except (Damaged, FileNotFoundError):
            found[ref.step] = False
    return sorted(step for step, is_whole in found.items() if is_whole)


def open_segments(
    root: Root, manifest: Manifest, stored: Sequence[str] | None = None
) -> list[Segment]:
    """The segments of a step in order, or those that some of what it stores may need. Raises
    ``ChainBroken``, ``Damaged``, or ``StepNotFound`` where the step was deleted meanwhile.
    """
    try:
        return [
            root.store.segment(ref)
            for ref in (manifest.segments if stored is None else manifest.refs_of(stored))
        ]
    except ChainBroken as error:
        if not _is_there(root, manifest):
            raise StepNotFound(
                f"step {manifest.step} of {root.path} was deleted while it was being opened."
                f" {describe_steps(root.steps())}. A longer grace_seconds leaves more time"
            ) from error
        raise


def way_out(steps: list[int]) -> str:
    """What is left, for the end of an error."""
    return f"Steps that still restore: {_listed(steps)}" if steps else "No other step restores"


def _is_there(root: Root, manifest: Manifest) -> bool:
    """Whether a step that was read still exists, in the form that was read."""
    paths = root.manifest_paths()
    if not root.is_manager_root:
        return any(path.parent.name == layout.checkpoint_id(manifest.seq) for path in paths)
    return any(brief.nonce == manifest.nonce for brief in root.briefs()[0].values()) or bool(
        root.briefs()[1]
    )


def _age(manifest_path: Place) -> tuple[int, str]:
    """What sorts manifests by age while they cannot be read: the number in the name of the
    checkpoint's or the step's directory.
    """
    name = next((p.name for p in manifest_path.parents if p.name.lstrip("c").isdigit()), "")
    return int(name.lstrip("c") or 0), name


def _brief(manifest: Manifest) -> Brief:
    needed = frozenset(ref.id for ref in manifest.segments)
    return Brief(manifest.seq, manifest.step, manifest.nonce, manifest.metrics, needed)


def _stamp(path: Path) -> _Stamp:
    """What changes with a file. A time alone would not do: clocks are set back, and numbers of
    deleted steps come again.
    """
    status = os.lstat(
        path
    )  # of the file itself: a link that leads nowhere is damage, and not a deleted step
    return status.st_mtime_ns, status.st_ino, status.st_size


def _is_empty(path: Place) -> bool:
    """Whether a directory holds nothing but what the creation of a root begins with, which may have
    been cut short.
    """
    if isinstance(path, ObjectPath):
        groups = {
            f"{path.key}/{name}/zarr.json".lstrip("/")
            for name in (layout.SEGMENTS, layout.CHECKPOINTS)
        }
        control = f"{path.key}/{layout.CONTROL}/".lstrip("/")
        return all(key in groups or key.startswith(control) for key in path.keys())  # noqa: SIM118 - a path, not a mapping
    for entry in path.iterdir():
        if entry.name in (layout.SEGMENTS, layout.CHECKPOINTS):
            if (
                entry.is_symlink()
                or not entry.is_dir()
                or any(not _is_group_file(inner) for inner in entry.iterdir())
            ):
                return False
        elif entry.name not in (layout.CONTROL, _COMMIT_MARK) and not _is_group_file(entry):
            return False
    return True


def _is_group_file(path: Path) -> bool:
    """A group's ``zarr.json`` that says nothing of its own, as far as it has been written."""
    if path.name == f"zarr.json{arrays.UNFINISHED}":
        return True
    try:
        return path.name == "zarr.json" and arrays.read_file(path, 4096) in (
            arrays.group_json({}),
            b"",
        )
    except (OSError, Damaged):
        return False


def _is_manager_step(entry: os.DirEntry[str]) -> bool:
    return entry.name != MANAGER_STORE and ".orbax-checkpoint-tmp" not in entry.name


def _item_manifests(step: os.DirEntry[str], item: str | None) -> list[Path]:
    items = [e for e in scan(Path(step.path)) if item is None or e.name == item]
    # Whatever the file holds: a damaged manifest must be named, not overlooked. So must a link in
    # an item's place.
    found = {
        Path(e.path) / "zarr.json": e
        for e in items
        if e.is_symlink() or e.is_dir(follow_symlinks=False)
    }
    return [path for path, entry in found.items() if entry.is_symlink() or os.path.lexists(path)]


def _group_attributes(path: Place) -> dict[str, Any] | None:
    """Our attributes of a group, or ``None`` where it is not one of ours."""
    try:
        about = json.loads(arrays.read_file(path / "zarr.json", 1 << 20))["attributes"][
            layout.ATTRIBUTE
        ]
    except StorageFailed:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Damaged):
        return None
    return about if isinstance(about, dict) else None
