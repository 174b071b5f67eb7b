"""What checkpoints will cost, before they are made: bytes, blocking and restore time, the best
interval, and whether deltas pay at all.

Pure functions over frozen records. Every formula, its source and when it holds:
``docs/explanation/planning.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deltacheck.leaf.contracts import Bounded, Reused
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.policy.presets import RESTORE_RATIO
from deltacheck.profile.record import LeafProfile, Profile

# How what changes grows with the steps between two checkpoints; fitted to our own runs, see
# planning.md.
_SPREAD_EXPONENT = (
    0.65  # of a share of changed words: fewer than in proportion, as the same words change again
)
# Of a leaf in which nearly every word changed: the differences double, and need a bit more each
_BITS_PER_DOUBLING = 1.0
_DENSE = 0.5  # share of changed words from which the second law holds

_ROW_BYTES = 64  # of tables for each chunk: a row of the index, its digest, their share of metadata
_LEAF_BYTES = 300  # of tables for each leaf: its entries in the manifest and in the segment's table
_CHUNK_BYTES = 1 << 20

PAYS_SHARE = 0.7  # deltas save bytes where a checkpoint takes at most this share of a whole one


@dataclass(frozen=True, slots=True)
class LeafRate:
    """What one leaf, or leaves alike, cost a save.

    ``density``: changed words / words between two checkpoints. ``delta_bytes``: stored for the
    change. ``key_bytes``: stored for the whole leaf.
    """

    raw_bytes: int
    word_bytes: int
    density: float
    delta_bytes: float
    key_bytes: float


@dataclass(frozen=True, slots=True)
class Rates:
    """A state as it was observed, ``interval_steps`` apart. ``tables_bytes``: of manifest, tables,
    indexes and digests of each save.
    """

    interval_steps: float
    leaves: tuple[LeafRate, ...]
    tables_bytes: float

    @property
    def state_bytes(self) -> int:
        return sum(leaf.raw_bytes for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes per second. ``write``, ``read``: of the storage, all processes together. The others are
    of
    one process.

    ``encode``: of state, compared and compressed; ``apply``: of state that deltas are applied to;
    ``copy``: of memory that a capture copies.
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
class Run:
    """A training. ``mtbf_seconds``: mean time between failures of the whole job, whatever its size;
    ``restart_seconds``: from a failure until the restore begins; ``processes``: among which the
    state is divided evenly.
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
class Way:
    """One way to checkpoint, at one interval.

    ``bytes``: of a checkpoint in the mean. ``blocking_seconds``: that training loses to each.
    ``durable_seconds``: from the call until it survives. ``restore_seconds``: reading and decoding.
    ``waste``: share of the time that is not progress.
    """

    name: str
    interval_steps: int
    bytes: float
    blocking_seconds: float
    durable_seconds: float
    restore_seconds: float
    waste: float


@dataclass(frozen=True, slots=True)
class Plan:
    """``ways``: deltas first, then what they are compared with. ``keyframe_bytes``,
    ``delta_bytes``:
    of a checkpoint that is all the one or all the other. ``young_seconds``, ``daly_seconds``: best
    intervals for the deltas' cost. ``read_bytes``: of the longest restore. ``reasons``: why deltas
    pay or not, with the numbers.
    """

    ways: tuple[Way, ...]
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


