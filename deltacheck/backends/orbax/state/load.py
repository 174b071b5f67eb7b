"""Restore a committed step as a JAX tree: leaves, forms and devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import place_numpy
from deltacheck.backends.orbax.state import leaves, pieces
from deltacheck.backends.orbax.state.metadata import as_tree
from deltacheck.backends.orbax.state.saved_shardings import concrete, saved_shardings
from deltacheck.backends.orbax.state.targets import (
    NUMPY_TAGS,
    ArrayRequest,
    TargetSelection,
    WantedPart,
    array_as,
    as_saved,
    as_targeted,
    in_saved_form,
    number_as,
    on_mesh,
)
from deltacheck.codec.base import U8
from deltacheck.errors import StepNotFound
from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import ArrayLeaf
from deltacheck.restore import damage
from deltacheck.restore.content import Loaded, as_array
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.restore.resolve import require_contract, require_leaves, select_paths
from deltacheck.restore.values import Request, StepReader
from deltacheck.store.files.object_path import ObjectStore
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root


@typed
def load(  # noqa: PLR0913 - one argument per option
    root: str | os.PathLike[str],
    step: int | None = None,
    target: Any = None,
    *,
    item: str | None = None,
    shardings: Any = None,
    leaves: str | Iterable[str] | None = None,
    contract: str | None = None,
    max_bytes: int | None = None,
    storage: ObjectStore | None = None,
    expected_digest: str | None = None,
    partial_restore: bool = False,
    cast: bool = False,
) -> Any:
    """Read a step of a ``CheckpointManager`` or of the torch ``Engine`` as JAX arrays.

    No lock is taken, and nothing is written.

    Args:
        root: The root.
        step: The step; ``None``: the newest.
        target: A tree of the result's structure, arrays or ``jax.ShapeDtypeStruct``, or the
            metadata of the item. ``...`` or ``None`` in the place of a leaf or a subtree leaves it
            out. ``None``: the tree as it was saved.
        item: The item of a manager's steps, if they have more than one.
        shardings: One sharding or device for all leaves, or a tree of them; ``None``: that of the
            target, else the saved one if this run has the devices of its mesh, else the default
            device, with a warning in the log.
        leaves: Restore only these leaves, as ``{path: array}``: paths, subtrees (``"params"``) or
            patterns (``"*/kernel"``; ``*`` also matches ``/``). ``None``: the whole tree.
        contract: Refuse leaves that were saved under a weaker contract than ``"exact"`` or
            ``"bounded"``; ``None``: accept all.
        max_bytes: Refuse to allocate more than this; ``None``: the memory of the machine.
        storage: Access to an object store, if ``root`` is an address.
        expected_digest: Refuse a step whose manifest has another digest than this.
        partial_restore: Accept a target that lacks leaves or subtrees of the step, which are then
            not read. ``False``: a forgotten part is refused.
        cast: Convert each array and number to the dtype of the target, with NumPy's rounding.
            ``False``: only if every saved value is kept.

    Returns:
        The tree, or the named leaves.

    Raises:
        NotACheckpointRoot, StepNotFound: There is no such root, step or leaf.
        TreeMismatch: The target differs from the step; the message names the leaves.
        ContractNotMet, BudgetExceeded: The step cannot be restored as requested.
        Damaged, ChainBroken: The step is not whole. The message names step, leaf, file and the
            steps that still restore.
    """
    opened = open_root(root, item, storage=storage)
    manifest = opened.manifest(step)
    opened.require_digest(manifest, expected_digest)
    restored = restore_tree(
        opened,
        manifest,
        WantedPart(target, leaves, partial_restore, cast),
        shardings=shardings,
        contract=contract,
        max_bytes=max_bytes,
    )
    return restored.tree


class Restored(NamedTuple):
    """A restored tree, and what a saver needs to continue from it.

    ``chains`` and ``stored`` are empty if only some leaves were restored.
    """

    tree: Any
    chains: Mapping[str, Chain]
    stored: Mapping[str, U8]

    def of(self, names: Iterable[str]) -> Restored:
        """Return only the stored leaves ``names`` that were read whole, without the tree."""
        # A leaf that was read in boxes has no whole bytes, and its chain cannot be continued.
        present = [name for name in names if name in self.stored]
        return Restored(
            None,
            {name: self.chains[name] for name in present},
            {name: self.stored[name] for name in present},
        )


def restore_tree(
    root: Root,
    manifest: Manifest,
    part: WantedPart,
    *,
    shardings: Any,
    contract: str | None,
    max_bytes: int | None,
) -> Restored:
    """Restore a step, or a part of it.

    Args:
        root: The root.
        manifest: The step.
        part: The part.
        shardings, contract, max_bytes: As in ``load``.
    """
    paths = part.leaves
    with damage.named(root, manifest):
        owners = tree.array_paths(manifest.tree)
        if paths is None and part.target is None:
            require_leaves(root, manifest)
        # Outside of own_rules, too: the mesh that is set is the training's.
        target = on_mesh(as_tree(part.target))
        placements = _shardings_by_path(shardings, manifest.arrays, manifest.step)
        selection = TargetSelection.of(part._replace(target=target), manifest, contract)
        if paths is not None:
            if target is not None:
                raise ValueError("name leaves or give a target, not both")
            paths = _selected(root, manifest, [paths] if isinstance(paths, str) else paths)
        # The contract is checked before anything is read.
        require_contract(
            manifest,
            contract,
            None
            if paths is None and selection.is_all
            else [
                owners.get(path, path)
                for path in (owners.keys() - selection.omitted if paths is None else paths)
            ],
        )
        with leaves.own_rules():
            if paths is None:
                return _restore_tree(root, manifest, selection, placements, max_bytes)
            return _restore_leaves(root, manifest, paths, placements, max_bytes)


def _selected(root: Root, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the paths of the leaves that paths, subtrees and patterns name."""
    step_paths = dict.fromkeys([*manifest.arrays, *tree.scalars(manifest.tree)])
    names = list(names)
    require_leaves(root, manifest, names)
    return select_paths(step_paths, names, manifest.step)


