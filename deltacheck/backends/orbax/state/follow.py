"""Apply the updates of a run to JAX arrays, for inference workers that follow it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deltacheck.backends.matching import changes_of
from deltacheck.backends.orbax.state import leaves
from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import typed
from deltacheck.restore.follow.follower import LeafChange, Update

# The word types by element size. An element of 16 bytes has none and is changed on the host.
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


@typed
def applied(update: Update, state: Any, *, check: bool = False) -> Any:
    """Return ``state`` at the step of ``update``.

    Args:
        update: An update from ``Follower``.
        state: The followed part of the tree as it was saved, such as ``{"params": params}``. It
            must have had every earlier update. NumPy arrays in it are changed in place.
        check: ``True``: compare each changed leaf with the digest of the step. This finds a missed
            update, and takes a copy to the host and a pass over it. ``False``: faster.

    Returns:
        A tree of the same containers. Changed leaves are new arrays with the sharding of the old
        ones.

    Raises:
        TreeMismatch: ``state`` is not the followed tree. The message names the leaf and both
            values.
        Damaged: A check failed.
    """
    flat = tree.flatten(state, leaves.describe_target, leaves.expand)
    changes = changes_of(update, flat)

    def changed(path: str, leaf: Any) -> Any:
        change = changes.get(path)
        if change is None:
            return leaf
        if isinstance(leaf, np.ndarray):
            change.apply(leaf)
            return leaf
        with leaves.own_rules():
            # The old array is not donated: a request may still be using it.
            fresh = _changed(leaf, change, flat.leaves[path].tag)
            if check:
                change.check(leaves.bytes_of(fresh))
        return fresh

    return leaves.map_leaves(changed, state)


def _changed(leaf: jax.Array, change: LeafChange, tag: str | None) -> jax.Array:
    spec = change.spec
    bits = _BITS.get(spec.element.item_bytes)
    # Positions are int32 on the device, because JAX may be limited to 32 bits.
    sparse = change.positions is not None and leaf.size < 1 << 31 and not leaves.is_key(leaf.dtype)
    if (
        sparse
        and bits is not None
        # ``bitcast_convert_type`` does not support these types.
        and not spec.dtype.startswith(("complex", "bool"))
        and leaves.jax_has(np.dtype(bits).name)
    ):
        assert change.positions is not None
        values = change.values.view(np.dtype(bits))
        fresh = _scatter(leaf, change.positions.astype(np.int32), values, bits, leaf.sharding)
        return leaves.tagged(fresh, tag, leaf.sharding)
    # A copy, because a view of a JAX array must not be written to.
    host_leaf = (
        np.ascontiguousarray(leaves.bytes_of(leaf))
        .copy()
        .view(spec.element.numpy)
        .reshape(spec.shape)
    )
    change.apply(host_leaf)
    if leaves.is_key(leaf.dtype):
        return leaves.key_of(jnp.asarray(host_leaf), tag, leaf.sharding)
    fresh = leaves.on_devices({spec.path: host_leaf}, {spec.path: leaf.sharding})[spec.path]
    return leaves.tagged(fresh, tag, leaf.sharding)


def _scatter(leaf: jax.Array, positions: Any, values: Any, bits: Any, sharding: Any) -> jax.Array:
    scattered: jax.Array = jax.jit(partial(_scattered, bits), out_shardings=sharding)(
        leaf, positions, values
    )
    return scattered


def _scattered(bits: Any, leaf: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """Set words of an array by position, as integers, so that a NaN keeps its payload."""
    words = (
        jax.lax.bitcast_convert_type(leaf, bits)
        .reshape(-1)
        .at[positions]
        .set(values, unique_indices=True, indices_are_sorted=True)
    )
    return jax.lax.bitcast_convert_type(words.reshape(leaf.shape), leaf.dtype)
