"""The interface of a codec: it turns (current, base) into rows and streams.

``docs/reference/format.md``, section 4, defines the bytes. Every implementation (native extension,
XLA FFI, CUDA) gives those of the executable form, ``tests/reference/codec.py``, and must pass the
contract, ``tests/contracts/codec.py``.
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
UNCHANGED, SPARSE, BITMAP, DIFF, PLANES, RAW, ORDERED_SPARSE, ORDERED_BITMAP = range(8)
GRADIENT_LAW, MEAN_LAW, STEPS_LAW = range(8, 11)
METHOD_NAMES = (
    "unchanged",
    "sparse",
    "bitmap",
    "diff",
    "planes",
    "raw",
    "ordered sparse",
    "ordered bitmap",
    "gradient law",
    "mean law",
    "steps law",
)
# The same streams, of words in another order (section 4.1).
ORDERED = {SPARSE: ORDERED_SPARSE, BITMAP: ORDERED_BITMAP}
# Against a prediction (section 4.6), in chunks of so many equal parts.
LAWS = (GRADIENT_LAW, MEAN_LAW, STEPS_LAW)
LAW_PARTS, LAW_BYTES = 3, 64
TILE_ENTRY_BYTES = 6  # of a tile in the stream tiles
# How often the bytes of a chunk that is ordered or has a law count in the workspace of a device.
MORE_PIECES = 3

# Permanent names, in the order in which streams are listed everywhere.
# The native module gives and takes streams by their position here.
STREAMS = (
    "tiles",
    "gaps",
    "bitmap",
    "values",
    "wide",
    *(f"diff{k}" for k in range(8)),
    *(f"plane{k}" for k in range(8)),
    "raw",
    "law",
)

# Columns of a row.
ROW_CHUNK, ROW_METHOD, ROW_CHANGED, ROW_GAP_BYTES, ROW_WIDE_COUNT = range(5)
ROW_WIDTH = 5
# Numbers at the head of the results of a call on a device: of rows, 1 if the payload was too small,
# then the bytes of each stream.
HEAD_ENTRIES = 2 + len(STREAMS)


class Encoded(NamedTuple):
    """The stored chunks of one run of words.

    Attributes:
        rows: uint32 ``(stored, 5)``: one row per changed chunk, chunk numbers ascending and counted
            from the first chunk of the run.
        streams: Name -> uint8 ``(bytes,)``, the chunks' streams concatenated in row order. Empty
            streams are left out.
    """

    rows: U32
    streams: Mapping[str, U8]


Base = TypeVar("Base")


class Codec(Protocol[Base]):
    """An encoder of leaves.

    ``Base`` is the codec's own holder of a shadow: a NumPy array for host codecs, a device array
    for device codecs.

    Attributes:
        run_bytes: Most bytes of one call, which bounds its output. Larger: fewer calls; smaller:
            less memory. ``None``: whole leaves only.
    """

    run_bytes: int | None

    def copy(self, current: Base, out: Base | None) -> Base:
        """Return a base that holds ``current``, in ``out`` if that is given and fits."""
        ...

    def host(self, base: Base) -> U8:
        """Return the base's bytes, uint8 1-D in host memory, without a copy if possible."""
        ...

    def encode(
        self,
        current: Base,
        base: Base | None,
        bounds: U64,
        word_bytes: int,
        *,
        ordered: bool = False,
    ) -> tuple[Encoded, Base | None]:
        """Encode the chunks of ``current`` against ``base``.

        Args:
            current: uint8, 1-D; a host codec takes any contiguous memory.
            base: The same length. ``None``: every chunk is stored (planes or raw).
            bounds: uint64 ``(chunks + 1,)`` word offsets, ascending from 0 to the length in words;
                chunk ``c`` is words ``bounds[c]`` to ``bounds[c + 1]``.
            word_bytes: 1, 2, 4 or 8.
            ordered: How sparse and bitmap chunks of words of 2 bytes are stored. True: in the order
                of the classes of their base, which takes fewer bytes for floats, and more time;
                false: in their own order.

        Returns:
            The encoding and the new base, which equals ``current`` bit for bit; ``None`` without a
            base. A host codec updates ``base`` in place and returns it, a device codec may consume
            it.

        Raises:
            ValueError: Another word size, bounds that do not fit, or lengths that differ.
        """
        ...


class GroupJob(NamedTuple):
    """A leaf to encode together with others; fields as ``Codec.encode`` has them.

    Attributes:
        law: The method of a group, and the bytes of its law (``adam_law.Law.content``); ``None``:
            the leaf is no group.
    """

    current: Any
    base: Any
    bounds: U64
    word_bytes: int
    ordered: bool = False
    law: tuple[int, bytes] | None = None


class GroupSpan(NamedTuple):
    """Consecutive chunks of one job: ``chunks`` of them from ``first_chunk`` on."""

    job: int
    first_chunk: int
    chunks: int


class EncodedGroup(NamedTuple):
    """The result of one call for some of the jobs.

    Attributes:
        spans: The chunks that the call encoded; ``encoded`` numbers them in this order from 0 on.
        encoded: Rows and streams.
        bases: New bases by job, if they have changed.
        digests: uint64 ``(rows, 2)``, xxh3_128 (high, low) of the new content of each row's chunk;
            ``None`` if the codec computes none.
    """

    spans: Sequence[GroupSpan]
    encoded: Encoded
    bases: Mapping[int, Any]
    digests: U64 | None


@runtime_checkable
class GroupCodec(Protocol):
    """A codec on a device: leaves share calls, and bases stay on the device."""

    def grouped(self, current: Any, base: Any) -> bool:
        """Return whether ``encode_group`` encodes such a leaf, and not ``encode``."""
        ...

    def encode_group(
        self,
        jobs: Sequence[GroupJob],
        make_room: Callable[[int], None],
        all_read: Callable[[], None],
    ) -> Iterator[EncodedGroup]:
        """Encode leaves, a few calls for all of them.

        Args:
            jobs: The leaves.
            make_room: Called with a number of bytes before so many come to the host.
            all_read: Called once, when everything that reads ``current`` is done or enqueued on the
                device.

        Yields:
            The result of each call.

        Raises:
            ValueError: As ``Codec.encode``; the bases are then lost.
        """
        ...
