"""The list of commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deltacheck import __version__
from deltacheck.cli import (
    blame,
    branch,
    check,
    compare,
    demo,
    evaluate,
    ingest,
    mirror,
    plan,
    profile,
    report,
    retention,
)
from deltacheck.cli import copies as export
from deltacheck.cli import inspect as listing

app = typer.Typer(
    name="deltacheck",
    help="Look at, check, compare and export delta checkpoints, whichever framework wrote them.",
    epilog=(
        "Exit codes: 0 ok, 1 damage found, 2 misuse, 3 not found, 4 damaged data met, 5 refused. "
        "Every command takes --json. Documentation: docs/reference/cli.md"
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
)


class _Command(TyperCommand):
    """Shows the words that a command takes as they are meant, where click would show ``[[ROOT]
    STEP]...``.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        metavars = [
            getattr(param, "metavar", None)
            for param in self.params
            if param.param_type_name == "argument"
        ]
        return ["[OPTIONS]", *filter(None, metavars)]


for name, command in (
    ("ls", listing.ls),
    ("show", listing.show),
    ("log", listing.log),
    ("diff", compare.diff),
    ("blame", blame.blame),
    ("verify", check.verify),
    ("restore", export.export),
    ("export", export.export),
    ("import", ingest.ingest),
    ("tag", retention.tag),
    ("untag", retention.untag),
    ("prune", retention.prune),
    ("delete", retention.delete),
    ("branch", branch.branch),
    ("mirror", mirror.mirror),
    ("repair", check.repair),
    ("gc", check.gc),
    ("compact", check.compact),
    ("profile", profile.profile),
    ("report", report.report),
    ("plan", plan.plan),
    ("eval", evaluate.evaluate),
    ("demo", demo.demo),
):
    app.command(name, cls=_Command)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltacheck {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    pass
