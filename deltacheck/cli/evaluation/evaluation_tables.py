"""Tables of the ``eval`` command: size, latency, recovery and quality."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deltacheck.cli import output
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.evaluate.judge import Judgement
    from deltacheck.evaluate.records import Evidence
    from deltacheck.evaluate.significance import Spread

# The fixed costs of a save, 20 to 60 ms of files and syncs, equal those of writing this many bytes.
_SMALL = 32 << 20

# Title, columns, rows, and the lines below the table.
Table = tuple[str, tuple[Column, ...], list[Row], list[str]]


def print_evaluation(
    evidence: Evidence, judgement: Judgement, machine: dict[str, Any], seconds: float
) -> None:
    """Print the tables and the verdict of an evaluation."""
    plan = evidence.plan
    output.print_line(
        f"{plan.factory}, policy {plan.policy}: {plan.steps} steps, a checkpoint every"
        f" {plan.every}; seeds killed: {len(plan.killed_seeds())}, kills of each: {plan.kills},"
        f" seeds unkilled: {len(evidence.unkilled)}, from {plan.first_seed} on"
    )
    for title, columns, rows, lines in tables(evidence, judgement):
        output.print_line("")
        output.print_line(title)
        output.print_table(columns, rows)
        for line in lines:
            output.print_line(line)
    # A warning goes to stderr, so it is seen also if the tables are redirected to a file.
    if machine["file_system"] == "tmpfs":
        output.warn(
            "the folder is in memory (tmpfs): fsync costs nothing there, so the times until durable"
            " have no meaning; choose another folder with --keep"
        )
    output.print_line("")
    for reason in judgement.reasons:
        output.print_line(f"{'UNDECIDED' if judgement.is_undecided else 'DOES NOT HOLD'}: {reason}")
    if judgement.holds:
        output.print_line(f"holds ({seconds:.0f} s)")


def tables(evidence: Evidence, judgement: Judgement) -> list[Table]:
    """Return the tables of the four workflows."""
    return [
        _size(evidence, judgement),
        _latency(evidence, judgement),
        _recovery(evidence, judgement),
        _quality(evidence, judgement),
    ]


def _size(evidence: Evidence, judgement: Judgement) -> Table:
    size = judgement.size
    columns = (
        Column("LEAVES", "name", left=True),
        Column("COUNT", "leaves"),
        Column("IN MEMORY", "raw_bytes", output.size),
        Column("KEYFRAME", "key_bytes", output.size),
        Column("A SAVE", "save_bytes", output.size),
        Column("OF RAW", "share", output.share),
    )
    rows: list[Row] = [
        asdict(group) | {"share": group.save_bytes / group.raw_bytes if group.raw_bytes else None}
        for group in evidence.groups
    ]
    lines = [
        (
            f"the state: {output.size(size.raw_bytes)}; {evidence.peer}:"
            f" {output.size(size.peer_bytes)}"
        ),
        (
            f"the first save: {output.size(size.first_bytes)}, {output.share(size.first)} of the"
            " peer's file"
        ),
        (
            f"each of {size.later.count} later ones, all files: {_bytes(size.later_bytes)}; of"
            f" the peer's file {_shares(size.later)}, of raw {_shares(size.of_raw)}"
        ),
    ]
    return "1. Size of a checkpoint", columns, rows, lines


def _latency(evidence: Evidence, judgement: Judgement) -> Table:
    latency = judgement.latency
    columns = (
        Column("", "name", left=True),
        Column("MEDIAN", "median", _time),
        Column("LEAST", "least", _time),
        Column("MOST", "most", _time),
        Column(
            "OVER THE PEER'S",
            "ratio",
            lambda ratio: f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})",
        ),
    )
    rows: list[Row] = [
        {"name": "training waits", **asdict(latency.blocking_seconds), "ratio": latency.blocking},
        {"name": "until durable", **asdict(latency.durable_seconds), "ratio": latency.durable},
        {"name": evidence.peer, **asdict(latency.peer_seconds)},
    ]
    lines = [
        (
            f"{latency.blocking.count} saves after the first, which makes training wait"
            f" {_time(latency.first_blocking_seconds)}; ratios are of pairs: both save the same"
            " state, one after the other"
        ),
    ]
    if judgement.size.raw_bytes < _SMALL:
        size = output.size(judgement.size.raw_bytes)
        lines.append(
            f"a state of {size} is too small to measure latency: most of the time is the fixed cost"
            " of a save"
        )
    return "2. Latency", columns, rows, lines


def _recovery(evidence: Evidence, judgement: Judgement) -> Table:
    columns = (
        Column("KILLED", "name", left=True),
        Column("AT SAVE", "at", left=True),
        Column("LOST STEPS", "lost"),
        Column("RESTORED", "step"),
        Column("RESTORE", "seconds", _time),
        Column("STAGE", "stage", left=True),
        Column("LEAVES", "leaves"),
        Column("INEXACT", "inexact"),
        Column("WRONG", "wrong"),
    )
    rows: list[Row] = []
    for recovery in evidence.recoveries:
        moment = "during" if recovery.kill.mid_save else "after"
        row: Row = {"name": recovery.name, "at": f"{recovery.kill.saving_step}, {moment}"}
        # A recovery that failed has no measurements. Its row has dashes, and the verdict names the
        # reason.
        if recovery.ending is not None:
            row |= {
                "lost": recovery.lost_steps,
                "step": recovery.restored_step,
                "seconds": recovery.restore_seconds,
                "stage": recovery.stage or "exact",
                "leaves": recovery.leaves,
                "inexact": len(recovery.inexact),
                "wrong": len(recovery.failed) + len(recovery.not_put_back),
            }
        rows.append(row)
    return (
        "3. Recovery: killed, restored in a fresh process, compared leaf by leaf",
        columns,
        rows,
        _recovery_lines(evidence, judgement),
    )


def _recovery_lines(evidence: Evidence, judgement: Judgement) -> list[str]:
    """Return the conclusions below the table of recoveries."""
    correctness = judgement.correctness
    lines = [
        (
            f"{correctness.held} of {correctness.trials} recoveries are correct: a rate of at least"
            f" {100 * correctness.least_rate:.1f} % at 95 % confidence"
        ),
    ]
    if correctness.deterministic:
        lines.append(
            f"{correctness.equal_endings} of {correctness.trials} have the losses and the final"
            " bits of the unkilled run"
        )
    else:
        lines.append(
            f"the run is not deterministic (an unkilled repeat ends {correctness.repeat_gap:.3g}"
            " apart): the steps after a restore are not compared in bits"
        )
    # Otherwise a run that never left the exact stage would look like a proof of the policy.
    if not evidence.plan.is_lossless:
        lines.append(f"contracts tested at a restore: {', '.join(correctness.exercised) or 'none'}")
        checks = [leaf for recovery in evidence.recoveries for leaf in recovery.inexact]
        rates = [leaf.rate for leaf in checks if leaf.rate is not None]
        lines.append(
            f"errors in learning rates: {len(rates)}; the last update of the leaf shows its rate in"
            f" {len(rates) - rates.count(0)} of them"
        )
        if correctness.unexercised:
            lines.append(f"NOT tested: {', '.join(correctness.unexercised)}")
    return lines


def _quality(evidence: Evidence, judgement: Judgement) -> Table:
    quality = judgement.quality
    columns = (
        Column("KILLED", "name", left=True),
        Column("FINAL LOSS", "loss", _loss),
        Column("UNKILLED", "unkilled", _loss),
        Column("DIFFERENCE", "gap", lambda gap: f"{gap:+.3g}"),
        Column("LOST PROGRESS", "missing", lambda steps: f"{steps:.2f} steps"),
        Column("STEPS", "steps"),
        Column("EQUAL BITS", "equal"),
        Column("LARGEST LOSS GAP", "largest_gap", output.number),
        Column("SPIKES", "spikes"),
    )
    unkilled = {ending.seed: ending.evaluation for ending in evidence.unkilled}
    # ``quality.curves`` has one entry for each finished recovery, in the same order.
    finished = [recovery for recovery in evidence.recoveries if recovery.ending is not None]
    rows: list[Row] = []
    for recovery, curve in zip(finished, quality.curves, strict=True):
        if recovery.ending is not None:
            loss, reference = recovery.ending.evaluation, unkilled[recovery.kill.seed]
            row: Row = {"name": recovery.name, "loss": loss, "unkilled": reference}
            row |= {"gap": loss - reference, "missing": recovery.missing_steps}
            rows.append(row | asdict(curve))
    return "4. Quality of the model", columns, rows, _quality_lines(evidence, judgement)


def _quality_lines(evidence: Evidence, judgement: Judgement) -> list[str]:
    """Return the conclusions below the table of final losses."""
    quality, final = judgement.quality, judgement.quality.final
    lines = [
        f"noise floor: the final loss of {final.noise_seeds} unkilled seeds has a standard"
        f" deviation of {final.noise_sd:.3g}"
    ]
    verdict = {
        "equal": "equal: no final loss differs in any bit",
        "within": (
            f"within the noise: the mean difference is {final.mean:+.3g}, 90 % interval"
            f" {final.low:+.3g} to {final.high:+.3g}, the margin {final.margin:.3g} (two one-sided"
            " t-tests, paired by seed)"
        ),
    }
    lines.append(verdict.get(final.verdict, quality.reason))
    if quality.missing_steps is not None:
        spread = quality.missing_steps
        lines.append(
            f"lost progress: {spread.median:.2f} of {evidence.plan.every} steps in the first"
            f" interval after a restore ({spread.least:.2f} to {spread.most:.2f})"
        )
    return lines


def _time(seconds: float) -> str:
    """Format a duration with about three significant digits."""
    if seconds >= 9.995:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f} ms" if seconds < 0.0995 else f"{milliseconds:.0f} ms"


def _loss(value: float) -> str:
    return f"{value:.7g}"


def _bytes(spread: Spread) -> str:
    smallest, largest = output.size(spread.least), output.size(spread.most)
    return f"{output.size(spread.median)} ({smallest} to {largest})"


def _shares(spread: Spread) -> str:
    smallest, largest = output.share(spread.least), output.share(spread.most)
    return f"{output.share(spread.median)} ({smallest} to {largest})"
