"""msgspec's types, looked at before threads use them."""

from __future__ import annotations

from typing import Any

import msgspec


def known(*kinds: Any) -> None:
    """Let msgspec find out now what these types hold, as it does when one is decoded first. Call it
    where a type is defined.

    It keeps what it has found on the class, from before it is complete: of two threads that decode
    a type first, one may read what the other has not yet written, and the process dies (seen with
    msgspec 0.22).
    """
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)
