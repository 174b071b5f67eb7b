"""The `deltacheck` command. `main` is the whole promise: it turns every outcome into one of the
exit codes of `output.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from deltacheck.cli import output

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default that of the process) and return the exit code. Expected
    failures are one line on stderr.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    output.prepare_streams()
    try:
        return _run(words)
    except BrokenPipeError:
        # Whoever read the output has gone. What is still buffered goes nowhere, or the interpreter
        # would complain of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        output.report(
            "BrokenPipe",
            "the reader of the output has closed it; the output is incomplete",
            output.BROKEN_PIPE,
        )
        return output.BROKEN_PIPE
    except KeyboardInterrupt:
        output.report("Interrupted", "interrupted", output.INTERRUPTED)
        return output.INTERRUPTED


def _run(words: list[str]) -> int:
    import typer

    from deltacheck.cli.app import app

    output.use_json("--json" in words)
    # Typer has its own copy of click, older ones do not: the base class of usage errors is found
    # through what Typer re-exports.
    usage_error: type[Exception] = next(
        c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
    )
    try:
        code = _perform(typer.main.get_command(app), words)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except usage_error as error:
        return output.report_usage(error)
    except Exception as error:  # noqa: BLE001 - the outermost border: a user sees a line, not a traceback
        return output.report_error(error)
    return code


def _perform(command: Any, words: list[str]) -> int:
    """Run click's ``command``. Not by its ``main``, which takes a broken pipe and an interrupt for
    itself.
    """
    import typer

    try:
        with command.make_context(
            "deltacheck", [*words] or ["--help"]
        ) as context:  # it empties the list
            command.invoke(context)
    except typer.Exit as done:
        return output.MISUSE if not words else done.exit_code
    except (
        SystemExit
    ) as error:  # Rich, which prints the help, ends the process where it meets a broken pipe
        raise BrokenPipeError from error
    return output.OK
