"""`import`: make steps of a root out of files of other formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json


def ingest(
    root: Annotated[
        Path,
        typer.Argument(
            metavar="ROOT", help="Where to: a root, or a directory that is new or empty."
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="*.safetensors; *.pt, *.pth, *.bin, *.ckpt; or the folder of an Orbax manager.",
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            min=0,
            help="The step of the one FILE; by default the last number in its name.",
        ),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Make steps of a root out of safetensors, torch and Orbax checkpoints, bit for bit, running no
    code of theirs.
    """
    from deltacheck.report.history import stored_bytes
    from deltacheck.store.root import open_root

    folders = [path for path in files if path.is_dir()]
    if len(files) > 1 and (step is not None or folders):
        raise typer.BadParameter(
            f"{'--step' if step is not None else 'a folder'} goes with one FILE, and there are"
            f" {len(files)}"
        )
    rows: list[output.Row] = []
    try:
        for path, number in (
            _orbax(root, folders[0], item) if folders else _files(root, files, step)
        ):
            manifest = open_root(root).manifest(number)
            about: output.Row = {
                "step": number,
                "seq": manifest.seq,
                "file": str(path),
                "leaves": len(manifest.specs),
            }
            rows.append(
                about | {"raw_bytes": manifest.raw_bytes, "stored_bytes": stored_bytes(manifest)}
            )
            if not as_json:
                sizes = (
                    f"{output.size(manifest.raw_bytes)}, {output.size(stored_bytes(manifest))}"
                    " stored"
                )
                output.print_line(
                    f"step {number}: {len(manifest.specs)} leaves from {path} ({sizes})"
                )
    except ValueError as error:
        if type(error) is not ValueError:  # a refusal of ours, which has its own exit code
            raise
        raise typer.BadParameter(str(error)) from error
    if as_json:
        output.print_json({"root": str(root), "steps": rows})


def _files(root: Path, files: list[Path], step: int | None) -> Iterator[tuple[Path, int]]:
    try:
        from deltacheck.backends.torch.files import torch_import as backend
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"importing files needs PyTorch ({error}): pip install 'deltacheck[torch]'"
        ) from error
    return backend.ingest(root, backend.steps_of(files, step))


def _orbax(root: Path, folder: Path, item: str | None) -> Iterator[tuple[Path, int]]:
    try:
        from deltacheck.backends.orbax.files import orbax_import as backend
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"importing {folder} needs JAX ({error}): pip install 'deltacheck[jax]'"
        ) from error
    if not backend.steps(folder):
        raise typer.BadParameter(
            f"{folder} has no steps of an Orbax CheckpointManager; name files, or its folder"
        )
    return backend.ingest(root, folder, item)
