"""The tables that the demo prints, computed from the measurements of its own run."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from deltacheck.evaluate.workloads.equality import Verdict
from deltacheck.evaluate.workloads.leaf_classes import CLASSES


@dataclass(frozen=True, slots=True)
class KillOutcome:
    """The moment of the kill, and the newest checkpoint that it left."""

    saving_step: int
    seconds_after_call: float
    last_step: int
    newest_checkpoint: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of one demo; its fields are the keys of the demo's JSON.

    ``saved`` and ``torch_saved`` hold a record for each checkpoint.
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
    """Print all tables and the verdict."""
    for table in (_summary(outcome), _classes(outcome), _verdicts(outcome)):
        console.print(table)
    if all(verdict.holds for verdict in outcome.verdicts):
        console.print(f"[bold green]Bit for bit the same.[/] {outcome.seconds:.0f} s in all.")
    else:
        failed = "; ".join(verdict.claim for verdict in outcome.verdicts if not verdict.holds)
        console.print(f"[bold red]NOT the same:[/] {failed}. Seed {outcome.seed}.")


def _summary(outcome: Outcome) -> Table:
    saves, peer_saves = outcome.saved, outcome.torch_saved
    deltas = [save for save in saves if not save["keyframe"]]
    peer_bytes = mean(save["bytes"] for save in peer_saves)
    peer_seconds = median(save["seconds"] for save in peer_saves)
    blocking_seconds = median(save["blocking_seconds"] for save in saves)
    durable_seconds = median(save["durable_seconds"] for save in saves)
    lost_steps = outcome.kill["last_step"] - outcome.kill["newest_checkpoint"]

    table = Table(
        title=(
            f"{outcome.parameters / 1e6:.1f} M parameters, {outcome.steps} steps, a checkpoint"
            f" every {outcome.every}"
        )
    )
    table.add_column("")
    for heading in ("deltacheck", "torch.save + fsync", "ratio"):
        table.add_column(heading, justify="right")

    def add_bytes(name: str, group: list[dict[str, Any]]) -> None:
        mean_bytes = mean(save["stored_bytes"] for save in group)
        megabytes = (f"{mean_bytes / 1e6:.1f} MB", f"{peer_bytes / 1e6:.1f} MB")
        table.add_row(name, *megabytes, f"{mean_bytes / peer_bytes:.1%}")

    table.add_row("checkpoints measured", str(len(saves)), str(len(peer_saves)), "")
    add_bytes("bytes a checkpoint, mean", saves)
    if deltas:
        add_bytes("bytes after the first, mean", deltas)
    milliseconds = (f"{blocking_seconds * 1e3:.1f} ms", f"{peer_seconds * 1e3:.1f} ms")
    ratio = f"{blocking_seconds / peer_seconds:.1%}"
    table.add_row("training waits, median", *milliseconds, ratio)
    table.add_row("until durable, median", f"{durable_seconds * 1e3:.1f} ms", "as above", "")
    table.add_row("restore after the kill", f"{outcome.restore_seconds * 1e3:.0f} ms", "", "")
    step_seconds = median(outcome.step_seconds)
    table.add_row("one training step, median", f"{step_seconds * 1e3:.0f} ms", "", "")
    table.add_row("steps lost to the kill", str(lost_steps), "", "")
    return table


def _classes(outcome: Outcome) -> Table:
    deltas = [save["classes"] for save in outcome.saved if not save["keyframe"]]
    table = Table(title=f"changed in {outcome.every} steps, mean of {len(deltas)}")
    for heading in ("leaves", "in memory", "words changed"):
        table.add_column(heading, justify="left" if heading == "leaves" else "right")
    for name in CLASSES:
        saves = [classes[name] for classes in deltas if name in classes]
        if saves:
            raw_bytes, words, changed = (
                sum(save[field] for save in saves) for field in ("raw_bytes", "words", "changed")
            )
            megabytes = f"{raw_bytes / len(saves) / 1e6:.2f} MB"
            table.add_row(name, megabytes, f"{changed / words:.2%}")
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
