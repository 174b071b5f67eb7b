"""Write leaves of a checkpoint to a safetensors or npz file, and the rules of all formats.

The file is streamed, so memory does not grow with the checkpoint: the chunks of a leaf are
consecutive runs of its memory, so they are read, verified and written in batches. The PyTorch
format cannot be streamed; it is written by ``backends/torch/files/torch_export.py``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.errors import Damaged, DeltacheckError, UnsupportedLeaf
from deltacheck.leaf import limits, tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.restore.content import Loaded
from deltacheck.restore.leaf_kinds import Leaf
from deltacheck.restore.resolve import matches, no_leaf, resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

# Decoded bytes that are read at a time. Larger: fewer, longer reads, but more memory.
BATCH_BYTES = 16 << 20

Progress: TypeAlias = Callable[[int], object]  # receives the decoded bytes of each finished read

# https://github.com/huggingface/safetensors#format: the types whose elements take whole bytes. A
# narrower type takes one byte for each element in our memory, but is packed in safetensors.
SAFETENSORS_TYPES = {
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
SAFETENSORS_HEADER_BYTES = 100_000_000  # readers refuse a longer header
# The element types that each format keeps bit for bit. npz keeps all.
FORMAT_TYPES = {
    "safetensors": frozenset(SAFETENSORS_TYPES),
    # The types that ``torch.save`` knows: those of safetensors and one more.
    "torch": frozenset({*SAFETENSORS_TYPES, "complex128"}),
    # The types that TensorStore knows.
    "orbax": frozenset(
        {
            *SAFETENSORS_TYPES,
            *("complex128", "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn", "int2", "int4"),
        }
    ),
}
# Suffix of an npz entry that holds the type of another entry, if NumPy lacks this type.
_DTYPE_NOTE = ".dtype"
_NPY = ".npy"  # suffix of every entry, which ``numpy.load`` hides
_MAX_NAME_BYTES = 255  # of one name in a path
_MAX_ZIP_NAME_BYTES = (1 << 16) - 1


def select(manifest: Manifest, patterns: Sequence[str] = (), strip: str = "") -> dict[str, str]:
    """Select the leaves to write, and return a key for each.

    Args:
        manifest: The step.
        patterns: Leaf paths, subtrees or ``fnmatch`` patterns, in which ``*`` also matches ``/``.
            Empty: all.
        strip: A prefix to remove from keys that begin with it.

    Returns:
        The path of the leaf that holds the content, by key, keys ascending. Each of several tied
        leaves has its own key.

    Raises:
        LeafNotFound: A pattern matches no leaf.
        ValueError: Two leaves would have the same key, or a key would be empty.
    """
    owners = tree.array_paths(manifest.tree)
    for pattern in patterns:
        if not any(matches(path, pattern) for path in owners):
            raise no_leaf(manifest.step, pattern, owners)
    keys: dict[str, str] = {}
    for path, owner in sorted(owners.items()):
        if patterns and not any(matches(path, pattern) for pattern in patterns):
            continue
        key = path.removeprefix(strip)
        # Only a state that is a single array has the empty path, and may have the empty key.
        if key in keys or (not key and path):
            raise ValueError(
                f"without {strip!r}, leaf {path!r} would be called {key!r}, as another is or as"
                " none can be"
            )
        keys[key] = owner
    return dict(sorted(keys.items()))


def require_types(form: str, types: Iterable[tuple[str, str]]) -> None:
    """Raise ``UnsupportedLeaf`` if a format lacks an element type. Called before any file is made.

    Args:
        form: A key of ``FORMAT_TYPES``.
        types: Leaf path, or key, and element type of each leaf.
    """
    for path, dtype in types:
        if dtype not in FORMAT_TYPES[form]:
            raise UnsupportedLeaf(
                f"leaf {path!r} of type {dtype} cannot be put into a file of {form}; leave it out"
                " with --leaves, or choose --to npz, which keeps every type"
            )


def require_file_names(names: Iterable[tuple[str, str]]) -> None:
    """Check the names of the files that a step keeps, before any of them is written.

    Args:
        names: Name of a file, relative to its folder, and its leaf path.

    Raises:
        Damaged: A name leaves its folder.
        UnsupportedLeaf: A name cannot be that of a file, or is that of a folder of another.
    """
    paths = dict(names)
    for name, path in paths.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise Damaged(
                f"a file of the step has the name {name!r}, which leaves its folder", leaf=path
            )
        if (
            name != pure.as_posix()
            or name in ("", ".")
            or "\0" in name
            or any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in pure.parts)
            or any(parent.as_posix() in paths for parent in pure.parents)
        ):
            raise UnsupportedLeaf(
                f"leaf {path!r} is kept as the file {name!r}, which no file system can hold beside"
                " the others; rename it in the state, or export the weights alone (--to"
                " safetensors)"
            )


def batches(
    leaves: Mapping[str, Leaf], batch_bytes: int = BATCH_BYTES
) -> Iterator[dict[str, list[int]]]:
    """Yield all chunks in order, in groups of at most ``batch_bytes`` decoded bytes, or one chunk.

    Yields:
        The chunk numbers of a group, by leaf.
    """
    batch: dict[str, list[int]] = {}
    size = 0
    for path, leaf in leaves.items():
        chunk_bytes = np.diff(leaf.spec.bounds()) * np.uint64(leaf.spec.word_bytes)
        for chunk, next_bytes in enumerate(chunk_bytes.tolist()):
            if batch and size + next_bytes > batch_bytes:
                yield batch
                batch, size = {}, 0
            batch.setdefault(path, []).append(chunk)
            size += next_bytes
    if batch:
        yield batch


def stream(
    leaves: Mapping[str, Leaf], progress: Progress | None = None
) -> Iterator[tuple[str, U8]]:
    """Yield the verified bytes of each leaf in order, piece by piece. An empty leaf has none."""
    for batch in batches(leaves):
        for key, item in load_leaves({key: leaves[key] for key in batch}, batch).items():
            if progress is not None:
                progress(item.data.size)
            yield key, item.data


def resolve(root: Root, manifest: Manifest, keys: Mapping[str, str]) -> dict[str, Leaf]:
    """Return the resolved leaf of each key that ``select`` returned."""
    # Each of several tied leaves is written.
    limits.check_bytes(
        root.store.path,
        (ref.id for ref in manifest.segments),
        sum(manifest.spec(owner).raw_bytes for owner in keys.values()),
        f"what is to be written of step {manifest.step}",
    )
    leaves = resolve_leaves(root, manifest, list(keys.values()))
    return {key: leaves[owner] for key, owner in keys.items()}


def read_all(
    root: Root, manifest: Manifest, owners: Iterable[str], progress: Progress | None
) -> dict[str, Loaded]:
    """Return leaves of a step by path, for a format that cannot be streamed.

    Args:
        root: The root.
        manifest: The step.
        owners: The leaves.
        progress: Called with the bytes of each leaf.
    """
    loaded: dict[str, Loaded] = {}
    # One leaf at a time, so that the progress is reported while the step is read.
    for owner, leaf in resolve(root, manifest, {owner: owner for owner in owners}).items():
        loaded |= load_leaves({owner: leaf})
        if progress is not None:
            progress(leaf.spec.raw_bytes)
    return loaded


def shapes(manifest: Manifest, keys: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each key whose leaf is stored flat."""
    tags = tree.flat_tags(manifest.tree)
    tagged = {
        key: tree.shape_in(tags.get(owner), math.prod(manifest.spec(owner).shape), owner)
        for key, owner in keys.items()
    }
    return {key: shape for key, shape in tagged.items() if shape is not None}


