"""Training steps as callers give them: integers of Python or of another library."""

from __future__ import annotations

import operator

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


def step_or_tag(step: object) -> int | str | None:
    """Return what names a step: its number, a tag, or ``None`` for the newest one (``"latest"``).

    Raises:
        ValueError: It is none of them.
    """
    if step is None or step == layout.LATEST:
        return None
    return step if isinstance(step, str) else step_number(step)
