"""Channels between processes that save together, and the exchange in which rank 0 decides.

Every other rank sends rank 0 what it needs for a decision and receives the outcome (``consult``). A
rank that has failed sends its error in the same exchange. Its failure, with the cause, is then
every rank's failure as soon as all of them get there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltacheck.errors import RankFailed

# The first byte of every message.
_DONE, _FAILED = b"+", b"-"
# Ends the name of the call, which stands before the payload.
_END_OF_CALL = b"\0"
# The causes of many ranks are mostly the same, and an error that names them all would be hard to
# read.
_MOST_FAILURES_NAMED = 3


class Channel(Protocol):
    """A channel between the ranks. It carries one exchange at a time, in the same order everywhere.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
    """

    rank: int
    size: int

    def gather(self, payload: bytes) -> list[bytes | Exception] | None:
        """Send ``payload`` to rank 0.

        Returns:
            On rank 0, the payload of each rank, or the error that stands for a rank that is lost;
            ``None`` on the others.

        Raises:
            RankFailed: The exchange cannot go on. On other ranks than 0: rank 0 is lost or silent.
        """
        ...

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes:
        """Return the payload that rank 0 gives for this rank.

        Args:
            payloads: On rank 0, one for each rank; ``None`` on the others. Lost ranks are passed
                over.

        Raises:
            RankFailed: As ``gather`` raises it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of one run.

    Args:
        begin: The channel for agreements when a save or a restore begins, on the training thread.
        end: The channel for what follows behind the training. Each thread needs a channel of its
            own, since exchanges must not interleave.
    """

    begin: Channel
    end: Channel

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.begin.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.begin.size


def consult(
    channel: Channel,
    payload: bytes | BaseException,
    decide: Callable[[list[bytes]], Sequence[bytes]],
    call: str = "does another thing",
) -> bytes:
    """Send ``payload`` to rank 0, let it decide there, and return this rank's answer.

    Args:
        channel: The channel.
        payload: This rank's message; an exception if this rank has failed.
        decide: Return an answer for each rank, from the messages of all; called on rank 0.
        call: The action of this rank, such as "saves". All ranks must do the same.

    Raises:
        RankFailed: A rank has failed or is lost, or ``decide`` has raised. It is raised on every
            rank that is still there, and names the rank and the cause.
    """
    # A rank that has failed takes part all the same, since the others wait for its message.
    message = (
        _DONE + call.encode() + _END_OF_CALL + payload
        if isinstance(payload, bytes)
        else _FAILED + _description(payload)
    )
    messages = channel.gather(message)
    answers: Sequence[bytes] | None = None
    decision_error: Exception | None = None
    if messages is not None:
        failures = [
            f"rank {rank}: {text}"
            for rank, content in enumerate(messages)
            if (text := _failure_in(content))
        ]
        if failures:
            text = "; ".join(failures[:_MOST_FAILURES_NAMED])
            answers = [_FAILED + text.encode()] * len(messages)
        else:
            try:
                payloads = _payloads_of([m for m in messages if isinstance(m, bytes)])
                answers = [_DONE + answer for answer in decide(payloads)]
            except Exception as error:  # noqa: BLE001 - every rank waits for an answer
                decision_error = error
                answers = [_FAILED + b"rank 0: " + _description(error)] * len(messages)
    answer = channel.scatter(answers)
    if answer[:1] != _DONE:
        # Rank 0 raises the error itself, with its class and its trace. The others have only the
        # text.
        if decision_error is not None:
            raise decision_error
        raise RankFailed(answer[1:].decode(errors="replace"))
    return answer[1:]


def _payloads_of(messages: Sequence[bytes]) -> list[bytes]:
    """Return the payloads of messages; raise ``RankFailed`` if they are of different calls."""
    parts = [message[1:].split(_END_OF_CALL, 1) for message in messages]
    calls = [part[0].decode(errors="replace") for part in parts]
    for rank, call in enumerate(calls):
        # Decoded as the message of another call, it would be misread or fail in some other way.
        if call != calls[0]:
            raise RankFailed(
                f"rank {rank} {call} while rank 0 {calls[0]}: every rank has to make the same calls"
                " in the same order"
            )
    return [part[1] for part in parts]


def _description(error: BaseException) -> bytes:
    return f"{type(error).__name__}: {error}".encode()


def _failure_in(message: bytes | Exception) -> str:
    """Return the failure that a rank has sent or suffered; empty if there is none."""
    if isinstance(message, Exception):
        return str(message)
    return "" if message[:1] == _DONE else message[1:].decode(errors="replace")
