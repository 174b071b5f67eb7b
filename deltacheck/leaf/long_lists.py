"""Long lists of plain values, such as the log of a training, as one text.

A node for each of their values would take microseconds on the training thread, at every save.
"""

from __future__ import annotations

import json
import math
from itertools import chain
from typing import Any

import msgspec

from deltacheck.leaf.structs import unique_keys

# Items of a list that is kept as one text. Larger: fewer lists are; smaller: the values of a list
# have no nodes of their own, so errors and comparisons name the list.
LEAST_ITEMS = 256
MAX_DEPTH = 64
_MOST_INTEGER = 2**53 - 1  # of JSON readers that have floats only
_KINDS = {type(None), bool, int, float, str, list, dict}


def text_of(value: object) -> str | None:
    """Return a long list as JSON; ``None`` for anything else.

    Such a list has at least ``LEAST_ITEMS`` items. It and what it contains are lists, dictionaries
    with text keys, text, finite floats, integers of 53 bits, booleans and ``None``, and no
    subclasses of them. So the JSON has all of it.
    """
    if type(value) is not list or len(value) < LEAST_ITEMS or not _is_plain(value):
        return None
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # text with lone surrogates
        return None


def value_of(text: object) -> list[Any]:
    """Return the list of a text.

    Raises:
        ValueError: ``text_of`` cannot have returned it.
    """
    if type(text) is not str:
        raise ValueError("a long list is not text")
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("a long list is nested too deeply") from None
    if type(value) is not list or len(value) < LEAST_ITEMS or not _is_plain(value):
        raise ValueError("a long list has other values than plain ones")
    return value


def _is_plain(value: list[Any]) -> bool:
    """Return whether a list is plain, depth by depth, in loops of C."""
    containers: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        dictionaries = [container for container in containers if type(container) is dict]
        if not set(map(type, chain.from_iterable(dictionaries))) <= {str}:
            return False
        children = list(chain.from_iterable(map(dict.values, dictionaries)))
        children += chain.from_iterable(c for c in containers if type(c) is list)
        if not set(map(type, children)) <= _KINDS:
            return False
        integers = [child for child in children if type(child) is int]
        if integers and max(max(integers), -min(integers)) > _MOST_INTEGER:
            return False
        if not all(map(math.isfinite, (child for child in children if type(child) is float))):
            return False
        containers = [child for child in children if type(child) in (list, dict)]
        if not containers:
            return True
    return False
