"""Judgement of the evidence: size, latency, recovery and quality, as pure functions.

Only these decide the exit code. The names of the fields are keys of the JSON that `deltacheck eval`
prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltacheck.evaluate import significance as statistics
from deltacheck.evaluate.comparison.contract import differences
from deltacheck.evaluate.records import Ending, Evidence, MeasuredSave, Recovery
from deltacheck.evaluate.significance import (
    EQUAL,
    OUTSIDE,
    TOO_FEW,
    WITHIN,
    CurveComparison,
    Equivalence,
    Spread,
)

MOST_NAMED = 20  # leaves that a reason names; the records contain all


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of the saves.

    ``first``: the first save over its peer's file. ``later``: the others, each over its own peer's
    file. ``of_raw``: the others over the state.
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
    """Seconds of the saves after the first one, which creates the copy that deltas are taken from.

    ``blocking`` and ``durable``: ratios to the peer's seconds, paired by state.
    """

    blocking_seconds: Spread
    durable_seconds: Spread
    peer_seconds: Spread
    blocking: Spread
    durable: Spread
    first_blocking_seconds: float


@dataclass(frozen=True, slots=True)
class Correctness:
    """The recovery of the killed runs.

    ``held`` of ``trials`` recoveries are correct, a rate of at least ``least_rate`` at 95 %
    confidence. ``deterministic``: the unkilled run repeats bit for bit; only then can the training
    after a restore be compared in bits. ``equal_endings``: resumed runs whose every loss and final
    state equal the unkilled run's in bits. ``repeat_gap``: between the evaluations of the repeat
    and of the first run. ``inexact_leaves``: of all recoveries together, leaves that were promised
    less than every bit. ``lost_steps``, ``restore_seconds``: of the runs that recovered, ``None``
    if there are none. ``reasons``: descriptions of the failures.
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
    exercised: tuple[str, ...] = ()
    unexercised: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of the resumed models.

    ``holds``: the verdict of ``Equivalence`` is ``equal`` or ``within``. ``reason``: why it is not.
    ``missing_steps``: the progress that resumed runs lack after their first interval, in steps;
    ``None`` if it was not measured.
    """

    holds: bool
    final: Equivalence
    curves: tuple[CurveComparison, ...]
    reason: str
    missing_steps: Spread | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of the whole evaluation.

    ``holds``: recovery is correct and, if not every bit was promised, the quality is shown to be
    the same. ``is_undecided``: nothing was found to be wrong, but the seeds are too few to tell the
    quality.
    """

    holds: bool
    is_undecided: bool
    size: Size
    latency: Latency
    correctness: Correctness
    quality: Quality
    reasons: tuple[str, ...]


def judge(evidence: Evidence) -> Judgement:
    """Judge the evidence, which must contain at least two saves and one recovery."""
    recovery, models = correctness(evidence), quality(evidence)
    reasons = recovery.reasons
    # Under an exact policy the bits decide. A statement about quality would only repeat them with
    # less certainty.
    if not evidence.plan.is_lossless and not models.holds:
        reasons += (models.reason,)
    is_undecided = reasons == (models.reason,) and models.final.verdict == TOO_FEW
    sizes, times = size(evidence.saves), latency(evidence.saves)
    return Judgement(not reasons, is_undecided, sizes, times, recovery, models, reasons)


def size(saves: Sequence[MeasuredSave]) -> Size:
    """Compare the bytes of at least two saves with those of the peer."""
    # The first save writes every leaf whole and would hide what later ones cost.
    first, *later_saves = saves
    return Size(
        first.raw_bytes,
        first.peer_bytes,
        first.stored_bytes,
        first.stored_bytes / first.peer_bytes,
        statistics.spread([save.stored_bytes for save in later_saves]),
        statistics.spread([save.stored_bytes / save.peer_bytes for save in later_saves]),
        statistics.spread([save.stored_bytes / save.raw_bytes for save in later_saves]),
    )


