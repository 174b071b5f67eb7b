"""`python -m benchmarks.demo`: the options of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.demo import demonstration


def demo(
    seed: Annotated[
        int | None, typer.Option(help="Repeat a run: weights, data order, dropout and kill.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of fine-tuning.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Use a tiny model: seconds, figures without meaning."),
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Leave checkpoints and logs in this new folder.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page of figures to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the figures as images here.")] = None,
) -> None:
    """Train, save in six ways, kill, resume each, compare, read back in JAX and zarr."""
    for file in (json_file, html):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    code = demonstration.main(
        seed=seed,
        steps=steps,
        quick=quick,
        keep=keep,
        json_file=json_file,
        html=html,
        png=png,
    )
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(demo)
