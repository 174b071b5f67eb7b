"""The ``plan`` command: predicted cost of checkpoints, their best interval, measured policies."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import typer

from deltacheck.cli import output, replays
from deltacheck.cli.arguments import Item, Json, RootOnly, parse
from deltacheck.cli.output import Column, Row
from deltacheck.cli.replays import Replays

if TYPE_CHECKING:
    from deltacheck.policy import Policy
    from deltacheck.profile.planner import Machine, PlannedRun, Prediction, Strategy
    from deltacheck.profile.rates import Rates

# The fields of ``Machine``, in the order of the options below.
_MACHINE = ("write", "read", "encode", "apply", "copy")

# The options of ``plan``.
_Policy: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:KEY=VALUE,...]",
        help=(
            "Measure this policy: the checkpoints of RUN are saved again under it. whole, exact"
            " or auto, with arguments of its preset (auto:moments=bounded). May be repeated."
        ),
    ),
]
_Profile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Profile for --policy auto.",
    ),
]
_MtbfHours: TypeAlias = Annotated[
    float, typer.Option(min=0, metavar="H", help="Mean time between failures of the whole job.")
]
_StepSeconds: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="S",
        help="Time of a training step. Default: as the saves of the root show.",
    ),
]
_RestartSeconds: TypeAlias = Annotated[
    float,
    typer.Option(min=0, metavar="S", help="Time from a failure until the restore begins."),
]
_Processes: TypeAlias = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Number of processes that share the state evenly."),
]
_StateBytes: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="B",
        help="Plan for a state of this size that changes like the observed one.",
    ),
]
_IntervalSteps: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, metavar="K", help="Predict for this interval. Default: the best interval."),
]
_RunSteps: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Also say what a whole run of N steps writes, first save included.",
    ),
]
_MaxRestoreSeconds: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="S",
        help="Recommend the chain depth that keeps a restore within this time.",
    ),
]
_Probe: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Measure this machine and the storage of this folder (a few seconds, 200 MB).",
    ),
]
_Speed: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=B",
        help=(
            "A speed of the machine in bytes per second, instead of the measured one: write or"
            " read of all processes together; encode, apply (state) or copy (memory) of one"
            " process. May be repeated."
        ),
    ),
]


def plan(  # noqa: PLR0913 - one argument per option
    words: RootOnly = None,
    policy: _Policy = None,
    profile: _Profile = None,
    mtbf_hours: _MtbfHours = 24.0,
    step_seconds: _StepSeconds = None,
    restart_seconds: _RestartSeconds = 60.0,
    processes: _Processes = 1,
    state_bytes: _StateBytes = None,
    interval_steps: _IntervalSteps = None,
    run_steps: _RunSteps = None,
    max_restore_seconds: _MaxRestoreSeconds = None,
    probe: _Probe = None,
    speed: _Speed = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Predict bytes, blocking and restore time, the best interval, and whether deltas pay.

    With --policy: also measure what policies write for recorded checkpoints, and their errors.
    """
    names = policy or []
    if profile is not None and not names:
        raise typer.BadParameter("--profile goes with --policy auto")
    # The option accepts its minimum, 0, for which there is no best interval.
    if not mtbf_hours:
        raise typer.BadParameter("--mtbf-hours must be more than 0")
    speeds = _parse_speeds(speed or [])
    # The bytes of a policy depend on no machine, so they are shown without one.
    predicts = not names or probe is not None or bool(speeds)
    if predicts:
        _require_speeds(probe, speeds)
    source = str(parse(words).root)
    policies = replays.policies_of(names, profile)
    measured: Replays | None = None
    if names:
        with tempfile.TemporaryDirectory(prefix="deltacheck-plan-") as folder:
            measured = replays.measure(source, item, policies, interval_steps, Path(folder))
    planned: _Plan | None = None
    if predicts:
        job = _Job(
            step_seconds=step_seconds,
            mtbf_hours=mtbf_hours,
            processes=processes,
            restart_seconds=restart_seconds,
            max_restore_seconds=max_restore_seconds,
            interval_steps=interval_steps,
            state_bytes=state_bytes,
        )
        observed = _observe(source, item, measured)
        planned = _predict(observed, job, _machine(probe, speeds), policies)
    if as_json:
        prediction = (
            {"source": source, "policy": names[0]}
            if planned is None
            else planned.document(run_steps)
        )
        output.print_json(prediction | replays.document(measured, run_steps))
    else:
        _show(planned, measured, policies, run_steps, is_interval_given=interval_steps is not None)
        if planned is not None and measured is None:
            output.print_line("other policies: add --policy exact --policy auto")


