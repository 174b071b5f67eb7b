"""Repair damaged steps with the data of other steps and leaves, and name what is lost.

Reconstructed leaves are written whole to new segments, and the steps get new manifests. Committed
files are never changed in place. Documents that are replaced or set aside are kept in
``<root>.damaged``. Segments that no step needs any more stay until they are collected.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltacheck.errors import Damaged, NotACheckpointRoot, StepNotFound, UnsupportedFormat
from deltacheck.leaf import tiles
from deltacheck.maintain import verify
from deltacheck.maintain.reconstruct import Content, Damage, Irrecoverable, Reconstructor
from deltacheck.maintain.survey import Survey, survey
from deltacheck.restore import read
from deltacheck.restore.chain import resolve_chains
from deltacheck.save.chains.whole_leaves import RewrittenLeaves, manifest_on
from deltacheck.store import collect, layout
from deltacheck.store.commit import commit
from deltacheck.store.documents import encode_manifest
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.containment import inside
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest, SegmentRef
from deltacheck.store.roots.manager_steps import MANAGER_STORE
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root, open_segments
from deltacheck.store.roots.store import Store


@dataclass(frozen=True, slots=True)
class Healed:
    """A leaf that was repaired. The field names are keys of ``deltacheck repair --json``.

    Attributes:
        step: Training step.
        leaf: Path of the leaf.
        source: The data that it was repaired from. If the leaf is in tiles, begins with the tile.
    """

    step: int
    leaf: str
    source: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A leaf or a step that cannot be repaired.

    Attributes:
        step: Training step, ``None`` if its manifest cannot be read.
        leaf: Path of the leaf, ``None`` for the whole step.
        chunks: Numbers of the lost chunks; empty if they are unknown.
        problem: The reason. If the leaf is in tiles, begins with the tile.
    """

    step: int | None
    leaf: str | None
    chunks: tuple[int, ...]
    problem: str


@dataclass(slots=True)
class Repaired:
    """The result of a repair, or of a dry run.

    Attributes:
        documents: ``zarr.json`` files that were written again.
        healed: The leaves that were repaired.
        lost: The leaves and steps that cannot be repaired.
        steps: Training steps that were repaired.
        removed: Manifests whose steps a lossy repair set aside.
        backup: Directory of the documents that were replaced or set aside, ``None`` if there are
            none.
        stored_bytes: Size of the new segments.
    """

    documents: list[str] = field(default_factory=list)
    healed: list[Healed] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    backup: str | None = None
    stored_bytes: int = 0


def repair_root_document(path: Path, result: Repaired, *, dry_run: bool = False) -> None:
    """Write the ``zarr.json`` of a root that has lost its own.

    Args:
        path: Path of the root.
        result: Result to add the document to.
        dry_run: If true, change nothing.

    Raises:
        NotACheckpointRoot: If there are no segments, which would show that it was a root.
    """
    for store in (path, path / MANAGER_STORE):
        if Store(inside(path, store)).segment_ids():
            try:
                open_root(path)
            except Damaged:
                document = store / "zarr.json"
                result.documents.append(str(document))
                if not dry_run:
                    _Backup(path, result).copy(document)
                    attributes = {
                        "format": layout.FORMAT,
                        "version": layout.VERSION,
                        "must_understand": [],
                    }
                    content = layout.group_json({layout.ATTRIBUTE: attributes})
                    arrays.replace_file(store, "zarr.json", content)
            return
    raise NotACheckpointRoot(
        f"{path} is not a deltacheck root, and no segments show that it was one"
    )


