"""Marks in a tree, for tensors that are stored elsewhere in it.

A mark is a dict with the place of the tensor. A program that reads such a tree without this module
sees these dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import containers

_KEY = "deltacheck.hole"  # permanent


def hole(place: list[Any]) -> dict[str, Any]:
    """Return the dict that stands for a tensor that is stored elsewhere, at ``place``."""
    return {_KEY: place}


def place_in(value: Any) -> list[Any] | None:
    """Return the place in the dict of a hole; ``None`` for any other value."""
    place = value.get(_KEY) if isinstance(value, dict) else None
    return place if isinstance(place, list) else None


def with_holes(value: Any, place_of: Callable[[torch.Tensor], list[Any] | None]) -> Any:
    """Return a state with holes in place of some of its tensors.

    Args:
        value: The state.
        place_of: Returns the place of a tensor that is stored elsewhere; ``None`` for any other.

    Raises:
        UnsupportedLeaf: The state has the key of holes.
    """
    if isinstance(value, torch.Tensor):
        place = place_of(value)
        return value if place is None else hole(place)
    # A restore would take such a dict for a hole.
    if isinstance(value, dict) and _KEY in value:
        raise UnsupportedLeaf(f"a dict has the key {_KEY!r}, which stands for tensors; rename it")
    return _with_children(value, lambda item: with_holes(item, place_of))


def filled(value: Any, tensor_at: Callable[[list[Any]], torch.Tensor]) -> Any:
    """Return the state that ``with_holes`` was given.

    Args:
        value: A result of ``with_holes``.
        tensor_at: Returns the tensor for the place of a hole.
    """
    place = place_in(value)
    if place is not None:
        return tensor_at(place)
    return _with_children(value, lambda item: filled(item, tensor_at))


def _with_children(value: Any, child: Callable[[Any], Any]) -> Any:
    """Return a container with other children; any other value as it is."""
    try:
        level = containers.level_of(value)
    except UnsupportedLeaf:
        return value  # the save refuses it, and names its path
    if level is None:
        return value
    pairs = [(key, child(item)) for key, item in level.pairs]
    return containers.of_children(level.node, pairs, level.attributes, containers.as_plain, "")
