"""Recorded checkpoints, saved again under policies: the part of ``plan`` that measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from deltacheck.cli import output
from deltacheck.cli.arguments import as_misuse
from deltacheck.cli.output import Column, Row
from deltacheck.cli.profiling import steps_of

if TYPE_CHECKING:
    from deltacheck.evaluate.offline.policy_replay import PolicyReplay
    from deltacheck.policy import Policy
    from deltacheck.profile.rates import Rates


class Replays(NamedTuple):
    """The results of policies for the checkpoints of a run.

    Attributes:
        policies: The result of each policy, in the given order.
        rates: The rates of each policy that had steady saves, by its name.
        unsteady: The reason for each policy that had none.
    """

    policies: tuple[PolicyReplay, ...]
    rates: Mapping[str, Rates]
    unsteady: Mapping[str, str]


def policies_of(names: list[str], profile: Path | None) -> dict[str, Policy]:
    """Return the named policies.

    Args:
        names: The policies, as ``presets.policy_of`` reads them.
        profile: The file of the profile for ``auto``, ``None`` for none.
    """
    from deltacheck.policy.presets import policy_of
    from deltacheck.profile import Profile

    run_profile = None if profile is None or not names else Profile.read(profile)
    with as_misuse():
        return {name: policy_of(name, run_profile) for name in names}


def measure(
    source: str,
    item: str | None,
    policies: dict[str, Policy],
    interval_steps: int | None,
    folder: Path,
) -> Replays:
    """Save recorded checkpoints again under policies.

    Args:
        source: The run.
        item: The item of a manager's steps.
        policies: The policies by name.
        interval_steps: The interval to measure, ``None`` for that of the checkpoints.
        folder: An empty folder for the scratch roots.
    """
    from deltacheck.errors import StepNotFound
    from deltacheck.evaluate.offline.measured import rates_under, thinned
    from deltacheck.evaluate.offline.policy_replay import replay
    from deltacheck.evaluate.offline.recorded import steps_in

    with as_misuse():
        step_set = thinned(steps_in(source, item), interval_steps)
    replays = replay(steps_of(source, item, step_set), policies, folder)
    rates, unsteady = dict[str, "Rates"](), dict[str, str]()
    for result in replays:
        try:
            rates[result.policy] = rates_under(result)
        except StepNotFound as error:
            unsteady[result.policy] = str(error)
    return Replays(replays, rates, unsteady)


def show(replays: Replays, run_steps: int | None) -> None:
    """Print the tables of bytes and errors, and the bytes of a run of some steps."""
    first = replays.policies[0].sizes
    output.print_line(
        f"{first.saves} checkpoints, a state of {output.size(first.raw_bytes)}; shares are of the"
        " state; MEAN, LARGEST and causes are of steady saves: in the stable stage if there is one,"
        " without the first save and those that follow an event"
    )
    output.print_line("")
    output.print_table(_SIZES, [_row(result) for result in replays.policies])
    for result in replays.policies:
        if run_steps is not None:
            saves, size = _run(result, run_steps)
            output.print_line(
                f"{result.policy}: {describe_run(run_steps, saves, size, first.raw_bytes)}"
            )
    errors = [
        asdict(contract) | {"policy": result.policy, "used": contract.used}
        for result in replays.policies
        for contract in result.contracts
    ]
    if errors:
        output.print_line("")
        output.print_table(_ERRORS, errors)


def describe_run(steps: int, saves: int, size: float, state_bytes: int) -> str:
    """Return the bytes of a run in words: in all, and as a share of whole checkpoints."""
    share = output.share(size / (saves * state_bytes)) if state_bytes else "-"
    return (
        f"a run of {output.count(steps, 'step')} writes {output.size(size)} in"
        f" {output.count(saves, 'save')}, the first included: {share} of the state each"
    )


def _run(result: PolicyReplay, run_steps: int) -> tuple[int, float]:
    """Return the saves of a run at the interval of the checkpoints, and their bytes."""
    from deltacheck.evaluate.offline.policy_replay import bytes_of_run

    interval = median(after.step - before.step for before, after in pairwise(result.steps))
    saves = max(1, int(run_steps // interval))
    return saves, bytes_of_run(result, saves)


def document(replays: Replays | None, run_steps: int | None) -> Row:
    """Return the keys of replays in the document of ``plan``."""
    if replays is None:
        return {"unsteady": {}, "policies": []}
    return {
        "unsteady": dict(replays.unsteady),
        "policies": [_document(result, run_steps) for result in replays.policies],
    }


_SIZES = (
    Column("POLICY", "policy", left=True),
    Column("STABLE FROM", "stable_from"),
    Column("ALL SAVES", "all_share", output.share),
    Column("STEADY", "steady_saves"),
    Column("MEAN", "share", output.share),
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


def _row(result: PolicyReplay) -> Row:
    sizes = result.sizes
    mean, raw = sizes.steady_bytes, max(1, sizes.raw_bytes)
    return {
        "policy": result.policy,
        "stable_from": result.stable_from,
        "all_share": sizes.mean_bytes / raw,
        "share": None if mean is None else mean / raw,
        **asdict(sizes),
        **sizes.causes,
    }


def _document(result: PolicyReplay, run_steps: int | None) -> Row:
    saves, size = (None, None) if run_steps is None else _run(result, run_steps)
    return {
        "policy": result.policy,
        "run_saves": saves,
        "run_bytes": size,
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
