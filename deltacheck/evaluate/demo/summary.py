"""The verdicts and tables of the demo, computed from the measurements of its own run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from deltacheck.evaluate.demo.methods import PEER, Method
from deltacheck.evaluate.workloads.equality import EqualityVerdict
from deltacheck.evaluate.workloads.leaf_classes import CLASSES, leaf_class
from deltacheck.evaluate.workloads.recipe import MATURED_STEPS


@dataclass(frozen=True, slots=True)
class KillOutcome:
    """The moment of the kill: seconds after a checkpoint was begun."""

    saving_step: int
    seconds_after_call: float
    last_step: int


@dataclass(frozen=True, slots=True)
class Way:
    """The measurements of a way of saving.

    ``saves``: the cost of each save that was complete before the kill; ``overlapped`` is true if
    training went on beside it. ``total_bytes``: of the files of all ``checkpoints``. ``leaves``:
    the number of compared leaves and Python values. ``broken``: paths of leaves that were not what
    was promised. ``inexact``: leaves whose promise is less than every bit. ``different_leaves``: in
    the final state of the resumed run, compared with the run that was not killed. ``difference``:
    of their final losses.
    """

    method: Method
    saves: list[dict[str, Any]]
    checkpoints: int
    total_bytes: int
    restored_step: int
    restore_seconds: float
    leaves: int
    broken: list[str]
    inexact: list[dict[str, Any]]
    losses: Mapping[int, float]
    final_loss: float
    difference: float
    different_leaves: int

    @property
    def mean_bytes(self) -> float:
        """Bytes of all files over the number of checkpoints."""
        return self.total_bytes / max(1, self.checkpoints)

    @property
    def median_bytes(self) -> float:
        """Median bytes of a save."""
        return median(float(save["stored_bytes"]) for save in self.saves)

    @property
    def waits(self) -> float:
        """Median seconds that training waited for a save, if it went on beside it."""
        saves = [save for save in self.saves if save["overlapped"]] or self.saves
        return median(float(save["blocking_seconds"]) for save in saves)

    @property
    def durable(self) -> float:
        """Median seconds until a save was durable, without training beside it."""
        quiet_saves = [save for save in self.saves if not save["overlapped"]]
        return median(float(save["durable_seconds"]) for save in quiet_saves)


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """All results of a demo; its fields are the keys of the demo's JSON.

    ``losses``: of the run that was not killed, by step. ``final_losses``: held-out losses of all
    seeds that were not killed, the demo's own first. ``saved``: a record for each checkpoint under
    the exact policy. ``ways``: in the order of ``METHODS``.
    """

    seed: int
    steps: int
    every: int
    parameters: int
    pretrain_losses: list[float]
    losses: Mapping[int, float]
    final_losses: list[float]
    kill: dict[str, Any]
    step_seconds: list[float]
    saved: list[dict[str, Any]]
    ways: list[Way]
    verdicts: list[EqualityVerdict]
    seconds: float

    @property
    def peer(self) -> Way:
        """The way that ratios refer to."""
        return next(way for way in self.ways if way.method == PEER)


def judge(way: Way, final_losses: Sequence[float]) -> EqualityVerdict:
    """Judge a resumed run by its promise.

    Args:
        way: What was measured. With an exact promise, the final state must have every bit of the
            run that was not killed. Otherwise each leaf must keep its contract, and the final loss
            may be higher by one standard deviation between seeds. A lower one is no failure, as in
            ``profile.sensitivity``: the resumed run is another run, and none promises its bits.
        final_losses: Held-out losses of the seeds that were not killed.
    """
    claim = f"resumed from {way.method.title}"
    if way.broken:
        first = ", ".join(way.broken[:3])
        return EqualityVerdict(
            claim, False, f"{len(way.broken)} leaves broke their promise: {first}"
        )
    if way.method.is_exact:
        if way.different_leaves:
            return EqualityVerdict(claim, False, f"{way.different_leaves} leaves differ at the end")
        return EqualityVerdict(claim, True, f"{kept(way)}; the final state has every bit")
    noise = stdev(final_losses)
    detail = (
        f"{kept(way)}; final loss {way.difference:+.1e}, between seeds {noise:.1e}"
        f" (sd of {len(final_losses)})"
    )
    return EqualityVerdict(claim, way.difference <= noise, detail)


def kept(way: Way) -> str:
    """Describe the leaves of the restored step by what came back of them."""
    exact = way.leaves - len(way.inexact)
    words = [f"step {way.restored_step}: {exact} of {way.leaves} leaves bit for bit"]
    contracts = Counter((leaf["contract"], leaf_class(leaf["path"])) for leaf in way.inexact)
    words += [f"{count} {name} {contract}" for (contract, name), count in sorted(contracts.items())]
    return ", ".join(words)


def show(outcome: DemoOutcome, console: Console) -> None:
    """Print all tables and the verdict."""
    for table in (_costs(outcome), _promises(outcome), _classes(outcome), _verdicts(outcome)):
        console.print(table)
    if all(verdict.holds for verdict in outcome.verdicts):
        console.print(f"[bold green]Every promise was kept.[/] {outcome.seconds:.0f} s in all.")
    else:
        failed = "; ".join(verdict.claim for verdict in outcome.verdicts if not verdict.holds)
        console.print(f"[bold red]NOT as promised:[/] {failed}. Seed {outcome.seed}.")


def costs(outcome: DemoOutcome) -> list[tuple[str, ...]]:
    """Return the costs of each way as a table's cells."""
    peer = outcome.peer
    rows: list[tuple[str, ...]] = []
    for way in outcome.ways:
        rows.append(
            (
                way.method.title,
                f"{way.mean_bytes / 1e6:.2f} MB",
                f"{way.mean_bytes / peer.mean_bytes:.1%}",
                f"{way.median_bytes / peer.median_bytes:.1%}",
                f"{way.waits * 1e3:.1f} ms",
                f"{way.restore_seconds * 1e3:.0f} ms",
            )
        )
    return rows


