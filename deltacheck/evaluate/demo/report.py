"""What the demo prints at its end. Every figure is computed from what the child processes measured
in this run.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from deltacheck.evaluate.demo.checks import Verdict
from deltacheck.evaluate.demo.classes import CLASSES


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that one run of the demo found. ``saved``, ``torch_saved``: one record a checkpoint, as
    `child.py` told them.
    """

    seed: int
    steps: int
    every: int
    parameters: int
    pretrain_losses: list[float]
    losses: list[float]
    kill: dict[str, Any]
    restore_seconds: float
    step_seconds: list[float]
    saved: list[dict[str, Any]]
    torch_saved: list[dict[str, Any]]
    verdicts: list[Verdict]
    seconds: float


def show(outcome: Outcome, console: Console) -> None:
    for table in (_summary(outcome), _classes(outcome), _verdicts(outcome)):
        console.print(table)
    if all(verdict.holds for verdict in outcome.verdicts):
        console.print(f"[bold green]Bit for bit the same.[/] {outcome.seconds:.0f} s in all.")
    else:
        failed = "; ".join(verdict.claim for verdict in outcome.verdicts if not verdict.holds)
        console.print(f"[bold red]NOT the same:[/] {failed}. Seed {outcome.seed}.")


def _summary(outcome: Outcome) -> Table:
    ours, theirs = outcome.saved, outcome.torch_saved
    deltas = [save for save in ours if not save["keyframe"]]
    whole = mean(save["bytes"] for save in theirs)
    blocking = median(save["blocking_seconds"] for save in ours)
    torch_blocking = median(save["seconds"] for save in theirs)

    table = Table(
        title=(
            f"{outcome.parameters / 1e6:.1f} M parameters, {outcome.steps} steps, a checkpoint"
            f" every {outcome.every}"
        )
    )
    table.add_column("")
    table.add_column("deltacheck", justify="right")
    table.add_column("torch.save + fsync", justify="right")
    table.add_column("ratio", justify="right")

    def compared(name: str, mine: float, other: float, unit: str, scale: float) -> None:
        table.add_row(
            name, f"{mine / scale:.1f} {unit}", f"{other / scale:.1f} {unit}", f"{mine / other:.1%}"
        )

    table.add_row("checkpoints measured", str(len(ours)), str(len(theirs)), "")
    compared(
        "bytes a checkpoint, mean", mean(save["stored_bytes"] for save in ours), whole, "MB", 1e6
    )
    if deltas:
        compared(
            "bytes after the first, mean",
            mean(save["stored_bytes"] for save in deltas),
            whole,
            "MB",
            1e6,
        )
    compared("training waits, median", blocking, torch_blocking, "ms", 1e-3)
    table.add_row(
        "until durable, median",
        f"{median(save['durable_seconds'] for save in ours) * 1e3:.1f} ms",
        "as above",
        "",
    )
    table.add_row("restore after the kill", f"{outcome.restore_seconds * 1e3:.0f} ms", "", "")
    table.add_row(
        "one training step, median", f"{median(outcome.step_seconds) * 1e3:.0f} ms", "", ""
    )
    table.add_row(
        "steps lost to the kill",
        str(outcome.kill["last_step"] - outcome.kill["newest_checkpoint"]),
        "",
        "",
    )
    return table


def _classes(outcome: Outcome) -> Table:
    deltas = [save["classes"] for save in outcome.saved if not save["keyframe"]]
    table = Table(title=f"changed in {outcome.every} steps, mean of {len(deltas)}")
    for heading in ("leaves", "in memory", "words changed"):
        table.add_column(heading, justify="left" if heading == "leaves" else "right")
    for name in CLASSES:
        found = [classes[name] for classes in deltas if name in classes]
        if found:
            raw, words, changed = (
                sum(sums[field] for sums in found) for field in ("raw_bytes", "words", "changed")
            )
            table.add_row(name, f"{raw / len(found) / 1e6:.2f} MB", f"{changed / words:.2%}")
    return table


def _verdicts(outcome: Outcome) -> Table:
    table = Table(title="against the uninterrupted run, bit for bit")
    table.add_column("what")
    table.add_column("")
    table.add_column("")
    for verdict in outcome.verdicts:
        table.add_row(
            verdict.claim,
            "[green]equal[/]" if verdict.holds else "[bold red]DIFFERENT[/]",
            verdict.detail,
        )
    return table
