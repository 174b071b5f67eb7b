"""Convert between the names of DCP and those of a step.

DCP has fully qualified names, key paths and checkpoint ids. A step has leaf paths, a skeleton and a
number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.tree import Node, escape_key

Keys: TypeAlias = tuple[str | int, ...]  # text of dicts, integers of lists

OBJECT = "torch.save"  # permanent: the tag of a leaf whose bytes torch.save has written

_LAST_NUMBER = re.compile(r"[0-9]{1,18}\Z")  # steps are at most 18 digits long


def step_of(checkpoint_id: object) -> int:
    """Return the training step that a ``checkpoint_id`` names.

    Args:
        checkpoint_id: An integer, or a name or path that ends in one (``"run/step-1200"``,
            ``iter_0001200``).

    Raises:
        ValueError: The id is anything else.
    """
    if (
        isinstance(checkpoint_id, int)
        # bool is a subclass of int, and ``True`` would be step 1.
        and not isinstance(checkpoint_id, bool)
        and checkpoint_id >= 0
    ):
        return checkpoint_id
    if isinstance(checkpoint_id, str | os.PathLike):
        number = _LAST_NUMBER.search(os.fspath(checkpoint_id).rstrip("/"))
        if number is not None:
            return int(number[0])
    raise ValueError(
        f"checkpoint_id={checkpoint_id!r} names no step: give the step as an integer of at least 0,"
        " or a name or path that ends in it, such as 'step-1200'"
    )


def keys_of(fqn: str, planner_data: object) -> Keys:
    """Return the key path of a value in the state that DCP has flattened.

    Args:
        fqn: The fully qualified name.
        planner_data: The planner data of a plan. If it has no path for the name, the name is the
            only key.
    """
    keys = planner_data.get(fqn) if isinstance(planner_data, Mapping) else None
    # A planner may put anything there, and only such keys can be keys of a skeleton.
    fits = (
        isinstance(keys, tuple)
        and keys
        and all(type(key) in (str, int) for key in keys)
        and isinstance(keys[0], str)
    )
    return keys if isinstance(keys, tuple) and fits else (fqn,)


def path_of(keys: Keys) -> str:
    """Return the leaf path of a key path."""
    return "/".join(map(escape_key, keys))


def skeleton_of(leaves: Iterable[tuple[Keys, str | None]]) -> Node:
    """Return the skeleton of a state with arrays at some key paths.

    Args:
        leaves: Key path and tag of each array.

    Raises:
        UnsupportedLeaf: One key path is inside of another.
    """
    nested: dict[str | int, object] = {}
    for keys, tag in leaves:
        inner = nested
        for key in keys[:-1]:
            child = inner.setdefault(key, {})
            if not isinstance(child, dict):
                raise UnsupportedLeaf(
                    f"{'.'.join(map(str, keys))!r} stands inside of another value; rename one of"
                    " them"
                )
            inner = child
        if keys[-1] in inner:
            raise UnsupportedLeaf(
                f"two values are called {'.'.join(map(str, keys))!r}, or one stands inside of it;"
                " rename one of them"
            )
        # A tuple marks a leaf, because inner nodes are dicts.
        inner[keys[-1]] = {"t": "array"} if tag is None else {"t": "array", "tag": tag}, None
    return _node(nested)


def _node(value: object) -> Node:
    if isinstance(value, tuple):
        node: Node = value[0]
        return node
    assert isinstance(value, dict)
    # DCP flattens a list into integer keys. They may arrive in any order.
    if value and set(value) == set(range(len(value))):
        return {"t": "list", "n": [_node(value[number]) for number in range(len(value))]}
    return {"t": "dict", "k": [[key, _node(item)] for key, item in value.items()]}


def is_step(checkpoint_id: object) -> bool:
    """Return ``True`` if a checkpoint id names a step."""
    try:
        return step_of(checkpoint_id) >= 0
    except ValueError:
        return False
