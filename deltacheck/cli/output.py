"""Output of the command: tables or JSON on stdout, messages on stderr, and the exit codes."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple, TextIO, TypeAlias

from deltacheck import errors
from deltacheck.evaluate.workload import NoWorkload
from deltacheck.leaf.external_errors import remedy, translated
from deltacheck.report.formatting import escape_unprintable, format_bytes

# Exit codes. They are permanent and documented in docs/reference/cli.md. Typer and argparse also
# use 2 for wrong usage; 130 and 141 are what a shell reports for SIGINT and SIGPIPE.
OK = 0
FOUND_DAMAGE = 1
MISUSE = 2
NOT_FOUND = 3
DAMAGED = 4
REFUSED = 5
UNDECIDED = 6
DEFECT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

# The version of every JSON document. Keys may be added under it, but never changed or removed.
JSON_SCHEMA = 1

# The first class that matches decides, so subclasses come before their bases.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.StepNotFound, NOT_FOUND),
    (errors.NotACheckpointRoot, NOT_FOUND),
    (errors.Damaged, DAMAGED),
    # The command line names the factory.
    (NoWorkload, MISUSE),
    (errors.DeltacheckError, REFUSED),
    (OSError, REFUSED),
    (MemoryError, REFUSED),
    (ImportError, REFUSED),
)

Row: TypeAlias = dict[str, object]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: Heading.
        key: Key of the row's value.
        cell: Function that formats the value.
        left: If true, the column is aligned left, for texts; else right, for numbers.
        rank: If a terminal is too narrow for the table, columns of the highest rank are left out
            first. Those of rank 0 stay, and texts among them are wrapped.
    """

    title: str
    key: str
    cell: Callable[..., str] = str
    left: bool = False
    rank: int = 0


# Set once for each run, before the line is parsed. Progress bars and warnings are printed far from
# the command that has the option.
_json = False


def use_json(enabled: bool) -> None:
    """Choose whether errors and warnings of this run are printed as JSON."""
    global _json
    _json = enabled


def json_requested() -> bool:
    """Return whether ``--json`` was given."""
    return _json


def prepare_streams() -> None:
    """Make stdout and stderr accept any text.

    A stream that is closed (``>&-``) is replaced by the null device. Characters that the encoding
    of a stream lacks are escaped.
    """
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        # Python sets a stream to ``None`` if it was closed when the process began. Its ``write``
        # would raise ``AttributeError``.
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
        elif callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="backslashreplace")


# --- results --------------------------------------------------------------------------------------


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(as_json(document, indent=2) + "\n")


def print_result(document: Mapping[str, object], *lines: str) -> None:
    """Print the result of a command: the document with ``--json``, else lines for people."""
    if _json:
        print_json(document)
    for line in () if _json else lines:
        print_line(line)


def as_json(document: Mapping[str, object], indent: int | None = None) -> str:
    """Return a document as strict JSON, with its schema."""
    # ``allow_nan=False`` makes sure that no number is left that strict parsers of JSON refuse.
    content = plain({"schema": JSON_SCHEMA, **document})
    return json.dumps(content, indent=indent, allow_nan=False)


