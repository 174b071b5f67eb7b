"""`demo`: the door to `deltacheck.evaluate.demo`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Json


def demo(
    seed: Annotated[
        int | None, typer.Option(help="Repeat a run: weights, data order, dropout and kill.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of fine-tuning.")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A tiny model: the story in seconds, figures without meaning."
        ),
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Leave checkpoints and logs in this new folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train, kill, resume, compare bit for bit, read back in JAX and zarr. Exit code 1 where a
    comparison failed.
    """
    from deltacheck.evaluate.demo import demonstration

    if not as_json:
        raise typer.Exit(demonstration.main(seed=seed, steps=steps, quick=quick, keep=keep))
    with tempfile.TemporaryDirectory(prefix="deltacheck-demo-json-") as folder:
        figures = Path(folder) / "figures.json"
        with contextlib.redirect_stdout(sys.stderr):  # the story is for people
            code = demonstration.main(
                seed=seed, steps=steps, quick=quick, keep=keep, json_file=figures
            )
        if figures.exists():
            output.print_json(json.loads(figures.read_text()))
    raise typer.Exit(code)
