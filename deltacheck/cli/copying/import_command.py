"""The ``import`` command: files and folders of other programs as steps of a root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Item, Json, MaxBytes, as_misuse, checked_root, needing


def import_files(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT",
            callback=checked_root,
            help="The target: a root, a directory that is new or empty, or s3://BUCKET/PREFIX.",
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help=(
                "*.safetensors; *.pt, *.pth, *.bin, *.ckpt; folders of models of Hugging Face; or"
                " a folder of Orbax."
            ),
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            min=0,
            help="The step of the only FILE or checkpoint. Default: the last number in its name.",
        ),
    ] = None,
    item: Item = None,
    max_bytes: MaxBytes = None,
    as_json: Json = False,
) -> None:
    """Import safetensors, torch, Hugging Face and Orbax checkpoints as steps of a root.

    Values are imported bit for bit. No code of the files is run.
    """
    from deltacheck.backends.hugging_face.model_folder import is_model_folder
    from deltacheck.store.files import storage
    from deltacheck.store.roots.opening import open_root

    target = storage.of(root)
    # A manager's folder holds many steps that have numbers, so it cannot be one of several files.
    folders = [path for path in files if path.is_dir() and not is_model_folder(path)]
    # No source is in an object store.
    if isinstance(target, Path):
        _refuse_swapped(target, files[0])
    if len(files) > 1 and (step is not None or folders):
        raise typer.BadParameter(
            f"{'--step' if step is not None else 'a folder'} goes with one FILE, but"
            f" {len(files)} were given"
        )
    rows: list[output.Row] = []
    with as_misuse():
        sources = _sources_of(files, step, is_orbax=bool(folders))
        kind = "orbax" if folders else "torch"
        for path, number in _ingest(kind, str(target), sources, item):
            # The root is opened anew for each step: the import commits steps through a writer of
            # its own.
            manifest = open_root(target).manifest(number)
            stored_size = manifest.stored_bytes
            rows.append(
                {
                    "step": number,
                    "seq": manifest.seq,
                    "file": str(path),
                    "leaves": len(manifest.specs),
                    "raw_bytes": manifest.raw_bytes,
                    "stored_bytes": stored_size,
                }
            )
            # Steps are printed as they are committed, because a long import must show that it goes
            # on.
            if not as_json:
                output.print_line(
                    f"step {number}: {len(manifest.specs)} leaves from {path}"
                    f" ({output.size(manifest.raw_bytes)}, {output.size(stored_size)} stored)"
                )
    if as_json:
        output.print_json({"root": root, "steps": rows})


def _refuse_swapped(root: Path, source: Path) -> None:
    """Raise if the source of an import is a root, or is nothing and the target is a checkpoint."""
    is_checkpoint = root.is_file() or (
        not _is_root(root)
        and any(
            next(root.glob(f"{folders}{name}"), None) is not None
            for folders in ("", "*/", "*/*/")
            for name in ("_METADATA", "*.safetensors")
        )
    )
    is_empty = not source.exists() or (source.is_dir() and next(source.iterdir(), None) is None)
    if not (_is_root(source) or (is_checkpoint and is_empty)):
        return
    reasons = [f"{source} is {'a root of deltacheck' if _is_root(source) else 'empty or missing'}"]
    if is_checkpoint:
        reasons.append(f"{root} is a checkpoint")
    raise typer.BadParameter(
        f"{', and '.join(reasons)}: the target comes first. If you have swapped them:"
        f" deltacheck import {source} {root}"
    )


def _is_root(path: Path) -> bool:
    from deltacheck.store.roots.manager_steps import MANAGER_STORE

    return (path / "zarr.json").exists() or (path / MANAGER_STORE).is_dir()


def _sources_of(files: list[Path], step: int | None, *, is_orbax: bool) -> list[tuple[int, Path]]:
    """Return the steps of an import, and their files."""
    if is_orbax:
        with needing("jax orbax-checkpoint", f"importing {files[0]}"):
            from deltacheck.backends.orbax.files.orbax_import import sources_of
        return sources_of(files[0], step)
    with needing("torch", "importing files"):
        from deltacheck.backends.torch.files.torch_import import steps_of
    return steps_of(files, step)


def _ingest(
    kind: str, root: str, sources: list[tuple[int, Path]], item: str | None
) -> Iterator[tuple[Path, int]]:
    """Import sources as ``isolated.ingest``, with a progress bar of their bytes."""
    from deltacheck.backends import isolated

    imported = isolated.ingest(kind, root, sources, item)
    if not output.shows_progress():
        yield from imported
        return
    sizes = [isolated.bytes_of(path) for _, path in sources]
    with output.progress("importing", sum(sizes)) as advance:
        for source, size in zip(imported, sizes, strict=True):
            advance(size)
            yield source
