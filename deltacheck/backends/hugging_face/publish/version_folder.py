"""The folder of published versions, in the layout ``hf-delta`` of slime and miles.

A version is a folder ``weight_vNNNNNN`` with an index and files of safetensors. In a bucket, the
index is written last, and a version without one does not exist. ``docs/how-to/publish.md``
describes the content.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import xxhash

from deltacheck.backends.hugging_face.model_folder import (
    INDEX_SUFFIX,
    WEIGHTS,
    Entry,
    Length,
    entries_of,
)
from deltacheck.codec.base import U8
from deltacheck.errors import Damaged, NotACheckpointRoot, UnsupportedFormat
from deltacheck.leaf import limits
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.structs import json_as
from deltacheck.restore.export import SAFETENSORS_HEADER_BYTES, SAFETENSORS_TYPES
from deltacheck.store.files import arrays
from deltacheck.store.files.storage import Place, storage_of

INDEX = WEIGHTS[0] + INDEX_SUFFIX
# The encoding of changes: that of slime, or one that takes fewer bytes.
XOR, WORDS = "xor", "deltacheck-words"
ENCODINGS = {"slime": XOR, "compact": WORDS}
XXH3 = "xxh3-128"
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
_MAX_IDENTITY_BYTES = 1 << 16
_BLOCK_BYTES = 512  # the unit of ``st_blocks``
_MAX_AXES = 64  # of NumPy
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
        checksum: One of ``CHECKSUMS``, that of the sums in the files.
    """

    version: Version
    tensors: Mapping[str, str]
    checksums: Mapping[str, str]
    files: Mapping[str, str]
    ties: Mapping[str, str] = field(default_factory=dict)
    encoding: str = XOR
    checksum: str = XXH3

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
            "checksum_format": self.checksum,
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


def _adler32(data: U8) -> str:
    return f"{zlib.adler32(data.data):08x}"


# The sums that receivers of other libraries compare tensors with. Ours compares with ``digest``.
CHECKSUMS: dict[str, Callable[[U8], str]] = {XXH3: digest, "adler32": _adler32}


def version_path(folder: Place, number: int) -> Place:
    """Return the folder of a version."""
    return folder / f"weight_v{number:06d}"


def is_complete(folder: Place, number: int) -> bool:
    """Return whether a version exists: it has its index."""
    return storage_of(version_path(folder, number) / INDEX).name_exists()


def numbers(folder: Place) -> list[int]:
    """Return the numbers of the versions, ascending."""
    if isinstance(folder, Path):
        # By the names alone: one that lacks its index is damaged.
        with os.scandir(folder) as entries:
            return _numbers(e.name for e in entries if e.is_dir(follow_symlinks=False))
    keys = folder.keys()
    names = (key.removeprefix(f"{folder.key}/").partition("/") for key in keys)
    found = _numbers(name for name, _, file in names if file == INDEX)
    # A listing may lag behind what is stored. No number is left out, so the next is known.
    while found and is_complete(folder, found[-1] + 1):
        found.append(found[-1] + 1)
    return found


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_NAME.match, names) if match)


def write_identity(folder: Place, run: str) -> None:
    """Make a folder one of published versions of a run.

    Args:
        folder: The folder.
        run: The address of the run.
    """
    content = json.dumps({"format": _FORMAT, "run": run}).encode() + b"\n"
    arrays.create_file(folder / PRIVATE, _IDENTITY, content)


