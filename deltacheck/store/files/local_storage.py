"""The local file system as a storage service: files, directories, syncs and the kernel's locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import tensorstore as ts

from deltacheck.errors import Damaged, RootBusy, StorageFailed
from deltacheck.leaf.external_errors import remedy, unreadable, walk
from deltacheck.store import layout
from deltacheck.store.files import chunk_files
from deltacheck.store.files.background import wait_for
from deltacheck.store.files.object_client import ABSENT
from deltacheck.store.files.storage_interface import Storage
from deltacheck.store.lock import pins
from deltacheck.store.lock.capabilities import lacking
from deltacheck.store.lock.lease import Lease, LocalLease
from deltacheck.store.lock.pins import Pin

if TYPE_CHECKING:
    from deltacheck.store.files.chunk_files import ArrayFile
    from deltacheck.store.files.durability import Durability

UNFINISHED = ".__lock"  # TensorStore appends it to a file's name until the file is whole
_LOCK_SECONDS = 10.0  # a holder works for milliseconds; after this time it counts as stopped
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# O_EXCL: a segment's files are written once, and a file of this name is another writer's.
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_COPY_BYTES = 8 << 20  # of one piece of a copied file


@contextlib.contextmanager
def opened_file(path: Path, most_bytes: int) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file of somebody else: regular, no link, and of a size that is looked at first.

    Yields:
        The file and its bytes.

    Raises:
        FileNotFoundError: There is no such file.
        Damaged: It is a link, a pipe, a device or a directory, has more than ``most_bytes`` bytes,
            or cannot be read.
    """
    try:
        with open(os.open(path, _READ_FLAGS), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(f"{path} is not a regular file", file=path)
            if status.st_size > most_bytes:
                raise Damaged(
                    f"{path} has {status.st_size} bytes, more than the {most_bytes} that it may"
                    " have",
                    file=path,
                )
            yield file, status.st_size
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


class LocalStorage(Storage[Path]):
    """A path of the local file system."""

    __slots__ = ()
    has_files = True
    listing_is_current = True

    def kvstore(self) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.path}/"}

    def context(self) -> ts.Context | None:
        return None

    def patience(self, size: int) -> float | None:
        # Reads of files are not to be interrupted.
        return None

    def start_write_new(self, name: str, content: bytes, context: ts.Context) -> Any:
        return self._open(context).write(name, content, if_equal=ABSENT)

    def create_file(
        self, name: str, content: bytes, durability: Durability, timeout: float | None
    ) -> bool:
        self._check_unfinished(name)
        with self._writing(name):
            pending = self.start_write_new(name, content, _context(durability.syncs))
            return bool(wait_for(pending, self.path / name).generation)

    def replace_file(self, name: str, content: bytes, durability: Durability) -> None:
        self._check_unfinished(name)
        with self._writing(name):
            pending = self._open(_context(durability.syncs)).write(name, content)
            wait_for(pending, self.path / name)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        # TensorStore's errors for every request that fails, whatever the reason.
        except (ValueError, NotImplementedError) as error:
            file = self.path / name
            raise lacking(file, error) or StorageFailed(
                f"{file} could not be written: {error}{remedy(error)}"
            ) from error

    def _check_unfinished(self, name: str) -> None:
        """Raise ``Damaged`` if the file that TensorStore writes to first is a link: it follows."""
        unfinished = self.path / f"{name}{UNFINISHED}"
        if unfinished.is_symlink():
            raise Damaged(f"{unfinished} is a link; remove it", file=unfinished)

    def _open(self, context: ts.Context) -> ts.KvStore:
        return ts.KvStore.open(self.kvstore(), context=context).result()

    def read_file(self, most_bytes: int, expected_bytes: int = 0) -> bytes:
        with opened_file(self.path, most_bytes) as (file, size):
            return file.read(size + 1)

    def start_read(
        self, most_bytes: int, version: object = None
    ) -> Callable[[], tuple[bytes | None, object]]:
        return partial(self._read_changed, most_bytes, version)

    def _read_changed(self, most_bytes: int, version: object) -> tuple[bytes | None, object]:
        if version is not None:
            # The file itself: a link that leads nowhere is damage, and not a deleted step.
            try:
                current = _version(os.lstat(self.path))
            except PermissionError as error:
                raise Damaged(f"{self.path} cannot be read: {error}", file=self.path) from error
            if current == version:
                return None, current
        with opened_file(self.path, most_bytes) as (file, size):
            return file.read(size + 1), _version(os.fstat(file.fileno()))

    def copy_from(self, source: Path, durability: Durability) -> int:
        size = 0
        with source.open("rb") as file, self.path.open("xb", buffering=0) as copy:
            while piece := file.read(_COPY_BYTES):
                rest = memoryview(piece)
                while rest:
                    rest = rest[copy.write(rest) or 0 :]
                size += len(piece)
            durability.sync_file(copy.fileno())
        return size

    def size(self) -> int:
        return self.path.stat().st_size

    def name_exists(self) -> bool:
        try:
            os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise unreadable(self.path, error) from error
        return True

    def full_name(self) -> str:
        return os.path.abspath(self.path)

    def missing_directory(self) -> str:
        try:
            is_directory = self.path.is_dir()
        except OSError as error:
            return f"cannot be read: {error}"
        if is_directory:
            return ""
        return "is not a directory" if self.path.exists() else "does not exist"

    def subdirectories(self) -> list[Path]:
        entries = list_directory(self.path)
        return [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]

    def directory_names(self) -> list[str]:
        entries = list_directory(self.path)
        return [e.name for e in entries if e.is_dir(follow_symlinks=False) or e.is_symlink()]

    def manifests(self, known: Iterable[Path]) -> list[Path]:
        manifests = []
        for entry in list_directory(self.path):
            if not layout.is_checkpoint_id(entry.name):
                continue
            path = self.path.joinpath(entry.name, "zarr.json")
            # A link or a file in a checkpoint's place is damage: its step must be reported, and not
            # be missing silently.
            if not entry.is_dir(follow_symlinks=False) or may_exist(path):
                manifests.append(path)
        return manifests

    def check_directory(self) -> None:
        chunk_files.check_directory(self.path)

    def start_array_file(
        self, name: str, make: Callable[[int], None], durability: Durability
    ) -> None:
        # Not by TensorStore, which would copy a file of 32 MiB while it holds the GIL.
        path = f"{self.path}/{name}"
        try:
            descriptor = os.open(path, _NEW_FLAGS, 0o666)
        except FileNotFoundError:
            # Another thread may be making the same directory.
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, _NEW_FLAGS, 0o666)
        try:
            make(descriptor)
            durability.sync_file(descriptor)
        finally:
            os.close(descriptor)

    def start_document(self, name: str, content: bytes, durability: Durability) -> None:
        def make(descriptor: int) -> None:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]

        unfinished, path = f"{name}{UNFINISHED}", f"{self.path}/{name}"
        self.start_array_file(unfinished, make, durability)
        # A rename would replace a file of another writer.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        os.rename(f"{self.path}/{unfinished}", path)

    def open_array_files(self, files: Sequence[ArrayFile]) -> Iterator[int]:
        for directory in dict.fromkeys(file.path for file in files):
            chunk_files.check_directory(directory)
        for path, name, _, _, cells in files:
            try:
                yield chunk_files.open_file(f"{path}/{name}", cells)
            except FileNotFoundError:
                raise chunk_files.missing(path, name) from None

    def remove_tree(self, ignore_errors: bool) -> None:
        shutil.rmtree(self.path, ignore_errors=ignore_errors)

    def remove_tree_with_others(self) -> None:
        while self.path.exists():
            # Another process was faster with some file; each attempt finds fewer.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.path)

    def remove_unfinished(self) -> None:
        # A complete document of the same name may be there, too.
        for path in self.path.glob(f"*{UNFINISHED}"):
            path.unlink(missing_ok=True)

    def bytes_below(self) -> int | None:
        try:
            return _bytes_below(str(self.path))
        except (FileNotFoundError, NotADirectoryError):
            if self.path.is_dir():
                raise  # a file was removed meanwhile
            return 0

    def bytes_written(self) -> int:
        return self.bytes_below() or 0

    def exclude_from_written(self, size: int) -> None:
        pass

    def sync_directory(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            missing = lacking(self.path, error, "fsync")
            if missing is None:
                raise
            raise missing from error
        finally:
            os.close(descriptor)

    def directories_below(self) -> Iterator[Path]:
        for directory, _, _ in walk(self.path):
            yield Path(directory)
        yield self.path.parent

    def directories_above(self) -> Iterator[Path]:
        device = os.stat(self.path).st_dev
        for directory in self.path.absolute().parents:
            if os.stat(directory).st_dev != device:
                return
            yield directory

    def is_fresh_root(self) -> bool:
        for entry in self.path.iterdir():
            if entry.name in (layout.SEGMENTS, layout.CHECKPOINTS):
                if (
                    entry.is_symlink()
                    or not entry.is_dir()
                    or any(not _is_empty_group(inner) for inner in entry.iterdir())
                ):
                    return False
            elif entry.name not in (
                layout.CONTROL,
                layout.COMMIT_MARK,
            ) and not _is_empty_group(entry):
                return False
        return True

    def check_writable(self) -> None:
        segments = self.path / layout.SEGMENTS
        if segments.exists() and not os.access(segments, os.W_OK):
            raise PermissionError(errno.EACCES, "the root is not writable", str(self.path))

    def take_lease(self) -> Lease:
        folder = self.path / layout.CONTROL
        chunk_files.check_directory(folder)
        folder.mkdir(exist_ok=True)
        return LocalLease(self.path)

    def lease_seconds_left(self) -> float | None:
        # The kernel's lock lasts as long as its holder.
        return None

    @contextlib.contextmanager
    def lock(self, conflict: str) -> Iterator[None]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (PermissionError, IsADirectoryError) as error:
            raise Damaged(f"{self.path} cannot be read: {error}", file=self.path) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise Damaged(f"{self.path} is a link; remove it", file=self.path) from error
        try:
            _wait_for_lock(descriptor, self.path, conflict)
            yield
        finally:
            with contextlib.suppress(OSError):
                # Closing is not enough: a child forked meanwhile has the file open too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def pin(self) -> Pin | None:
        return Pin(self.path)

    def unlink_unless_pinned(self) -> bool:
        return pins.unlink_unless_pinned(self.path)


def _version(status: os.stat_result) -> tuple[int, int, int]:
    # The time alone would not do: clocks are set back, and numbers of deleted steps come again.
    return status.st_mtime_ns, status.st_ino, status.st_size


def _bytes_below(folder: str) -> int:
    # Not through Path: a writer looks at hundreds of files at each commit.
    size = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                size += _bytes_below(entry.path)
            elif entry.is_file(follow_symlinks=False):
                size += entry.stat(follow_symlinks=False).st_size
    return size


def _wait_for_lock(descriptor: int, path: Path, conflict: str) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RootBusy(
                    f"another process has been {conflict} for {_LOCK_SECONDS:.0f} s; wait for it,"
                    " or end it if it was stopped"
                ) from None
            time.sleep(0.005)
        except OSError as error:
            missing = lacking(path, error, "lock")
            if missing is None:
                raise
            raise missing from error
        else:
            return


def list_directory(path: Path) -> list[os.DirEntry[str]]:
    """Return all entries of a directory, ascending by name; none if it does not exist.

    Raises:
        Damaged: It may not be listed: what it holds is unknown, and must not count as absent.
    """
    try:
        with os.scandir(str(path)) as entries:
            return sorted(entries, key=attrgetter("name"))
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise Damaged(f"{path} cannot be listed: {error}", file=path) from error


def may_exist(path: Path) -> bool:
    """Return whether a name exists, a dangling link included, or cannot be looked at.

    A reader that is told to read it then reports why it cannot.
    """
    try:
        return LocalStorage(path).name_exists()
    except Damaged:
        return True


@cache
def _context(syncs: bool) -> ts.Context:
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": syncs})


def _is_empty_group(path: Path) -> bool:
    """Return whether a file is a group's ``zarr.json`` without attributes, perhaps unfinished."""
    if path.name == f"zarr.json{UNFINISHED}":
        return True
    try:
        return path.name == "zarr.json" and LocalStorage(path).read_file(4096) in (
            layout.group_json({}),
            b"",
        )
    except (OSError, Damaged):
        return False
