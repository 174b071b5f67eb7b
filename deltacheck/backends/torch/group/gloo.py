"""Communicate between the ranks of a ``torch.distributed`` job over gloo groups.

The groups are separate from the training's, so that messages do not interleave with its
collectives. They are on the host, so that saves do not need the accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from deltacheck.errors import RankFailed
from deltacheck.save.ranks.channel import Ranks

# Size of the first part of each message, which begins with the length. Most need no second part.
_FIRST_BYTES = 4096


def join(
    process_group: dist.ProcessGroup, timeout_seconds: float
) -> tuple[Ranks, list[dist.ProcessGroup]]:
    """Create two gloo groups of the processes of ``process_group``.

    Every process must call this, in the same order as it creates other groups.

    Args:
        process_group: The processes.
        timeout_seconds: The longest wait for another rank.

    Returns:
        The channels, and the groups, which the caller must destroy.

    Raises:
        RankFailed: A rank was lost or did not come in time.
    """
    members = dist.get_process_group_ranks(process_group)
    groups: list[dist.ProcessGroup] = []
    # Two groups, because the beginning of a save on the training thread and the end of the one
    # before, on the committer thread, may exchange messages at the same time.
    for name in ("begin", "end"):
        try:
            group = dist.new_group(
                members,
                timeout=timedelta(seconds=timeout_seconds),
                backend="gloo",
                # Ranks outside of a subgroup do not call this, so its members must not wait for
                # them.
                use_local_synchronization=len(members) < dist.get_world_size(),
                group_desc=f"deltacheck {name}",
            )
        # torch reports a lost rank, a broken connection and a timeout alike.
        except RuntimeError as error:
            for formed_group in groups:
                dist.destroy_process_group(formed_group)
            raise RankFailed(
                f"the group of {len(members)} ranks did not form within {timeout_seconds:g} s: a"
                " rank was lost or opens no Engine. Start all ranks again, or allow more time"
                f" (io_timeout_seconds). {str(error).partition(chr(10))[0]}"
            ) from error
        groups.append(group)
    begin, end = (GlooChannel(group, members) for group in groups)
    return Ranks(begin, end), groups


class GlooChannel:
    """A ``deltacheck.save.ranks.channel.Channel`` over a gloo group.

    gloo cannot repair a connection, so a rank whose connection breaks stays lost.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self.rank = dist.get_rank(group)
        self.size = len(members)
        self._group = group
        self._members = members
        # Once lost, a rank is not asked again: each attempt would wait for the whole timeout.
        self._lost: dict[int, Exception] = {}

    def gather(self, payload: bytes) -> list[bytes | Exception] | None:
        if self.rank != 0:
            try:
                self._send(payload, 0)
            # gloo reports a broken connection and a timeout alike as ``RuntimeError``.
            except RuntimeError as error:
                raise _rank_lost(0, error) from error
            return None
        return [payload if rank == 0 else self._received(rank) for rank in range(self.size)]

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        if self.rank != 0 or payloads is None:
            try:
                return self._receive(0)
            except RuntimeError as error:
                raise _rank_lost(0, error) from error
        for rank in range(1, self.size):
            # The answer still goes to all others, so that they learn of the failure at once.
            if rank not in self._lost:
                try:
                    self._send(payloads[rank], rank)
                except RuntimeError as error:
                    self._lost[rank] = _rank_lost(rank, error)
        return payloads[0]

    def _received(self, rank: int) -> bytes | Exception:
        """Return the message of a rank, or the error that stands for a lost one."""
        if rank not in self._lost:
            try:
                return self._receive(rank)
            except RuntimeError as error:
                self._lost[rank] = _rank_lost(rank, error)
        return self._lost[rank]

    def _send(self, payload: bytes, to: int) -> None:
        # The length as 8 bytes, little-endian, then the payload.
        framed = len(payload).to_bytes(8, "little") + payload
        # A bytearray, because torch warns about a tensor over memory that cannot be written to.
        first = bytearray(framed[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"))
        self._put(first, to)
        if len(framed) > _FIRST_BYTES:
            self._put(bytearray(framed[_FIRST_BYTES:]), to)

    def _put(self, content: bytearray, to: int) -> None:
        dist.send(
            torch.frombuffer(content, dtype=torch.uint8), self._members[to], group=self._group
        )

    def _receive(self, source: int) -> bytes:
        first = self._get(_FIRST_BYTES, source)
        length = int.from_bytes(first[:8], "little")
        rest = length + 8 - _FIRST_BYTES
        return first[8 : 8 + length] if rest <= 0 else first[8:] + self._get(rest, source)

    def _get(self, size: int, source: int) -> bytes:
        content = torch.empty(size, dtype=torch.uint8)
        dist.recv(content, self._members[source], group=self._group)
        return content.numpy().tobytes()


def _rank_lost(rank: int, error: Exception) -> RankFailed:
    return RankFailed(
        f"rank {rank} was lost, or did not answer in time; it must be started again with all others"
        f" ({error})"
    )
