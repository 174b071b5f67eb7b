"""Match the target of a restore with a step, and name the arrays to make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from deltacheck.backends.matching import match_targets, raise_mismatches, tree_differences
from deltacheck.backends.orbax.state import leaves, pieces
from deltacheck.backends.orbax.state.metadata import NumpyMetadata, StorageMetadata, as_target
from deltacheck.backends.orbax.state.saved_shardings import concrete, saved_shardings
from deltacheck.errors import ContractNotMet, TreeMismatch
from deltacheck.leaf import tree
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import NUMPY_ARRAY, NUMPY_SCALAR, ArrayNode
from deltacheck.restore.resolve import is_below
from deltacheck.store.manifest import Manifest

NUMPY_TAGS = (NUMPY_ARRAY, NUMPY_SCALAR)
_REMEDY = (
    "Restore without a target to get the tree as it was saved, or a part of it, such as the"
    " parameters, with DeltaRestoreArgs({'params': target}, partial_restore=True) (in Orbax v1:"
    " the option pytree.loading.partial_load)"
)
_CAST = (
    ". To convert to the dtypes of the target: DeltaRestoreArgs(target, cast=True) (in Orbax v1:"
    " v1.context(root, cast=True))"
)
_RESIZE = (
    ". A restore neither pads nor cuts arrays: restore them as they were saved, and use jnp.pad or"
    " a slice"
)
_NUMBERS = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


@dataclass(frozen=True, slots=True)
class ArrayRequest:
    """An array to make.

    Attributes:
        owner: The leaf that holds its bytes.
        tag: As in the tree; ``None`` makes a JAX array.
        sharding: The sharding; ``None``: the default device.
        dtype: The element type; ``None``: the saved one.
        keeping: The step, if an integer that ``dtype`` does not hold is an error; ``None``: a cast
            may change values.
    """

    owner: str
    tag: str | None
    sharding: Sharding | None
    dtype: np.dtype[Any] | None = None
    keeping: int | None = None

    def cast(self, path: str, array: Any) -> Any:
        """Return an array or scalar of NumPy in the dtype that is asked for.

        Raises:
            TreeMismatch: The dtype does not hold one of the values.
        """
        if self.dtype is None:
            return array
        result = array.astype(self.dtype)
        if self.keeping is not None and jnp.issubdtype(array.dtype, jnp.integer):
            # A change of the sign alone comes back: -1 as uint32 is 4294967295, and -1 as int32.
            lost = (result.astype(array.dtype) != array) | ((result < 0) != (array < 0))
            if np.any(lost):
                raise TreeMismatch(
                    f"leaf {path!r} is {array.dtype} in step {self.keeping}, and {self.dtype} of"
                    f" the target does not hold its value {array[lost].flat[0]}. {_REMEDY}{_CAST}"
                )
        return result


class WantedPart(NamedTuple):
    """The part of a step to restore.

    The fields are ``target``, ``leaves``, ``partial_restore`` and ``cast`` of ``load``.
    """

    target: Any = None
    leaves: str | Iterable[str] | None = None
    partly: bool = False
    cast: bool = False


@dataclass(frozen=True, slots=True)
class TargetSelection:
    """The part of a step that a target asks for.

    Attributes:
        target: The target; ``None``: the whole tree as it was saved.
        skipped: The paths at which the target has ``...``, or ``None`` in the place of a leaf or a
            subtree. The result has the same there.
        omitted: The leaves of the step that are not asked for.
        cast: Each leaf gets the dtype of the target.
        exact: A cast that is asked for must keep every value, as all others do.
    """

    target: Any
    skipped: Set[str]
    omitted: Set[str]
    cast: bool = False
    exact: bool = False

    @classmethod
    def of(
        cls, part: WantedPart, manifest: Manifest, contract: str | None = None
    ) -> TargetSelection:
        """Return the selection of a part of a step.

        Args:
            part: The part. Its target has no abstract mesh.
            manifest: The step.
            contract: The contract that the restore requires.
        """
        target, partly = part.target, part.partly
        if target is None:
            return cls(None, frozenset(), frozenset())
        numbers = tree.scalars(manifest.tree)
        saved = manifest.arrays.keys() | numbers.keys()
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
        return cls(target, skipped, omitted, part.cast, contract == "exact")

    @property
    def is_all(self) -> bool:
        """True if all leaves of the step are asked for."""
        return not self.omitted


def _spec_at(manifest: Manifest, path: str) -> LeafSpec:
    """Return the leaf whose content an array of the step has."""
    return manifest.spec(manifest.arrays[path].owner)


def as_saved(
    path: str, place: ArrayNode, manifest: Manifest, placements: Mapping[str, Sharding]
) -> ArrayRequest:
    """Return an array in the form that it was saved in.

    It is a NumPy array if JAX would round it to fewer bits.
    """
    owner, tag = place
    if tag not in NUMPY_TAGS and not leaves.jax_has(manifest.spec(owner).dtype):
        return ArrayRequest(owner, NUMPY_ARRAY, None)
    return ArrayRequest(owner, tag, placements.get(path))


def as_targeted(
    target: Any,
    manifest: Manifest,
    placements: Mapping[str, Sharding],
    selection: TargetSelection,
) -> dict[str, ArrayRequest]:
    """Return every array of the target in the form that the target has.

    Args:
        target: The target, with leaves ``in_saved_form``.
        manifest: The step.
        placements: The shardings that the caller gives, by path.
        selection: The part of the step that the target asks for.

    Raises:
        TreeMismatch: The two trees differ.
        ContractNotMet: A cast would change values, and the restore must be exact.
    """
    flat = tree.flatten(target, leaves.describe_target, leaves.expand)
    arrays = tree.array_nodes(flat.skeleton)
    raise_mismatches(
        tree_differences(
            manifest, flat, arrays, omitted=selection.omitted, skipped=selection.skipped
        ),
        _REMEDY,
    )
    _require_same_keys(flat, manifest)
    casts, remedy = _allowed_casts(flat, manifest, selection)
    requested = flat._replace(
        leaves={
            path: leaf._replace(dtype=_spec_at(manifest, path).dtype) if path in casts else leaf
            for path, leaf in flat.leaves.items()
        }
    )
    if any(leaf.shape != _spec_at(manifest, p).shape for p, leaf in flat.leaves.items()):
        remedy += _RESIZE
    stored_path = match_targets(
        manifest, requested, arrays, omitted=selection.omitted, remedy=remedy
    )
    free = {
        path
        for path, leaf in flat.arrays.items()
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None
    }
    placements = {**saved_shardings(manifest, free - placements.keys()), **placements}
    keeping = manifest.step if selection.exact or not selection.cast else None
    return {
        path: ArrayRequest(
            stored_path[path],
            _tag_of(leaf, manifest.arrays[path].tag, is_cast=path in casts),
            placements.get(path) or sharding_of(flat.arrays[path]),
            casts.get(path),
            keeping,
        )
        for path, leaf in flat.leaves.items()
    }


def _require_same_keys(flat: tree.Flat, manifest: Manifest) -> None:
    """Raise ``TreeMismatch`` if keys of a target are of another implementation than the saved."""
    for path, leaf in flat.leaves.items():
        saved = manifest.arrays[path].tag
        # The data of two implementations can have equal shapes, but their keys differ.
        if saved != leaf.tag and leaves.is_key_tag(saved) and leaves.is_key_tag(leaf.tag):
            raise TreeMismatch(
                f"leaf {path!r} is a {saved} in step {manifest.step}, a {leaf.tag} in the target."
                f" {_REMEDY}"
            )


def _tag_of(target: tree.ArrayLeaf, saved: str | None, *, is_cast: bool) -> str | None:
    """Return the tag of the array to make for a leaf of a target."""
    tag = target.tag
    # ``jax.ShapeDtypeStruct(x.shape, x.dtype)`` says nothing about weak types.
    if not is_cast and {tag, saved} <= {None, leaves.WEAK_TAG}:
        tag = saved
    # A scalar of NumPy stays one. JAX would round other 64-bit arrays.
    return tag if tag == NUMPY_SCALAR or leaves.jax_has(target.dtype) else NUMPY_ARRAY


def _allowed_casts(
    flat: tree.Flat,
    manifest: Manifest,
    selection: TargetSelection,
) -> tuple[dict[str, np.dtype[Any]], str]:
    """Return the dtypes of arrays to cast, by path, and the remedy if others differ.

    Raises:
        ContractNotMet: A cast would change values, and the restore must be exact.
    """
    casts = _casts(flat, manifest)
    rounding = _rounding(casts, manifest)
    if not rounding or (selection.cast and not selection.exact):
        return casts, _REMEDY
    if not selection.cast:
        return {p: dtype for p, dtype in casts.items() if p not in rounding}, _REMEDY + _CAST
    path = min(rounding)
    raise ContractNotMet(
        f"leaf {path!r} is {_spec_at(manifest, path).dtype} in step {manifest.step}, and"
        f" {casts[path]} of the target does not hold every value of it. Restore it without"
        " contract='exact', or without a cast"
    )


def _casts(flat: tree.Flat, manifest: Manifest) -> dict[str, np.dtype[Any]]:
    """Return the dtypes of arrays of a target that were saved with another one, by path."""
    return {
        path: dtype_named(leaf.dtype).numpy
        for path, leaf in flat.leaves.items()
        if leaf.dtype != _spec_at(manifest, path).dtype
        # The bits of a key have no value that another dtype could keep.
        and not (leaves.is_key_tag(leaf.tag) or leaves.is_key_tag(manifest.arrays[path].tag))
    }


def _rounding(
    casts: Mapping[str, np.dtype[Any]],
    manifest: Manifest,
) -> set[str]:
    """Return the paths of the casts that may round values.

    Between integers nothing is rounded: each value fits or does not, which the cast itself checks.
    The type of a counter may change without notice, such as that of ``device_put(count.item())``.
    """
    rounding = set()
    for path, dtype in casts.items():
        saved = _spec_at(manifest, path).element.numpy
        is_integer = all(jnp.issubdtype(kind, jnp.integer) for kind in (saved, dtype))
        # NumPy takes the 53 bits of a float64 for enough.
        is_wide = saved.kind in "iu" and saved.itemsize == 8
        if not is_integer and (is_wide or not np.can_cast(saved, dtype)):
            rounding.add(path)
    return rounding


def in_saved_form(
    path: str,
    leaf: Any,
    manifest: Manifest,
    selection: TargetSelection,
) -> Any:
    """Return a target's leaf, or the form of the saved leaf if a Python number meets a 0-d array.

    Flax's ``TrainState.step`` begins as the number 0, is an array after the first step, and
    ``eval_shape`` makes an array of it from the start. Each must be a target for the others.
    """
    if isinstance(leaf, type):  # as in Orbax: the leaf as it was saved, if it is of this type
        return _of_type(path, leaf, manifest)
    if isinstance(leaf, bool | int | float | complex) and path in manifest.arrays:
        saved = _of_number(leaf, manifest.arrays[path], manifest, selection)
        if saved is not None:
            return saved
    if isinstance(leaf, jax.ShapeDtypeStruct) and path in manifest.arrays:
        return _key_of_data(leaf, manifest.arrays[path], manifest)
    if leaves.describe_target(leaf) is not None and leaf.shape == ():
        number = tree.scalars(manifest.tree).get(path)
        if number is not None and (_may_change(number, selection) or _fits(number, leaf.dtype)):
            return number
    return leaf


def _of_number(
    number: Any, place: ArrayNode, manifest: Manifest, selection: TargetSelection
) -> Any:
    """Return a target for a saved 0-d array where a target has a Python number, else ``None``."""
    owner, tag = place
    element = manifest.spec(owner).element.numpy
    if manifest.spec(owner).shape != () or leaves.is_key_tag(tag):
        return None
    if is_number_cast(number, element, selection):
        return np.zeros((), element)[()]
    if tag not in NUMPY_TAGS:
        return leaves.abstract((), element, tag)
    # Indexing with ``()`` gives a scalar, and with ``...`` a 0-d array.
    return np.zeros((), element)[() if tag == NUMPY_SCALAR else ...]


def array_as(leaf: Any, array: Any, selection: TargetSelection) -> Any:
    """Return a restored array, as a Python number if it is cast to the one of a target."""
    if isinstance(leaf, type):
        return leaf(array.item()) if leaf in _NUMBERS else array
    if (
        type(leaf) in _NUMBERS
        and isinstance(array, np.generic)
        and is_number_cast(leaf, array.dtype, selection)
    ):
        return type(leaf)(array)
    return array


def is_number_cast(leaf: Any, element: np.dtype[Any], selection: TargetSelection) -> bool:
    """Return ``True`` if a Python number of a target is made of a saved 0-d array."""
    return selection.cast and (
        not selection.exact or bool(jnp.issubdtype(element, _NUMBERS[type(leaf)]))
    )


def is_number_type(kind: type, spec: LeafSpec, tag: str | None) -> bool:
    """Return ``True`` if a target names a type of numbers that holds a saved 0-d array."""
    return (
        kind in _NUMBERS
        and spec.shape == ()
        and not leaves.is_key_tag(tag)
        and bool(jnp.issubdtype(spec.element.numpy, _NUMBERS[kind]))
    )


def _key_of_data(leaf: Any, place: ArrayNode, manifest: Manifest) -> Any:
    """Return typed keys as a target, if ``leaf`` is the abstract data of keys that were saved.

    ``ocp.utils.to_shape_dtype_struct`` makes such targets of keys. Orbax restores keys for them.
    """
    owner, tag = place
    spec = manifest.spec(owner)
    if not leaves.is_key_tag(tag) or (leaf.shape, leaf.dtype) != (spec.shape, spec.element.numpy):
        return leaf
    shape, sharding = spec.shape[:-1], leaf.sharding
    if isinstance(sharding, NamedSharding):
        # Keys have no axis for their data.
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[: len(shape)]))  # type: ignore[no-untyped-call]
    return jax.ShapeDtypeStruct(shape, leaves.key_dtype(tag), sharding=sharding)  # type: ignore[no-untyped-call]


def _of_type(path: str, kind: type, manifest: Manifest) -> Any:
    """Return a target for a leaf of which only the type is given."""
    if path not in manifest.arrays:
        number = tree.scalars(manifest.tree).get(path)
        # Orbax has no type for bytes.
        is_text = kind is str and type(number) is bytes
        is_array = type(number) in _NUMBERS and issubclass(kind, jax.Array | np.ndarray)
        if number is not None and type(number) is not kind and not (is_text or is_array):
            raise TreeMismatch(
                f"leaf {path!r} has type {type(number).__name__} in step {manifest.step},"
                f" {kind.__name__} in the target. {_REMEDY}"
            )
        return number
    owner, tag = manifest.arrays[path]
    spec = manifest.spec(owner)
    if is_number_type(kind, spec, tag):
        return np.zeros((), spec.element.numpy)[()]
    if issubclass(kind, jax.Array | jax.ShapeDtypeStruct):
        if leaves.is_key_tag(tag):
            return leaves.abstract(spec.shape[:-1], leaves.key_dtype(tag))
        return leaves.abstract(spec.shape, spec.element.numpy, tag)
    if issubclass(kind, np.ndarray):
        return NumpyMetadata(
            spec.shape, spec.element.numpy, StorageMetadata(None, kind="numpy.ndarray")
        )
    raise TreeMismatch(
        f"leaf {path!r} is an array in step {manifest.step}, of type {kind.__name__} in the target."
        f" {_REMEDY}"
    )


def _fits(number: object, dtype: Any) -> bool:
    """Return ``True`` if a Python number has the kind of ``dtype``, which holds it exactly."""
    if type(number) not in _NUMBERS or not jnp.issubdtype(dtype, _NUMBERS[type(number)]):
        return False
    try:
        array = np.asarray(number, dtype)
    except OverflowError:
        return False
    # The second comparison is true for NaN only.
    return array.item() == number or number != number


def _may_change(number: object, selection: TargetSelection) -> bool:
    """Return ``True`` if a saved number may be cast to a type that does not hold it."""
    return selection.cast and not selection.exact and type(number) in _NUMBERS


def number_as(path: str, leaf: Any, number: Any, selection: TargetSelection) -> Any:
    """Return a restored number in the form that the target has.

    Raises:
        TreeMismatch: A cast is not possible.
    """
    if isinstance(leaf, type) and leaf not in _NUMBERS and type(number) in _NUMBERS:
        array = np.asarray(number)
        is_jax = issubclass(leaf, jax.Array) and leaves.jax_has(array.dtype.name)
        return leaves.on_devices({"": array}, {"": None})[""] if is_jax else array
    target_leaf = leaves.describe_target(leaf)
    try:
        if target_leaf is None:
            is_cast = type(leaf) in _NUMBERS and _may_change(number, selection)
            return type(leaf)(number) if is_cast else number
        # In two steps: NumPy refuses a Python integer that is too large for the dtype.
        array = np.asarray(number).astype(leaf.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TreeMismatch(
            f"leaf {path!r} is {number!r}, which cannot be cast to the target's {leaf!r}: {error}."
            f" {_REMEDY}"
        ) from error
    if target_leaf.tag in NUMPY_TAGS:
        return array[()] if target_leaf.tag == NUMPY_SCALAR else array
    sharding = sharding_of(leaf)
    if sharding is not None and pieces.spans_processes(sharding):
        return pieces.spread(array, sharding, target_leaf.tag)
    return leaves.tagged(
        leaves.on_devices({"": array}, {"": sharding})[""], target_leaf.tag, sharding
    )


def on_mesh(target: Any) -> Any:
    """Return a target of arrays whose shardings have devices, and no layout."""
    if target is None:
        return None

    def on_devices(path: str, leaf: Any) -> Any:
        leaf = as_target(leaf)
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
