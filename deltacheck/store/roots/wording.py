"""The steps of a root in the words of an error."""

from __future__ import annotations


def describe_steps(steps: list[int]) -> str:
    """Return the steps of a root in words short enough for an error."""
    return f"Steps that it has: {listed(steps)}" if steps else "It has no committed step"


def listed(steps: list[int]) -> str:
    """Return steps in words short enough for a line."""
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ..., {', '.join(map(str, steps[-3:]))}"


def way_out(steps: list[int]) -> str:
    """Return the steps that remain, in words for the end of an error."""
    return f"Steps that still restore: {listed(steps)}" if steps else "No other step restores"
