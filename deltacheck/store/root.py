"""A root on disk: where its segments lie, which steps are committed, and the one act that commits a step.

Two arrangements share all code below this file. An *engine root* holds its manifests under ``checkpoints/``. A *manager root*
belongs to Orbax's ``CheckpointManager``: manifests lie in the step directories that Orbax commits by renaming, and our store is
the directory ``deltacheck`` beside them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import tensorstore as ts

from deltacheck.errors import (
    Damaged,
    DeltacheckError,
    NotACheckpointRoot,
    RootBusy,
    SaveFailed,
    StepNotFound,
    UnsupportedFormat,
)
from deltacheck.store import arrays, chunk_files, layout, schema
from deltacheck.store.arrays import Spent, StreamWriter
from deltacheck.store.effort import Effort
from deltacheck.store.schema import Manifest, SegmentRef
from deltacheck.store.segment import Segment, SegmentWriter, sync_directory

MANAGER_STORE = "deltacheck"  # our directory in a manager root
_CACHE_BYTES = 64 << 20  # of decoded zarr chunks while reading: packed leaves share chunks
_COMMIT_MARK = "commit_success.txt"  # keeps Orbax's clean-up of unfinished steps away from our store


class Store:
    """The segments of a root. ``threads``: of TensorStore's pools, ``None`` for its default."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self.path = path
        self.threads = threads
        # Those that someone still works with: steps share most of theirs, and nothing stays in memory because of this.
        self._open: WeakValueDictionary[SegmentRef, Segment] = WeakValueDictionary()

    @cached_property
    def _reading(self) -> ts.Context:
        return arrays.context(self.threads, _CACHE_BYTES)

    @cached_property
    def _writing(self) -> ts.Context:
        # No cache: a cached chunk would go on referring to the source memory after its commit, and show what training made of
        # it since.
        return arrays.context(self.threads, cache_bytes=0)

    @cached_property
    def _streams(self) -> StreamWriter:
        return StreamWriter(self._writing)

    @classmethod
    def create(cls, path: Path, threads: int | None = None) -> Store:
        """Make the directories of a store where they are not there yet, durably.

        Raises ``OSError`` where the path cannot be written, ``NotACheckpointRoot`` where it holds something else,
        ``UnsupportedFormat``.
        """
        if _group_attributes(path) is None:
            if path.is_dir() and any(entry.name not in (layout.CONTROL, _COMMIT_MARK) for entry in path.iterdir()):
                raise NotACheckpointRoot(f"{path} is not empty and not a deltacheck root; give an empty or new directory")
            missing = [p for p in (path, *path.parents) if not p.exists()]
            for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
                (path / name).mkdir(parents=True, exist_ok=True)
                arrays.create_file(path / name, "zarr.json", arrays.group_json({}))
                sync_directory(path / name)
            about = {"format": layout.FORMAT, "version": layout.VERSION, "must_understand": []}
            arrays.create_file(path, "zarr.json", arrays.group_json({layout.ATTRIBUTE: about}))
            for directory in (path, *(p.parent for p in missing)):
                sync_directory(directory)
        check_root(path)
        if not os.access(path / layout.SEGMENTS, os.W_OK):
            raise PermissionError(errno.EACCES, "the root is not writable", str(path))
        return cls(path, threads)

    def segment_ids(self) -> list[str]:
        """Every segment directory, committed or not, ascending."""
        return sorted(entry.name for entry in _entries(self.path / layout.SEGMENTS) if layout.is_segment_id(entry.name))

    def group_paths(self) -> list[Path]:
        """The groups that plain zarr passes through on its way to any segment or step."""
        return [self.path / name for name in (layout.SEGMENTS, layout.CHECKPOINTS)]

    def close(self) -> None:
        """End the threads that write. REQUIRES: no save is under way; a later one starts them again."""
        streams = self.__dict__.pop("_streams", None)
        if streams is not None:
            streams.close()

    def take_spent(self) -> Spent:
        """Where the time of the streams written since the last call went."""
        return self._streams.take_spent()

    def writer(self, seq: int, effort: Effort = Effort.NORMAL) -> SegmentWriter:
        return SegmentWriter(self.path, layout.segment_id(seq), self._writing, self._streams, effort)

    def segment(self, ref: SegmentRef) -> Segment:
        """Open a committed segment; ``ChainBroken`` where it is missing, ``Damaged`` where its table is not what was committed.

        Where the last caller's is still in use, that one, whose table is not read again.
        """
        opened = self._open.get(ref)
        if opened is None:
            opened = self._open[ref] = Segment(self.path, ref, self._reading)
        return opened


