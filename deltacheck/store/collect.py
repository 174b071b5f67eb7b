"""Garbage collection: remove segments that no committed step needs, and never one that any needs.

The order is what makes it safe beside a writer: list segments first, *then* read the live manifests. A segment that appears
after the listing is not a candidate; a manifest that appears after it can only need segments that are protected, newer, or
needed by an older step too.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deltacheck.errors import Damaged, DeltacheckError, SaveFailed
from deltacheck.store import arrays, chunk_files, layout, schema
from deltacheck.store.durability import Durability
from deltacheck.store.root import Root, Store, read_manifest

_MARKS = "marks"  # group under control/: which segments were found unneeded, and when


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did, or would do. ``removed``, ``waiting``: segment ids; ``freed_bytes``: of the removed."""

    removed: tuple[str, ...]
    waiting: tuple[str, ...]
    freed_bytes: int


def delete_checkpoint(root: Root, seq: int) -> None:
    """Make a checkpoint of an engine root not exist; its segments stay until they are collected."""
    folder, durability = root.path / layout.CHECKPOINTS / layout.checkpoint_id(seq), root.store.durability
    (folder / "zarr.json").unlink(missing_ok=True)  # <- the step is gone from here on
    durability.sync_directory(folder)
    shutil.rmtree(folder)
    durability.sync_directory(folder.parent)


def collect(
    root: Root, *, grace_seconds: float, protected: Iterable[str] = (), dry_run: bool = False, writer_is_dead: bool = False
) -> Collected:
    """Remove segments that are not needed.

    ``grace_seconds``: how long a segment must have been known as unneeded before it goes, so that a restore that began before
    may end. Longer: safer for slow readers; shorter: disk space sooner. ``protected``: segments of saves under way.
    ``writer_is_dead``: also segments newer than the newest step may go (REQUIRES: the caller holds the lease, or no save is
    under way). ``dry_run`` changes nothing.

    Raises ``Damaged`` and removes nothing where any manifest cannot be read: what it needs is unknown.
    """
    candidates = set(root.store.segment_ids())
    newest, needed = -1, set(protected)
    others = set(root.other_manifest_paths())
    for path in [*root.manifest_paths(), *others]:
        try:
            manifest = read_manifest(path)
        except FileNotFoundError:
            continue  # deleted since it was listed
        except DeltacheckError as error:
            if path in others and layout.ATTRIBUTE.encode() not in arrays.read_file(path, schema.MAX_DOCUMENT_BYTES):
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
    remove = sorted(name for name in unneeded if now - since[name] >= grace_seconds)
    freed = sum(arrays.bytes_on_disk(root.store.path / layout.SEGMENTS / name) for name in remove)
    if not dry_run:
        if writer_is_dead:
            _remove_unfinished_checkpoints(root)
        if remove:
            _sync_deletions(root)
        for name in remove:
            _remove(root.store.path / layout.SEGMENTS / name, root.store.durability)
        _write_marks(root.store, {name: since[name] for name in unneeded - set(remove)}, marks)
    return Collected(tuple(remove), tuple(sorted(unneeded - set(remove))), freed)


def _remove_unfinished_checkpoints(root: Root) -> None:
    """Remove what a kill between a checkpoint's directory and its manifest left behind."""
    for folder in (root.store.path / layout.CHECKPOINTS).iterdir():
        if layout.is_checkpoint_id(folder.name) and not (folder / "zarr.json").exists():
            shutil.rmtree(folder)


def _sync_deletions(root: Root) -> None:
    """Make the deletion of steps durable before that of what they needed: a power cut must not bring one back without it.

    Who deleted them may not have done so: Orbax does not, and a process may be killed before it does.
    """
    folder = root.path if root.is_manager_root else root.path / layout.CHECKPOINTS
    steps = [entry for entry in folder.iterdir() if entry.is_dir() and entry != root.store.path]
    inner = [entry for step in steps for entry in step.iterdir() if entry.is_dir()] if root.is_manager_root else []
    for directory in (*inner, *steps):
        if not (directory / "zarr.json").exists():
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                root.store.durability.sync_directory(directory)
    root.store.durability.sync_directory(folder)


def _remove(path: Path, durability: Durability) -> None:
    if not layout.is_segment_id(path.name):
        raise SaveFailed(f"refusing to remove {path}: it is not a segment")
    (path / "zarr.json").unlink(
        missing_ok=True
    )  # without its table it is no segment: a crash from here on leaves garbage, not damage
    durability.sync_directory(path)
    shutil.rmtree(path)
    durability.sync_directory(path.parent)


def _read_marks(store: Path) -> dict[str, float]:
    try:
        content = arrays.read_file(store / layout.CONTROL / _MARKS / "zarr.json", schema.MAX_DOCUMENT_BYTES)
        marks = json.loads(content)["attributes"][layout.ATTRIBUTE]
        return {str(name): float(when) for name, when in marks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, Damaged):
        return {}  # marks are a courtesy to readers: without them every segment waits anew


def _write_marks(store: Store, marks: dict[str, float], before: dict[str, float]) -> None:
    if marks == before:
        return
    folder = store.path / layout.CONTROL / _MARKS
    chunk_files.check_directory(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays.replace_file(folder, "zarr.json", arrays.group_json({layout.ATTRIBUTE: marks}), store.durability)
