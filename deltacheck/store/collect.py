"""Garbage collection: remove segments that no committed step needs, and never one that any needs.

The order is what makes it safe beside a writer: list segments first, *then* read the live manifests. A segment that appears
after the listing is not a candidate; a manifest that appears after it can only need segments that are protected, newer, or
needed by an older step too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from deltacheck.errors import Damaged, DeltacheckError, SaveFailed, StorageFailed
from deltacheck.store import arrays, layout
from deltacheck.store.place import ObjectPath, Place, remove_tree, subdirectories
from deltacheck.store.root import Root, read_manifest
from deltacheck.store.segment import sync_directory

_MARKS = "marks"  # group under control/: which segments were found unneeded, and when


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did, or would do. ``removed``, ``waiting``: segment ids; ``freed_bytes``: of the removed, 0 on an object
    store, whose listing has no sizes.
    """

    removed: tuple[str, ...]
    waiting: tuple[str, ...]
    freed_bytes: int


def delete_checkpoint(root: Root, seq: int) -> None:
    """Make a checkpoint of an engine root not exist; its segments stay until they are collected."""
    folder = root.path / layout.CHECKPOINTS / layout.checkpoint_id(seq)
    (folder / "zarr.json").unlink(missing_ok=True)  # <- the step is gone from here on
    sync_directory(folder)
    remove_tree(folder)
    sync_directory(folder.parent)


def collect(
    root: Root, *, grace_seconds: float, protected: Iterable[str] = (), dry_run: bool = False, writer_is_dead: bool = False
) -> Collected:
    """Remove segments that are not needed.

    ``grace_seconds``: how long a segment must have been known as unneeded before it goes, so that a restore that began before
    may end. Longer: safer for slow readers; shorter: disk space sooner. ``protected``: segments of saves under way.
    ``writer_is_dead``: also segments newer than the newest step may go (REQUIRES: the caller holds the lease, or no save is
    under way); never on an object store, where a segment also goes only when a second collection finds it unneeded again.
    ``dry_run`` changes nothing.

    Raises ``Damaged`` and removes nothing where any manifest cannot be read: what it needs is unknown.
    """
    # An object store's listing may lag behind: of what one does not show, nothing is concluded before a second says the same, and a
    # writer that is taken for dead may still be about to commit what it wrote last.
    is_local = not isinstance(root.store.path, ObjectPath)
    writer_is_dead = writer_is_dead and is_local
    candidates = set(root.store.segment_ids())
    newest, needed = -1, set(protected)
    others = set(root.other_manifest_paths())
    for path in [*root.manifest_paths(), *others]:
        try:
            manifest = read_manifest(path)
        except FileNotFoundError:
            continue  # deleted since it was listed
        except StorageFailed:
            raise
        except DeltacheckError as error:
            if path in others and layout.ATTRIBUTE.encode() not in path.read_bytes():
                continue  # another format's zarr.json
            raise Damaged(
                f"nothing is collected while a manifest cannot be read, since what it needs is unknown: {error}"
            ) from error
        newest = newest if path in others else max(newest, manifest.seq)
        needed |= {ref.id for ref in manifest.segments}
    unneeded = {name for name in candidates - needed if writer_is_dead or layout.seq_of(name) <= newest}
    marks = _read_marks(root.store.path)
    now = time.time()
    since = {name: min(marks.get(name, now), now) for name in unneeded}
    remove = sorted(name for name in unneeded if now - since[name] >= grace_seconds and (is_local or name in marks))
    freed = sum(arrays.bytes_on_disk(root.store.path / layout.SEGMENTS / name) for name in remove)
    if not dry_run:
        if writer_is_dead:
            _remove_unfinished_checkpoints(root)
        for name in remove:
            _remove(root.store.path / layout.SEGMENTS / name)
        _write_marks(root.store.path, {name: since[name] for name in unneeded - set(remove)}, marks)
    return Collected(tuple(remove), tuple(sorted(unneeded - set(remove))), freed)


def _remove_unfinished_checkpoints(root: Root) -> None:
    """Remove what a kill between a checkpoint's directory and its manifest left behind."""
    for folder in subdirectories(root.store.path / layout.CHECKPOINTS):
        if layout.is_checkpoint_id(folder.name) and not (folder / "zarr.json").exists():
            remove_tree(folder)


def _remove(path: Place) -> None:
    if not layout.is_segment_id(path.name):
        raise SaveFailed(f"refusing to remove {path}: it is not a segment")
    (path / "zarr.json").unlink(
        missing_ok=True
    )  # without its table it is no segment: a crash from here on leaves garbage, not damage
    sync_directory(path)
    remove_tree(path)
    sync_directory(path.parent)


def _read_marks(store: Place) -> dict[str, float]:
    try:
        marks = json.loads((store / layout.CONTROL / _MARKS / "zarr.json").read_bytes())["attributes"][layout.ATTRIBUTE]
        return {str(name): float(when) for name, when in marks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # marks are a courtesy to readers: without them every segment waits anew


def _write_marks(store: Place, marks: dict[str, float], before: dict[str, float]) -> None:
    if marks == before:
        return
    folder = store / layout.CONTROL / _MARKS
    folder.mkdir(parents=True, exist_ok=True)
    arrays.replace_file(folder, "zarr.json", arrays.group_json({layout.ATTRIBUTE: marks}))
