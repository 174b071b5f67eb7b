"""JAX arrays as leaves: what they are, their bytes, and arrays from bytes. JAX's containers as the
core sees them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import describe_numpy, numpy_bytes
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.tree import ArrayLeaf, escape_key

KEY_TAG = "jax.key:"  # permanent; the name of the key's implementation follows


def describe(value: object, of_all: bool = False) -> ArrayLeaf | None:
    """JAX and NumPy arrays of a tree that is saved; ``None`` for anything else. ``of_all``: arrays
    of
    several processes, too.

    Raises ``UnsupportedLeaf`` for arrays whose content this process does not have.
    """
    if not isinstance(value, jax.Array):
        return describe_numpy(value)
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedLeaf("a traced array has no content; save outside of jit, grad and vmap")
    if value.is_deleted():
        raise UnsupportedLeaf(
            "its buffer was deleted or donated before it was saved; save the array that took its"
            " place"
        )
    if not value.is_fully_addressable and not of_all:
        raise UnsupportedLeaf(
            f"its shards lie in several processes ({value.sharding}); only manager() saves such"
            " arrays, in all processes together"
        )
    # The same array at two places is stored once. It comes back as two: JAX arrays cannot change,
    # and one buffer cannot be donated twice.
    return _described(value, id(value) if value.size else None)


def describe_target(value: object) -> ArrayLeaf | None:
    """Arrays of a restore target: what ``describe`` takes, deleted arrays too, and
    ``jax.ShapeDtypeStruct``. Never tied.
    """
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return _described(value, None)
    found = describe_numpy(value)
    return None if found is None else found._replace(identity=None)


def _described(value: jax.Array | jax.ShapeDtypeStruct, identity: int | None) -> ArrayLeaf:
    if not is_key(value.dtype):
        return ArrayLeaf(tuple(value.shape), _name_of(value.dtype), identity)
    data = _key_data(tuple(value.shape), value.dtype)
    return ArrayLeaf(
        tuple(data.shape), data.dtype.name, identity, KEY_TAG + _implementation(value.dtype)
    )


@lru_cache(64)
def _name_of(dtype: Any) -> str:
    return dtype_named(dtype.name).name


@lru_cache(64)  # states have few keys, and abstract evaluation takes a millisecond
def _key_data(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, abstract(shape, dtype))


@lru_cache(64)
def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_key_tag(tag: str | None) -> bool:
    """Whether a leaf with this tag was saved from typed PRNG keys."""
    return tag is not None and tag.startswith(KEY_TAG)


@lru_cache(64)
def _implementation(dtype: Any) -> str:
    """The registered name of a key dtype's implementation."""
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if key_dtype(KEY_TAG + name) == dtype:
            return name
    raise UnsupportedLeaf(
        f"keys of type {dtype} have no implementation that JAX knows by name; save"
        " jax.random.key_data(key)"
    )


@lru_cache(64)
def key_dtype(tag: str | None) -> Any:
    """The dtype of the typed keys that a tag stands for; ``UnsupportedLeaf`` where JAX has no such
    implementation.
    """
    implementation = str(tag).removeprefix(KEY_TAG)
    try:
        return jax.eval_shape(partial(jax.random.key, 0, impl=implementation)).dtype
    except ValueError as error:
        raise UnsupportedLeaf(
            f"JAX has no PRNG implementation {implementation!r}: {error}"
        ) from error


def key_of(data: jax.Array, tag: str | None, sharding: Sharding | None) -> jax.Array:
    """Typed keys from their data."""
    key_dtype(tag)  # raises where JAX does not know it
    key: jax.Array = jax.random.wrap_key_data(data, impl=str(tag).removeprefix(KEY_TAG))
    return key if sharding is None else jax.device_put(key, sharding)


def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array that is not there."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def bytes_of(value: object) -> NDArray[np.uint8]:
    """The bytes of a leaf, uint8 1-D in C order: a view of the array's own memory where it lies
    whole
    on the host, else a copy.

    A sharded array is gathered: chunks are cut from the leaf and not from its shards, so that a
    chain survives a resharding.
    """
    if not isinstance(value, jax.Array):
        assert isinstance(value, np.ndarray | np.generic)  # describe() admits nothing else
        return numpy_bytes(value)
    data = jax.random.key_data(value) if is_key(value.dtype) else value
    return numpy_bytes(_whole(data))