COSTS = ("", "bytes a save", "ratio", "median", "training waits", "restore")


def _costs(outcome: DemoOutcome) -> Table:
    table = Table(
        title=(
            f"{outcome.parameters / 1e6:.1f} M parameters, {outcome.steps} steps, a checkpoint"
            f" every {outcome.every}; ratios to {outcome.peer.method.title}"
        ),
        caption=(
            f"The optimizer is settled: {MATURED_STEPS:,} steps were added to its count, and its"
            " moments are their unbiased estimates."
        ),
    )
    for heading in COSTS:
        table.add_column(heading, justify="right" if heading else "left")
    for row in costs(outcome):
        table.add_row(*row)
    return table


def _promises(outcome: DemoOutcome) -> Table:
    lost = {way.method.title: outcome.kill["last_step"] - way.restored_step for way in outcome.ways}
    table = Table(title="what each promises, and the steps lost to the kill")
    for heading in ("", "promise", "lost"):
        table.add_column(heading)
    for way in outcome.ways:
        table.add_row(way.method.title, way.method.promise, str(lost[way.method.title]))
    return table


def _classes(outcome: DemoOutcome) -> Table:
    deltas = [save["classes"] for save in outcome.saved if not save["keyframe"]]
    table = Table(title=f"changed in {outcome.every} steps, mean of {len(deltas)} saves")
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


def _verdicts(outcome: DemoOutcome) -> Table:
    table = Table(title="against the run that was not killed")
    table.add_column("")
    table.add_column("")
    table.add_column("")
    for verdict in outcome.verdicts:
        table.add_row(
            verdict.claim,
            "[green]holds[/]" if verdict.holds else "[bold red]FAILS[/]",
            verdict.detail,
        )
    return table
