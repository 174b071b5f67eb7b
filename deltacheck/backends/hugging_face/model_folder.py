"""Find and check the files of a model folder in the layout of Hugging Face.

A folder has its weights in one file, or in shards with an index (``*.index.json``) that says which
shard has which tensor. The other files describe the model: configuration, tokenizer and so on.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any

import msgspec

from deltacheck.errors import Damaged, UnsupportedLeaf
from deltacheck.leaf.structs import json_as, unique_keys
from deltacheck.restore.export import SAFETENSORS_HEADER_BYTES
from deltacheck.store.files.local_storage import opened_file

# The names of weights in the order of preference, as ``from_pretrained`` looks for them.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX_SUFFIX = ".index.json"
# The longest file beside the weights; tokenizers of large vocabularies have about 30 MB.
MAX_FILE_BYTES = 64 << 20
_MAX_INDEX_BYTES = 64 << 20
# Weights of any framework, and what trainers keep beside them: no part of a model.
_OTHER_SUFFIXES = {
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".npz",
    ".onnx",
    ".pt",
    ".pth",
    ".safetensors",
}
_TORCH_BEGINS = (b"PK", b"\x80")  # of an archive, and of files from before torch 1.6
# Lengths and offsets of any tensor.
Length = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
_TEMPLATES = "additional_chat_templates"
_OTHER_NAME = re.compile(r"\.|.*\.index\.json\Z|trainer_state\.json\Z")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The weights of a model folder.

    Attributes:
        path: The folder.
        shards: The names of the tensors by file of weights, as the index has them; ``None``: a
            single file, which no index describes.
    """

    path: Path
    shards: Mapping[Path, frozenset[str] | None]

    def check(self, shard: Path, names: set[str]) -> None:
        """Compare the tensors of a shard with the index.

        Raises:
            Damaged: A tensor is missing, or the index names it in another shard or not at all.
        """
        expected = self.shards[shard]
        if expected is None or names == expected:
            return
        missing, surplus = sorted(expected - names), sorted(names - expected)
        fault = f"lacks {_listed(missing)}" if missing else f"has {_listed(surplus)} in addition"
        raise Damaged(
            f"{shard} does not fit the index of its folder: it {fault}; fetch the folder again",
            file=shard,
            leaf=(missing or surplus)[0],
        )


def is_model_folder(path: Path) -> bool:
    """Return True if a folder has weights, or an index of them, under one of the known names."""
    return any(_is_there(path, name) for name in WEIGHTS)


def model_folder(path: Path) -> ModelFolder:
    """Return the weights of a model folder; every file that its index names exists.

    Raises:
        FileNotFoundError: The folder has no weights, or a shard is missing; the message names it.
        Damaged: The index does not follow the format, or a file lies outside the folder.
    """
    name = next((name for name in WEIGHTS if _is_there(path, name)), None)
    if name is None:
        raise FileNotFoundError(
            f"{path} has neither {' nor '.join(WEIGHTS)}, and no index of their shards"
        )
    index = path / (name + INDEX_SUFFIX)
    if not index.is_file():
        _require_own(path, path / name)
        return ModelFolder(path, {path / name: None})
    _require_own(path, index)
    shards: dict[Path, set[str]] = {}
    for tensor, shard in _weight_map(index).items():
        # Of a plain name only: the folder may come from anybody.
        if shard in ("", ".", "..") or PurePath(shard).name != shard:
            raise Damaged(f"{index} names {shard!r}, which is no file of its folder", file=index)
        shards.setdefault(path / shard, set()).add(tensor)
    missing = sorted(shard.name for shard in shards if not shard.is_file())
    if missing:
        raise FileNotFoundError(
            f"{path} lacks {_listed(missing)}, {len(missing)} of the {len(shards)} shards that"
            f" {index.name} names; fetch the rest of the folder"
        )
    for file in shards:
        _require_own(path, file)
    return ModelFolder(path, {shard: frozenset(shards[shard]) for shard in sorted(shards)})


