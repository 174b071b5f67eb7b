"""Garbage collection: remove segments that no committed step needs, and never one that any needs.

The order is what makes it safe beside a writer: list segments first, *then* read the live
manifests. A segment that appears after the listing is not a candidate; a manifest that appears
after it can only need segments that are protected, newer, or needed by an older step too. What goes
is what has been unneeded for a grace period and no reader has open.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deltacheck.errors import Damaged, DeltacheckError, SaveFailed, StorageFailed
from deltacheck.store import documents, layout, tags
from deltacheck.store.documents import read_manifest
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, remove_tree, storage_of, subdirectories
from deltacheck.store.root import Root, Store

_MARKS = "marks"  # group under control/: which segments were found unneeded, and when


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did, or would do. ``removed``, ``waiting``, ``in_use``: segment ids;
    ``freed_bytes``: of the removed, 0 on an object store, whose listing has no sizes.

    ``waiting``: unneeded for less than the grace period. ``in_use``: unneeded, but a reader has
    them open.
    """

    removed: tuple[str, ...]
    waiting: tuple[str, ...]
    freed_bytes: int
    in_use: tuple[str, ...] = ()


class _Mark(NamedTuple):
    """When a segment was first found unneeded: seconds of a clock that nobody can set, which counts
    from a start of the machine.
    """

    boot: str
    seconds: float


def delete_checkpoint(root: Root, seq: int) -> None:
    """Make a checkpoint of an engine root not exist; its segments stay until they are collected."""
    folder, durability = (
        root.path / layout.CHECKPOINTS / layout.checkpoint_id(seq),
        root.store.durability,
    )
    (folder / "zarr.json").unlink(missing_ok=True)  # <- the step is gone from here on
    durability.sync_directory(folder)
    remove_tree(folder)
    durability.sync_directory(folder.parent)


def collect(
    root: Root,
    *,
    grace_seconds: float,
    protected: Iterable[str] = (),
    dry_run: bool = False,
    writer_is_dead: bool = False,
    newest: int = -1,
) -> Collected:
    """Remove segments that are not needed.

    ``grace_seconds``: how long a segment must have been known as unneeded before it goes, so that a
    restore that has read its manifest may open what it needs; what it has open stays as long as it
    reads (``pins.py``). Longer: safer for readers on file systems without locks, and on object
    stores; shorter: disk space sooner. ``protected``: segments of saves under way.
    ``writer_is_dead``: also segments newer than the newest step may go, and what kills have left in
    directories of steps and tags (REQUIRES: the caller holds the lease, and no save is under way);
    never on an object store, where a segment also goes only when a second collection finds it
    unneeded again. ``dry_run`` changes nothing. ``newest``: of a sequence number that was
    committed, where that step may be deleted by now: segments up to it are of no save under way.

    Raises ``Damaged`` and removes nothing where any manifest cannot be read: what it needs is
    unknown. ``OSError`` where some segment could not be removed; every other one was.
    """
    # An object store's listing may lag behind: of what one does not show, nothing is concluded
    # before a second says the same, and a writer that is taken for dead may still be about to
    # commit what it wrote last.
    is_current = storage_of(root.store.path).listing_is_current
    writer_is_dead = writer_is_dead and is_current
    candidates = set(root.store.segment_ids())
    last, needed = _needed(root)
    if writer_is_dead and not dry_run and _remove_unfinished(root):
        last, needed = _needed(root)
    until = max(last, newest)
    unneeded = {
        name
        for name in candidates - needed - set(protected)
        if writer_is_dead or layout.seq_of(name) <= until
    }
    marks, now = _read_marks(root.store.path), _now()
    # A mark of another start of the machine, or one of the future, says nothing: its segment waits
    # anew.
    since = {
        name: (
            mark
            if (mark := marks.get(name)) and mark.boot == now.boot and mark.seconds <= now.seconds
            else now
        )
        for name in unneeded
    }
    late = {name for name in unneeded if now.seconds - since[name].seconds >= grace_seconds}
    due = sorted(name for name in late if is_current or name in marks)
    waiting = tuple(sorted(unneeded - set(due)))
    sizes = {name: arrays.bytes_on_disk(root.store.path / layout.SEGMENTS / name) for name in due}
    if dry_run:
        return Collected(tuple(due), waiting, sum(sizes.values()))
    if due and is_current:
        _sync_deletions(root)
    removed: list[str] = []
    in_use: list[str] = []
    failed: list[OSError] = []
    for name in due:
        try:
            gone = _remove(root.store.path / layout.SEGMENTS / name, root.store.durability)
            (removed if gone else in_use).append(name)
        except OSError as error:  # the others need not wait for this one, which stays a candidate
            failed.append(error)
    _write_marks(root.store, {name: since[name] for name in unneeded - set(removed)}, marks)
    if failed:
        raise failed[0]
    return Collected(tuple(removed), waiting, sum(sizes[name] for name in removed), tuple(in_use))


