"""Write and read small files that point to a checkpoint.

Frameworks expect one file for each checkpoint. A pointer is JSON,
``{"deltacheck": "pointer", "root": ..., "step": ..., "seq": ...}``. ``root`` is relative to the
folder of the file, so a folder with both can be moved, or the address of a prefix of an object
store. The folder is that of the file itself, not that of a symbolic link to it. The file is written
after the commit, whole and synced or not at all. It has no content, so renaming or removing it does
not affect the step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from deltacheck.errors import NotACheckpointRoot, StepNotFound
from deltacheck.restore.export import new_file
from deltacheck.store import layout
from deltacheck.store.files import storage
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root

_KIND = "pointer"  # permanent
# A pointer has a few hundred bytes. A checkpoint of another format may have gigabytes, and is not
# read to find that it is no pointer.
_MOST_BYTES = 1 << 16


class Pointer(NamedTuple):
    """The checkpoint that a file points to. ``root`` is absolute, and has no links."""

    root: Place
    step: int
    seq: int


def write(path: Path, target: Pointer) -> None:
    """Write a pointer to a committed checkpoint; replace the file if it exists."""
    if isinstance(target.root, Path):
        # Links on the way to the root are followed. The root itself may be one that is kept.
        directory = target.root.parent.resolve() / target.root.name
        # Relative, so that the folder of the file and the root can be moved together.
        root = os.path.relpath(directory, path.parent.resolve())
    else:
        root = str(target.root)
    content = {
        "deltacheck": _KIND,
        "root": root,
        "step": target.step,
        "seq": target.seq,
    }
    with new_file(path, overwrite=True) as file:
        file.write(json.dumps(content).encode() + b"\n")


def read(path: Path) -> Pointer:
    """Return the checkpoint that a file points to.

    Raises:
        FileNotFoundError: There is no such file.
        NotACheckpointRoot: The file is not a pointer. The message says how to import it.
    """
    with path.open("rb") as file:
        # One byte more shows that the file is too long.
        raw = file.read(_MOST_BYTES + 1)
    try:
        content = json.loads(raw) if len(raw) <= _MOST_BYTES else None
        if isinstance(content, dict) and content.get("deltacheck") == _KIND:
            root: Place
            # A relative path has no two slashes in a row.
            if "://" in content["root"]:
                root = storage.of(content["root"])
            else:
                root = (path.resolve().parent / content["root"]).resolve()
            return Pointer(root, int(content["step"]), int(content["seq"]))
    # JSON that is nested deeply, which an attacker may write, raises ``RecursionError``.
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise NotACheckpointRoot(
        f"{path} stands for no checkpoint of deltacheck and is not read, since reading some files"
        " runs code from them. A file of torch.save or safetensors becomes a step with: deltacheck"
        f" import ROOT {path.name}"
    )


def is_pointer(path: Path) -> bool:
    """Return ``True`` if a file points to a checkpoint."""
    try:
        read(path)
    except (OSError, NotACheckpointRoot):
        return False
    return True


def opened(path: Path) -> tuple[Root, Manifest]:
    """Return the root and the manifest of the checkpoint that a file points to.

    Raises:
        FileNotFoundError, NotACheckpointRoot: As ``read`` and ``open_root`` raise them.
        StepNotFound: The root no longer has the checkpoint.
    """
    target = read(path)
    root = open_root(target.root)
    manifest_path = (
        target.root / layout.CHECKPOINTS / layout.checkpoint_id(target.seq) / "zarr.json"
    )
    try:
        manifest = root.read(manifest_path)
    except FileNotFoundError:
        manifest = None
    # A root that was removed and made again uses the same sequence numbers.
    if manifest is None or (manifest.step, manifest.seq) != (target.step, target.seq):
        raise StepNotFound(
            f"{path} stands for step {target.step} (seq {target.seq}) of {target.root}, which is"
            f" not there any more. Steps that it has: {', '.join(map(str, root.steps())) or 'none'}"
        )
    return root, manifest
