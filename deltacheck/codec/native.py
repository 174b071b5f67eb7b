"""The codec of the native extension: the reference's bytes at memory speed, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.base import STREAMS, U8, U32, U64, UNCHANGED, Encoded
from deltacheck.codec.extension import native as _native
from deltacheck.errors import DamagedStream


class Cut(NamedTuple):
    """The chunks of a leaf: ``bounds``, ``word_bytes`` and ``ordered`` of ``Codec.encode``."""

    bounds: U64
    word_bytes: int
    ordered: bool = False


def _encoded(rows: U32, streams: Sequence[U8 | None]) -> Encoded:
    named = zip(STREAMS, streams, strict=True)
    return Encoded(rows, {name: stream for name, stream in named if stream is not None})


class NativeCodec:
    """A codec whose bases are NumPy arrays.

    The threads of the native module share the work, the caller among them: by default one for each
    processor that this process may run on, at most 8. The bytes do not depend on their number.
    """

    # Larger: fewer calls. Smaller: less memory, since a call's output may be as large as its input.
    run_bytes: int | None = 64 << 20

    def copy(self, current: NDArray[Any], out: NDArray[Any] | None) -> U8:
        return memory.copied(current, out)

    def host(self, base: NDArray[Any]) -> U8:
        return memory.as_bytes("base", base)

    def encode(
        self,
        current: NDArray[Any],
        base: NDArray[Any] | None,
        bounds: U64,
        word_bytes: int,
        *,
        ordered: bool = False,
        law: tuple[int, bytes] | None = None,
    ) -> tuple[Encoded, NDArray[Any] | None]:
        now = memory.as_bytes("current", current)
        bounds = memory.checked_bounds(bounds, now.size, word_bytes)
        shadow = None if base is None else memory.checked_base(base, now.size)
        method, content = law or (UNCHANGED, None)
        rows, streams = _native.encode(
            now, shadow, bounds, word_bytes, method, ordered=ordered, law=content
        )
        # The module has updated ``base`` in place.
        return _encoded(rows, streams), base

    def encode_many(
        self, currents: Sequence[U8], bases: Sequence[U8], cuts: Sequence[Cut]
    ) -> Encoded:
        """Encode several leaves in one call, each against its base, which is updated in place.

        Args:
            currents: uint8, 1-D.
            bases: As many bytes.
            cuts: Their chunks and words.

        Returns:
            The rows and streams of all leaves, one after the other; chunks are numbered from the
            first one on.
        """
        for current, base, cut in zip(currents, bases, cuts, strict=True):
            memory.checked_bounds(cut.bounds, current.size, cut.word_bytes)
            memory.checked_base(base, current.size)
        bounds, word_bytes, ordered = zip(*cuts, strict=True)
        return _encoded(*_native.encode_many(currents, bases, bounds, word_bytes, ordered))

    def apply(self, encoded: Encoded, base: U8, bounds: U64, word_bytes: int) -> None:
        """Turn ``base`` into the encoded content, in place.

        All checks of format.md 4.3 are made chunk by chunk, before the chunk is written. After an
        error ``base`` may hold earlier chunks of this call.

        Args:
            encoded: Rows and streams.
            base: uint8, 1-D, writable.
            bounds: As for ``encode``.
            word_bytes: As for ``encode``.

        Raises:
            DamagedStream: A check failed; the message names the chunk and the check.
        """
        shadow = memory.checked_base(base, base.nbytes)
        bounds = memory.checked_bounds(bounds, shadow.size, word_bytes)
        # Streams are passed by position below, where an unknown one would be dropped silently.
        for name in encoded.streams:
            if name not in STREAMS:
                raise DamagedStream(f"there is no stream {name!r}")
        rows = np.ascontiguousarray(encoded.rows, np.uint32)
        streams = [
            memory.as_bytes(name, encoded.streams[name]) if name in encoded.streams else None
            for name in STREAMS
        ]
        refusal = _native.apply(rows, streams, shadow, bounds, word_bytes)
        if refusal is not None:
            raise DamagedStream(refusal)
