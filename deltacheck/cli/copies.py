"""Commands that copy: ``export``, ``restore``, ``import``, ``branch``, ``mirror``, ``publish``."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import (
    Item,
    Json,
    Leaves,
    MaxBytes,
    RootNewestStep,
    RootStep,
    as_misuse,
    checked_root,
    needing,
    open_step,
    parse,
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


class Encoding(StrEnum):
    """The encoding of changes that ``publish`` writes."""

    SLIME = "slime"
    COMPACT = "compact"


class Checksum(StrEnum):
    """The sums of tensors that ``publish`` writes."""

    XXH3 = "xxh3-128"
    ADLER32 = "adler32"


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


def export(  # noqa: PLR0913 - one argument per option
    words: RootNewestStep = None,
    to: Annotated[
        Format | None,
        typer.Option("--to", help="The format. Default: by the suffix of FILE."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="The file or folder to write. Default: step-STEP with the suffix of the format.",
        ),
    ] = None,
    leaves: Leaves = None,
    strip: Annotated[
        str,
        typer.Option(
            "--strip", metavar="PREFIX", help="Remove PREFIX from keys that begin with it."
        ),
    ] = "",
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            metavar="FOLDER",
            help=(
                "Copy configuration, tokenizer and generation files of FOLDER to the folder of"
                " --to hf. Default: those that the step keeps."
            ),
        ),
    ] = None,
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
        _export_model(root, manifest, model, leaves or [], as_json)
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
    _print_exported(root, manifest, document, output.size(file_bytes), as_json)
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


def _export_model(
    root: Root, manifest: Manifest, model: _Model, leaves: list[str], as_json: bool
) -> None:
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
    _print_exported(root, manifest, document, content, as_json)


def _print_exported(
    root: Root, manifest: Manifest, document: output.Row, content: str, as_json: bool
) -> None:
    """Print the document of ``export``, or one line with what was written."""
    step = {"root": str(root.path), "step": manifest.step, "seq": manifest.seq}
    if as_json:
        output.print_json(step | document)
    else:
        output.print_line(
            f"step {manifest.step}: {document['leaves']} leaves written to {document['file']}"
            f" ({content})"
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


def import_files(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT",
            callback=checked_root,
            help="The target: a root, or a directory that is new or empty.",
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

    target = storage.local(root, "an import")
    # A manager's folder holds many steps that have numbers, so it cannot be one of several files.
    folders = [path for path in files if path.is_dir() and not is_model_folder(path)]
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
        for path, number in _ingest(kind, target, sources, item):
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
    kind: str, root: Path, sources: list[tuple[int, Path]], item: str | None
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


def branch(
    words: RootStep = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="DIR",
            callback=checked_root,
            help="The new root: a directory that is new or empty.",
        ),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option(
            "--copy",
            help=(
                "Copy files instead of linking them: takes more space, but damage to one root does"
                " not affect the other."
            ),
        ),
    ] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Make a new root that begins with a step of this root, and shares its files."""
    from deltacheck.errors import NotACheckpointRoot
    from deltacheck.maintain.branch import branch as branch_step
    from deltacheck.store.roots.opening import open_root

    if to is None:
        raise typer.BadParameter("name the directory of the new root with --to")
    selection = parse(words, min_steps=1, max_steps=1)
    root = open_root(selection.root, item)
    try:
        result = branch_step(root, selection.steps[0], to, copy=copy)
    except NotACheckpointRoot as error:
        # The new root cannot lie there.
        raise typer.BadParameter(str(error)) from error
    if as_json:
        output.print_json({"root": to, **asdict(result)})
        return
    shared = (
        f"{output.size(result.linked_bytes)} shared" if result.linked_bytes else "nothing shared"
    )
    copied = f", {output.size(result.copied_bytes)} copied" if result.copied_bytes else ""
    output.print_line(
        f"{to} begins with step {result.step}: {result.segments} segments, {shared}{copied}"
    )


def mirror(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            callback=checked_root,
            help="The root of an engine, or its memory root: a local directory.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            callback=checked_root,
            help="The copy, new or a mirror of the same run: a directory or s3://BUCKET/PREFIX.",
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Copy the present steps, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Copy each step of a root as it appears, to another machine's memory or to a bucket.

    Steps that are deleted there are deleted in the copy too. Takes no lock on the source.
    """
    from deltacheck.maintain.mirror import Mirror

    # A timeout of zero polls once.
    with Mirror(source, target) as copy:
        count = copy.run(timeout=0 if once else None)
    if as_json:
        output.print_json({"source": source, "target": target, "copied": count})
    else:
        output.print_line(f"{target}: {count} steps copied")


def publish(  # noqa: PLR0913 - one argument per option
    run: Annotated[
        str, typer.Argument(metavar="RUN", callback=checked_root, help="The root of the run.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="DIR",
            callback=checked_root,
            help=(
                "The folder of versions, a directory or s3://BUCKET/PREFIX: new, empty, or with"
                " versions of the same run."
            ),
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Publish the present steps, and end.")
    ] = False,
    newest_only: Annotated[
        bool,
        typer.Option(
            "--newest-only",
            help="Skip steps that were saved since the last version: fewer bytes, not every step.",
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Begin with a full version. It is the remedy for a damaged version."
        ),
    ] = False,
    full_every: Annotated[
        int,
        typer.Option(
            "--full-every",
            min=1,
            max=64,
            metavar="N",
            help=(
                "The most versions from one full version to the next. Larger: fewer bytes;"
                " smaller: late receivers read less."
            ),
        ),
    ] = 20,
    encoding: Annotated[
        Encoding,
        typer.Option(
            "--encoding",
            help=(
                "slime: engines of slime and miles read the versions. compact: fewer bytes,"
                " for deltacheck.Receiver only."
            ),
        ),
    ] = Encoding.SLIME,
    checksum: Annotated[
        Checksum,
        typer.Option(
            "--checksum",
            help=(
                "The sums of tensors: xxh3-128 for slime and miles, adler32 for ModelExpress and"
                " cwtrain."
            ),
        ),
    ] = Checksum.XXH3,
    leaves: Leaves = None,
    strip: Annotated[
        str,
        typer.Option(
            "--strip", metavar="PREFIX", help="Remove PREFIX from names that begin with it."
        ),
    ] = "",
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            metavar="FOLDER",
            help=(
                "Copy configuration and tokenizer of FOLDER to full versions. Default: those that"
                " the step keeps."
            ),
        ),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Write the weights of each step as a version that inference engines pull.

    A version holds what has changed since the one before. Takes no lock on the run.
    """
    from deltacheck.backends.hugging_face.publish.publisher import Publisher
    from deltacheck.backends.hugging_face.publish.version_folder import Version

    def report(version: Version) -> None:
        kind = "full" if version.base is None else f"changes since version {version.base}"
        if not as_json:
            output.print_line(
                f"version {version.number}: step {version.step}, {kind}"
                f" ({output.size(version.file_bytes)})"
            )

    options = {
        "encoding": str(encoding),
        "checksum": str(checksum),
        "leaves": leaves or (),
        "strip": strip,
        "files": files,
        "item": item,
    }
    with Publisher(run, to, full_every=full_every, **options) as publisher:  # type: ignore[arg-type]
        versions = []
        if full and (version := publisher.poll(full=True)) is not None:
            versions.append(version)
            report(version)
        versions += publisher.run(
            timeout=0 if once else None,
            newest_only=newest_only,
            on_version=report,
        )
    if as_json:
        output.print_json({"run": run, "to": to, "versions": [asdict(v) for v in versions]})
    elif not versions:
        output.print_line(f"{to}: nothing new to publish")
