"""Which checkpoints stay: a pure function of what there is."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the ``count`` checkpoints with the best value of ``metric``, a name given to ``save(...,
    metrics=...)``.

    ``mode``: ``"min"`` (a loss) or ``"max"`` (an accuracy). A step without the metric, or with a
    value that is not finite, is never among the best; of equal values the older one stays. Larger
    ``count``: more to choose from, more disk space.

    Raises ``ValueError`` for another mode, a count below 1, an empty name.
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
    """What is kept is the union of the rules. ``last``: so many of the newest steps. ``every``:
    steps
    that it divides. ``best``: by metrics.

    Without any rule everything is kept; with any, the newest step is kept in any case. Raises
    ``ValueError`` for numbers below 1.
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
        return self.last is None and self.every is None and not self.best


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint. ``nonce``: of its save; what compaction has written again has the
    same.
    """

    seq: int
    step: int
    nonce: str
    metrics: Mapping[str, float | str] = field(default_factory=dict)


def kept(
    checkpoints: Iterable[Saved], retention: Retention, tagged: Collection[str] = ()
) -> frozenset[int]:
    """The sequence numbers of the checkpoints that stay. ``tagged``: nonces of saves that stay
    whatever the rules say.

    A step that was saved again later (by a resumed run, or by compaction) can no longer be asked
    for by its number: the rules do not count it. Of one save, only the newest form stays.
    """
    every = sorted(checkpoints, key=lambda one: one.seq)
    if retention.keeps_all:
        return frozenset(one.seq for one in every)
    of_saves = {one.nonce: one.seq for one in every}
    stay = {of_saves[nonce] for nonce in tagged if nonce in of_saves}
    steps = sorted({one.step: one for one in every}.values(), key=lambda one: one.seq)
    stay |= {one.seq for one in steps[-(retention.last or 1) :]}
    if retention.every is not None:
        stay |= {one.seq for one in steps if one.step % retention.every == 0}
    for rule in retention.best:
        sign = 1 if rule.mode == "min" else -1
        values = [
            (sign * value, one.seq)
            for one in steps
            if (value := _finite(one.metrics.get(rule.metric))) is not None
        ]
        stay |= {seq for _, seq in sorted(values)[: rule.count]}
    return frozenset(stay)


def _finite(value: float | str | None) -> float | None:
    """A metric as a number that can be compared: manifests keep NaN and infinities as text."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
