"""What the evidence says: one judgement for each of the four workflows, as pure functions. Only
these decide the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltacheck.evaluate import significance as statistics
from deltacheck.evaluate.contract import differences
from deltacheck.evaluate.records import Ending, Evidence, Recovery, Saved
from deltacheck.evaluate.significance import (
    EQUAL,
    OUTSIDE,
    TOO_FEW,
    WITHIN,
    Curve,
    Equivalence,
    Spread,
)

MOST_NAMED = 20  # leaves that a reason names; the records have them all


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes. ``first``: of the first save over its peer's file; ``later``: of the others, each over
    its own peer's; ``of_raw``: over the state.
    """

    raw_bytes: int
    peer_bytes: int
    first_bytes: int
    first: float
    later_bytes: Spread
    later: Spread
    of_raw: Spread


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of the saves after the first one, which makes the copy that later ones are compared
    with. Ratios: of pairs of the same state.
    """

    blocking_seconds: Spread
    durable_seconds: Spread
    peer_seconds: Spread
    blocking: Spread
    durable: Spread
    first_blocking_seconds: float


@dataclass(frozen=True, slots=True)
class Correctness:
    """Whether the killed runs came back. ``held`` of ``trials``, a rate of at least ``least_rate``
    at
    95 % confidence. ``reasons``: what did not.

    ``deterministic``: whether the unkilled run repeats bit for bit; only then can the way after a
    restore be compared in bits. ``equal_endings``: resumed runs with every loss and the final state
    equal in bits to the unkilled run's. ``repeat_gap``: by how much the repeat ended elsewhere.
    ``inexact_leaves``: of all recoveries together, that were promised less than every bit.
    ``lost_steps``, ``restore_seconds``: of the recoveries that came back, ``None`` where none did.
    """

    holds: bool
    held: int
    trials: int
    least_rate: float
    deterministic: bool
    equal_endings: int
    repeat_gap: float
    inexact_leaves: int
    lost_steps: Spread | None
    restore_seconds: Spread | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """Whether the models are as good. ``holds``: as ``Equivalence`` says, ``equal`` or ``within``.
    ``reason``: where not, why.
    """

    holds: bool
    final: Equivalence
    curves: tuple[Curve, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of the whole evaluation. ``holds``: recovery is correct and, where not every bit was
    promised, the quality is shown to be the same.
    """

    holds: bool
    size: Size
    latency: Latency
    correctness: Correctness
    quality: Quality
    reasons: tuple[str, ...]


def judge(evidence: Evidence) -> Judgement:
    """REQUIRES: at least two saves, and one recovery."""
    correct, good = correctness(evidence), quality(evidence)
    reasons = correct.reasons
    if evidence.plan.policy != "exact" and not good.holds:
        reasons += (good.reason,)
    return Judgement(
        not reasons, size(evidence.saves), latency(evidence.saves), correct, good, reasons
    )


def size(saves: Sequence[Saved]) -> Size:
    first, *later = saves
    return Size(
        first.raw_bytes,
        first.peer_bytes,
        first.stored_bytes,
        first.stored_bytes / first.peer_bytes,
        statistics.spread([save.stored_bytes for save in later]),
        statistics.spread([save.stored_bytes / save.peer_bytes for save in later]),
        statistics.spread([save.stored_bytes / save.raw_bytes for save in later]),
    )


def latency(saves: Sequence[Saved]) -> Latency:
    first, *later = saves
    return Latency(
        statistics.spread([save.blocking_seconds for save in later]),
        statistics.spread([save.durable_seconds for save in later]),
        statistics.spread([save.peer_seconds for save in later]),
        statistics.spread([save.blocking_seconds / save.peer_seconds for save in later]),
        statistics.spread([save.durable_seconds / save.peer_seconds for save in later]),
        first.blocking_seconds,
    )


# --- recovery -------------------------------------------------------------------------------------


def correctness(evidence: Evidence) -> Correctness:
    unkilled = {ending.seed: ending for ending in evidence.unkilled}
    reference = unkilled[evidence.plan.first_seed]
    deterministic = not _apart(evidence.repeat, reference)
    reasons = []
    if deterministic and (gap := _apart(evidence.saving, reference)):
        reasons.append(
            f"saving changes the training: {gap}; an evaluation of a run that is not saved says"
            " nothing of one that is"
        )
    found = [
        problems(recovery, unkilled[recovery.kill.seed], deterministic)
        for recovery in evidence.recoveries
    ]
    reasons += [
        f"{recovery.kill.name}: {problem}"
        for recovery, some in zip(evidence.recoveries, found, strict=True)
        for problem in some
    ]
    held = sum(not some for some in found)
    back = [recovery for recovery in evidence.recoveries if recovery.ending is not None]
    return Correctness(
        not reasons,
        held,
        len(found),
        statistics.least_rate(held, len(found)),
        deterministic,
        sum(
            recovery.ending is not None
            and not _apart(recovery.ending, unkilled[recovery.kill.seed])
            for recovery in back
        ),
        abs(evidence.repeat.evaluation - reference.evaluation),
        sum(len(recovery.inexact) for recovery in evidence.recoveries),
        statistics.spread([recovery.lost_steps for recovery in back]) if back else None,
        statistics.spread([recovery.restore_seconds for recovery in back]) if back else None,
        tuple(reasons),
    )