def repair(
    root: Root,
    step: int | None = None,
    *,
    dry_run: bool = False,
    lossy: bool = False,
    result: Repaired | None = None,
) -> Repaired:
    """Repair the steps of a root as far as other data allows.

    A step is repaired completely or not at all. One leaf and the digests of all chunks are in
    memory at a time. The caller must hold the lease, except for a dry run.

    Args:
        root: Root to repair.
        step: The training step to repair. Default: all steps.
        dry_run: If true, change nothing.
        lossy: If false, steps that cannot be repaired stay as they are. If true, they and
            manifests that cannot be read are set aside: the newest step restores and ``gc`` works
            again, but the sound leaves of these steps are set aside too.
        result: A result to add to. Default: a new one.

    Returns:
        The leaves that were repaired, and what is lost.

    Raises:
        StepNotFound: If there is no such step.
        StorageFailed: If the root is in an object store; copy it to a disk first.
    """
    result = result or Repaired()
    # The caller may have read manifests before the root's document was repaired, and a root keeps
    # them.
    root = root.afresh()
    backup = _Backup(storage.local(root.path, "a repair"), result)
    manifests, unreadable = root.manifests()
    is_readable = step in {manifest.step for manifest in manifests.values()}
    if step is not None and not is_readable and not unreadable:
        raise StepNotFound(f"{root.path} has no step {step}")
    for path, error in sorted(unreadable.items()):
        problem = f"{error}: the step cannot be repaired, because nothing else describes it"
        result.lost.append(Lost(None, None, (), problem))
        # A manifest that cannot be read does not say its step. If the requested step is readable,
        # this one is another.
        if lossy and _is_spoilt(error) and (step is None or not is_readable):
            result.removed.append(str(path))
            if not dry_run:
                backup.set_aside(_step_folder(root, path))
    chains = survey(root, manifests.values(), without_lost=True)
    _repair_documents(root, chains, backup, result, dry_run)
    damage = Damage.find(manifests.values(), chains)
    reconstructor = Reconstructor(chains, damage, list(manifests.values()))
    damaged = [
        (path, manifest)
        for path, manifest in manifests.items()
        if manifest.seq in damage.leaves and step in (None, manifest.step)
    ]
    repairable: dict[Place, Manifest] = {}
    for path, manifest in damaged:
        healed, lost = _reconstruct_step(reconstructor, manifest)
        if not lost:
            repairable[path] = manifest
            result.healed += healed
            result.steps.append(manifest.step)
            continue
        result.lost += lost
        # A step that restores is never taken away, whatever the survey says of its files.
        if lossy and not _restores(root, manifest):
            result.removed.append(str(path))
            if not dry_run:
                backup.set_aside(_step_folder(root, path))
            # Steps that were set aside must not be committed again below.
            manifests.pop(path)
    # All later steps are committed again, and a commit is refused below a newer checkpoint.
    obstacle = next(
        (
            path
            for path in unreadable
            if not lossy and repairable and _is_newer(path, next(iter(repairable)))
        ),
        None,
    )
    if obstacle is not None:
        problem = (
            f"it could be repaired, but not before {obstacle}, which is newer and cannot be read,"
            " is set aside (--lossy)"
        )
        result.lost += [Lost(manifest.step, None, (), problem) for manifest in repairable.values()]
        result.healed, result.steps = [], []
    elif repairable and not dry_run:
        _write(root, manifests, repairable, reconstructor, backup, result)
    return result


def _is_spoilt(error: Damaged | UnsupportedFormat) -> bool:
    """Return whether no other user and no other version could read a document either."""
    return isinstance(error, Damaged) and not isinstance(error.__cause__, PermissionError)


def _restores(root: Root, manifest: Manifest) -> bool:
    """Return whether every stored leaf of a step gives the saved bytes, one leaf at a time."""
    try:
        open_segments(root, manifest)
        for path in manifest.stored:
            chains = resolve_chains(root, manifest, [path])
            read.read_chunks(chains, {path: list(range(chains[path].spec.chunk_count))})
    except Damaged:
        return False
    return True


def _step_folder(root: Root, manifest_path: Place) -> Place:
    """Return the directory of a step. In a manager root, it holds the directories of the items."""
    folder = manifest_path.parent
    # A link in a step's place has no item: it is the step.
    return folder.parent if root.is_manager_root and folder.parent != root.path else folder


def _reconstruct_step(
    reconstructor: Reconstructor, manifest: Manifest
) -> tuple[list[Healed], list[Lost]]:
    """Return the lost leaves of a step that can be reconstructed, and those that cannot."""
    healed, lost = [], []
    for stored_path in reconstructor.damage.leaves[manifest.seq]:
        leaf = tiles.leaf_of(stored_path)
        content = reconstructor.reconstruct(manifest, stored_path)
        if isinstance(content, Irrecoverable):
            lost.append(Lost(manifest.step, leaf, content.chunks, content.problem))
        else:
            source = tiles.message_prefix(stored_path) + content.source
            healed.append(Healed(manifest.step, leaf, source))
    return healed, lost


def _is_newer(path: Place, reference: Place) -> bool:
    return _seq_of(path) >= _seq_of(reference)


