"""The metadata of an item: a description of each leaf in its place, which is a restore target.

There are two forms. ``described`` returns the saved tree as a target: abstract arrays, and numbers
and text as they are. Orbax v1 gives it to its users. ``metadata_of`` returns Orbax's own records of
values, which the v0 interface and its helpers (``construct_restore_args``) expect.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from orbax import checkpoint as ocp

from deltacheck.backends.orbax.manager_root.tree_internals import TreeMetadata
from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.saved_shardings import sharding_of
from deltacheck.leaf import tree
from deltacheck.leaf.contracts import name_of
from deltacheck.leaf.tree import NUMPY_ARRAY, NUMPY_SCALAR
from deltacheck.store.manifest import Manifest, SavedSharding

__all__ = [
    "ArrayMetadata",
    "NumpyMetadata",
    "StorageMetadata",
    "TreeMetadata",
    "as_target",
    "as_tree",
    "described",
    "metadata_of",
]

log = logging.getLogger("deltacheck")


@dataclass(frozen=True, eq=False)
class StorageMetadata(ocp.metadata.StorageMetadata):  # type: ignore[misc] # orbax has no types
    """The way in which an array is stored, equal to that of Orbax with the same chunks.

    Attributes:
        kind: ``"jax.Array"``, ``"numpy.ndarray"``, ``"numpy.generic"`` or ``"jax.random.key"``: the
            type that the array had, and that a restore returns.
        contract: ``"exact"`` or ``"bounded"``.
        nbytes: The bytes of the restored array.
    """

    kind: str = ""
    contract: str = ""
    nbytes: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ocp.metadata.StorageMetadata):
            return NotImplemented
        return bool((self.chunk_shape, self.write_shape) == (other.chunk_shape, other.write_shape))

    def __hash__(self) -> int:
        return hash((self.chunk_shape, self.write_shape))


class ArrayMetadata(jax.ShapeDtypeStruct):
    """A ``jax.ShapeDtypeStruct`` of a saved array or of saved keys, with its storage."""

    __slots__ = ("storage",)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        sharding: Sharding | None = None,
        weak_type: bool = False,
        storage: StorageMetadata,
    ) -> None:
        super().__init__(shape, dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-untyped-call]
        self.storage = storage


@dataclass(frozen=True, slots=True)
class NumpyMetadata:
    """The shape and dtype of a saved NumPy array or scalar, and its storage.

    As a target, it makes a restore return NumPy.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    storage: StorageMetadata


class _NamedSharding(ocp.metadata.NamedShardingMetadata):  # type: ignore[misc]
    """Orbax's record of a sharding, which has no memory kind, and the sharding itself."""

    sharding: NamedSharding | None = None

    def to_jax_sharding(self) -> Any:
        return super().to_jax_sharding() if self.sharding is None else self.sharding


def described(manifest: Manifest) -> Any:
    """Return the tree of a step with abstract arrays, and numbers and text as they are."""
    specs = manifest.specs
    shardings = {
        path: sharding
        for record in manifest.shardings
        if (sharding := sharding_of(record)) is not None
        for path in record.leaves
    }

    def place(path: str, owner: str, tag: str | None) -> Any:
        spec = specs[owner]
        shape, dtype, kind = spec.shape, spec.element.numpy, "jax.Array"
        if leaves.is_key_tag(tag):
            shape, dtype, kind = shape[:-1], leaves.key_dtype(tag), "jax.random.key"
        elif tag in (NUMPY_ARRAY, NUMPY_SCALAR):
            kind = "numpy.ndarray" if tag == NUMPY_ARRAY else "numpy.generic"
        promise = manifest.contracts.get(owner)
        storage = StorageMetadata(
            chunk_shape=spec.chunk,
            kind=kind,
            contract="exact" if promise is None else name_of(promise.terms),
            nbytes=spec.raw_bytes,
        )
        if kind.startswith("numpy"):
            return NumpyMetadata(shape, dtype, storage)
        return ArrayMetadata(
            shape,
            dtype,
            sharding=shardings.get(owner),
            weak_type=tag == leaves.WEAK_TAG,
            storage=storage,
        )

    return tree.unflatten(manifest.tree, place)


