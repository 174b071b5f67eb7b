"""Copy a committed step from one root to another: the segments that it needs and the other lacks,
then
the manifest. Nothing is decoded.

A step is committed at the target as a save commits it: what it needs is durable there before its
manifest appears. So a transfer may be killed, or fail, at any moment; the target has the step whole
or does not have it, and the source is only read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from deltacheck.errors import Damaged
from deltacheck.store import documents, layout
from deltacheck.store.commit import commit
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, storage_of
from deltacheck.store.manifest import Manifest, SegmentRef
from deltacheck.store.root import Root, open_segments
from deltacheck.store.segment import document_digest


def transfer(
    source: Root,
    manifest: Manifest,
    target: Root,
    still_ours: Callable[[], None] | None = None,
    *,
    beat: Callable[[], None] = lambda: None,
    again: bool = False,
) -> int:
    """Commit a step of ``source``, a local engine root, at ``target``; returns the bytes written.
    The
    nonce stays: it is the same save.

    How durable it becomes follows from the target's own durability, and the manifest there says
    that. Files are compared by size, tables by digest; values are compared by whoever restores
    them. ``beat``: called whenever a file has been copied. ``again``: also a step that is older
    than the newest at the target.

    REQUIRES: the caller holds the target's lease. Raises what ``commit`` raises, ``StepNotFound``
    where the step was deleted meanwhile, ``Damaged`` or ``ChainBroken`` where a segment is not what
    was committed, ``OSError``; then nothing of the step is at the target.
    """
    pinned = open_segments(source, manifest)
    origin = storage.local(source.store.path, "a transfer")
    written, made = 0, list[Place]()
    try:
        for ref in manifest.segments:
            target_path = target.store.path / layout.SEGMENTS / ref.id
            if not _is_whole(target_path, ref, target.store.durability):
                made.append(target_path)
                written += _copy_segment(
                    origin / layout.SEGMENTS / ref.id,
                    target_path,
                    ref,
                    target.store.durability,
                    beat,
                )
    except BaseException:
        for path in made:
            storage.remove_tree(path, ignore_errors=True)
        raise
    del pinned
    return (
        written
        + commit(
            target.path, as_at(target, manifest), target.store.durability, still_ours, again=again
        ).stored_bytes
    )


def as_at(target: Root, manifest: Manifest) -> Manifest:
    """The manifest that a step of another root has at ``target``."""
    held: Manifest = msgspec.structs.replace(manifest, durability=target.store.durability.value)
    return held


def _is_whole(path: Place, ref: SegmentRef, durability: Durability) -> bool:
    """Whether a segment is there already: its table is written after all else of it is durable. A
    kill may have left it unsynced.
    """
    try:
        if (
            document_digest(arrays.read_file(path / "zarr.json", documents.MAX_DOCUMENT_BYTES))
            != ref.digest
        ):
            return False
    except (FileNotFoundError, Damaged):
        return False
    if storage_of(path).bytes_below() not in (None, ref.stored_bytes):
        return False
    durability.sync_directory(path)
    durability.sync_directory(path.parent)
    return True


def _copy_segment(
    source: Path, target: Place, ref: SegmentRef, durability: Durability, beat: Callable[[], None]
) -> int:
    """Copy a segment, its table last; returns its bytes."""
    if target.exists():
        storage.remove_tree(target)  # what a kill has left of it
    written = 0
    for folder, _, files in os.walk(source):
        inner = target
        for name in Path(folder).relative_to(source).parts:
            inner = inner / name
        inner.mkdir()
        for name in sorted(files):
            if inner != target or name != "zarr.json":
                written += copy_file(Path(folder) / name, inner / name, durability)
                beat()
    durability.sync_tree(target)
    table = arrays.read_file(source / "zarr.json", documents.MAX_DOCUMENT_BYTES)
    if document_digest(table) != ref.digest:
        raise Damaged(
            f"{source / 'zarr.json'} is not the file that was committed", file=source / "zarr.json"
        )
    written += len(table)
    if written != ref.stored_bytes:
        raise Damaged(
            f"segment {source} has {written} bytes, {ref.stored_bytes} were committed", file=source
        )
    arrays.create_file(target, "zarr.json", table, durability)
    durability.sync_directory(target)
    return written


def copy_file(source: Path, target: Place, durability: Durability) -> int:
    """Copy a regular file to a place where there is none, durably but for its name; returns its
    bytes.
    """
    return storage_of(target).copy_from(source, durability)
