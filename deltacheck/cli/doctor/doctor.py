"""The ``doctor`` command: what this machine and a root lack for safe and fast checkpoints."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Item, Json, RootOnly, parse

if TYPE_CHECKING:
    from deltacheck.cli.doctor.diagnosis import Line

_COLUMNS = 80
_NAME_COLUMNS = 17


def doctor(
    words: RootOnly = None,
    state_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="B",
            help="Size of the state to plan for. Default: that of the newest step.",
        ),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Check this machine and a root. The exit code is 1 if something is broken."""
    from deltacheck.cli.doctor.diagnosis import diagnose
    from deltacheck.cli.doctor.inventory import collect

    root = parse(words).root
    lines = diagnose(collect(root, item, state_bytes, may_hold_others=not words))
    broken = any(line.status == "broken" for line in lines)
    if as_json:
        checks = [asdict(line) for line in lines]
        output.print_json({"root": root, "ok": not broken, "checks": checks})
    else:
        _print(lines)
    if broken:
        raise typer.Exit(output.FOUND_DAMAGE)


def _print(lines: list[Line]) -> None:
    # Each line fits a terminal of 80 columns, so that it can be pasted into a report of a problem.
    for line in lines:
        _print_wrapped(f"{line.status:<9}{line.name:<{_NAME_COLUMNS}}", line.text)
        for title, text in (("cost", line.cost), ("remedy", line.remedy)):
            if text:
                _print_wrapped(f"{'':<9}{title + ':':<{_NAME_COLUMNS}}", text)
    counts = Counter(line.status for line in lines)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("ok", "degraded", "broken"))
    output.print_line(f"{len(lines)} checks: {summary}")


def _print_wrapped(head: str, text: str) -> None:
    # Paths stay whole, so that a command can be copied.
    wrapped = textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in wrapped:
        output.print_line(line)
