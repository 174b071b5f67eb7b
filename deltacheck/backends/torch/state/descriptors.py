"""Convert states with Megatron-Core's shard descriptors.

Descriptors are recognized by their fields, so that Megatron-Core is not needed. The layers of a
process's state have other names on other ranks (a pipeline stage counts its own from 0). Therefore
such a leaf is stored under its ``key``, which is the same on every rank and under every topology. A
state with descriptors is saved as ``{"sharded": {key: leaf}, "common": the rest}``.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from deltacheck.backends.torch.state.shards import Shard, Shards
from deltacheck.errors import UnsupportedLeaf

_TENSOR = ("key", "data", "global_shape", "global_offset", "replica_id", "prepend_axis_num")
_OBJECT = ("key", "data", "unique_key", "replica_id")
# An object of its own, because ``None`` is a value that a state may hold.
_NOTHING: Any = object()
_Put: TypeAlias = Callable[[object], object]


def _is_a(value: object, fields: tuple[str, ...]) -> bool:
    # A class itself may have the fields as attributes. Most values are tensors.
    return not isinstance(value, torch.Tensor | type) and all(
        hasattr(value, name) for name in fields
    )


def is_descriptor(value: object) -> bool:
    """Return ``True`` for a ``ShardedTensor`` or ``ShardedObject`` of Megatron-Core.

    Raises:
        UnsupportedLeaf: The value is a factory of shards.
    """
    if hasattr(value, "build_fn") and hasattr(value, "merge_fn"):
        raise UnsupportedLeaf(
            f"{getattr(value, 'key', '')!r} is a factory of shards; call apply_factories(state)"
            " before"
        )
    return _is_a(value, _TENSOR) or _is_a(value, _OBJECT)


def by_key(state: object, *, replicas: bool = False) -> object:
    """Return a state with its descriptors' leaves under their keys.

    A state without descriptors is returned as it is. If several ranks describe the same part of a
    tensor, one of them writes it, whatever their ``replica_id`` is.

    Args:
        state: The state.
        replicas: Include replicas of objects, as a restore needs them. A save does not, because
            their content may differ.

    Raises:
        UnsupportedLeaf: A descriptor is not complete, or two have one key. The message names the
            key.
    """
    parts: dict[str, list[Shard]] = {}
    objects: dict[str, object] = {}
    descriptors = []

    def take(value: Any) -> None:
        descriptors.append(value)
        if _is_a(value, _TENSOR):
            parts.setdefault(value.key, []).append(_shard(value))
        elif replicas or _is_main(value.replica_id):
            objects[value.unique_key] = (
                value.data.getvalue() if isinstance(value.data, io.BytesIO) else value.data
            )

    common = _without(state, take)
    # The same object, by which ``filled`` sees that there is nothing to fill.
    if not descriptors:
        return state
    # Tensors and objects share the keys of one dict.
    shared_keys = parts.keys() & objects.keys()
    if shared_keys:
        raise UnsupportedLeaf(f"{min(shared_keys)!r} is the key of a tensor and of an object")
    sharded: dict[str, object] = {key: _shards(key, key_parts) for key, key_parts in parts.items()}
    return {"sharded": sharded | objects, "common": {} if common is _NOTHING else common}


def filled(state: object, restored: object) -> object:
    """Return the state that ``by_key`` was given, with the restored content.

    Descriptors stay in the state; their tensors were filled in place.

    Args:
        state: The state with descriptors.
        restored: The restored result of ``by_key(state)``.
    """
    if by_key(state, replicas=True) is state or not isinstance(restored, dict):
        return restored
    objects = restored["sharded"]

    def put(value: Any) -> object:
        # Tensors were filled in place by the restore.
        if not _is_a(value, _TENSOR):
            content = objects[value.unique_key]
            value.data = io.BytesIO(content) if isinstance(value.data, io.BytesIO) else content
        return value

    return _merged(state, restored["common"], put)


def _is_main(replica_id: object) -> bool:
    # Megatron-Core numbers replicas by an integer, or by one integer for each kind of parallelism.
    return not any(replica_id) if isinstance(replica_id, tuple | list) else not replica_id


def _shards(key: str, parts: list[Shard]) -> Shards:
    try:
        return Shards(tuple(parts))
    except ValueError as error:
        raise UnsupportedLeaf(f"{key!r}: {error}") from None


def _shard(value: Any) -> Shard:
    if getattr(value, "flattened_range", None) is not None:
        raise UnsupportedLeaf(
            f"{value.key!r} is a range of a flattened tensor, which has no box; describe the whole"
            " parameter"
        )
    if not isinstance(value.data, torch.Tensor):
        raise UnsupportedLeaf(f"{value.key!r} has no tensor as its data; call init_data first")
    try:
        return Shard(
            # Prepended axes exist only in the global shape; each rank has one position of them.
            value.data[(None,) * value.prepend_axis_num],
            tuple(value.global_shape),
            tuple(value.global_offset),
        )
    except ValueError as error:
        raise UnsupportedLeaf(f"{value.key!r}: {error}") from None


def _without(value: object, take: Callable[[object], None]) -> object:
    """Return a state without its descriptors, which are passed to ``take``.

    Return ``_NOTHING`` if nothing else was in it.
    """
    if is_descriptor(value):
        take(value)
        return _NOTHING
    if not isinstance(value, dict | list):
        return value
    old = list(value.values() if isinstance(value, dict) else value)
    new = [_without(item, take) for item in old]
    if all(after is before for after, before in zip(new, old, strict=True)):
        return value
    if all(item is _NOTHING for item in new):
        return _NOTHING
    if isinstance(value, list):
        # Placeholders, so that the other elements keep their positions for ``_merged``.
        return [None if item is _NOTHING else item for item in new]
    rest = {key: item for key, item in zip(value, new, strict=True) if item is not _NOTHING}
    if not isinstance(value, OrderedDict):
        return rest
    ordered = OrderedDict(rest)
    # Attributes, such as the ``_metadata`` of a module's state dict.
    vars(ordered).update(vars(value))
    return ordered


def _merged(state: Any, common: Any, put: _Put) -> object:
    """Return the state with the values of ``common`` and the results of ``put``."""
    if is_descriptor(state):
        return put(state)
    if isinstance(state, dict):
        rest = common if isinstance(common, dict) else {}
        merged = {key: _merged(item, rest.get(key), put) for key, item in state.items()}
        # Without descriptors in it, it is restored as it was saved, with its type.
        is_common = merged.keys() == rest.keys() and all(
            item is rest[key] for key, item in merged.items()
        )
        return common if is_common and isinstance(common, dict) else merged
    if isinstance(state, list):
        # The list is missing in ``common`` if all of its elements were descriptors.
        common_items = (
            common
            if isinstance(common, list) and len(common) == len(state)
            else [None] * len(state)
        )
        return [
            _merged(item, common_item, put)
            for item, common_item in zip(state, common_items, strict=True)
        ]
    return common
