"""The folder of published versions, in the layout ``hf-delta`` of slime and miles.

A version is a folder ``weight_vNNNNNN`` with an index and files of safetensors. ``docs/how-to/
publish.md`` describes the content.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from deltacheck.backends.hugging_face.model_folder import INDEX_SUFFIX, WEIGHTS
from deltacheck.codec.base import U8
from deltacheck.errors import Damaged, NotACheckpointRoot, UnsupportedFormat
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.restore.export import SAFETENSORS_HEADER_BYTES, SAFETENSORS_TYPES, new_file

INDEX = WEIGHTS[0] + INDEX_SUFFIX
CHECKSUM = "xxh3-128"
# The encoding of changes: that of slime, or one that takes fewer bytes.
XOR, WORDS = "xor", "deltacheck-words"
ENCODINGS = {"slime": XOR, "compact": WORDS}
# The folder that receivers of other libraries do not look at: identity, lock, unfinished versions.
PRIVATE = ".deltacheck"
FULL_REMEDY = (
    "Publish a full version: deltacheck publish RUN --to DIR --full --once. Receivers go on from it"
)
_IDENTITY = "publish.json"
_FORMAT = 1
_EXTENSION = "deltacheck"  # our part of the metadata of an index
_NAME = re.compile(r"weight_v(\d{6,15})\Z")
_MAX_INDEX_BYTES = 64 << 20
_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Version:
    """A published version.

    Attributes:
        number: The number, from 1.
        base: The version that the changes are relative to; ``None``: a full version.
        step: The training step.
        seq: The number of the save in its root.
        file_bytes: The bytes of all files but the index.
    """

    number: int
    base: int | None
    step: int
    seq: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a version.

    Attributes:
        version: The version.
        tensors: The file of each tensor that the version holds.
        checksums: The digest of each of these tensors, as it is after the version.
        files: The digest of each file.
        ties: Tensors that share their memory in the run -> the first of them. Full versions only.
        encoding: ``XOR`` or ``WORDS``; of no meaning in a full version.
    """

    version: Version
    tensors: Mapping[str, str]
    checksums: Mapping[str, str]
    files: Mapping[str, str]
    ties: Mapping[str, str] = field(default_factory=dict)
    encoding: str = XOR

    def encoded(self) -> bytes:
        """Return the bytes of the index file."""
        version = self.version
        extension = {
            "format": _FORMAT,
            "step": version.step,
            "seq": version.seq,
            "file_bytes": version.file_bytes,
            "checksums": dict(self.checksums),
            "files": dict(self.files),
            "ties": dict(self.ties),
        }
        metadata: dict[str, Any] = {
            "version": f"{version.number:06d}",
            "checksum_format": CHECKSUM,
            _EXTENSION: extension,
        }
        if version.base is None:
            # Loaders of Hugging Face expect it.
            metadata["total_size"] = version.file_bytes
        else:
            # The key ``delta_encoding`` tells a delta from a full version.
            metadata |= {
                "base_version": f"{version.base:06d}",
                "delta_encoding": self.encoding,
                "compression_format": "zstd",
            }
        document = {"metadata": metadata, "weight_map": dict(self.tensors)}
        extension["digest"] = _digest_of(document)
        return json.dumps(document, sort_keys=True).encode() + b"\n"


