"""Begin a new run at a step of another: a root of its own that shares the files, and stays whole
whatever becomes of the first.
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
from deltacheck.maintain.transfer import copy_file
from deltacheck.store import layout
from deltacheck.store.commit import commit
from deltacheck.store.files import storage
from deltacheck.store.files.storage import take_lease
from deltacheck.store.root import Root, Store, open_segments

# Where a hard link cannot be made: another file system, one without links, too many of them.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES)


@dataclass(frozen=True, slots=True)
class Branched:
    """What was done. ``linked_bytes``: of files that both roots share; ``copied_bytes``: of those
    that had to be copied.
    """

    step: int
    segments: int
    linked_bytes: int
    copied_bytes: int


def branch(
    root: Root, step: int | str | None, to: str | os.PathLike[str], *, copy: bool = False
) -> Branched:
    """Make an engine root at ``to`` that has one step (a number or a tag; ``None``: the newest) of
    ``root``, under the same numbers, and no more.

    Segments are never written to again once they are committed, so the new root gets hard links to
    them: that takes no space and no time worth speaking of, each root is collected for itself, and
    a file goes when the last of the two lets it go. ``copy``: copy the files instead: takes their
    space, and damage to one root's file is then no damage to the other's. Across file systems they
    are copied in any case. Works beside a running training; where its retention deletes the step
    meanwhile, nothing is committed at ``to``.

    Raises ``StepNotFound``, ``Damaged`` or ``ChainBroken`` where the step's tables are not whole,
    ``NotACheckpointRoot`` where ``to`` holds anything, ``StorageFailed`` for an object store,
    ``OSError``.
    """
    target = Path(to).absolute()
    if target.exists() and any(target.iterdir()):
        raise NotACheckpointRoot(
            f"{target} is not empty; a branch needs a directory that is new or empty"
        )
    origin = storage.local(root.store.path, "a branch")
    manifest = root.manifest(step)
    open_segments(root, manifest)
    store = Store.create(target)
    lease = take_lease(target)
    linked = copied = 0
    try:
        for ref in manifest.segments:
            source, made = origin / layout.SEGMENTS / ref.id, target / layout.SEGMENTS / ref.id
            for folder, _, files in os.walk(source):
                inner = made / Path(folder).relative_to(source)
                inner.mkdir()
                for name in files:
                    size = (Path(folder) / name).stat().st_size
                    if not copy and _link(Path(folder) / name, inner / name):
                        linked += size
                    else:
                        copy_file(Path(folder) / name, inner / name, store.durability)
                        copied += size
            store.durability.sync_tree(made)
        new = Root(target, store)
        about = f"process {os.getpid()} on {socket.gethostname()}, branching off {root.path}"
        own = msgspec.structs.replace(manifest, nonce=secrets.token_hex(8), writer=about)
        open_segments(
            new, own
        )  # the tables that were committed, or an error: the other run may have collected them meanwhile
        commit(target, own)
    finally:
        store.close()
        lease.release()
    return Branched(manifest.step, len(manifest.segments), linked, copied)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True
