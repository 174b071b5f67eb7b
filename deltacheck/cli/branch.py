"""`branch`: begin a new run at a step of another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json, RootStep


def branch(
    words: RootStep = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="The new root: a directory that is new or empty."),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option(
            "--copy",
            help=(
                "Copy files instead of linking them: damage to one root is then none to the other."
            ),
        ),
    ] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Make a root of its own that begins with a step of this one, sharing its files."""
    from deltacheck.cli import arguments as where
    from deltacheck.maintain import branch as work
    from deltacheck.store.root import open_root

    if to is None:
        raise typer.BadParameter("say where the new root is to lie with --to")
    wanted = where.parse(words, least=1, most=1)
    done = work.branch(open_root(wanted.root, item), wanted.steps[0], to, copy=copy)
    if as_json:
        output.print_json({"root": str(to), **asdict(done)})
        return
    shared = f"{output.size(done.linked_bytes)} shared" if done.linked_bytes else "nothing shared"
    copied = f", {output.size(done.copied_bytes)} copied" if done.copied_bytes else ""
    output.print_line(
        f"{to} begins with step {done.step}: {done.segments} segments, {shared}{copied}"
    )
