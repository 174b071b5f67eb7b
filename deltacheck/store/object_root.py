"""Which steps an object store has, where a listing may lag behind what is stored.

A manifest's name is its sequence number, so those that may follow the newest known one are asked
for by name. A store whose listing is up to date (S3, GCS) answers that there are none.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltacheck.store import layout
from deltacheck.store.files.storage import ObjectPath, existing

_MANIFEST = "zarr.json"
# Sequence numbers beyond the newest that are asked for: so many saves in a row may have failed
# without hiding a later one.
AHEAD = 8


def manifests(folder: ObjectPath, known: Iterable[ObjectPath] = ()) -> list[ObjectPath]:
    """The manifests of a root, ascending: those listed in ``folder``, those ``known`` from before
    (which may be deleted since), and those that follow.
    """
    below = len(folder.key) + 1
    names = [key[below:].split("/") for key in folder.keys()]  # noqa: SIM118 - a path, not a mapping
    found = {
        folder / name[0] / _MANIFEST
        for name in names
        if name[1:] == [_MANIFEST] and layout.is_checkpoint_id(name[0])
    }
    found.update(known)
    while True:
        newest = max((layout.seq_of(path.parent.name) for path in found), default=-1)
        ahead = existing(
            folder / layout.checkpoint_id(seq) / _MANIFEST
            for seq in range(newest + 1, newest + 1 + AHEAD)
        )
        if not ahead:
            return sorted(found)
        found.update(ahead)
