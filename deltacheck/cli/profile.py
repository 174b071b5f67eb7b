"""`profile`: what the state of a run does over time, from the checkpoints that are there."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.profile import LeafProfile, Profile
    from deltacheck.profile.record import AdamRule

# Names under which runs report their loss and the norm of their gradients, in the metrics of a
# save.
_LOSS, _NORM = (
    ("loss", "train_loss", "train/loss"),
    ("gradient_norm", "grad_norm", "train/grad_norm"),
)


class _Step(NamedTuple):
    step: int
    state: object
    loss: float | None = None
    gradient_norm: float | None = None


def profile(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A root, a folder of torch.save files, or a plain Orbax CheckpointManager's.",
        ),
    ] = ".",
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where the profile goes.")
    ] = Path("profile.json"),
    betas: Annotated[
        str | None,
        typer.Option(
            metavar="B1,B2",
            help="Adam's betas, where the state does not hold them (most of optax).",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Octaves that a stable second moment may drift. Larger: earlier, more reuse.",
        ),
    ] = 0.1,
    sample: Annotated[
        int, typer.Option(min=1, help="Blocks of 64 elements to look at, for each class of leaves.")
    ] = 64,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it is there.")] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Tell which leaves of a run are frozen, sparse, derived or stable, and write it to a
    profile.
    """
    from deltacheck import Profiler
    from deltacheck.errors import StepNotFound

    if out.exists() and not force:
        raise FileExistsError(
            errno.EEXIST, "is there; replace it with --force, or name another with --out", str(out)
        )
    profiler = Profiler(
        interval_steps=1, sample=sample, optimizer=_rule(betas), source=Path(source).resolve().name
    )
    steps = 0
    for seen in _steps(source, item):
        profiler.observe(seen.step, seen.state, loss=seen.loss, gradient_norm=seen.gradient_norm)
        steps += 1
    if steps < 2:
        raise StepNotFound(
            f"{source} has {steps} step; a profile compares steps, and needs at least two, better"
            " ten and more"
        )
    found = profiler.profile(tolerance)
    found.write(out)
    rows = _rows(found)
    about: Row = {
        "source": str(source),
        "file": str(out),
        "steps": steps,
        "interval_steps": found.interval_steps,
    }
    if as_json:
        rule = found.optimizer
        about |= {"stable_start": found.stable_start, "confidence": found.confidence}
        about |= {"betas": None if rule is None else [rule.beta1, rule.beta2]}
        about |= {
            "events": [{"step": e.step, "what": e.what, "size": e.size} for e in found.events],
            "classes": rows,
        }
        output.print_json(about)
    else:
        _print(found, about, rows)


def _rule(betas: str | None) -> AdamRule | None:
    from deltacheck.profile import AdamRule

    if betas is None:
        return None
    try:
        one, other = map(float, betas.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"--betas takes two numbers with a comma between them, such as 0.9,0.999, not {betas!r}"
        ) from None
    if not (0 <= one < 1 and one * one < other < 1):
        raise typer.BadParameter(
            f"--betas {betas} are not those of an Adam: B1 * B1 < B2 < 1 must hold"
        )
    return AdamRule(one, other)


def _steps(source: str, item: str | None) -> Iterator[_Step]:
    """The states of a run, step after step, whatever wrote them; one at a time in memory."""
    from deltacheck import open as open_root
    from deltacheck.errors import NotACheckpointRoot

    try:
        checkpoints = open_root(source, item=item)
    except NotACheckpointRoot as error:
        yield from _foreign_steps(Path(source), item, error)
        return
    for step in checkpoints.steps():
        metrics = checkpoints.manifest(step).metrics
        state = checkpoints.restore(
            step, contract="exact"
        )  # a reused moment would prove itself stable
        yield _Step(step, state, _metric(metrics, _LOSS), _metric(metrics, _NORM))


def _foreign_steps(source: Path, item: str | None, otherwise: Exception) -> Iterator[_Step]:
    inside = list(source.iterdir()) if source.is_dir() else []
    if any(path.suffix in (".pt", ".pth", ".bin", ".ckpt") for path in inside):
        from deltacheck.backends.torch.state import sampling as torch_files

        try:
            torch_files.files(source)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        yield from (_Step(step, state) for step, state in torch_files.states(source))
    elif any(path.is_dir() and path.name.rpartition("_")[2].isdecimal() for path in inside):
        from deltacheck.backends.orbax.state import sampling as orbax_steps

        yield from (_Step(step, state) for step, state in orbax_steps.states(source, item))
    else:
        raise otherwise


def _metric(metrics: Mapping[str, float | str], names: tuple[str, ...]) -> float | None:
    return next((float(metrics[name]) for name in names if name in metrics), None)


def _rows(found: Profile) -> list[Row]:
    """A line for each role and kind."""
    classes: dict[tuple[str, str, str], list[LeafProfile]] = {}
    for leaf in found.leaves.values():
        classes.setdefault((leaf.role, leaf.kind, leaf.dtype), []).append(leaf)
    rows: list[Row] = []
    for (role, kind, dtype), leaves in sorted(classes.items()):
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
                "exact_bytes": median(leaf.exact_bytes for leaf in leaves),
                "stable_from": int(median(starts)) if starts else None,
            }
        )
    return rows


def _print(found: Profile, about: Row, rows: list[Row]) -> None:
    columns = (
        Column("ROLE", "role", left=True),
        Column("KIND", "kind", left=True),
        Column("TYPE", "dtype", left=True),
        Column("LEAVES", "leaves"),
        Column("CHANGED", "density", output.share),
        Column("DRIFT", "drift", output.number),
        Column("UNIT", "drift_unit", left=True),
        Column("EXACT B/ELEMENT", "exact_bytes", output.number),
        Column("STABLE FROM", "stable_from"),
    )
    output.print_line(
        f"{about['steps']} steps, {found.interval_steps} apart; written to {about['file']}"
    )
    if found.optimizer is None:
        output.print_line(
            "the optimizer is not known to be Adam with one pair of betas: all leaves stay exact"
            " (see --betas)"
        )
    elif found.stable_start is None:
        output.print_line("no second moment is stable yet")
    else:
        output.print_line(
            f"stable from step {found.stable_start}, confidence {found.confidence:.2f}"
        )
    for event in found.events:
        output.print_line(f"event at step {event.step}: {event.what} {event.size:.3g}")
    output.print_line("")
    output.print_table(columns, rows)