def _seq_of(manifest_path: Place) -> list[int]:
    """Return the sequence number in the name of a manifest's directory (``c0000000012``)."""
    return [int(part) for part in manifest_path.parent.name.split("c") if part.isdigit()]


class _Backup:
    """A directory beside the root for documents that are replaced or set aside.

    They keep their names, with a number if the name exists already.
    """

    def __init__(self, root: Path, result: Repaired) -> None:
        self._root = root
        self._result = result

    def copy(self, document: Place) -> None:
        """Copy a file that will be replaced."""
        path = Path(str(document))
        inside(self._root, path.parent)
        # A link is not followed and not copied: it could lead out of the root.
        if path.is_file() and not path.is_symlink():
            shutil.copy2(path, self._free_path(path))

    def set_aside(self, entry: Place) -> None:
        """Move a file or directory away."""
        path = Path(str(entry))
        inside(self._root, path.parent)
        shutil.move(path, self._free_path(path))
        sync_directory(path.parent)

    def _free_path(self, path: Path) -> Path:
        # The directory is beside the root, because plain zarr would warn of unknown files inside.
        folder = self._root.with_name(f"{self._root.name}.damaged")
        self._result.backup = str(folder)
        target = folder / path.relative_to(self._root)
        inside(folder.parent, target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        free, number = target, 0
        while free.exists():
            number += 1
            free = target.with_name(f"{target.name}.{number}")
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
        wrong += list(verify.wrong_documents(segment))
    for folder, content in wrong:
        result.documents.append(str(folder / "zarr.json"))
        if not dry_run:
            backup.copy(folder / "zarr.json")
            inside(root.path, folder).mkdir(parents=True, exist_ok=True)
            arrays.replace_file(folder, "zarr.json", content)
            sync_directory(folder)


def _write(
    root: Root,
    manifests: Mapping[Place, Manifest],
    repairable: Mapping[Place, Manifest],
    reconstructor: Reconstructor,
    backup: _Backup,
    result: Repaired,
) -> None:
    """Write the reconstructed leaves, and commit new manifests.

    Every step from the first repaired one on gets a new sequence number, so that the order of the
    steps stays. The newest step is committed first: at any moment the newest step of the root is
    the one that it was before.
    """
    first_seq = min(manifest.seq for manifest in repairable.values())
    later_steps = [
        (path, manifest) for path, manifest in manifests.items() if manifest.seq >= first_seq
    ]
    next_seq = root.next_seq()
    renewals: list[tuple[Place, Manifest, Manifest]] = []
    for seq, (path, manifest) in enumerate(later_steps, next_seq):
        segments = manifest.segments
        if path in repairable:
            lost = reconstructor.damage.leaves[manifest.seq]
            needed_ids = reconstructor.needed_segments(manifest, lost)
            segments = tuple(ref for ref in manifest.segments if ref.id in needed_ids)
            if lost:
                segment = _write_leaves(root, seq, manifest, reconstructor)
                segments = (*segments, segment)
                result.stored_bytes += segment.stored_bytes
        renewals.append((path, manifest, manifest_on(root, manifest, seq, segments, "repairing")))
    for path, before, after in reversed(renewals):
        # The old manifest is copied before it is replaced or deleted, so that a wrong repair can be
        # undone.
        backup.copy(path)
        if root.is_manager_root:
            arrays.replace_file(path.parent, "zarr.json", encode_manifest(after))
            sync_directory(path.parent)
        else:
            commit(root.path, after, root.store.durability, again=True)
            collect.delete_checkpoint(root, before.seq)


def _write_leaves(
    root: Root, seq: int, manifest: Manifest, reconstructor: Reconstructor
) -> SegmentRef:
    """Write the lost leaves of a step to a new segment, one leaf at a time."""
    leaves = sorted(reconstructor.damage.leaves[manifest.seq])
    specs = [manifest.stored[leaf].spec(leaf) for leaf in leaves]
    writer = RewrittenLeaves(root.store.writer(seq), specs)
    for leaf, spec in zip(leaves, specs, strict=True):
        # Reconstructed a second time: all leaves together may not fit the memory.
        content = reconstructor.reconstruct(manifest, leaf)
        assert isinstance(content, Content)
        writer.add_whole(spec, manifest.stored[leaf].digest, content.digests, content.data)
    return writer.finish()
