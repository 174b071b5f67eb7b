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

from deltacheck.backends.orbax.state.leaves import is_key
from deltacheck.backends.orbax.state.metadata import NumpyMetadata, StorageMetadata

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
    if restore_args is not None:
        target = jax.tree.map(_target_of, saved_tree() if target is None else target, restore_args)
    is_strict = getattr(args, "strict", True) and all(
        getattr(leaf_args, "strict", True) for leaf_args in jax.tree.leaves(restore_args)
    )
    return {
        "item": target,
        "partial_restore": getattr(args, "partial_restore", False),
        "strict": is_strict,  # False is refused
    }


def _target_of(leaf: Any, restore_args: Any) -> Any:
    """Return the target of a leaf with the type and sharding that its ``RestoreArgs`` name."""
    kind = getattr(restore_args, "restore_type", None)
    # ``...`` stays: the leaf is left out.
    if kind is None or leaf is ...:
        return leaf
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    dtype = dtype if restore_args.dtype is None else restore_args.dtype
    if shape is None or not issubclass(kind, jax.Array | np.ndarray):
        return leaf if isinstance(leaf, kind) else kind
    if issubclass(kind, np.ndarray) and not is_key(dtype):
        return NumpyMetadata(shape, np.dtype(dtype), StorageMetadata("numpy.ndarray", "", 0))
    sharding = _sharding_of(restore_args)
    if isinstance(leaf, jax.Array) and not leaf.committed and sharding == leaf.sharding:
        # Orbax copies the sharding of the leaf. Committed to one device, a key or a counter could
        # not meet arrays of a mesh in one jitted call.
        return leaf
    global_shape = getattr(restore_args, "global_shape", None)
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        shape if global_shape is None else global_shape, dtype, sharding=sharding
    )


def _sharding_of(restore_args: Any) -> Any:
    sharding: Any = getattr(restore_args, "sharding", None)
    mesh = getattr(restore_args, "mesh", None)
    if sharding is None and mesh is not None:
        return NamedSharding(mesh, restore_args.mesh_axes)
    # Orbax's description of a sharding, from the metadata of a checkpoint.
    return sharding.to_jax_sharding() if hasattr(sharding, "to_jax_sharding") else sharding
