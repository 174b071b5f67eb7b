"""What the command says and how it ends: tables or JSON on stdout, one line an error or warning on
stderr, and the exit codes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TextIO, TypeAlias

from deltacheck import errors

# Exit codes: permanent, documented in docs/reference/cli.md. 2 is also what Typer and argparse give
# for misuse.
OK, FOUND_DAMAGE, MISUSE, NOT_FOUND, DAMAGED, REFUSED, DEFECT, INTERRUPTED, BROKEN_PIPE = (
    0,
    1,
    2,
    3,
    4,
    5,
    70,
    130,
    141,
)

JSON_SCHEMA = 1  # of every JSON document: keys may be added under it, never changed or taken away

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.StepNotFound, NOT_FOUND),
    (errors.NotACheckpointRoot, NOT_FOUND),
    (errors.Damaged, DAMAGED),
    (errors.DeltacheckError, REFUSED),
    (OSError, REFUSED),
    (MemoryError, REFUSED),
    (ImportError, REFUSED),
)

Row: TypeAlias = dict[str, object]


class Column(NamedTuple):
    """A column of a table: which key of a row it shows, and how. Numbers stand right, ``left`` is
    for the rest.
    """

    title: str
    key: str
    cell: Callable[..., str] = str
    left: bool = False


_json = False


def use_json(wanted: bool) -> None:
    """Say errors and warnings of this run as JSON too."""
    global _json
    _json = wanted


def says_json() -> bool:
    """Whether this run was asked for JSON."""
    return _json


def prepare_streams() -> None:
    """Streams that any text can be written to: closed ones lead nowhere, what their encoding lacks
    is escaped.
    """
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="backslashreplace")


# --- results --------------------------------------------------------------------------------------


def print_json(document: Mapping[str, object]) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(
        json.dumps(plain({"schema": JSON_SCHEMA, **document}), indent=2, allow_nan=False) + "\n"
    )


def plain(value: object) -> object:
    """``value`` as strict JSON: numbers that JSON lacks as ``"NaN"``, ``"Infinity"``,
    ``"-Infinity"``; bytes in base64; complex as two numbers.
    """
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
    """Rows as a table; a value that is ``None`` is a dash. Where no terminal is, lines are as long
    as they are.
    """
    columns = list(columns)
    cells = [
        [
            "-" if row.get(column.key) is None else clean(column.cell(row[column.key]))
            for column in columns
        ]
        for row in rows
    ]
    if sys.stdout.isatty():
        _print_rich_table(columns, cells)
        return
    lines = [[column.title for column in columns], *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = zip(columns, line, widths, strict=True)
        text = "  ".join(
            cell.ljust(width) if column.left else cell.rjust(width)
            for column, cell, width in padded
        )
        sys.stdout.write(text.rstrip() + "\n")


def _print_rich_table(columns: Sequence[Column], cells: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="left" if column.left else "right", overflow="fold")
    for row in cells:
        table.add_row(*row)
    Console(markup=False, emoji=False, highlight=False).print(
        table
    )  # text from disk is never taken for markup


def print_line(text: str) -> None:
    """One line on stdout."""
    sys.stdout.write(clean(text) + "\n")


def clean(text: str) -> str:
    """``text`` without what a terminal would obey: control characters are escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


# Cells for people.


def size(count: int) -> str:
    """A number of bytes."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def share(part: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * part:.3g} %"


def seconds(duration: float) -> str:
    return f"{duration:.1f} s"


def number(value: float) -> str:
    return f"{value:.4g}"


def pairs(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name}={value:g}" for name, value in sorted(values.items()))


def shape(sizes: Sequence[int]) -> str:
    return "[" + ",".join(map(str, sizes)) + "]"


def short(value: object) -> str:
    """A Python value, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def utc(moment: float) -> str | None:
    """Seconds since the epoch as ISO 8601 in UTC; ``None`` for what is no date."""
    try:
        return (
            datetime.fromtimestamp(moment, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
    except (ValueError, OverflowError, OSError):
        return None


def local_time(iso: str) -> str:
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M:%S")


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes on stderr, where that is a terminal and nobody asked for JSON. Yields
    what to call with every advance.
    """
    if _json or total == 0 or not sys.stderr.isatty():
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda advance: bar.advance(task, advance)


# --- failures -------------------------------------------------------------------------------------


def warn(message: str) -> None:
    """Say something on stderr that does not end the run."""
    if _json:
        _say(json.dumps({"schema": JSON_SCHEMA, "warning": {"message": message}}))
    else:
        _say(f"deltacheck: warning: {clean(_one_line(message))}")


def report(kind: str, message: str, code: int) -> None:
    """Say on stderr what ended the run, in one line."""
    if _json:
        _say(
            json.dumps(
                {
                    "schema": JSON_SCHEMA,
                    "error": {"kind": kind, "message": message, "exit_code": code},
                }
            )
        )
    else:
        _say(f"deltacheck: {clean(_one_line(message))}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody is left to tell
        print(line, file=sys.stderr, flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))


def report_usage(error: Exception) -> int:
    """Report a wrong command line as Typer describes it."""
    describe = getattr(error, "format_message", lambda: str(error))
    context = getattr(error, "ctx", None)
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    report("Misuse", f"{describe().rstrip('.')}{hint}", MISUSE)
    return MISUSE


def report_error(error: Exception) -> int:
    """Report an expected failure in its own words, anything else as a defect; return the exit
    code.
    """
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if code is None:
        if os.environ.get("DELTACHECK_TRACEBACK"):
            raise error
        message = (
            f"{type(error).__name__}: {error}. This is a defect, please report it;"
            " DELTACHECK_TRACEBACK=1 shows where"
        )
        report("Defect", message, DEFECT)
        return DEFECT
    report(type(error).__name__, _words_of(error), code)
    return code


def _words_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, MemoryError) and not isinstance(error, errors.DeltacheckError):
        return f"not enough memory: {error}"
    return str(error)
