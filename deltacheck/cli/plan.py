"""`plan`: what checkpoints of a run will cost, how often to save, and whether deltas pay."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json, JustRoot
from deltacheck.cli.output import Column, Row
from deltacheck.policy.presets import RESTORE_RATIO

if TYPE_CHECKING:
    from deltacheck.profile.planner import Machine, Plan, Run
    from deltacheck.profile.rates import Rates
    from deltacheck.report.data import Record

_MACHINE = ("write", "read", "encode", "apply", "copy")
_PER_SECOND = "bytes per second"


def plan(
    words: JustRoot = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Predict from this profile, instead of from what a root holds."
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="exact|model_exact",
            help="With a profile: keep every bit, or the contracts that it recommends.",
        ),
    ] = "exact",
    mtbf_hours: Annotated[
        float, typer.Option(min=0, metavar="H", help="Mean time between failures of the whole job.")
    ] = 24.0,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Time of a training step; of a root, by default as its saves show.",
        ),
    ] = None,
    restart_seconds: Annotated[
        float, typer.Option(min=0, metavar="S", help="From a failure until the restore begins.")
    ] = 60.0,
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Among which the state is divided evenly.")
    ] = 1,
    state_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="B",
            help="Plan for a state of this size that behaves like the observed one.",
        ),
    ] = None,
    interval_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Judge this interval; else find the best one."),
    ] = None,
    max_chain_depth: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Most deltas on a leaf. Larger: fewer keyframes, longer restore.",
        ),
    ] = 32,
    max_restore_ratio: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="R",
            help=(
                "Most that a restore decodes of a leaf's deltas, in units of the leaf; 0: no limit."
            ),
        ),
    ] = RESTORE_RATIO,
    max_restore_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="S", help="Recommend the chain depth that keeps a restore within this."
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Measure this machine, and the storage of this folder (a few seconds, 200 MB).",
        ),
    ] = None,
    disk_write: Annotated[
        float | None,
        typer.Option(
            "--disk-write-bytes-per-second", metavar="B", help="Of all processes together."
        ),
    ] = None,
    disk_read: Annotated[
        float | None,
        typer.Option(
            "--disk-read-bytes-per-second", metavar="B", help="Of all processes together."
        ),
    ] = None,
    encode: Annotated[
        float | None,
        typer.Option(
            "--encode-bytes-per-second",
            metavar="B",
            help="State compared and compressed, one process.",
        ),
    ] = None,
    apply: Annotated[
        float | None,
        typer.Option(
            "--apply-bytes-per-second",
            metavar="B",
            help="State that deltas are applied to, one process.",
        ),
    ] = None,
    copy: Annotated[
        float | None,
        typer.Option(
            "--copy-bytes-per-second",
            metavar="B",
            help="Memory that a capture copies, one process.",
        ),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Predict bytes, blocking and restore time, the best interval, and whether deltas pay."""
    from deltacheck.cli import arguments as where
    from deltacheck.profile import planner
    from deltacheck.profile.rates import from_profile, scaled

    if policy not in ("exact", "model_exact"):
        raise typer.BadParameter(f"--policy is exact or model_exact, not {policy!r}")
    if profile is None and policy != "exact":
        raise typer.BadParameter(
            "--policy needs a --profile: the bytes of a root are those of the policy that wrote it"
        )
    if profile is not None:
        from deltacheck.profile.record import Profile

        source, rates, seen = (
            str(profile),
            from_profile(Profile.read(profile), exact=policy == "exact"),
            None,
        )
    else:
        from deltacheck.report.data import collect

        record = collect(where.parse(words).root, item)
        source, rates, seen = record.root, _rates(record), _step_seconds(record)
    seconds = step_seconds or seen
    if not seconds:
        raise typer.BadParameter(
            "--step-seconds is needed: it cannot be told from "
            + ("a profile" if profile else "this root")
        )
    if not mtbf_hours:
        raise typer.BadParameter("--mtbf-hours must be more than 0")
    run = planner.Run(seconds, mtbf_hours * 3600, processes, restart_seconds)
    machine = _machine(
        probe, dict(zip(_MACHINE, (disk_write, disk_read, encode, apply, copy), strict=True))
    )
    found = planner.plan(
        rates if state_bytes is None else scaled(rates, state_bytes),
        machine,
        run,
        max_chain_depth=max_chain_depth,
        max_restore_ratio=max_restore_ratio or None,
        max_restore_seconds=max_restore_seconds,
        interval_steps=interval_steps,
    )
    if as_json:
        about = {
            "source": source,
            "policy": policy if profile else None,
            "observed_interval_steps": rates.interval_steps,
        }
        output.print_json(
            about
            | {
                "run": asdict(run),
                "machine": asdict(machine),
                "verdict": verdict(found),
                **asdict(found),
            }
        )
    else:
        _print(found, rates, machine, run)


