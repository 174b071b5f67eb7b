"""The versions of a folder, and the right of this process to add to them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltacheck.backends.hugging_face import model_export
from deltacheck.backends.hugging_face.publish import version_folder
from deltacheck.backends.hugging_face.publish.version_folder import (
    CHECKSUMS,
    ENCODINGS,
    INDEX,
    PRIVATE,
    WORDS,
    XOR,
    XXH3,
    DigestingFile,
    Index,
    Tensor,
    Version,
)
from deltacheck.codec import changed_words, frames
from deltacheck.codec.base import U8
from deltacheck.errors import (
    Damaged,
    NotACheckpointRoot,
    RootBusy,
    StorageFailed,
    UnsupportedFormat,
)
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.restore.export import named_writes, safetensors_header
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.durability import Durability, sync_directory
from deltacheck.store.files.storage import Place, storage_of
from deltacheck.store.lock.lease import Lease

# The most bytes of a file of weights. Larger: fewer files; smaller: receivers take less memory.
_SHARD_BYTES = 10**9
# Full versions that are kept, with the deltas after them. A receiver that reads the older one is
# not disturbed when a new one appears.
_KEPT_FULL = 2
# Other receivers refuse longer chains.
_LONGEST_CHAIN = 64


@dataclass(frozen=True, slots=True)
class VersionContent:
    """The content of a version.

    Attributes:
        step: The training step.
        seq: The number of the save.
        changes: Name, bytes before and the new tensor of each tensor that may have changed. Bytes
            of ``None`` demand a full version. It is read once.
        tensors: Returns all tensors by name, once ``changes`` was read.
        ties: Tensors that share their memory -> the first of them.
        describe: Writes the files that describe the model into a folder; returns their names.
    """

    step: int
    seq: int
    changes: Iterable[tuple[str, U8 | None, Tensor]]
    tensors: Callable[[], Mapping[str, Tensor]]
    ties: Mapping[str, str]
    describe: Callable[[Path], Iterable[str]]


class VersionSeries:
    """The versions of a folder. Each is written whole or not at all.

    Args:
        folder: The folder: new, empty, or with versions of the same owner. A directory, or a prefix
            of an object store, to which files are copied from a temporary directory.
        owner: The run or program whose weights the versions have.
        full_every: The most versions from one full version to the next, 1 to 64.
        encoding: ``"slime"`` or ``"compact"``.
        checksum: ``"xxh3-128"`` or ``"adler32"``, for the sums of tensors in the files.

    Raises:
        NotACheckpointRoot: ``folder`` is not empty and has no versions, or those of another owner.
        RootBusy: Another process publishes to the folder.
        UnsupportedFormat: A newer version of deltacheck has written it.
        StorageFailed: The object store of ``folder`` does not answer, or has no conditional writes.
        ValueError: An option has a value that it cannot have.

    Attributes:
        folder: The folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        owner: str,
        full_every: int,
        encoding: str,
        checksum: str = XXH3,
    ) -> None:
        if not 1 <= full_every <= _LONGEST_CHAIN:
            raise ValueError(f"full_every must be from 1 to {_LONGEST_CHAIN}, not {full_every}")
        if checksum not in CHECKSUMS:
            raise ValueError(f"checksum must be one of {', '.join(CHECKSUMS)}, not {checksum!r}")
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be 'slime' or 'compact', not {encoding!r}")
        self._encoding = ENCODINGS[encoding]
        self._checksum = checksum
        self._full_every = full_every
        self.folder: Place = storage.of(folder).absolute()
        self._lease = _claim(self.folder, owner)
        try:
            self._read_folder()
        except BaseException:
            self._lease.release()
            raise

    def _read_folder(self) -> None:
        _remove_leftovers(self.folder)
        self._history = _history(self.folder)
        self._is_known = True

    def check(self) -> None:
        """Make sure of the lock, and of the content of the folder after a failed ``write``.

        Raises:
            RootBusy: The lock on the folder was lost.
        """
        self._lease.check()
        if not self._is_known:
            self._read_folder()

    def close(self) -> None:
        """Give the folder back; more than once does nothing."""
        self._lease.release()

    @property
    def newest(self) -> int:
        """The number of the newest version; 0: there is none."""
        return max(self._history, default=0)

    def read_newest(self) -> Version | None:
        """Return the newest version.

        Raises:
            Damaged: Its index is damaged.
        """
        return version_folder.read_index(self.folder, self.newest).version if self.newest else None

    @property
    def is_full_due(self) -> bool:
        """True if the next version must be a full one."""
        number = self.newest + 1
        full = max(
            (n for n, v in self._history.items() if v is not None and v.base is None), default=None
        )
        if full is None or number - full >= self._full_every:
            return True
        # A late receiver reads the full version and all deltas: then a new one is less to read.
        delta_bytes = sum(
            v.file_bytes for n, v in self._history.items() if v is not None and n > full
        )
        newest = self._history[full]
        return newest is not None and delta_bytes > newest.file_bytes

    def write(self, content: VersionContent, *, full: bool) -> Version:
        """Write the next version, and remove those that are not needed any more.

        Args:
            content: The weights.
            full: Write whole tensors, and not changes.
        """
        number = self.newest + 1
        # Until the end: if the reply to its last request is lost, the version may exist.
        self._is_known = False
        with _new_version(self.folder, number, self._lease) as path:
            base = None if full else number - 1
            writer = _Writer(path, base, self._encoding, self._checksum)
            for name, before, tensor in content.changes:
                if before is None:
                    full = True
                elif not full:
                    writer.add_change(name, before, tensor)
            tensors = content.tensors()
            if full or writer.is_too_long:
                writer.discard()
                writer = _Writer(path, None, checksum=self._checksum)
                # Wide elements come first, so that each tensor is aligned.
                for name, tensor in sorted(tensors.items(), key=_width_and_name):
                    writer.add_tensor(name, tensor)
            base = writer.base
            files_of, files = writer.finish()
            if base is None:
                files |= {
                    name: version_folder.digest((path / name).read_bytes())
                    for name in content.describe(path)
                }
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            version = Version(number, base, content.step, content.seq, size)
            ties = content.ties if base is None else {}
            index = Index(
                version, files_of, writer.checksums, files, ties, self._encoding, self._checksum
            )
            _write_file(path / INDEX, index.encoded())
        self._history[number] = version
        self._is_known = True
        self._remove_old()
        return version

    def _remove_old(self) -> None:
        """Remove the versions before the oldest full one that is kept."""
        full = sorted(n for n, v in self._history.items() if v is not None and v.base is None)
        if len(full) < _KEPT_FULL:
            return
        for number in [n for n in self._history if n < full[-_KEPT_FULL]]:
            _remove(self.folder, number)
            del self._history[number]


