"""Ranks that are threads of one process, for tests and simulations."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from deltacheck.errors import RankFailed
from deltacheck.save.ranks.channel import Channel, Ranks


class Threads:
    """Channels between threads of one process that stand for ranks.

    Args:
        size: The number of ranks.
        timeout_seconds: The longest wait for a rank that is absent; a call then raises
            ``RankFailed``. Longer: slow machines pass; shorter: a lost rank is noticed sooner.
    """

    def __init__(self, size: int, timeout_seconds: float = 240.0) -> None:
        self._size = size
        self._timeout_seconds = timeout_seconds

    def ranks(self) -> list[Ranks]:
        """Return one ``Ranks`` for each thread, in order.

        Returns:
            The channels of each rank. Every call makes new ones, which share nothing with others.
        """
        # Separate channels: a save begins on one thread and ends on another.
        begins, ends = self._channels(), self._channels()
        return [Ranks(begin, end) for begin, end in zip(begins, ends, strict=True)]

    def _channels(self) -> list[Channel]:
        shared = _Shared(self._size, self._timeout_seconds)
        return [_ThreadChannel(rank, shared) for rank in range(self._size)]


class _Shared:
    """The messages of one channel, and the barrier at which its ranks meet."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.size = size
        self.up: list[bytes] = [b""] * size
        self.down: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=timeout_seconds)

    def meet(self) -> None:
        """Wait until every rank has called this."""
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            # A barrier that was broken stays broken, so all later exchanges fail, too.
            raise RankFailed("a rank did not come") from None


class _ThreadChannel:
    """A ``deltacheck.save.ranks.channel.Channel`` of one rank."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = shared.size
        self._shared = shared

    def gather(self, payload: bytes) -> list[bytes | Exception] | None:
        """Send ``payload`` to rank 0, as ``Channel.gather`` defines it."""
        # No lock: each rank writes its own entry, and the barrier comes before the read.
        self._shared.up[self.rank] = payload
        self._shared.meet()
        return list(self._shared.up) if self.rank == 0 else None

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        """Return the payload for this rank, as ``Channel.scatter`` defines it."""
        if payloads is not None:
            self._shared.down = list(payloads)
        self._shared.meet()
        answer = self._shared.down[self.rank]
        # A second meeting: no rank may begin the next exchange before all have read this one.
        self._shared.meet()
        return answer
