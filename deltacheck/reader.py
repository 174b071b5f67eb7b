"""Read checkpoints as NumPy, whichever framework wrote them and with none installed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

from numpy.typing import NDArray

from deltacheck.errors import StepNotFound
from deltacheck.leaf import tree
from deltacheck.maintain import blame, branch, verify
from deltacheck.maintain.blame import Blame
from deltacheck.maintain.branch import Branched
from deltacheck.restore import damage
from deltacheck.restore.content import as_array, bounded_slices
from deltacheck.restore.resolve import require_contract, resolve_leaves
from deltacheck.restore.values import load_boxes, load_leaves
from deltacheck.store import tags
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root, open_root

Slices: TypeAlias = Mapping[str, Sequence["slice | int"]]


class Checkpoints:
    """The committed checkpoints of a root. Takes no lock and writes nothing; safe beside a running
    training.

    Made by ``deltacheck.open``. ``restored_step``: the training step that the last ``restore``
    gave, ``None`` before the first.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.restored_step: int | None = None

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.path)!r}, steps={self.steps()})"

    @property
    def path(self) -> Path | ObjectPath:
        """The root that is read: a directory, or a prefix of an object store."""
        return self._root.path

    def steps(self) -> list[int]:
        """The training steps that are committed, ascending."""
        return self._root.steps()

    def tags(self) -> dict[str, int]:
        """The tags and their training steps. A tag means one save, also where a later one has the
        same number: restore it by the tag.
        """
        return {name: tag.step for name, tag in tags.read_all(self._root.store.path)[0].items()}

    def digest(self, step: int | str | None = None) -> str:
        """What to keep of a step (by default the newest) elsewhere, to ask for it with
        ``expected_digest``: ``"sha256:..."`` of its manifest.
        """
        return self._root.digest_of(self._root.manifest(step))

    def manifest(self, step: int | str | None = None) -> Manifest:
        """What a step (a number, or a tag; by default the newest checkpoint) is made of;
        ``StepNotFound`` where there is none.
        """
        return self._root.manifest(step)

    @overload
    def restore(
        self,
        step: int | str | None = None,
        leaves: None = None,
        slices: None = None,
        *,
        contract: str | None = None,
        max_bytes: int | None = None,
        fallback: bool = False,
        expected_digest: str | None = None,
    ) -> Any: ...

    @overload
    def restore(
        self,
        step: int | str | None = None,
        leaves: Iterable[str] | None = None,
        slices: Slices | None = None,
        *,
        contract: str | None = None,
        max_bytes: int | None = None,
        fallback: bool = False,
        expected_digest: str | None = None,
    ) -> dict[str, NDArray[Any]]: ...

    def restore(
        self,
        step: int | str | None = None,
        leaves: Iterable[str] | None = None,
        slices: Slices | None = None,
        *,
        contract: str | None = None,
        max_bytes: int | None = None,
        fallback: bool = False,
        expected_digest: str | None = None,
    ) -> Any:
        """Restore a step (a number, or a tag; by default the newest) and verify every byte of it.

        Without ``leaves`` and ``slices``: the whole tree, arrays as NumPy in their own dtype
        (bfloat16 and the like from ml_dtypes), tied leaves as one array. ``leaves``: only these
        leaf paths, as ``{path: array}``. ``slices``: ``{path: (slice | int, ...)}``, step-1 boxes,
        as ``{path: array}``; an integer keeps its axis with length 1. A leaf in both is cut. Only
        the chunks that are needed are read. ``contract``: refuse leaves that were saved under a
        weaker one than ``"exact"`` or ``"bounded"``; by default each comes as it was saved.
        ``max_bytes``: refuse before allocating more than this. ``fallback``: where the step is
        damaged, take the newest before it that is whole: training goes on, with older values;
        ``restored_step`` and a warning in the log say which. ``expected_digest``: refuse a step
        whose manifest has another digest than this, which the save's report and ``deltacheck show``
        give.

        A step that a gradient log stored needs its optimizer: here it raises ``ReplayNeeded``, but
        for leaves that are stored (``manifest(step).replay.steps`` names those of the gradients,
        too).

        Raises ``StepNotFound``, ``ContractNotMet`` (naming the leaves), ``Damaged`` or
        ``ChainBroken`` (naming step, leaf, file and the steps that still restore),
        ``BudgetExceeded``, ``ValueError`` for a wrong slice.
        """

        def give(manifest: Manifest) -> Any:
            self._root.require_digest(manifest, expected_digest)
            with damage.named(self._root, manifest):
                return self._give(manifest, leaves, slices, contract, max_bytes)

        if fallback:
            manifest, given = damage.newest_whole(self._root, step, give)
        else:
            manifest = self.manifest(step)
            given = give(manifest)
        self.restored_step = manifest.step
        return given

    def _give(
        self,
        manifest: Manifest,
        leaves: Iterable[str] | None,
        slices: Slices | None,
        contract: str | None,
        max_bytes: int | None,
    ) -> Any:
        if leaves is None and slices is None:
            require_contract(manifest, contract)
            return self._whole(manifest, max_bytes)
        owners = tree.array_paths(manifest.tree)
        leaves = None if leaves is None else list(leaves)
        wanted = list(dict.fromkeys([*(leaves or ()), *(slices or {})]))
        require_contract(manifest, contract, [owners.get(path, path) for path in wanted])
        partly = {owners.get(path, path) for path in slices or {}} - {
            owners.get(path, path) for path in leaves or ()
        }
        names = [owners.get(path, path) for path in wanted]
        cut = {
            path: owners.get(path, path)
            for path in slices or {}
            if owners.get(path, path) in manifest.tiles
        }
        alone = {  # of whose tiles not all are needed
            owner: bounded_slices(path, manifest.tiles[owner].shape, (slices or {})[path])
            for path, owner in cut.items()
            if owner in partly and list(cut.values()).count(owner) == 1
        }
        found = resolve_leaves(
            self._root, manifest, names, max_bytes=max_bytes, partly=partly, boxes=alone
        )
        loaded: dict[str, NDArray[Any]] = {}
        flat = tree.flat_tags(manifest.tree)
        owners |= {
            path: path for path in wanted if path not in owners
        }  # inputs of a replay, which no tree has
        whole = {owners[p]: found[owners[p]] for p in wanted if p not in (slices or {})}
        boxes = {
            p: bounded_slices(p, found[owners[p]].spec.shape, s) for p, s in (slices or {}).items()
        }
        budget = max_bytes
        for path, item in load_leaves(whole, max_bytes=budget).items():
            loaded |= {
                p: _shaped(as_array(item), flat.get(p), path)
                for p in wanted
                if owners[p] == path and p not in boxes
            }
        for path, box in boxes.items():
            leaf = found[owners[path]]
            if budget is not None:
                budget = max(0, budget - sum(array.nbytes for array in loaded.values()))
            loaded[path] = load_boxes({path: leaf}, {path: box}, max_bytes=budget)[path]
        return {path: loaded[path] for path in wanted}

    def _whole(self, manifest: Manifest, max_bytes: int | None) -> Any:
        loaded = load_leaves(
            resolve_leaves(self._root, manifest, max_bytes=max_bytes), max_bytes=max_bytes
        )
        arrays = {path: as_array(item) for path, item in loaded.items()}

        def place(path: str, owner: str, tag: str | None) -> NDArray[Any]:
            array = _shaped(arrays[owner], tag, owner)
            return array[()] if tag == tree.NUMPY_SCALAR else array

        return tree.unflatten(manifest.tree, place)

    def blame(
        self, step: int | str | None = None, leaves: Iterable[str] | None = None
    ) -> dict[str, Blame]:
        """Since which step each chunk of the stored leaves of a step (by default the newest) has
        its
        content, by leaf path.

        Reads tables and digests, no leaf. Raises ``StepNotFound``, for a leaf that the step does
        not store too, and ``Damaged`` or ``ChainBroken`` where a step on the way is not whole.
        """
        manifest = self.manifest(step)
        wanted = [*manifest.leaves, *manifest.tiles] if leaves is None else list(leaves)
        for path in wanted:
            if not manifest.names_of(path):
                raise StepNotFound(f"step {manifest.step} stores no leaf {path!r}")
        return blame.blame(self._root, manifest, wanted)

    def branch(
        self, step: int | str | None, to: str | os.PathLike[str], *, copy: bool = False
    ) -> Branched:
        """Make a root of its own at ``to``, new or empty, that begins with a step of this one
        (``None``: the newest) and goes on by itself.

        Files are shared by hard links, which takes no space; ``copy``: copied, which takes theirs,
        but damage to one root's is then none to the other's. Raises ``StepNotFound``, ``Damaged``
        or ``ChainBroken`` where the step is not whole, ``NotACheckpointRoot`` where ``to`` holds
        anything, ``OSError``.
        """
        return branch.branch(self._root, step, to, copy=copy)

    def verify(
        self,
        step: int | str | None = None,
        *,
        deep: bool = False,
        subset: float | None = None,
        seed: int | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> list[verify.Finding]:
        """Check the steps (by default all) and return what is wrong; an empty list means that
        nothing
        is.

        Shallow: manifests, segment tables, chains and every array's metadata. ``deep``: also reads,
        decodes and compares every byte. ``subset``: reads only this share of it, drawn by ``seed``;
        ``resume``: a file that keeps how far a check has come, from where the next one goes on.
        Both sides of these are in ``deltacheck.maintain.verify.check``, which also tells how much was read.
        """
        return list(
            verify.check(
                self._root, step, deep=deep, subset=subset, seed=seed, resume=resume
            ).findings
        )


def open(
    path: str | os.PathLike[str] | ObjectPath,
    *,
    item: str | None = None,
    storage: ObjectStore | None = None,
) -> Checkpoints:
    """Open a root for reading: one that ``Engine`` wrote, or the root of an Orbax
    ``CheckpointManager``.

    ``path``: a directory, or ``s3://bucket/prefix`` or ``gs://bucket/prefix``. ``item``: the item
    of a manager's steps, needed only where they have more than one. ``storage``: how an object
    store is reached (default: by the environment alone). Raises ``NotACheckpointRoot``,
    ``UnsupportedFormat``, ``StorageFailed`` where an object store does not answer.
    """
    return Checkpoints(open_root(path, item, storage=storage))


def _shaped(array: NDArray[Any], tag: str | None, path: str) -> NDArray[Any]:
    """A leaf in the shape that its tag gives it."""
    shape = tree.shape_in(tag, array.size, path)
    return array if shape is None else array.reshape(shape)