def latency(saves: Sequence[MeasuredSave]) -> Latency:
    """Compare the seconds of at least two saves with those of the peer."""
    first, *later_saves = saves
    return Latency(
        statistics.spread([save.blocking_seconds for save in later_saves]),
        statistics.spread([save.durable_seconds for save in later_saves]),
        statistics.spread([save.peer_seconds for save in later_saves]),
        statistics.spread([save.blocking_seconds / save.peer_seconds for save in later_saves]),
        statistics.spread([save.durable_seconds / save.peer_seconds for save in later_saves]),
        first.blocking_seconds,
    )


# --- recovery -------------------------------------------------------------------------------------


def correctness(evidence: Evidence) -> Correctness:
    """Judge every recovery, and that saving does not change the training."""
    unkilled = {ending.seed: ending for ending in evidence.unkilled}
    reference = unkilled[evidence.plan.first_seed]
    # A run that does not repeat itself may differ for reasons that no checkpoint can remove.
    deterministic = not _difference(evidence.repeat, reference)
    reasons = []
    if deterministic and (gap := _difference(evidence.saving, reference)):
        reasons.append(
            f"saving changes the training: {gap}; an evaluation of a run that is not saved says"
            " nothing of one that is"
        )
    correct = 0
    for recovery in evidence.recoveries:
        problem_list = problems(recovery, unkilled[recovery.kill.seed], deterministic)
        reasons += [f"{recovery.name}: {problem}" for problem in problem_list]
        correct += not problem_list
    exercised, unexercised, untested = _exercise(evidence)
    reasons += untested
    recovered = [recovery for recovery in evidence.recoveries if recovery.ending is not None]
    return Correctness(
        not reasons,
        correct,
        len(evidence.recoveries),
        statistics.least_rate(correct, len(evidence.recoveries)),
        deterministic,
        sum(
            recovery.ending is not None
            and not _difference(recovery.ending, unkilled[recovery.kill.seed])
            for recovery in recovered
        ),
        abs(evidence.repeat.evaluation - reference.evaluation),
        sum(len(recovery.inexact) for recovery in evidence.recoveries),
        statistics.spread([recovery.lost_steps for recovery in recovered]) if recovered else None,
        statistics.spread([recovery.restore_seconds for recovery in recovered])
        if recovered
        else None,
        tuple(reasons),
        exercised,
        unexercised,
    )


def _exercise(evidence: Evidence) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    """Return the tested and the untested contracts of the policy, and reasons against it."""
    tested = {leaf.exercise for recovery in evidence.recoveries for leaf in recovery.inexact} - {""}
    untested = sorted(set(evidence.contracts) - tested)
    if evidence.plan.is_lossless:
        return (), (), []
    # An evaluation that never restores what the policy weakens would pass whatever came back.
    reasons = []
    if not evidence.contracts:
        reasons.append(
            "every leaf was exact at every checkpoint, so the policy was not tested; give more"
            " --steps"
        )
    elif untested:
        reasons.append(
            f"not tested at any restore: {', '.join(untested)}; give more --kills or --steps"
        )
    return tuple(sorted(tested)), tuple(untested), reasons


