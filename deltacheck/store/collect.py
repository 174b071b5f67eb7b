"""Garbage collection: the removal of segments that no committed step needs.

The order makes it safe beside a writer: segments are listed first, and live manifests are read
*after* that. A segment that appears after the listing is no candidate. A manifest that appears
after it can only need segments that are protected, newer, or needed by an older step too. A segment
is removed if it was unneeded for a grace period and no reader has it open.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deltacheck.errors import Damaged, DeltacheckError, SaveFailed, StorageFailed
from deltacheck.store import documents, layout
from deltacheck.store.documents import read_manifest
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, inside, remove_tree, storage_of, subdirectories
from deltacheck.store.roots import tags
from deltacheck.store.roots.root import Root
from deltacheck.store.roots.store import Store

_MARKS = "marks"  # group under control/: which segments were found unneeded, and when


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a collection, or of a dry run.

    Attributes:
        removed: Ids of the removed segments.
        waiting: Ids of segments that were unneeded for less than the grace period.
        freed_bytes: Bytes of the removed segments; 0 on an object store, whose listing has no
            sizes.
        in_use: Ids of unneeded segments that a reader has open.
    """

    removed: tuple[str, ...]
    waiting: tuple[str, ...]
    freed_bytes: int
    in_use: tuple[str, ...] = ()


class _Mark(NamedTuple):
    """The time at which a segment was first found unneeded.

    ``seconds`` is on a clock that no user can set and that counts from a start of the machine,
    ``boot``.
    """

    boot: str
    seconds: float


def delete_checkpoint(root: Root, seq: int) -> None:
    """Delete a checkpoint of an engine root; its segments stay until they are collected."""
    folder = inside(root.path, root.path / layout.CHECKPOINTS / layout.checkpoint_id(seq))
    durability = root.store.durability
    # From here on the step does not exist.
    (folder / "zarr.json").unlink(missing_ok=True)
    durability.sync_directory(folder)
    remove_tree(root.path, folder)
    durability.sync_directory(folder.parent)


def collect(
    root: Root,
    *,
    grace_seconds: float,
    protected: Iterable[str] = (),
    dry_run: bool = False,
    writer_is_dead: bool = False,
    newest: int = -1,
    still_ours: Callable[[], None] | None = None,
) -> Collected:
    """Remove segments that are not needed.

    Args:
        root: The root.
        grace_seconds: Time for which a segment must have been known as unneeded. Longer: a reader
            that opened a step has more time to open its segments; shorter: space is free sooner.
        protected: Ids of segments that the next save builds on.
        dry_run: Change nothing.
        writer_is_dead: No save is under way, so segments newer than the newest step are candidates
            and unfinished files are removed. Ignored on an object store, where a segment is also
            removed only if a second collection finds it unneeded again.
        newest: A sequence number that was committed, if its step may be deleted by now. Segments up
            to it are of no save under way.
        still_ours: Raises an error if the right to write has been lost.

    Returns:
        The removed and the remaining unneeded segments.

    Raises:
        Damaged: A manifest cannot be read, so it is unknown which segments it needs. Nothing is
            removed.
        RootBusy: The right to write has been lost. The segments that are left stay.
        OSError: A segment could not be removed; every other one was.
    """
    # An object store's listing may lag behind: of what one does not show, nothing is concluded
    # before a second says the same, and a writer that is taken for dead may still be about to
    # commit what it wrote last.
    is_current = storage_of(root.store.path).listing_is_current
    writer_is_dead = writer_is_dead and is_current
    store = root.store.path
    for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
        inside(root.path, store / name)
    candidates = set(root.store.segment_ids())
    last, needed_ids, steps = _needed(root)
    if writer_is_dead and not dry_run and _remove_unfinished(root):
        last, needed_ids, steps = _needed(root)
    newest_seq = max(last, newest)
    unneeded = {
        name
        for name in candidates - needed_ids - set(protected)
        if writer_is_dead or layout.seq_of(name) <= newest_seq
    }
    # The time of day may jump while a reader reads. A machine that sleeps stops its readers, too.
    marks, now = _read_marks(root.store.path), _Mark(boot(), time.monotonic())
    first_marks, late = _timed(unneeded, marks, now, grace_seconds)
    due = sorted(late if is_current else late & marks.keys())
    waiting = tuple(sorted(unneeded - set(due)))
    sizes = {name: arrays.bytes_on_disk(root.store.path / layout.SEGMENTS / name) for name in due}
    if dry_run:
        return Collected(tuple(due), waiting, sum(sizes.values()))
    if due and is_current:
        _sync_deletions(root, steps)
    removed, in_use, failed = _remove_all(root, due, still_ours)
    _write_marks(root.store, {name: first_marks[name] for name in unneeded - set(removed)}, marks)
    if failed:
        raise failed[0]
    return Collected(tuple(removed), waiting, sum(map(sizes.__getitem__, removed)), tuple(in_use))


def _timed(
    unneeded: Iterable[str], marks: Mapping[str, _Mark], now: _Mark, grace_seconds: float
) -> tuple[dict[str, _Mark], set[str]]:
    """Return when each unneeded segment was first found so, and those that have waited so long.

    A mark of another start of the machine, or one of the future, says nothing: its segment waits
    anew.
    """
    before = {
        name: mark
        for name, mark in marks.items()
        if mark.boot == now.boot and mark.seconds <= now.seconds
    }
    first_marks = {name: before.get(name, now) for name in unneeded}
    late = {
        name for name, mark in first_marks.items() if now.seconds - mark.seconds >= grace_seconds
    }
    return first_marks, late


