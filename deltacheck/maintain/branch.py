"""Make a new root that begins with a step of another root.

The new root shares the files of the first, and stays whole if the first is changed or deleted. If
one of them is in an object store, it gets copies.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deltacheck.errors import NotACheckpointRoot
from deltacheck.leaf.external_errors import walk
from deltacheck.maintain.transfer import copy_file
from deltacheck.restore.export import named_writes, new_folder
from deltacheck.store import documents, layout
from deltacheck.store.commit import commit
from deltacheck.store.files import chunk_files, storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.object_path import ObjectPath
from deltacheck.store.files.storage import Place, inside, remove_tree, storage_of, take_lease
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import create_store
from deltacheck.store.roots.root import Root, open_segments
from deltacheck.store.segment import Segment

# Errors of os.link: another file system, one without links, or too many links to a file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES)
_AT_ONCE = 8  # files of at most 32 MiB, on their way through memory


@dataclass(frozen=True, slots=True)
class Branched:
    """The result of ``branch``. The field names are keys of ``deltacheck branch --json``.

    Attributes:
        step: Training step.
        segments: Number of segments of the new root.
        linked_bytes: Size of the files that both roots share.
        copied_bytes: Size of the files that were copied.
    """

    step: int
    segments: int
    linked_bytes: int
    copied_bytes: int


def branch(
    root: Root, step: int | str | None, to: str | os.PathLike[str], *, copy: bool = False
) -> Branched:
    """Make an engine root that holds one step of ``root`` under the same numbers.

    Committed segments are never written to again, so the new root gets hard links to them. Links
    take hardly any space and time. Each root is collected by itself, and the file system frees a
    file when both have deleted it. Works beside a running training. ``to`` appears once whole; in
    an object store, its step does.

    Args:
        root: Root to branch from.
        step: A training step, a tag, or ``None`` for the newest step.
        to: Directory that is new or empty, or prefix of an object store without steps.
        copy: If false (default), link files: damage to a file affects both roots. If true, copy
            them: takes their space, but damage stays in one root. Files are always copied across
            file systems, and from or to an object store.

    Returns:
        The number of segments, and the sizes of the linked and copied files.

    Raises:
        StepNotFound: If there is no such step.
        Damaged: If the tables of the step are not whole.
        ChainBroken: The same, if a segment is missing.
        NotACheckpointRoot: If ``to`` holds anything, or is in the root.
        StorageFailed: If an object store does not answer, or refuses.
        OSError: If the file system fails.
    """
    target = storage.of(to)
    # Links are resolved on both sides, or a link to the root would be accepted.
    if isinstance(target, Path):
        target = Path(os.path.realpath(target))
        if target.exists() and any(target.iterdir()):
            raise NotACheckpointRoot(
                f"{target} is not empty; a branch needs a directory that is new or empty"
            )
    origin = os.path.realpath(root.path) if isinstance(root.path, Path) else str(root.path)
    if f"{target}/".startswith(f"{origin}/"):
        raise NotACheckpointRoot(
            f"{target} is in {root.path}; a branch needs a directory outside the root"
        )
    manifest = root.manifest(step)
    open_segments(root, manifest)
    # The source was read before anything is created, so a missing or damaged step leaves no empty
    # root.
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside it and then renamed, so that a branch that has failed can be repeated.
        with named_writes(target), new_folder(target) as folder:
            linked, copied = _fill(root, manifest, folder, copy)
        Durability.POWER.sync_ancestors(target)
    else:
        linked, copied = _fill(root, manifest, target, copy)
    return Branched(manifest.step, len(manifest.segments), linked, copied)


def _fill(root: Root, manifest: Manifest, folder: Place, copy: bool) -> tuple[int, int]:
    """Make a root that has a step of another root; return the linked and the copied bytes."""
    store = create_store(folder)
    lease = take_lease(folder)
    try:
        target = Root(folder, store)
        # In an object store, a branch that was killed has left segments, and no step.
        if target.checkpoints():
            raise NotACheckpointRoot(f"{folder} has steps; a branch needs a new prefix")
        sizes = link_segments(root, manifest, target, copy=copy)
        writer = f"process {os.getpid()} on {socket.gethostname()}, branching off {root.path}"
        # The branch is a save of its own: tags and memory roots identify a save by its nonce.
        nonce = secrets.token_hex(8)
        document = msgspec.structs.replace(manifest, nonce=nonce, writer=writer, course="")
        commit(folder, document, still_ours=lease.check)
    finally:
        store.close()
        lease.release()
    return sizes


def link_segments(
    root: Root, manifest: Manifest, target: Root, *, copy: bool = False
) -> tuple[int, int]:
    """Give a root the segments of a step of another root: hard links to their files, or copies.

    The files are durable when the call returns. No step of ``target`` names the segments yet. What
    an earlier call has left of them, because it was killed, is removed first.

    Args:
        root: The root of the step.
        manifest: The step.
        target: The root that gets the segments. No step of it has any of them, and the caller
            holds its lease.
        copy: If true, copy files in any case. Otherwise only if they cannot be linked, as those of
            an object store.

    Returns:
        The sizes of the linked and of the copied files, in bytes.

    Raises:
        Damaged: The tables of the segments are not those of the step.
        ChainBroken: A segment is missing, such as after a retention of ``root``.
        StorageFailed: An object store does not answer, or refuses.
        OSError: The file system fails.
    """
    path = target.store.path
    durability = target.store.durability
    linked = copied = 0
    for opened in open_segments(root, manifest):
        source, segment = opened.path, path / layout.SEGMENTS / opened.id
        if inside(path, segment).exists():
            remove_tree(path, segment)
        if not (isinstance(source, Path) and isinstance(segment, Path)):
            copied += _copy_by_name(opened, segment, durability)
            continue
        for directory, _, files in walk(source):
            target_folder = segment / Path(directory).relative_to(source)
            # Only files can be linked, so the directories are made anew and are synced below.
            inside(path, target_folder).mkdir()
            for name in files:
                file = Path(directory) / name
                size = file.stat().st_size
                if not copy and _link(file, target_folder / name):
                    linked += size
                else:
                    copy_file(file, target_folder / name, durability)
                    copied += size
        durability.sync_tree(segment)
    # The other run may have collected the segments while they were linked. Opening them checks that
    # the tables are those that were committed.
    open_segments(target, manifest)
    return linked, copied


def _copy_by_name(segment: Segment, target: Place, durability: Durability) -> int:
    """Copy the files that the table of a segment implies, and it last; return their bytes.

    A listing may lag, so none is asked for.
    """
    copied, files = 0, _files_of(segment)
    while batch := list(itertools.islice(files, _AT_ONCE)):
        # All requests of a kind are under way before the first is waited for.
        reads = [storage_of(path / name).start_read(most_bytes) for path, name, most_bytes in batch]
        writes = []
        for (path, name, _), finish in zip(batch, reads, strict=True):
            try:
                content = finish()[0] or b""
            except FileNotFoundError as error:
                raise chunk_files.missing(path, name) from error
            folder = target
            for part in filter(None, str(path).removeprefix(str(segment.path)).split("/")):
                folder = folder / part
            folder.mkdir(parents=True, exist_ok=True)
            write = storage_of(folder).start_document(name, content, durability)
            # A local file is written already.
            writes += [] if write is None else [(folder / name, write, len(content))]
            copied += len(content)
        for path, write, size in writes:
            assert isinstance(path, ObjectPath)
            path.finish_write(write, size)
    durability.sync_tree(target)
    return copied


def _files_of(segment: Segment) -> Iterator[tuple[Place, str, int]]:
    """Yield directory, name and most bytes of each file of a segment, its table last."""
    for path, spec in segment.array_specs().items():
        for name in spec.file_names():
            yield path, name, spec.cells.most_bytes
    for path in (*segment.documents(), segment.path):
        yield path, "zarr.json", documents.MAX_DOCUMENT_BYTES


def _link(source: Path, target: Path) -> bool:
    try:
        # A link in a root is never followed (format.md, section 1).
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True
