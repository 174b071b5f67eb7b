"""Training steps and metrics as callers give them: numbers of Python or of another library."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from deltacheck.store import layout


def step_number(step: object) -> int:
    """Return a training step as an ``int``.

    Args:
        step: An integer of at least 0, of Python or of another library (``numpy.int64``).

    Raises:
        ValueError: It is none.
    """
    try:
        # bool is a subclass of int, and ``True`` would become step 1.
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step must be an integer of at least 0, not {step!r}")
    return number


def metric_numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics of a step as Python numbers, which a manifest holds.

    Args:
        metrics: Numbers and arrays of one element, by name.

    Raises:
        ValueError: One is neither.
    """
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            item = getattr(value, "item", None)
            numbers[name] = float(value if item is None else item())
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"metric {name!r} must be a number, not {value!r}: give its mean or another number,"
                " and keep lists and arrays in the state"
            ) from error
    return numbers


def step_or_tag(step: object) -> int | str | None:
    """Return what names a step: its number, a tag, or ``None`` for the newest one (``"latest"``).

    Raises:
        ValueError: It is none of them.
    """
    if step is None or step == layout.LATEST:
        return None
    return step if isinstance(step, str) else step_number(step)
