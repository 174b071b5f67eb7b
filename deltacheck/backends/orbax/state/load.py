"""Restore a committed step as a JAX tree: leaves, forms and devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from deltacheck.backends.matching import match_targets, raise_mismatches
from deltacheck.backends.numpy_leaves import place_numpy
from deltacheck.backends.orbax.state import leaves, pieces
from deltacheck.backends.orbax.state.metadata import NumpyMetadata, StorageMetadata, as_tree
from deltacheck.backends.orbax.state.saved_shardings import concrete, saved_shardings
from deltacheck.codec.base import U8
from deltacheck.errors import StepNotFound, TreeMismatch
from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import NUMPY_ARRAY, NUMPY_SCALAR, ArrayLeaf, Node
from deltacheck.restore import damage
from deltacheck.restore.chain import Chain
from deltacheck.restore.content import Loaded, as_array
from deltacheck.restore.export import matches
from deltacheck.restore.fill import Request, StepReader
from deltacheck.restore.resolve import require_contract, require_leaves, resolve_leaves
from deltacheck.store.files.object_path import ObjectStore
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root, open_root

_NUMPY = (NUMPY_ARRAY, NUMPY_SCALAR)
_REMEDY = (
    "Restore without a target to get the tree as it was saved, or a part of it, such as the"
    " parameters, with DeltaRestoreArgs({'params': target}, partial_restore=True) (in Orbax v1:"
    " the option pytree.loading.partial_load)"
)


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

    Returns:
        The tree, or the named leaves.

    Raises:
        NotACheckpointRoot, StepNotFound: There is no such root, step or leaf.
        TreeMismatch: The target differs from the step; the message names the leaves.
        ContractNotMet, BudgetExceeded, ReplayNeeded: The step cannot be restored as requested.
        Damaged, ChainBroken: The step is not whole. The message names step, leaf, file and the
            steps that still restore.
    """
    opened = open_root(root, item, storage=storage)
    manifest = opened.manifest(step)
    opened.require_digest(manifest, expected_digest)
    restored = restore_tree(
        opened,
        manifest,
        Part(target, leaves, partial_restore),
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


class Read(NamedTuple):
    """The leaves of a step, the chains that they depend on, and the stored bytes of those."""

    loaded: Mapping[str, Loaded]
    chains: Mapping[str, Chain]
    stored: Mapping[str, U8]


class Log(Protocol):
    """Replays steps that are kept as gradients."""

    def replayed(self, root: Root, manifest: Manifest, target: Any, max_bytes: int | None) -> Read:
        """Return every leaf of such a step, proven by its digest."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayRequest:
    """An array to make.

    ``owner`` is the leaf that holds its bytes. ``tag`` is as in the tree; ``None`` makes a JAX
    array.
    """

    owner: str
    tag: str | None
    sharding: Sharding | None


class Part(NamedTuple):
    """The part of a step to restore: ``target``, ``leaves`` and ``partial_restore`` of ``load``."""

    target: Any = None
    leaves: str | Iterable[str] | None = None
    partly: bool = False


def restore_tree(
    root: Root,
    manifest: Manifest,
    part: Part,
    *,
    shardings: Any,
    contract: str | None,
    max_bytes: int | None,
    log: Log | None = None,
) -> Restored:
    """Restore a step, or a part of it.

    Args:
        root: The root.
        manifest: The step.
        part: The part.
        shardings, contract, max_bytes: As in ``load``.
        log: Replays the step if it is kept as gradients.
    """
    target, paths, partly = part
    with damage.named(root, manifest):
        owners = tree.array_paths(manifest.tree)
        if paths is None and target is None:
            require_leaves(root, manifest)
        # Outside of own_rules, too: the mesh that is set is the training's.
        selection = Selection.of(_on_mesh(as_tree(target)), manifest, partly)
        if paths is not None:
            if target is not None:
                raise ValueError("name leaves or give a target, not both")
            paths = _selected(root, manifest, [paths] if isinstance(paths, str) else paths)
        # The contract is checked before anything is read or replayed.
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
        read = None
        if log is not None and manifest.replay is not None and paths is None:
            # Outside of own_rules: the update belongs to the training, and so do its settings.
            read = log.replayed(root, manifest, selection.target, max_bytes)
        with leaves.own_rules():
            placements = _shardings_by_path(shardings, places_of(manifest.tree), manifest.step)
            if paths is None:
                return _restore_tree(root, manifest, selection, placements, max_bytes, read)
            return _restore_leaves(root, manifest, paths, placements, max_bytes)


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a step that a target asks for.

    Attributes:
        target: The target; ``None``: the whole tree as it was saved.
        skipped: The paths at which the target has ``...``, or ``None`` in the place of a leaf or a
            subtree. The result has the same there.
        omitted: The leaves of the step that are not asked for.
    """

    target: Any
    skipped: Set[str]
    omitted: Set[str]

    @classmethod
    def of(cls, target: Any, manifest: Manifest, partly: bool) -> Selection:
        """Return the selection of a target. ``partly``: leaves that it lacks are omitted."""
        if target is None:
            return cls(None, frozenset(), frozenset())
        numbers = tree.scalars(manifest.tree)
        saved = places_of(manifest.tree).keys() | numbers.keys()
        requested: set[str] = set()
        skipped: set[str] = set()

        def note(path: str, leaf: Any) -> None:
            is_skipped = leaf is ... or (leaf is None and numbers.get(path, 0) is not None)
            (skipped if is_skipped else requested).add(path)

        leaves.map_leaves(note, target)
        omitted = {
            path
            for path in saved - requested
            if partly or any(is_below(path, place) for place in skipped)
        }
        return cls(target, skipped, omitted)

    @property
    def is_all(self) -> bool:
        """True if all leaves of the step are asked for."""
        return not self.omitted


def is_below(path: str, place: str) -> bool:
    """Return ``True`` if a leaf is at a place of a tree, or in the subtree there."""
    return not place or path == place or path.startswith(f"{place}/")


def _selected(root: Root, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the paths of the leaves that paths, subtrees and patterns name."""
    # The inputs of a replay are in no tree, but can be read by name.
    inputs = manifest.replay.inputs if manifest.replay is not None else ()
    step_paths = dict.fromkeys([*places_of(manifest.tree), *tree.scalars(manifest.tree), *inputs])
    selected: dict[str, None] = {}
    for name in names:
        require_leaves(root, manifest, [name])
        matching_paths = (
            [name] if name in step_paths else [path for path in step_paths if is_below(path, name)]
        )
        matching_paths = matching_paths or [path for path in step_paths if matches(path, name)]
        if not matching_paths:
            resolve_leaves(root, manifest, [name])  # raises, naming what is near
        selected |= dict.fromkeys(matching_paths)
    return list(selected)


def _restore_leaves(
    root: Root,
    manifest: Manifest,
    paths: Iterable[str],
    placements: Mapping[str, Sharding],
    max_bytes: int | None,
) -> Restored:
    """Restore leaves as ``{path: array}``, and numbers and text as they are."""
    numbers = tree.scalars(manifest.tree)
    places = places_of(manifest.tree)
    arrays_of = [path for path in paths if path not in numbers]
    placements = {**saved_shardings(manifest, set(arrays_of) - placements.keys()), **placements}
    requests = {
        path: _as_saved(path, places.get(path, (path, None)), manifest, placements)
        for path in arrays_of
    }
    arrays, _ = _read_arrays(root, manifest, requests, False, max_bytes)
    # Without chains: a restore of some leaves is not a state to continue from.
    return Restored(
        {path: numbers[path] if path in numbers else arrays[path] for path in paths}, {}, {}
    )


def _restore_tree(
    root: Root,
    manifest: Manifest,
    selection: Selection,
    placements: Mapping[str, Sharding],
    max_bytes: int | None,
    read: Read | None,
) -> Restored:
    places = places_of(manifest.tree)
    target = selection.target
    if target is None:
        placements = {**saved_shardings(manifest, places.keys() - placements.keys()), **placements}
        requests = {
            path: _as_saved(path, place, manifest, placements) for path, place in places.items()
        }
    else:
        requested, target = (
            target,
            leaves.map_leaves(
                lambda path, leaf: (
                    None
                    if path in selection.skipped
                    else _in_saved_form(path, leaf, places, manifest)
                ),
                target,
            ),
        )
        requests = _as_targeted(target, places, manifest, placements, selection)
    arrays, read = (
        (make(requests, read.loaded), read)
        if read is not None
        else _read_arrays(root, manifest, requests, selection.is_all, max_bytes)
    )
    if target is None:
        return Restored(
            tree.unflatten(manifest.tree, lambda path, owner, tag: arrays[path]),
            read.chains,
            read.stored,
        )
    numbers = tree.scalars(manifest.tree)

    def fill(path: str, leaf: Any) -> Any:
        if path in selection.skipped:
            return leaf
        return arrays[path] if path in arrays else _number_as(leaf, numbers[path])

    restored = leaves.map_leaves(fill, requested)
    # As in ``_restore_leaves``: without chains if leaves are missing.
    return (
        Restored(restored, read.chains, read.stored)
        if selection.is_all
        else Restored(restored, {}, {})
    )


def _read_arrays(
    root: Root,
    manifest: Manifest,
    requests: Mapping[str, ArrayRequest],
    is_all: bool,
    max_bytes: int | None,
) -> tuple[dict[str, Any], Read]:
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
        if array.tag not in _NUMPY and pieces.spans_processes(array.sharding)
    }
    local = {path: array for path, array in requests.items() if path not in across}
    # Arrays that span processes are left to ``boxes``: read whole, they might not fit into memory.
    paths = None if is_all and not across else [array.owner for array in local.values()]
    reader = StepReader(root, manifest, max_bytes=max_bytes)
    loaded = reader.whole(paths)
    arrays = make(local, loaded)
    if across:
        arrays |= _assembled(reader, across)
    return {path: arrays[path] for path in requests}, Read(loaded, reader.chains, reader.stored)


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
        parts[key[0]][key[1]] = box

    reader.boxes(boxes, place)
    dtypes = {
        path: (
            leaves.key_dtype(array.tag)
            if leaves.is_key_tag(array.tag)
            else reader.manifest.spec(array.owner).element.numpy
        )
        for path, array in requests.items()
    }
    tags = {path: array.tag for path, array in requests.items()}
    return dict(pieces.assembled(shapes, shardings, parts, dtypes, tags))


def places_of(skeleton: Node) -> dict[str, tuple[str, str | None]]:
    """Return, for every array of a tree, the leaf that holds its bytes and its tag."""
    places: dict[str, tuple[str, str | None]] = {}

    def place(path: str, owner: str, tag: str | None) -> None:
        places[path] = (owner, tag)

    tree.unflatten(skeleton, place)
    return places


def _as_saved(
    path: str, place: tuple[str, str | None], manifest: Manifest, placements: Mapping[str, Sharding]
) -> ArrayRequest:
    """Return an array in the form that it was saved in.

    It is a NumPy array if JAX would round it to fewer bits.
    """
    owner, tag = place
    if tag not in _NUMPY and not leaves.jax_has(manifest.spec(owner).dtype):
        return ArrayRequest(owner, NUMPY_ARRAY, None)
    return ArrayRequest(owner, tag, placements.get(path))


def _as_targeted(
    target: Any,
    places: Mapping[str, tuple[str, str | None]],
    manifest: Manifest,
    placements: Mapping[str, Sharding],
    selection: Selection,
) -> dict[str, ArrayRequest]:
    """Return every array of the target in the form that the target has.

    Raises:
        TreeMismatch: The two trees differ.
    """
    flat = tree.flatten(target, leaves.describe_target, leaves.expand)
    _match_numbers(flat.skeleton, flat.leaves, manifest, selection)
    arrays = tree.array_nodes(flat.skeleton)
    stored_path = match_targets(manifest, flat, arrays, omitted=selection.omitted, remedy=_REMEDY)
    free = {
        path
        for path, leaf in flat.arrays.items()
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None
    }
    placements = {**saved_shardings(manifest, free - placements.keys()), **placements}
    requests = {}
    for path, target_leaf in flat.leaves.items():
        saved = places[path][1]
        # The data of two implementations can have equal shapes, but their keys differ.
        if (
            saved != target_leaf.tag
            and leaves.is_key_tag(saved)
            and leaves.is_key_tag(target_leaf.tag)
        ):
            raise TreeMismatch(
                f"leaf {path!r} is a {saved} in step {manifest.step}, a {target_leaf.tag} in the"
                " target"
            )
        tag = target_leaf.tag
        # A scalar of NumPy stays one. JAX would round other 64-bit arrays.
        if tag != NUMPY_SCALAR and not leaves.jax_has(target_leaf.dtype):
            tag = NUMPY_ARRAY
        requests[path] = ArrayRequest(
            stored_path[path],
            tag,
            placements.get(path) or sharding_of(flat.arrays[path]),
        )
    return requests


def _match_numbers(
    skeleton: Node, arrays: Mapping[str, ArrayLeaf], manifest: Manifest, selection: Selection
) -> None:
    """Raise ``TreeMismatch`` if scalar values of target and step have different paths."""
    saved, requested = tree.scalars(manifest.tree), tree.scalars(skeleton)
    saved_arrays = places_of(manifest.tree)
    problems = [
        f"leaf {p!r} is {saved[p]!r} in step {manifest.step},"
        f" {arrays[p].dtype}{list(arrays[p].shape)} in the target"
        for p in sorted(saved.keys() & arrays.keys())
    ]
    problems += [
        (
            f"leaf {p!r} is an array in step {manifest.step}, {requested[p]!r} in the target"
            if p in saved_arrays
            else f"leaf {p!r} of the target is not in step {manifest.step}"
        )
        for p in sorted(requested.keys() - saved.keys() - selection.skipped)
    ]
    problems += [
        f"leaf {p!r} of step {manifest.step} is not in the target"
        for p in sorted(saved.keys() - requested.keys() - arrays.keys() - selection.omitted)
    ]
    raise_mismatches(problems, _REMEDY)


def _in_saved_form(
    path: str, leaf: Any, places: Mapping[str, tuple[str, str | None]], manifest: Manifest
) -> Any:
    """Return a target's leaf, or the form of the saved leaf if a Python number meets a 0-d array.

    Flax's ``TrainState.step`` begins as the number 0, is an array after the first step, and
    ``eval_shape`` makes an array of it from the start. Each must be a target for the others.
    """
    if isinstance(leaf, type):  # as in Orbax: the leaf as it was saved, if it is of this type
        return _of_type(path, leaf, places, manifest)
    if isinstance(leaf, bool | int | float | complex) and path in places:
        owner, tag = places[path]
        element = manifest.spec(owner).element.numpy
        if manifest.spec(owner).shape == () and not leaves.is_key_tag(tag):
            return (
                leaves.abstract((), element)
                if tag not in _NUMPY
                # Indexing with ``()`` gives a scalar, and with ``...`` a 0-d array.
                else np.zeros((), element)[() if tag == NUMPY_SCALAR else ...]
            )
    if leaves.describe_target(leaf) is not None and leaf.shape == ():
        number = tree.scalars(manifest.tree).get(path)
        if number is not None and _fits(number, leaf.dtype):
            return number
    return leaf


def _of_type(
    path: str, kind: type, places: Mapping[str, tuple[str, str | None]], manifest: Manifest
) -> Any:
    """Return a target for a leaf of which only the type is given."""
    if path not in places:
        number = tree.scalars(manifest.tree).get(path)
        if number is not None and type(number) is not kind:
            raise TreeMismatch(
                f"leaf {path!r} is a {type(number).__name__} in step {manifest.step}, a"
                f" {kind.__name__} in the target. {_REMEDY}"
            )
        return number
    owner, tag = places[path]
    spec = manifest.spec(owner)
    if issubclass(kind, jax.Array | jax.ShapeDtypeStruct):
        if leaves.is_key_tag(tag):
            return leaves.abstract(spec.shape[:-1], leaves.key_dtype(tag))
        return leaves.abstract(spec.shape, spec.element.numpy)
    if issubclass(kind, np.ndarray):
        return NumpyMetadata(
            spec.shape, spec.element.numpy, StorageMetadata("numpy.ndarray", "", spec.raw_bytes)
        )
    raise TreeMismatch(
        f"leaf {path!r} is an array in step {manifest.step}, a {kind.__name__} in the target."
        f" {_REMEDY}"
    )


def _fits(number: object, dtype: Any) -> bool:
    """Return ``True`` if a Python number has the kind of ``dtype``, which holds it exactly."""
    kinds = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
    if type(number) not in kinds or not jnp.issubdtype(dtype, kinds[type(number)]):
        return False
    try:
        array = np.asarray(number, dtype)
    except OverflowError:
        return False
    # The second comparison is true for NaN only.
    return array.item() == number or number != number


def _number_as(leaf: Any, number: object) -> Any:
    """Return a restored number in the form that the target has."""
    target_leaf = leaves.describe_target(leaf)
    if target_leaf is None:
        return number
    array = np.asarray(number, leaf.dtype)
    if target_leaf.tag in _NUMPY:
        return array[()] if target_leaf.tag == NUMPY_SCALAR else array
    sharding = sharding_of(leaf)
    if sharding is not None and pieces.spans_processes(sharding):
        return pieces.spread(array, sharding)
    return leaves.on_devices({"": array}, {"": sharding_of(leaf)})[""]


def _on_mesh(target: Any) -> Any:
    """Return a target whose shardings have devices, and no layout."""
    if target is None:
        return None

    def on_devices(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if leaf.format is not None and getattr(leaf.format, "layout", None) is not None:
            raise ValueError(
                f"leaf {path!r} of the target has a layout in memory, {leaf.format.layout}, which a"
                " restore does not set. Give a sharding only, and use jax.device_put afterwards"
            )
        sharding = concrete(leaf.sharding, path)
        if sharding is leaf.sharding:
            return leaf
        return leaf.update(sharding=sharding)  # type: ignore[no-untyped-call]

    return leaves.map_leaves(on_devices, target)


def sharding_of(leaf: object) -> Sharding | None:
    """Return the sharding that a target requires; ``None`` if it requires none."""
    if isinstance(leaf, jax.Array):
        # An uncommitted array lies on the default device by chance, and requires no device.
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _shardings_by_path(
    shardings: Any, places: Mapping[str, object], step: int
) -> dict[str, Sharding]:
    """Return one sharding, or a tree of them, as leaf path -> sharding."""
    if shardings is None:
        return {}
    if isinstance(shardings, Sharding | jax.Device):
        return dict.fromkeys(places, _as_sharding(shardings))
    flat = tree.flatten(shardings, _describe_sharding, leaves.expand)
    unknown = sorted(flat.arrays.keys() - places.keys())
    if unknown:
        raise StepNotFound(
            f"shardings name leaf {unknown[0]!r}, which is not an array of step {step}"
        )
    return {path: _as_sharding(value) for path, value in flat.arrays.items()}


def _as_sharding(value: object) -> Sharding:
    if isinstance(value, jax.Device):
        return SingleDeviceSharding(value)
    assert isinstance(value, Sharding)
    return value


def _describe_sharding(value: object) -> ArrayLeaf | None:
    # Only the path of this leaf is used. Shape and type are placeholders.
    return ArrayLeaf((), "uint8") if isinstance(value, Sharding | jax.Device) else None


def make(requests: Mapping[str, ArrayRequest], loaded: Mapping[str, Loaded]) -> dict[str, Any]:
    """Return arrays, each in memory of its own."""
    arrays: dict[str, Any] = {}
    host: dict[str, np.ndarray[Any, Any]] = {}
    for path, request in requests.items():
        if request.tag in _NUMPY:
            arrays[path] = place_numpy(loaded[request.owner], request.tag)
        else:
            host[path] = as_array(loaded[request.owner])
    keys = {path for path in host if leaves.is_key_tag(requests[path].tag)}
    # A sharding of keys has no axis for their data, so keys are placed after they are made.
    arrays |= leaves.on_devices(
        host, {path: None if path in keys else requests[path].sharding for path in host}
    )
    arrays |= {
        path: leaves.key_of(arrays[path], requests[path].tag, requests[path].sharding)
        for path in keys
    }
    return {path: arrays[path] for path in requests}
