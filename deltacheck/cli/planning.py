"""The ``plan`` command: predicted cost of checkpoints, and their best interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Item, Json, RootOnly, parse
from deltacheck.cli.output import Column, Row
from deltacheck.policy.presets import RESTORE_RATIO

if TYPE_CHECKING:
    from deltacheck.profile.planner import Machine, PlannedRun, Prediction, Strategy
    from deltacheck.profile.rates import Rates

# The fields of ``Machine``, in the order of the options below.
# The policies of ``--compare``, the lossless one first.
_COMPARED = ("exact", "auto")
_MACHINE = ("write", "read", "encode", "apply", "copy")


def plan(  # noqa: PLR0913 - one argument per option
    words: RootOnly = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Predict from this profile instead of from the saves of a root."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Plan for this policy, as `simulate` names it: the checkpoints of RUN are saved"
                " again under it. With a profile: exact, or a policy that it was measured for."
                " Default: that of the root; exact with a profile."
            ),
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help=(
                "Compare exact and auto: the checkpoints of RUN are saved again under"
                " each, into a temporary folder."
            ),
        ),
    ] = False,
    mtbf_hours: Annotated[
        float, typer.Option(min=0, metavar="H", help="Mean time between failures of the whole job.")
    ] = 24.0,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Time of a training step. Default: as the saves of the root show.",
        ),
    ] = None,
    restart_seconds: Annotated[
        float,
        typer.Option(min=0, metavar="S", help="Time from a failure until the restore begins."),
    ] = 60.0,
    processes: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of processes that share the state evenly."),
    ] = 1,
    state_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="B",
            help="Plan for a state of this size that changes like the observed one.",
        ),
    ] = None,
    interval_steps: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="K", help="Predict for this interval. Default: the best interval."
        ),
    ] = None,
    max_chain_depth: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help=(
                "Largest number of deltas on a leaf. Larger: fewer keyframes; smaller: faster"
                " restore."
            ),
        ),
    ] = 32,
    max_restore_ratio: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="R",
            help=(
                "Largest size of the deltas that a restore decodes for a leaf, in units of the"
                " leaf's size. Larger: fewer keyframes; smaller: faster restore; 0: no limit."
            ),
        ),
    ] = RESTORE_RATIO,
    max_restore_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Recommend the chain depth that keeps a restore within this time.",
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Measure this machine and the storage of this folder (a few seconds, 200 MB).",
        ),
    ] = None,
    disk_write: Annotated[
        float | None,
        typer.Option(
            "--disk-write-bytes-per-second",
            metavar="B",
            help="Speed of writing, all processes together.",
        ),
    ] = None,
    disk_read: Annotated[
        float | None,
        typer.Option(
            "--disk-read-bytes-per-second",
            metavar="B",
            help="Speed of reading, all processes together.",
        ),
    ] = None,
    encode: Annotated[
        float | None,
        typer.Option(
            "--encode-bytes-per-second",
            metavar="B",
            help="State that one process compares and compresses.",
        ),
    ] = None,
    apply: Annotated[
        float | None,
        typer.Option(
            "--apply-bytes-per-second",
            metavar="B",
            help="State that one process applies deltas to.",
        ),
    ] = None,
    copy: Annotated[
        float | None,
        typer.Option(
            "--copy-bytes-per-second",
            metavar="B",
            help="Memory that the capture of one process copies.",
        ),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Predict bytes, blocking and restore time, the best interval, and whether deltas pay."""
    from deltacheck.evaluate.offline.policy_replay import policy_of
    from deltacheck.profile import planner
    from deltacheck.profile.rates import scaled

    unsteady: dict[str, str] = {}
    others: dict[str, Rates] = {}
    if compare and (profile is not None or policy is not None):
        raise typer.BadParameter("--compare takes neither --profile nor --policy")
    if compare:
        names = [_limits(name, max_chain_depth, max_restore_ratio) for name in _COMPARED]
        observed, others = _observe_policies(words, item, names, interval_steps, unsteady)
    elif profile is not None:
        observed = _observe_profile(profile, policy or "exact")
    elif policy is None:
        observed = _observe_root(words, item)
    else:
        limits = _limits(policy, max_chain_depth, max_restore_ratio)
        observed = _observe_replay(words, item, limits, interval_steps)
    # A given step time wins: the plan may be for another machine than that of the saves.
    seconds = step_seconds or observed.step_seconds
    if not seconds:
        raise typer.BadParameter(
            "--step-seconds is needed: it cannot be derived from "
            + ("a profile" if profile else "this root")
        )
    # The option accepts its minimum, 0, for which there is no best interval.
    if not mtbf_hours:
        raise typer.BadParameter("--mtbf-hours must be more than 0")
    run = planner.PlannedRun(seconds, mtbf_hours * 3600, processes, restart_seconds)
    speeds = dict(zip(_MACHINE, (disk_write, disk_read, encode, apply, copy), strict=True))
    machine = _machine(probe, speeds)
    rates = observed.rates

    def predict(rates: Rates, interval_steps: int | None) -> Prediction:
        return planner.plan(
            rates if state_bytes is None else scaled(rates, state_bytes),
            machine,
            run,
            max_chain_depth=max_chain_depth,
            # 0 means "no limit" on the command line, which the planner writes as ``None``.
            max_restore_ratio=max_restore_ratio or None,
            max_restore_seconds=max_restore_seconds,
            interval_steps=interval_steps,
        )

    asked = interval_steps is not None
    prediction = predict(rates, interval_steps)
    if compare:
        # One interval for all rows: the one that was asked for, or the best one of exact saves.
        interval_steps = prediction.ways[0].interval_steps
        prediction = predict(rates, interval_steps)
    ways = {
        name: predict(policy_rates, interval_steps).ways[0] for name, policy_rates in others.items()
    }
    if as_json:
        output.print_json(
            {
                "source": observed.source,
                "policy": policy or ("exact" if profile or compare else None),
                "compared": [asdict(way) | {"name": name} for name, way in ways.items()],
                "unsteady": unsteady,
                "observed_interval_steps": rates.interval_steps,
                "run": asdict(run),
                "machine": asdict(machine),
                "verdict": verdict(prediction),
                **asdict(prediction),
            }
        )
    else:
        _print(prediction, rates, machine, run, ways, asked)
        for name in _COMPARED if compare else filter(None, (policy,)):
            promises = (f"  {line}" for line in policy_of(name).promises())
            for line in ("", f"a restore under {name}:", *promises):
                output.print_line(line)
        for name, reason in unsteady.items():
            output.warn(f"{name} is not in the table: {reason}")
        if not compare and profile is None:
            output.print_line("")
            output.print_line("other policies: add --compare")