@dataclass(frozen=True, slots=True)
class StepRef:
    """A committed checkpoint: its training step, its sequence number and where its manifest lies."""

    step: int
    seq: int
    manifest_path: Path


class Root:
    """A root opened for reading; takes no lock and writes nothing. ``open_root`` makes one."""

    def __init__(self, path: Path, store: Store, item: str | None = None) -> None:
        self.path = path
        self.store = store
        self.is_manager_root = store.path != path
        self._item = item
        self._manifests: dict[Path, tuple[int, Manifest, str]] = {}  # when the file was written, what it says, its digest

    def afresh(self) -> Root:
        """The same root with nothing cached: what is read next comes from the disk."""
        return Root(self.path, Store(self.store.path, self.store.threads), self._item)

    def manifest_paths(self) -> list[Path]:
        """Every committed manifest file."""
        if not self.is_manager_root:
            folder = self.path / layout.CHECKPOINTS
            # A link or a file in a checkpoint's place is damage: no step may go missing without a word.
            ours = [entry for entry in _entries(folder, every=True) if layout.is_checkpoint_id(entry.name)]
            found = {folder / entry.name / "zarr.json": entry.is_dir(follow_symlinks=False) for entry in ours}
            return [path for path, is_plain in found.items() if not is_plain or os.path.lexists(path)]
        steps = [entry for entry in _entries(self.path, every=True) if _is_manager_step(entry)]
        strange = [Path(e.path) / "zarr.json" for e in steps if e.is_symlink() and e.name[-1:].isdigit()]
        plain = [entry for entry in steps if entry.is_dir(follow_symlinks=False)]
        return sorted([*(path for entry in plain for path in _item_manifests(entry, self._item)), *strange])

    def other_manifest_paths(self) -> list[Path]:
        """Manifests of a manager root that belong to no committed step: of saves under way or killed, of steps that Orbax has
        set aside (``todelete_subdir``, ``_SNAPSHOTS``). What they need may still be wanted.
        """
        if not self.is_manager_root:
            return []
        own = set(self.manifest_paths())
        folders = [Path(e.path) for e in _entries(self.path) if e.name != MANAGER_STORE]
        inner = [Path(e.path) for folder in folders for e in _entries(folder)]
        innermost = [Path(e.path) for folder in inner for e in _entries(folder)]
        return sorted(p for f in (*inner, *innermost) if (p := f / "zarr.json").is_file() and p not in own)

    def checkpoints(self) -> list[StepRef]:
        """Every committed checkpoint whose manifest is whole, ascending by sequence number."""
        return self.read_all()[0]  # verify names the damaged ones; here they are simply not steps that can be restored

    def steps(self) -> list[int]:
        """The training steps that are committed, ascending."""
        return sorted({ref.step for ref in self.checkpoints()})

    def manifest(self, step: int | None = None) -> Manifest:
        """The manifest of a training step (its newest, where a resumed run repeated the step), or of the newest checkpoint.

        Raises ``StepNotFound``, naming what there is, and ``Damaged`` where a manifest that cannot be read may be the one that
        is meant: falling back to an older step is the caller's choice.
        """
        newest = self._newest(step)
        if newest is not None:
            return newest
        checkpoints, damaged = self.read_all()
        matching = [ref for ref in checkpoints if step is None or ref.step == step]
        # A damaged manifest may be the step that is meant: any of them where none matches, a newer one where the newest is asked for.
        suspects = [p for p in damaged if not matching or (step is None and _age(p) > _age(checkpoints[-1].manifest_path))]
        if suspects:
            way_out = (
                f"Newest step that can be read: {checkpoints[-1].step}; ask for it by number"
                if checkpoints
                else "No other step is left"
            )
            error = damaged[max(suspects, key=_age)]
            raise type(error)(f"{error}. {way_out}")
        if not matching:
            raise StepNotFound(f"{self.path} has no step {'at all' if step is None else step}. {describe_steps(self.steps())}")
        found = max(matching, key=lambda ref: ref.seq)
        if self.is_manager_root and self._item is None:
            items = sorted({ref.manifest_path.parent.name for ref in matching if ref.step == found.step})
            if len(items) > 1:
                raise StepNotFound(
                    f"step {found.step} of {self.path} has the items {', '.join(items)}; say which: open(root, item=...) or --item"
                )
        return self.read(found.manifest_path)

    def _newest(self, step: int | None) -> Manifest | None:
        """What ``manifest`` gives, found without reading every other manifest; ``None`` where only reading them all can tell.

        In an engine root the directories' names are the sequence numbers, so the first that fits, from the newest down, is meant. Anything
        unusual on the way (a manifest that cannot be read or lies under another number) is left to ``manifest``.
        """
        for path in () if self.is_manager_root else reversed(self.manifest_paths()):
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (Damaged, UnsupportedFormat):
                return None
            if layout.checkpoint_id(manifest.seq) != path.parent.name:
                return None
            if step is None or manifest.step == step:
                return manifest
        return None

    def read_all(self) -> tuple[list[StepRef], dict[Path, Damaged | UnsupportedFormat]]:
        """The checkpoints, ascending by sequence number, and what is wrong with the manifests that cannot be read."""
        found: list[StepRef] = []
        damaged: dict[Path, Damaged | UnsupportedFormat] = {}
        for path in self.manifest_paths():
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (Damaged, UnsupportedFormat) as error:
                damaged[path] = error
            else:
                found.append(StepRef(manifest.step, manifest.seq, path))
        return sorted(found, key=lambda ref: ref.seq), damaged

    def read(self, path: Path) -> Manifest:
        """A committed manifest; read and checked again only where its file has changed. Raises ``FileNotFoundError``, ``Damaged``."""
        chunk_files.check_directory(path.parent)
        stamp = os.lstat(path).st_mtime_ns  # of the file itself: a link that leads nowhere is damage, and not a deleted step
        cached = self._manifests.get(path)
        if cached is None or cached[0] != stamp:
            content = arrays.read_file(path, schema.MAX_DOCUMENT_BYTES)
            manifest = schema.from_zarr_json(content, Manifest, str(path))
            if not self.is_manager_root and layout.checkpoint_id(manifest.seq) != path.parent.name:
                raise Damaged(
                    f"{path} is the manifest of checkpoint {layout.checkpoint_id(manifest.seq)}, put in another's place"
                )
            cached = (stamp, manifest, manifest_digest(content))
            self._manifests[path] = cached
        return cached[1]

    def digest_of(self, manifest: Manifest) -> str:
        """``manifest_digest`` of the file that ``manifest`` was read from. REQUIRES: this root has read it."""
        return next(digest for _, known, digest in self._manifests.values() if known is manifest)

    def require_digest(self, manifest: Manifest, expected: str | None) -> None:
        """Refuse (``Damaged``) a step whose manifest is not the one that the caller has kept the digest of; ``None`` takes any."""
        if expected is not None and self.digest_of(manifest) != expected:
            raise Damaged(
                f"step {manifest.step} of {self.path} is not the one that is expected: its manifest has digest "
                f"{self.digest_of(manifest)}, expected is {expected}. Ask for the step that the digest was kept of"
            )

    def next_seq(self) -> int:
        """One more than any sequence number that this root has seen."""
        taken = [layout.seq_of(name) for name in self.store.segment_ids()]
        taken += [
            layout.seq_of(e.name)
            for e in _entries(self.store.path / layout.CHECKPOINTS, every=True)
            if layout.is_checkpoint_id(e.name)
        ]
        if self.is_manager_root:
            taken += [ref.seq for ref in self.checkpoints()]
        return max(taken, default=-1) + 1