# --- the interval ---------------------------------------------------------------------------------


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of work between checkpoints that waste least, to first order: ``sqrt(2 C M)``. Holds
    for
    C much smaller than M.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of
    the ACM 17(9), 1974.
    """
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


def daly_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """The same to higher order: ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C`` for C < 2M,
    else
    M.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006. Failures are a Poisson process: independent of
    each other, at a constant rate.
    """
    ratio = cost_seconds / (2 * mtbf_seconds)
    if ratio >= 1:
        return mtbf_seconds
    return (
        young_interval(cost_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
        - cost_seconds
    )


def waste(
    interval_seconds: float,
    cost_seconds: float,
    mtbf_seconds: float,
    restart_seconds: float = 0.0,
    lag_seconds: float = 0.0,
) -> float:
    """Share of wall time that is not progress, by Daly's model of the run time (2006), ``M e^(R/M)
    (e^((t+C)/M) - 1) / t`` a second of work.

    ``lag_seconds``: how long a checkpoint is not yet durable while training goes on; a failure
    loses that much more, ``lag / M`` to first order. 1 where nothing would get done.
    """
    attempt = (interval_seconds + cost_seconds) / mtbf_seconds
    restart = restart_seconds / mtbf_seconds
    if attempt + restart > 700:  # e^700 is the largest that a float holds
        return 1.0
    useful = interval_seconds / (mtbf_seconds * math.exp(restart) * math.expm1(attempt))
    return min(1.0, 1 - useful + lag_seconds / mtbf_seconds)


# --- the chain ------------------------------------------------------------------------------------


def mean_chain(max_chain_depth: int) -> float:
    """Deltas between two keyframes of a leaf, in the mean over leaves: limits are staggered between
    half of ``max_chain_depth`` and all of it.
    """
    spread = max_chain_depth // 2
    return max_chain_depth - (spread - 1) / 2 if spread else float(max_chain_depth)


def depth_for(
    *,
    max_reads: int | None = None,
    max_bytes: float | None = None,
    max_seconds: float | None = None,
    keyframe_bytes: float = 0.0,
    delta_bytes: float = 0.0,
    keyframe_seconds: float = 0.0,
    delta_seconds: float = 0.0,
    most: int = 1024,
) -> int:
    """The largest ``max_chain_depth`` that keeps the longest restore within every limit given; at
    most
    ``most``.

    A restore reads a keyframe and then every delta: ``1 + depth`` reads of a leaf, ``keyframe +
    depth * delta`` bytes and seconds. Larger limits: fewer keyframes to write, longer restores.
    Raises ``ValueError`` where a keyframe alone is over a limit.
    """
    depth = float(most)
    for what, limit, first, each in (
        ("reads", max_reads, 1.0, 1.0),
        ("bytes", max_bytes, keyframe_bytes, delta_bytes),
        ("seconds", max_seconds, keyframe_seconds, delta_seconds),
    ):
        if limit is None:
            continue
        if first > limit:
            raise ValueError(
                f"a restore takes {first:.6g} {what} without any delta, more than the {limit:.6g}"
                " that it may take"
            )
        if each > 0:
            depth = min(depth, (limit - first) / each)
    return math.floor(depth + 1e-9)  # a limit that is met exactly is met


# --- bytes ----------------------------------------------------------------------------------------


def at_interval(rates: Rates, interval_steps: float) -> Rates:
    """What the same state would show ``interval_steps`` apart: an extrapolation, see planning.md
    for how well it was met.
    """
    times = interval_steps / rates.interval_steps
    return replace(
        rates,
        interval_steps=interval_steps,
        leaves=tuple(_leaf_at(leaf, times) for leaf in rates.leaves),
    )


def _leaf_at(leaf: LeafRate, times: float) -> LeafRate:
    if leaf.density <= 0 or times == 1:
        return leaf
    most = max(leaf.key_bytes, leaf.delta_bytes)
    if leaf.density >= _DENSE:
        more = leaf.raw_bytes / leaf.word_bytes * _BITS_PER_DOUBLING * math.log2(times) / 8
        return replace(
            leaf, delta_bytes=min(most, max(leaf.delta_bytes / 8, leaf.delta_bytes + more))
        )
    density = -math.expm1(times**_SPREAD_EXPONENT * math.log1p(-leaf.density))
    return replace(
        leaf, density=density, delta_bytes=min(most, leaf.delta_bytes * density / leaf.density)
    )


def keyframe_bytes(rates: Rates) -> float:
    return sum(leaf.key_bytes for leaf in rates.leaves) + rates.tables_bytes


def delta_bytes(rates: Rates) -> float:
    return sum(leaf.delta_bytes for leaf in rates.leaves) + rates.tables_bytes


def mean_bytes(rates: Rates, max_chain_depth: int, max_restore_ratio: float | None = None) -> float:
    """Of a checkpoint, keyframes amortised. A leaf that never changes is never written again."""
    chain = mean_chain(max_chain_depth)
    total = rates.tables_bytes
    for leaf in (leaf for leaf in rates.leaves if leaf.density > 0):
        within = [
            _chain_within(leaf, max_restore_ratio, share)
            for share in (0.5625, 0.6875, 0.8125, 0.9375)
        ]
        deltas = min(chain, sum(within) / len(within))
        total += (leaf.key_bytes + deltas * leaf.delta_bytes) / (deltas + 1)
    return total


def _chain_within(leaf: LeafRate, max_restore_ratio: float | None, share: float = 1.0) -> float:
    """Deltas that reach a share of the ratio, which is staggered between half of it and all. A
    changed
    word takes its own bytes and one for its place, and a dense delta no more than the leaf.
    """
    held = min(1.0, leaf.density * (1 + 1 / leaf.word_bytes))
    return (
        math.inf
        if max_restore_ratio is None or not held
        else math.ceil(share * max_restore_ratio / held)
    )


def code_bits(spread: float) -> float:
    """Bits an element that a change of codes takes. ``spread``: root mean square change / spacing
    of
    the codes.

    Below one spacing a code with a random phase changes with the probability ``E|change| /
    spacing``, 0.8 ``spread`` for a normal change: its entropy and a sign. Above, the entropy of a
    quantised normal variable, ``log2(spread sqrt(2 pi e))``.
    """
    if spread <= 0:
        return 0.0
    p = min(1.0, math.sqrt(2 / math.pi) * spread)
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) if p < 1 else 0.0
    return max(entropy + p, math.log2(spread * math.sqrt(2 * math.pi * math.e)))


def from_profile(profile: Profile, *, exact: bool = True) -> Rates:
    """What a profile says of the cost of a save. ``exact``: every bit is kept; else under the
    contracts that the profile recommends.

    Keyframes count as raw: a profile does not say how well they compress. Raises ``ValueError`` for
    a profile without leaves.
    """
    if not profile.leaves:
        raise ValueError("the profile has no leaves; observe the run at two steps at least")
    leaves = tuple(
        _leaf_rate(leaf, profile.interval_steps, exact) for leaf in profile.leaves.values()
    )
    raw = sum(leaf.raw_bytes for leaf in leaves)
    return Rates(
        profile.interval_steps, leaves, len(leaves) * _LEAF_BYTES + raw / _CHUNK_BYTES * _ROW_BYTES
    )


def _leaf_rate(leaf: LeafProfile, interval_steps: int, exact: bool) -> LeafRate:
    element = dtype_named(leaf.dtype)
    count = math.prod(leaf.shape)
    raw = count * element.item_bytes
    density = _last(leaf.density.values)
    lossless = LeafRate(
        raw, element.word_bytes, density, count * leaf.exact_bytes if density > 0 else 0.0, raw
    )
    if exact:
        return lossless
    if leaf.derived_from:
        return replace(lossless, density=0.0, delta_bytes=0.0, key_bytes=0.0)
    terms = leaf.recommended
    if isinstance(terms, Bounded) and terms.norm == leaf.drift_unit and terms.limit > 0:
        spread = _last(leaf.drift.values) / (2 * terms.limit)
        bits = code_bits(spread)
        changed = min(1.0, math.sqrt(2 / math.pi) * spread)
        return replace(
            lossless, density=changed, delta_bytes=min(count * bits / 8, lossless.delta_bytes)
        )
    if isinstance(terms, Reused) and leaf.refresh_steps:
        # Written whole, or as a delta that is as large as a whole, once in as many steps.
        return replace(
            lossless,
            delta_bytes=lossless.delta_bytes * min(1.0, interval_steps / leaf.refresh_steps),
        )
    return lossless


def _last(values: Sequence[float]) -> float:
    """The median of the newest three: how a leaf behaves by now."""
    newest = sorted(value for value in values[-3:] if math.isfinite(value))
    return newest[len(newest) // 2] if newest else 0.0


def scaled(rates: Rates, state_bytes: int) -> Rates:
    """The same kind of state in another size."""
    times = state_bytes / rates.state_bytes
    leaves = tuple(
        replace(
            leaf,
            raw_bytes=round(leaf.raw_bytes * times),
            delta_bytes=leaf.delta_bytes * times,
            key_bytes=leaf.key_bytes * times,
        )
        for leaf in rates.leaves
    )
    return replace(rates, leaves=leaves, tables_bytes=rates.tables_bytes * times)


# --- the plan -------------------------------------------------------------------------------------


def plan(
    rates: Rates,
    machine: Machine,
    run: Run,
    *,
    max_chain_depth: int = 32,
    max_restore_ratio: float | None = RESTORE_RATIO,
    max_restore_seconds: float | None = None,
    interval_steps: int | None = None,
) -> Plan:
    """Predict. ``interval_steps``: judge this interval, else find the best. ``max_chain_depth``,
    ``max_restore_ratio``: as ``Policy`` has them. ``max_restore_seconds``: shorten the chain until
    it is met.

    Raises ``ValueError`` where not even a keyframe can be restored in ``max_restore_seconds``.
    """
    state = rates.state_bytes
    if not state:
        raise ValueError("the state has no bytes; there is nothing to plan for")
    capture = state / run.processes / machine.copy
    encode = state / run.processes / machine.encode
    young, daly = (
        young_interval(capture, run.mtbf_seconds),
        daly_interval(capture, run.mtbf_seconds),
    )

    def durable(steps: float) -> float:
        return capture + max(
            encode,
            mean_bytes(at_interval(rates, steps), max_chain_depth, max_restore_ratio)
            / machine.write,
        )

    steps = interval_steps or _best_steps(daly, run.step_seconds)
    while interval_steps is None and durable(steps) > steps * run.step_seconds:
        # Saves that are slower than their interval wait for each other: the storage or the
        # processor sets the interval.
        steps = max(steps + 1, math.ceil(durable(steps) / run.step_seconds))
    here = at_interval(rates, steps)
    depth = max_chain_depth
    if max_restore_seconds is not None:
        base, longest = (
            restore_seconds(here, machine, run, n, max_restore_ratio) for n in (0, max_chain_depth)
        )
        if longest > max_restore_seconds:
            each = restore_seconds(here, machine, run, 1) - base
            depth = depth_for(
                max_seconds=max_restore_seconds,
                keyframe_seconds=base,
                delta_seconds=each,
                most=max_chain_depth,
            )
    stored = mean_bytes(here, depth, max_restore_ratio)
    lag = capture + max(encode, stored / machine.write)
    deltas = _way(
        "deltas",
        steps,
        stored,
        capture,
        lag,
        restore_seconds(here, machine, run, depth, max_restore_ratio),
        run,
    )
    others = _whole(here, machine, run, capture, deltas)
    saves_bytes = stored <= PAYS_SHARE * keyframe_bytes(here)
    saves_time = deltas.waste < 0.99 * min(way.waste for way in others[:2])
    return Plan(
        ways=(deltas, *others),
        state_bytes=state,
        keyframe_bytes=keyframe_bytes(here),
        delta_bytes=delta_bytes(here),
        max_chain_depth=depth,
        read_bytes=_read_bytes(here, depth, max_restore_ratio),
        young_seconds=young,
        daly_seconds=daly,
        saves_bytes=saves_bytes,
        saves_time=saves_time,
        reasons=_reasons(rates, here, machine, run, deltas, others, depth, encode),
    )


def restore_seconds(
    rates: Rates, machine: Machine, run: Run, depth: int, max_restore_ratio: float | None = None
) -> float:
    """Of the longest restore: reading keyframe and deltas, and decoding them: every word of a
    keyframe, the changed ones of a delta.
    """
    reading = _read_bytes(rates, depth, max_restore_ratio) / machine.read
    deltas = sum(
        min(depth, _chain_within(leaf, max_restore_ratio)) * leaf.raw_bytes * leaf.density
        for leaf in rates.leaves
    )
    return reading + (rates.state_bytes + deltas) / run.processes / machine.apply


def _read_bytes(rates: Rates, depth: int, max_restore_ratio: float | None) -> float:
    """Of the longest restore."""
    deltas = sum(
        min(depth, _chain_within(leaf, max_restore_ratio)) * leaf.delta_bytes
        for leaf in rates.leaves
    )
    return keyframe_bytes(rates) + deltas + depth * rates.tables_bytes


def _best_steps(interval_seconds: float, step_seconds: float) -> int:
    return max(1, round(interval_seconds / step_seconds))


def _way(
    name: str, steps: int, size: float, cost: float, durable: float, restore: float, run: Run
) -> Way:
    """``cost``: what blocks training, without waiting for the save before. Saves slower than their
    interval block for the rest.
    """
    seconds = steps * run.step_seconds
    blocking = cost + max(0.0, durable - cost - seconds)
    lost = waste(
        seconds,
        blocking,
        run.mtbf_seconds,
        run.restart_seconds + restore,
        max(0.0, durable - blocking),
    )
    return Way(name, steps, size, blocking, durable, restore, lost)


def _whole(here: Rates, machine: Machine, run: Run, capture: float, deltas: Way) -> tuple[Way, ...]:
    """What deltas are compared with: whole checkpoints of the raw state, each at its best interval,
    and as many as take the same bytes.
    """
    state = here.state_bytes
    writing = state / machine.write
    restore = state / machine.read + state / run.processes / machine.copy
    behind = max(
        _best_steps(daly_interval(capture, run.mtbf_seconds), run.step_seconds),
        math.ceil((capture + writing) / run.step_seconds),
    )
    ahead = _best_steps(daly_interval(writing, run.mtbf_seconds), run.step_seconds)
    fewer = max(1, round(deltas.interval_steps * state / deltas.bytes))
    return (
        _way(
            "whole, written behind training",
            behind,
            state,
            capture,
            capture + writing,
            restore,
            run,
        ),
        _way("whole, training waits", ahead, state, writing, writing, restore, run),
        _way(
            "whole, as many bytes as the deltas",
            fewer,
            state,
            capture,
            capture + writing,
            restore,
            run,
        ),
    )


def _reasons(
    rates: Rates,
    here: Rates,
    machine: Machine,
    run: Run,
    deltas: Way,
    others: Sequence[Way],
    depth: int,
    encode: float,
) -> tuple[str, ...]:
    whole, fewer = others[0], others[2]
    state = here.state_bytes
    share, delta_share = (
        deltas.bytes / keyframe_bytes(here),
        delta_bytes(here) / keyframe_bytes(here),
    )
    writing = state / machine.write
    density = sum(leaf.raw_bytes * leaf.density for leaf in here.leaves) / state
    found = [
        f"a checkpoint takes {share:.1%} of a whole one in the mean ({delta_share:.1%} without"
        f" keyframes, depth {depth})"
    ]
    if share > PAYS_SHARE:
        found.append(
            f"that is more than {PAYS_SHARE:.0%}: {density:.0%} of the bytes lie in words that"
            " change between two checkpoints"
        )
    if delta_share > 0.9 and here.interval_steps > rates.interval_steps:
        found.append(
            f"{here.interval_steps:g} steps are so long that nearly everything has changed: a delta"
            " is as large as a whole leaf"
        )
    if encode >= writing:
        found.append(
            f"the storage is faster than the encoder: comparing and compressing takes {encode:.3g}"
            f" s, writing everything whole {writing:.3g} s"
        )
    if depth == 0:
        found.append("the restore limit leaves no room for a delta: every checkpoint is whole")
    if deltas.waste >= 0.99 * min(way.waste for way in others[:2]):
        best = min(others[:2], key=lambda way: way.waste)
        found.append(
            f"no time is saved: {deltas.waste:.3%} is lost with deltas, {best.waste:.3%} without"
            f" ({best.name})"
        )
    else:
        found.append(
            f"{deltas.waste:.3%} of the time is lost with deltas, {whole.waste:.3%} with whole"
            " checkpoints written behind training"
        )
    found.append(
        f"whole checkpoints of as many bytes would come every {fewer.interval_steps} steps instead"
        f" of {deltas.interval_steps}, and a failure would lose {fewer.interval_steps / 2:g} steps"
        f" instead of {deltas.interval_steps / 2:g} in the mean"
    )
    times = here.interval_steps / rates.interval_steps
    if not 0.25 <= times <= 4:
        found.append(
            f"observed were {rates.interval_steps:g} steps, not {here.interval_steps:g}: the bytes"
            " are an extrapolation"
        )
    return tuple(found)