def problems(recovery: Recovery, unkilled: Ending, deterministic: bool) -> list[str]:
    """What does not hold of one recovery, each leaf by name."""
    if recovery.ending is None:
        return [recovery.error or "it did not come back"]
    found = []
    if recovery.restored_step < recovery.acknowledged_step:
        found.append(
            f"step {recovery.acknowledged_step} was reported durable, and is gone: step"
            f" {recovery.restored_step} is the newest"
        )
    step = recovery.restored_step
    found += [
        f"step {step}, leaf {leaf.path!r} ({leaf.contract}): {leaf.problem}"
        for leaf in recovery.failed[:MOST_NAMED]
    ]
    if len(recovery.failed) > MOST_NAMED:
        found.append(
            f"and {len(recovery.failed) - MOST_NAMED} more leaves of step {step}; --json names all"
        )
    if recovery.not_put_back:
        found.append(
            "the workload's load() does not put back what was restored:"
            f" {_named(recovery.not_put_back)}"
        )
    # Where every leaf came back bit for bit, and the run repeats bit for bit, what is left to
    # differ is not in the state.
    exact = not (recovery.failed or recovery.inexact or recovery.not_put_back)
    if exact and deterministic and (gap := _apart(recovery.ending, unkilled)):
        found.append(
            f"all of step {step} came back, yet {gap}: something that decides how the run goes on"
            " is not in its state()"
        )
    return found


def _apart(one: Ending, other: Ending) -> str:
    """Where a run goes another way than another run of the same seed does, in words; empty where
    all bits are equal.
    """
    gap = statistics.curve(one.losses, other.losses, ()).first_gap
    if gap is not None:
        return (
            f"the loss of step {gap} is {one.losses[gap]!r}, {other.losses[gap]!r} without the kill"
        )
    wrong = differences(one.digests, other.digests)
    if wrong:
        return f"the last state differs in {_named(wrong)}"
    if repr(one.evaluation) != repr(other.evaluation):
        return f"the evaluation gives {one.evaluation!r}, {other.evaluation!r} without the kill"
    return ""


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(paths[:MOST_NAMED]) + more


# --- quality --------------------------------------------------------------------------------------


def quality(evidence: Evidence) -> Quality:
    unkilled = {ending.seed: ending for ending in evidence.unkilled}
    differences_by_seed: dict[int, list[float]] = {}
    curves = []
    others = [ending.losses for ending in evidence.unkilled]
    for recovery in evidence.recoveries:
        seed, ending = recovery.kill.seed, recovery.ending
        if ending is None:
            continue
        differences_by_seed.setdefault(seed, []).append(
            ending.evaluation - unkilled[seed].evaluation
        )
        curves.append(statistics.curve(ending.losses, unkilled[seed].losses, others))
    final = statistics.equivalence(
        differences_by_seed, [ending.evaluation for ending in evidence.unkilled]
    )
    return Quality(final.verdict in (EQUAL, WITHIN), final, tuple(curves), _words(final))


def _words(final: Equivalence) -> str:
    """Why equivalence is not shown; empty where it is."""
    about = (
        f"the final loss differs by {final.mean:+.3g} (90 % interval {final.low:+.3g} to"
        f" {final.high:+.3g}), noise is {final.margin:.3g} at most"
    )
    if final.verdict == OUTSIDE:
        return f"resumed runs end elsewhere: {about}"
    if final.verdict != TOO_FEW:
        return ""
    if not final.seeds:
        return "no killed run came to its end"
    if final.noise_seeds < statistics.LEAST_NOISE_SEEDS:
        return (
            f"not enough seeds to tell: a noise floor takes {statistics.LEAST_NOISE_SEEDS} unkilled"
            f" ones, not {final.noise_seeds}; {about}"
        )
    wanted = (
        f", about {final.needed} would"
        if final.needed is not None and final.needed > final.seeds
        else ""
    )
    return f"not enough seeds to tell: {about}; {final.seeds} killed ones do not tell{wanted}"
