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


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The checkpoints of a root that stay after each save, and the leaves that they keep.

    A checkpoint stays if any rule names it. Without any of the first three rules all stay. The
    newest step and tagged steps always stay, with every leaf.

    Args:
        last: Keep this number of newest steps. Larger: more to go back to; smaller: less disk
            space.
        every: Keep the steps that this number divides. Larger: fewer steps, less disk space.
        best: Keep the steps with the best metrics: one ``KeepBest``, or several.
        full_last: Keep every leaf of this number of newest steps and of tagged steps, and only
            ``leaves`` of all others. The others are rewritten beside the training. Larger: more
            steps to resume from; smaller: less disk space. Default: steps keep all leaves.
        leaves: Paths or patterns (``*`` also matches ``/``) of the leaves that steps beyond
            ``full_last`` keep, with those that these are computed from.

    Raises:
        ValueError: If a number is below 1, or ``leaves`` is empty or given without ``full_last``.
    """

    LEAVES: ClassVar[tuple[str, ...]] = ("model/*",)

    last: int | None = None
    every: int | None = None
    best: KeepBest | Iterable[KeepBest] = ()
    full_last: int | None = None
    leaves: str | Iterable[str] = LEAVES

    def __post_init__(self) -> None:
        for name in ("last", "every", "full_last"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"Keep({name}=...) must be at least 1, not {number}")
        # As tuples: two records with the same rules are equal.
        object.__setattr__(self, "best", self.best_rules)
        object.__setattr__(self, "leaves", self.patterns)
        if not self.leaves or (self.full_last is None and self.leaves != self.LEAVES):
            raise ValueError(
                "Keep(leaves=...) names the leaves that steps beyond Keep(full_last=...) keep: give"
                f" both, not leaves={self.leaves!r} and full_last={self.full_last}"
            )

    @property
    def best_rules(self) -> tuple[KeepBest, ...]:
        """The rules of ``best``."""
        return (self.best,) if isinstance(self.best, KeepBest) else tuple(self.best)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of ``leaves``."""
        return (self.leaves,) if isinstance(self.leaves, str) else tuple(self.leaves)

    @property
    def all_steps(self) -> bool:
        """True if no step is ever deleted."""
        return self.last is None and self.every is None and not self.best

    @property
    def all_leaves(self) -> bool:
        """True if no step ever loses a leaf."""
        return self.full_last is None


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
    checkpoints: Iterable[Saved], keep: Keep, tagged: Collection[str] = ()
) -> frozenset[int]:
    """Return the sequence numbers of the checkpoints that stay.

    The rules apply to the course of the newest checkpoint. All others stay: a program that has
    forgotten to restore must not delete what an earlier one has left.

    Args:
        checkpoints: All checkpoints of a root.
        keep: The rules.
        tagged: Nonces of saves that stay whatever the rules say.
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.seq)
    if keep.all_steps:
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
    stay |= {checkpoint.seq for checkpoint in reachable[-(keep.last or 1) :]}
    if keep.every is not None:
        stay |= {checkpoint.seq for checkpoint in reachable if checkpoint.step % keep.every == 0}
    for rule in keep.best_rules:
        sign = 1 if rule.mode == "min" else -1
        values = [
            (sign * value, checkpoint.seq)
            for checkpoint in reachable
            if (value := _finite(checkpoint.metrics.get(rule.metric))) is not None
        ]
        stay |= {seq for _, seq in sorted(values)[: rule.count]}
    return frozenset(stay | {checkpoint.seq for checkpoint in earlier})


def partial_checkpoints(
    checkpoints: Iterable[Saved], keep: Keep, tagged: Collection[str] = ()
) -> frozenset[int]:
    """Return the sequence numbers of the checkpoints that keep only some leaves.

    Args:
        checkpoints: The checkpoints of a root that stay.
        keep: The rules.
        tagged: Nonces of saves that keep every leaf.
    """
    if keep.full_last is None:
        return frozenset()
    ordered, _ = _of_newest_course(sorted(checkpoints, key=lambda checkpoint: checkpoint.seq))
    # Of a step that was saved again, only the newest save can be resumed from.
    newest_of_step = {checkpoint.step: checkpoint.seq for checkpoint in ordered}
    full = set(sorted(newest_of_step.values())[-keep.full_last :])
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
