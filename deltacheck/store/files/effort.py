"""How hard the entropy stage works on what a save writes."""

from __future__ import annotations

from enum import StrEnum


class Effort(StrEnum):
    """``NORMAL``: the fastest zstd, where it saves 2 %. ``LOW``: only where it saves a fifth.
    ``HIGH``: several times the work for some per cent.
    """

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    @property
    def level(self) -> int:
        """Of zstd."""
        return 7 if self is Effort.HIGH else 1

    @property
    def store_above_bits(self) -> float:
        """Order-0 entropy a byte above which a stream is stored as it is."""
        return {Effort.LOW: 6.4, Effort.NORMAL: 7.85, Effort.HIGH: 7.95}[self]
