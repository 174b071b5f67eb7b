"""Write a step as a model folder that ``from_pretrained`` loads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from deltacheck.backends.hugging_face.model_folder import (
    INDEX_SUFFIX,
    MAX_FILE_BYTES,
    WEIGHTS,
    describes_model,
    description_files,
)
from deltacheck.errors import Damaged, StepNotFound, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.restore import damage
from deltacheck.restore.export import (
    Progress,
    new_file,
    new_folder,
    require_file_names,
    require_types,
    resolve,
    select,
    shapes,
    stream,
    write_safetensors,
)
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

MODEL = "model/"  # the leaves that are weights, unless others are named
_FILES = "files/"  # files that an import, or the callback of a trainer, keeps in a step
# PEFT looks for the weights of an adapter in one file beside its configuration.
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER = "default"  # the name of an adapter whose files are not in a folder of its own
# The kinds of adapters whose names PEFT forms by the rule of ``adapter_key``.
_ADAPTER_KINDS = {"LORA", "IA3", "LOHA", "LOKR", "OFT"}
# The most bytes of the tensors of a shard, as `save_pretrained` cuts them. A larger tensor has a
# shard of its own.
SHARD_BYTES = 5 * 10**9


class ModelKeys(NamedTuple):
    """The leaves of a step that a model folder gets.

    Attributes:
        weights: Name of a tensor -> leaf path.
        files: Name of a file -> leaf path of its content.
    """

    weights: dict[str, str]
    files: dict[str, str]


class ExportedFiles(NamedTuple):
    """The result of ``write_model``.

    Attributes:
        shards: The files of weights, in order.
        files: The files that describe the model, by name, ascending.
        file_bytes: The bytes of all files.
    """

    shards: tuple[str, ...]
    files: tuple[str, ...]
    file_bytes: int


def model_keys(manifest: Manifest, patterns: Sequence[str] = (), strip: str = "") -> ModelKeys:
    """Select the weights of a model, and the files that the step keeps beside them.

    Args:
        manifest: The step.
        patterns: Leaf paths or patterns of the weights. Empty: the leaves below ``model``; all
            leaves if there are none there.
        strip: A prefix to remove from the names of tensors. Without patterns, ``model/`` is removed
            in any case.

    Raises:
        StepNotFound: A pattern matches no leaf, or the step has no array.
        DuplicatePath: Two tensors, or two files, would have the same name.
        Damaged, UnsupportedLeaf: A file that the step keeps has no name that a file can have.
        ValueError: ``strip`` gives two tensors one name, or leaves none of it.
    """
    paths = tree.array_paths(manifest.tree)
    files = tree.distinct(
        (
            (name, owner)
            for path, owner in sorted(paths.items())
            if path.startswith(_FILES)
            and describes_model(name := tree.plain_name(path.removeprefix(_FILES)))
        ),
        "the folder of the model",
    )
    require_file_names(files.items())
    if not patterns and any(path.startswith(MODEL) for path in paths):
        patterns, strip = (MODEL + "*",), strip or MODEL
    keys = select(manifest, patterns, strip)
    if not keys:
        raise StepNotFound(
            f"step {manifest.step} has no array that a model could be made of;"
            " name the weights with --leaves"
        )
    names = [(tree.plain_name(key), key) for key in keys]
    weights = {
        name: keys[key] for name, key in tree.distinct(names, "the files of the model").items()
    }
    return ModelKeys(weights, files)


def write_model(
    path: Path,
    root: Root,
    manifest: Manifest,
    keys: ModelKeys,
    *,
    files_from: Path | None = None,
    metadata: Mapping[str, str],
    progress: Progress | None = None,
) -> ExportedFiles:
    """Write a model folder, which appears whole and durable, or not at all.

    Args:
        path: The folder: new or empty.
        root: The root.
        manifest: The step.
        keys: The leaves to write.
        files_from: A folder whose files that describe the model are copied, in place of files of
            the step with the same name.
        metadata: The metadata of each shard.
        progress: Called with the decoded bytes of each finished read.

    Raises:
        FileExistsError: The folder holds anything.
        FileNotFoundError: The folder above it, or ``files_from``, does not exist.
        UnsupportedLeaf: safetensors lacks an element type, a file is too long, or PEFT has a rule
            of its own for the names of such an adapter.
        DuplicatePath: Two tensors of an adapter would have the same name.
        Damaged, ChainBroken: The step is not whole.
    """
    copies = {} if files_from is None else files_of(files_from)
    require_types(
        "safetensors", ((key, manifest.spec(owner).dtype) for key, owner in keys.weights.items())
    )
    with new_folder(path) as folder, damage.named(root, manifest):
        leaves = resolve(root, manifest, keys.weights)
        flat_shapes = shapes(manifest, keys.weights)
        sizes = {key: leaf.spec.raw_bytes for key, leaf in leaves.items()}
        adapters = _adapter_names(root, manifest, keys.files, copies)
        # PEFT reads no shards, so an adapter has one file.
        shards = adapter_files(keys.weights, adapters) if adapters else _shards(sizes)
        for shard, names in shards.items():
            with _nested_file(folder, shard) as file:
                write_safetensors(
                    file,
                    {name: leaves[key] for name, key in names.items()},
                    metadata,
                    progress,
                    {name: flat_shapes[key] for name, key in names.items() if key in flat_shapes},
                )
        if len(shards) > 1 and not adapters:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {key: shard for shard, names in shards.items() for key in names},
            }
            with new_file(folder / (WEIGHTS[0] + INDEX_SUFFIX)) as file:
                file.write(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
        described = write_description(folder, root, manifest, keys.files, copies)
        file_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return ExportedFiles(tuple(shards), described, file_bytes)


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that describe a model, by name.

    Raises:
        FileNotFoundError: There is no such folder.
        UnsupportedLeaf: A file is too long.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(folder))
    return {file.relative_to(folder).as_posix(): file for file in description_files(folder)}


def adapter_files(weights: Iterable[str], adapters: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the files of adapters as PEFT names them.

    PEFT writes each adapter to one file, and leaves the adapter's name out of those of tensors.

    Args:
        weights: The names of the tensors in the model.
        adapters: Name of an adapter -> its folder in that of the model. Tensors without the name
            of an adapter, such as trained biases, belong to the first.

    Returns:
        Name of a file -> name of a tensor in it -> its name in the model.

    Raises:
        DuplicatePath: Two tensors would have the same name.
    """
    first = next(iter(adapters))
    pairs: dict[str, list[tuple[str, str]]] = {adapter: [] for adapter in adapters}
    for key in weights:
        parts = key.split(".")
        adapter = next((name for name in adapters if name in parts[-2:]), first)
        pairs[adapter].append((adapter_key(key, adapter), key))
    return {
        str(PurePosixPath(adapters[adapter], _ADAPTER_WEIGHTS)): tree.distinct(
            keys_of_adapter, f"the file of the adapter {adapter!r}"
        )
        for adapter, keys_of_adapter in pairs.items()
        if keys_of_adapter
    }


