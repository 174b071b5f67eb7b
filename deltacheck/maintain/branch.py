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
from deltacheck.store import layout
from deltacheck.store.commit import commit
from deltacheck.store.files import storage
from deltacheck.store.files.containment import inside
from deltacheck.store.files.storage import take_lease
from deltacheck.store.root import Root, Store, open_segments

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
    file when both have deleted it. Works beside a running training. If its retention deletes the
    step meanwhile, nothing is committed at ``to``.

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
    target = Path(to).absolute()
    if target.exists() and any(target.iterdir()):
        raise NotACheckpointRoot(
            f"{target} is not empty; a branch needs a directory that is new or empty"
        )
    origin = storage.local(root.store.path, "a branch")
    # Links are resolved on both sides, or a link to the root would be accepted.
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(str(root.path))):
        raise NotACheckpointRoot(
            f"{target} is in {root.path}; a branch needs a directory outside the root"
        )
    manifest = root.manifest(step)
    open_segments(root, manifest)
    # The source was read before anything is created, so a missing or damaged step leaves no empty
    # root.
    store = Store.create(target)
    lease = take_lease(target)
    linked = copied = 0
    try:
        for ref in manifest.segments:
            source, segment = origin / layout.SEGMENTS / ref.id, target / layout.SEGMENTS / ref.id
            for folder, _, files in walk(source):
                target_folder = segment / Path(folder).relative_to(source)
                # Only files can be linked, so the directories are made anew and are synced below.
                inside(target, target_folder).mkdir()
                for name in files:
                    file = Path(folder) / name
                    size = file.stat().st_size
                    if not copy and _link(file, target_folder / name):
                        linked += size
                    else:
                        copy_file(file, target_folder / name, store.durability)
                        copied += size
            store.durability.sync_tree(segment)
        new_root = Root(target, store)
        writer = f"process {os.getpid()} on {socket.gethostname()}, branching off {root.path}"
        # The branch is a save of its own: tags and memory roots identify a save by its nonce.
        new_manifest = msgspec.structs.replace(manifest, nonce=secrets.token_hex(8), writer=writer)
        # The other run may have collected the segments while they were linked. Opening them checks
        # that the tables are those that were committed.
        open_segments(new_root, new_manifest)
        commit(target, new_manifest)
    finally:
        store.close()
        lease.release()
    return Branched(manifest.step, len(manifest.segments), linked, copied)


def _link(source: Path, target: Path) -> bool:
    try:
        # A link in a root is never followed (format.md, section 1).
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True
