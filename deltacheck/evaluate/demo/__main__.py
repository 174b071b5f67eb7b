"""`python -m deltacheck.evaluate.demo`: the same as `deltacheck demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacheck.evaluate.demo import demonstration


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
) -> None:
    """Train, kill, resume, compare bit for bit, read back in JAX and zarr."""
    code = demonstration.main(seed=seed, steps=steps, quick=quick, keep=keep, json_file=json_file)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(demo)
