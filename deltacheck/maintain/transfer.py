"""Copy a committed step from one root to another, without decoding it.

The segments that the step needs and the target lacks are copied first, then the manifest. A step is
committed at the target as a save commits it: everything that it needs is durable there before its
manifest appears. A transfer may therefore be killed or fail at any moment: the target has the step
whole, or does not have it. The source is only read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from deltacheck.errors import Damaged
from deltacheck.leaf.external_errors import walk
from deltacheck.store import documents, layout
from deltacheck.store.commit import commit
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, inside, remove_tree, storage_of
from deltacheck.store.manifest import Manifest, SegmentRef
from deltacheck.store.roots.root import Root, open_segments
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
    """Commit a step of a local engine root at another root.

    The nonce stays, because it is the same save. The durability of the copy follows from the
    target, and is recorded in the manifest there. Files are compared by size, tables by digest; a
    restore compares the values. The caller must hold the target's lease.

    Args:
        source: Root to copy from.
        manifest: Manifest of the step.
        target: Root to copy to.
        still_ours: Function that raises if the right to write has been lost.
        beat: Function that is called after each file, to show progress.
        again: If true, also a step that is older than the newest step of the target is committed.

    Returns:
        The number of bytes written.

    Raises:
        StepNotFound: If the step was deleted meanwhile.
        Damaged: If a segment is not the one that was committed.
        ChainBroken: The same, if a segment is missing.
        OSError: If the storage fails.
    """
    # Open segments are pinned: the source's collection leaves them until they are released.
    pinned = open_segments(source, manifest)
    origin = storage.local(source.store.path, "a transfer")
    written_bytes, new_segments = 0, list[Place]()
    try:
        for ref in manifest.segments:
            target_path = inside(target.store.path, target.store.path / layout.SEGMENTS / ref.id)
            if not _is_whole(target_path, ref, target.store.durability):
                # The path is noted before the copy begins, so that a copy that fails halfway is
                # removed too.
                new_segments.append(target_path)
                written_bytes += _copy_segment(
                    origin / layout.SEGMENTS / ref.id,
                    target_path,
                    ref,
                    target.store.durability,
                    beat,
                )
    except BaseException:
        # A memory or a disk that is full must not stay full of segments that no manifest names.
        for path in new_segments:
            remove_tree(target.store.path, path, ignore_errors=True)
        raise
    # The pins are needed for copying only. The source may collect these segments during the commit.
    del pinned
    receipt = commit(
        target.path, as_at(target, manifest), target.store.durability, still_ours, again=again
    )
    return written_bytes + receipt.stored_bytes


def as_at(target: Root, manifest: Manifest) -> Manifest:
    """Return the manifest that a step of another root has at ``target``."""
    copy: Manifest = msgspec.structs.replace(manifest, durability=target.store.durability.value)
    return copy


def _is_whole(path: Place, ref: SegmentRef, durability: Durability) -> bool:
    """Return whether a segment is already at the target.

    Its table is written after everything else is durable, so a table with the right digest proves
    the rest. The directory is synced again, because a kill may have come before its sync.
    """
    try:
        table = arrays.read_file(path / "zarr.json", documents.MAX_DOCUMENT_BYTES)
    except (FileNotFoundError, Damaged):
        return False
    if document_digest(table) != ref.digest:
        return False
    # ``None``: an object store, whose listing has no sizes.
    if storage_of(path).bytes_below() not in (None, ref.stored_bytes):
        return False
    durability.sync_directory(path)
    durability.sync_directory(path.parent)
    return True


def _copy_segment(
    source: Path, target: Place, ref: SegmentRef, durability: Durability, beat: Callable[[], None]
) -> int:
    """Copy a segment, its table last, and return the number of bytes."""
    if target.exists():
        # A killed transfer left it half copied.
        storage_of(target).remove_tree(ignore_errors=False)
    copied_bytes = 0
    for folder, _, files in walk(source):
        target_folder = target
        for name in Path(folder).relative_to(source).parts:
            target_folder = target_folder / name
        target_folder.mkdir()
        # The table of the segment comes last, after everything that it describes is durable.
        for name in sorted(files):
            if target_folder != target or name != "zarr.json":
                copied_bytes += copy_file(Path(folder) / name, target_folder / name, durability)
                beat()
    durability.sync_tree(target)
    table = arrays.read_file(source / "zarr.json", documents.MAX_DOCUMENT_BYTES)
    digest = document_digest(table)
    if digest != ref.digest:
        raise Damaged(
            f"{source / 'zarr.json'} has digest {digest}, but {ref.digest} was committed",
            file=source / "zarr.json",
        )
    copied_bytes += len(table)
    if copied_bytes != ref.stored_bytes:
        raise Damaged(
            f"segment {source} has {copied_bytes} bytes, but {ref.stored_bytes} were committed",
            file=source,
        )
    arrays.create_file(target, "zarr.json", table, durability)
    durability.sync_directory(target)
    return copied_bytes


def copy_file(source: Path, target: Place, durability: Durability) -> int:
    """Copy a regular file to a new place and return its size.

    The content is durable afterwards. The name is durable once the caller syncs the directory.
    """
    return storage_of(target).copy_from(source, durability)
