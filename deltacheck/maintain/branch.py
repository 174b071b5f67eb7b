"""Make a new root that begins with a step of another root.

The new root shares the files of the first, and stays whole if the first is changed or deleted.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deltacheck.errors import NotACheckpointRoot
from deltacheck.leaf.external_errors import walk
from deltacheck.maintain.transfer import copy_file
from deltacheck.restore.export import named_writes, new_folder
from deltacheck.store import layout
from deltacheck.store.commit import commit
from deltacheck.store.files import storage
from deltacheck.store.files.containment import inside, remove_tree
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import take_lease
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import create_store
from deltacheck.store.roots.root import Root, open_segments

# Errors of os.link: another file system, one without links, or too many links to a file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES)


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
    file when both have deleted it. Works beside a running training. ``to`` appears once whole.

    Args:
        root: Root to branch from.
        step: A training step, a tag, or ``None`` for the newest step.
        to: Directory that is new or empty.
        copy: If false (default), link files: damage to a file affects both roots. If true, copy
            them: takes their space, but damage stays in one root. Files are always copied across
            file systems.

    Returns:
        The number of segments, and the sizes of the linked and copied files.

    Raises:
        StepNotFound: If there is no such step.
        Damaged: If the tables of the step are not whole.
        ChainBroken: The same, if a segment is missing.
        NotACheckpointRoot: If ``to`` holds anything, or is in the root.
        StorageFailed: If the root is in an object store.
        OSError: If the file system fails.
    """
    # Links are resolved on both sides, or a link to the root would be accepted.
    target = Path(os.path.realpath(storage.local(to, "a branch")))
    if target.exists() and any(target.iterdir()):
        raise NotACheckpointRoot(
            f"{target} is not empty; a branch needs a directory that is new or empty"
        )
    storage.local(root.store.path, "a branch")
    if target.is_relative_to(os.path.realpath(str(root.path))):
        raise NotACheckpointRoot(
            f"{target} is in {root.path}; a branch needs a directory outside the root"
        )
    manifest = root.manifest(step)
    open_segments(root, manifest)
    # The source was read before anything is created, so a missing or damaged step leaves no empty
    # root.
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside it and then renamed, so that a branch that has failed can be repeated.
    with named_writes(target), new_folder(target) as folder:
        store = create_store(folder)
        lease = take_lease(folder)
        try:
            linked, copied = link_segments(root, manifest, Root(folder, store), copy=copy)
            writer = f"process {os.getpid()} on {socket.gethostname()}, branching off {root.path}"
            # The branch is a save of its own: tags and memory roots identify a save by its nonce.
            nonce = secrets.token_hex(8)
            commit(folder, msgspec.structs.replace(manifest, nonce=nonce, writer=writer, course=""))
        finally:
            store.close()
            lease.release()
    Durability.POWER.sync_ancestors(target)
    return Branched(manifest.step, len(manifest.segments), linked, copied)


def link_segments(
    root: Root, manifest: Manifest, target: Root, *, copy: bool = False
) -> tuple[int, int]:
    """Give a root the segments of a step of another root: hard links to their files, or copies.

    The files are durable when the call returns. No step of ``target`` names the segments yet. What
    an earlier call has left of them, because it was killed, is removed first.

    Args:
        root: The local root of the step.
        manifest: The step.
        target: The local root that gets the segments. No step of it has any of them, and the caller
            holds its lease.
        copy: If true, copy files in any case. Otherwise only if they cannot be linked.

    Returns:
        The sizes of the linked and of the copied files, in bytes.

    Raises:
        Damaged: The tables of the segments are not those of the step.
        ChainBroken: A segment is missing, such as after a retention of ``root``.
        StorageFailed: One of the roots is in an object store.
        OSError: The file system fails.
    """
    origin = storage.local(root.store.path, "a branch")
    path = storage.local(target.store.path, "a branch")
    durability = target.store.durability
    linked = copied = 0
    for ref in manifest.segments:
        source, segment = origin / layout.SEGMENTS / ref.id, path / layout.SEGMENTS / ref.id
        if inside(path, segment).exists():
            remove_tree(path, segment)
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


def _link(source: Path, target: Path) -> bool:
    try:
        # A link in a root is never followed (format.md, section 1).
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True
