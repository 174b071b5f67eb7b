"""The judgement and the tables of the demo, computed from the evidence of its evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median, stdev
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.demo.methods import METHODS, OWN_LAYOUT, PEER, Method
from benchmarks.demo.way_records import WayEvidence, WayRecovery, WaySaves
from benchmarks.workloads.equality import EqualityVerdict
from benchmarks.workloads.leaf_classes import leaf_class
from deltacheck.evaluate.judge import correctness
from deltacheck.evaluate.significance import student_quantile


@dataclass(frozen=True, slots=True)
class Way:
    """A way of saving with its saves until the kill, and the recovery from it."""

    method: Method
    saved: WaySaves
    recovery: WayRecovery

    @property
    def median_bytes(self) -> float:
        """Median bytes of a save."""
        return median(float(save["stored_bytes"]) for save in self.saved.saves)

    @property
    def waits(self) -> float:
        """Median seconds that training waited for a save, if it went on beside it."""
        saves = [save for save in self.saved.saves if save["overlapped"]] or self.saved.saves
        return median(float(save["blocking_seconds"]) for save in saves)


@dataclass(frozen=True)
class DemoOutcome:
    """All results of a demo.

    ``states``: the comparisons of the final state. ``layouts``: the bytes of a save in other
    layouts, as ``layout_bytes.measure`` returns them. ``seconds``: of the whole demo.
    """

    evidence: WayEvidence
    states: tuple[EqualityVerdict, ...]
    layouts: Mapping[str, Mapping[str, float]]
    seconds: float

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """The ways, in the order of ``METHODS``."""
        rows = zip(METHODS, self.evidence.way_saves, self.evidence.recoveries, strict=True)
        return tuple(Way(method, saved, recovery) for method, saved, recovery in rows)

    @property
    def peer(self) -> Way:
        """The way that ratios refer to."""
        return next(way for way in self.ways if way.method == PEER)

    @property
    def noise(self) -> float:
        """The standard deviation of the final loss between seeds that were not killed."""
        return stdev(ending.evaluation for ending in self.evidence.unkilled)

    @property
    def largest_noise(self) -> float:
        """The difference that 99 % of pairs of seeds have at most, by Student's t distribution.

        Few seeds tell little: of 4 it is 6 standard deviations, of 2 it is 45.
        """
        freedom = len(self.evidence.unkilled) - 1
        return student_quantile(0.99, freedom) * math.sqrt(2) * self.noise

    @property
    def holds(self) -> bool:
        """True if every comparison held."""
        return not problems(self)

    def difference(self, way: Way) -> float:
        """Return the final loss of a resumed run minus that of the unkilled run."""
        ending = way.recovery.ending
        reference = self.evidence.unkilled[0].evaluation
        return float("nan") if ending is None else ending.evaluation - reference


def problems(outcome: DemoOutcome) -> list[str]:
    """Return the reasons against the demo.

    They are those of an evaluation, which compares each restored leaf with its contract and, if
    every bit was promised, the end of the run with that of the unkilled one. Otherwise the final
    loss may be higher by what seeds differ. A lower one is no failure, as in
    ``profile.sensitivity``: the resumed run is another run, and none promises its bits.
    """
    reasons = list(correctness(outcome.evidence).reasons)
    for way in outcome.ways:
        # ``not <=`` also counts NaN.
        if way.recovery.ending and not outcome.difference(way) <= outcome.largest_noise:
            reasons.append(
                f"{way.recovery.name}: the final loss is {outcome.difference(way):+.1e} from that"
                f" of the unkilled run, more than seeds differ ({outcome.largest_noise:.1e})"
            )
        if way.recovery.inexact and way.method.is_exact:
            reasons.append(f"{way.recovery.name}: {len(way.recovery.inexact)} leaves are not exact")
    return reasons + [
        f"{state.claim}: {state.detail}" for state in outcome.states if not state.holds
    ]


def document(outcome: DemoOutcome) -> dict[str, Any]:
    """Return the figures of a demo as JSON."""
    evidence = asdict(outcome.evidence)
    for ending in (*evidence["unkilled"], evidence["repeat"], evidence["saving"]):
        del ending["digests"]
    for recovery in evidence["recoveries"]:
        if recovery["ending"] is not None:
            del recovery["ending"]["digests"]
    rows = [
        asdict(way.method)
        | {
            "mean_bytes": way.saved.mean_bytes,
            "median_bytes": way.median_bytes,
            "waiting_seconds": way.waits,
            "restore_seconds": way.recovery.restore_seconds,
            "difference": outcome.difference(way),
        }
        for way in outcome.ways
    ]
    return {
        "seconds": outcome.seconds,
        "problems": problems(outcome),
        "ways": rows,
        "states": [asdict(state) for state in outcome.states],
        "layouts": shares_by_layout(outcome),
        **evidence,
    }


def shares_by_layout(outcome: DemoOutcome) -> dict[str, dict[str, float]]:
    """Return the mean bytes of a save, of those of ``torch.save``, by layout and key of the way."""
    own = {
        way.method.key: way.saved.mean_bytes / outcome.peer.saved.mean_bytes
        for way in outcome.ways
        if all(way.method.key in shares for shares in outcome.layouts.values())
    }
    return {OWN_LAYOUT: own} | {name: dict(shares) for name, shares in outcome.layouts.items()}


def kept(recovery: WayRecovery) -> str:
    """Describe the leaves of the restored step by what came back of them."""
    exact = recovery.leaves - len(recovery.inexact)
    words = [f"step {recovery.restored_step}: {exact} of {recovery.leaves} leaves bit for bit"]
    contracts = Counter((leaf.contract, leaf_class(leaf.path)) for leaf in recovery.inexact)
    words += [f"{count} {name} {contract}" for (contract, name), count in sorted(contracts.items())]
    return ", ".join(words)


def show(outcome: DemoOutcome, console: Console) -> None:
    """Print all tables and the verdict."""
    for table in (_costs(outcome), _layouts(outcome), _leaves(outcome), _promises(outcome)):
        console.print(table)
    for state in outcome.states:
        console.print(f"{state.claim}: {state.detail}")
    reasons = problems(outcome)
    if not reasons:
        console.print(f"[bold green]Every promise was kept.[/] {outcome.seconds:.0f} s in all.")
    else:
        seed = outcome.evidence.plan.first_seed
        text = escape("; ".join(reasons))
        console.print(f"[bold red]NOT as promised:[/] {text}. Seed {seed}.")


COSTS = ("", "bytes a save", "ratio", "median", "training waits", "restore")


def costs(outcome: DemoOutcome) -> Iterator[tuple[str, ...]]:
    """Yield the costs of each way as a table's cells."""
    peer = outcome.peer
    for way in outcome.ways:
        yield (
            way.method.title,
            f"{way.saved.mean_bytes / 1e6:.2f} MB",
            f"{way.saved.mean_bytes / peer.saved.mean_bytes:.1%}",
            f"{way.median_bytes / peer.median_bytes:.1%}",
            f"{way.waits * 1e3:.1f} ms",
            f"{way.recovery.restore_seconds * 1e3:.0f} ms",
        )