def verdict(prediction: Prediction) -> str:
    """Summarize in a few words whether deltas pay."""
    verdicts = {
        (True, True): "deltas pay: fewer bytes and less time lost",
        (True, False): "deltas save bytes, but no time",
        (False, True): "deltas save time, but few bytes",
        (False, False): "deltas will not pay",
    }
    return verdicts[prediction.saves_bytes, prediction.saves_time]


class _Observation(NamedTuple):
    """Rates of change to predict from, and the time of a step if the source shows it."""

    source: str
    rates: Rates
    step_seconds: float | None


def _observe_root(words: list[str] | None, item: str | None) -> _Observation:
    from deltacheck.report.data import collect
    from deltacheck.report.root_rates import rates_of, step_seconds_of

    record = collect(parse(words).root, item)
    return _Observation(record.root, rates_of(record), step_seconds_of(record))


def _observe_profile(file: Path, policy: str) -> _Observation:
    from deltacheck.profile.rates import from_profile, from_sizes
    from deltacheck.profile.record import Profile

    profile = Profile.read(file)
    measured = {sizes.policy: sizes for sizes in profile.sizes}
    if policy in measured:
        return _Observation(str(file), from_sizes(measured[policy]), None)
    # No formula predicts refreshes, lattices and guards, so nothing is planned without a
    # measurement.
    if policy != "exact":
        known_policies = f"; it has {', '.join(measured)}" if measured else ""
        raise typer.BadParameter(
            f"{file} has no measurement of {policy}{known_policies}. Plan from recorded"
            f" checkpoints, deltacheck plan RUN --policy {policy}, or measure it with deltacheck"
            f" profile RUN --policy {policy}"
        )
    return _Observation(str(file), from_profile(profile), None)


def _limits(policy: str, max_chain_depth: int, max_restore_ratio: float) -> str:
    """Return the description of a policy with the limits of its chains, unless it names them."""
    limits = {
        "max_chain_depth": max_chain_depth,
        "max_restore_ratio": max_restore_ratio or None,
    }
    words = [f"{name}={value}" for name, value in limits.items() if name not in policy]
    if policy.partition(":")[0] == "whole":
        words = words[1:]
    return policy + (":" if ":" not in policy else ",") + ",".join(words) if words else policy


def _observe_replay(
    words: list[str] | None, item: str | None, policy: str, interval_steps: int | None
) -> _Observation:
    """Save recorded checkpoints again under a policy, and return what it wrote."""
    from deltacheck.cli.profiling import measured_rates, run_steps

    source = str(parse(words).root)
    try:
        step_set = run_steps(source, item, interval_steps)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    rates, _ = measured_rates(source, item, [policy], step_set=step_set)[policy]
    return _Observation(source, rates, _step_seconds_of(source, item))


