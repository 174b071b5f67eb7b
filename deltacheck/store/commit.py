"""The commit of a step: the creation of its manifest, and the fence against a second writer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from deltacheck.errors import RootBusy
from deltacheck.store import layout
from deltacheck.store.documents import Written, encode_manifest, read_manifest
from deltacheck.store.files import arrays
from deltacheck.store.files import storage as place
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import ObjectPath, Place, scan
from deltacheck.store.lock import object_lease
from deltacheck.store.manifest import Manifest


def commit(
    root: Place,
    manifest: Manifest,
    durability: Durability = Durability.POWER,
    still_ours: Callable[[], None] | None = None,
    *,
    again: bool = False,
) -> Written:
    """Make the step exist. REQUIRES: every segment that the manifest names is durable.

    ``still_ours``: raises where the right to write has been lost. ``again``: the holder of the
    lease writes steps again, newer ones first, which are then no sign of another writer. Raises
    ``RootBusy`` where another writer has taken the sequence number, or has gone beyond it: what a
    writer that was taken for dead has to say then comes too late, and what it stands on may be
    gone.
    """
    folder = root / layout.CHECKPOINTS / layout.checkpoint_id(manifest.seq)
    content = encode_manifest(manifest)
    fenced = isinstance(root, Path) and not again
    if fenced:
        _fence(root, manifest, still_ours)
    folder.mkdir(exist_ok=True)
    valid = object_lease.check(root) if isinstance(root, ObjectPath) else None
    if not arrays.create_file(
        folder, "zarr.json", content, durability, valid
    ):  # <- the step exists from here on
        raise RootBusy(
            f"checkpoint {folder.name} of {root} was committed by"
            f" {read_manifest(folder / 'zarr.json').writer}: two writers"
        )
    if isinstance(root, ObjectPath):
        place.written.leave_out(len(content))
    try:
        if fenced:
            _fence(
                root, manifest, still_ours
            )  # whoever took over between the first look and the creation
    except RootBusy:
        (folder / "zarr.json").unlink(missing_ok=True)
        raise
    durability.sync_directory(folder)
    durability.sync_directory(folder.parent)
    return Written.of(content)


def _fence(root: Place, manifest: Manifest, still_ours: Callable[[], None] | None) -> None:
    """Refuse to commit beside another writer: one that holds the root now, or one whose steps are
    newer.
    """
    if still_ours is not None:
        still_ours()
    for entry in reversed(scan(root / layout.CHECKPOINTS)):
        if not layout.is_checkpoint_id(entry.name):
            continue
        if layout.seq_of(entry.name) <= manifest.seq:
            return
        if os.path.lexists(Path(entry.path) / "zarr.json"):
            raise RootBusy(
                f"{root} has been written by another since: step {manifest.step} would be"
                f" checkpoint {manifest.seq}, but there is {entry.name}. Nothing was committed;"
                " open the root again"
            )
