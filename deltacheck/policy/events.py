"""Detection of the events that end a stable stage.

Events are a change point in the loss or in the gradient norm, a learning rate that leaves its
trend, NaN, a changed optimizer and a resume. The detector is a pure fold, ``detector, events =
detector.advance(observation)``: every process that gets the same numbers decides alike.

The change-point test is a z score of the newest window against the median level and trend of the
windows before it. Its scale is a median absolute deviation (MAD), which outliers do not move
(Hampel, "The influence curve and its role in robust estimation", 1974).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeAlias

import msgspec

Numbers: TypeAlias = tuple[float, ...]

# In real fine-tuning this limit detected a domain shift within 10 steps, without a false alarm in
# four runs.
Z_LIMIT = 4.5
# Permitted factor between two observations, beyond the trend of the learning rate.
RATE_FACTOR = 2.0
# Stands for a rate that rises from zero: the largest factor that JSON can hold.
_FROM_ZERO = 1e300
# Ratio of the standard deviation and the MAD of a normal distribution.
_MAD_TO_SD = 1.4826
# Numbers of changes between windows that the scale is computed from: the recent and the long past.
_RECENT, _LONG = 8, 32
# Nothing is judged before this number of changes, because the scale is not reliable yet.
_LEAST = 12
# Number of windows whose median is the level.
_LEVEL = 4
# Number of values whose scatter within their windows gives the noise of a single step.
_RESIDUALS = 40


class Event(msgspec.Struct, frozen=True):
    """An event that ends a stable stage.

    Attributes:
        step: The step at which it was observed.
        what: ``loss``, ``gradient``, ``learning-rate``, ``nonfinite``, ``optimizer``, ``frozen``,
            ``unfrozen`` or ``resume``.
        size: The z score of a loss or gradient event, the factor of a learning-rate event, the
            share of the elements that were frozen or unfrozen.
    """

    # The field names are those of profile.json.
    step: int
    what: str
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class RunObservation:
    """The report of a run at one step; ``None`` stands for an unknown value.

    Attributes:
        step: The training step.
        loss: The loss of this step, or the mean since the previous observation.
        gradient_norm: The norm before clipping, likewise.
        learning_rate: The rate of the first parameter group, or of each group.
        optimizer: Any value that distinguishes optimizers and layouts (betas, groups, leaf shapes,
            world size). It is compared for equality.
        skipped: If True, the optimizer skipped a step since the previous observation.
        resumed: If True, the run was restored since then.
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
    """The recent past of one quantity.

    Attributes:
        pending: The values of the window that is still open.
        pending_steps: The number of steps that they cover.
        means: The means of the newest closed windows.
        changes: The differences of neighbouring means.
        residuals: The deviations of values from the means of their windows.
    """

    pending: Numbers = ()
    pending_steps: int = 0
    means: Numbers = ()
    changes: Numbers = ()
    residuals: Numbers = ()

    def advance(self, value: float, steps: int, window_steps: int) -> tuple[Series, float]:
        """Return the series with a value added, and the z score of the window that it closes.

        The score is 0 if no window is closed. It is the distance of the window's mean from the
        level, which is the median of the last 4 means, extrapolated by the median change. The scale
        is the largest of three estimates: the MAD of the last 8 changes, that of the last 32
        changes, and the scatter of single values over the root of their number in the window.

        Args:
            value: The new value.
            steps: The number of steps since the previous value.
            window_steps: The number of steps of a window.
        """
        pending, pending_steps = (*self.pending, value), self.pending_steps + steps
        if pending_steps < window_steps:
            return replace(self, pending=pending, pending_steps=pending_steps), 0.0
        mean, count = fmean(pending), len(pending)
        # Bessel's correction: residuals against the own mean are too small by this factor.
        widen = math.sqrt(count / (count - 1)) if count > 1 else 1.0
        residuals = self.residuals + (
            tuple(widen * (v - mean) for v in pending) if count > 1 else ()
        )
        z = 0.0
        if self.means and len(self.changes) >= _LEAST:
            noise = (
                math.sqrt(fmean(r * r for r in self.residuals) / count) if self.residuals else 0.0
            )
            # The recent changes alone often show too little noise. The long past alone lags behind
            # a run that grows noisier. The last term guards against a series of equal values.
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

    def at_new_level(self) -> Series:
        """Return the series without its level. The noise is most likely the same, so it stays."""
        return replace(self, pending=(), pending_steps=0, means=())


def _deviation(changes: Sequence[float]) -> float:
    """Return the standard deviation, estimated from the median absolute deviation."""
    middle = median(changes)
    return _MAD_TO_SD * median(abs(change - middle) for change in changes)


