"""Loops over thousands of Python objects in one call, for work on the training thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltacheck.codec.base import U64
from deltacheck.codec.extension import native


def read_numbers(
    objects: list[Any],
    first: Callable[[Any], Any],
    out: U64,
    second: Callable[[Any], int] | None = None,
) -> None:
    """Read an integer of each object.

    Args:
        objects: The objects.
        first: Called with each object.
        out: The integers, uint64, one per object, written in place.
        second: Called with the result of ``first`` and returns the integer. Default: ``first``
            returns it. Integers are at least 0 and less than 2^64.
    """
    native.read_numbers(objects, first, second, out)