def verdict(found: Plan) -> str:
    """In a few words."""
    words = {
        (True, True): "deltas pay: fewer bytes and less time lost",
        (True, False): "deltas save bytes, but no time",
        (False, True): "deltas save time, but few bytes",
        (False, False): "deltas will not pay",
    }
    return words[found.saves_bytes, found.saves_time]


def _rates(record: Record) -> Rates:
    """What the saves of a root cost. Leaves that were always written whole count as changed
    altogether.
    """
    from deltacheck.errors import StepNotFound
    from deltacheck.profile.rates import LeafRate, Rates

    steps = [step for step in record.steps if step.problem is None]
    apart = [b.step - a.step for a, b in itertools.pairwise(steps) if b.step > a.step]
    if not apart:
        raise StepNotFound(
            f"{record.root} has fewer than two steps that can be compared; give a --profile, or"
            " save twice"
        )
    leaves = tuple(
        LeafRate(
            leaf.raw_bytes,
            leaf.word_bytes,
            leaf.density / leaf.saves if leaf.saves else 1.0,
            leaf.delta_bytes / leaf.saves if leaf.saves else leaf.key_bytes,
            leaf.key_bytes,
        )
        for leaf in record.leaves.values()
    )
    computed = steps[-1].raw_bytes - sum(
        leaf.raw_bytes for leaf in leaves
    )  # at a restore, or stored as smaller codes
    if computed > 0:
        leaves += (LeafRate(computed, 1, 0.0, 0.0, 0.0),)
    tables = statistics.fmean(step.written["tables"] for step in steps[1:])
    return Rates(statistics.median(apart), leaves, tables)


def _step_seconds(record: Record) -> float | None:
    """The median over neighbouring saves of one run: what lies between two runs takes far longer
    than any step.
    """
    found = [
        (b.time - a.time) / (b.step - a.step)
        for a, b in itertools.pairwise(record.steps)
        if b.step > a.step and b.time > a.time
    ]
    return statistics.median(found) if found else None


def _machine(folder: Path | None, given: dict[str, float | None]) -> Machine:
    from deltacheck.profile.planner import Machine

    known = {name: rate for name, rate in given.items() if rate is not None}
    missing = [name for name in _MACHINE if name not in known]
    if missing and folder is None:
        options = ", ".join(
            f"--{'disk-' if name in ('write', 'read') else ''}{name}-bytes-per-second"
            for name in missing
        )
        raise typer.BadParameter(
            "the speed of the machine is not known: measure it with --probe FOLDER, or give"
            f" {options}"
        )
    if missing and folder is not None:
        from deltacheck.cli import probe

        known = asdict(probe.measure(folder)) | known
    wrong = [name for name, rate in known.items() if not rate > 0]
    if wrong:
        raise typer.BadParameter(f"{', '.join(wrong)}: a speed must be more than 0 {_PER_SECOND}")
    return Machine(**known)


def _print(found: Plan, rates: Rates, machine: Machine, run: Run) -> None:
    output.print_line(f"{verdict(found)}")
    for reason in found.reasons:
        output.print_line(f"  {reason}")
    output.print_line("")
    output.print_line(
        f"state {output.size(found.state_bytes)}, {run.processes}"
        f" process{'es' if run.processes > 1 else ''}, a step takes {run.step_seconds:.4g} s, a"
        f" failure every {run.mtbf_seconds / 3600:.4g} h; observed {rates.interval_steps:g} steps"
        " apart"
    )
    speeds = ", ".join(
        f"{name} {output.size(round(getattr(machine, name)))}/s" for name in _MACHINE
    )
    output.print_line(f"machine: {speeds}")
    output.print_line(
        f"best interval by Young {found.young_seconds:.4g} s, by Daly {found.daly_seconds:.4g} s;"
        f" recommended: every {found.ways[0].interval_steps} steps, max_chain_depth"
        f" {found.max_chain_depth}"
    )
    output.print_line(
        f"a keyframe {output.size(round(found.keyframe_bytes))}, a delta"
        f" {output.size(round(found.delta_bytes))}; the longest restore reads"
        f" {output.size(round(found.read_bytes))}"
    )
    output.print_line("")
    columns = (
        Column("WAY", "name", left=True),
        Column("EVERY", "interval_steps", lambda steps: f"{steps} steps"),
        Column("BYTES", "bytes", lambda count: output.size(round(count))),
        Column("BLOCKS", "blocking_seconds", _seconds),
        Column("DURABLE IN", "durable_seconds", _seconds),
        Column("RESTORE", "restore_seconds", _seconds),
        Column("TIME LOST", "waste", lambda share: f"{share:.3%}"),
    )
    rows: list[Row] = [asdict(way) for way in found.ways]
    output.print_table(columns, rows)


def _seconds(duration: float) -> str:
    return f"{duration * 1e3:.3g} ms" if duration < 1 else f"{duration:.4g} s"