def _remove_all(
    root: Root, names: Iterable[str], still_ours: Callable[[], None] | None
) -> tuple[list[str], list[str], list[OSError]]:
    """Remove segments; return those removed, those that a reader has open, and the failures."""
    removed: list[str] = []
    in_use: list[str] = []
    failed: list[OSError] = []
    store = root.store.path
    for name in names:
        # Checked before each: another process may take the root over while this one hangs, and go
        # on from a segment that no step needs yet.
        if still_ours is not None:
            still_ours()
        try:
            segment = inside(store, store / layout.SEGMENTS / name)
            is_removed = _remove(segment, root.store.durability)
            (removed if is_removed else in_use).append(name)
        except OSError as error:
            # The segment stays a candidate, and the others are removed.
            failed.append(error)
    return removed, in_use, failed


def _needed(root: Root) -> tuple[int, set[str], Collection[Place]]:
    """Return the newest sequence number, the segments that are needed, and all manifests."""
    briefs, damaged = root.briefs()
    try:
        newest = max((brief.seq for brief in briefs.values()), default=-1)
        segment_ids = {name for brief in briefs.values() for name in brief.segments}
        for error in damaged.values():
            raise error
        for path in root.other_manifest_paths(briefs.keys()):
            try:
                segment_ids |= {ref.id for ref in read_manifest(path).segments}
            except FileNotFoundError:
                continue  # deleted since it was listed
            except Damaged:
                continue  # another format's zarr.json
    except StorageFailed:
        raise
    except DeltacheckError as error:
        raise Damaged(
            "nothing is collected while a manifest cannot be read, since what it needs is unknown:"
            f" {error}"
        ) from error
    return newest, segment_ids, briefs.keys()


def _remove_unfinished(root: Root) -> bool:
    """Remove leftovers of killed processes; return whether steps were among them.

    These are directories of steps and tags without their document, files that were being written,
    and steps whose compacted form exists.
    """
    for folder in subdirectories(root.store.path / layout.CHECKPOINTS):
        document = storage_of(folder / "zarr.json")
        if layout.is_checkpoint_id(folder.name) and not document.name_exists():
            remove_tree(root.store.path, folder)
    for folder in _document_folders(root.store.path):
        storage_of(folder).remove_unfinished()
    if root.is_manager_root:
        return False
    with tags.lock(root.store.path):
        # Not without the lock: another process may be writing a tag.
        folder = root.store.path / layout.CONTROL / layout.TAGS
        for directory in (folder, *subdirectories(folder)):
            storage_of(directory).remove_unfinished()
        tags.sweep(root.store.path)
        briefs = sorted(root.briefs()[0].values(), key=lambda brief: brief.seq)
        newest = {brief.nonce: brief.seq for brief in briefs}
        older = [brief.seq for brief in briefs if brief.seq < newest[brief.nonce]]
        for seq in older:
            delete_checkpoint(root, seq)
    return bool(older)


def _document_folders(store: Place) -> list[Place]:
    """Return the directories of a store that hold documents, but for segments and tags."""
    folders = [store, store / layout.SEGMENTS, store / layout.CHECKPOINTS]
    folders += subdirectories(store / layout.CHECKPOINTS)
    inner = [store / layout.CONTROL]
    while inner:
        folders += inner
        inner = [entry for folder in inner for entry in subdirectories(folder)]
        inner = [entry for entry in inner if entry != store / layout.CONTROL / layout.TAGS]
    return folders


def _sync_deletions(root: Root, steps: Collection[Place]) -> None:
    """Make the deletion of steps durable before that of their segments.

    Otherwise a power cut may bring back a step without its segments. The process that deleted the
    steps may not have synced: Orbax does not, and a process may be killed before it does.
    """
    for directory in root.unwritten_folders(steps):
        with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
            root.store.durability.sync_directory(directory)
    root.store.durability.sync_directory(
        root.path if root.is_manager_root else root.path / layout.CHECKPOINTS
    )


def _remove(path: Place, durability: Durability) -> bool:
    """Remove a segment; return ``False`` if a reader has it open."""
    if not layout.is_segment_id(path.name):
        raise SaveFailed(f"refusing to remove {path}: it is not a segment")
    try:
        if not storage_of(path / "zarr.json").unlink_unless_pinned():
            return False
        # Without its table it is no segment: a crash from here on leaves garbage, not damage.
        durability.sync_directory(path)
    except FileNotFoundError:
        pass  # another collector was faster
    storage_of(path).remove_tree_with_others()
    durability.sync_directory(path.parent)
    return True


def boot() -> str:
    """Return an identity of this start of the machine; empty if unknown."""
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
        # Marks only shorten the wait: without them every segment waits again.
        return {}


def _write_marks(store: Store, marks: dict[str, _Mark], before: dict[str, _Mark]) -> None:
    if marks == before:
        return
    folder = inside(store.path, store.path / layout.CONTROL / _MARKS)
    folder.mkdir(parents=True, exist_ok=True)
    arrays.replace_file(
        folder, "zarr.json", layout.group_json({layout.ATTRIBUTE: marks}), store.durability
    )
