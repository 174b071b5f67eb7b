"""`eval`: the four workflows of an evaluation as one report."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Json
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.evaluate.judge import Judgement
    from deltacheck.evaluate.records import Evidence
    from deltacheck.evaluate.run import Progress
    from deltacheck.evaluate.significance import Spread

_BUILT_IN = "deltacheck.evaluate.workloads.builtin"
_WORKLOADS = {"sft": "sft", "rl_like": "rl_like", "lora": "lora"}


def evaluate(
    factory: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.py:FACTORY]",
            help="Or MODULE:FACTORY: factory(seed) gives a run to evaluate.",
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            metavar="sft|rl_like|lora",
            help="Without a factory: which of the runs that are built in (PyTorch).",
        ),
    ] = "sft",
    policy: Annotated[
        str,
        typer.Option(
            metavar="exact|model_exact|post_training", help="What the checkpoints promise."
        ),
    ] = "exact",
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For post_training; by default the first unkilled run is profiled."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=3,
            metavar="N",
            help=(
                "Of each run; default 40, where the policy is not exact 100, since it is until the"
                " run is stable."
            ),
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, metavar="K", help="Steps between two checkpoints.")
    ] = 5,
    kills: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Of each killed seed. More: a rarer fault is found."),
    ] = 2,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, metavar="S", help="That are killed. More: differences of quality can be told."
        ),
    ] = 2,
    noise_seeds: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="S",
            help=(
                "That run unkilled, for the noise floor: below 5 it can tell nothing, 12 are good."
            ),
        ),
    ] = 6,
    first_seed: Annotated[int, typer.Option(min=0, metavar="N", help="The others follow it.")] = 1,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A tiny run and a single kill: the way in seconds, figures without meaning.",
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with figures, too.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Work in this new or empty folder, and leave all there."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure size, latency, recovery and quality. Exit code 1 where a restore is wrong."""
    from deltacheck import __version__
    from deltacheck.evaluate import machine
    from deltacheck.evaluate.judge import judge
    from deltacheck.evaluate.records import POLICIES, Plan
    from deltacheck.evaluate.run import evaluate as run

    if policy not in POLICIES:
        raise typer.BadParameter(f"--policy is one of {', '.join(POLICIES)}, not {policy!r}")
    if workload not in _WORKLOADS:
        raise typer.BadParameter(f"--workload is one of {', '.join(_WORKLOADS)}, not {workload!r}")
    if profile is not None and policy != "post_training":
        raise typer.BadParameter("--profile goes with --policy post_training")
    tiny = "tiny_" if quick and factory is None else ""
    plan = Plan(
        factory or f"{_BUILT_IN}:{tiny}{workload}",
        policy,
        steps or (40 if policy == "exact" else 100),
        every,
        kills,
        seeds,
        max(seeds, noise_seeds),
        first_seed,
        "" if profile is None else str(profile.resolve()),
    )
    plan = replace(plan, steps=12, every=3, kills=1, seeds=1, noise_seeds=2) if quick else plan
    if len(plan.checkpoints()) < 3:
        raise typer.BadParameter(
            f"--steps {plan.steps} leaves {len(plan.checkpoints())} checkpoints; give at least"
            f" {3 * plan.every + 1}"
        )
    began = time.time()
    with _folder(keep) as folder, _progress() as progress:
        about = machine.describe(folder)
        evidence = run(plan, folder, progress)
    judgement = judge(evidence)
    seconds = time.time() - began
    command = shlex.join(["deltacheck", *sys.argv[1:]])
    if html is not None:
        _write_page(html, evidence, judgement, about, command)
    if as_json:
        output.print_json(document(evidence, judgement, about, command, seconds))
    else:
        output.print_line(
            f"deltacheck {__version__}, {about['date']}, {about['processor']}, {about['cores']}"
            f" cores, {about['file_system']}"
        )
        _print(evidence, judgement, about, seconds)
    if not judgement.holds:
        raise typer.Exit(output.FOUND_DAMAGE)


def document(
    evidence: Evidence, judgement: Judgement, machine: dict[str, Any], command: str, seconds: float
) -> Row:
    """Everything as one JSON object. Digests are left out: they are many, and what they say is in
    the judgement.
    """

    def ending(found: Any) -> Row | None:
        return (
            None
            if found is None
            else {name: value for name, value in found.items() if name != "digests"}
        )

    whole = asdict(evidence)
    del whole["plan"]["save_last"]  # always false here, and not a part of the document
    verdict = asdict(judgement)
    return {
        "command": command,
        "seconds": seconds,
        "machine": machine,
        "plan": (
            whole["plan"]
            | {
                "killed_seeds": evidence.plan.killed_seeds(),
                "unkilled_seeds": evidence.plan.unkilled_seeds(),
            }
        ),
        "framework": evidence.framework,
        "peer": evidence.peer,
        "holds": verdict["holds"],
        "reasons": verdict["reasons"],
        "size": verdict["size"] | {"groups": whole["groups"]},
        "latency": verdict["latency"],
        "saves": whole["saves"],
        "recovery": verdict["correctness"],
        "recoveries": [
            recovery | {"ending": ending(recovery["ending"])} for recovery in whole["recoveries"]
        ],
        "quality": verdict["quality"],
        "unkilled": [ending(found) for found in whole["unkilled"]],
    }