def open_root(path: str | os.PathLike[str], item: str | None = None, threads: int | None = None) -> Root:
    """Open an engine root or a manager root. Raises ``NotACheckpointRoot`` with what was found instead, or ``UnsupportedFormat``."""
    directory = Path(path)
    if not directory.is_dir():
        raise NotACheckpointRoot(f"{directory} {'is not a directory' if directory.exists() else 'does not exist'}")
    for store in (directory, directory / MANAGER_STORE):
        if store != directory:
            chunk_files.check_directory(store)
        if _group_attributes(store) is not None:
            check_root(store)
            return Root(directory, Store(store, threads), item)
    raise NotACheckpointRoot(
        f"{directory} is not a deltacheck root: it has no zarr.json of ours, nor has {MANAGER_STORE}/ in it"
    )


def check_root(path: Path) -> None:
    """Refuse a root of another format, version or with unknown features."""
    about = _group_attributes(path)
    if about is None:
        raise NotACheckpointRoot(f"{path} is not a deltacheck root")
    schema.check_version(about, str(path / "zarr.json"))
    for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
        chunk_files.check_directory(path / name)


def create_manager_store(root: Path, threads: int | None = None) -> Store:
    """The store beside the steps of a ``CheckpointManager``."""
    path = root / MANAGER_STORE
    chunk_files.check_directory(path)
    path.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path / _COMMIT_MARK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
    return Store.create(path, threads)


