"""Treat JAX arrays as leaves: describe them, read their bytes, and create them from bytes.

JAX's containers are converted to the trees of the core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import describe_numpy, numpy_bytes
from deltacheck.backends.orbax.manager_root.jax_internals import weakly_typed
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import containers
from deltacheck.leaf.containers import Level, Node
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.instances import name_of
from deltacheck.leaf.tree import NUMPY_ARRAY, ArrayLeaf, escape_key

KEY_TAG = "jax.key:"  # permanent; followed by the name of the key's implementation
WEAK_TAG = "jax.weak"  # permanent; of weakly typed arrays


def describe(value: object, of_all: bool = False) -> ArrayLeaf | None:
    """Describe a JAX or NumPy array of a tree that is saved; return ``None`` for anything else.

    Args:
        value: Any value of a tree.
        of_all: Also accept arrays of several processes.

    Raises:
        UnsupportedLeaf: This process does not have the content of the array.
    """
    if not isinstance(value, jax.Array):
        return describe_numpy(value)
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedLeaf("a traced array has no content; save outside of jit, grad and vmap")
    # JAX would raise this too, but later and without the path of the leaf.
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
    # An array that is in the tree twice is stored once. It is restored as two arrays, because one
    # buffer cannot be donated twice.
    return _described(value, id(value) if value.size else None)


def describe_target(value: object) -> ArrayLeaf | None:
    """Describe an array of a restore target; return ``None`` for anything else.

    Accepted are deleted arrays and ``jax.ShapeDtypeStruct`` too, and other objects with a shape and
    a dtype, such as the metadata of NumPy arrays. Targets are never tied.
    """
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return _described(value, None)
    if is_abstract_numpy(value):
        dtype = dtype_named(np.dtype(value.dtype).name)  # type: ignore[attr-defined]
        return ArrayLeaf(tuple(value.shape), dtype.name, None, NUMPY_ARRAY)  # type: ignore[attr-defined]
    leaf = describe_numpy(value)
    # One array may be at two paths of a target. Each path gets an array of its own.
    return None if leaf is None else leaf._replace(identity=None)


def is_abstract_numpy(value: object) -> bool:
    """Return ``True`` for a leaf with a shape and a dtype that is no array."""
    return (
        not isinstance(value, type | np.ndarray | np.generic | jax.Array)
        and all(hasattr(value, name) for name in ("shape", "dtype"))
        # Containers of one array may have its attributes.
        and jax.tree_util.all_leaves([value])
    )


def _described(value: jax.Array | jax.ShapeDtypeStruct, identity: int | None) -> ArrayLeaf:
    if not is_key(value.dtype):
        tag = WEAK_TAG if value.weak_type else None
        return ArrayLeaf(tuple(value.shape), _name_of(value.dtype), identity, tag)
    # Keys are stored as their data, which has one axis more. The tag says how to make keys of it.
    data = key_data(tuple(value.shape), value.dtype)
    return ArrayLeaf(
        tuple(data.shape), data.dtype.name, identity, KEY_TAG + _implementation(value.dtype)
    )


@lru_cache(64)
def _name_of(dtype: Any) -> str:
    return dtype_named(dtype.name).name


@lru_cache(64)  # states have few keys, and abstract evaluation takes a millisecond
def key_data(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the data of typed keys as a ``jax.ShapeDtypeStruct``."""
    return jax.eval_shape(jax.random.key_data, abstract(shape, dtype))


@lru_cache(64)
def is_key(dtype: Any) -> bool:
    """Return ``True`` if a dtype is that of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_key_tag(tag: str | None) -> bool:
    """Return ``True`` if a leaf with this tag was saved from typed PRNG keys."""
    return tag is not None and tag.startswith(KEY_TAG)


@lru_cache(64)
def _implementation(dtype: Any) -> str:
    """Return the registered name of a key dtype's implementation."""
    # A key dtype has no public attribute for its registered name. The known ones are tried.
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if key_dtype(KEY_TAG + name) == dtype:
            return name
    raise UnsupportedLeaf(
        f"keys of type {dtype} have no implementation that JAX knows by name; save"
        " jax.random.key_data(key)"
    )


@lru_cache(64)
def key_dtype(tag: str | None) -> Any:
    """Return the dtype of the typed keys that a tag stands for.

    Raises:
        UnsupportedLeaf: JAX has no such implementation.
    """
    implementation = str(tag).removeprefix(KEY_TAG)
    try:
        return jax.eval_shape(partial(jax.random.key, 0, impl=implementation)).dtype
    except ValueError as error:
        raise UnsupportedLeaf(
            f"JAX has no PRNG implementation {implementation!r}: {error}"
        ) from error


