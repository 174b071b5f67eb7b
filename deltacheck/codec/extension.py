"""The import of the native extension, if it has the version that this package needs."""

from __future__ import annotations

from functools import cache
from typing import Any

# The interface of the extension; raised on both sides (xla_ffi/module.cc) if a signature changes.
INTERFACE = 10


def required() -> Any:
    """Return ``deltacheck._native``; ``ImportError`` if it is missing or of another interface."""
    from deltacheck import _native

    if _native.INTERFACE != INTERFACE:
        raise ImportError(
            f"deltacheck._native has interface {_native.INTERFACE}, this package needs {INTERFACE}:"
            " build it again"
        )
    return _native


@cache
def extension() -> Any | None:
    """Return ``deltacheck._native``; ``None`` if NumPy must be used, with the same bytes."""
    try:
        return required()
    except ImportError:
        return None
