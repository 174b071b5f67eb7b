"""Retention rules: a pure function from the checkpoints of a root to those that stay."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class KeepBest:
    """A retention rule that keeps the checkpoints with the best values of a metric.

    A step without the metric, or with a value that is not finite, is never among the best. Of equal
    values the older one stays.

    Args:
        metric: The name of a metric that is given to ``save(..., metrics=...)``.
        count: The number of checkpoints to keep, at least 1 (default: 1). Larger: more checkpoints
            to choose from, more disk space; smaller: the opposite.
        mode: ``"min"`` keeps the smallest values, as for a loss (default); ``"max"`` keeps the
            largest values, as for an accuracy.

    Raises:
        ValueError: If the name is empty, the count is below 1 or the mode is unknown.
    """

    metric: str
    count: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        if not self.metric or self.count < 1 or self.mode not in ("min", "max"):
            raise ValueError(
                "KeepBest needs a metric, a count of at least 1 and the mode 'min' or 'max', not"
                f" {self}"
            )


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention rules of a root; a checkpoint that any rule names is kept.

    Without any rule everything is kept. With a rule, the newest step is kept in any case.

    Args:
        last: The number of newest steps to keep, ``None`` for no such rule.
        every: Keep the steps that this number divides, ``None`` for no such rule.
        best: Rules that keep the best steps by a metric.

    Raises:
        ValueError: If a number is below 1.
    """

    last: int | None = None
    every: int | None = None
    best: tuple[KeepBest, ...] = ()

    def __post_init__(self) -> None:
        for name, number in (("last", self.last), ("every", self.every)):
            if number is not None and number < 1:
                raise ValueError(f"keep_{name} must be at least 1, not {number}")

    @property
    def keeps_all(self) -> bool:
        """Return True if there is no rule, so that nothing is ever deleted."""
        return self.last is None and self.every is None and not self.best


@dataclass(frozen=True, slots=True)
class History:
    """Keep every leaf of the newest steps, and only some leaves of all others.

    Args:
        full_last: The number of newest steps that keep every leaf, at least 1. Larger: more steps
            to resume from; smaller: less disk space.
        leaves: Paths or patterns (``*`` also matches ``/``) of the leaves that the other steps
            keep. Leaves that these are computed from stay, too.

    Raises:
        ValueError: If the number is below 1, or no leaf is named.
    """

    DEFAULT: ClassVar[tuple[str, ...]] = ("model/*",)

    full_last: int
    leaves: tuple[str, ...] = DEFAULT

    @classmethod
    def of(cls, full_last: int, leaves: str | Iterable[str]) -> History:
        """Return the rule that the arguments of a public constructor describe."""
        return cls(full_last, (leaves,) if isinstance(leaves, str) else tuple(leaves))

    def __post_init__(self) -> None:
        if self.full_last < 1 or not self.leaves:
            raise ValueError(
                f"a history keeps at least 1 whole step and some leaves of others, not {self}"
            )


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint.

    Attributes:
        seq: Its sequence number.
        step: Its training step.
        nonce: The identifier of its save. A checkpoint that compaction rewrites keeps the nonce.
        metrics: The metrics that were given to the save.
        course: The course of the run that the save belongs to.
    """

    seq: int
    step: int
    nonce: str
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    course: str = ""


def retained(
    checkpoints: Iterable[Saved], retention: Retention, tagged: Collection[str] = ()
) -> frozenset[int]:
    """Return the sequence numbers of the checkpoints that stay.

    The rules apply to the course of the newest checkpoint. All others stay: a program that has
    forgotten to restore must not delete what an earlier one has left.

    Args:
        checkpoints: All checkpoints of a root.
        retention: The rules.
        tagged: Nonces of saves that stay whatever the rules say.
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.seq)
    if retention.keeps_all:
        return frozenset(checkpoint.seq for checkpoint in ordered)
    ordered, earlier = _of_newest_course(ordered)
    # Later entries overwrite earlier ones: of each save only its newest form stays.
    newest_of_save = {checkpoint.nonce: checkpoint.seq for checkpoint in ordered}
    stay = {newest_of_save[nonce] for nonce in tagged if nonce in newest_of_save}
    # A step that was saved again, by a resumed run or by compaction, can no longer be requested by
    # its number, so the rules do not count it.
    reachable = sorted(
        {checkpoint.step: checkpoint for checkpoint in ordered}.values(),
        key=lambda checkpoint: checkpoint.seq,
    )
    stay |= {checkpoint.seq for checkpoint in reachable[-(retention.last or 1) :]}
    if retention.every is not None:
        stay |= {
            checkpoint.seq for checkpoint in reachable if checkpoint.step % retention.every == 0
        }
    for rule in retention.best:
        sign = 1 if rule.mode == "min" else -1
        values = [
            (sign * value, checkpoint.seq)
            for checkpoint in reachable
            if (value := _finite(checkpoint.metrics.get(rule.metric))) is not None
        ]
        stay |= {seq for _, seq in sorted(values)[: rule.count]}
    return frozenset(stay | {checkpoint.seq for checkpoint in earlier})


def partial_checkpoints(
    checkpoints: Iterable[Saved], history: History, tagged: Collection[str] = ()
) -> frozenset[int]:
    """Return the sequence numbers of the checkpoints that keep only some leaves.

    Args:
        checkpoints: The checkpoints of a root that stay.
        history: The rule.
        tagged: Nonces of saves that keep every leaf.
    """
    ordered, _ = _of_newest_course(sorted(checkpoints, key=lambda checkpoint: checkpoint.seq))
    # Of a step that was saved again, only the newest save can be resumed from.
    newest_of_step = {checkpoint.step: checkpoint.seq for checkpoint in ordered}
    full = set(sorted(newest_of_step.values())[-history.full_last :])
    return frozenset(
        checkpoint.seq
        for checkpoint in ordered
        if checkpoint.seq not in full and checkpoint.nonce not in tagged
    )


def _of_newest_course(ordered: list[Saved]) -> tuple[list[Saved], list[Saved]]:
    """Return the checkpoints of the course that has the newest one, and all others."""
    newest = [checkpoint for checkpoint in ordered if checkpoint.course == ordered[-1].course]
    earlier = [checkpoint for checkpoint in ordered if checkpoint.course != ordered[-1].course]
    return newest, earlier


def _finite(value: float | str | None) -> float | None:
    """Return a metric if it can be compared; manifests store NaN and infinities as text."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