def _costs(outcome: DemoOutcome) -> Table:
    plan, raw_bytes = outcome.evidence.plan, outcome.evidence.saves[-1].raw_bytes
    table = Table(
        title=(
            f"a state of {raw_bytes / 1e6:.1f} MB, {plan.steps} steps, a checkpoint every"
            f" {plan.every}; ratios to {outcome.peer.method.title}"
        ),
    )
    for heading in COSTS:
        table.add_column(heading, justify="right" if heading else "left")
    for row in costs(outcome):
        table.add_row(*row)
    return table


def _layouts(outcome: DemoOutcome) -> Table:
    table = Table(title="bytes of a save by layout, mean, the first included, of torch.save")
    table.add_column("layout")
    by_layout = shares_by_layout(outcome)
    for method in METHODS:
        if method.key in by_layout[OWN_LAYOUT]:
            table.add_column(method.title, justify="right")
    for name, shares in by_layout.items():
        table.add_row(name, *(f"{share:.1%}" for share in shares.values()))
    return table


def _leaves(outcome: DemoOutcome) -> Table:
    plan = outcome.evidence.plan
    table = Table(title=f"stored of {plan.every} steps under Policy.exact(), mean")
    for heading in ("leaves", "in memory", "a save"):
        table.add_column(heading, justify="left" if heading == "leaves" else "right")
    for group in outcome.evidence.groups:
        if group.raw_bytes >= 0.01 * outcome.evidence.saves[-1].raw_bytes:
            sizes = (f"{size / 1e6:.2f} MB" for size in (group.raw_bytes, group.save_bytes))
            table.add_row(group.name, *sizes)
    return table


def _promises(outcome: DemoOutcome) -> Table:
    table = Table(title="what each promises, the steps lost to the kill, and what came back")
    for heading in ("", "promise", "lost", "came back", "final loss"):
        table.add_column(heading)
    for way in outcome.ways:
        lost, difference = way.recovery.lost_steps, outcome.difference(way)
        table.add_row(
            way.method.title,
            way.method.promise,
            str(lost),
            way.recovery.error or kept(way.recovery),
            f"{difference:+.1e}" if difference else "equal",
        )
    return table
