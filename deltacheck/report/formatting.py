"""Format quantities and names for people. Commands, pages and drawings share these functions."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def escape_unprintable(text: str) -> str:
    """Escape control characters, so that a leaf name cannot send commands to a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def format_bytes(count: float, digits: int | None = None) -> str:
    """Format a number of bytes with a binary unit.

    Args:
        count: Number of bytes.
        digits: Significant digits. ``None``: one digit after the decimal point.

    Returns:
        Text such as ``"1.5 MiB"``. Numbers below 1024 have no decimals.
    """
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{value:.0f} B"
    if digits is None:
        return f"{value:.1f} {_UNITS[unit]}"
    # From 1000 on, ``g`` with three digits would print an exponent.
    text = f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:.0f}"
    return f"{text} {_UNITS[unit]}"
