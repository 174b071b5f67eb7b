"""The committed steps of a root.

``opening`` describes the two arrangements of a root.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from deltacheck.errors import ChainBroken, Damaged, StepNotFound, UnsupportedFormat
from deltacheck.store import documents, layout
from deltacheck.store.compact import LaneTables
from deltacheck.store.files.local_storage import list_directory
from deltacheck.store.files.storage import Place, local, storage_of, subdirectories
from deltacheck.store.manifest import Brief, Manifest, SegmentRef, SegmentTable
from deltacheck.store.roots import manager_steps, tags
from deltacheck.store.roots.manifest_cache import ManifestCache
from deltacheck.store.roots.store import Store
from deltacheck.store.roots.wording import describe_steps, way_out
from deltacheck.store.segment import Segment

_Read = TypeVar("_Read", Manifest, Brief)
Errors: TypeAlias = dict[Place, Damaged | UnsupportedFormat]


@dataclass(frozen=True, slots=True)
class StepRef:
    """A committed checkpoint: its manifest file, and the part of it that a listing needs."""

    manifest_path: Place
    brief: Brief

    @property
    def step(self) -> int:
        """Training step."""
        return self.brief.step

    @property
    def seq(self) -> int:
        """Sequence number."""
        return self.brief.seq


class Root:
    """A root opened for reading. It takes no lock and writes nothing; ``open_root`` makes one.

    Args:
        path: The root.
        store: Its segments: the root's own, or those in ``deltacheck/`` of a manager root.
        item: In a manager root, the item whose manifests are meant; ``None``: of any item.
    """

    def __init__(self, path: Place, store: Store, item: str | None = None) -> None:
        self.path = path
        self.store = store
        self.is_manager_root = store.path != path
        self._item = item
        self._cache = ManifestCache()

    def afresh(self) -> Root:
        """Return the same root with nothing cached, so that all is read from the storage."""
        store = Store(self.store.path, self.store.durability)
        return Root(self.path, store, self._item)

    def manifest_paths(self) -> list[Place]:
        """Return every committed manifest file, readable or not."""
        if not self.is_manager_root:
            return storage_of(self.path / layout.CHECKPOINTS).manifests(self._cache.known())
        known = {_local(path) for path in self._cache.known()}
        return [*manager_steps.step_manifests(_local(self.path), self._item, known)]

    def other_manifest_paths(self, own: Collection[Place]) -> list[Place]:
        """Return files of a manager root that may be manifests and belong to no step of it.

        Their segments may still be needed; see ``manager_steps.other_manifests``.

        Args:
            own: The manifests of its steps.
        """
        if not self.is_manager_root:
            return []
        return [*manager_steps.other_manifests(_local(self.path), [_local(path) for path in own])]

    def unwritten_folders(self, own: Collection[Place]) -> list[Place]:
        """Return the folders of steps that have no manifest, as a deletion leaves them.

        Args:
            own: The manifests of the steps.
        """
        if not self.is_manager_root:
            folders = subdirectories(self.path / layout.CHECKPOINTS)
            return [e for e in folders if not storage_of(e / "zarr.json").name_exists()]
        return [*manager_steps.unwritten_folders(_local(self.path), [_local(path) for path in own])]

    def checkpoints(self) -> list[StepRef]:
        """Return the checkpoints with an undamaged manifest, ascending by sequence number.

        Damaged ones cannot be restored and are left out; ``verify`` names them.
        """
        return self.read_all()[0]

    def steps(self) -> list[int]:
        """Return the committed training steps, ascending."""
        return sorted({ref.step for ref in self.checkpoints()})

    def latest_step(self) -> int | None:
        """Return the training step of the newest checkpoint; ``None`` if there is none."""
        try:
            return self.manifest().step
        except StepNotFound:
            return None

    def manifest(self, step: int | str | None = None) -> Manifest:
        """Return the manifest of a step.

        Args:
            step: A training step (its newest save, if a resumed run repeated the step), a tag, or
                ``None`` or ``"latest"`` for the newest checkpoint.

        Raises:
            StepNotFound: There is no such step; the message names the existing ones.
            Damaged: A manifest that cannot be read may be the one that is meant. Only the caller
                can decide to use an older step instead.
        """
        if step == layout.LATEST:
            step = None
        if isinstance(step, str):
            return self._tagged(step)
        newest = self._newest(step)
        if newest is not None:
            return newest
        checkpoints, damaged = self.read_all()
        matching = [ref for ref in checkpoints if step is None or ref.step == step]
        # A damaged manifest may be the step that is meant: any of them if none matches, a newer one
        # if the newest is asked for.
        if not matching:
            _refuse_damaged(self, damaged, step)
        elif step is None:
            _refuse_damaged(self, damaged, step, checkpoints[-1].manifest_path)
        if not matching:
            raise StepNotFound(
                f"{self.path} has no step {'at all' if step is None else step}."
                f" {describe_steps(self.steps())}"
            )
        match = max(matching, key=lambda ref: ref.seq)
        if self.is_manager_root and self._item is None:
            _require_one_item(self, [ref for ref in matching if ref.step == match.step])
        return self.read(match.manifest_path)

    def _tagged(self, name: str) -> Manifest:
        """Return the manifest of a tag's save, even if its step number was saved again since."""
        tag = tags.find(self.store.path, name)
        own_path = self.path / layout.CHECKPOINTS / layout.checkpoint_id(tag.seq) / "zarr.json"
        paths = (
            []
            if self.is_manager_root
            else [own_path, *(path for path in reversed(self.manifest_paths()) if path != own_path)]
        )
        problem = None
        for path in paths:
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue
            except (Damaged, UnsupportedFormat) as error:
                problem = problem or error
                continue
            if manifest.nonce == tag.nonce:
                return manifest
        if problem is not None:
            raise problem
        raise StepNotFound(
            f"tag {name!r} is step {tag.step} (seq {tag.seq}), which is not there any more."
            f" {describe_steps(self.steps())}"
        )

    def _newest(self, step: int | None) -> Manifest | None:
        """Return the result of ``manifest`` without reading every other manifest.

        In an engine root the directories' names are the sequence numbers, so the first match, from
        the newest down, is the result. ``None``: a manifest on the way cannot be read or lies under
        another number, so all must be read.
        """
        for path in () if self.is_manager_root else reversed(self.manifest_paths()):
            try:
                manifest = self.read(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            # The damaged manifest may be the one that is meant. ``manifest`` decides that with all
            # of them.
            except (Damaged, UnsupportedFormat):
                return None
            if step is None or manifest.step == step:
                return manifest
        return None

    def read_all(self) -> tuple[list[StepRef], dict[Place, Damaged | UnsupportedFormat]]:
        """Return the checkpoints by sequence number, and the errors of unreadable manifests.

        ``read`` checks the rules for what is not in a brief.
        """
        briefs, damaged = self.briefs()
        checkpoints: list[StepRef] = []
        for path, brief in briefs.items():
            try:
                self._check_place(path, brief)
            except Damaged as error:
                damaged[path] = error
            else:
                checkpoints.append(StepRef(path, brief))
        return sorted(checkpoints, key=lambda ref: ref.seq), damaged

    def manifests(self) -> tuple[dict[Place, Manifest], Errors]:
        """Return all manifests by sequence number, and the errors; every rule is checked."""
        found, damaged = self._read_each(self.read, whole=True)
        return dict(sorted(found.items(), key=lambda item: item[1].seq)), damaged

    def _read_each(
        self, read: Callable[[Place], _Read], *, whole: bool
    ) -> tuple[dict[Place, _Read], Errors]:
        """Return what ``read`` returns for each manifest file, and its errors."""
        results: dict[Place, _Read] = {}
        damaged: Errors = {}
        paths = self.manifest_paths()
        self._cache.start(paths, whole=whole)
        for path in paths:
            try:
                results[path] = read(path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (Damaged, UnsupportedFormat) as error:
                damaged[path] = error
        self._cache.forget(paths)
        return results, damaged

    def read(self, path: Place) -> Manifest:
        """Return a committed manifest; it is decoded again only if its file has changed.

        Raises:
            FileNotFoundError: There is no such file.
            Damaged: It is not the manifest of this checkpoint.
        """
        storage_of(path.parent).check_directory()
        manifest = self.with_tables(self._cache.read(path))
        self._check_place(path, manifest)
        return manifest

    def _check_place(self, path: Place, manifest: _Read) -> None:
        """Raise ``Damaged`` if a manifest lies in the directory of another checkpoint."""
        # A handler of its own may keep a manifest elsewhere, where no name tells its step.
        if not self.is_manager_root or path.parents[2] == self.path:
            documents.check_place(path, manifest, self.is_manager_root)

    def with_tables(self, manifest: Manifest) -> Manifest:
        """Let a manifest of this root find the digests that it leaves to its segments."""
        if not manifest.lane_digests or manifest.tables is not None:
            return manifest
        # Not the manifest, which would then refer to itself.
        brief = Brief.of(manifest)

        def table_of(ref: SegmentRef) -> SegmentTable:
            try:
                return self.store.segment(ref).table
            except ChainBroken as error:
                _refuse_deleted(self, brief, error)
                raise

        return manifest.read_with(LaneTables(manifest, table_of))

    def brief(self, path: Place) -> Brief:
        """Return the part of a manifest that listings and collections need.

        Raises:
            FileNotFoundError: There is no such file.
            Damaged: It is not a manifest, or a listing cannot use it.
        """
        storage_of(path.parent).check_directory()
        brief = self._cache.brief(path)
        if not storage_of(path).listing_is_current:
            # Sequence numbers are taken from names there, so the name must be right.
            documents.check_place(path, brief, self.is_manager_root)
        return brief

    def briefs(self) -> tuple[dict[Place, Brief], dict[Place, Damaged | UnsupportedFormat]]:
        """Return the brief of every committed manifest, and the errors of unreadable ones."""
        return self._read_each(self.brief, whole=False)

    def digest_of(self, manifest: Manifest) -> str:
        """Return the ``manifest_digest`` of the file that this root has read ``manifest`` from."""
        return self._cache.digest_of(manifest)

    def require_digest(
        self, manifest: Manifest, expected: str | None, digest: str | None = None
    ) -> None:
        """Raise ``Damaged`` unless the manifest has the digest that the caller has kept.

        Args:
            manifest: A manifest that this root has read.
            expected: The digest that the caller has kept; ``None`` accepts any.
            digest: The digest that the manifest counts as; ``None``: ``digest_of``.
        """
        if expected is None:
            return
        digest = self.digest_of(manifest) if digest is None else digest
        if digest != expected:
            raise Damaged(
                f"step {manifest.step} of {self.path} is not the one that is expected: its manifest"
                f" has digest {digest}, expected is {expected}. Ask for the step that the digest"
                " was kept of"
            )

    def next_seq(self) -> int:
        """Return one more than any sequence number that this root has used."""
        if not storage_of(self.store.path).listing_is_current:
            # Committed numbers only: manifests are found by asking for the next few numbers, so
            # failed saves must not leave long gaps.
            committed = (layout.seq_of(path.parent.name) for path in self.manifest_paths())
            return max(committed, default=-1) + 1
        names = [
            *self.store.segment_ids(),
            *(e.name for e in list_directory(Path(str(self.store.path)) / layout.CHECKPOINTS)),
        ]
        used_seqs = [
            layout.seq_of(name)
            for name in names
            if layout.is_segment_id(name) or layout.is_checkpoint_id(name)
        ]
        if self.is_manager_root:
            used_seqs += [ref.seq for ref in self.checkpoints()]
        return max(used_seqs, default=-1) + 1


def _refuse_damaged(
    root: Root, damaged: Errors, step: int | None, newer_than: Place | None = None
) -> None:
    """Raise the error of the newest damaged manifest, if one is newer than another manifest."""
    suspects = [p for p in damaged if newer_than is None or _age(p) > _age(newer_than)]
    if suspects:
        error = damaged[max(suspects, key=_age)]
        target = "the newest step" if step is None else f"step {step}"
        raise type(error)(f"{target} of {root.path}: {error}. {way_out(whole_steps(root))}")


def _require_one_item(root: Root, saves: Sequence[StepRef]) -> None:
    """Raise ``StepNotFound`` if a step of a manager root has several items of ours."""
    items = sorted({ref.manifest_path.parent.name for ref in saves})
    if len(items) > 1:
        raise StepNotFound(
            f"step {saves[0].step} of {root.path} has the items {', '.join(items)}; say which:"
            " open(root, item=...) or --item"
        )


def newest_brief(root: Root) -> Brief | None:
    """Return the brief of the newest checkpoint whose manifest can be read."""
    if root.is_manager_root:
        return max(root.briefs()[0].values(), key=lambda brief: brief.seq, default=None)
    # The names of the directories are the sequence numbers.
    for path in reversed(root.manifest_paths()):
        with contextlib.suppress(FileNotFoundError, Damaged, UnsupportedFormat):
            return root.brief(path)
    return None


def whole_steps(
    root: Root,
    needs: Callable[[Manifest, Sequence[Segment]], bool] = lambda manifest, segments: False,
) -> list[int]:
    """Return the training steps whose segments all exist with the right tables, ascending.

    Args:
        root: The root.
        needs: A condition under which a step is left out, such as a need of a damaged file.
    """
    is_whole = {}
    # Of a step that was saved again the newest save counts, whole or not.
    for ref in root.checkpoints():
        try:
            manifest = root.read(ref.manifest_path)
            is_whole[ref.step] = not needs(manifest, open_segments(root, manifest))
        except (Damaged, FileNotFoundError):
            is_whole[ref.step] = False
    return sorted(step for step, restores in is_whole.items() if restores)


def open_segments(
    root: Root, manifest: Manifest, stored: Sequence[str] | None = None
) -> list[Segment]:
    """Open the segments of a step, in order.

    Args:
        root: The root of the step.
        manifest: The step.
        stored: Paths of stored leaves and tiles; only segments that these may need are opened.
            ``None``: all segments.

    Raises:
        ChainBroken: A segment is missing.
        Damaged: A segment's table is not the committed one.
        StepNotFound: The step was deleted meanwhile.
    """
    try:
        return root.store.segments(
            manifest.segments if stored is None else manifest.refs_of(stored)
        )
    except ChainBroken as error:
        _refuse_deleted(root, manifest, error)
        raise


def _refuse_deleted(root: Root, manifest: Manifest | Brief, error: ChainBroken) -> None:
    """Raise ``StepNotFound`` if a step with a missing segment does not exist any more."""
    if not _still_exists(root, manifest):
        raise StepNotFound(
            f"step {manifest.step} of {root.path} was deleted while it was being opened."
            f" {describe_steps(root.steps())}. A longer grace_seconds leaves more time"
        ) from error


def _still_exists(root: Root, manifest: Manifest | Brief) -> bool:
    """Return whether a step that was read still exists, in the form that was read."""
    paths = root.manifest_paths()
    if not root.is_manager_root:
        return any(path.parent.name == layout.checkpoint_id(manifest.seq) for path in paths)
    return any(brief.nonce == manifest.nonce for brief in root.briefs()[0].values()) or bool(
        root.briefs()[1]
    )


def _age(manifest_path: Place) -> tuple[int, str]:
    """Return a sort key for manifests that cannot be read: the number in a directory's name."""
    name = next((p.name for p in manifest_path.parents if p.name.lstrip("c").isdigit()), "")
    return int(name.lstrip("c") or 0), name


def _local(path: Place) -> Path:
    """Return a path of a manager root, which must be local."""
    return path if isinstance(path, Path) else local(path, "the root of Orbax's CheckpointManager")
