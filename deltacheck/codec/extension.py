"""The native extension: there and of the version that this package was written for, or not at
all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

# What this package expects of the extension; raised on both sides (xla_ffi/module.cc) whenever a
# door of the extension changes.
INTERFACE = 5


def required() -> Any:
    """``deltacheck._native``. Raises ``ImportError`` where it is missing or of another
    interface.
    """
    from deltacheck import _native

    if _native.INTERFACE != INTERFACE:
        raise ImportError(
            f"deltacheck._native has interface {_native.INTERFACE}, this package needs {INTERFACE}:"
            " build it again"
        )
    return _native


@cache
def extension() -> Any | None:
    """The same; ``None`` where NumPy has to do, which gives the same bytes, many times slower."""
    try:
        return required()
    except ImportError:
        return None