def digest(data: bytes | U8) -> str:
    """Return the xxh3-128 digest of some bytes, in hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(data if isinstance(data, bytes) else data.data))


def version_path(folder: Path, number: int) -> Path:
    """Return the folder of a version."""
    return folder / f"weight_v{number:06d}"


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the versions, ascending."""
    matches = [_NAME.match(entry.name) for entry in folder.iterdir() if entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


def write_identity(folder: Path, run: str) -> None:
    """Make a folder one of published versions of a run.

    Args:
        folder: The folder.
        run: The address of the run.
    """
    with new_file(folder / PRIVATE / _IDENTITY) as file:
        file.write(json.dumps({"format": _FORMAT, "run": run}).encode() + b"\n")


def read_identity(folder: Path) -> str | None:
    """Return the address of the run whose versions a folder has; ``None``: it is no such folder.

    Raises:
        UnsupportedFormat: A newer version of deltacheck has written it.
        Damaged: The identity is damaged.
    """
    path = folder / PRIVATE / _IDENTITY
    try:
        document = json.loads(path.read_bytes())
        form, run = document["format"], document["run"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(
            f"{path} is damaged: {error}. Publish to another folder", file=path
        ) from error
    if form != _FORMAT:
        raise UnsupportedFormat(
            f"{folder} has format {form!r} of published versions, this version of deltacheck reads"
            f" {_FORMAT}; use a newer version"
        )
    return str(run)


def require_identity(folder: Path) -> None:
    """Raise ``NotACheckpointRoot`` unless a folder has published versions."""
    if read_identity(folder) is None:
        raise NotACheckpointRoot(
            f"{folder} is no folder of published versions; name the folder that deltacheck publish"
            " --to writes"
        )


def read_index(folder: Path, number: int) -> Index:
    """Return the index of a version, compared with its digest.

    Raises:
        FileNotFoundError: There is no such version.
        Damaged: The index is damaged.
        UnsupportedFormat: Another version of deltacheck, or another library, has written it.
    """
    path = version_path(folder, number) / INDEX
    if not path.is_file() and path.parent.is_dir():
        raise Damaged(f"{path} is missing. {FULL_REMEDY}", file=path)
    data = path.read_bytes()[: _MAX_INDEX_BYTES + 1]
    try:
        if len(data) > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES:,} bytes")
        document = json.loads(data)
        return _parsed(document, number)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {error}. {FULL_REMEDY}", file=path) from error


def _parsed(document: Any, number: int) -> Index:
    metadata = document["metadata"]
    if _EXTENSION not in metadata:
        raise UnsupportedFormat(
            f"version {number} was not published by deltacheck; publish to a folder of its own"
        )
    extension = metadata[_EXTENSION]
    if extension["format"] != _FORMAT:
        raise UnsupportedFormat(
            f"version {number} has format {extension['format']!r}, this version of deltacheck reads"
            f" {_FORMAT}; use a newer version"
        )
    expected = extension.pop("digest")
    actual = _digest_of(document)
    if actual != expected:
        raise ValueError(f"its digest is {actual}, expected is {expected}")
    if int(metadata["version"]) != number:
        raise ValueError(f"it is the index of version {metadata['version']}")
    base = int(metadata["base_version"]) if "delta_encoding" in metadata else None
    if base is not None and base != number - 1:
        raise ValueError(f"it continues version {base}")
    encoding = metadata.get("delta_encoding", XOR)
    if encoding not in ENCODINGS.values():
        raise UnsupportedFormat(
            f"version {number} has the encoding {encoding!r}, which this version of deltacheck does"
            " not read; use a newer version"
        )
    for name in extension["files"]:
        # A folder may come from anybody, and no file may lie outside it.
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"it names {name!r}, which is no file of its folder")
    tensors, checksums, files = document["weight_map"], extension["checksums"], extension["files"]
    if not set(tensors.values()) <= files.keys() or tensors.keys() != checksums.keys():
        raise ValueError("it lacks a digest")
    version = Version(number, base, extension["step"], extension["seq"], extension["file_bytes"])
    return Index(version, tensors, checksums, files, extension["ties"], encoding)


def _digest_of(document: Any) -> str:
    return digest(json.dumps(document, sort_keys=True).encode())


class Tensor(NamedTuple):
    """A tensor of a file of safetensors.

    Attributes:
        dtype: The element type, as ml_dtypes names it.
        shape: The length of each axis.
        data: The bytes; uint8, 1-D.
    """

    dtype: str
    shape: tuple[int, ...]
    data: U8


def read_tensors(path: Path, expected_digest: str) -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors, in memory, compared with the digest of the file.

    Raises:
        Damaged: The file is damaged.
    """
    data = np.fromfile(path, np.uint8)
    actual = digest(data)
    if actual != expected_digest:
        raise Damaged(
            f"{path} has digest {actual}, expected is {expected_digest}. {FULL_REMEDY}", file=path
        )
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        if length > min(SAFETENSORS_HEADER_BYTES, data.size):
            raise ValueError("its header is too long")
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        return {name: _tensor(entry, data[8 + length :]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is no file of safetensors: {error}. {FULL_REMEDY}", file=path) from (
            error
        )


def _tensor(entry: Any, data: U8) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
    if not 0 <= begin <= end <= data.size:
        raise ValueError("a tensor reaches beyond the end")
    if math.prod(shape) * dtype_named(dtype).item_bytes != end - begin or min(shape, default=0) < 0:
        raise ValueError("the shape of a tensor does not fit its bytes")
    return Tensor(dtype, shape, data[begin:end])


class DigestingFile:
    """A file that computes the digest of all that is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    @property
    def digest(self) -> str:
        """The digest of what was written, in hexadecimal."""
        return str(self._hash.hexdigest())
