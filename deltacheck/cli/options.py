"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON: results on stdout, errors on stderr.")
]
Item: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--item",
        metavar="NAME",
        help="The item of a CheckpointManager's steps, where they have several.",
    ),
]
Leaves: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--leaves",
        metavar="PATTERN",
        help="Only leaves whose path matches (* matches / too). May be repeated.",
    ),
]

_ROOT = "The root: a directory, by default the current one, or s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."
_STEP = "A step is a number, 'latest' or @TAG; anything else is the root."
JustRoot: TypeAlias = Annotated[list[str] | None, typer.Argument(metavar="[ROOT]", help=_ROOT)]
RootStep: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[ROOT] STEP", help=f"{_ROOT} {_STEP}")
]
RootMaybeStep: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ROOT] [STEP]", help=f"{_ROOT} {_STEP} No step: all of them."),
]
RootTwoSteps: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[ROOT] STEP STEP", help=f"{_ROOT} {_STEP}")
]