def _observe_policies(
    words: list[str] | None,
    item: str | None,
    names: Sequence[str],
    interval_steps: int | None,
    unsteady: dict[str, str],
) -> tuple[_Observation, dict[str, Rates]]:
    """Save recorded checkpoints again under policies, of which the first is exact.

    Returns:
        The first policy, and the rates of each policy by its name without limits. A policy without
        a steady save is missing, with its reason in ``unsteady``.
    """
    from deltacheck.cli.profiling import measured_rates, run_steps

    source = str(parse(words).root)
    try:
        step_set = run_steps(source, item, interval_steps)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    reasons: dict[str, str] = {}
    measured = measured_rates(source, item, names, step_set=step_set, unsteady=reasons)
    unsteady |= {name.partition(":")[0]: reason for name, reason in reasons.items()}
    rates = {name.partition(":")[0]: policy_rates for name, (policy_rates, _) in measured.items()}
    return _Observation(source, rates[_COMPARED[0]], _step_seconds_of(source, item)), rates


def _step_seconds_of(source: str, item: str | None) -> float | None:
    """Return the time of a training step as the saves of a root show it, if they do."""
    from deltacheck.errors import NotACheckpointRoot
    from deltacheck.report.data import collect
    from deltacheck.report.root_rates import step_seconds_of

    try:
        return step_seconds_of(collect(source, item))
    except NotACheckpointRoot:
        return None


def _machine(folder: Path | None, options: dict[str, float | None]) -> Machine:
    """Return the speeds of the machine: those given, and measured ones for the others."""
    from deltacheck.profile.planner import Machine

    speeds = {name: speed for name, speed in options.items() if speed is not None}
    missing = [name for name in _MACHINE if name not in speeds]
    if missing and folder is None:
        names = ", ".join(
            f"--{'disk-' if name in ('write', 'read') else ''}{name}-bytes-per-second"
            for name in missing
        )
        raise typer.BadParameter(
            f"the speed of the machine is unknown: measure it with --probe FOLDER, or give {names}"
        )
    if missing and folder is not None:
        from deltacheck.profile import probe

        # Given speeds overwrite measured ones: they may be those of another machine.
        speeds = asdict(probe.measure(folder)) | speeds
    # ``not >`` also catches NaN.
    invalid = {name: speed for name, speed in speeds.items() if not speed > 0}
    if invalid:
        values = " and ".join(f"{speed:g}" for speed in invalid.values())
        raise typer.BadParameter(
            f"{', '.join(invalid)}: a speed must be more than 0 bytes per second, not {values}"
        )
    return Machine(**speeds)


def _print(
    prediction: Prediction,
    rates: Rates,
    machine: Machine,
    run: PlannedRun,
    ways: Mapping[str, Strategy],
    asked: bool,
) -> None:
    output.print_line(verdict(prediction))
    for reason in prediction.reasons:
        output.print_line(f"  {reason}")
    output.print_line("")
    processes = f"{run.processes} process{'es' if run.processes > 1 else ''}"
    output.print_line(
        f"state {output.size(prediction.state_bytes)}, {processes}, a step takes"
        f" {run.step_seconds:.4g} s, a failure every {run.mtbf_seconds / 3600:.4g} h; interval of"
        f" the observed saves: {output.count(round(rates.interval_steps), 'step')}"
    )
    speeds = ", ".join(f"{name} {output.size(getattr(machine, name))}/s" for name in _MACHINE)
    output.print_line(f"machine: {speeds}")
    output.print_line(
        f"best interval: {prediction.young_seconds:.4g} s (Young), {prediction.daly_seconds:.4g} s"
        f" (Daly); {'planned' if asked else 'recommended'}:"
        f" every {output.count(prediction.ways[0].interval_steps, 'step')}, max_chain_depth"
        f" {prediction.max_chain_depth}"
    )
    output.print_line(
        f"a keyframe {output.size(prediction.keyframe_bytes)}, a delta"
        f" {output.size(prediction.delta_bytes)}; the longest restore reads"
        f" {output.size(prediction.read_bytes)}"
    )
    output.print_line("")
    columns = (
        Column("METHOD", "name", left=True),
        Column("STEPS", "interval_steps"),
        Column("BYTES", "bytes", output.size),
        Column("BLOCKS", "blocking_seconds", _format_seconds),
        Column("DURABLE", "durable_seconds", _format_seconds),
        Column("RESTORE", "restore_seconds", _format_seconds),
        Column("TIME LOST", "waste", lambda share: f"{share:.3%}"),
    )
    # The last way has an interval of its own, and is among the reasons.
    deltas, *whole = prediction.ways[:3]
    rows: list[Row] = [asdict(way) | {"name": name} for name, way in ways.items()]
    rows = [*(rows or [asdict(deltas)]), *map(asdict, whole)]
    for row in rows:
        row["name"] = _SHORT_NAMES.get(str(row["name"]), row["name"])
    output.print_table(columns, rows)


# Rows of 80 columns.
_SHORT_NAMES = {"whole, written behind training": "whole, in background"}


def _format_seconds(duration: float) -> str:
    return f"{duration * 1e3:.3g} ms" if duration < 1 else f"{duration:.4g} s"
