"""The list of commands, in the groups of ``deltacheck --help``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deltacheck import __version__

# These modules import numpy, frameworks and matplotlib only inside the functions that need them. So
# a command works with no framework installed, and loads nothing that it does not use.
from deltacheck.cli import check, planning, profiling, prune, reporting
from deltacheck.cli.copying import export_command, import_command, places
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


# The order of the groups and of their commands is the order of ``deltacheck --help``. The words
# after the name of each command are the example in its own help.
_GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "run --restarts 3 -- accelerate launch train.py --output_dir out": launcher.run,
    },
    "Inspect": {
        "ls run": inspect.ls,
        'show run latest --leaves "model/*"': inspect.show,
        "log run --by-class 2": inspect.log,
        "diff run 0 latest": compare.diff,
        "view run": view.view,
    },
    "Check and repair": {
        "verify run 2 --deep": check.verify,
        "repair run --dry-run": check.repair,
        "doctor run": doctor.doctor,
    },
    "Keep and move": {
        "tag run 1 baseline": prune.tag,
        "prune run --keep-last 2 --keep-best loss:min:3 --dry-run": prune.prune,
        "export run latest --to hf --out model-folder": export_command.export,
        "import imported model.safetensors --step 4": import_command.import_files,
        "branch run latest --to other-run": places.branch,
        "mirror memory mirrored --once": places.mirror,
        "publish run --to versions": places.publish,
    },
    "Plan and measure": {
        "profile run -o profile.json": profiling.profile,
        "report run -o report.html --png figures": reporting.report,
        "plan run --policy exact --policy auto": planning.plan,
        "eval --quick train.py:make": evaluate.evaluate,
    },
}

# Typer takes the help text of a command from the docstring of its function.
for panel, commands in _GROUPS.items():
    for example, command in commands.items():
        name = example.partition(" ")[0]
        app.command(
            name,
            cls=_Command,
            rich_help_panel=panel,
            epilog=f"Example: deltacheck {example}",
            # The words after the command that ``run`` starts are not ours.
            context_settings={"allow_interspersed_args": name != "run"},
        )(command)


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


# What ``main`` runs. Typer takes 50 ms to make it of the signatures, so a process does so once.
root_command = typer.main.get_command(app)
