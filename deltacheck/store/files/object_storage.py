"""An object store as a storage service: conditional writes, a renewed lease, listings that lag."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorstore as ts

from deltacheck.errors import Damaged, StorageFailed
from deltacheck.store import layout
from deltacheck.store.files import chunk_files
from deltacheck.store.files.chunk_files import ArrayFile, Extent
from deltacheck.store.files.object_client import ABSENT, written
from deltacheck.store.files.object_path import ObjectPath, existing
from deltacheck.store.files.storage_interface import Storage
from deltacheck.store.lock import object_lease
from deltacheck.store.lock.lease import Lease
from deltacheck.store.lock.object_lease import ObjectLease
from deltacheck.store.lock.pins import Pin

if TYPE_CHECKING:
    from deltacheck.store.files.durability import Durability

# Sequence numbers beyond the newest known one that are asked for by name. Larger: a later save is
# found after more failed ones in a row; smaller: fewer requests for each listing.
AHEAD = 8
# A larger part of a shard is not worth the request for its index.
_LARGEST_PART = 0.5


class ObjectStorage(Storage[ObjectPath]):
    """A prefix of an object store."""

    __slots__ = ()
    has_files = False
    listing_is_current = False

    def kvstore(self) -> dict[str, Any]:
        return self.path.spec

    def context(self) -> ts.Context | None:
        return self.path.context

    def stored(self, commit: Any) -> Any:
        return self.path.stored(commit)

    def patience(self, size: int) -> float | None:
        return self.path.patience(size)

    def start_write_new(self, name: str, content: bytes, context: ts.Context) -> Any:
        # Not under a condition: after a lost reply, the same request sent again would find the
        # object there. No other writer has the name.
        return (self.path / name).start_write(content)

    def create_file(
        self, name: str, content: bytes, durability: Durability, timeout: float | None
    ) -> bool:
        return (self.path / name).create(content, timeout)

    def replace_file(self, name: str, content: bytes, durability: Durability) -> None:
        (self.path / name).write_bytes(content)

    def read_file(self, most_bytes: int, expected_bytes: int = 0) -> bytes:
        content = self.path.read_bytes(expected_bytes)
        if len(content) > most_bytes:
            raise Damaged(
                f"{self.path} has {len(content)} bytes, more than the {most_bytes} that it may have"
            )
        return content

    def start_read(
        self, most_bytes: int, version: object = None
    ) -> Callable[[], tuple[bytes | None, object]]:
        path = self.path
        generation = version if isinstance(version, bytes) else b""
        pending = path.start_read(generation)

        def finish() -> tuple[bytes | None, object]:
            content, current = path.finish_read(pending)
            if content is None and not generation:
                content, current = path.read()
            if current == ABSENT:
                raise FileNotFoundError(f"{path} does not exist")
            return content, current

        return finish

    def copy_from(self, source: Path, durability: Durability) -> int:
        return self.path.write_bytes(source.read_bytes())

    def size(self) -> int:
        return len(self.path.read_bytes())

    def name_exists(self) -> bool:
        return self.path.is_file()

    def full_name(self) -> str:
        return str(self.path)

    def missing_directory(self) -> str:
        return ""

    def subdirectories(self) -> list[ObjectPath]:
        return list(self.path.iterdir())

    def directory_names(self) -> list[str]:
        return [path.name for path in self.subdirectories()]

    def manifests(self, known: Iterable[ObjectPath]) -> list[ObjectPath]:
        # A listing may lag behind what is stored. A manifest's name is its sequence number, so the
        # next numbers are asked for by name. A store whose listing is current has none of them.
        folder = self.path
        prefix_length = len(folder.key) + 1
        keys = folder.keys()
        names = [key[prefix_length:].split("/") for key in keys]
        manifests = {
            folder / name[0] / "zarr.json"
            for name in names
            if name[1:] == ["zarr.json"] and layout.is_checkpoint_id(name[0])
        }
        manifests.update(known)
        while True:
            newest = max((layout.seq_of(path.parent.name) for path in manifests), default=-1)
            next_manifests = existing(
                folder / layout.checkpoint_id(seq) / "zarr.json"
                for seq in range(newest + 1, newest + 1 + AHEAD)
            )
            if not next_manifests:
                return sorted(manifests)
            manifests.update(next_manifests)

    def check_directory(self) -> None:
        pass

    def start_array_file(
        self, name: str, make: Callable[[int], None], durability: Durability
    ) -> Any:
        descriptor = _anonymous_file()
        try:
            make(descriptor)
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        finally:
            os.close(descriptor)
        return (self.path / name).start_write(content)

    def start_document(self, name: str, content: bytes, durability: Durability) -> Any:
        return (self.path / name).start_write(content)

    def open_array_files(self, files: Sequence[ArrayFile]) -> Iterator[int]:
        # All requests are under way before the first is waited for.
        fetches = [_Fetch(file) for file in files]
        for fetch in fetches:
            fetch.ask_for_chunks()
        for fetch in fetches:
            yield fetch.descriptor()

    def remove_tree(self, ignore_errors: bool) -> None:
        with contextlib.suppress(*([OSError] if ignore_errors else [])):
            self.path.remove_tree()

    def remove_tree_with_others(self) -> None:
        # Once: a listing that lags would go on showing what is deleted.
        self.path.remove_tree()

    def remove_unfinished(self) -> None:
        pass

    def bytes_below(self) -> int | None:
        return None

    def bytes_written(self) -> int:
        return written.take()

    def exclude_from_written(self, size: int) -> None:
        written.exclude(size)

    def sync_directory(self) -> None:
        pass

    def directories_below(self) -> Iterable[ObjectPath]:
        return ()

    def directories_above(self) -> Iterable[ObjectPath]:
        return ()

    def is_fresh_root(self) -> bool:
        path = self.path
        groups = {
            f"{path.key}/{name}/zarr.json".lstrip("/")
            for name in (layout.SEGMENTS, layout.CHECKPOINTS)
        }
        control = f"{path.key}/{layout.CONTROL}/".lstrip("/")
        keys = path.keys()
        return all(key in groups or key.startswith(control) for key in keys)

    def check_writable(self) -> None:
        check_conditional_writes(self.path / layout.CONTROL)
        written.take()

    def take_lease(self) -> Lease:
        return ObjectLease(self.path)

    def lease_seconds_left(self) -> float | None:
        return object_lease.seconds_left(self.path)

    def lock(self, conflict: str) -> AbstractContextManager[None]:
        # An object store has no locks: a process that tags a step beside a writer whose retention
        # may delete it looks again afterwards.
        return contextlib.nullcontext()

    def pin(self) -> Pin | None:
        return None

    def unlink_unless_pinned(self) -> bool:
        self.path.unlink(missing_ok=True)
        return True


def check_conditional_writes(folder: ObjectPath) -> None:
    """Make sure that the store honours conditional writes: one writer depends on them.

    An object is written, swapped and deleted again.

    Raises:
        StorageFailed: The store ignores a condition, or refuses requests that have one.
    """
    probe = folder / f"probe-{secrets.token_hex(8)}"
    contents = [secrets.token_bytes(8) for _ in range(4)]
    try:
        first = probe.swap(contents[0], ABSENT)
        is_refused = probe.swap(contents[1], ABSENT) is None
        second = None if first is None else probe.swap(contents[2], first)
        is_refused = is_refused and first is not None and probe.swap(contents[3], first) is None
    except StorageFailed as error:
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        raise _unconditional(folder, "has no conditional writes", error) from error
    finally:
        with contextlib.suppress(StorageFailed):
            probe.unlink()
    if not (first is not None and second is not None and is_refused):
        raise _unconditional(folder, "does not honour conditional writes")


def _unconditional(folder: ObjectPath, fault: str, error: Exception | None = None) -> StorageFailed:
    detail = "" if error is None else f" ({error})"
    return StorageFailed(
        f"{folder}: the store {fault} (PUT with If-None-Match and If-Match), without which two"
        f" writers could commit the same step{detail}. No root was made or changed. Requests have"
        " conditions (use_conditional_write of TensorStore's s3 driver is set): turn them on in the"
        " store, use a version of it that has them, or use another store; see"
        " docs/how-to/object-stores.md"
    )


class _Fetch:
    """A file of an array, or the wanted part of it, on its way to an anonymous file.

    Of a shard, a small part is asked for by range, once the index that ends the shard is there.
    """

    def __init__(self, file: ArrayFile) -> None:
        self._file = file
        self._object = file.path / file.name
        cells = file.cells
        wanted_bytes = file.end - file.begin
        self._is_part = (
            cells.sharded and wanted_bytes < _LARGEST_PART * cells.chunks * cells.chunk_bytes
        )
        self._reading = self._object.start_read(
            byte_range=slice(-cells.index_bytes, None) if self._is_part else None
        )
        self._index = b""
        self._extent = Extent(0, 0, 0)
        self._is_empty = False

    def ask_for_chunks(self) -> None:
        """Wait for the index of a part, and ask for its chunks."""
        if self._is_part:
            self._index = self._content()
            self._extent = chunk_files.extent(self._index, self._file)
            begin, end, _ = self._extent
            self._is_empty = begin == end
            if not self._is_empty:
                self._reading = self._object.start_read(byte_range=slice(begin, end))

    def descriptor(self) -> int:
        """Wait for the content, and return a descriptor of an anonymous file that has it."""
        content = b"" if self._is_empty else self._content()
        descriptor = _anonymous_file()
        try:
            _write_at(descriptor, content, self._extent.begin)
            _write_at(descriptor, self._index, self._extent.index_begin)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _content(self) -> bytes:
        cells = self._file.cells
        content: bytes | None
        try:
            content, generation = self._object.finish_read(self._reading, cells.most_bytes)
        except StorageFailed as error:
            if "OUT_OF_RANGE" not in str(error.__cause__):
                raise
            raise Damaged(f"{self._object} lacks bytes of its chunks: {error.__cause__}") from error
        if generation == ABSENT:
            raise chunk_files.missing(self._file.path, self._file.name)
        assert content is not None
        chunk_files.check_size(self._object, len(content), cells)
        return content


def _anonymous_file() -> int:
    """Return a descriptor of a file in memory that has no name, or in the temporary directory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("deltacheck")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_at(descriptor: int, content: bytes, offset: int) -> None:
    rest = memoryview(content)
    while rest:
        size = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[size:], offset + size