def view_of(value: object) -> NDArray[np.uint8] | None:
    """The bytes of a JAX array without a copy, where it lies whole on the processor; else ``None``.
    As
    long as the view lives, JAX leaves that memory alone: a donation becomes a copy, and a deletion
    frees it later (seen in JAX 0.10.2).
    """
    if not isinstance(value, jax.Array) or is_key(value.dtype) or not value.is_fully_replicated:
        return None
    shard = value.addressable_shards[0]
    if shard.device.platform != "cpu":
        return None
    array = np.asarray(shard.data)
    return None if array.flags.owndata or not array.flags.c_contiguous else numpy_bytes(array)


def _whole(value: jax.Array) -> NDArray[Any]:
    shards = value.addressable_shards
    if value.is_fully_replicated:
        return np.asarray(shards[0].data)
    # Not np.asarray(value): that leaves a copy of the whole leaf on the array for as long as it
    # lives.
    whole = np.empty(value.shape, value.dtype)
    for shard in shards:
        if shard.replica_id == 0:
            whole[shard.index] = np.asarray(shard.data)
    return whole


@contextlib.contextmanager
def own_rules() -> Iterator[None]:
    """Our own calls of JAX are not the training's: neither its mesh nor what it forbids itself
    (transfers, NaN) is theirs.
    """
    nowhere = Mesh(np.empty((), object), ())
    with (
        jax.set_mesh(nowhere),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield


def on_devices(
    host: Mapping[str, NDArray[Any]], shardings: Mapping[str, Sharding | None]
) -> dict[str, jax.Array]:
    """Host arrays as JAX arrays in buffers of their own, fit to be donated.

    ``shardings``: per key, ``None`` for the default device. Raises ``ValueError`` naming the leaf
    whose shape a sharding does not fit.
    """
    placed = {path: _put(path, array, shardings[path]) for path, array in host.items()}
    groups: dict[Any, list[str]] = {}
    for path, array in placed.items():
        groups.setdefault((frozenset(array.devices()), array.committed), []).append(path)
    for (devices, _), paths in groups.items():
        # On the processor device_put may take the NumPy memory for its own, with may_alias=False
        # too (seen in JAX 0.10.2). Such a buffer cannot be donated, and it would change with the
        # memory. The output of a jit owns its buffer.
        if any(device.platform == "cpu" for device in devices):
            kept = tuple(shardings[path] for path in paths)
            copies = jax.jit(_copies, out_shardings=kept)(tuple(placed[path] for path in paths))
            placed |= dict(zip(paths, copies, strict=True))
    for array in placed.values():
        array.block_until_ready()  # from here on the host memory is the caller's again
    return {path: placed[path] for path in host}


def _put(path: str, array: NDArray[Any], sharding: Sharding | None) -> jax.Array:
    try:
        placed: jax.Array = jax.device_put(array, sharding)
    except ValueError as error:
        raise ValueError(
            f"leaf {path!r} of shape {array.shape} cannot be placed as {sharding}: {error}"
        ) from error
    return placed


def _copies(values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.copy(value) for value in values)


def jax_has(dtype: str) -> bool:
    """Whether JAX, configured as it is now, can hold this element type: 64-bit types need
    ``jax_enable_x64``.
    """
    try:
        return bool(jax.device_put(np.zeros((), dtype_named(dtype).numpy)).dtype.name == dtype)
    except jax.errors.JaxRuntimeError:
        return False  # a type of ml_dtypes that XLA lacks


# --- containers -----------------------------------------------------------------------------------


def expand(value: object) -> list[tuple[object, object]] | None:
    """One level of a container that is registered with JAX, as (key, child) pairs; ``None`` for a
    leaf.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return [(_key(path[0]), child) for path, child in pairs]


def map_leaves(change: Callable[[str, Any], Any], tree: Any) -> Any:
    """The same containers with every leaf (``None`` too) replaced by ``change(leaf path, leaf)``.
    Paths as ``tree.flatten`` gives them.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: change("/".join(escape_key(_key(key)) for key in keys), leaf),
        tree,
        is_leaf=lambda node: node is None,
    )


def _key(entry: Any) -> object:
    """The key in one of JAX's key path entries, whichever of the four kinds it is."""
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)
