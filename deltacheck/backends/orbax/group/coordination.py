"""The processes of a JAX run, talking over the key-value store of its coordination service: on the
host, beside the training's collectives.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from deltacheck.backends.orbax.manager_root.jax_internals import coordination_client
from deltacheck.errors import RankFailed
from deltacheck.save.channel import Ranks
from deltacheck.store.deadline import Deadline

_PART_BYTES = (
    1 << 20
)  # of a message; the service holds what is under way in memory, and answers in messages of its own
_SLICE_SECONDS = 10.0  # a wait in the service cannot be interrupted, so that none is longer

_lock = threading.Lock()
_names: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def join(name: str, timeout_seconds: float) -> Ranks:
    """The processes of this run. ``name``: what they talk about; each process must join as often as
    the others under the same name.

    ``timeout_seconds``: longest wait for another process. Raises ``RuntimeError`` without a
    coordination service.
    """
    with _lock:
        prefix = f"deltacheck/{name}/{next(_names[name])}"
    rank, size, store = jax.process_index(), jax.process_count(), coordination_client()
    begin, end = (
        StoreChannel(f"{prefix}/{which}", rank, size, store, timeout_seconds)
        for which in ("begin", "end")
    )
    return Ranks(begin, end)


class StoreChannel:
    """A ``deltacheck.save.channel.Channel`` over the store. Every conversation has keys of its own, which
    go
    when it is over.

    A process that comes late finds what the others made of it, so that the next conversation can go
    on with all. ``store``: as JAX's ``DistributedRuntimeClient``; ``prefix``: of the keys, which
    nobody else uses.
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
        self._number += 1
        if self.rank != 0:
            self._told(0, lambda: self._put("up", self.rank, payload))
            return None
        deadline = Deadline.after(self._timeout_seconds)
        return [payload if rank == 0 else self._from(rank, deadline) for rank in range(self.size)]

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        if self.rank == 0 and payloads is not None:
            for rank in range(1, self.size):
                self._told(rank, lambda rank=rank: self._put("down", rank, payloads[rank]))  # type: ignore[misc]
            return payloads[0]
        answer: bytes = self._told(
            0, lambda: self._take("down", self.rank, Deadline.after(self._timeout_seconds))
        )
        self._told(
            0, lambda: self._store.key_value_delete(self._key("up", self.rank))
        )  # rank 0 has read it, or never will
        return answer

    def _from(self, rank: int, deadline: Deadline) -> bytes | Exception:
        try:
            found: bytes = self._told(rank, lambda: self._take("up", rank, deadline))
        except RankFailed as error:
            return error
        return found

    def _told(self, rank: int, action: Callable[[], Any]) -> Any:
        """Raises ``RankFailed`` where the service cannot do it. ``rank``: who is missed then."""
        try:
            return action()
        except (jax.errors.JaxRuntimeError, TimeoutError) as error:
            reason = str(error).partition("\n")[0]
            raise RankFailed(
                f"rank {rank} was lost, or did not answer in time; it must be started again with"
                f" all others ({reason})"
            ) from error

    def _key(self, way: str, rank: int) -> str:
        """Of a message; its parts are below."""
        return f"{self._prefix}/{self._number}/{way}/{rank}"

    def _put(self, way: str, rank: int, payload: bytes) -> None:
        parts = [payload[at : at + _PART_BYTES] for at in range(0, len(payload), _PART_BYTES)] or [
            b""
        ]
        key = self._key(way, rank)
        for number in range(len(parts) - 1, 0, -1):
            self._store.key_value_set_bytes(f"{key}/{number}", parts[number])
        # Last, since whoever waits waits for this one. It says how many there are.
        self._store.key_value_set_bytes(f"{key}/0", len(parts).to_bytes(4, "little") + parts[0])

    def _take(self, way: str, rank: int, deadline: Deadline) -> bytes:
        key = self._key(way, rank)
        first = self._await(f"{key}/0", deadline)
        count = int.from_bytes(first[:4], "little")
        parts = [
            first[4:],
            *(self._await(f"{key}/{number}", deadline) for number in range(1, count)),
        ]
        self._store.key_value_delete(key)
        return b"".join(parts)

    def _await(self, key: str, deadline: Deadline) -> bytes:
        while True:
            left = deadline.left
            assert left is not None
            try:
                found: bytes = self._store.blocking_key_value_get_bytes(
                    key, max(1, int(1000 * min(left, _SLICE_SECONDS)))
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if left <= _SLICE_SECONDS:
                    raise TimeoutError(f"nothing came within {self._timeout_seconds:g} s") from None
            else:
                return found