# --- for people -----------------------------------------------------------------------------------


def _print(evidence: Evidence, judgement: Judgement, about: dict[str, Any], seconds: float) -> None:
    plan = evidence.plan
    output.print_line(
        f"{plan.factory}, policy {plan.policy}: {plan.steps} steps, a checkpoint every"
        f" {plan.every}; seeds killed: {len(plan.killed_seeds())}, kills of each: {plan.kills},"
        f" seeds unkilled: {len(evidence.unkilled)}, from {plan.first_seed} on"
    )
    for title, columns, rows, words in tables(evidence, judgement):
        output.print_line("")
        output.print_line(title)
        output.print_table(columns, rows)
        for line in words:
            output.print_line(line)
    if about["file_system"] == "tmpfs":
        output.warn(
            "the folder lies in memory (tmpfs): fsync costs nothing there, and no time to durable"
            " means anything; see --keep"
        )
    output.print_line("")
    for reason in judgement.reasons:
        output.print_line(f"DOES NOT HOLD: {reason}")
    if judgement.holds:
        output.print_line(f"holds ({seconds:.0f} s)")


Table = tuple[str, tuple[Column, ...], list[Row], list[str]]


def tables(evidence: Evidence, judgement: Judgement) -> list[Table]:
    """The four workflows: title, columns, rows, and what is to be said below."""
    return [
        _size(evidence, judgement),
        _latency(evidence, judgement),
        _recovery(evidence, judgement),
        _quality(evidence, judgement),
    ]


def _size(evidence: Evidence, judgement: Judgement) -> Table:
    found = judgement.size
    columns = (
        Column("LEAVES", "name", left=True),
        Column("COUNT", "leaves"),
        Column("IN MEMORY", "raw_bytes", output.size),
        Column("KEYFRAME", "key_bytes", lambda count: output.size(round(count))),
        Column("A SAVE", "save_bytes", lambda count: output.size(round(count))),
        Column("OF RAW", "share", output.share),
    )
    rows: list[Row] = [
        asdict(group) | {"share": group.save_bytes / group.raw_bytes if group.raw_bytes else None}
        for group in evidence.groups
    ]
    words = [
        (
            f"the state: {output.size(found.raw_bytes)}; {evidence.peer}:"
            f" {output.size(found.peer_bytes)}"
        ),
        (
            f"the first save: {output.size(found.first_bytes)}, {output.share(found.first)} of the"
            " peer's file"
        ),
        (
            f"each of {found.later.count} later ones, all files: {_bytes(found.later_bytes)}; of"
            f" the peer's file {_shares(found.later)}, of raw {_shares(found.of_raw)}"
        ),
    ]
    return "1. Size of a checkpoint", columns, rows, words


def _latency(evidence: Evidence, judgement: Judgement) -> Table:
    found = judgement.latency
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
        {"name": "training waits", **asdict(found.blocking_seconds), "ratio": found.blocking},
        {"name": "until durable", **asdict(found.durable_seconds), "ratio": found.durable},
        {"name": evidence.peer, **asdict(found.peer_seconds)},
    ]
    words = [
        (
            f"{found.blocking.count} saves after the first, which makes training wait"
            f" {_time(found.first_blocking_seconds)}; ratios of pairs: the same state, one after"
            " the other"
        ),
    ]
    if judgement.size.raw_bytes < _SMALL:
        size = output.size(judgement.size.raw_bytes)
        words.append(
            f"a state of {size} is too small to say anything of time: most of it is what a save"
            " costs apart from its bytes"
        )
    return "2. Latency", columns, rows, words


_SMALL = (
    32 << 20
)  # the fixed costs of a save, some 20 to 60 ms of files and syncs, are as much as writing that


