"""Compress bytes to single frames of zstd, for formats of other libraries.

The native module writes and reads such frames as files of an array (``store/files/arrays.py``),
each with a checksum of 4 bytes behind it.
"""

from __future__ import annotations

import tempfile

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.codec.extension import native
from deltacheck.errors import DamagedStream, UnsupportedLeaf

# The longest content that the native module puts into one frame.
MAX_FRAME_BYTES = 1 << 30
_CRC_BYTES = 4


def compress(data: U8, level: int = 1) -> bytes:
    """Return one frame with the content.

    Args:
        data: uint8, 1-D, contiguous, of 1 to ``MAX_FRAME_BYTES`` bytes.
        level: Level of zstd, 1 to 19.

    Raises:
        UnsupportedLeaf: The content is empty or too long for one frame.
    """
    if not 0 < data.size <= MAX_FRAME_BYTES:
        raise UnsupportedLeaf(
            f"a frame has 1 to {MAX_FRAME_BYTES:,} bytes, not {data.size:,}; cut the array"
        )
    with tempfile.TemporaryFile() as file:
        native.write_stream_file(file.fileno(), [data], data.size, 1, False, level, 0)
        file.seek(0)
        return file.read()[:-_CRC_BYTES]


def decompress(frame: U8, size: int) -> U8:
    """Return the content of a frame, which has ``size`` bytes.

    Args:
        frame: The frame; uint8, 1-D.
        size: The bytes of the content, from 1 to ``MAX_FRAME_BYTES``.

    Raises:
        DamagedStream: The frame is damaged, or its content has another size.
    """
    if not 0 < size <= MAX_FRAME_BYTES:
        raise DamagedStream(f"no frame has {size:,} bytes")
    contiguous = np.ascontiguousarray(frame)
    out = np.empty(size, np.uint8)
    with tempfile.TemporaryFile() as file:
        file.write(contiguous.data)
        file.write(native.crc32c(contiguous, False).to_bytes(_CRC_BYTES, "little"))
        file.flush()
        pieces = np.array([[0, 0, size, 0, 0]], np.uint64)
        source = (file.fileno(), size, 1, False, "stream")
        refusal = native.read_array_files([source], pieces, [out])
    if refusal is not None:
        raise DamagedStream(f"a frame of zstd is damaged: {refusal[1]}")
    return out