def _restore_leaves(
    root: Root,
    manifest: Manifest,
    paths: Iterable[str],
    placements: Mapping[str, Sharding],
    max_bytes: int | None,
) -> Restored:
    """Restore leaves as ``{path: array}``, and numbers and text as they are."""
    numbers = tree.scalars(manifest.tree)
    arrays_of = [path for path in paths if path not in numbers]
    placements = {**saved_shardings(manifest, set(arrays_of) - placements.keys()), **placements}
    requests = {
        path: as_saved(path, manifest.arrays[path], manifest, placements) for path in arrays_of
    }
    arrays, _ = _read_arrays(root, manifest, requests, False, max_bytes)
    # Without chains: a restore of some leaves is not a state to continue from.
    return Restored(
        {path: numbers[path] if path in numbers else arrays[path] for path in paths}, {}, {}
    )


def _restore_tree(
    root: Root,
    manifest: Manifest,
    selection: TargetSelection,
    placements: Mapping[str, Sharding],
    max_bytes: int | None,
) -> Restored:
    target = selection.target
    if target is None:
        placements = {
            **saved_shardings(manifest, manifest.arrays.keys() - placements.keys()),
            **placements,
        }
        requests = {
            path: as_saved(path, place, manifest, placements)
            for path, place in manifest.arrays.items()
        }
    else:
        requested, target = (
            target,
            leaves.map_leaves(
                lambda path, leaf: (
                    None
                    if path in selection.skipped
                    else in_saved_form(path, leaf, manifest, selection)
                ),
                target,
            ),
        )
        requests = as_targeted(target, manifest, placements, selection)
    arrays, reader = _read_arrays(root, manifest, requests, selection.is_all, max_bytes)
    if target is None:
        return Restored(
            tree.unflatten(manifest.tree, lambda path, owner, tag: arrays[path]),
            reader.chains,
            reader.stored,
        )
    numbers = tree.scalars(manifest.tree)

    def fill(path: str, leaf: Any) -> Any:
        if path in selection.skipped:
            return leaf
        if path in arrays:
            return array_as(leaf, arrays[path], selection)
        return number_as(path, leaf, numbers[path], selection)

    restored = leaves.map_leaves(fill, requested)
    # As in ``_restore_leaves``: without chains if leaves are missing.
    return (
        Restored(restored, reader.chains, reader.stored)
        if selection.is_all
        else Restored(restored, {}, {})
    )


