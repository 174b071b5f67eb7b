"""The ``profile`` command: behaviour of the state of a run over time, from its checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Item, Json, Run, as_misuse, require_new
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.evaluate.offline.recorded import Recorded
    from deltacheck.profile import LeafProfile, Profile
    from deltacheck.profile.record import AdamRule

# Names that training frameworks give to the loss and to the gradient norm in their metrics.
_LOSS = ("loss", "train_loss", "train/loss")
_NORM = ("gradient_norm", "grad_norm", "train/grad_norm")


def profile(
    source: Run = ".",
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The profile to write.")
    ] = Path("profile.json"),
    betas: Annotated[
        str | None,
        typer.Option(
            metavar="B1,B2",
            help="Adam's betas, if the state does not hold them (most optimizers of optax).",
        ),
    ] = None,
    sensitivity: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FACTORY",
            help=(
                "Also train on from what the policy auto restores of each class of leaves; classes"
                " that harm stay exact under auto with this profile."
            ),
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the recorded run.")] = 1,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Write a profile of a run: its frozen, sparse, derived and stable leaves."""
    from msgspec import to_builtins

    from deltacheck import Profiler
    from deltacheck.errors import StepNotFound

    # This is checked before the run is read, because that may take long.
    require_new(out)
    # Every checkpoint is observed, however far apart they are.
    profiler = Profiler(
        interval_steps=1, optimizer=_rule(betas), source=Path(source).resolve().name
    )
    steps = 0
    for step in steps_of(source, item):
        loss, norm = step.metric(*_LOSS), step.metric(*_NORM)
        profiler.observe(step.step, step.state, loss=loss, gradient_norm=norm)
        steps += 1
    if steps < 2:
        raise StepNotFound(
            f"{source} has {steps} steps; a profile compares steps, and needs at least two, better"
            " ten or more"
        )
    result = profiler.profile()
    if sensitivity is not None:
        result = _with_sensitivity(result, source, item, sensitivity, seed)
    result.write(out)
    rows = _rows(result)
    if not as_json:
        output.print_line(f"{steps} steps, {result.interval_steps} apart; written to {out}")
        _print(result, rows)
        return
    rule = result.optimizer
    output.print_json(
        {
            "source": source,
            "file": str(out),
            "steps": steps,
            "interval_steps": result.interval_steps,
            "stable_start": result.stable_start,
            "confidence": result.confidence,
            "betas": None if rule is None else [rule.beta1, rule.beta2],
            "events": [
                {"step": event.step, "what": event.what, "size": event.size}
                for event in result.events
            ],
            "sensitivity": [to_builtins(trial) for trial in result.sensitivity],
            "classes": rows,
        }
    )


def _with_sensitivity(
    profile: Profile, source: str, item: str | None, factory: str, seed: int
) -> Profile:
    """Return a profile with the harm of inexact classes of leaves.

    Args:
        profile: The profile.
        source: The run.
        item: The item of a manager's steps.
        factory: Creates the run that trains on from each class.
        seed: Its seed, that of the recorded run.
    """
    from msgspec.structs import replace

    from deltacheck.backends.profiler import backend_of
    from deltacheck.evaluate.offline.class_trials import class_sensitivity
    from deltacheck.evaluate.offline.recorded import recorded
    from deltacheck.evaluate.offline.trials import Trials
    from deltacheck.evaluate.workload import create_workload, load_factory, workload_folder

    create = load_factory(factory)
    with tempfile.TemporaryDirectory(prefix="deltacheck-trial-") as roots, workload_folder():
        like = create_workload(create, seed).state()
        checkpoints = recorded(source, item, as_torch=backend_of(like) == "torch")
        trials = Trials(create, seed)
        measured = class_sensitivity(checkpoints, trials, like, Path(roots))
    return replace(profile, sensitivity=measured)


def _rule(betas: str | None) -> AdamRule | None:
    from deltacheck.profile import AdamRule

    if betas is None:
        return None
    try:
        beta1, beta2 = map(float, betas.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"--betas takes two numbers with a comma between them, such as 0.9,0.999, not {betas!r}"
        ) from None
    # Updates of Adam are bounded only under this condition; see deltacheck/policy/adam.py.
    if not (0 <= beta1 < 1 and beta1 * beta1 < beta2 < 1):
        raise typer.BadParameter(
            f"--betas {betas} are not valid for Adam: B1 * B1 < B2 < 1 must hold"
        )
    return AdamRule(beta1, beta2)


def steps_of(
    source: str, item: str | None, step_set: Container[int] | None = None
) -> Iterator[Recorded]:
    """Yield the recorded checkpoints of a run; two of one step are wrong usage."""
    from deltacheck.evaluate.offline.recorded import recorded

    with as_misuse():
        yield from recorded(source, item, step_set=step_set)


def _rows(profile: Profile) -> list[Row]:
    """Return a row for each combination of role, kind and type."""
    classes: dict[tuple[str, str, str], list[LeafProfile]] = {}
    for leaf in profile.leaves.values():
        classes.setdefault((leaf.role, leaf.kind, leaf.dtype), []).append(leaf)
    rows: list[Row] = []
    for (role, kind, dtype), leaves in sorted(classes.items()):
        # Medians, because a single odd leaf must not change the row of its class.
        starts = [leaf.stable_from for leaf in leaves if leaf.stable_from is not None]
        densities = [value for leaf in leaves for value in leaf.density.values]
        drifts = [value for leaf in leaves for value in leaf.drift.values]
        rows.append(
            {
                "role": role,
                "kind": kind,
                "dtype": dtype,
                "leaves": len(leaves),
                "density": median(densities) if densities else None,
                "drift": median(drifts) if drifts else None,
                "drift_unit": leaves[0].drift_unit,
                "stable_from": int(median(starts)) if starts else None,
            }
        )
    return rows


def _print(profile: Profile, rows: list[Row]) -> None:
    columns = (
        Column("ROLE", "role", left=True),
        Column("KIND", "kind", left=True),
        Column("TYPE", "dtype", left=True),
        Column("LEAVES", "leaves"),
        Column("CHANGED", "density", output.share),
        Column("DRIFT", "drift", output.number),
        Column("UNIT", "drift_unit", left=True),
        Column("STABLE FROM", "stable_from"),
    )
    if profile.optimizer is None:
        output.print_line(
            "the optimizer is not known to be Adam with one pair of betas: all leaves stay exact"
            " (see --betas)"
        )
    elif profile.stable_start is None:
        output.print_line("no stable start: second moments still drift, or may not be reused")
    else:
        output.print_line(
            f"stable start: step {profile.stable_start}, confidence {profile.confidence:.2f}"
        )
    for trial in profile.sensitivity:
        verdict = "accepted" if trial.accepted else f"kept exact: {'; '.join(trial.reasons)}"
        output.print_line(
            f"{trial.name}, restored inexactly at step {trial.step}: {trial.lost_steps:.2f} of"
            f" {trial.trial_steps} steps lost, loss {trial.loss_change:+.2g} (noise"
            f" {trial.noise_sd:.2g}): {verdict}"
        )
    for event in profile.events:
        output.print_line(f"event at step {event.step}: {event.what} {event.size:.3g}")
    output.print_line("")
    output.print_table(columns, rows)