def safetensors_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes of a safetensors file before its data.

    Args:
        tensors: Element type, shape and bytes of each tensor, in the order of the data.
        metadata: The metadata of the file.

    Raises:
        UnsupportedLeaf: The format does not have an element type, or the header would be too long.
    """
    require_types("safetensors", ((key, dtype) for key, (dtype, _, _) in tensors.items()))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for key, (dtype, shape, size) in tensors.items():
        if key == "__metadata__":
            raise UnsupportedLeaf(
                f"leaf {key!r} has the name that safetensors needs itself; leave it out with"
                " --leaves, or choose --to npz"
            )
        header[key] = {
            "dtype": SAFETENSORS_TYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, begin + size],
        }
        begin += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The format begins the data at a multiple of 8 bytes and allows spaces before it.
    text += b" " * (-len(text) % 8)
    # Checked before the first write, so that no file is left that readers would refuse.
    if len(text) > SAFETENSORS_HEADER_BYTES:
        raise UnsupportedLeaf(
            f"a safetensors file cannot name {len(tensors)} leaves; export them in groups"
        )
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    file: BinaryIO,
    leaves: Mapping[str, Leaf],
    metadata: Mapping[str, str],
    progress: Progress | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Write a safetensors file.

    Args:
        file: The file, opened for writing.
        leaves: The leaves, by key.
        metadata: The metadata of the file.
        progress: Called with the decoded bytes of each finished read.
        shapes: The shapes of leaves that are stored flat, by key.

    Raises:
        UnsupportedLeaf: The format does not have an element type. Nothing was written.
    """
    # Wide elements come first, as in the format's own writer: each tensor is then aligned.
    ordered = dict(
        sorted(leaves.items(), key=lambda item: (-item[1].spec.element.item_bytes, item[0]))
    )
    file.write(
        safetensors_header(
            {
                key: (
                    leaf.spec.dtype,
                    (shapes or {}).get(key, leaf.spec.shape),
                    leaf.spec.raw_bytes,
                )
                for key, leaf in ordered.items()
            },
            metadata,
        )
    )
    for _, piece in stream(ordered, progress):
        file.write(piece.data)