def metadata_of(manifest: Manifest, directory: str | os.PathLike[str]) -> TreeMetadata:
    """Return Orbax's metadata of a step in a directory: the tree, and the custom metadata."""
    records = {path: record for record in manifest.shardings for path in record.leaves}
    owners = tree.array_paths(manifest.tree)

    def value(path: str, leaf: Any) -> Any:
        place = (unquote(path.replace("/", ".")), epath.Path(os.fspath(directory)))
        if isinstance(leaf, bool | int | float | complex):
            return ocp.metadata.ScalarMetadata(*place, dtype=np.dtype(type(leaf)))
        if isinstance(leaf, str | bytes):
            return ocp.metadata.StringMetadata(*place)
        if isinstance(leaf, NumpyMetadata):
            if leaf.storage.kind == "numpy.generic":
                return ocp.metadata.ScalarMetadata(*place, dtype=leaf.dtype, storage=leaf.storage)
            return ocp.metadata.ArrayMetadata(*place, leaf.shape, None, leaf.dtype, leaf.storage)
        if not isinstance(leaf, ArrayMetadata):
            return leaf
        data = leaf if not leaves.is_key(leaf.dtype) else leaves.key_data(leaf.shape, leaf.dtype)
        sharding = _sharding_record(leaf.sharding, records.get(owners[path]))
        return ocp.metadata.ArrayMetadata(*place, data.shape, sharding, data.dtype, leaf.storage)

    return TreeMetadata.build(
        tree=leaves.map_leaves(value, described(manifest)),
        custom_metadata=manifest.custom_metadata or None,
    )


def _sharding_record(sharding: Sharding | None, record: SavedSharding | None) -> Any:
    """Return Orbax's record of the sharding that a restore gives to an array."""
    if isinstance(sharding, NamedSharding):
        named_sharding = _NamedSharding.from_jax_sharding(sharding)
        named_sharding.sharding = sharding
        return named_sharding
    if record is None:
        # Orbax takes an array without a sharding for one of NumPy.
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(
            SingleDeviceSharding(jax.devices()[0])
        )
    # The devices of this run do not permit it.
    return ocp.metadata.NamedShardingMetadata(
        np.array(record.shape),
        list(record.axes),
        tuple(record.spec),
        tuple(jax.sharding.AxisType[name] for name in record.types),
    )


def as_target(leaf: Any) -> Any:
    """Return a leaf of a target that is Orbax's metadata of a value as the form to restore.

    Any other leaf stays as it is.
    """
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return str
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        if getattr(leaf.storage, "kind", "") == "numpy.generic":
            return np.zeros((), leaf.dtype)[()]
        return type(np.zeros((), leaf.dtype).item())
    if not isinstance(leaf, ocp.metadata.ArrayMetadata):
        return leaf
    storage = leaf.storage
    if not isinstance(storage, StorageMetadata):
        storage = StorageMetadata(None)
    if leaf.sharding is None:
        return NumpyMetadata(tuple(leaf.shape), np.dtype(leaf.dtype), storage)
    return ArrayMetadata(
        tuple(leaf.shape), leaf.dtype, sharding=jax_sharding(leaf.sharding), storage=storage
    )


def jax_sharding(sharding: Any) -> Any:
    """Return the sharding of Orbax's record of one; any other value as it is.

    Returns:
        ``None`` for one device, so that the array may meet those of a mesh in one jitted call, and
        if the devices of this run do not permit the sharding.
    """
    if not isinstance(sharding, ocp.metadata.ShardingMetadata):
        return sharding
    if isinstance(sharding, ocp.metadata.SingleDeviceShardingMetadata):
        return None
    try:
        return sharding.to_jax_sharding()
    except ValueError as error:
        log.warning("a saved sharding is left out: %s", str(error))
        return None


def as_tree(target: Any) -> Any:
    """Return the tree of a target that is the metadata of an item; any other target as it is."""
    return target.tree if isinstance(target, TreeMetadata) else target
