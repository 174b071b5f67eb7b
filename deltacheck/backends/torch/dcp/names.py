"""DCP's names for what it saves, and ours: fully qualified names and key paths, leaf paths and
skeletons, steps. Pure functions.
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

_LAST_NUMBER = re.compile(r"[0-9]{1,18}\Z")  # a longer number is no step


def step_of(checkpoint_id: object) -> int:
    """The training step that a ``checkpoint_id`` means: an integer, or a name or path that ends in
    one
    (``"run/step-1200"``, ``iter_0001200``).

    Raises ``ValueError`` for anything else.
    """
    if (
        isinstance(checkpoint_id, int)
        and not isinstance(checkpoint_id, bool)
        and checkpoint_id >= 0
    ):
        return checkpoint_id
    if isinstance(checkpoint_id, str | os.PathLike):
        found = _LAST_NUMBER.search(os.fspath(checkpoint_id).rstrip("/"))
        if found is not None:
            return int(found[0])
    raise ValueError(
        f"checkpoint_id={checkpoint_id!r} names no step: give the step as an integer of at least 0,"
        " or a name or path that ends in it, such as 'step-1200'"
    )


def keys_of(fqn: str, planner_data: object) -> Keys:
    """Where a value stands in the state that DCP has flattened. ``planner_data``: of a plan;
    without a way in it, the name is the one key.
    """
    keys = planner_data.get(fqn) if isinstance(planner_data, Mapping) else None
    fits = (
        isinstance(keys, tuple)
        and keys
        and all(type(key) in (str, int) for key in keys)
        and isinstance(keys[0], str)
    )
    return keys if isinstance(keys, tuple) and fits else (fqn,)


def path_of(keys: Keys) -> str:
    """The leaf path of a place."""
    return "/".join(map(escape_key, keys))


def skeleton_of(leaves: Iterable[tuple[Keys, str | None]]) -> Node:
    """The skeleton of a state with arrays at some places. Each with its tag.

    Raises ``UnsupportedLeaf`` where one place is inside of another.
    """
    nested: dict[str | int, object] = {}
    for keys, tag in leaves:
        inner = nested
        for key in keys[:-1]:
            below = inner.setdefault(key, {})
            if not isinstance(below, dict):
                raise UnsupportedLeaf(
                    f"{'.'.join(map(str, keys))!r} stands inside of another value; rename one of"
                    " them"
                )
            inner = below
        if keys[-1] in inner:
            raise UnsupportedLeaf(
                f"two values are called {'.'.join(map(str, keys))!r}, or one stands inside of it;"
                " rename one of them"
            )
        inner[keys[-1]] = {"t": "array"} if tag is None else {"t": "array", "tag": tag}, None
    return _node(nested)


def _node(value: object) -> Node:
    if isinstance(value, tuple):
        node: Node = value[0]
        return node
    assert isinstance(value, dict)
    if value and set(value) == set(range(len(value))):
        return {"t": "list", "n": [_node(value[number]) for number in range(len(value))]}
    return {"t": "dict", "k": [[key, _node(item)] for key, item in value.items()]}


def is_step(checkpoint_id: object) -> bool:
    """Whether a checkpoint id names a step."""
    try:
        return step_of(checkpoint_id) >= 0
    except ValueError:
        return False
