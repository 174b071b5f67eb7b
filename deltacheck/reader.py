"""Read checkpoints as NumPy arrays.

No framework needs to be installed, whichever framework wrote the checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

from numpy.typing import NDArray

from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.limits import Limits, applied
from deltacheck.maintain import branch, verify
from deltacheck.maintain.branch import Branched
from deltacheck.restore import damage
from deltacheck.restore.content import as_array, bounded_slices
from deltacheck.restore.resolve import (
    require_contract,
    require_leaves,
    resolve_leaves,
    select_paths,
)
from deltacheck.restore.values import load_boxes, load_leaves
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots import tags
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root

Slices: TypeAlias = Mapping[str, Sequence["slice | int"]]


@typed
class Checkpoints:
    """The committed checkpoints of a root, returned by ``deltacheck.open``.

    It takes no lock and writes nothing in the root, so it is safe beside a running training.

    Args:
        root: The opened root.
        limits: The most that each call may take; ``None``: the default limits.

    Attributes:
        restored_step: The training step that the last ``restore`` returned; ``None`` before the
            first.
    """

    def __init__(self, root: Root, limits: Limits | None = None) -> None:
        self._root = root
        self._limits = limits
        self.restored_step: int | None = None

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.path)!r}, steps={self.steps()})"

    @property
    def path(self) -> Path | ObjectPath:
        """Return the root: a directory, or a prefix of an object store."""
        return self._root.path

    def steps(self) -> list[int]:
        """Return the committed training steps.

        Returns:
            The step numbers, ascending.
        """
        return self._root.steps()

    def latest_step(self) -> int | None:
        """Return the step that ``restore()`` returns: the newest save.

        It is not the highest number if a run has gone back and on from an earlier step.

        Returns:
            The step number; ``None``: the root has no step.

        Raises:
            Damaged: A manifest that cannot be read may be that of the newest step.
        """
        return self._root.latest_step()

    def tags(self) -> dict[str, int]:
        """Return the training step of each tag.

        A tag refers to one save. If a later save has the same step number, restore the tagged one
        by its tag.

        Returns:
            The step numbers, by tag.
        """
        return {name: tag.step for name, tag in tags.read_all(self._root.store.path)[0].items()}

    def digest(self, step: int | str | None = None) -> str:
        """Return the digest of a step, for use as ``expected_digest`` in a later restore.

        Args:
            step: A step number or a tag; ``None``: the newest step.

        Returns:
            ``"sha256:..."``, computed from the manifest, which names digests of all content.

        Raises:
            StepNotFound: The root does not have the step.
            Damaged: The manifest cannot be read.
        """
        return self._root.digest_of(self._root.manifest(step))

    def manifest(self, step: int | str | None = None) -> Manifest:
        """Return the manifest of a step: its leaves, their digests, and its segments.

        Args:
            step: A step number or a tag; ``None``: the newest step.

        Returns:
            The manifest.

        Raises:
            StepNotFound: The root does not have the step.
            Damaged: The manifest cannot be read.
            UnsupportedFormat: The step needs a newer version of deltacheck.
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
        """Restore a step and verify every byte of it.

        Only the chunks that are needed are read.

        Args:
            step: A step number or a tag; ``None``: the newest step.
            leaves: Paths of leaves, subtrees (``"model"``) or patterns (``"*/exp_avg"``; ``*`` also
                matches ``/``), as for ``--leaves`` of the command. Fewer leaves: less to read and
                less memory. ``None``, without ``slices``: the whole tree.
            slices: Boxes to restore, by leaf path: one slice of step 1 or one integer for each
                axis, where an integer keeps its axis with length 1. Missing slices take the whole
                axis. If a path is also in ``leaves``, the box is returned.
            contract: ``"exact"`` or ``"bounded"``: refuse leaves that were saved under a weaker
                contract. ``None``: accept every leaf as it was saved.
            max_bytes: Refuse to allocate more bytes than this. ``None``: the ``limits`` of
                ``open``, and the memory of the machine.
            fallback: If the step is damaged, restore the newest whole step before it. Training
                continues, but with older values; ``restored_step`` and a warning in the log name
                the step. ``False``: raise ``Damaged``.
            expected_digest: Refuse the step if its manifest has another digest. ``SaveReport`` and
                ``Checkpoints.digest`` return digests. ``None``: accept what the root has.

        Returns:
            Without ``leaves`` and ``slices`` the nested tree that was saved, with NumPy arrays in
            their own dtypes (those that NumPy lacks from ml_dtypes). Tied leaves are one array.
            Otherwise a flat dict of arrays by leaf path (``"model/weight"``), without Python
            values, and also if all leaves are named.

        Raises:
            StepNotFound: The root does not have the step.
            LeafNotFound: The step does not have a leaf.
            ContractNotMet: Some leaves were saved under a weaker contract; names them.
            Damaged: Content, a manifest or the digest of the step is not the expected one; names
                step, leaf, file and the steps that are whole. ``ChainBroken`` is one kind of it.
            BudgetExceeded: The restore would allocate more than ``max_bytes``.
            ValueError: A slice is invalid, or ``contract`` is not a contract.
        """
        # Once: a fallback may try several steps.
        names = [leaves] if isinstance(leaves, str) else list(leaves or ())

        def restore_step(_: Root, manifest: Manifest) -> Any:
            # Before any content is read: the manifest names the digests of all content, so its own
            # digest covers the step.
            self._root.require_digest(manifest, expected_digest)
            with damage.named(self._root, manifest):
                if leaves is None and slices is None:
                    require_leaves(self._root, manifest)
                    require_contract(manifest, contract)
                    return self._tree(manifest, max_bytes)
                return self._leaves(manifest, names, dict(slices or {}), contract, max_bytes)

        with applied(self._limits):
            if fallback:
                manifest, content = damage.newest_whole([self._root], step, restore_step)
            else:
                manifest = self.manifest(step)
                content = restore_step(self._root, manifest)
        # Set last, so that a restore that fails leaves it as it was.
        self.restored_step = manifest.step
        return content

    def _leaves(
        self,
        manifest: Manifest,
        names: list[str],
        slices: Slices,
        contract: str | None,
        max_bytes: int | None,
    ) -> dict[str, NDArray[Any]]:
        """Restore some leaves, and boxes of some, by path."""
        tree_owners = tree.array_paths(manifest.tree)
        require_leaves(self._root, manifest, names)
        paths = select_paths(tree_owners, names, manifest.step)
        requested = list(dict.fromkeys([*paths, *slices]))
        # A path that is in no tree is refused below.
        owners = {path: tree_owners.get(path, path) for path in requested}
        # Tied leaves have one contract: that of the leaf that holds their bytes.
        require_contract(manifest, contract, owners.values())
        # A leaf that is also requested whole, by its own path or that of a tied leaf, is read
        # whole.
        partly = {owners[path] for path in slices} - {owners[path] for path in paths}
        resolved = resolve_leaves(
            self._root,
            manifest,
            [owners[path] for path in requested],
            max_bytes=max_bytes,
            partly=partly,
            boxes=self._tile_boxes(manifest, slices, owners, partly),
        )
        tags = tree.flat_tags(manifest.tree)
        whole_leaves = {
            owners[path]: resolved[owners[path]] for path in requested if path not in slices
        }
        # All slices are checked here, before content is read.
        boxes = {
            path: bounded_slices(path, resolved[owners[path]].spec.shape, box)
            for path, box in slices.items()
        }
        arrays: dict[str, NDArray[Any]] = {}
        for owner, item in load_leaves(whole_leaves, max_bytes=max_bytes).items():
            arrays |= {
                path: _shaped(as_array(item), tags.get(path), owner)
                for path in requested
                if owners[path] == owner and path not in boxes
            }
        for path, box in boxes.items():
            budget = max_bytes
            if max_bytes is not None:
                budget = max(0, max_bytes - sum(array.nbytes for array in arrays.values()))
            leaf = resolved[owners[path]]
            arrays[path] = load_boxes({path: leaf}, {path: box}, max_bytes=budget)[path]
        return {path: arrays[path] for path in requested}

    def _tile_boxes(
        self, manifest: Manifest, slices: Slices, owners: Mapping[str, str], partly: Container[str]
    ) -> dict[str, tuple[slice, ...]]:
        """Return the box of each tiled leaf of which only this box is needed."""
        tiled = {path: owners[path] for path in slices if owners[path] in manifest.tiles}
        return {
            owner: bounded_slices(path, manifest.tiles[owner].shape, slices[path])
            for path, owner in tiled.items()
            # Several boxes of one leaf may need all of its tiles.
            if owner in partly and list(tiled.values()).count(owner) == 1
        }

    def _tree(self, manifest: Manifest, max_bytes: int | None) -> Any:
        """Restore the whole tree."""
        loaded = load_leaves(
            resolve_leaves(self._root, manifest, max_bytes=max_bytes), max_bytes=max_bytes
        )
        arrays = {path: as_array(item) for path, item in loaded.items()}

        def place(path: str, owner: str, tag: str | None) -> NDArray[Any]:
            array = _shaped(arrays[owner], tag, owner)
            # Indexing with ``()`` gives the scalar that was saved, in place of a 0-d array.
            return array[()] if tag == tree.NUMPY_SCALAR else array

        return tree.unflatten(manifest.tree, place)

    def branch(
        self, step: int | str | None, to: str | os.PathLike[str], *, copy: bool = False
    ) -> Branched:
        """Create a new root that begins with a step of this root and continues independently.

        Args:
            step: A step number or a tag; ``None``: the newest step.
            to: The new root: a directory that is empty or does not exist, or a prefix of an object
                store without steps, to which files are copied.
            copy: Copy the files. This takes their space, but damage to one root does not affect the
                other. ``False``: share files by hard links, which takes no space.

        Returns:
            The step, and the bytes that both roots share or that were copied.

        Raises:
            StepNotFound: The root does not have the step.
            NotACheckpointRoot: ``to`` is not empty.
            Damaged: The step is not whole. ``ChainBroken`` is one kind of it.
            StorageFailed: The file system or an object store refused a link or a copy.
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
        redundant: bool = False,
    ) -> list[verify.Finding]:
        """Check steps and return the problems that were found.

        A shallow check covers manifests, segment tables, chains and the metadata of all arrays.
        ``deltacheck.maintain.verify.check`` also returns how much was read.

        Args:
            step: A step number or a tag; ``None``: all steps.
            deep: Also read, decode and compare all content. ``False``: faster, but does not detect
                damaged content.
            subset: Share of the content to read, 0 to 1. Smaller: faster, and damage is found later
                on average. ``None``: all.
            seed: Selects the subset: the same seed selects the same chains. ``None``: another
                subset each time.
            resume: A file that records the progress, so that the next call continues. ``None``:
                begin again.
            redundant: If true, damage to files that no restore needs is returned too (chunk
                digests, the metadata that other readers of zarr need). If false, only damage for
                which a restore is refused.

        Returns:
            The problems; empty if there are none.
        """
        with applied(self._limits):
            result = verify.check(
                self._root, step, deep=deep, subset=subset, seed=seed, resume=resume
            )
        return [*result.findings, *(result.redundant if redundant else ())]


# The name hides the built-in in this module, but callers write ``deltacheck.open``.
@typed
def open(
    path: str | os.PathLike[str] | ObjectPath,
    *,
    item: str | None = None,
    storage: ObjectStore | None = None,
    limits: Limits | None = None,
) -> Checkpoints:
    """Open a root for reading.

    Args:
        path: A root that an ``Engine`` or an Orbax ``CheckpointManager`` wrote: a directory, or
            ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        item: The item of the manager's steps. It is required if the steps have more than one.
        storage: Access to an object store; ``None``: settings of the environment.
        limits: The most that each call on the result may take. Smaller: a forged root takes less
            memory and time; larger: larger steps pass. ``None``: what no root that this package
            wrote reaches.

    Returns:
        The committed checkpoints of the root.

    Raises:
        NotACheckpointRoot: There is no root at ``path``.
        UnsupportedFormat: The root needs a newer version of deltacheck.
        StorageFailed: The object store refused the request or did not answer.
    """
    return Checkpoints(open_root(path, item, storage=storage), limits)


def _shaped(array: NDArray[Any], tag: str | None, path: str) -> NDArray[Any]:
    """Return a leaf in the shape that its tag states."""
    # Some leaves are stored flat. Their tag has the shape that the state had.
    shape = tree.shape_in(tag, array.size, path)
    return array if shape is None else array.reshape(shape)