def plain(value: object) -> object:
    """Convert a value to strict JSON.

    Numbers that JSON lacks become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Bytes become
    base64 text, and complex numbers pairs.
    """
    # Keys of a state may be numbers, and JSON has texts only.
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def print_table(columns: Iterable[Column], rows: Iterable[Row]) -> None:
    """Print rows as a table, with a dash for ``None``.

    On a terminal, columns are left out and texts are wrapped to fit its width. Elsewhere lines are
    as long as they need to be, so that ``grep`` and ``cut`` see whole rows.
    """
    # The columns are walked once for each row, so an iterator would be used up by the first one.
    columns = list(columns)
    cells = [
        [
            "-" if row.get(column.key) is None else escape_unprintable(column.cell(row[column.key]))
            for column in columns
        ]
        for row in rows
    ]
    if sys.stdout.isatty():
        _print_rich_table(columns, cells)
        return
    # Every width includes the title, so that an empty table still has its heading aligned.
    lines = [[column.title for column in columns], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (
            cell.ljust(width) if column.left else cell.rjust(width)
            for column, cell, width in zip(columns, line, widths, strict=True)
        )
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


_GAP = 3  # characters between two columns on a terminal


def _print_rich_table(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Text from disk must never be interpreted as Rich markup.
    console = Console(markup=False, emoji=False, highlight=False)
    indices = columns_within(console.width, columns, cells)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index in indices:
        column = columns[index]
        # Only texts that may be long are wrapped.
        is_text = column.left and column.rank == 0
        least = None if is_text else _width(index, columns, cells)
        justify: Literal["left", "right"] = "left" if column.left else "right"
        table.add_column(column.title, justify=justify, overflow="fold", min_width=least)
    for row in cells:
        table.add_row(*(row[index] for index in indices))
    console.print(table)
    missing = [column.title for index, column in enumerate(columns) if index not in indices]
    if missing:
        console.print(f"left out at this width (`| cat` prints all): {', '.join(missing)}")


def columns_within(
    width: int, columns: Sequence[Column], cells: Sequence[Sequence[str]]
) -> list[int]:
    """Return the indices of the columns that fit a terminal.

    Args:
        width: Width of the terminal in characters.
        columns: All columns.
        cells: The texts of each row.

    Returns:
        Indices in the order of the columns.
    """
    indices = list(range(len(columns)))
    widths = [_width(index, columns, cells) for index in indices]
    # Texts of rank 0, such as paths, remain readable if they are wrapped to 40 characters.
    widths = [
        min(characters, 40) if column.left and column.rank == 0 else characters
        for characters, column in zip(widths, columns, strict=True)
    ]
    while sum(widths[index] for index in indices) + _GAP * (len(indices) - 1) > width:
        last = max(reversed(indices), key=lambda index: columns[index].rank)
        if columns[last].rank == 0:
            break
        indices.remove(last)
    return indices


def _width(index: int, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> int:
    return max(len(columns[index].title), *(len(row[index]) for row in cells), 0)


def print_line(text: str) -> None:
    """Print one line on stdout."""
    sys.stdout.write(escape_unprintable(text) + "\n")


# --- cells of tables ------------------------------------------------------------------------------


def size(count: float) -> str:
    """Format a number of bytes."""
    return format_bytes(count)


def count(number: int, noun: str, plural: str = "") -> str:
    """Format a number of things: ``1 step``, ``2 steps``. Default plural: the noun and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def share(fraction: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * fraction:.3g} %"


def seconds(duration: float) -> str:
    """Format a duration in seconds."""
    return f"{duration:.1f} s"


def number(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"


def pairs(values: Mapping[str, float]) -> str:
    """Format a mapping as ``name=value`` pairs."""
    return "  ".join(f"{name}={value:g}" for name, value in sorted(values.items()))


def shape(sizes: Sequence[int]) -> str:
    """Format the shape of an array."""
    return "[" + ",".join(map(str, sizes)) + "]"


def short(value: object) -> str:
    """Format a Python value in at most 60 characters."""
    # ``repr`` also escapes line breaks, which would tear a row of a table apart.
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def utc(timestamp: float) -> str | None:
    """Format seconds since the epoch as ISO 8601 in UTC; ``None`` if they are no valid date."""
    # The time of a manifest is for people and may be any number, so a wrong one must not stop a
    # listing.
    try:
        moment = datetime.fromtimestamp(timestamp, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local_time(iso: str) -> str:
    """Format a date of ISO 8601 in the local time zone."""
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def shows_progress() -> bool:
    """Return whether a progress bar would be shown: on a terminal, and without ``--json``."""
    # With JSON, stderr has one object per line, and a bar would break the lines.
    return not _json and sys.stderr.isatty()


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr.

    Nothing is shown if stderr is no terminal, or if JSON was requested.

    Args:
        title: Text before the bar.
        total: Number of bytes to process.

    Yields:
        A function to call with the number of bytes that were processed since its last call.
    """
    if total == 0 or not shows_progress():
        yield lambda advance: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    # The bar is transient: what remains on the terminal is the same as in a pipe. Lines that are
    # printed beside it go through the console, unless stdout is a file.
    console, on_terminal = Console(stderr=True), sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=on_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda advance: bar.advance(task, advance)


# --- failures -------------------------------------------------------------------------------------


def warn(message: str) -> None:
    """Print a warning on stderr. The run continues."""
    if _json:
        _print_error(json.dumps({"schema": JSON_SCHEMA, "warning": {"message": message}}))
    else:
        _print_error(f"deltacheck: warning: {escape_unprintable(_join_lines(message))}")


def report(kind: str, message: str, code: int) -> None:
    """Print the failure that ends the run on stderr, in one line."""
    if _json:
        error = {"kind": kind, "message": message, "exit_code": code}
        _print_error(json.dumps({"schema": JSON_SCHEMA, "error": error}))
    else:
        _print_error(f"deltacheck: {escape_unprintable(_join_lines(message))}")


def _print_error(line: str) -> None:
    # If stderr is closed as well, nobody can be informed; the exit code remains.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _join_lines(text: str) -> str:
    return " ".join(text.split("\n"))


def report_usage(error: Exception) -> int:
    """Report a usage error in Typer's words and return the exit code."""
    # Old and new versions of Typer have different base classes, so attributes are asked for by
    # name.
    describe = getattr(error, "format_message", lambda: str(error))
    context = getattr(error, "ctx", None)
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    report("Misuse", f"{describe().rstrip('.')}{hint}", MISUSE)
    return MISUSE


class Failure(NamedTuple):
    """An error as users see it.

    Attributes:
        kind: Name of the exception; ``Defect`` for a mistake of ours.
        message: Description.
        code: Exit code.
    """

    kind: str
    message: str
    code: int


def failure_of(error: Exception) -> Failure:
    """Return the failure that an error is, a defect unless it is expected.

    Raises:
        Exception: ``error``, if it is a defect and ``DELTACHECK_TRACEBACK`` is set.
    """
    # Errors of libraries, of which some have no class of their own.
    if not isinstance(error, OSError | MemoryError):
        error = translated(error, "the command") or error
    # An exception that is not in the table is a mistake of ours, never of the user.
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if code is not None:
        return Failure(type(error).__name__, _describe(error), code)
    if os.environ.get("DELTACHECK_TRACEBACK"):
        raise error
    message = (
        f"{type(error).__name__}: {error}. This is a defect, please report it;"
        " DELTACHECK_TRACEBACK=1 prints the traceback"
    )
    return Failure("Defect", message, DEFECT)


def report_error(error: Exception) -> int:
    """Report an error on stderr and return the exit code."""
    failure = failure_of(error)
    report(*failure)
    return failure.code


def _describe(error: Exception) -> str:
    # The text of an ``OSError`` begins with its number, which says nothing to most people.
    if isinstance(error, OSError) and error.strerror:
        # An error without a name is that of a stream, not of a root.
        text = f"{error.strerror}: {error.filename}{remedy(error)}"
        return text if error.filename else error.strerror
    if isinstance(error, MemoryError) and not isinstance(error, errors.DeltacheckError):
        return f"not enough memory: {error}"
    return str(error)
