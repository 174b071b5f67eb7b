"""Predictions before any checkpoint is made: bytes, blocking and restore time, the best interval.

The result also tells if deltas pay at all. Pure functions over frozen records. Every formula, its
source and its range: ``docs/how-to/size-an-interval.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltacheck.policy.presets import RESTORE_RATIO
from deltacheck.profile.interval import daly_interval, waste, young_interval
from deltacheck.profile.rates import (
    Rates,
    at_interval,
    chain_within,
    delta_bytes,
    keyframe_bytes,
    mean_bytes,
)

# Deltas save bytes if a checkpoint takes at most this share of the state. Above it, the longer
# restore outweighs the gain.
PAYS_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of a machine in bytes per second.

    Attributes:
        write: Writing to the storage, all processes together.
        read: Reading from the storage, all processes together.
        encode: State that one process compares and compresses.
        apply: State to which one process applies deltas.
        copy: Memory that the capture of one process copies.

    Raises:
        ValueError: If a speed is not positive.
    """

    write: float
    read: float
    encode: float
    apply: float
    copy: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} must be more than 0 bytes per second, not {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A training run.

    Attributes:
        step_seconds: The duration of a step.
        mtbf_seconds: The mean time between failures of the whole job, whatever its size.
        processes: The number of processes that share the state evenly.
        restart_seconds: The time from a failure until the restore begins.

    Raises:
        ValueError: If a value is out of its range.
    """

    step_seconds: float
    mtbf_seconds: float
    processes: int = 1
    restart_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (
            self.step_seconds > 0
            and self.mtbf_seconds > 0
            and self.processes >= 1
            and self.restart_seconds >= 0
        ):
            raise ValueError(
                "step and MTBF must be more than 0 s, processes at least 1, the restart not"
                f" negative: {self}"
            )


@dataclass(frozen=True, slots=True)
class Strategy:
    """A kind of checkpoint at one interval, with its predicted cost.

    Attributes:
        name: The name of the kind.
        interval_steps: The number of steps between two checkpoints.
        bytes: The mean size of a checkpoint.
        blocking_seconds: The time that training loses to each checkpoint.
        durable_seconds: The time from the call until the checkpoint survives a failure.
        restore_seconds: The time to read and decode a checkpoint.
        waste: The share of wall time that is not progress.
    """

    name: str
    interval_steps: int
    bytes: float
    blocking_seconds: float
    durable_seconds: float
    restore_seconds: float
    waste: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction. Field names are keys of ``deltacheck plan --json``.

    Attributes:
        ways: The strategies: deltas first, then those that they are compared with.
        state_bytes: The size of the raw state.
        keyframe_bytes: The size of a checkpoint in which every leaf is whole.
        delta_bytes: The size of a checkpoint in which every leaf is a delta.
        max_chain_depth: The chain depth that meets the restore limit.
        read_bytes: The bytes that the longest restore reads.
        young_seconds: The best interval for the cost of deltas, to first order.
        daly_seconds: The best interval, to higher order.
        saves_bytes: True if deltas take at most ``PAYS_SHARE`` of the state.
        saves_time: True if deltas waste less time than whole checkpoints.
        reasons: The reasons for both verdicts, with their numbers.
    """

    ways: tuple[Strategy, ...]
    state_bytes: int
    keyframe_bytes: float
    delta_bytes: float
    max_chain_depth: int
    read_bytes: float
    young_seconds: float
    daly_seconds: float
    saves_bytes: bool
    saves_time: bool
    reasons: tuple[str, ...]

    def of_run(self, steps: int) -> tuple[int, float]:
        """Return the saves of a run, and their bytes: the first writes every leaf whole.

        Args:
            steps: The number of training steps.
        """
        deltas = self.ways[0]
        saves = max(1, steps // deltas.interval_steps)
        return saves, self.keyframe_bytes + (saves - 1) * deltas.bytes


def plan(
    rates: Rates,
    machine: Machine,
    run: PlannedRun,
    *,
    max_chain_depth: int = 32,
    max_restore_ratio: float | None = RESTORE_RATIO,
    max_restore_seconds: float | None = None,
    interval_steps: int | None = None,
) -> Prediction:
    """Predict the cost of checkpoints, and the best interval.

    Args:
        rates: The observed rates of the state.
        machine: The speed of the machine.
        run: The training run.
        max_chain_depth: As in ``Policy``.
        max_restore_ratio: As in ``Policy``.
        max_restore_seconds: The limit of a restore; the chain is shortened until it is met.
            Smaller: more keyframes to write, faster restores; larger: the opposite. ``None``: no
            limit.
        interval_steps: The interval to judge, of deltas and of whole checkpoints; ``None`` to find
            the best one of each.

    Raises:
        ValueError: If the state is empty, or if not even a keyframe can be restored within
            ``max_restore_seconds``.
    """
    state = rates.state_bytes
    # A division by the size follows.
    if not state:
        raise ValueError("the state has no bytes; there is nothing to plan for")
    # Each process captures and encodes its own part of the state. The storage is shared, so reads
    # and writes are not divided by the number of processes.
    capture = state / run.processes / machine.copy
    encode = state / run.processes / machine.encode
    young, daly = (
        young_interval(capture, run.mtbf_seconds),
        daly_interval(capture, run.mtbf_seconds),
    )

    def durable(steps: float) -> float:
        # Encoding and writing overlap, so the slower of the two determines the duration.
        return capture + max(
            encode,
            mean_bytes(at_interval(rates, steps), max_chain_depth, max_restore_ratio)
            / machine.write,
        )

    steps = interval_steps or _best_steps(daly, run.step_seconds)
    while interval_steps is None and durable(steps) > steps * run.step_seconds:
        # Saves that are slower than their interval wait for each other. Then the storage or the
        # processor determines the interval. A longer interval makes larger deltas, hence the loop.
        steps = max(steps + 1, math.ceil(durable(steps) / run.step_seconds))
    projected = at_interval(rates, steps)
    depth = max_chain_depth
    if max_restore_seconds is not None:
        depth = _depth_within(
            max_restore_seconds, projected, machine, run, max_chain_depth, max_restore_ratio
        )
    mean_size = mean_bytes(projected, depth, max_restore_ratio)
    lag = capture + max(encode, mean_size / machine.write)
    deltas = _strategy(
        "deltas",
        steps,
        mean_size,
        capture,
        lag,
        restore_seconds(projected, machine, run, depth, max_restore_ratio),
        run,
    )
    baselines = _whole(projected, machine, run, capture, deltas, interval_steps)
    saves_bytes = mean_size <= PAYS_SHARE * state
    # A gain below 1 % is within the error of the model.
    saves_time = deltas.waste < 0.99 * min(way.waste for way in baselines[:2])
    return Prediction(
        ways=(deltas, *baselines),
        state_bytes=state,
        keyframe_bytes=keyframe_bytes(projected),
        delta_bytes=delta_bytes(projected),
        max_chain_depth=depth,
        read_bytes=_read_bytes(projected, depth, max_restore_ratio),
        young_seconds=young,
        daly_seconds=daly,
        saves_bytes=saves_bytes,
        saves_time=saves_time,
        reasons=_reasons(rates, projected, machine, deltas, baselines, depth, encode),
    )


def _depth_within(
    limit_seconds: float,
    rates: Rates,
    machine: Machine,
    run: PlannedRun,
    max_chain_depth: int,
    max_restore_ratio: float | None,
) -> int:
    """Return the largest chain depth whose longest restore meets a limit.

    The duration of a restore grows linearly with the depth, so two evaluations determine it.

    Raises:
        ValueError: Not even a keyframe can be restored in time.
    """
    base, longest = (
        restore_seconds(rates, machine, run, n, max_restore_ratio) for n in (0, max_chain_depth)
    )
    if longest <= limit_seconds:
        return max_chain_depth
    if base > limit_seconds:
        raise ValueError(
            f"a restore takes {base:.6g} s without any delta, more than the {limit_seconds:.6g} s"
            " that it may take"
        )
    per_delta = restore_seconds(rates, machine, run, 1) - base
    # The tolerance keeps a depth that meets the limit exactly, in spite of rounding.
    return min(max_chain_depth, math.floor((limit_seconds - base) / per_delta + 1e-9))


def restore_seconds(
    rates: Rates,
    machine: Machine,
    run: PlannedRun,
    depth: int,
    max_restore_ratio: float | None = None,
) -> float:
    """Return the duration of the longest restore.

    It reads a keyframe and its deltas, and decodes every word of the keyframe and the changed words
    of each delta.
    """
    reading = _read_bytes(rates, depth, max_restore_ratio) / machine.read
    deltas = sum(
        min(depth, chain_within(leaf, max_restore_ratio)) * leaf.raw_bytes * leaf.density
        for leaf in rates.leaves
    )
    return reading + (rates.state_bytes + deltas) / run.processes / machine.apply


def _read_bytes(rates: Rates, depth: int, max_restore_ratio: float | None) -> float:
    """Return the bytes that the longest restore reads."""
    deltas = sum(
        min(depth, chain_within(leaf, max_restore_ratio)) * leaf.delta_bytes
        for leaf in rates.leaves
    )
    return keyframe_bytes(rates) + deltas + depth * rates.tables_bytes


def _best_steps(interval_seconds: float, step_seconds: float) -> int:
    return max(1, round(interval_seconds / step_seconds))


def _strategy(
    name: str, steps: int, size: float, cost: float, durable: float, restore: float, run: PlannedRun
) -> Strategy:
    """Return a strategy with its waste.

    Saves that are slower than their interval also block training for the difference.

    Args:
        name: The name of the strategy.
        steps: The interval in steps.
        size: The mean bytes of a checkpoint.
        cost: The seconds that block training, without the wait for the previous save.
        durable: The seconds until a checkpoint is durable.
        restore: The seconds of a restore.
        run: The training run.
    """
    seconds = steps * run.step_seconds
    # Only one save runs at a time. The next one waits until this one is durable.
    blocking = cost + max(0.0, durable - cost - seconds)
    lost = waste(
        seconds,
        blocking,
        run.mtbf_seconds,
        run.restart_seconds + restore,
        max(0.0, durable - blocking),
    )
    return Strategy(name, steps, size, blocking, durable, restore, lost)


def _whole(
    rates: Rates,
    machine: Machine,
    run: PlannedRun,
    capture: float,
    deltas: Strategy,
    interval_steps: int | None = None,
) -> tuple[Strategy, ...]:
    """Return the strategies that deltas are compared with: whole checkpoints of the raw state.

    Two of them have the given interval, or each its own best one. The third has the interval at
    which whole checkpoints take as many bytes as the deltas.
    """
    state = rates.state_bytes
    writing = state / machine.write
    # A whole checkpoint is not decoded, only copied into place.
    restore = state / machine.read + state / run.processes / machine.copy
    asynchronous_steps = interval_steps or max(
        _best_steps(daly_interval(capture, run.mtbf_seconds), run.step_seconds),
        math.ceil((capture + writing) / run.step_seconds),
    )
    best_synchronous_steps = _best_steps(daly_interval(writing, run.mtbf_seconds), run.step_seconds)
    # Equal bytes per step: a checkpoint that is n times larger may be written every n intervals.
    equal_bytes_steps = max(1, round(deltas.interval_steps * state / deltas.bytes))
    return (
        _strategy(
            "whole, written behind training",
            asynchronous_steps,
            state,
            capture,
            capture + writing,
            restore,
            run,
        ),
        _strategy(
            "whole, training waits",
            interval_steps or best_synchronous_steps,
            state,
            writing,
            writing,
            restore,
            run,
        ),
        _strategy(
            "whole, as many bytes as the deltas",
            equal_bytes_steps,
            state,
            capture,
            capture + writing,
            restore,
            run,
        ),
    )


def _reasons(
    rates: Rates,
    projected: Rates,
    machine: Machine,
    deltas: Strategy,
    baselines: Sequence[Strategy],
    depth: int,
    encode: float,
) -> tuple[str, ...]:
    """Return the reasons for or against deltas in words, with their numbers."""
    factor = projected.interval_steps / rates.interval_steps
    reasons = [
        *_reasons_of_bytes(rates, projected, machine, deltas, depth, encode),
        *_reasons_of_time(deltas, baselines),
    ]
    # The laws of growth were measured within a factor of four, see size-an-interval.md.
    if not 0.25 <= factor <= 4:
        reasons.append(
            f"the saves that were observed have an interval of {rates.interval_steps:g}, not of"
            f" {projected.interval_steps:g} steps: the bytes are an extrapolation"
        )
    return tuple(reasons)


def _reasons_of_bytes(
    rates: Rates, projected: Rates, machine: Machine, deltas: Strategy, depth: int, encode: float
) -> list[str]:
    state = projected.state_bytes
    share, delta_share = deltas.bytes / state, delta_bytes(projected) / state
    writing = state / machine.write
    density = sum(leaf.raw_bytes * leaf.density for leaf in projected.leaves) / state
    reasons = [
        f"a checkpoint takes {share:.1%} of the state in the mean ({delta_share:.1%} without"
        f" keyframes, depth {depth})"
    ]
    if share > PAYS_SHARE:
        reasons.append(
            f"that is more than {PAYS_SHARE:.0%}: {density:.0%} of the bytes lie in words that"
            " change between two checkpoints"
        )
    if delta_share > 0.9 and projected.interval_steps > rates.interval_steps:
        reasons.append(
            f"{projected.interval_steps:g} steps are so long that nearly everything has changed:"
            " a delta is as large as a whole leaf"
        )
    if encode >= writing:
        reasons.append(
            f"the storage is faster than the encoder: comparing and compressing takes {encode:.3g}"
            f" s, writing everything whole {writing:.3g} s"
        )
    if depth == 0:
        reasons.append("the restore limit leaves no room for a delta: every checkpoint is whole")
    return reasons


def _reasons_of_time(deltas: Strategy, baselines: Sequence[Strategy]) -> list[str]:
    asynchronous, equal_bytes = baselines[0], baselines[2]
    best = min(baselines[:2], key=lambda way: way.waste)
    if deltas.waste >= 0.99 * best.waste:
        reason = (
            f"no time is saved: {deltas.waste:.3%} is lost with deltas, {best.waste:.3%} without"
            f" ({best.name})"
        )
    else:
        reason = (
            f"{deltas.waste:.3%} of the time is lost with deltas, {asynchronous.waste:.3%} with"
            " whole checkpoints written behind training"
        )
    return [
        reason,
        f"whole checkpoints of as many bytes would come every {equal_bytes.interval_steps} steps"
        f" instead of {deltas.interval_steps}, and a failure would lose"
        f" {equal_bytes.interval_steps / 2:g} steps instead of {deltas.interval_steps / 2:g} in"
        " the mean",
    ]