def _recovery(evidence: Evidence, judgement: Judgement) -> Table:
    found = judgement.correctness
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
    for one in evidence.recoveries:
        row: Row = {
            "name": one.kill.name,
            "at": f"{one.kill.saving_step}, {'during' if one.kill.mid_save else 'after'}",
        }
        if one.ending is not None:
            row |= {
                "lost": one.lost_steps,
                "step": one.restored_step,
                "seconds": one.restore_seconds,
                "stage": one.stage or "exact",
            }
            row |= {
                "leaves": one.leaves,
                "inexact": len(one.inexact),
                "wrong": len(one.failed) + len(one.not_put_back),
            }
        rows.append(row)
    words = [
        (
            f"{found.held} of {found.trials} recoveries are correct: a rate of at least"
            f" {100 * found.least_rate:.1f} % at 95 % confidence"
        ),
    ]
    if found.deterministic:
        words.append(
            f"{found.equal_endings} of {found.trials} went on with every loss and ended with every"
            " bit of the unkilled run"
        )
    else:
        words.append(
            f"the run does not repeat itself (an unkilled repeat ends {found.repeat_gap:.3g}"
            " apart): the way after a restore is not compared in bits"
        )
    if evidence.plan.policy != "exact" and not found.inexact_leaves:
        words.append(
            "every leaf was still exact at every kill: the policy had nothing to be judged by; give"
            " more --steps"
        )
    return (
        "3. Recovery: killed, restored in a fresh process, compared leaf by leaf",
        columns,
        rows,
        words,
    )


def _quality(evidence: Evidence, judgement: Judgement) -> Table:
    found, final = judgement.quality, judgement.quality.final
    columns = (
        Column("KILLED", "name", left=True),
        Column("FINAL LOSS", "loss", _loss),
        Column("UNKILLED", "unkilled", _loss),
        Column("DIFFERENCE", "gap", lambda gap: f"{gap:+.3g}"),
        Column("STEPS", "steps"),
        Column("EQUAL BITS", "equal"),
        Column("LARGEST LOSS GAP", "largest_gap", output.number),
        Column("SPIKES", "spikes"),
    )
    unkilled = {ending.seed: ending.evaluation for ending in evidence.unkilled}
    back = [one for one in evidence.recoveries if one.ending is not None]
    rows: list[Row] = [
        {"name": one.kill.name, "loss": one.ending.evaluation, "unkilled": unkilled[one.kill.seed]}
        | {"gap": one.ending.evaluation - unkilled[one.kill.seed], **asdict(curve)}
        for one, curve in zip(back, found.curves, strict=True)
        if one.ending is not None
    ]
    words = [
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
    words.append(verdict.get(final.verdict, found.reason))
    return "4. Quality of the model", columns, rows, words


def _time(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 9.995
        else f"{seconds * 1e3:.1f} ms"
        if seconds < 0.0995
        else f"{seconds * 1e3:.0f} ms"
    )


def _loss(value: float) -> str:
    return f"{value:.7g}"


def _bytes(spread: Spread) -> str:
    return (
        f"{output.size(round(spread.median))} ({output.size(round(spread.least))} to"
        f" {output.size(round(spread.most))})"
    )


def _shares(spread: Spread) -> str:
    return (
        f"{output.share(spread.median)} ({output.share(spread.least)} to"
        f" {output.share(spread.most)})"
    )


# --- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="deltacheck-eval-") as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise typer.BadParameter(f"{keep} is not empty; --keep wants a new or empty folder")
    yield keep.resolve()


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A bar for each act on stderr, where that is a terminal."""
    if not sys.stderr.isatty() or output.says_json():
        yield lambda act, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        acts: dict[str, TaskID] = {}

        def show(act: str, done: int, total: int) -> None:
            if act not in acts:
                acts[act] = bars.add_task(act, total=total)
            bars.update(acts[act], completed=done)

        yield show


def _write_page(
    file: Path, evidence: Evidence, judgement: Judgement, about: dict[str, Any], command: str
) -> None:
    try:
        from deltacheck.evaluate import drawings
        from deltacheck.report import page
    except ImportError as error:
        raise ImportError(
            f"a page is drawn by matplotlib, which cannot be imported ({error}): pip install"
            " deltacheck[report]"
        ) from error
    final = judgement.quality.final
    facts = {
        "verdict": "holds" if judgement.holds else "does not hold",
        "recovery": f"{judgement.correctness.held} of {judgement.correctness.trials}",
        "a save": f"{output.share(judgement.size.later.median)} of {evidence.peer}",
        "training waits": f"{judgement.latency.blocking.median:.2f} of {evidence.peer}",
        "quality": final.verdict,
        "policy": evidence.plan.policy,
        "command": command,
        "machine": (
            f"{about['processor']}, {about['cores']} cores, {about['file_system']}, load"
            f" {about['load_average']:.1f}"
        ),
        "versions": ", ".join(f"{name} {number}" for name, number in about["versions"].items()),
        "date": about["date"],
    }
    text = page.page(
        f"Evaluation of {evidence.plan.factory.rpartition('/')[2]}",
        facts,
        judgement.reasons,
        drawings.draw(evidence),
        "Does not hold:",
    )
    fresh = file.with_name(file.name + ".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)
