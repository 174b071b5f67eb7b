"""Processes that save together: how they tell one another what they have, and what the first of
them
decides.

Rank 0 decides; every other rank tells it what it needs for that and is told the outcome
(``consult``). A rank that has failed says so in the same place, so that its failure is everyone's,
with its cause, as soon as everyone gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltacheck.errors import RankFailed

_DONE, _FAILED = b"+", b"-"


class Channel(Protocol):
    """Carries one conversation at a time between the ranks; all take part in each, in the same
    order.

    ``gather``: rank 0 gets what each rank has sent, or the error that stands for a rank that is
    lost; the others get ``None``. ``scatter``: each rank gets what rank 0 gives for it; ranks that
    are lost are passed over. Both raise ``RankFailed`` where there is no way to go on, of another
    rank than 0 where rank 0 is lost or silent.
    """

    rank: int
    size: int

    def gather(self, payload: bytes) -> list[bytes | Exception] | None: ...

    def scatter(self, payloads: Sequence[bytes] | None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of one run. ``begin``: for what they agree on when a save or a restore begins,
    on
    the training thread; ``end``: for what follows behind the training.
    """

    begin: Channel
    end: Channel

    @property
    def rank(self) -> int:
        return self.begin.rank

    @property
    def size(self) -> int:
        return self.begin.size


def consult(
    channel: Channel,
    payload: bytes | BaseException,
    decide: Callable[[list[bytes]], Sequence[bytes]],
) -> bytes:
    """Send ``payload`` to rank 0, let it ``decide`` there what to answer each rank, and return this
    rank's answer.

    ``payload``: an exception where this rank has failed. Raises ``RankFailed``, on every rank that
    is still there, where one has failed, is lost, or ``decide`` has raised; it names the rank and
    the cause.
    """
    sent = _DONE + payload if isinstance(payload, bytes) else _FAILED + _told(payload)
    got = channel.gather(sent)
    answers: Sequence[bytes] | None = None
    raised: Exception | None = None
    if got is not None:
        failures = [
            f"rank {rank}: {text}" for rank, one in enumerate(got) if (text := _failure_in(one))
        ]
        if failures:
            answers = [_FAILED + "; ".join(failures[:3]).encode()] * len(got)
        else:
            try:
                answers = [
                    _DONE + answer
                    for answer in decide([one[1:] for one in got if isinstance(one, bytes)])
                ]
            except Exception as error:  # noqa: BLE001 - every rank waits for an answer
                raised, answers = error, [_FAILED + b"rank 0: " + _told(error)] * len(got)
    answer = channel.scatter(answers)
    if answer[:1] != _DONE:
        if raised is not None:
            raise raised
        raise RankFailed(answer[1:].decode(errors="replace"))
    return answer[1:]


def _told(error: BaseException) -> bytes:
    return f"{type(error).__name__}: {error}".encode()


def _failure_in(sent: bytes | Exception) -> str:
    if isinstance(sent, Exception):
        return str(sent)
    return "" if sent[:1] == _DONE else sent[1:].decode(errors="replace")