def adapter_key(key: str, adapter: str) -> str:
    """Return the name of a tensor in the file of an adapter, from that in the model.

    It is ``x.lora_A.weight`` for ``x.lora_A.default.weight``.
    """
    parts = key.split(".")
    # The module of DoRA's magnitude has a name in files that is older than the module.
    if parts[-3:] == ["lora_magnitude_vector", adapter, "weight"]:
        return ".".join(parts[:-2])
    for place in (-1, -2):
        if len(parts) >= -place and parts[place] == adapter:
            del parts[place]
            # A module that is trained whole.
            if place == -2 and parts[-2:-1] == ["modules_to_save"]:
                del parts[-2]
            break
    return ".".join(parts)


def _adapter_names(
    root: Root, manifest: Manifest, files: Mapping[str, str], copies: Mapping[str, Path]
) -> dict[str, str]:
    """Return the folder of each adapter that the files of a model describe, by its name.

    Raises:
        UnsupportedLeaf: PEFT has a rule of its own for the names of such an adapter.
    """
    adapters: dict[str, str] = {}
    for name in sorted({*files, *copies}, key=lambda name: ("/" in name, name)):
        path = PurePosixPath(name)
        if path.name != _ADAPTER_CONFIG:
            continue
        if name in copies:
            text = copies[name].read_bytes()
        else:
            leaf = resolve(root, manifest, {name: files[name]})
            text = b"".join(bytes(piece.data) for _, piece in stream(leaf))
        try:
            kind = json.loads(text)["peft_type"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnsupportedLeaf(
                f"{name} does not say which kind of adapter it describes; name the folder of"
                " another with --files"
            ) from error
        if kind not in _ADAPTER_KINDS:
            raise UnsupportedLeaf(
                f"{name} describes an adapter of type {kind!r}, and --to hf writes"
                f" {', '.join(sorted(_ADAPTER_KINDS))} as PEFT names them; use --to safetensors,"
                " which keeps the names of the model"
            )
        adapters[path.parent.name or _ADAPTER] = str(path.parent)
    return adapters


def _shards(sizes: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """Return the tensors of each shard, in order of their names."""
    groups: list[list[str]] = [[]]
    used = 0
    for key, size in sizes.items():
        if groups[-1] and used + size > SHARD_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(key)
        used += size
    names = shard_names(len(groups))
    return {name: {key: key for key in group} for name, group in zip(names, groups, strict=True)}


def shard_names(count: int) -> list[str]:
    """Return the names of the files of weights, in order."""
    if count == 1:
        return [WEIGHTS[0]]
    stem, suffix = os.path.splitext(WEIGHTS[0])
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def write_description(
    folder: Path,
    root: Root,
    manifest: Manifest,
    files: Mapping[str, str],
    copies: Mapping[str, Path],
) -> tuple[str, ...]:
    """Write the files that describe a model.

    Args:
        folder: The folder of the model.
        root: The root.
        manifest: The step.
        files: Name of a file -> leaf path of its content.
        copies: Name of a file -> a file to copy, in place of one of the step.

    Returns:
        The names of the files, ascending.

    Raises:
        Damaged: A file of the step is damaged or too long.
    """
    owners = {name: owner for name, owner in files.items() if name not in copies}
    leaves = resolve(root, manifest, owners)
    for name, leaf in leaves.items():
        if leaf.spec.raw_bytes > MAX_FILE_BYTES:
            raise Damaged(
                f"the file {name!r} of the step has {leaf.spec.raw_bytes:,} bytes, more than"
                f" {MAX_FILE_BYTES:,}",
                leaf=leaf.spec.path,
            )
        with _nested_file(folder, name) as file:
            for _, piece in stream({name: leaf}):
                file.write(piece.data)
    copy_files(folder, copies)
    return tuple(sorted({*copies, *files}))


def copy_files(folder: Path, copies: Mapping[str, Path]) -> tuple[str, ...]:
    """Copy files into a folder, and return their names. ``copies``: name -> the file to copy."""
    for name, source in copies.items():
        with _nested_file(folder, name) as file, source.open("rb") as original:
            shutil.copyfileobj(original, file)
    return tuple(copies)


@contextlib.contextmanager
def _nested_file(folder: Path, name: str) -> Iterator[BinaryIO]:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        yield file
    sync_directory(folder)
