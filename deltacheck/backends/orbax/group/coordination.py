"""Communicate between the processes of a JAX run over its coordination service.

The service has a key-value store on the host. Messages therefore do not interleave with the
training's collectives.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from deltacheck.backends.orbax.manager_root.jax_internals import coordination_client
from deltacheck.errors import RankFailed
from deltacheck.save.ranks.channel import Ranks
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.lock.interrupts import Lock

# Size of the parts of a message. The service holds them in memory, and limits its own messages.
_PART_BYTES = 1 << 20
# A wait in the service cannot be interrupted, so no single wait is longer than this.
_SLICE_SECONDS = 10.0

_lock = Lock()
# Numbers the channels of a name, so that a second one does not read the keys of the first.
_names: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def join(name: str, timeout_seconds: float) -> Ranks:
    """Return the channels to the processes of this run.

    Args:
        name: Identifies the channels. Each process must join equally often under a name.
        timeout_seconds: The longest wait for another process.

    Raises:
        RuntimeError: There is no coordination service.
    """
    with _lock:
        prefix = f"deltacheck/{name}/{next(_names[name])}"
    rank, size, store = jax.process_index(), jax.process_count(), coordination_client()
    # Two channels: exchanges of the training thread and the committer thread must not interleave.
    begin, end = (
        StoreChannel(f"{prefix}/{phase}", rank, size, store, timeout_seconds)
        for phase in ("begin", "end")
    )
    return Ranks(begin, end)


class StoreChannel:
    """A ``deltacheck.save.ranks.channel.Channel`` over the key-value store.

    Every exchange has its own keys, which are deleted after it. A process that comes late still
    finds the answer of the exchange that it missed, so that the next one includes all processes.

    Args:
        prefix: Begins all keys. No other program may use it.
        rank: The number of this process.
        size: The number of processes.
        store: A client like JAX's ``DistributedRuntimeClient``.
        timeout_seconds: The longest wait for another process.
    """

    def __init__(
        self, prefix: str, rank: int, size: int, store: Any, timeout_seconds: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._prefix = prefix
        self._store = store
        self._timeout_seconds = timeout_seconds
        self._number = 0

    def gather(self, payload: bytes) -> list[bytes | Exception] | None:
        """Send ``payload`` to rank 0, as ``Channel.gather`` defines it."""
        # Counted alike in all processes, because all make the same exchanges in the same order.
        self._number += 1
        if self.rank != 0:
            self._checked(0, lambda: self._put("up", self.rank, payload))
            return None
        # One deadline for all ranks: several lost ranks do not add up their timeouts.
        deadline = Deadline.after(self._timeout_seconds)
        return [
            payload if rank == 0 else self._received(rank, deadline) for rank in range(self.size)
        ]

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        """Return the payload for this rank, as ``Channel.scatter`` defines it."""
        if self.rank == 0 and payloads is not None:
            for rank in range(1, self.size):
                self._checked(rank, partial(self._put, "down", rank, payloads[rank]))
            return payloads[0]
        answer: bytes = self._checked(
            0, lambda: self._take("down", self.rank, Deadline.after(self._timeout_seconds))
        )
        # Rank 0 has read it, or never will.
        self._checked(0, lambda: self._store.key_value_delete(self._key("up", self.rank)))
        return answer

    def _received(self, rank: int, deadline: Deadline) -> bytes | Exception:
        """Return the message of a rank, or the error that stands for a lost one."""
        try:
            message: bytes = self._checked(rank, lambda: self._take("up", rank, deadline))
        # Returned and not raised: the others must hear of the failure in this exchange.
        except RankFailed as error:
            return error
        return message

    def _checked(self, rank: int, action: Callable[[], Any]) -> Any:
        """Call ``action``, and raise ``RankFailed`` naming ``rank`` if the service fails."""
        try:
            return action()
        # The service reports a lost connection and a dead process by the same class.
        except (jax.errors.JaxRuntimeError, TimeoutError) as error:
            reason = str(error).partition("\n")[0]
            raise RankFailed(
                f"rank {rank} was lost, or did not answer in time; it must be started again with"
                f" all others ({reason})"
            ) from error

    def _key(self, direction: str, rank: int) -> str:
        """Return the key of a message. The keys of its parts are below it."""
        return f"{self._prefix}/{self._number}/{direction}/{rank}"

    def _put(self, direction: str, rank: int, payload: bytes) -> None:
        parts = [
            payload[offset : offset + _PART_BYTES] for offset in range(0, len(payload), _PART_BYTES)
        ] or [b""]
        key = self._key(direction, rank)
        # An empty message also has a part, the first, which carries the count.
        for number in range(len(parts) - 1, 0, -1):
            self._store.key_value_set_bytes(f"{key}/{number}", parts[number])
        # The first part is written last, because the receiver waits for it. It has the count.
        self._store.key_value_set_bytes(f"{key}/0", len(parts).to_bytes(4, "little") + parts[0])

    def _take(self, direction: str, rank: int, deadline: Deadline) -> bytes:
        key = self._key(direction, rank)
        first = self._await(f"{key}/0", deadline)
        count = int.from_bytes(first[:4], "little")
        parts = [
            first[4:],
            *(self._await(f"{key}/{number}", deadline) for number in range(1, count)),
        ]
        # Deletes the keys of all parts, which are below this one.
        self._store.key_value_delete(key)
        return b"".join(parts)

    def _await(self, key: str, deadline: Deadline) -> bytes:
        while True:
            remaining_seconds = deadline.left
            assert remaining_seconds is not None
            try:
                content: bytes = self._store.blocking_key_value_get_bytes(
                    key, max(1, int(1000 * min(remaining_seconds, _SLICE_SECONDS)))
                )
            except jax.errors.JaxRuntimeError as error:
                # The client has one class for all errors, so the text must tell a timeout.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if remaining_seconds <= _SLICE_SECONDS:
                    raise TimeoutError(f"nothing came within {self._timeout_seconds:g} s") from None
            else:
                return content
