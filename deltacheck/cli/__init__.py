"""The ``deltacheck`` command.

``main`` turns every outcome into one of the exit codes of ``output.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from deltacheck.cli import output

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Expected failures are reported in one line on stderr. If the reader of stdout closes the pipe
    (``deltacheck ls | head``), the command ends without a message.

    Args:
        arguments: Words after the program's name. Default: those of this process.

    Returns:
        The exit code, one of the constants of ``deltacheck.cli.output``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The streams are prepared before anything can be printed: even a usage error may quote a word
    # that the encoding of the terminal lacks.
    output.prepare_streams()
    try:
        if arguments is None and words[:1] == ["run"]:
            from deltacheck.cli.launch.attempts import go_on_in_a_child

            if (status := go_on_in_a_child()) is not None:
                return status
        return _run(words)
    except BrokenPipeError:
        _discard_stdout()
        return output.BROKEN_PIPE
    except KeyboardInterrupt:
        output.report("Interrupted", "interrupted", output.INTERRUPTED)
        return output.INTERRUPTED


def _discard_stdout() -> None:
    """Lead stdout to the null device.

    The interpreter flushes stdout at exit. Bytes that are still buffered would raise again there,
    and Python would print "Exception ignored ... BrokenPipeError" and exit with code 120.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _run(words: list[str]) -> int:
    # Typer and the list of commands are imported here, and not with the module, so that an
    # interrupt or a closed pipe during these imports also ends in an exit code of ours.
    import typer

    from deltacheck.cli.app import root_command

    # Errors of parsing must be JSON as well, so the option is looked up before the line is parsed.
    # What follows "--" is a command that ``run`` starts.
    own = words[: words.index("--")] if "--" in words else words
    output.use_json("--json" in own)
    # Recent versions of Typer contain a copy of click, older ones import it. The base class of
    # usage errors is therefore looked up through a name that Typer re-exports in both cases.
    usage_error: type[Exception] = next(
        base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
    )
    try:
        code = _invoke(root_command, words)
        # A closed pipe or a full disk must be noticed here: errors of the flush at exit have no
        # exit code of ours.
        sys.stdout.flush()
    except BrokenPipeError:
        # A closed pipe is an ``OSError`` and would be reported as a refusal below. ``main`` ends
        # the command without a message instead.
        raise
    except usage_error as error:
        return output.report_usage(error)
    except Exception as error:  # noqa: BLE001 - users see a line, not a traceback
        return output.report_error(error)
    return code


def _invoke(command: Any, words: list[str]) -> int:
    """Run a click command and return its exit code.

    Click's own ``main`` is not used, because it handles broken pipes and interrupts itself.
    """
    import typer

    try:
        # Parsing empties the list that it is given.
        with command.make_context("deltacheck", [*words] or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as request:
        # Without words the help was printed in place of a result, so a script must not see a
        # success.
        return output.MISUSE if not words else request.exit_code
    except SystemExit as error:
        # Rich prints the help, and ends the process if the pipe is closed.
        raise BrokenPipeError from error
    return output.OK
