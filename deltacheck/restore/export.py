"""Write leaves of a checkpoint to a file of another format: safetensors or npz, streamed, so that
memory does not grow with the checkpoint.

A leaf's chunks are consecutive runs of its memory, so a leaf is read, verified and written a batch
of chunks at a time. The PyTorch format, which cannot be streamed, is in
``backends/torch/export.py``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.errors import StepNotFound, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.restore.leaf_kinds import Leaf
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root

BATCH_BYTES = (
    16 << 20
)  # decoded bytes that are read at a time; larger: fewer, longer reads, more memory

Progress: TypeAlias = Callable[[int], object]  # told how many more decoded bytes are done

# https://github.com/huggingface/safetensors#format; the types that take one byte or more an
# element, which is how ours lie in memory.
_SAFETENSORS = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_SAFETENSORS_HEADER_BYTES = 100_000_000  # the most that its readers accept
# Suffix of the npz entry that names the true type of an entry that NumPy alone cannot type
_DTYPE_NOTE = ".dtype"


def select(manifest: Manifest, patterns: Sequence[str] = (), strip: str = "") -> dict[str, str]:
    """Which leaves to write, and as what: key -> path of the leaf that holds its bytes, keys
    ascending. Tied leaves each have their key.

    ``patterns``: leaf paths or ``fnmatch`` patterns, where ``*`` matches ``/`` too; none: all.
    ``strip``: removed from the front of keys that begin with it. Raises ``StepNotFound`` for a
    pattern that matches nothing, ``ValueError`` where two leaves would get the same key or one an
    empty key.
    """
    owners = tree.array_paths(manifest.tree)
    for pattern in patterns:
        if not any(matches(path, pattern) for path in owners):
            raise StepNotFound(f"step {manifest.step} has no leaf that matches {pattern!r}")
    keys: dict[str, str] = {}
    for path, owner in sorted(owners.items()):
        if patterns and not any(matches(path, pattern) for pattern in patterns):
            continue
        key = path.removeprefix(strip)
        if key in keys or (not key and path):
            raise ValueError(
                f"without {strip!r}, leaf {path!r} would be called {key!r}, as another is or as"
                " none can be"
            )
        keys[key] = owner
    return dict(sorted(keys.items()))


def matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


def batches(
    leaves: Mapping[str, Leaf], batch_bytes: int = BATCH_BYTES
) -> Iterator[dict[str, list[int]]]:
    """All chunks of all leaves in order, in groups of at most ``batch_bytes`` decoded bytes, or of
    one chunk: leaf -> chunk numbers.
    """
    batch: dict[str, list[int]] = {}
    size = 0
    for path, leaf in leaves.items():
        chunk_bytes = np.diff(leaf.spec.bounds()) * np.uint64(leaf.spec.word_bytes)
        for chunk, more in enumerate(chunk_bytes.tolist()):
            if batch and size + more > batch_bytes:
                yield batch
                batch, size = {}, 0
            batch.setdefault(path, []).append(chunk)
            size += more
    if batch:
        yield batch


def stream(
    leaves: Mapping[str, Leaf], progress: Progress | None = None
) -> Iterator[tuple[str, U8]]:
    """The verified bytes of every leaf in order, piece by piece; an empty leaf has no piece."""
    for batch in batches(leaves):
        for key, item in load_leaves({key: leaves[key] for key in batch}, batch).items():
            if progress is not None:
                progress(item.data.size)
            yield key, item.data


def resolve(root: Root, manifest: Manifest, keys: Mapping[str, str]) -> dict[str, Leaf]:
    """The leaf of every key that ``select`` gave. Raises ``ChainBroken`` or ``Damaged``."""
    leaves = resolve_leaves(root, manifest, list(keys.values()))
    return {key: leaves[owner] for key, owner in keys.items()}


def shapes(manifest: Manifest, keys: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The shape of every key whose leaf is stored flat."""
    tags = tree.flat_tags(manifest.tree)
    found = {
        key: tree.shape_in(tags.get(owner), math.prod(manifest.spec(owner).shape), owner)
        for key, owner in keys.items()
    }
    return {key: shape for key, shape in found.items() if shape is not None}