def manifest_digest(content: bytes) -> str:
    """What a caller may keep of a step, elsewhere, to know it again: ``sha256:`` and the SHA-256 of the manifest's file, hexadecimal.

    The manifest is bound by SHA-256, what it names by xxh3_128, which finds damage and mix-ups, but not a forger who makes other bytes
    with the same xxh3.
    """
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def read_manifest(path: Path) -> Manifest:
    """Read and check one manifest file."""
    return schema.from_zarr_json(arrays.read_file(path, schema.MAX_DOCUMENT_BYTES), Manifest, str(path))


def manifest_content(manifest: Manifest) -> bytes:
    """The manifest's file content."""
    return arrays.group_json(schema.to_attributes(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's file content, decoded again and compared before anyone writes it."""
    content = manifest_content(manifest)
    if schema.from_zarr_json(content, Manifest, "the manifest about to be written") != manifest:
        raise SaveFailed(f"step {manifest.step}: its manifest does not decode to itself; this is a defect, please report it")
    return content


def commit(root: Path, manifest: Manifest) -> int:
    """Make the step exist; returns the bytes written. REQUIRES: every segment that the manifest names is durable.

    Raises ``RootBusy`` where another writer has taken the sequence number.
    """
    folder = root / layout.CHECKPOINTS / layout.checkpoint_id(manifest.seq)
    content = encode_manifest(manifest)
    folder.mkdir(exist_ok=True)
    if not arrays.create_file(folder, "zarr.json", content):  # <- the step exists from here on
        raise RootBusy(
            f"checkpoint {folder.name} of {root} was committed by {read_manifest(folder / 'zarr.json').writer}: two writers"
        )
    sync_directory(folder)
    sync_directory(folder.parent)
    return len(content)


def describe_steps(steps: list[int]) -> str:
    """What a root has, in words short enough for an error."""
    if not steps:
        return "It has no committed step"
    shown = (
        ", ".join(map(str, steps))
        if len(steps) <= 8
        else f"{', '.join(map(str, steps[:3]))}, ..., {', '.join(map(str, steps[-3:]))}"
    )
    return f"Steps that it has: {shown}"


def newest_whole_step(root: Root, before: int | None = None) -> int | None:
    """The newest training step whose segments are all there with the right tables; ``before``: a sequence number to stay under."""
    for ref in reversed(root.checkpoints()):
        if before is not None and ref.seq >= before:
            continue
        try:
            for segment in root.read(ref.manifest_path).segments:
                root.store.segment(segment)
        except DeltacheckError:
            continue
        return ref.step
    return None


def open_segments(root: Root, manifest: Manifest) -> list[Segment]:
    """The segments of a step in order; a missing one is a ``ChainBroken`` that names the step and the way out."""
    try:
        return [root.store.segment(ref) for ref in manifest.segments]
    except Damaged as error:
        other = newest_whole_step(root, before=manifest.seq)
        way_out = f"Newest earlier step that is whole: {other}" if other is not None else "No earlier step is whole"
        raise type(error)(f"step {manifest.step} of {root.path}: {error}. {way_out}") from error


def _age(manifest_path: Path) -> tuple[int, str]:
    """What sorts manifests by age while they cannot be read: the number in the name of the checkpoint's or the step's directory."""
    name = next((p.name for p in manifest_path.parents if p.name.lstrip("c").isdigit()), "")
    return int(name.lstrip("c") or 0), name


def _entries(path: Path, every: bool = False) -> list[os.DirEntry[str]]:
    """Directories in ``path`` (no links), or nothing where it is not there. ``every``: what is not a directory, too."""
    try:
        with os.scandir(path) as found:
            return sorted((e for e in found if every or e.is_dir(follow_symlinks=False)), key=lambda e: e.name)
    except FileNotFoundError:
        return []


def _is_manager_step(entry: os.DirEntry[str]) -> bool:
    return entry.name != MANAGER_STORE and ".orbax-checkpoint-tmp" not in entry.name


def _item_manifests(step: os.DirEntry[str], item: str | None) -> list[Path]:
    items = [e for e in _entries(Path(step.path), every=True) if item is None or e.name == item]
    # Whatever the file holds: a damaged manifest must be named, not overlooked. So must a link in an item's place.
    found = {Path(e.path) / "zarr.json": e for e in items if e.is_symlink() or e.is_dir(follow_symlinks=False)}
    return [path for path, entry in found.items() if entry.is_symlink() or os.path.lexists(path)]


def _group_attributes(path: Path) -> dict[str, Any] | None:
    """Our attributes of a group, or ``None`` where it is not one of ours."""
    try:
        about = json.loads(arrays.read_file(path / "zarr.json", 1 << 20))["attributes"][layout.ATTRIBUTE]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Damaged):
        return None
    return about if isinstance(about, dict) else None
