"""The metadata of an item: a description of each leaf in its place, which is a restore target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from deltacheck.backends.orbax.manager_root.tree_internals import TreeMetadata
from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.saved_shardings import sharding_of
from deltacheck.leaf import tree
from deltacheck.leaf.contracts import name_of
from deltacheck.leaf.tree import NUMPY_ARRAY, NUMPY_SCALAR
from deltacheck.store.manifest import Manifest

__all__ = ["ArrayMetadata", "NumpyMetadata", "StorageMetadata", "TreeMetadata", "metadata_of"]


@dataclass(frozen=True, slots=True)
class StorageMetadata:
    """The way in which an array is stored.

    Attributes:
        kind: ``"jax.Array"``, ``"numpy.ndarray"``, ``"numpy.generic"`` or ``"jax.random.key"``: the
            type that the array had, and that a restore returns.
        contract: ``"exact"`` or ``"bounded"``.
        nbytes: The bytes of the restored array.
    """

    kind: str
    contract: str
    nbytes: int


class ArrayMetadata(jax.ShapeDtypeStruct):
    """A ``jax.ShapeDtypeStruct`` of a saved array or of saved keys, with its storage."""

    __slots__ = ("storage",)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        sharding: Sharding | None = None,
        storage: StorageMetadata,
    ) -> None:
        super().__init__(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]
        self.storage = storage


@dataclass(frozen=True, slots=True)
class NumpyMetadata:
    """The shape and dtype of a saved NumPy array or scalar, and its storage.

    As a target, it makes a restore return NumPy.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    storage: StorageMetadata


def metadata_of(manifest: Manifest) -> TreeMetadata:
    """Return the tree of a step, with numbers and text as they are, and its custom metadata."""
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
            kind, "exact" if promise is None else name_of(promise.terms), spec.raw_bytes
        )
        if kind.startswith("numpy"):
            return NumpyMetadata(shape, dtype, storage)
        return ArrayMetadata(shape, dtype, sharding=shardings.get(owner), storage=storage)

    return TreeMetadata.build(
        tree=tree.unflatten(manifest.tree, place), custom_metadata=manifest.custom_metadata or None
    )


def as_tree(target: Any) -> Any:
    """Return the tree of a target that is the metadata of an item; any other target as it is."""
    return target.tree if isinstance(target, TreeMetadata) else target