def _show(
    planned: _Plan | None,
    measured: Replays | None,
    policies: Mapping[str, Policy],
    run_steps: int | None,
    *,
    is_interval_given: bool,
) -> None:
    """Print a prediction, and what was measured."""
    if planned is not None:
        planned.show(is_interval_given)
        output.print_line("")
    if measured is not None:
        _print_policies(measured, policies, run_steps, is_planned=planned is not None)
    elif planned is not None:
        planned.show_run(run_steps)


class _Job(NamedTuple):
    """The options of the planned job. ``None``: what was observed, or no limit."""

    step_seconds: float | None
    mtbf_hours: float
    processes: int
    restart_seconds: float
    max_restore_seconds: float | None
    interval_steps: int | None
    state_bytes: int | None


class _Plan(NamedTuple):
    """A prediction, and what it was made from.

    Attributes:
        source: The run that was observed.
        policy: The planned policy; empty: that of the root.
        rates: The rates of the planned policy.
        run: The job.
        machine: Its speeds.
        prediction: The prediction for the planned policy.
        ways: The costs of several policies at one interval, by name.
    """

    source: str
    policy: str
    rates: Rates
    run: PlannedRun
    machine: Machine
    prediction: Prediction
    ways: Mapping[str, Strategy]

    def document(self, run_steps: int | None) -> Row:
        """Return the keys of the prediction in the document of ``plan``."""
        run_saves, run_bytes = (
            (None, None) if run_steps is None else self.prediction.of_run(run_steps)
        )
        return {
            "source": self.source,
            "policy": self.policy or None,
            "compared": [asdict(way) | {"name": name} for name, way in self.ways.items()],
            "observed_interval_steps": self.rates.interval_steps,
            "run": asdict(self.run),
            "machine": asdict(self.machine),
            "verdict": verdict(self.prediction),
            **asdict(self.prediction),
            "run_saves": run_saves,
            "run_bytes": run_bytes,
        }

    def show_run(self, steps: int | None) -> None:
        """Print what a run of some steps writes."""
        saves, size = self.prediction.of_run(steps or 0)
        if steps and size:
            state_bytes = self.prediction.state_bytes
            output.print_line(replays.describe_run(steps, saves, size, state_bytes))

    def show(self, is_interval_given: bool) -> None:
        """Print the prediction."""
        prediction, run = self.prediction, self.run
        output.print_line(verdict(prediction))
        for reason in prediction.reasons:
            output.print_line(f"  {reason}")
        output.print_line("")
        processes = f"{run.processes} process{'es' if run.processes > 1 else ''}"
        output.print_line(
            f"state {output.size(prediction.state_bytes)}, {processes}, a step takes"
            f" {run.step_seconds:.4g} s, a failure every {run.mtbf_seconds / 3600:.4g} h; interval"
            f" of the observed saves: {output.count(round(self.rates.interval_steps), 'step')}"
        )
        speeds = ", ".join(
            f"{name} {output.size(getattr(self.machine, name))}/s" for name in _MACHINE
        )
        output.print_line(f"machine: {speeds}")
        young, daly = prediction.young_seconds, prediction.daly_seconds
        output.print_line(
            f"best interval: {young:.4g} s (Young), {daly:.4g} s (Daly);"
            f" {'planned' if is_interval_given else 'recommended'}: every"
            f" {output.count(prediction.ways[0].interval_steps, 'step')}, max_chain_depth"
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
        deltas, *whole_files = prediction.ways[:3]
        rows: list[Row] = [asdict(way) | {"name": name} for name, way in self.ways.items()]
        rows = [*(rows or [asdict(deltas)]), *map(asdict, whole_files)]
        for row in rows:
            row["name"] = _SHORT_NAMES.get(str(row["name"]), row["name"])
        output.print_table(columns, rows)


def _predict(
    observed: _Observation, job: _Job, machine: Machine, policies: Mapping[str, Policy]
) -> _Plan:
    """Predict from observed rates: for the first policy, and a row for each of several.

    Args:
        observed: The rates.
        job: The options of the job.
        machine: The speeds of its machine.
        policies: The policies by name, each with its own limits of a chain. Any other policy has
            the default ones.
    """
    from deltacheck.policy import Policy
    from deltacheck.profile import planner
    from deltacheck.profile.rates import scaled

    # A given step time wins: the plan may be for another machine than that of the saves.
    seconds = job.step_seconds or observed.step_seconds
    if not seconds:
        raise typer.BadParameter(
            f"--step-seconds is needed: it cannot be derived from {observed.source}"
        )
    run = planner.PlannedRun(seconds, job.mtbf_hours * 3600, job.processes, job.restart_seconds)
    rates = {
        name: observed_rates if job.state_bytes is None else scaled(observed_rates, job.state_bytes)
        for name, observed_rates in observed.rates.items()
    }

    def predict(name: str, interval_steps: int | None) -> Prediction:
        limits = policies.get(name) or Policy.exact()
        return planner.plan(
            rates[name],
            machine,
            run,
            max_chain_depth=limits.max_chain_depth,
            max_restore_ratio=limits.max_restore_ratio,
            max_restore_seconds=job.max_restore_seconds,
            interval_steps=interval_steps,
        )

    policy = next(iter(rates))
    prediction = predict(policy, job.interval_steps)
    ways: dict[str, Strategy] = {}
    if observed.is_compared:
        # One interval for all rows: the one that was asked for, or the best one of the first.
        interval = prediction.ways[0].interval_steps
        prediction = predict(policy, interval)
        ways = {name: predict(name, interval).ways[0] for name in rates}
    return _Plan(observed.source, policy, rates[policy], run, machine, prediction, ways)


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
    """Rates of change to predict from, and the time of a step if the source shows it.

    ``rates``: by policy, that of the plan first; the policy of a root has no name.
    ``is_compared``: several policies were measured, even if some had no steady saves.
    """

    source: str
    rates: Mapping[str, Rates]
    step_seconds: float | None
    is_compared: bool = False


def _observe(source: str, item: str | None, measured: Replays | None) -> _Observation:
    """Return the rates of measured policies, else of the saves of a root."""
    from deltacheck.report.data import collect
    from deltacheck.report.root_rates import rates_of, step_seconds_of

    if measured is not None:
        return _observe_policies(source, item, measured)
    record = collect(source, item)
    return _Observation(record.root, {"": rates_of(record)}, step_seconds_of(record))


def _observe_policies(source: str, item: str | None, measured: Replays) -> _Observation:
    """Return the rates of the policies that had steady saves.

    Raises:
        StepNotFound: No policy had any.
    """
    from deltacheck.errors import StepNotFound

    if not measured.rates:
        raise StepNotFound(next(iter(measured.unsteady.values())))
    is_compared = len(measured.policies) > 1
    return _Observation(source, measured.rates, _step_seconds_of(source, item), is_compared)


def _step_seconds_of(source: str, item: str | None) -> float | None:
    """Return the time of a training step as the saves of a root show it, if they do."""
    from deltacheck.errors import NotACheckpointRoot
    from deltacheck.report.data import collect
    from deltacheck.report.root_rates import step_seconds_of

    try:
        return step_seconds_of(collect(source, item))
    except NotACheckpointRoot:
        return None


def _parse_speeds(words: list[str]) -> dict[str, float]:
    """Return the speeds of ``--speed`` by name."""
    speeds: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            speeds[name] = float(value)
        except ValueError:
            speeds[name] = 0.0
        # ``not >`` also catches NaN.
        if name not in _MACHINE or not speeds[name] > 0:
            raise typer.BadParameter(
                f"--speed takes {', '.join(_MACHINE)} and a number of bytes per second above 0,"
                f" such as write=1e9, not {word!r}"
            )
    return speeds


def _require_speeds(folder: Path | None, speeds: Mapping[str, float]) -> None:
    """Raise ``BadParameter`` if a speed is neither given nor can be measured in a folder."""
    missing = [f"--speed {name}=B" for name in _MACHINE if name not in speeds]
    if missing and folder is None:
        raise typer.BadParameter(
            "the speed of the machine is unknown: measure it with --probe FOLDER, or give"
            f" {' '.join(missing)}"
        )


def _machine(folder: Path | None, speeds: dict[str, float]) -> Machine:
    """Return the speeds of the machine: those given, and measured ones for the others."""
    from deltacheck.profile import probe
    from deltacheck.profile.planner import Machine

    if folder is None or len(speeds) == len(_MACHINE):
        return Machine(**speeds)
    # Given speeds overwrite measured ones: they may be those of another machine.
    return Machine(**(asdict(probe.measure(folder)) | speeds))


def _print_policies(
    measured: Replays, policies: Mapping[str, Policy], run_steps: int | None, *, is_planned: bool
) -> None:
    """Print what policies wrote, what they promise, and why a prediction lacks some of them."""
    replays.show(measured, run_steps)
    never_stable = [result.policy for result in measured.policies if result.stable_from is None]
    for name, policy in policies.items():
        if name in never_stable and policy.hidden and policy.hidden.moments == "reused":
            output.warn(f"{name} reused no moments: no checkpoint was in the stable stage")
    for name, policy in policies.items():
        output.print_line("")
        output.print_line(f"a restore under {name}:")
        for line in policy.promises():
            output.print_line(f"  {line}")
    if is_planned:
        for name, reason in measured.unsteady.items():
            output.warn(f"{name} is not in the table: {reason}")


# Rows of 80 columns.
_SHORT_NAMES = {"whole, written behind training": "whole, in background"}


def _format_seconds(duration: float) -> str:
    return f"{duration * 1e3:.3g} ms" if duration < 1 else f"{duration:.4g} s"
