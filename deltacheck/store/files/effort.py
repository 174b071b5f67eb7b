"""The work that the entropy stage spends on the streams of a save."""

from __future__ import annotations

from enum import StrEnum


class Effort(StrEnum):
    """The trade between the time and the size of zstd.

    ``NORMAL``: the fastest zstd, if it saves 2 %. ``LOW``: only if it saves a fifth. ``HIGH``:
    several times the work for a few per cent.
    """

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    @property
    def level(self) -> int:
        """The level of zstd."""
        # Only the native module uses it: TensorStore takes the level of the metadata, which is 1.
        return 7 if self is Effort.HIGH else 1

    @property
    def store_above_bits(self) -> float:
        """Order-0 entropy in bits per byte above which a stream is stored uncompressed."""
        # Of 8 bits. The gains that the efforts ask for are a fifth, about 2 % and about 0.6 %.
        return {Effort.LOW: 6.4, Effort.NORMAL: 7.85, Effort.HIGH: 7.95}[self]
