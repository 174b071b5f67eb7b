"""Preparation of msgspec types for use by several threads."""

from __future__ import annotations

from typing import Any

import msgspec


def inspect_types(*kinds: Any) -> None:
    """Let msgspec inspect these types now instead of at their first decoding.

    Call this next to the definition of a type. msgspec stores the result of the inspection on the
    class before it is complete. If two threads decode a type for the first time at once, one may
    read the incomplete result, and the process dies (observed with msgspec 0.22).
    """
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)
