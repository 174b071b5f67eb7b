"""Shards as Megatron-Core describes them: values with a key of their own, known by their fields and
not by a class.

Each process's state has other names for its layers (a pipeline stage counts its own from 0), so
such a leaf goes by its ``key``, which is the same on every rank and under every topology. A state
with descriptors is saved as ``{"sharded": {key: leaf}, "common": the rest}``.
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
_NOTHING: Any = object()
_Put: TypeAlias = Callable[[object], object]


def _is_a(value: object, fields: tuple[str, ...]) -> bool:
    return not isinstance(value, torch.Tensor | type) and all(
        hasattr(value, name) for name in fields
    )


def is_descriptor(value: object) -> bool:
    """Whether this is a ``ShardedTensor`` or a ``ShardedObject`` of Megatron-Core, or looks like
    one.

    Raises ``UnsupportedLeaf`` for a factory of such.
    """
    if hasattr(value, "build_fn") and hasattr(value, "merge_fn"):
        raise UnsupportedLeaf(
            f"{getattr(value, 'key', '')!r} is a factory of shards; call apply_factories(state)"
            " before"
        )
    return _is_a(value, _TENSOR) or _is_a(value, _OBJECT)


def by_key(state: object, *, replicas: bool = False) -> object:
    """A state with its descriptors' leaves under their keys; a state without any is itself.

    A part of a tensor that several ranks describe is written by one of them, whatever their
    ``replica_id`` says. Of objects ``replicas`` are taken only where asked for, as for a restore:
    their content may differ. Raises ``UnsupportedLeaf`` naming the key.
    """
    parts: dict[str, list[Shard]] = {}
    objects: dict[str, object] = {}
    found = []

    def take(value: Any) -> None:
        found.append(value)
        if _is_a(value, _TENSOR):
            parts.setdefault(value.key, []).append(_shard(value))
        elif replicas or _is_main(value.replica_id):
            objects[value.unique_key] = (
                value.data.getvalue() if isinstance(value.data, io.BytesIO) else value.data
            )

    common = _without(state, take)
    if not found:
        return state
    both = parts.keys() & objects.keys()
    if both:
        raise UnsupportedLeaf(f"{min(both)!r} is the key of a tensor and of an object")
    sharded: dict[str, object] = {key: _shards(key, of) for key, of in parts.items()}
    return {"sharded": sharded | objects, "common": {} if common is _NOTHING else common}


def filled(state: object, restored: object) -> object:
    """The state that ``by_key`` was given, with what was restored of it: descriptors as they are,
    whose tensors are filled; ``restored`` is what ``by_key`` had made.
    """
    if by_key(state, replicas=True) is state or not isinstance(restored, dict):
        return restored
    objects = restored["sharded"]

    def put(value: Any) -> object:
        if not _is_a(value, _TENSOR):
            found = objects[value.unique_key]
            value.data = io.BytesIO(found) if isinstance(value.data, io.BytesIO) else found
        return value

    return _together(state, restored["common"], put)


def _is_main(replica_id: object) -> bool:
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
            value.data[(None,) * value.prepend_axis_num],
            tuple(value.global_shape),
            tuple(value.global_offset),
        )
    except ValueError as error:
        raise UnsupportedLeaf(f"{value.key!r}: {error}") from None


def _without(value: object, take: Callable[[object], None]) -> object:
    """A state without its descriptors, which ``take`` gets; ``_NOTHING`` where nothing else was in
    it.
    """
    if is_descriptor(value):
        take(value)
        return _NOTHING
    if isinstance(value, dict):
        kept = {key: _without(item, take) for key, item in value.items()}
        left = {key: item for key, item in kept.items() if item is not _NOTHING}
        if all(kept[key] is item for key, item in value.items()):
            return value
        return (OrderedDict(left) if isinstance(value, OrderedDict) else left) if left else _NOTHING
    if isinstance(value, list):
        items = [_without(item, take) for item in value]
        if all(one is item for one, item in zip(items, value, strict=True)):
            return value
        if all(item is _NOTHING for item in items):
            return _NOTHING
        return [None if item is _NOTHING else item for item in items]
    return value


def _together(state: Any, common: Any, put: _Put) -> object:
    if is_descriptor(state):
        return put(state)
    if isinstance(state, dict):
        rest = common if isinstance(common, dict) else {}
        return {key: _together(item, rest.get(key), put) for key, item in state.items()}
    if isinstance(state, list):
        others = (
            common
            if isinstance(common, list) and len(common) == len(state)
            else [None] * len(state)
        )
        return [_together(item, other, put) for item, other in zip(state, others, strict=True)]
    return common