def key_of(data: jax.Array, tag: str | None, sharding: Sharding | None) -> jax.Array:
    """Return typed keys from their data."""
    key_dtype(tag)  # raises where JAX does not know it
    key: jax.Array = jax.random.wrap_key_data(data, impl=str(tag).removeprefix(KEY_TAG))
    return key if sharding is None else jax.device_put(key, sharding)


def tagged(array: jax.Array, tag: str | None, sharding: Sharding | None) -> jax.Array:
    """Return a JAX array as its tag says: typed keys of their data, or weakly typed."""
    if is_key_tag(tag):
        return key_of(array, tag, sharding)
    return weakly_typed(array) if tag == WEAK_TAG else array


def abstract(shape: tuple[int, ...], dtype: Any, tag: str | None = None) -> jax.ShapeDtypeStruct:
    """Return shape and dtype as a ``jax.ShapeDtypeStruct``, weakly typed if the tag says so."""
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=tag == WEAK_TAG)  # type: ignore[no-untyped-call]


def bytes_of(value: object) -> NDArray[np.uint8]:
    """Return the bytes of a leaf, uint8 1-D in C order.

    The result is a view of the array's own memory if it lies whole on the host, else a copy. A
    sharded array is gathered: chunks are cut from the leaf and not from its shards, so that a chain
    continues after a resharding.
    """
    if not isinstance(value, jax.Array):
        assert isinstance(value, np.ndarray | np.generic)  # describe() admits nothing else
        return numpy_bytes(value)
    data = jax.random.key_data(value) if is_key(value.dtype) else value
    return numpy_bytes(_whole(data))


def view_of(value: object) -> NDArray[np.uint8] | None:
    """Return a view of the bytes of a JAX array that lies whole on the processor, else ``None``.

    As long as the view exists, JAX does not reuse the memory: a donation becomes a copy, and a
    deletion frees it later (observed in JAX 0.10.2).
    """
    if not is_viewable(value):
        return None
    assert isinstance(value, jax.Array)
    view = whole_view(value)
    return None if view is None else numpy_bytes(view)


def is_viewable(value: object) -> bool:
    """Return true for a JAX array that lies whole on a processor. ``view_of`` may view it."""
    return (
        isinstance(value, jax.Array)
        and not is_key(value.dtype)
        and value.is_fully_replicated
        and any(device.platform == "cpu" for device in value.devices())
    )


def is_on_accelerators(value: object) -> TypeGuard[jax.Array]:
    """Return true for a JAX array that lies in the memory of accelerators alone."""
    if not isinstance(value, jax.Array) or value.sharding.memory_kind not in (None, "device"):
        return False
    devices: Iterable[jax.Device] = value.sharding.device_set
    return all(device.platform != "cpu" for device in devices)


def whole_view(value: jax.Array) -> NDArray[Any] | None:
    """Return a view of an array that is viewable, or ``None`` as ``view_of`` does.

    It waits until the array is computed.
    """
    # An array on one device is its only shard, and a list of shards takes time.
    is_single = len(value.sharding.device_set) == 1
    array = np.asarray(value if is_single else value.addressable_shards[0].data)
    # An array that owns its data is a copy, which would be a read on the training thread. A view of
    # another layout would have to be copied to C order.
    flags = array.flags
    return None if flags.owndata or not flags.c_contiguous else array