def description_files(path: Path) -> list[Path]:
    """Return the files of a folder that describe the model, ascending by name.

    These are all files but weights, their indexes, the state of a trainer and hidden files. Of
    folders below, only that of further chat templates is read.

    Raises:
        UnsupportedLeaf: A file is longer than ``MAX_FILE_BYTES``; the message names it.
        Damaged: A file is a link that leaves the folder and is not one of a cache of the Hub.
    """
    files = sorted(
        file
        for file in (*path.glob("*"), *path.glob(f"{_TEMPLATES}/*"))
        if file.is_file() and describes_model(file.relative_to(path).as_posix())
    )
    for file in files:
        _require_own(path, file)
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise UnsupportedLeaf(
                f"{file} has {size:,} bytes; files beside the weights may have"
                f" {MAX_FILE_BYTES:,}. Move it to another folder"
            )
    return files


def describes_model(name: str) -> bool:
    """Return True if a file of this name, relative to its folder, describes the model."""
    pure = PurePath(name)
    return pure.suffix not in _OTHER_SUFFIXES and not any(map(_OTHER_NAME.match, pure.parts))


def _require_own(folder: Path, file: Path) -> None:
    """Raise ``Damaged`` if a file is a link to a file that does not belong to the model.

    In the cache of the Hub, a folder is ``snapshots/REVISION`` and its files are links to
    ``blobs`` of the same repository.
    """
    target, model = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
    in_cache = model.parent.name == "snapshots" and target.parent == model.parent.parent / "blobs"
    if not (target.is_relative_to(model) or in_cache):
        raise Damaged(
            f"{file} is a link to {target}, outside its folder, so its content is not read; put the"
            " file itself there",
            file=file,
        )


def require_whole(shard: Path) -> None:
    """Compare the size of a file of weights with its own header, before its content is read.

    Raises:
        Damaged: The header is none, or the file has another size.
    """
    with opened_file(Path(os.path.realpath(shard)), sys.maxsize) as (file, size):
        begin = file.read(8)
        if shard.suffix != ".safetensors":
            # The directory of an archive is at its end.
            is_cut = begin.startswith(b"PK") and not zipfile.is_zipfile(file)
            if is_cut or not begin.startswith(_TORCH_BEGINS):
                raise Damaged(f"{shard} is no file of torch.save", file=shard)
            return
        length = int.from_bytes(begin, "little")
        try:
            if length > min(SAFETENSORS_HEADER_BYTES, size):
                raise ValueError("its header is too long")
            entries = entries_of(file.read(length))
        except ValueError as error:
            raise Damaged(f"{shard} is no file of safetensors: {error}", file=shard) from error
        end = 8 + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
        if end != size:
            raise Damaged(
                f"{shard} has {size} bytes, and {end} by its header; fetch it again", file=shard
            )


class Entry(msgspec.Struct):
    """A tensor in the header of a file of safetensors."""

    dtype: str
    shape: list[Length]
    data_offsets: tuple[Length, Length]


def entries_of(header: bytes) -> dict[str, Entry]:
    """Return the tensors of a header of safetensors by name.

    Raises:
        ValueError: It is no such header.
    """
    fields = json_as(dict[str, msgspec.Raw], header)
    fields.pop("__metadata__", None)
    return {name: json_as(Entry, text) for name, text in fields.items()}


def _is_there(path: Path, name: str) -> bool:
    return (path / name).is_file() or (path / (name + INDEX_SUFFIX)).is_file()


def _weight_map(index: Path) -> dict[str, str]:
    """Return the shard of each tensor.

    The ``total_size`` of an index is not compared: writers count tied and packed tensors in
    different ways. The readers of shards compare the size of each file with its header.
    """
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES:,} bytes")
        document = json.loads(index.read_bytes(), object_pairs_hook=unique_keys)
        weight_map: Any = document["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("its weight_map is no object, or empty")
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("a name in its weight_map is no text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{index} is no index of shards: {error}", file=index) from error
    return weight_map


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")
