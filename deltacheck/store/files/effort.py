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
        return 7 if self is Effort.HIGH else 1

    @property
    def store_above_bits(self) -> float:
        """Order-0 entropy in bits per byte above which a stream is stored uncompressed."""
        return {Effort.LOW: 6.4, Effort.NORMAL: 7.85, Effort.HIGH: 7.95}[self]
