"""The ``simulate`` command: recorded checkpoints, saved again under several policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Item, Json, Run, working_folder
from deltacheck.cli.output import Column, Row
from deltacheck.cli.profiling import policies_of, steps_as, steps_of, workload_folder

if TYPE_CHECKING:
    from deltacheck.evaluate.offline.policy_replay import PolicyReplay
    from deltacheck.profile.sensitivity import Verdict

_EXACT = "exact"


def simulate(  # noqa: PLR0913 - one argument per option
    source: Run = ".",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help=(
                "A policy: whole, exact or auto, with arguments of its preset"
                " (auto:weights=bounded). May be repeated. Default: exact and auto."
            ),
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Profile for auto. Default: none.",
        ),
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FACTORY",
            help="Also train on from what each policy restores, and compare the progress.",
        ),
    ] = None,
    trial_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Training steps of each trial.")
    ] = 10,
    orders: Annotated[
        int,
        typer.Option(
            min=2, metavar="N", help="Trials on other data. Larger: a better known noise; slower."
        ),
    ] = 3,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the recorded run.")] = 1,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the scratch roots in this new or empty folder."),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Save recorded checkpoints again under several policies, and compare them."""
    from deltacheck.evaluate.offline.policy_replay import replay
    from deltacheck.profile import Profile

    names = policy or [_EXACT, "auto"]
    policies = policies_of(names, None if profile is None else Profile.read(profile))
    with working_folder(keep, "deltacheck-simulate-") as folder:
        if factory is None:
            replays = replay(steps_of(source, item), policies, folder)
            _show(source, replays, None, (), as_json)
            return
        from deltacheck.evaluate.offline.quality import Trials, quality
        from deltacheck.evaluate.workload import create_workload, load_factory

        create = load_factory(factory)
        with workload_folder(folder):
            like = create_workload(create, seed).state()
            # An exact root keeps the states that the trials compare with.
            extra = {} if _EXACT in policies else policies_of([_EXACT])
            checkpoints = steps_as(like, source, item)
            replays = replay(checkpoints, policies | extra, folder)
            exact = next(result for result in replays if result.policy == _EXACT)
            replays = tuple(result for result in replays if result.policy in policies)
            step, verdicts = quality(
                [result for result in replays if result.contracts],
                exact,
                Trials(create, seed, trial_steps, orders),
                like,
            )
        _show(source, replays, step, verdicts, as_json)


def _show(
    source: str,
    replays: Sequence[PolicyReplay],
    trial_step: int | None,
    verdicts: Sequence[Verdict],
    as_json: bool,
) -> None:
    if as_json:
        output.print_json(
            {
                "source": source,
                "policies": [_document(result) for result in replays],
                "trial_step": trial_step,
                "quality": [asdict(verdict) for verdict in verdicts],
            }
        )
        return
    rows = [_row(result) for result in replays]
    first = replays[0].sizes
    output.print_line(
        f"{first.saves} checkpoints, a state of {output.size(first.raw_bytes)}; MEAN, LARGEST and"
        " causes are of steady saves: in the stable stage if there is one, without the first save"
        " and those that follow an event"
    )
    output.print_line("")
    output.print_table(_SIZES, rows)
    errors = [
        asdict(contract) | {"policy": result.policy, "used": contract.used}
        for result in replays
        for contract in result.contracts
    ]
    if errors:
        output.print_line("")
        output.print_table(_ERRORS, errors)
    if verdicts:
        output.print_line("")
        output.print_line(
            f"restored at step {trial_step} and trained on; the loss beside the standard deviation"
            " between other orders of the data"
        )
        output.print_table(_QUALITY, [asdict(verdict) for verdict in verdicts])


_SIZES = (
    Column("POLICY", "policy", left=True),
    Column("STABLE FROM", "stable_from"),
    Column("ALL SAVES", "mean_bytes", output.size),
    Column("STEADY", "steady_saves"),
    Column("MEAN", "steady_bytes", output.size),
    Column("OF RAW", "share", output.share),
    Column("LARGEST", "most_bytes", output.size),
    Column("KEYFRAME", "keyframe", output.size),
    Column("LATTICE", "lattice", output.size),
    Column("REFRESH", "refresh", output.size),
    Column("EVENT", "event", output.size),
    Column("CHANGED", "changed", output.size),
    Column("MERGED", "merged", output.size),
    Column("REST", "rest", output.size),
)
_ERRORS = (
    Column("POLICY", "policy", left=True),
    Column("LEAVES", "of", left=True),
    Column("CONTRACT", "contract", left=True),
    Column("MEASURED", "measured", output.number),
    Column("LIMIT", "limit", output.number),
    Column("NORM", "norm", left=True),
    Column("OF LIMIT", "used", output.share),
    Column("AGE", "age_steps", lambda steps: f"{steps} steps"),
)
_QUALITY = (
    Column("POLICY", "name", left=True),
    Column("LOST STEPS", "lost_steps", lambda steps: f"{steps:.2f}"),
    Column("LOSS CHANGE", "loss_change", lambda change: f"{change:+.3g}"),
    Column("NOISE SD", "noise_sd", output.number),
    Column("DISTANCE", "distance", output.number),
    Column("LARGEST CHANGE", "element_change", lambda change: f"{change:.3g} lr"),
)


def _row(result: PolicyReplay) -> Row:
    sizes = result.sizes
    mean = sizes.steady_bytes
    return {
        "policy": result.policy,
        "stable_from": result.stable_from,
        "share": None if mean is None or not sizes.raw_bytes else mean / sizes.raw_bytes,
        **asdict(sizes),
        **sizes.causes,
    }


def _document(result: PolicyReplay) -> Row:
    return {
        "policy": result.policy,
        "stable_from": result.stable_from,
        **asdict(result.sizes),
        "contracts": [asdict(contract) | {"used": contract.used} for contract in result.contracts],
        "steps": [
            {
                "step": step.step,
                "stage": step.stage,
                "written_bytes": step.written_bytes,
                "causes": dict(step.causes),
            }
            for step in result.steps
        ],
    }
