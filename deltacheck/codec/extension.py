"""The native extension, after a check that it has the interface that this package needs."""

from __future__ import annotations

try:
    from deltacheck import _native as native
except ImportError as error:
    raise ImportError(
        f"the native module of deltacheck cannot be loaded ({error}): install a wheel, or build it"
        " with `pip install .` in the source tree"
    ) from error

__all__ = ["INTERFACE", "native"]

# Raised on both sides (xla_ffi/module.cc) if a signature changes.
INTERFACE = 16

if native.INTERFACE != INTERFACE:
    raise ImportError(
        f"deltacheck._native has interface {native.INTERFACE}, this package needs {INTERFACE}:"
        " build it again"
    )