def write_npz(
    file: BinaryIO,
    leaves: Mapping[str, Leaf],
    progress: Progress | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Write an uncompressed npz file, which ``numpy.load`` opens without pickle.

    If NumPy lacks the type of a leaf (bfloat16, float8, int4, ...), its bits are stored as unsigned
    integers, and the entry ``<key>.dtype`` names the type:
    ``z[key].view(getattr(ml_dtypes, str(z[key + ".dtype"])))``.

    Args:
        file: The file, opened for writing.
        leaves: The leaves, by key.
        progress: Called with the decoded bytes of each finished read.
        shapes: The shapes of leaves that are stored flat, by key.

    Raises:
        UnsupportedLeaf: A leaf has a name that npz needs for another, or one that is too long.
    """
    dtype_entries = {key + _DTYPE_NOTE for key, leaf in leaves.items() if _needs_note(leaf.spec)}
    if collisions := dtype_entries & leaves.keys():
        raise UnsupportedLeaf(
            f"leaf {min(collisions)!r} has the name that npz needs for the type of another; leave"
            " it out with --leaves"
        )
    # NumPy looks for the name of a file first, and would return the other leaf.
    entries = dtype_entries | leaves.keys()
    if collisions := {entry for entry in entries if entry + _NPY in entries}:
        raise UnsupportedLeaf(
            f"leaf {min(collisions)!r} has the file that numpy.load opens for"
            f" {min(collisions) + _NPY!r}; leave one of them out with --leaves"
        )
    if long := [entry for entry in entries if len((entry + _NPY).encode()) > _MAX_ZIP_NAME_BYTES]:
        raise UnsupportedLeaf(
            f"leaf {min(long)[:100]!r}... has a name of {len(min(long))} characters, too long for"
            " npz; leave it out with --leaves"
        )
    # One stream for all entries, because a batch of reads may serve several small leaves.
    pieces = stream(leaves, progress)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for key, leaf in leaves.items():
            spec = leaf.spec
            with _entry(archive, key) as entry:
                _write_npy_header(
                    entry, (shapes or {}).get(key, spec.shape), np.dtype(spec.element.storage)
                )
                remaining = spec.raw_bytes
                # Bytes are counted because an empty leaf has no piece in the stream.
                while remaining:
                    _, piece = next(pieces)
                    entry.write(piece.data)
                    remaining -= piece.size
            if _needs_note(spec):
                with _entry(archive, key + _DTYPE_NOTE) as entry:
                    np.lib.format.write_array(entry, np.array(spec.dtype), allow_pickle=False)


def _needs_note(spec: LeafSpec) -> bool:
    return spec.element.storage != spec.dtype


def _entry(archive: zipfile.ZipFile, key: str) -> contextlib.AbstractContextManager[BinaryIO]:
    # ZipInfo has a fixed date, so that the same leaves give the same file.
    info = zipfile.ZipInfo(key + _NPY)
    # The size is unknown when the entry is opened. Without zip64, an entry above 2 GiB would fail.
    return archive.open(info, "w", force_zip64=True)  # type: ignore[return-value]


def _write_npy_header(file: BinaryIO, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, header)
    file.write(content.getvalue())


@contextlib.contextmanager
def named_writes(path: Path) -> Iterator[None]:
    """Name a file in the error of a write, such as that of a full disk, which names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, DeltacheckError):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Create a file that appears at ``path`` whole and durable when the block ends, or not at all.

    Args:
        path: The file.
        overwrite: Replace an existing file. ``False``: refuse to, at the start and at the end.

    Raises:
        FileExistsError: The file exists and ``overwrite`` is not set, or it is not a regular file.
        FileNotFoundError: The directory does not exist.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(path.parent))
    # `lexists` also sees a link without a target, which a rename would replace.
    if os.path.lexists(path) and not path.is_file():
        raise FileExistsError(errno.EEXIST, "not a regular file, and never replaced", str(path))
    if os.path.lexists(path) and not overwrite:
        raise _exists(path)
    # In the same directory, because neither a hard link nor a rename leaves a file system. Cut, so
    # that a long name does not exceed the limit of the file system with its additions.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with named_writes(path), temporary.open("xb") as file:
            yield file
            # Durable before it has its name: otherwise a power cut could leave the name without the
            # content.
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            _publish(temporary, path)
        sync_directory(path.parent)
    finally:
        # After a hard link the temporary name still exists; after a rename it does not.
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that appears at ``path`` whole when the block ends, or not at all.

    Args:
        path: The folder: new or empty.

    Raises:
        FileExistsError: The folder holds anything, or ``path`` is something else.
        FileNotFoundError: The folder above it does not exist.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(path.parent))
    _refuse_content(path)
    # In the same directory, because a rename does not leave a file system.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    content = temporary / "content"
    try:
        # A folder around it, so that files that a library makes beside it are removed, too.
        content.mkdir(parents=True)
        yield content
        sync_directory(content)
        try:
            # Replaces an empty folder, and no other.
            content.rename(path)
        except OSError:
            _refuse_content(path)
            raise
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_content(path: Path) -> None:
    # `lexists` also sees a link without a target.
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(
            errno.EEXIST, "exists and was left as it is; name a folder that is new", str(path)
        )


def _publish(temporary: Path, path: Path) -> None:
    """Give a file its name unless the name exists.

    A hard link checks and creates the name atomically. File systems without hard links get a check
    and a rename instead.
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
