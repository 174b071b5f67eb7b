"""What a codec must do: turn (current, base) into rows and streams, and back.

The bytes are defined in ``docs/reference/format.md``, section 4. Every door (NumPy reference,
native extension, XLA FFI) gives the same bytes; ``deltacheck.testing.codec`` is the contract that
each must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

TILE_BYTES = 16384  # permanent: bytes of the chunk that one tile covers

# Permanent method numbers.
UNCHANGED, SPARSE, BITMAP, DIFF, PLANES, RAW = range(6)
METHOD_NAMES = ("unchanged", "sparse", "bitmap", "diff", "planes", "raw")

# Permanent names, in the order in which streams are listed everywhere.
STREAMS = (
    "tiles",
    "gaps",
    "bitmap",
    "values",
    "wide",
    *(f"diff{k}" for k in range(8)),
    *(f"plane{k}" for k in range(8)),
    "raw",
)

# Columns of a row.
CHUNK, METHOD, CHANGED, GAP_BYTES, WIDE_COUNT = range(5)
ROW_WIDTH = 5


class Encoded(NamedTuple):
    """The stored chunks of one run of words.

    ``rows``: uint32 ``(stored, 5)``, one row per chunk that is not unchanged, chunk numbers
    ascending and counted from the first chunk of the run. ``streams``: name -> uint8 ``(bytes,)``,
    the chunks' streams concatenated in row order; empty streams are left out.
    """

    rows: U32
    streams: Mapping[str, U8]


Base = TypeVar("Base")


class Codec(Protocol[Base]):
    """``Base`` is the codec's own holder of a shadow: a NumPy array for host codecs, a device array
    for device codecs.
    """

    name: str
    run_bytes: (
        int | None
    )  # most bytes that one call should encode (bounds its output); None: whole leaves only

    def copy(self, current: Base, out: Base | None) -> Base:
        """A base that holds ``current``; written into ``out`` where that is given and fits."""
        ...

    def host(self, base: Base) -> U8:
        """The base's bytes in host memory, uint8 1-D, without a copy where the memory allows it."""
        ...

    def encode(
        self, current: Base, base: Base | None, bounds: U64, word_bytes: int
    ) -> tuple[Encoded, Base | None]:
        """Encode the chunks of ``current`` against ``base``.

        ``current``, ``base``: uint8, 1-D, the same length; a host codec takes any contiguous
        memory. ``bounds``: uint64 ``(chunks + 1,)`` word offsets, ascending from 0 to the length in
        words; chunk ``c`` is words ``bounds[c]`` to ``bounds[c + 1]``. Returns the encoding and the
        new base, which equals ``current`` bit for bit: a host codec updates ``base`` in place and
        returns it, a device codec may consume it. With ``base=None`` every chunk is stored (planes
        or raw) and the new base is ``None``.

        Raises ``ValueError`` for a word size other than 1, 2, 4, 8, bounds that do not fit, or
        lengths that differ.
        """
        ...

    def apply(self, encoded: Encoded, base: U8, bounds: U64, word_bytes: int) -> None:
        """Turn ``base`` (uint8, 1-D, writable host memory) into what was encoded, in place.

        Checks everything that format.md 4.3 asks for, chunk by chunk, before it writes the chunk;
        raises ``deltacheck.errors.DamagedStream`` naming the chunk and the check that failed.
        ``base`` may then hold earlier chunks of this call already applied: callers decode into
        memory of their own and publish after the digest is verified.
        """
        ...


class GroupJob(NamedTuple):
    """A leaf to encode together with others; fields as ``Codec.encode`` has them."""

    current: Any
    base: Any
    bounds: U64
    word_bytes: int


class GroupSpan(NamedTuple):
    """Consecutive chunks of one job: ``chunks`` of them from ``first_chunk`` on."""

    job: int
    first_chunk: int
    chunks: int


class EncodedGroup(NamedTuple):
    """What one call made of some of the jobs.

    ``spans``: the chunks that it encoded; ``encoded`` numbers them in this order from 0 on.
    ``bases``: new bases, by job, where they are not what they were. ``digests``: uint64 ``(rows,
    2)``, xxh3_128 (high, low) of the new content of each row's chunk, where the codec made them.
    """

    spans: Sequence[GroupSpan]
    encoded: Encoded
    bases: Mapping[int, Any]
    digests: U64 | None


@runtime_checkable
class GroupCodec(Protocol):
    """A codec on a device: leaves share calls, and bases stay where they are."""

    def grouped(self, current: Any, base: Any) -> bool:
        """Whether such a leaf is encoded by ``encode_group``; else by ``encode``."""
        ...

    def encode_group(
        self,
        jobs: Sequence[GroupJob],
        make_room: Callable[[int], None],
        all_read: Callable[[], None],
    ) -> Iterator[EncodedGroup]:
        """Encode leaves, a few calls for all of them.

        ``make_room(bytes)`` is called before that many bytes come to the host. ``all_read()`` is
        called once, when everything that reads ``current`` is done or enqueued on the device.
        Raises what ``Codec.encode`` raises; the bases are then lost.
        """
        ...