def write_safetensors(
    file: BinaryIO,
    leaves: Mapping[str, Leaf],
    about: Mapping[str, str],
    progress: Progress | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Write a safetensors file. ``about``: its metadata; ``shapes``: of leaves that are stored
    flat.

    Raises ``UnsupportedLeaf``, before anything is written, for an element type that the format does
    not have.
    """
    # Wide elements first: every tensor is then aligned to its element, as the format's own writer
    # does it.
    ordered = dict(
        sorted(leaves.items(), key=lambda item: (-item[1].spec.element.item_bytes, item[0]))
    )
    header: dict[str, object] = {"__metadata__": dict(about)}
    begin = 0
    for key, leaf in ordered.items():
        spec = leaf.spec
        if spec.dtype not in _SAFETENSORS or key == "__metadata__":
            raise UnsupportedLeaf(
                f"leaf {spec.path!r} of type {spec.dtype} cannot be put into a safetensors file;"
                " leave it out, or choose npz"
            )
        end = begin + spec.raw_bytes
        shape = (shapes or {}).get(key, spec.shape)
        header[key] = {
            "dtype": _SAFETENSORS[spec.dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _SAFETENSORS_HEADER_BYTES:
        raise UnsupportedLeaf(
            f"a safetensors file cannot name {len(leaves)} leaves; export them in groups"
        )
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for _, piece in stream(ordered, progress):
        file.write(piece.data)


def write_npz(
    file: BinaryIO,
    leaves: Mapping[str, Leaf],
    progress: Progress | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Write an uncompressed npz file, which ``numpy.load`` opens without pickle.

    A leaf of a type that NumPy alone does not have (bfloat16, float8, int4, ...) is stored as the
    unsigned integers of its bits, and the entry ``<key>.dtype`` beside it names the type:
    ``z[key].view(getattr(ml_dtypes, str(z[key + ".dtype"])))``. Raises ``UnsupportedLeaf`` where a
    leaf already has the name of such an entry.
    """
    noted = {key + _DTYPE_NOTE for key, leaf in leaves.items() if _needs_note(leaf.spec)}
    if taken := noted & leaves.keys():
        raise UnsupportedLeaf(
            f"leaf {min(taken)!r} has the name that npz needs for the type of another; leave it out"
        )
    pieces = stream(leaves, progress)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for key, leaf in leaves.items():
            spec = leaf.spec
            with _entry(archive, key) as entry:
                _write_npy_header(
                    entry, (shapes or {}).get(key, spec.shape), np.dtype(spec.element.storage)
                )
                left = spec.raw_bytes
                while left:
                    _, piece = next(pieces)
                    entry.write(piece.data)
                    left -= piece.size
            if _needs_note(spec):
                with _entry(archive, key + _DTYPE_NOTE) as entry:
                    np.lib.format.write_array(entry, np.array(spec.dtype), allow_pickle=False)


def _needs_note(spec: LeafSpec) -> bool:
    return spec.element.storage != spec.dtype


def _entry(archive: zipfile.ZipFile, key: str) -> contextlib.AbstractContextManager[BinaryIO]:
    # A fixed date: the same leaves give the same file.
    return archive.open(zipfile.ZipInfo(key + ".npy"), "w", force_zip64=True)  # type: ignore[return-value]


def _write_npy_header(file: BinaryIO, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, header)
    file.write(content.getvalue())


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """A file that appears at ``path`` whole and durable when the block ends, or not at all.

    Raises ``FileExistsError``, at the start or at the end, where ``path`` is there and
    ``overwrite`` is not set.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(path.parent))
    if os.path.lexists(path) and not path.is_file():
        raise FileExistsError(errno.EEXIST, "not a regular file, and never replaced", str(path))
    if os.path.lexists(path) and not overwrite:
        raise _exists(path)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            _publish(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _publish(temporary: Path, path: Path) -> None:
    """Give the file its name unless another has it: a hard link does both in one act, where the
    file system has them.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _exists(path) from None
    except OSError:
        if os.path.lexists(path):
            raise _exists(path) from None
        temporary.rename(path)


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "the file exists and was left as it is", str(path))
