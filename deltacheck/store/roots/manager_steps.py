"""The steps of ours in the directory of a ``CheckpointManager``.

Such a directory may hold anything else: nested runs, folders of other programs, steps of plain
Orbax, folders of other users. A folder is a step of ours if it has the name of a step and an item
in it is ours by its content. Everything else is not ours: it is never damage, never moved, and read
no further than needed to decide that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from deltacheck.errors import Damaged
from deltacheck.store import layout
from deltacheck.store.documents import MAX_DOCUMENT_BYTES
from deltacheck.store.files.local_storage import LocalStorage, list_directory, may_exist

MANAGER_STORE = "deltacheck"  # our directory in a manager root


def step_manifests(root: Path, item: str | None, known: Collection[Path] = ()) -> list[Path]:
    """Return the manifests of the steps of ours, readable or not, ascending by path.

    Damage, a folder that may not be listed, and a link that leads out of the root may leave open
    whether something is ours. It then counts as a damaged step if its name begins as the names of
    the other steps do, or if there are no others.

    Args:
        root: The directory of the manager.
        item: The item that is meant; ``None``: any.
        known: Files that have been read as manifests before.

    Raises:
        Damaged: The root may not be listed.
    """
    manifests: list[Path] = []
    doubtful: list[tuple[str, Path]] = []
    prefixes: set[str] = set()
    for prefix, entry in _named_steps(root):
        in_folder, unknown = _manifests_in(root, entry, item, known)
        manifests += in_folder
        doubtful += [(prefix, path) for path in unknown]
        if in_folder:
            prefixes.add(prefix)
    manifests += [path for prefix, path in doubtful if not prefixes or prefix in prefixes]
    return sorted(manifests)


def _manifests_in(
    root: Path, step: os.DirEntry[str], item: str | None, read_before: Collection[Path]
) -> tuple[list[Path], list[Path]]:
    """Return the manifests of ours in a folder, and the files that may be one.

    Args:
        root: The directory of the manager.
        step: A folder or a link with the name of a step.
        item: As in ``step_manifests``.
        read_before: Files that have been read as manifests before.
    """
    folder = Path(step.path)
    if step.is_symlink():
        return [], [] if _leads_into(root, folder) else [folder / "zarr.json"]
    try:
        entries = list_directory(folder)
    except Damaged:
        return [], [folder / "zarr.json"]
    are_ours: dict[Path, bool | None] = {}
    for inner in entries:
        path = folder / inner.name / "zarr.json"
        if item not in (None, inner.name):
            continue
        if inner.is_symlink():
            are_ours[path] = False if _leads_into(root, path.parent) else _is_recorded(path)
        elif inner.is_dir(follow_symlinks=False) and may_exist(path):
            are_ours[path] = path in read_before or _is_ours(path)
    manifests = [path for path, is_ours in are_ours.items() if is_ours]
    return manifests, [path for path, is_ours in are_ours.items() if is_ours is None]


def other_manifests(root: Path, own: Collection[Path]) -> list[Path]:
    """Return files that may be manifests of a root and belong to none of its steps, ascending.

    They are of saves under way or killed, of steps that Orbax has set aside (``todelete_subdir``,
    ``_SNAPSHOTS``), and of copies. What may not be listed is left out.
    """
    steps = {path.parents[1] for path in own}
    others: list[Path] = []
    for entry in list_directory(root):
        folder = Path(entry.path)
        if folder in steps or entry.name == MANAGER_STORE:
            continue
        entries = _directories(entry)
        # A nested root has the segments of its steps itself.
        if any(inner.name == MANAGER_STORE for inner in entries):
            continue
        for inner in entries:
            others.append(Path(inner.path) / "zarr.json")
            if layout.step_name(inner.name) is not None:
                others += [Path(innermost.path) / "zarr.json" for innermost in _directories(inner)]
    return sorted(path for path in others if os.path.lexists(path))


def unwritten_folders(root: Path, own: Collection[Path]) -> list[Path]:
    """Return the folders of steps, and of items in them, that have no manifest: deleted ones.

    Args:
        root: The directory of the manager.
        own: The manifests of its steps.
    """
    steps = {path.parents[1] for path in own}
    names = [layout.step_name(step.name) for step in steps]
    prefixes = {name[0] for name in names if name is not None}
    folders: list[Path] = []
    for prefix, entry in _named_steps(root):
        if Path(entry.path) not in steps and (not prefixes or prefix in prefixes):
            folders += [Path(inner.path) for inner in _directories(entry)]
            if not entry.is_symlink():
                folders.append(Path(entry.path))
    return folders


def _named_steps(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Return the directories and links with the name of a step, and the prefixes of their names."""
    for entry in list_directory(root):
        name = layout.step_name(entry.name)
        if name is not None and (entry.is_dir(follow_symlinks=False) or entry.is_symlink()):
            yield name[0], entry


def _directories(entry: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return the directories in a directory; none if it is none or may not be listed."""
    if not entry.is_dir(follow_symlinks=False):
        return []
    try:
        entries = list_directory(Path(entry.path))
    except Damaged:
        return []
    return [inner for inner in entries if inner.is_dir(follow_symlinks=False)]


def _leads_into(root: Path, link: Path) -> bool:
    """Return whether a link leads into the root, where what it leads to is looked at itself."""
    target, folder = os.path.realpath(link), os.path.realpath(root)
    return target.startswith(os.path.join(folder, ""))


def _is_ours(path: Path) -> bool | None:
    """Return whether a file is a manifest of ours, damaged or not; ``None``: that is unknown."""
    try:
        content = LocalStorage(path).read_file(MAX_DOCUMENT_BYTES)
    except FileNotFoundError:
        return False
    except Damaged:
        return _is_recorded(path)
    # No document of ours but the manifest has a sequence number at this depth.
    if f'"{layout.ATTRIBUTE}"'.encode() in content and b'"seq"' in content:
        return True
    recorded = _is_recorded(path)
    if recorded is None:
        try:
            json.loads(content)
        except (ValueError, RecursionError):
            return None
    return bool(recorded)


def _is_recorded(path: Path) -> bool | None:
    """Return whether Orbax has recorded our handler for the item of a manifest.

    ``None``: its record of the step cannot be read.
    """
    record = path.parents[1] / "_CHECKPOINT_METADATA"
    try:
        handlers = json.loads(LocalStorage(record).read_file(MAX_DOCUMENT_BYTES))["item_handlers"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError, Damaged):
        return None
    # A checkpoint without items has one name.
    handler = handlers.get(path.parent.name) if isinstance(handlers, dict) else handlers
    return bool(handler == layout.ITEM_HANDLER)