def _read_arrays(
    root: Root,
    manifest: Manifest,
    requests: Mapping[str, ArrayRequest],
    is_all: bool,
    max_bytes: int | None,
) -> tuple[dict[str, Any], StepReader]:
    """Return arrays, and what was read for them.

    Of arrays that other processes hold too, only the boxes of this process are read.

    Args:
        root: The root.
        manifest: The step.
        requests: The arrays, by path.
        is_all: The arrays are all of the step.
        max_bytes: Refuse to allocate more than this.
    """
    across = {
        path: array
        for path, array in requests.items()
        if array.tag not in NUMPY_TAGS and pieces.spans_processes(array.sharding)
    }
    local = {path: array for path, array in requests.items() if path not in across}
    # Arrays that span processes are left to ``boxes``: read whole, they might not fit into memory.
    paths = None if is_all and not across else [array.owner for array in local.values()]
    reader = StepReader(root, manifest, max_bytes=max_bytes)
    loaded = reader.whole(paths)
    arrays = make(local, loaded)
    if across:
        arrays |= _assembled(reader, across)
    return {path: arrays[path] for path in requests}, reader


def _assembled(reader: StepReader, requests: Mapping[str, ArrayRequest]) -> dict[str, Any]:
    """Return arrays of several processes. Only the boxes of this process's devices are read."""
    shapes, shardings = {}, {}
    boxes: dict[tuple[str, jax.Device], Request] = {}
    for path, array in requests.items():
        assert array.sharding is not None
        stored_shape = reader.manifest.spec(array.owner).shape
        # JAX shards typed keys without the axis of their data.
        shape = stored_shape[:-1] if leaves.is_key_tag(array.tag) else stored_shape
        shapes[path], shardings[path] = shape, array.sharding
        for device, box in pieces.boxes_of(
            array.sharding, shape, stored_shape[len(shape) :]
        ).items():
            boxes[path, device] = Request(array.owner, box)
    parts: dict[str, dict[jax.Device, NDArray[Any]]] = {path: {} for path in requests}

    def place(key: tuple[str, jax.Device], spec: LeafSpec, box: NDArray[Any]) -> None:
        parts[key[0]][key[1]] = requests[key[0]].cast(key[0], box)

    reader.boxes(boxes, place)
    dtypes = {
        path: (
            leaves.key_dtype(array.tag)
            if leaves.is_key_tag(array.tag)
            else array.dtype or reader.manifest.spec(array.owner).element.numpy
        )
        for path, array in requests.items()
    }
    tags = {path: array.tag for path, array in requests.items()}
    return dict(pieces.assembled(shapes, shardings, parts, dtypes, tags))


def _shardings_by_path(
    shardings: Any, places: Mapping[str, object], step: int
) -> dict[str, Sharding]:
    """Return one sharding, or a tree of them, as leaf path -> sharding."""
    if shardings is None:
        return {}
    if isinstance(shardings, Sharding | jax.Device):
        return dict.fromkeys(places, _as_sharding(shardings, min(places, default="")))
    flat = tree.flatten(shardings, _describe_sharding, leaves.expand)
    unknown = sorted(flat.arrays.keys() - places.keys())
    if unknown:
        raise StepNotFound(
            f"shardings name leaf {unknown[0]!r}, which is not an array of step {step}"
        )
    return {path: _as_sharding(value, path) for path, value in flat.arrays.items()}


def _as_sharding(value: object, path: str) -> Sharding:
    if isinstance(value, jax.Device):
        return SingleDeviceSharding(value)
    sharding = concrete(value, path)
    assert sharding is not None
    return sharding


def _describe_sharding(value: object) -> ArrayLeaf | None:
    # Only the path of this leaf is used. Shape and type are placeholders.
    return ArrayLeaf((), "uint8") if isinstance(value, Sharding | jax.Device) else None


def make(requests: Mapping[str, ArrayRequest], loaded: Mapping[str, Loaded]) -> dict[str, Any]:
    """Return arrays, each in memory of its own."""
    arrays: dict[str, Any] = {}
    host: dict[str, np.ndarray[Any, Any]] = {}
    for path, request in requests.items():
        if request.tag in NUMPY_TAGS:
            arrays[path] = request.cast(path, place_numpy(loaded[request.owner], request.tag))
        else:
            host[path] = request.cast(path, as_array(loaded[request.owner]))
    keys = {path for path in host if leaves.is_key_tag(requests[path].tag)}
    # A sharding of keys has no axis for their data, so keys are placed after they are made.
    arrays |= leaves.on_devices(
        host, {path: None if path in keys else requests[path].sharding for path in host}
    )
    for path in host:
        request = requests[path]
        arrays[path] = leaves.tagged(arrays[path], request.tag, request.sharding)
    return {path: arrays[path] for path in requests}