def problems(recovery: Recovery, unkilled: Ending, deterministic: bool) -> list[str]:
    """Describe the failures of one recovery, with the names of leaves."""
    if recovery.ending is None:
        return [recovery.error or "it did not come back"]
    reasons = []
    # A newer step is right as well: the kill may have come after the commit and before the report.
    if recovery.restored_step < recovery.acknowledged_step:
        reasons.append(
            f"step {recovery.acknowledged_step} was reported durable, and is gone: step"
            f" {recovery.restored_step} is the newest"
        )
    step = recovery.restored_step
    reasons += [
        f"step {step}, leaf {leaf.path!r} ({leaf.contract}): {leaf.problem}"
        for leaf in recovery.failed[:MOST_NAMED]
    ]
    if len(recovery.failed) > MOST_NAMED:
        reasons.append(
            f"and {len(recovery.failed) - MOST_NAMED} more leaves of step {step}; --json names all"
        )
    if recovery.not_put_back:
        reasons.append(
            "the workload's load() does not put back what was restored:"
            f" {_named(recovery.not_put_back)}"
        )
    # If every leaf came back bit for bit and the run repeats bit for bit, any difference that
    # remains comes from something that is not in the state.
    exact = not (recovery.failed or recovery.inexact or recovery.not_put_back)
    if exact and deterministic and (gap := _difference(recovery.ending, unkilled)):
        reasons.append(
            f"all of step {step} came back, yet {gap}: something that decides how the run"
            " continues is not in its state()"
        )
    return reasons


def _difference(ending: Ending, unkilled: Ending) -> str:
    """Describe the first difference to another run of the seed; empty if all bits are equal."""
    gap = statistics.curve(ending.losses, unkilled.losses, ()).first_gap
    if gap is not None:
        losses = f"{ending.losses[gap]!r}, {unkilled.losses[gap]!r} without the kill"
        return f"the loss of step {gap} is {losses}"
    wrong = differences(ending.digests, unkilled.digests)
    if wrong:
        return f"the last state differs in {_named(wrong)}"
    # By their text, because NaN is not equal to itself.
    if repr(ending.evaluation) != repr(unkilled.evaluation):
        values = f"{ending.evaluation!r}, {unkilled.evaluation!r} without the kill"
        return f"the evaluation gives {values}"
    return ""


def _named(paths: Sequence[str]) -> str:
    suffix = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(paths[:MOST_NAMED]) + suffix


# --- quality --------------------------------------------------------------------------------------


def quality(evidence: Evidence) -> Quality:
    """Compare the final losses of resumed runs with those of unkilled runs."""
    unkilled = {ending.seed: ending for ending in evidence.unkilled}
    differences_by_seed: dict[int, list[float]] = {}
    curves = []
    seed_losses = [ending.losses for ending in evidence.unkilled]
    for recovery in evidence.recoveries:
        seed, ending = recovery.kill.seed, recovery.ending
        if ending is None:
            continue
        differences_by_seed.setdefault(seed, []).append(
            ending.evaluation - unkilled[seed].evaluation
        )
        curves.append(statistics.curve(ending.losses, unkilled[seed].losses, seed_losses))
    final = statistics.equivalence(
        differences_by_seed, [ending.evaluation for ending in evidence.unkilled]
    )
    missing = [
        recovery.missing_steps
        for recovery in evidence.recoveries
        if recovery.missing_steps is not None
    ]
    return Quality(
        final.verdict in (EQUAL, WITHIN),
        final,
        tuple(curves),
        _reason(final),
        statistics.spread(missing) if missing else None,
    )


def _reason(final: Equivalence) -> str:
    """Explain why equivalence is not shown; empty if it is."""
    difference = (
        f"the final loss differs by {final.mean:+.3g} (90 % interval {final.low:+.3g} to"
        f" {final.high:+.3g}), noise is {final.margin:.3g} at most"
    )
    if final.verdict == OUTSIDE:
        return f"resumed runs end elsewhere: {difference}"
    if final.verdict != TOO_FEW:
        return ""
    if not final.seeds:
        return "no killed run came to its end"
    if final.noise_seeds < statistics.LEAST_NOISE_SEEDS:
        return (
            f"not enough seeds to tell: a noise floor takes {statistics.LEAST_NOISE_SEEDS} unkilled"
            f" ones, not {final.noise_seeds}; {difference}"
        )
    advice = (
        f", about {final.needed} would"
        if final.needed is not None and final.needed > final.seeds
        else ""
    )
    return f"not enough seeds to tell: {difference}; {final.seeds} killed ones do not tell{advice}"