class _Shard(NamedTuple):
    """Tensors for one file: their bytes and how the file describes them."""

    content: dict[str, U8]
    types: dict[str, tuple[str, tuple[int, ...], int]]


class _Writer:
    """The files of weights of one version.

    Args:
        path: The folder of the version.
        base: The version that the changes are relative to; ``None``: whole tensors.
        encoding: ``XOR`` or ``WORDS``.
        checksum: One of ``CHECKSUMS``.
    """

    def __init__(
        self, path: Path, base: int | None, encoding: str = XOR, checksum: str = XXH3
    ) -> None:
        self.base = base
        self._encoding = encoding
        self._sum = CHECKSUMS[checksum]
        self._sums: dict[str, str] = {}
        self.checksums: dict[str, str] = {}
        self.is_too_long = False
        self._path = path
        self._shard = _Shard({}, {})
        self._bytes = 0
        # Files under temporary names, because a name has the number of files.
        self._files: list[tuple[Path, str, list[str]]] = []

    def add_change(self, name: str, before: U8, tensor: Tensor) -> None:
        """Add the difference of a tensor, if there is any."""
        now = tensor.data
        if np.array_equal(before, now):
            return
        if now.size > frames.MAX_FRAME_BYTES:
            self.is_too_long = True
        if self.is_too_long:
            return
        if self._encoding == WORDS:
            word_bytes = dtype_named(tensor.dtype).word_bytes
            frame = changed_words.encode(before, now, word_bytes)
        else:
            frame = np.frombuffer(frames.compress(np.bitwise_xor(before, now)), np.uint8)
        self._add(name, ("uint8", (frame.size,)), frame, now)

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor."""
        self._add(name, tensor[:2], tensor.data, tensor.data)

    def _add(
        self, name: str, dtype_and_shape: tuple[str, tuple[int, ...]], data: U8, result: U8
    ) -> None:
        """Add the content of a tensor; ``result``: its bytes after the version."""
        if self._shard.content and self._bytes + data.size > _SHARD_BYTES:
            self._flush()
        self._shard.content[name] = data
        self._shard.types[name] = (*dtype_and_shape, data.size)
        self._bytes += data.size
        self.checksums[name] = version_folder.digest(result)
        is_digest = self._sum is version_folder.digest
        self._sums[name] = self.checksums[name] if is_digest else self._sum(result)

    def _flush(self) -> None:
        # Receivers of other libraries read the sums from the file, and loaders of Hugging Face
        # "format".
        metadata = {} if self.base is not None else {"format": "pt"}
        metadata |= {name: self._sums[name] for name in self._shard.content}
        path = self._path / f"part-{len(self._files)}"
        header = safetensors_header(self._shard.types, metadata)
        with path.open("xb") as plain:
            file = DigestingFile(plain)
            file.write(header)
            for data in self._shard.content.values():
                file.write(data.data)
            plain.flush()
            os.fsync(plain.fileno())
        self._files.append((path, file.digest, list(self._shard.content)))
        self._shard, self._bytes = _Shard({}, {}), 0

    def discard(self) -> None:
        """Remove the files."""
        for path, _, _ in self._files:
            path.unlink()

    def finish(self) -> tuple[dict[str, str], dict[str, str]]:
        """Write the rest; return the file of each tensor, and the digest of each file."""
        if self._shard.content:
            self._flush()
        tensors: dict[str, str] = {}
        files: dict[str, str] = {}
        shard_names = model_export.shard_names(len(self._files))
        for (path, digest, names), file in zip(self._files, shard_names, strict=True):
            path.rename(self._path / file)
            tensors |= dict.fromkeys(names, file)
            files[file] = digest
        return tensors, files


def _width_and_name(item: tuple[str, Tensor]) -> tuple[int, str]:
    return -dtype_named(item[1].dtype).item_bytes, item[0]


def _claim(folder: Place, run: str) -> Lease:
    """Take the lock of a folder, and write its identity if it is new."""
    private = folder / PRIVATE
    if _is_inside(folder, run):
        raise NotACheckpointRoot(
            f"{folder} is inside the run {run}, which cannot hold other files; publish to another"
            " folder"
        )
    # Before anything is made in a folder that belongs to somebody else.
    if folder.is_dir() and not private.is_dir() and any(folder.iterdir()):
        raise NotACheckpointRoot(
            f"{folder} is not empty and has no published versions; name a folder that is new"
        )
    private.mkdir(parents=True, exist_ok=True)
    try:
        storage_of(private).check_writable()
        lease = storage_of(private).take_lease()
    except RootBusy as error:
        raise RootBusy(
            f"another process publishes to {folder} ({error}). End it, or publish to another folder"
        ) from None
    try:
        owner = version_folder.read_identity(folder)
        if owner is None:
            version_folder.write_identity(folder, run)
            sync_directory(folder)
        elif owner != run:
            raise NotACheckpointRoot(
                f"{folder} has the versions of {owner}, and not of {run}; publish to another folder"
            )
    except BaseException:
        lease.release()
        raise
    return lease


def _is_inside(folder: Place, run: str) -> bool:
    if isinstance(folder, Path):
        return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(run))
    return f"{folder}/".startswith(f"{run}/")


def _remove_leftovers(folder: Place) -> None:
    """Remove unfinished versions of a publisher that was killed. The lock is held."""
    # In a bucket, the next version has the number of the unfinished one, and removes it.
    for entry in (folder / PRIVATE).iterdir() if isinstance(folder, Path) else ():
        if entry.name.startswith(("new-", "removed-")):
            shutil.rmtree(entry, ignore_errors=True)


def _history(folder: Place) -> dict[int, Version | None]:
    """Return the versions by number; ``None``: its index is damaged."""
    history: dict[int, Version | None] = {}
    for number in version_folder.numbers(folder):
        try:
            history[number] = version_folder.read_index(folder, number).version
        except (Damaged, UnsupportedFormat):
            history[number] = None
    return history


@contextlib.contextmanager
def _new_version(folder: Place, number: int, lease: Lease) -> Iterator[Path]:
    """Fill a version in a temporary directory, and put it in its place when the block ends."""
    target = version_folder.version_path(folder, number)
    if isinstance(folder, Path):
        temporary = folder / PRIVATE / f"new-{secrets.token_hex(4)}"
        temporary.mkdir()
    else:
        temporary = Path(tempfile.mkdtemp(prefix="deltacheck-"))
    try:
        with named_writes(temporary):
            yield temporary
        if isinstance(target, Path):
            sync_directory(temporary)
            temporary.rename(target)
            sync_directory(target.parent)
        else:
            _upload(temporary, target, lease)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _upload(source: Path, target: Place, lease: Lease) -> None:
    """Copy a version to a bucket, its index last: with it, the version exists."""
    index = source / INDEX
    # A publisher that was cut off for long must not change files of its successor.
    lease.check()
    # What an interrupted version has left: loaders may read files that no index names.
    storage_of(target).remove_tree(ignore_errors=False)
    for file in sorted(path for path in source.rglob("*") if path.is_file() and path != index):
        lease.check()
        storage_of(target / file.relative_to(source).as_posix()).copy_from(file, Durability.POWER)
    lease.check()
    if not arrays.create_file(target, INDEX, index.read_bytes()):
        raise RootBusy(
            f"another process has written {target}. Publish from one process, or to another folder"
        )


def _remove(folder: Place, number: int) -> None:
    path = version_folder.version_path(folder, number)
    if isinstance(path, Path):
        # Renamed first, so that no reader sees a part of it.
        removed = path.parent / PRIVATE / f"removed-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    else:
        # Nobody reads what a failure leaves here.
        with contextlib.suppress(StorageFailed):
            (path / INDEX).unlink()
            path.remove_tree()


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
