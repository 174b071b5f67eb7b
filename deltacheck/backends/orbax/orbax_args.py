"""Orbax's own arguments of a save and a restore (``PyTreeSave``, ``StandardRestore``, ...) as ours.

A training library that calls a ``CheckpointManager`` with these needs another manager only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from orbax import checkpoint as ocp

from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.leaves import is_key
from deltacheck.backends.orbax.state.metadata import (
    NumpyMetadata,
    StorageMetadata,
    as_target,
    jax_sharding,
)
from deltacheck.errors import TreeMismatch
from deltacheck.restore.resolve import is_below

SAVE_ARGS = (ocp.args.PyTreeSave, ocp.args.StandardSave)
RESTORE_ARGS = (ocp.args.PyTreeRestore, ocp.args.StandardRestore)


def of_save(args: Any) -> dict[str, Any]:
    """Return the arguments of ``DeltaSaveArgs`` for a ``PyTreeSave`` or ``StandardSave``.

    Options of the file layout (``chunk_byte_size``, ``ocdbt_target_data_file_size``) have no effect
    on values, and none here.

    Raises:
        ValueError: A leaf is to be cast.
    """
    for save_args in jax.tree.leaves(args.save_args):
        if getattr(save_args, "dtype", None) is not None:
            raise ValueError(
                f"deltacheck does not support SaveArgs(dtype={np.dtype(save_args.dtype).name!r}): a"
                " leaf is saved with its dtype. Cast it before the save"
            )
    return {"item": args.item, "custom_metadata": args.custom_metadata}


def of_restore(args: Any, saved_tree: Callable[[], Any]) -> dict[str, Any]:
    """Return the arguments of ``DeltaRestoreArgs`` for a ``PyTreeRestore`` or ``StandardRestore``.

    Args:
        args: Orbax's arguments.
        saved_tree: Returns the metadata of the saved tree, which is the target if ``args`` has
            ``restore_args`` alone.

    Raises:
        ValueError: ``args`` asks for a transformation, a layout or a fallback sharding.
    """
    unsupported = {
        "transforms": "restore the saved tree, and transform that",
        "legacy_transform_fn": "restore the saved tree, and transform that",
        "fallback_sharding": "give DeltaRestoreArgs(shardings=...) if saved devices are missing",
        "support_layout": "an array is restored with the default layout of its device",
    }
    for name, remedy in unsupported.items():
        value = getattr(args, name, None)
        if value is not None and value is not False:
            raise ValueError(
                f"deltacheck does not support {name} of {type(args).__name__}: {remedy}"
            )
    target, restore_args = args.item, getattr(args, "restore_args", None)
    is_part = getattr(args, "partial_restore", False)
    if restore_args is not None:
        target = _with_restore_args(
            saved_tree() if target is None else target, restore_args, is_part
        )
    is_strict = getattr(args, "strict", True) and all(
        getattr(leaf_args, "strict", True) for leaf_args in jax.tree.leaves(restore_args)
    )
    return {
        "item": target,
        "partial_restore": is_part,
        "strict": is_strict,  # False is refused
    }


def _with_restore_args(target: Any, restore_args: Any, is_part: bool) -> Any:
    """Return a target whose leaves have the types and shardings of their ``RestoreArgs``.

    Leaves meet by their paths: ``restore_args`` may have other containers, or more leaves than the
    part that is restored.

    Raises:
        TreeMismatch: ``restore_args`` has a leaf that is not in the target, and no part is asked
            for.
    """
    by_path: dict[str, Any] = {}
    leaves.map_leaves(by_path.__setitem__, restore_args)
    paths: set[str] = set()

    def of_leaf(path: str, leaf: Any) -> Any:
        paths.add(path)
        return _target_of(as_target(leaf), by_path.get(path))

    new_target = leaves.map_leaves(of_leaf, target)
    surplus = sorted(
        path
        for path in by_path.keys() - paths
        if by_path[path] is not None and not any(is_below(place, path) for place in paths)
    )
    if surplus and not is_part:
        raise TreeMismatch(
            f"restore_args has a leaf {surplus[0]!r}, which is not in the tree to restore. Leave it"
            " out, or restore a part with partial_restore=True"
        )
    return new_target


def _target_of(leaf: Any, restore_args: Any) -> Any:
    """Return the target of a leaf with the type and sharding that its ``RestoreArgs`` name."""
    kind = getattr(restore_args, "restore_type", None)
    # ``...`` stays: the leaf is left out.
    if kind is None or leaf is ...:
        return leaf
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or not issubclass(kind, jax.Array | np.ndarray):
        return leaf if isinstance(leaf, kind) else kind
    # Of keys, Orbax's helpers describe the data.
    if restore_args.dtype is not None and not is_key(dtype):
        dtype = restore_args.dtype
    if issubclass(kind, np.ndarray) and not is_key(dtype):
        return NumpyMetadata(shape, np.dtype(dtype), StorageMetadata(None, kind="numpy.ndarray"))
    sharding = _sharding_of(restore_args)
    if isinstance(leaf, jax.Array) and not leaf.committed and sharding == leaf.sharding:
        # Orbax copies the sharding of the leaf. Committed to one device, a key or a counter could
        # not meet arrays of a mesh in one jitted call.
        return leaf
    global_shape = getattr(restore_args, "global_shape", None)
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        shape if global_shape is None or is_key(dtype) else global_shape, dtype, sharding=sharding
    )


def _sharding_of(restore_args: Any) -> Any:
    sharding: Any = getattr(restore_args, "sharding", None)
    mesh = getattr(restore_args, "mesh", None)
    if sharding is None and mesh is not None:
        return NamedSharding(mesh, restore_args.mesh_axes)
    return jax_sharding(sharding)
