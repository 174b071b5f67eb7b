"""Parts that the decoders of documents share."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

_Type = TypeVar("_Type")


def inspect_types(*kinds: Any) -> None:
    """Let msgspec inspect these types now instead of at their first decoding.

    Call this next to the definition of a type. msgspec stores the result of the inspection on the
    class before it is complete. If two threads decode a type for the first time at once, one may
    read the incomplete result, and the process dies (observed with msgspec 0.22).
    """
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)


def json_as(kind: type[_Type], text: bytes) -> _Type:
    """Return a JSON document of a type; ``ValueError`` for any other content."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object; refuse equal keys, of which readers keep either."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return fields