def read_identity(folder: Place) -> str | None:
    """Return the address of the run whose versions a folder has; ``None``: it is no such folder.

    Raises:
        UnsupportedFormat: A newer version of deltacheck has written it.
        Damaged: The identity is damaged.
    """
    path = folder / PRIVATE / _IDENTITY
    try:
        storage_of(path.parent).check_directory()
        identity = json_as(_Identity, storage_of(path).read_file(_MAX_IDENTITY_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Damaged(
            f"{path} is damaged: {error}. Publish to another folder", file=path
        ) from error
    if identity.format != _FORMAT:
        raise UnsupportedFormat(
            f"{folder} has format {identity.format} of published versions, this version of"
            f" deltacheck reads {_FORMAT}; use a newer version"
        )
    return identity.run


def require_identity(folder: Place) -> None:
    """Raise ``NotACheckpointRoot`` unless a folder has published versions."""
    if read_identity(folder) is None:
        raise NotACheckpointRoot(
            f"{folder} is no folder of published versions; name the folder that deltacheck publish"
            " --to writes"
        )


def read_index(folder: Place, number: int) -> Index:
    """Return the index of a version, compared with its digest.

    Raises:
        FileNotFoundError: There is no such version.
        Damaged: The index is damaged.
        UnsupportedFormat: Another version of deltacheck, or another library, has written it.
    """
    path = version_path(folder, number) / INDEX
    if isinstance(path, Path) and not os.path.lexists(path) and path.parent.is_dir():
        raise Damaged(f"{path} is missing. {FULL_REMEDY}", file=path)
    storage_of(path.parent).check_directory()
    data = storage_of(path).read_file(_MAX_INDEX_BYTES)
    try:
        return _parsed(data, number)
    except ValueError as error:
        raise Damaged(f"{path} is damaged: {error}. {FULL_REMEDY}", file=path) from error


class _Identity(msgspec.Struct):
    """The document of a folder of versions."""

    format: int
    run: str


class _Extension(msgspec.Struct, forbid_unknown_fields=True):
    """Our part of the metadata of an index."""

    format: int
    step: Length
    seq: Length
    file_bytes: Length
    checksums: dict[str, str]
    files: dict[str, str]
    ties: dict[str, str]
    digest: str


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """The metadata of an index."""

    version: str
    checksum_format: str
    deltacheck: _Extension
    total_size: Length = 0
    base_version: str = ""
    delta_encoding: str = ""
    compression_format: str = ""


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """An index. Its digest covers all fields, so that none may be unknown."""

    metadata: _Metadata
    weight_map: dict[str, str]


class _FormatOnly(msgspec.Struct):
    format: int


class _MetadataOfAny(msgspec.Struct):
    delta_encoding: str = ""
    deltacheck: _FormatOnly | None = None


class _DocumentOfAny(msgspec.Struct):
    """The content of an index of any writer and any format, as far as it is read."""

    metadata: _MetadataOfAny


def _parsed(data: bytes, number: int) -> Index:
    header = json_as(_DocumentOfAny, data).metadata
    if header.deltacheck is None:
        raise UnsupportedFormat(
            f"version {number} was not published by deltacheck; publish to a folder of its own"
        )
    if header.deltacheck.format != _FORMAT:
        raise UnsupportedFormat(
            f"version {number} has format {header.deltacheck.format}, this version of deltacheck"
            f" reads {_FORMAT}; use a newer version"
        )
    if header.delta_encoding not in ("", *ENCODINGS.values()):
        raise UnsupportedFormat(
            f"version {number} has the encoding {header.delta_encoding!r}, which this version of"
            " deltacheck does not read; use a newer version"
        )
    document = json_as(_Document, data)
    metadata, tensors = document.metadata, document.weight_map
    extension = metadata.deltacheck
    plain = json.loads(data)
    del plain["metadata"][_EXTENSION]["digest"]
    actual = _digest_of(plain)
    if actual != extension.digest:
        raise ValueError(f"its digest is {actual}, expected is {extension.digest}")
    if metadata.version != f"{number:06d}":
        raise ValueError(f"it is the index of version {metadata.version}")
    base = number - 1 if metadata.delta_encoding else None
    if base is not None and metadata.base_version != f"{base:06d}":
        raise ValueError(f"it continues version {metadata.base_version}")
    checksums, files, ties = extension.checksums, extension.files, extension.ties
    for name in files:
        # A folder may come from anybody, and no file may lie outside it.
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
            raise ValueError(f"it names {name!r}, which is no file of its folder")
    if not set(tensors.values()) <= files.keys() or tensors.keys() != checksums.keys():
        raise ValueError("it lacks a digest")
    for name in set(tensors.values()):
        if PurePath(name).name != name:
            raise ValueError(f"it has tensors in {name!r}, which is no file of its folder")
    for name, first in ties.items():
        if first in ties or name == first or checksums.get(name, "") != checksums.get(first):
            raise ValueError(f"its tensor {name!r} cannot be tied to {first!r}")
    version = Version(number, base, extension.step, extension.seq, extension.file_bytes)
    encoding = metadata.delta_encoding or XOR
    return Index(version, tensors, checksums, files, ties, encoding, metadata.checksum_format)


def _digest_of(document: Any) -> str:
    return digest(json.dumps(document, sort_keys=True).encode())


def check_size(folder: Place, indexes: Iterable[Index]) -> None:
    """Compare the files of weights of versions with the limits of the present call.

    Raises:
        BudgetExceeded: They have more bytes.
    """
    subject = f"the weights of the versions in {folder}"
    if not isinstance(folder, Path):
        # A listing has no sizes, so those of the indexes count.
        size = sum(index.version.file_bytes for index in indexes)
        return limits.check_files(subject, size, size)
    statuses = [
        os.lstat(folder / version_path(folder, index.version.number).name / file)
        for index in indexes
        for file in set(index.tensors.values())
    ]
    limits.check_files(
        subject,
        sum(status.st_size for status in statuses),
        sum(status.st_blocks * _BLOCK_BYTES for status in statuses),
    )


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


def read_tensors(path: Place, index: Index) -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors, in memory, compared with the digest of the file.

    Args:
        path: The file.
        index: The index of its version.

    Raises:
        Damaged: The file is damaged.
    """
    stored = storage_of(path).read_file(sys.maxsize, index.version.file_bytes)
    data, expected_digest = np.frombuffer(stored, np.uint8), index.files[path.name]
    actual = digest(data)
    if actual != expected_digest:
        raise Damaged(
            f"{path} has digest {actual}, expected is {expected_digest}. {FULL_REMEDY}", file=path
        )
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        if length > min(SAFETENSORS_HEADER_BYTES, data.size):
            raise ValueError("its header is too long")
        entries = entries_of(data[8 : 8 + length].tobytes())
        content = data[8 + length :]
        end = 0
        # Without a gap or an overlap, so that tensors take no more memory than their file.
        for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
            if entry.data_offsets[0] != end:
                raise ValueError("its tensors do not lie one behind the other")
            end = entry.data_offsets[1]
        if end != content.size:
            raise ValueError(f"its tensors end at {end}, and its data at {content.size}")
        return {name: _tensor(entry, content) for name, entry in entries.items()}
    except ValueError as error:
        raise Damaged(f"{path} is no file of safetensors: {error}. {FULL_REMEDY}", file=path) from (
            error
        )


def _tensor(entry: Entry, data: U8) -> Tensor:
    begin, end = entry.data_offsets
    dtype, shape = _TYPES.get(entry.dtype), tuple(entry.shape)
    if dtype is None:
        raise ValueError(f"it has the element type {entry.dtype!r}")
    # NumPy has no more axes, and multiplies also the lengths of an empty array.
    longest = math.prod(size for size in shape if size) * dtype_named(dtype).item_bytes
    if len(shape) > _MAX_AXES or longest > sys.maxsize:
        raise ValueError(f"no array has the shape {shape[:8]}")
    if (longest if all(shape) else 0) != end - begin:
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