@dataclass(frozen=True, slots=True)
class Detector:
    """The state of the fold over the observations of a run.

    Attributes:
        window_steps: The number of steps over which losses and norms are averaged before they are
            judged. Observations further apart are judged one by one. Larger: smaller shifts are
            detected, but later; smaller: only large shifts, at once.
        last: The last observation.
        loss: The past of the loss.
        gradient_norm: The past of the logarithm of the gradient norm.
        rates: (step, learning rate of each group) of the last two observations.
        peak_rate: The largest learning rate so far.
        floors: The lowest rate of each group since its warm-up or the last event, infinite during
            the first warm-up.
    """

    window_steps: int = 5
    last: RunObservation | None = None
    loss: Series = field(default_factory=Series)
    gradient_norm: Series = field(default_factory=Series)
    rates: tuple[tuple[int, Numbers], ...] = ()
    peak_rate: float = 0.0
    floors: Numbers = ()

    def advance(self, observation: RunObservation) -> tuple[Detector, tuple[Event, ...]]:
        """Return the detector with an observation added, and the events that it shows.

        One cause in the run may raise several events.
        """
        step, last = observation.step, self.last
        # A step that does not ascend is a resume that nobody reported. Nothing that was learned
        # before it describes the run that continues.
        if last is not None and (observation.resumed or step <= last.step):
            fresh, _ = Detector(self.window_steps).advance(replace(observation, resumed=False))
            return fresh, (Event(step, "resume"), *_nonfinite(observation))
        events = [*_nonfinite(observation)]
        if last is None and observation.resumed:
            events.append(Event(step, "resume"))
        optimizer, is_changed = _judge_optimizer(last, observation)
        if is_changed:
            events.append(Event(step, "optimizer"))
        rates = _rates(observation)
        floors, jump = self._judge_rates(step, rates)
        if jump is not None:
            events.append(Event(step, "learning-rate", jump))
        steps = 1 if last is None else step - last.step
        loss, z_loss = _advance(self.loss, observation.loss, steps, self.window_steps)
        norm, z_norm = _advance(
            self.gradient_norm, _log(observation.gradient_norm), steps, self.window_steps
        )
        scores = {"loss": z_loss, "gradient": z_norm}
        events += [Event(step, kind, z) for kind, z in scores.items() if abs(z) > Z_LIMIT]
        if events:
            loss, norm = loss.at_new_level(), norm.at_new_level()
        history = self.rates if rates is None else (*self.rates[-1:], (step, rates))
        peak = max((self.peak_rate, *(rates or ())))
        newest = replace(observation, optimizer=optimizer)
        detector = Detector(self.window_steps, newest, loss, norm, history, peak, floors)
        return detector, tuple(events)

    def _judge_rates(self, step: int, rates: Numbers | None) -> tuple[Numbers, float | None]:
        """Return the floors with the rates of a step, and the factor of a jump if there is one."""
        floors = _floors(self.floors, self.rates, rates)
        jump = _jump(self.rates, step, rates, self.peak_rate)
        if jump is None:
            jump = _creep(floors, rates, self.peak_rate)
        return (floors if jump is None else rates or ()), jump


def _advance(
    series: Series, value: float | None, steps: int, window_steps: int
) -> tuple[Series, float]:
    if value is None or not math.isfinite(value):
        return series, 0.0
    return series.advance(value, steps, window_steps)


def _judge_optimizer(last: RunObservation | None, now: RunObservation) -> tuple[object, bool]:
    """Return the optimizer at an observation, and whether it is another one than before."""
    before = None if last is None else last.optimizer
    # An observation without an optimizer must not hide a change between its neighbours.
    optimizer = before if now.optimizer is None else now.optimizer
    return optimizer, before is not None and optimizer != before


def _nonfinite(observation: RunObservation) -> tuple[Event, ...]:
    values = (observation.loss, observation.gradient_norm)
    bad = observation.skipped or any(
        value is not None and not math.isfinite(value) for value in values
    )
    return (Event(observation.step, "nonfinite"),) if bad else ()


def _log(value: float | None) -> float | None:
    """Return the logarithm of a gradient norm, because norms scatter by factors, not by amounts."""
    return math.log(value) if value is not None and 0 < value < math.inf else None


def _rates(observation: RunObservation) -> Numbers | None:
    rate = observation.learning_rate
    return rate if rate is None or isinstance(rate, tuple) else (float(rate),)


def _jump(
    history: tuple[tuple[int, Numbers], ...], step: int, rates: Numbers | None, peak: float
) -> float | None:
    """Return the factor by which a learning rate has left its trend, or ``None``.

    The trend is the line through the last two observations. A rate between the trend and the last
    rate, with a margin of ``RATE_FACTOR``, belongs to a schedule: warm-up, cosine or linear decay.
    A change by less than a twentieth of the largest rate is the end of a cosine.
    """
    if rates is None or not history or len(history[-1][1]) != len(rates):
        return None
    for group, rate in enumerate(rates):
        last_step, last = history[-1][0], history[-1][1][group]
        if len(history) < 2 or len(history[0][1]) != len(rates):
            if rate > last:  # a warm-up begins and has no trend yet
                continue
            trend = last
        else:
            trend = last + (last - history[0][1][group]) * (step - last_step) / (
                last_step - history[0][0]
            )
        high, low = RATE_FACTOR * max(last, trend), min(last, trend) / RATE_FACTOR
        if not low <= rate <= high and abs(rate - min(max(rate, low), high)) > peak / 20:
            return rate / last if last else _FROM_ZERO
    return None


def _floors(
    floors: Numbers, history: tuple[tuple[int, Numbers], ...], rates: Numbers | None
) -> Numbers:
    """Return the lowest rate of each group, from the first one on that does not rise."""
    if rates is None:
        return floors
    if not history or len(history[-1][1]) != len(rates) or len(floors) != len(rates):
        return (math.inf,) * len(rates)
    return tuple(
        floor if rate > last else min(floor, rate)
        for floor, rate, last in zip(floors, rates, history[-1][1], strict=True)
    )


def _creep(floors: Numbers, rates: Numbers | None, peak: float) -> float | None:
    """Return the factor by which a rate has risen in steps that are no jumps, or ``None``.

    Each step of a creeping rate follows the trend of the steps before it.
    """
    for floor, rate in zip(floors, rates or (), strict=False):
        if rate > RATE_FACTOR * floor and rate - floor > peak / 20:
            return rate / floor if floor else _FROM_ZERO
    return None
