"""`mirror`: keep a second copy of a memory tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Json


def mirror(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The memory root of an engine.")],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="Where the copy lies: a directory that is new, or was a mirror of the same run.",
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Copy what is there now, and end.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="End when nothing new has come for so long (default: never).",
        ),
    ] = None,
    poll: Annotated[
        float, typer.Option(min=0.01, metavar="SECONDS", help="Between two looks for a new step.")
    ] = 0.2,
    power: Annotated[
        bool,
        typer.Option("--power", help="Sync the copy, so that it survives a power cut; slower."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy each step of a memory tier as it appears, and delete what is deleted there. Takes no
    lock on the source.
    """
    from deltacheck.maintain.mirror import Mirror

    with Mirror(source, target, "power" if power else "process") as copy:
        count = copy.run(poll_seconds=poll, timeout=0 if once else timeout)
    if as_json:
        output.print_json({"source": str(source), "target": str(target), "copied": count})
    else:
        output.print_line(f"{target}: {count} steps copied")
