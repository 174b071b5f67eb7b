"""`export`, also called `restore`: write a step, or some of its leaves, to one file of another
format.
"""

from __future__ import annotations

import errno
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json, Leaves, RootStep

if TYPE_CHECKING:
    from deltacheck.restore.export import Progress
    from deltacheck.store.manifest import Manifest
    from deltacheck.store.root import Root


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    NPZ = "npz"
    ORBAX = "orbax"


# The first suffix of a format is the one that it is given where nobody names a file.
_SUFFIXES = {
    ".safetensors": Format.SAFETENSORS,
    ".pt": Format.TORCH,
    ".pth": Format.TORCH,
    ".npz": Format.NPZ,
    ".orbax": Format.ORBAX,
}


class _Job(NamedTuple):
    """What to write. ``keys``: key in the file -> leaf path. ``nested``: the whole tree, where the
    format has trees.
    """

    root: Root
    manifest: Manifest
    keys: dict[str, str]
    nested: bool


def export(
    words: RootStep = None,
    to: Annotated[
        Format | None,
        typer.Option("--to", help="The format; by default what the suffix of FILE says."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="By default step-STEP with the format's suffix."
        ),
    ] = None,
    leaves: Leaves = None,
    strip: Annotated[
        str,
        typer.Option(
            "--strip", metavar="PREFIX", help="Leave PREFIX out of keys that begin with it."
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it is there.")] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Write a step, or some of its leaves, to one safetensors, torch or npz file, or to an Orbax
    folder.
    """
    from deltacheck.cli import arguments as where
    from deltacheck.restore.export import new_file, select

    form = to or _SUFFIXES.get(out.suffix if out else "")
    if form is None:
        raise typer.BadParameter(
            f"say the format with --to, or let --out end in {', '.join(_SUFFIXES)}"
        )
    root, (manifest,) = where.manifests(where.parse(words, least=1, most=1), item)
    try:
        keys = select(manifest, leaves or (), strip)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    path = out or Path(
        f"step-{manifest.step}{next(suffix for suffix, f in _SUFFIXES.items() if f is form)}"
    )
    _refuse_inside(root, path)
    job = _Job(root, manifest, keys, nested=not leaves and not strip)
    if form is Format.ORBAX:
        _orbax(job, path, force, as_json)
        return
    write = {Format.SAFETENSORS: _safetensors, Format.NPZ: _npz, Format.TORCH: _torch}[form]
    raw_bytes = sum(manifest.spec(owner).raw_bytes for owner in keys.values())
    with new_file(path, overwrite=force) as file, output.progress("writing", raw_bytes) as advance:
        weights_only = write(file, job, advance)
    file_bytes = path.stat().st_size
    if as_json:
        about: output.Row = {
            "root": str(root.path),
            "step": manifest.step,
            "seq": manifest.seq,
            "file": str(path),
        }
        about |= {
            "format": str(form),
            "leaves": len(keys),
            "file_bytes": file_bytes,
            "weights_only": weights_only,
        }
        output.print_json(about)
        return
    output.print_line(
        f"step {manifest.step}: {len(keys)} leaves written to {path} ({output.size(file_bytes)})"
    )
    if weights_only is False:
        output.print_line(
            "it holds NumPy arrays or deques as the checkpoint does: torch.load needs"
            " weights_only=False for them"
        )


def _refuse_inside(root: Root, path: Path) -> None:
    """A foreign file among those of a root would make plain zarr complain of it ever after."""
    if not isinstance(root.path, Path):
        return
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root.path)):
        raise FileExistsError(
            errno.EEXIST,
            "a checkpoint root is no place for other files; name one elsewhere with --out",
            str(path),
        )


def _safetensors(file: BinaryIO, job: _Job, progress: Progress) -> None:
    from deltacheck import __version__
    from deltacheck.restore.export import resolve, shapes, write_safetensors
    from deltacheck.store.files.storage import full_name

    # "format" is what Hugging Face's loaders ask for: tensors laid out as PyTorch lays them out.
    source = f"deltacheck {__version__}, root {full_name(job.root.path)}, seq {job.manifest.seq}"
    about = {"format": "pt", "step": str(job.manifest.step), "source": source}
    leaves = resolve(job.root, job.manifest, job.keys)
    write_safetensors(file, leaves, about, progress, shapes(job.manifest, job.keys))


def _npz(file: BinaryIO, job: _Job, progress: Progress) -> None:
    from deltacheck.restore.export import resolve, shapes, write_npz

    write_npz(
        file, resolve(job.root, job.manifest, job.keys), progress, shapes(job.manifest, job.keys)
    )


def _torch(file: BinaryIO, job: _Job, progress: Progress) -> bool:
    try:
        from deltacheck.backends.torch.files.torch_export import write_torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--to torch needs PyTorch ({error}): pip install 'deltacheck[torch]'"
        ) from error
    return write_torch(file, job.root, job.manifest, None if job.nested else job.keys, progress)


def _orbax(job: _Job, path: Path, force: bool, as_json: bool) -> None:
    try:
        from deltacheck.backends.orbax.files.orbax_import import write_orbax
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--to orbax needs JAX ({error}): pip install 'deltacheck[jax]'"
        ) from error
    if force:
        raise typer.BadParameter(
            "--force replaces files; remove the folder of an Orbax checkpoint yourself"
        )
    with output.progress(
        "writing", sum(job.manifest.spec(owner).raw_bytes for owner in job.keys.values())
    ) as advance:
        write_orbax(path, job.root, job.manifest, None if job.nested else job.keys, advance)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if as_json:
        about: output.Row = {
            "root": str(job.root.path),
            "step": job.manifest.step,
            "seq": job.manifest.seq,
            "file": str(path),
        }
        about |= {
            "format": str(Format.ORBAX),
            "leaves": len(job.keys),
            "file_bytes": size,
            "weights_only": None,
        }
        output.print_json(about)
        return
    output.print_line(
        f"step {job.manifest.step}: {len(job.keys)} leaves written to {path} ({output.size(size)})"
    )
