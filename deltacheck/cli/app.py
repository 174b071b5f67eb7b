"""The list of commands, in the groups of ``deltacheck --help``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deltacheck import __version__

# These modules import numpy, frameworks and matplotlib only inside the functions that need them. So
# a command works with no framework installed, and loads nothing that it does not use.
from deltacheck.cli import check, copies, planning, profiling, prune, reporting
from deltacheck.cli.doctor import doctor
from deltacheck.cli.evaluation import evaluate
from deltacheck.cli.inspection import compare, inspect
from deltacheck.cli.launch import launcher
from deltacheck.cli.view import view

app = typer.Typer(
    name="deltacheck",
    help="Make, inspect, check, keep and copy delta checkpoints of any framework.",
    epilog=(
        "Exit codes: 0 success, 1 damage found, 2 wrong usage, 3 not found, 4 damaged data, "
        "5 refused, 6 undecided. Every command takes --json. Documentation: docs/reference/cli.md"
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
)


class _Command(TyperCommand):
    """A command whose usage line shows its metavars (``[ROOT] STEP``) as they are written.

    Click would show the list of words as ``[[ROOT] STEP]...``.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the command's name."""
        metavars = [
            getattr(param, "metavar", None)
            for param in self.params
            if param.param_type_name == "argument"
        ]
        return ["[OPTIONS]", *filter(None, metavars)]


# The order of the groups and of their commands is the order of ``deltacheck --help``.
_GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "run": launcher.run,
    },
    "Inspect": {
        "ls": inspect.ls,
        "show": inspect.show,
        "log": inspect.log,
        "diff": compare.diff,
        "blame": inspect.blame,
        "view": view.view,
    },
    "Check and repair": {
        "verify": check.verify,
        "repair": check.repair,
        "doctor": doctor.doctor,
    },
    "Keep and move": {
        "tag": prune.tag,
        "untag": prune.untag,
        "prune": prune.prune,
        "delete": prune.delete,
        "gc": prune.gc,
        "compact": prune.compact,
        "export": copies.export,
        "import": copies.import_files,
        "branch": copies.branch,
        "mirror": copies.mirror,
        "publish": copies.publish,
    },
    "Plan and measure": {
        "profile": profiling.profile,
        "report": reporting.report,
        "plan": planning.plan,
        "eval": evaluate.evaluate,
    },
}

# Typer takes the help text of a command from the docstring of its function.
for panel, commands in _GROUPS.items():
    for name, command in commands.items():
        # The words after the command that ``run`` starts are not ours.
        words = {"allow_interspersed_args": name != "run"}
        app.command(name, cls=_Command, rich_help_panel=panel, context_settings=words)(command)


def _print_version(requested: bool) -> None:
    # Typer calls this with false, too, if the option is absent.
    if requested:
        typer.echo(f"deltacheck {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    pass
