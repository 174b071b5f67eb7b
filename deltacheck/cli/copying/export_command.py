"""The ``export`` command: a step, or some of its leaves, in another format."""

from __future__ import annotations

import errno
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple, TypeAlias

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import (
    Item,
    Json,
    Leaves,
    MaxBytes,
    RootNewestStep,
    Strip,
    as_misuse,
    needing,
    open_step,
)

if TYPE_CHECKING:
    from deltacheck.restore.export import Progress
    from deltacheck.store.manifest import Manifest
    from deltacheck.store.roots.root import Root


class Format(StrEnum):
    """A format that ``export`` writes."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    NPZ = "npz"
    ORBAX = "orbax"
    HF = "hf"


# The first suffix of a format is used if no file is named.
_SUFFIXES = {
    ".safetensors": Format.SAFETENSORS,
    ".pt": Format.TORCH,
    ".pth": Format.TORCH,
    ".npz": Format.NPZ,
    ".orbax": Format.ORBAX,
}


class _Export(NamedTuple):
    """Leaves to export.

    Attributes:
        root: Root to read.
        manifest: Manifest of the step.
        keys: Key in the file -> leaf path.
        nested: If true, formats that have trees get the whole tree; else flat keys.
    """

    root: Root
    manifest: Manifest
    keys: dict[str, str]
    nested: bool

    @property
    def raw_bytes(self) -> int:
        return sum(self.manifest.spec(owner).raw_bytes for owner in self.keys.values())


# The options of ``export``.
_To: TypeAlias = Annotated[
    Format | None,
    typer.Option("--to", help="The format. Default: by the suffix of FILE."),
]
_Out: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="The file or folder to write. Default: step-STEP with the suffix of the format.",
    ),
]
_Files: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--files",
        metavar="FOLDER",
        help=(
            "Copy configuration, tokenizer and generation files of FOLDER to the folder of"
            " --to hf. Default: those that the step keeps."
        ),
    ),
]


def export(  # noqa: PLR0913 - one argument per option
    words: RootNewestStep = None,
    to: _To = None,
    out: _Out = None,
    leaves: Leaves = None,
    strip: Strip = "",
    files: _Files = None,
    item: Item = None,
    max_bytes: MaxBytes = None,
    as_json: Json = False,
) -> None:
    """Write a step, or some of its leaves, to a file of another format.

    The file is a safetensors, torch or npz file, or a folder for Orbax or Hugging Face.
    """
    from deltacheck.restore.export import select
    from deltacheck.restore.resolve import require_leaves

    form = _format_of(to, out)
    if form is not Format.HF and files is not None:
        raise typer.BadParameter("--files goes with --to hf")
    root, manifest = open_step(words, item)
    if form is Format.HF:
        model = _Model(out or Path(f"step-{manifest.step}"), files, strip)
        _export_model(root, manifest, model, leaves or [])
        return
    # Of patterns, whatever the step has is written.
    names = None if leaves is None else [name for name in leaves if not set(name) & set("*?[")]
    require_leaves(root, manifest, names)
    # Two leaves might get one key, or a key be empty: the prefix of ``--strip`` is wrong then.
    with as_misuse():
        keys = select(manifest, leaves or (), strip)
    suffix = next(suffix for suffix, candidate in _SUFFIXES.items() if candidate is form)
    path = out or Path(f"step-{manifest.step}{suffix}")
    # This is checked before anything is written, and for folders of Orbax too.
    _refuse_inside(root, path)
    # A selection or a stripped prefix has no place in the tree, so the file gets flat keys then.
    job = _Export(root, manifest, keys, nested=not leaves and not strip)
    weights_only: bool | None = None
    if form is Format.ORBAX:
        _write_orbax(job, path)
        file_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    else:
        weights_only = _write_file(job, form, path)
        file_bytes = path.stat().st_size
    document = {
        "file": str(path),
        "format": str(form),
        "leaves": len(keys),
        "file_bytes": file_bytes,
        "weights_only": weights_only,
    }
    _print_exported(root, manifest, document, output.size(file_bytes))
    if weights_only is False and not as_json:
        output.print_line(
            "the file holds NumPy arrays, deques or other types that torch.load makes only"
            " with weights_only=False"
        )


def _format_of(to: Format | None, out: Path | None) -> Format:
    """Return the given format, else that of the suffix of the file."""
    # An explicit format wins, so that a file may have any name.
    form = to or _SUFFIXES.get(out.suffix if out else "")
    if form is None:
        raise typer.BadParameter(
            f"give the format with --to, or a file with --out that ends in {', '.join(_SUFFIXES)}"
        )
    return form


class _Model(NamedTuple):
    """A model folder to write.

    Attributes:
        path: The folder.
        files: The folder of configuration and tokenizer, if given.
        strip: The prefix to remove from names of weights.
    """

    path: Path
    files: Path | None
    strip: str


def _export_model(root: Root, manifest: Manifest, model: _Model, leaves: list[str]) -> None:
    """Write a folder that ``from_pretrained`` loads, and print the result."""
    from deltacheck.backends.hugging_face import model_export

    with as_misuse():
        keys = model_export.model_keys(manifest, leaves, model.strip)
    _refuse_inside(root, model.path)
    raw_bytes = sum(manifest.spec(owner).raw_bytes for owner in keys.weights.values())
    with output.progress("writing", raw_bytes) as advance:
        written = model_export.write_model(
            model.path,
            root,
            manifest,
            keys,
            files_from=model.files,
            metadata=_metadata(root, manifest),
            progress=advance,
        )
    if not {"config.json", "adapter_config.json"} & {name.split("/")[-1] for name in written.files}:
        output.warn(
            f"{model.path} has no config.json, which from_pretrained needs; name the folder of the"
            " base model with --files"
        )
    document = {
        "file": str(model.path),
        "format": str(Format.HF),
        "leaves": len(keys.weights),
        "file_bytes": written.file_bytes,
        "weights_only": None,
        "shards": written.shards,
        "copied": written.files,
    }
    content = (
        f"{output.size(written.file_bytes)}, {output.count(len(written.shards), 'shard')},"
        f" {output.count(len(written.files), 'other file')}"
    )
    _print_exported(root, manifest, document, content)


def _print_exported(root: Root, manifest: Manifest, document: output.Row, content: str) -> None:
    """Print the document of ``export``, or one line with what was written."""
    step = {"root": str(root.path), "step": manifest.step, "seq": manifest.seq}
    output.print_result(
        step | document,
        f"step {manifest.step}: {document['leaves']} leaves written to {document['file']}"
        f" ({content})",
    )


def _refuse_inside(root: Root, path: Path) -> None:
    """Refuse a target inside a root, because plain zarr would warn of the unknown file there.

    Raises:
        FileExistsError: If ``path`` lies in the root.
    """
    # An object store has no path on this machine.
    if not isinstance(root.path, Path):
        return
    # Links are resolved on both sides, or a link to the root would be accepted.
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root.path)):
        raise FileExistsError(
            errno.EEXIST,
            "a checkpoint root cannot hold other files; name a file elsewhere with --out",
            str(path),
        )


def _write_file(job: _Export, form: Format, path: Path) -> bool | None:
    """Write one file.

    Returns:
        For torch files, true if ``torch.load(weights_only=True)`` reads the file. Else ``None``.
    """
    from deltacheck.restore import damage
    from deltacheck.restore.export import new_file

    write = {
        Format.SAFETENSORS: _write_safetensors,
        Format.NPZ: _write_npz,
        Format.TORCH: _write_torch,
    }[form]
    with (
        damage.named(job.root, job.manifest),
        new_file(path) as file,
        output.progress("writing", job.raw_bytes) as advance,
    ):
        return write(file, job, advance)


def _write_safetensors(file: BinaryIO, job: _Export, progress: Progress) -> None:
    from deltacheck.restore.export import resolve, shapes, write_safetensors

    metadata = _metadata(job.root, job.manifest)
    # Leaves are resolved but not read here. The writer reads them batch by batch, so that memory
    # does not grow with the size of a leaf.
    leaves = resolve(job.root, job.manifest, job.keys)
    write_safetensors(file, leaves, metadata, progress, shapes(job.manifest, job.keys))


def _metadata(root: Root, manifest: Manifest) -> dict[str, str]:
    """Return the metadata of a safetensors file."""
    from deltacheck import __version__
    from deltacheck.store.files.storage import full_name

    # Hugging Face's loaders require the key "format"; "pt" means PyTorch's layout of tensors.
    source = f"deltacheck {__version__}, root {full_name(root.path)}, seq {manifest.seq}"
    return {"format": "pt", "step": str(manifest.step), "source": source}


def _write_npz(file: BinaryIO, job: _Export, progress: Progress) -> None:
    from deltacheck.restore.export import resolve, shapes, write_npz

    leaves = resolve(job.root, job.manifest, job.keys)
    write_npz(file, leaves, progress, shapes(job.manifest, job.keys))


def _write_torch(file: BinaryIO, job: _Export, progress: Progress) -> bool:
    with needing("torch", "--to torch"):
        from deltacheck.backends.torch.files.torch_export import write_torch
    return write_torch(file, job.root, job.manifest, None if job.nested else job.keys, progress)


def _write_orbax(job: _Export, path: Path) -> None:
    with needing("jax orbax-checkpoint", "--to orbax"):
        from deltacheck.backends.orbax.files.orbax_import import write_orbax
    with output.progress("writing", job.raw_bytes) as advance:
        write_orbax(path, job.root, job.manifest, None if job.nested else job.keys, advance)
