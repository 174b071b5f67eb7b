"""The `deltacheck` command. `main` is the whole promise: it turns every outcome into one of the exit codes of `output.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from deltacheck.cli import output

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default that of the process) and return the exit code. Expected failures are one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    output.prepare_streams()
    try:
        return _run(words)
    except BrokenPipeError:
        # Whoever read the output has gone. What is still buffered goes nowhere, or the interpreter would complain of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        output.report("BrokenPipe", "the reader of the output has closed it; the output is incomplete", output.BROKEN_PIPE)
        return output.BROKEN_PIPE
    except KeyboardInterrupt:
        output.report("Interrupted", "interrupted", output.INTERRUPTED)
        return output.INTERRUPTED


def _run(words: list[str]) -> int:
    import typer

    from deltacheck.cli.app import app

    output.use_json("--json" in words)
    # Typer has its own copy of click, older ones do not: the base class of usage errors is found through what Typer re-exports.
    usage_error: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        code = typer.main.get_command(app).main(words or ["--help"], prog_name="deltacheck", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except typer.Abort:
        raise KeyboardInterrupt from None
    except usage_error as error:
        return output.report_usage(error)
    except Exception as error:  # noqa: BLE001 - the outermost border: a user sees a line, not a traceback
        return output.report_error(error)
    if code == output.INTERRUPTED:  # Typer's own answer to an interrupt
        raise KeyboardInterrupt
    if not words:
        return output.MISUSE
    return code if isinstance(code, int) else output.OK
