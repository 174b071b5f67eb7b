"""`import`: make steps of a root out of files of other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Json


def ingest(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="Where to: a root, or a directory that is new or empty.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="*.safetensors, or *.pt, *.pth, *.bin, *.ckpt.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="The step of the one FILE; by default the last number in its name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make steps of a root out of safetensors and torch files, bit for bit, running no code of theirs."""
    if step is not None and len(files) > 1:
        raise typer.BadParameter(f"--step is for one file, and there are {len(files)}")
    try:
        from deltacheck.backends.torch import ingest as backend
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"import needs PyTorch ({error}): pip install 'deltacheck[torch]'") from error
    rows: list[output.Row] = []
    try:
        for path, report in backend.ingest(root, backend.steps_of(files, step)):
            about: output.Row = {"step": report.step, "seq": report.seq, "file": str(path), "leaves": len(report.leaves)}
            rows.append(about | {"raw_bytes": report.raw_bytes, "stored_bytes": report.stored_bytes})
            if not as_json:
                output.print_line(
                    f"step {report.step}: {len(report.leaves)} leaves from {path} "
                    f"({output.size(report.raw_bytes)}, {output.size(report.stored_bytes)} stored)"
                )
    except ValueError as error:
        if type(error) is not ValueError:  # a refusal of ours, which has its own exit code
            raise
        raise typer.BadParameter(str(error)) from error
    if as_json:
        output.print_json({"root": str(root), "steps": rows})