def enqueued_copies(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Return copies of arrays with the same sharding, without a wait for their computation.

    The call is compiled once for each list of forms.
    """
    copies: list[jax.Array] = _copier(values[0].sharding)(list(values))
    return copies


def _whole(value: jax.Array) -> NDArray[Any]:
    shards = value.addressable_shards
    if value.is_fully_replicated:
        return np.asarray(shards[0].data)
    # Not np.asarray(value), because it caches a copy of the whole leaf as long as the array exists.
    gathered = np.empty(value.shape, value.dtype)
    for shard in shards:
        # Each part once, even if several devices hold it.
        if shard.replica_id == 0:
            gathered[shard.index] = np.asarray(shard.data)
    return gathered


@contextlib.contextmanager
def own_rules() -> Iterator[None]:
    """Run JAX without the settings of the training.

    The training may set a mesh, and forbid itself transfers or NaN. Neither applies to calls
    inside.
    """
    # An empty mesh takes the place of the mesh of the training.
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
    """Return host arrays as JAX arrays in buffers of their own that can be donated.

    Args:
        host: The arrays, by leaf path.
        shardings: The sharding for each path; ``None``: the default device.

    Raises:
        ValueError: A sharding does not fit the shape of a leaf; the message names it.
    """
    device_arrays = _put(host, shardings)
    # Uncommitted arrays stay uncommitted only if no committed one is among them.
    groups: dict[Any, list[str]] = {}
    for path, array in device_arrays.items():
        if any(device.platform == "cpu" for device in array.devices()):
            key = (array.shape, array.dtype, array.sharding, array.committed)
            groups.setdefault(key, []).append(path)
    # On the processor, device_put may use the NumPy memory itself, even with may_alias=False
    # (observed in JAX 0.10.2). Such a buffer cannot be donated, and it would change with the
    # memory. The output of a jitted function owns its buffer.
    for paths in groups.values():
        copy = _copier(shardings[paths[0]])
        for path in paths:
            device_arrays[path] = copy(device_arrays[path])
    for array in device_arrays.values():
        array.block_until_ready()  # the caller may change the host memory after this
    return {path: device_arrays[path] for path in host}


@lru_cache(64)  # a new function of jax.jit takes longer to call
def _copier(sharding: Sharding | None) -> Callable[[Any], Any]:
    """Return a function that copies an array, or a list of arrays, into buffers of JAX."""
    if sharding is not None and sharding.memory_kind == "pinned_host":
        # JAX 0.8 compiles no copy of a sharded array into pinned memory. Into that memory, unlike
        # the default one, device_put with may_alias=False copies.
        return partial(jax.device_put, device=sharding, may_alias=False)
    return jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=sharding)


def _put(
    host: Mapping[str, NDArray[Any]], shardings: Mapping[str, Sharding | None]
) -> dict[str, jax.Array]:
    placed = [path for path in host if shardings[path] is not None]
    others = [path for path in host if shardings[path] is None]
    try:
        # In one call for all: a call takes longer than the copy of a small leaf.
        device_arrays = dict(zip(others, jax.device_put([host[p] for p in others]), strict=True))
        device_arrays |= zip(
            placed,
            jax.device_put([host[p] for p in placed], [shardings[p] for p in placed]),
            strict=True,
        )
    except ValueError:
        for path in placed:
            _put_alone(path, host[path], shardings[path])
        raise
    return device_arrays


def _put_alone(path: str, array: NDArray[Any], sharding: Sharding | None) -> None:
    try:
        jax.device_put(array, sharding)
    except ValueError as error:
        raise ValueError(
            f"leaf {path!r} of shape {array.shape} cannot be placed as {sharding}: {error}"
        ) from error


def jax_has(dtype: str) -> bool:
    """Return ``True`` if JAX can hold this element type with its present settings.

    64-bit types need ``jax_enable_x64``.
    """
    try:
        # JAX narrows 64-bit types without an error, so the result of a trial must be compared.
        return bool(jax.device_put(np.zeros((), dtype_named(dtype).numpy)).dtype.name == dtype)
    except jax.errors.JaxRuntimeError:
        return False  # a type of ml_dtypes that XLA lacks


# --- containers -----------------------------------------------------------------------------------


def expand(value: object) -> Level | None:
    """Return one level of a container registered with JAX; ``None`` for a leaf."""
    # One level only: the core walks the tree itself.
    pairs, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    # JAX makes its containers only with a target, so the name is for people.
    node: Node = {"t": "fields", "c": name_of(type(value))}
    return Level(node, [(_key(path[0]), child) for path, child in pairs])


def map_leaves(change: Callable[[str, Any], Any], tree: Any, keys: tuple[str, ...] = ()) -> Any:
    """Return the same containers with each leaf replaced by ``change(leaf path, leaf)``.

    ``None`` is a leaf too. Paths are those of ``tree.flatten``, and below ``keys``.
    """
    # JAX takes some of these containers, such as a deque, for leaves.
    level = containers.level_of(tree)
    if level is not None:
        values = [
            (key, map_leaves(change, item, (*keys, escape_key(key)))) for key, item in level.pairs
        ]
        return containers.of_children(
            level.node, values, level.attributes, containers.as_plain, "/".join(keys)
        )
    pairs, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    if tree is None or (len(pairs) == 1 and not pairs[0][0]):
        return change("/".join(keys), tree)
    children = [
        map_leaves(change, item, (*keys, escape_key(_key(path[0])))) for path, item in pairs
    ]
    return jax.tree_util.tree_unflatten(structure, children)


def _key(entry: Any) -> object:
    """Return the key in an entry of JAX's key paths, which has one of four types."""
    # Dicts and flattened nodes have a key, sequences an index, and dataclasses a name.
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)
