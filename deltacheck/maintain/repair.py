"""Write again what follows from the rest of a root, and name what is lost.

Metadata follows from the tables. Committed content is never changed. Documents that are replaced or
set aside are kept in ``<root>.damaged``, beside the root.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from deltacheck.errors import Damaged, UnsupportedFormat
from deltacheck.maintain import verify
from deltacheck.maintain.survey import Survey, survey
from deltacheck.restore import read
from deltacheck.restore.chain import resolve_chains
from deltacheck.store import layout
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.files.storage import Place, inside, storage_of
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.manager_steps import MANAGER_STORE
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root, open_segments
from deltacheck.store.roots.store import Store


@dataclass(frozen=True, slots=True)
class Lost:
    """A leaf or a step that is lost. The field names are keys of ``deltacheck repair --json``.

    Attributes:
        step: Training step, ``None`` if its manifest cannot be read.
        leaf: Path of the leaf, ``None`` for the whole step.
        problem: The reason.
    """

    step: int | None
    leaf: str | None
    problem: str


@dataclass(slots=True)
class Repaired:
    """The result of a repair, or of a dry run.

    Attributes:
        documents: ``zarr.json`` files that were written again.
        lost: The leaves and steps that are lost.
        removed: Manifests whose steps a lossy repair set aside.
        backup: Directory of the documents that were replaced or set aside, ``None`` if there are
            none.
    """

    documents: list[str] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    backup: str | None = None


def repair_root_document(path: Place, result: Repaired, *, dry_run: bool = False) -> None:
    """Write the ``zarr.json`` of a root that has lost its own.

    Args:
        path: Path of the root.
        result: Result to add the document to.
        dry_run: If true, change nothing.

    Raises:
        NotACheckpointRoot: If there is no root, and there are no segments of one.
        Damaged: If the root has another damage for which it does not open.
    """
    try:
        open_root(path)
    except Damaged:
        stores = [path, path / MANAGER_STORE]
        lost = [store for store in stores if Store(inside(path, store)).segment_ids()][:1]
        if not lost:
            raise
        document = lost[0] / "zarr.json"
        result.documents.append(str(document))
        if not dry_run:
            _Backup(path, result).copy(document)
            attributes = {"format": layout.FORMAT, "version": layout.VERSION, "must_understand": []}
            content = layout.group_json({layout.ATTRIBUTE: attributes})
            arrays.replace_file(lost[0], "zarr.json", content)


def repair(
    root: Root, *, dry_run: bool = False, lossy: bool = False, result: Repaired | None = None
) -> Repaired:
    """Write the metadata of a root again, and name the steps that are lost.

    Every byte is read, as by ``verify``. The caller must hold the lease, except for a dry run.

    Args:
        root: Root to repair.
        dry_run: If true, change nothing.
        lossy: If false, lost steps stay as they are. If true, they and manifests that cannot be
            read are set aside: the newest step restores and ``prune`` works again, but the sound
            leaves of these steps are set aside too.
        result: A result to add to. Default: a new one.

    Returns:
        What was written, and what is lost.

    Raises:
        StorageFailed: If an object store does not answer, or refuses.
        RootBusy: If the lease of a root in an object store was lost before a step was set aside.
    """
    result = result or Repaired()
    # The caller may have read manifests before the root's document was repaired, and a root keeps
    # them.
    root = root.afresh()
    backup = _Backup(root.path, result)
    manifests, unreadable = root.manifests()
    for path, error in sorted(unreadable.items()):
        result.lost.append(Lost(None, None, f"{error}: nothing else describes the step"))
        if lossy and _is_spoilt(error):
            _set_aside(root, path, backup, result, dry_run)
    chains = survey(root, manifests.values())
    _repair_documents(root, chains, backup, result, dry_run)
    problems: dict[int | None, list[Lost]] = {}
    for finding in verify.damage(root, list(manifests.values()), chains):
        lost = Lost(finding.step, finding.leaf, finding.problem)
        problems.setdefault(finding.step, []).append(lost)
    for path, manifest in manifests.items():
        # A step that restores is never taken away, whatever the check says of its files.
        if manifest.step in problems and not _restores(root.afresh(), manifest):
            result.lost += problems[manifest.step]
            if lossy:
                _set_aside(root, path, backup, result, dry_run)
    return result


def _set_aside(
    root: Root, manifest_path: Place, backup: _Backup, result: Repaired, dry_run: bool
) -> None:
    result.removed.append(str(manifest_path))
    if not dry_run:
        # In an object store, the manifest is all that a step has of its own.
        is_local = isinstance(manifest_path, Path)
        backup.set_aside(_step_folder(root, manifest_path) if is_local else manifest_path)


def _is_spoilt(error: Damaged | UnsupportedFormat) -> bool:
    """Return whether no other user and no other version could read a document either."""
    return isinstance(error, Damaged) and not isinstance(error.__cause__, PermissionError)


def _restores(root: Root, manifest: Manifest) -> bool:
    """Return whether every stored leaf of a step gives the saved bytes, one leaf at a time."""
    try:
        open_segments(root, manifest)
        for path in manifest.stored:
            read.read_chunks(resolve_chains(root, manifest, [path]))
    except Damaged:
        return False
    return True


def _step_folder(root: Root, manifest_path: Place) -> Place:
    """Return the directory of a step. In a manager root, it holds the directories of the items."""
    folder = manifest_path.parent
    # A link in a step's place has no item: it is the step.
    return folder.parent if root.is_manager_root and folder.parent != root.path else folder


class _Backup:
    """A directory beside the root for documents that are replaced or set aside.

    They keep their names, with a number if the name exists already.
    """

    def __init__(self, root: Place, result: Repaired) -> None:
        self._root = root
        self._result = result

    def copy(self, document: Place) -> None:
        """Copy a file that will be replaced."""
        inside(self._root, document.parent)
        if not document.is_file():
            return
        if not isinstance(document, Path):
            self._free_path(document).write_bytes(document.read_bytes())
        # A link is not followed and not copied: it could lead out of the root.
        elif not document.is_symlink():
            shutil.copy2(document, str(self._free_path(document)))

    def set_aside(self, entry: Place) -> None:
        """Move a directory away, or an object."""
        if isinstance(entry, Path):
            inside(self._root, entry.parent)
            shutil.move(entry, str(self._free_path(entry)))
        else:
            # There are no renames. A repair that is killed after the copy has changed nothing.
            self.copy(entry)
            storage_of(self._root).lease_seconds_left()
            entry.unlink()
        sync_directory(entry.parent)

    def _free_path(self, path: Place) -> Place:
        # The directory is beside the root, because plain zarr would warn of unknown files inside.
        root = self._root.absolute()
        folder = root.parent / f"{root.name}.damaged"
        self._result.backup = str(folder)
        target = folder / str(path.absolute()).removeprefix(f"{root}/")
        inside(folder.parent, target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        free, number = target, 0
        while free.exists():
            number += 1
            free = target.parent / f"{target.name}.{number}"
        return free


def _repair_documents(
    root: Root, chains: Survey, backup: _Backup, result: Repaired, dry_run: bool
) -> None:
    """Write metadata again that only other readers of zarr need, as the tables imply it."""
    wrong: list[tuple[Place, bytes]] = []
    for folder in root.store.group_paths():
        if verify.group_problem(folder / "zarr.json") is not None:
            wrong.append((folder, layout.group_json({})))
    for segment in chains.segments.values():
        wrong += [(folder, content) for folder, content, _ in verify.wrong_documents(segment)]
    for folder, content in wrong:
        result.documents.append(str(folder / "zarr.json"))
        if not dry_run:
            backup.copy(folder / "zarr.json")
            inside(root.path, folder).mkdir(parents=True, exist_ok=True)
            arrays.replace_file(folder, "zarr.json", content)
            sync_directory(folder)
