"""The opening and the creation of roots.

Two arrangements share all code. An *engine root* holds its manifests under ``checkpoints/``. A
*manager root* belongs to Orbax's ``CheckpointManager``: its manifests lie in the step directories
that Orbax commits by renaming, and the segments lie in the directory ``deltacheck`` beside them.
``docs/reference/format.md``, section 1, lists both.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from deltacheck.errors import Damaged, NotACheckpointRoot, StorageFailed
from deltacheck.store import documents, layout
from deltacheck.store.files import arrays
from deltacheck.store.files import storage as places
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from deltacheck.store.files.storage import Place, storage_of
from deltacheck.store.roots import manager_steps
from deltacheck.store.roots.manager_steps import MANAGER_STORE
from deltacheck.store.roots.root import Root
from deltacheck.store.roots.store import Store, make_folders
from deltacheck.store.roots.wording import listed


def open_root(
    path: str | os.PathLike[str] | ObjectPath,
    item: str | None = None,
    storage: ObjectStore | None = None,
) -> Root:
    """Open an engine root or a manager root.

    Args:
        path: A local directory, or the address of a prefix of an object store. A folder with an
            engine root in ``deltacheck/``, as trainers make it, means that root.
        item: In a manager root, the item that is meant; ``None``: any.
        storage: How an object store is reached; ``None``: the defaults.

    Raises:
        NotACheckpointRoot: There is no root; the message says what was found instead.
        UnsupportedFormat: Another version has made the root.
        Damaged: Only the root's own ``zarr.json`` is lost.
        StorageFailed: An object store does not answer.
    """
    directory = places.of(path, storage)
    missing = storage_of(directory).missing_directory()
    if missing:
        raise NotACheckpointRoot(f"{directory} {missing}")
    refuse_manager_store(directory)
    for store in (directory, directory / MANAGER_STORE):
        if store != directory:
            storage_of(store).check_directory()
        attributes = _group_attributes(store)
        if attributes is not None and attributes.get("format") == layout.FORMAT:
            check_root(store)
            return Root(_root_of(directory, store), Store(store), item)
    for store in (directory, directory / MANAGER_STORE):
        _refuse_lost(_root_of(directory, store), Store(store), item)
    if isinstance(directory, Path):
        _refuse_copied_step(directory)
    raise NotACheckpointRoot(
        f"{directory} is not a deltacheck root: it has no zarr.json of ours, nor has"
        f" {MANAGER_STORE}/ in it"
    )


def _refuse_copied_step(directory: Path) -> None:
    """Raise ``NotACheckpointRoot`` for steps of a manager without their segments, or for one step.

    Orbax names steps by folders, so one of them is easily copied or given alone.
    """
    parent = directory.parent
    manifests = [
        path
        for root in (directory, parent)
        for path in manager_steps.step_manifests(root, None)
        if path.is_relative_to(directory)
    ]
    if not manifests:
        return
    if (parent / MANAGER_STORE).is_dir():
        raise NotACheckpointRoot(
            f"{directory} is a step of the root {parent}: give that root, and the step"
        )
    raise NotACheckpointRoot(
        f"{manifests[0]} is there without the segments that it needs: they are in {MANAGER_STORE}/"
        " of the root that it was copied from. Read the step there, or copy the whole root"
    )


def _root_of(directory: Place, store: Place) -> Place:
    """Return the path of the root whose segments are in ``store``.

    A trainer's output folder has the root of an ``Engine`` in the place in which a manager root has
    its segments.
    """
    return store if store != directory and _has_checkpoints(store) else directory


def _has_checkpoints(store: Place) -> bool:
    """Return whether a store has checkpoints of an ``Engine``; those of a manager lie beside it."""
    names = storage_of(store / layout.CHECKPOINTS).directory_names()
    return any(map(layout.is_checkpoint_id, names))


def _refuse_lost(root: Place, store: Store, item: str | None = None) -> None:
    """Raise ``Damaged`` if segments show that the path has been a root."""
    segments = store.segment_ids()
    if segments:
        raise Damaged(
            f"{store.path / 'zarr.json'} is missing or damaged, but {len(segments)} segments lie"
            f" beside it. `deltacheck repair {root}` writes it again; steps that restore then:"
            f" {listed(Root(root, store, item).steps()) or 'none'}",
            file=store.path / "zarr.json",
        )


def is_root_or_fresh(path: Place) -> bool:
    """Return True if a path is a root, and False if a root can be made there.

    Raises:
        NotACheckpointRoot: The path holds something else.
        Damaged: The path holds segments and has lost its own ``zarr.json``.
    """
    refuse_file(path)
    if _is_root(path):
        return True
    _refuse_lost(path, Store(path))
    if path.is_dir() and not storage_of(path).is_fresh_root():
        raise NotACheckpointRoot(
            f"{path} is not empty and not a deltacheck root; give an empty or new directory"
        )
    return False


def refuse_file(path: Place) -> None:
    """Raise ``NotACheckpointRoot`` if a path, or a part of it, is a file or a dangling link."""
    if isinstance(path, Path):
        for part in (path, *path.parents):
            # One look: another process may make the directory at the same moment.
            try:
                if stat.S_ISDIR(os.stat(part).st_mode):
                    return
                kind = "a file"
            except OSError:
                if not os.path.islink(part):
                    continue
                kind = "a link to a directory that does not exist"
            raise NotACheckpointRoot(f"{part} is {kind}; give an empty or new directory")


def check_root(path: Place) -> None:
    """Raise an error for a root of another format or version, or with unknown features."""
    attributes = _group_attributes(path)
    if attributes is None or attributes.get("format") != layout.FORMAT:
        raise NotACheckpointRoot(f"{path} is not a deltacheck root")
    documents.check_version(attributes, str(path / "zarr.json"))
    for name in (layout.SEGMENTS, layout.CHECKPOINTS, layout.CONTROL):
        storage_of(path / name).check_directory()


def create_store(
    path: Place, durability: Durability = Durability.POWER, *, is_managers: bool = False
) -> Store:
    """Create the directories of a root, unless they exist, and sync the way to them.

    ``is_managers``: it is the store in a manager root, which no other caller may write to.

    Raises:
        OSError: The path cannot be written.
        NotACheckpointRoot: The path holds something else.
        UnsupportedFormat: Another version has made the root.
        Damaged: The path holds segments and has lost its own ``zarr.json``.
        StorageFailed: An object store does not answer or honours no conditional writes.
    """
    if not is_managers:
        refuse_manager_store(path)
    is_root = is_root_or_fresh(path)
    # First, so that a place that cannot have a root stays as it is.
    storage_of(path).check_writable()
    if not is_root:
        make_folders(path, durability)
        attributes = {"format": layout.FORMAT, "version": layout.VERSION, "must_understand": []}
        arrays.create_file(
            path, "zarr.json", layout.group_json({layout.ATTRIBUTE: attributes}), durability
        )
    check_root(path)
    # An existing root is synced too: the process that made it or its parents may have been
    # killed before its sync.
    durability.sync_directory(path)
    durability.sync_ancestors(path)
    return Store(path, durability)


def create_manager_store(root: Path, durability: Durability = Durability.POWER) -> Store:
    """Create the store beside the steps of a ``CheckpointManager``, unless it exists.

    Raises what ``create_store`` and ``refuse_engine_root`` raise.
    """
    refuse_engine_root(root)
    path = root / MANAGER_STORE
    storage_of(path).check_directory()
    path.mkdir(parents=True, exist_ok=True)
    mark = path / layout.COMMIT_MARK
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(mark, flags, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise Damaged(f"{mark} is a link; remove it", file=mark) from error
    return create_store(path, durability, is_managers=True)


def refuse_engine_root(root: Path) -> None:
    """Raise ``NotACheckpointRoot`` if a directory for a manager is or has an engine root.

    Two writers that do not know of each other's steps would delete each other's segments.
    """
    refuse_file(root)
    engine_root = root
    if not _is_root(root):
        engine_root = root / MANAGER_STORE
        if not _is_root(engine_root) or not _has_checkpoints(engine_root):
            return
    raise NotACheckpointRoot(
        f"{engine_root} is the root of an Engine, with whose segments a CheckpointManager in {root}"
        " would interfere. Give the manager another directory"
    )


def refuse_manager_store(path: Place) -> None:
    """Raise ``NotACheckpointRoot`` if a path is the store in a manager root.

    Its steps lie beside it: as a root of its own it has none, and needs none of its segments.
    """
    if path.name == MANAGER_STORE and storage_of(path / layout.COMMIT_MARK).name_exists():
        raise NotACheckpointRoot(
            f"{path} holds the segments of a CheckpointManager, whose root is {path.parent}: give"
            " that, or another directory"
        )


def _is_root(path: Place) -> bool:
    attributes = _group_attributes(path)
    return attributes is not None and attributes.get("format") == layout.FORMAT


def _group_attributes(path: Place) -> dict[str, Any] | None:
    """Return our attributes of a group; ``None`` if it is not one of ours."""
    try:
        # A root's own document is small, so a large file is none of ours.
        attributes = json.loads(arrays.read_file(path / "zarr.json", 1 << 20))["attributes"][
            layout.ATTRIBUTE
        ]
    except StorageFailed:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Damaged):
        return None
    return attributes if isinstance(attributes, dict) else None
