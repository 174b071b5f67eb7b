"""What ends a stable stage: a change point in loss or gradient norm, a learning rate that leaves
its
trend, NaN, a changed optimizer, a resume.

A fold: ``detector, events = detector.advance(observation)``. Records in, records out; every process
that sees the same numbers decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeAlias

import msgspec

Numbers: TypeAlias = tuple[float, ...]

Z_LIMIT = (
    4.5  # found a domain shift in real fine-tuning within 10 steps, with no false alarm in 4 runs
)
RATE_FACTOR = 2.0  # from one observation to the next, beyond what the trend says
_FROM_ZERO = 1e300  # a factor that JSON can hold
_MAD_TO_SD = 1.4826  # of a normal distribution
_RECENT, _LONG, _LEAST = (
    8,
    32,
    12,
)  # changes between windows: of the present, of the run, before which nothing is judged
_LEVEL = 4  # windows
_RESIDUALS = 40  # values whose scatter within their windows tells the noise of one step


class Event(msgspec.Struct, frozen=True):
    """What re-arms the stage: ``what`` is one of ``loss``, ``gradient``, ``learning-rate``,
    ``nonfinite``, ``optimizer``, ``resume``.
    """

    step: int
    what: str
    size: float = 0.0  # z score, or factor


@dataclass(frozen=True, slots=True)
class Observation:
    """What a run reports at a step; ``None`` where it does not say.

    ``loss``: of this step, or the mean since the observation before. ``gradient_norm``: before
    clipping, likewise. ``learning_rate``: of the first parameter group, or of each. ``optimizer``:
    whatever tells optimizers and layouts apart (betas, groups, leaf shapes, world size); compared
    for equality. ``skipped``: the optimizer left a step out since the observation before.
    ``resumed``: the run was restored since then.
    """

    step: int
    loss: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | Numbers | None = None
    optimizer: object = None
    skipped: bool = False
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """The recent past of one quantity: its means over windows, how they changed, and how values
    scatter within them.
    """

    pending: Numbers = ()
    pending_steps: int = 0
    means: Numbers = ()
    changes: Numbers = ()
    residuals: Numbers = ()

    def advance(self, value: float, steps: int, window_steps: int) -> tuple[Series, float]:
        """Take a value in, ``steps`` after the one before. Gives the z score of the window that it
        closes; 0 where it closes none.

        Judged is the distance from the level, the median of the last 4 means moved on by the median
        change. The scale is the largest of: the deviation (MAD) of the last 8 changes, of the last
        32 (8 alone often tell too little noise), and the scatter of single values over the root of
        their number in the window.
        """
        pending, pending_steps = (*self.pending, value), self.pending_steps + steps
        if pending_steps < window_steps:
            return replace(self, pending=pending, pending_steps=pending_steps), 0.0
        mean, count = fmean(pending), len(pending)
        widen = math.sqrt(count / (count - 1)) if count > 1 else 1.0
        residuals = self.residuals + (
            tuple(widen * (v - mean) for v in pending) if count > 1 else ()
        )
        z = 0.0
        if self.means and len(self.changes) >= _LEAST:
            noise = (
                math.sqrt(fmean(r * r for r in self.residuals) / count) if self.residuals else 0.0
            )
            scale = max(
                _deviation(self.changes[-_RECENT:]),
                _deviation(self.changes),
                noise,
                1e-9 * abs(mean),
            )
            level = median(self.means) + (len(self.means) + 1) / 2 * median(self.changes)
            z = (mean - level) / scale if scale > 0 else 0.0
        changes = (*self.changes, mean - self.means[-1]) if self.means else self.changes
        return Series(
            (), 0, (*self.means, mean)[-_LEVEL:], changes[-_LONG:], residuals[-_RESIDUALS:]
        ), z


def _deviation(changes: Sequence[float]) -> float:
    middle = median(changes)
    return _MAD_TO_SD * median(abs(change - middle) for change in changes)


@dataclass(frozen=True, slots=True)
class Detector:
    """What has been seen so far, as much of it as matters.

    ``window_steps``: losses and norms are averaged over as many steps before they are judged;
    observations further apart are judged one by one. Larger: smaller shifts are found, later.
    ``rates``: (step, learning rate) of the last two observations, for each group.
    """

    window_steps: int = 5
    last: Observation | None = None
    loss: Series = field(default_factory=Series)
    gradient_norm: Series = field(default_factory=Series)
    rates: tuple[tuple[int, Numbers], ...] = ()
    peak_rate: float = 0.0

    def advance(self, observation: Observation) -> tuple[Detector, tuple[Event, ...]]:
        """Take an observation in. Gives the events that it shows; several of them may be one and
        the same in the run.
        """
        step, last = observation.step, self.last
        if last is not None and (observation.resumed or step <= last.step):
            fresh, _ = Detector(self.window_steps).advance(replace(observation, resumed=False))
            return fresh, (Event(step, "resume"), *_nonfinite(observation))
        events = [*_nonfinite(observation)]
        if last is None and observation.resumed:
            events.append(Event(step, "resume"))
        if (
            last is not None
            and None not in (last.optimizer, observation.optimizer)
            and last.optimizer != observation.optimizer
        ):
            events.append(Event(step, "optimizer"))
        rates = _rates(observation)
        jump = _jump(self.rates, step, rates, self.peak_rate)
        if jump is not None:
            events.append(Event(step, "learning-rate", jump))
        steps = 1 if last is None else step - last.step
        loss, z_loss = _advance(self.loss, observation.loss, steps, self.window_steps)
        norm, z_norm = _advance(
            self.gradient_norm, _log(observation.gradient_norm), steps, self.window_steps
        )
        if abs(z_loss) > Z_LIMIT:
            events.append(Event(step, "loss", z_loss))
        if abs(z_norm) > Z_LIMIT:
            events.append(Event(step, "gradient", z_norm))
        if events:  # the level is a new one, the noise most likely not
            loss, norm = (
                replace(series, pending=(), pending_steps=0, means=()) for series in (loss, norm)
            )
        seen = self.rates if rates is None else (*self.rates[-1:], (step, rates))
        peak = max((self.peak_rate, *(rates or ())))
        kept = replace(
            observation,
            optimizer=observation.optimizer
            if last is None or observation.optimizer is not None
            else last.optimizer,
        )
        return Detector(self.window_steps, kept, loss, norm, seen, peak), tuple(events)


def _advance(
    series: Series, value: float | None, steps: int, window_steps: int
) -> tuple[Series, float]:
    if value is None or not math.isfinite(value):
        return series, 0.0
    return series.advance(value, steps, window_steps)


def _nonfinite(observation: Observation) -> tuple[Event, ...]:
    values = (observation.loss, observation.gradient_norm)
    bad = observation.skipped or any(
        value is not None and not math.isfinite(value) for value in values
    )
    return (Event(observation.step, "nonfinite"),) if bad else ()


def _log(value: float | None) -> float | None:
    """Gradient norms scatter by factors, not by amounts."""
    return math.log(value) if value is not None and 0 < value < math.inf else None


def _rates(observation: Observation) -> Numbers | None:
    rate = observation.learning_rate
    return rate if rate is None or isinstance(rate, tuple) else (float(rate),)


def _jump(
    seen: tuple[tuple[int, Numbers], ...], step: int, rates: Numbers | None, peak: float
) -> float | None:
    """The factor by which a learning rate has left its trend, or ``None``.

    The trend is the line through the last two observations; what lies between it and the last rate,
    twofold, is a schedule: warm-up, cosine, linear decay. So is what moves by less than a twentieth
    of the largest rate: the end of a cosine.
    """
    if rates is None or not seen or len(seen[-1][1]) != len(rates):
        return None
    for group, rate in enumerate(rates):
        last_step, last = seen[-1][0], seen[-1][1][group]
        if len(seen) < 2 or len(seen[0][1]) != len(rates):
            if rate > last:  # the first of a warm-up: no trend yet
                continue
            trend = last
        else:
            trend = last + (last - seen[0][1][group]) * (step - last_step) / (
                last_step - seen[0][0]
            )
        high, low = RATE_FACTOR * max(last, trend), min(last, trend) / RATE_FACTOR
        if not low <= rate <= high and abs(rate - min(max(rate, low), high)) > peak / 20:
            return rate / last if last else _FROM_ZERO
    return None