def _needed(root: Root) -> tuple[int, set[str]]:
    """The newest committed sequence number, and every segment that any manifest needs."""
    briefs, damaged = root.briefs()
    try:
        newest = max((brief.seq for brief in briefs.values()), default=-1)
        needed = {name for brief in briefs.values() for name in brief.segments}
        for error in damaged.values():
            raise error
        for path in root.other_manifest_paths():
            try:
                needed |= {ref.id for ref in read_manifest(path).segments}
            except FileNotFoundError:
                continue  # deleted since it was listed
            except StorageFailed:
                raise
            except DeltacheckError:
                if layout.ATTRIBUTE.encode() in arrays.read_file(
                    path, documents.MAX_DOCUMENT_BYTES
                ):
                    raise
                # else: another format's zarr.json
    except StorageFailed:
        raise
    except DeltacheckError as error:
        raise Damaged(
            "nothing is collected while a manifest cannot be read, since what it needs is unknown:"
            f" {error}"
        ) from error
    return newest, needed


def _remove_unfinished(root: Root) -> bool:
    """Remove what kills left behind: directories of steps and tags without their document, and
    steps
    whose compacted form is there; whether there were any of the last kind, which need segments.
    """
    for folder in subdirectories(root.store.path / layout.CHECKPOINTS):
        if layout.is_checkpoint_id(folder.name) and not (folder / "zarr.json").exists():
            remove_tree(folder)
    for folder in _document_folders(root.store.path):
        storage_of(folder).remove_unfinished()
    if root.is_manager_root:
        return False
    with tags.lock(root.store.path):
        tags.sweep(root.store.path)
        briefs = sorted(root.briefs()[0].values(), key=lambda brief: brief.seq)
        newest = {brief.nonce: brief.seq for brief in briefs}
        older = [brief.seq for brief in briefs if brief.seq < newest[brief.nonce]]
        for seq in older:
            delete_checkpoint(root, seq)
    return bool(older)


def _document_folders(store: Place) -> list[Place]:
    """The local directories of a store in which documents of its own lie, those of segments left
    out.
    """
    found = [store, store / layout.SEGMENTS, store / layout.CHECKPOINTS]
    found += subdirectories(store / layout.CHECKPOINTS)
    inner = [store / layout.CONTROL]
    while inner:
        found += inner
        inner = [entry for folder in inner for entry in subdirectories(folder)]
    return found


def _sync_deletions(root: Root) -> None:
    """Make the deletion of steps durable before that of what they needed: a power cut must not
    bring
    one back without it.

    Who deleted them may not have done so: Orbax does not, and a process may be killed before it
    does.
    """
    folder = root.path if root.is_manager_root else root.path / layout.CHECKPOINTS
    steps = [entry for entry in subdirectories(folder) if entry != root.store.path]
    inner = (
        [entry for step in steps for entry in subdirectories(step)] if root.is_manager_root else []
    )
    for directory in (*inner, *steps):
        if not (directory / "zarr.json").exists():
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                root.store.durability.sync_directory(directory)
    root.store.durability.sync_directory(folder)


def _remove(path: Place, durability: Durability) -> bool:
    """Remove a segment; ``False`` where a reader has it open."""
    if not layout.is_segment_id(path.name):
        raise SaveFailed(f"refusing to remove {path}: it is not a segment")
    try:
        if not storage_of(path / "zarr.json").unlink_unless_pinned():
            return False
        durability.sync_directory(
            path
        )  # without its table it is no segment: a crash from here on leaves garbage, not damage
    except FileNotFoundError:
        pass  # another collector was faster
    storage_of(path).remove_tree_with_others()
    durability.sync_directory(path.parent)
    return True


def _now() -> _Mark:
    # Not the time of day, which may jump while a reader reads; nor does a machine that sleeps let
    # its readers go on.
    return _Mark(boot(), time.monotonic())


def boot() -> str:
    """What tells a start of the machine from the one before, where it can be told; else empty."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_marks(store: Place) -> dict[str, _Mark]:
    try:
        content = arrays.read_file(
            store / layout.CONTROL / _MARKS / "zarr.json", documents.MAX_DOCUMENT_BYTES
        )
        marks = json.loads(content)["attributes"][layout.ATTRIBUTE]
        return {
            str(name): _Mark(str(boot), float(seconds)) for name, (boot, seconds) in marks.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, Damaged):
        return {}  # marks are a courtesy to readers: without them every segment waits anew


def _write_marks(store: Store, marks: dict[str, _Mark], before: dict[str, _Mark]) -> None:
    if marks == before:
        return
    folder = store.path / layout.CONTROL / _MARKS
    storage_of(folder).check_directory()
    folder.mkdir(parents=True, exist_ok=True)
    arrays.replace_file(
        folder, "zarr.json", layout.group_json({layout.ATTRIBUTE: marks}), store.durability
    )
