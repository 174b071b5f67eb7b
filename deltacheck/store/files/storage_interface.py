"""The interface of a storage service: every operation that a root needs of the place it lies in.

A ``Storage`` is bound to one path. ``storage.storage_of(path)`` chooses the implementation by the
type of the path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import tensorstore as ts

from deltacheck.store.lock.lease import Lease
from deltacheck.store.lock.pins import Pin

# For types only: ``durability`` imports ``storage``, which imports this module.
if TYPE_CHECKING:
    from deltacheck.store.files.chunk_files import ArrayFile
    from deltacheck.store.files.durability import Durability

PathT = TypeVar("PathT")


class Storage(ABC, Generic[PathT]):
    """A path and the operations of the service that stores it.

    To add an object store, register its bucket in ``object_path.SERVICES``. To add any other
    service, write one module with a subclass and a path type, and register it in ``storage.py``.

    Attributes:
        has_files: Paths are files of this machine: native code may open them, and readers can lock
            them.
        listing_is_current: A listing shows everything that was written before it. If not, nothing
            is concluded from a name that one listing lacks.
    """

    # ``storage_of`` makes one for every operation, so it holds nothing but its path.
    __slots__ = ("path",)
    has_files: ClassVar[bool]
    listing_is_current: ClassVar[bool]

    def __init__(self, path: PathT) -> None:
        self.path = path

    # Access through TensorStore.

    @abstractmethod
    def kvstore(self) -> dict[str, Any]:
        """Return TensorStore's description of the keys below the path."""

    @abstractmethod
    def context(self) -> ts.Context | None:
        """Return TensorStore's resources for the service; ``None``: the defaults."""

    def stored(self, commit: Any) -> Any:
        """Return the future of the files of an array at the path.

        Args:
            commit: The future of TensorStore's write of the array to ``kvstore``.
        """
        return commit

    @abstractmethod
    def patience(self, size: int) -> float | None:
        """Return the longest wait for a read of ``size`` bytes, in seconds; ``None``: no limit."""

    @abstractmethod
    def start_write_new(self, name: str, content: bytes, context: ts.Context) -> Any:
        """Begin to write a file below the path that no other writer names; return the future."""

    # Files.

    @abstractmethod
    def create_file(
        self, name: str, content: bytes, durability: Durability, timeout: float | None
    ) -> bool:
        """Create a file below the path in one atomic step; return ``False`` if it exists."""

    @abstractmethod
    def replace_file(self, name: str, content: bytes, durability: Durability) -> None:
        """Write a file below the path in one atomic step, over an existing one too."""

    @abstractmethod
    def read_file(self, most_bytes: int, expected_bytes: int = 0) -> bytes:
        """Return the content of a regular file; ``Damaged`` if it is larger or not regular.

        Args:
            most_bytes: The most that it may have.
            expected_bytes: As many may be expected; an object store has more time for them.
        """

    @abstractmethod
    def start_read(
        self, most_bytes: int, version: object = None
    ) -> Callable[[], tuple[bytes | None, object]]:
        """Begin to read a document of which ``version`` may be known.

        Returns:
            A function that waits and returns the content, ``None`` if the version is still the
            known one, and the present version. It raises what ``read_file`` raises.
        """

    @abstractmethod
    def copy_from(self, source: Path, durability: Durability) -> int:
        """Copy a local file to the path, which must not exist; return its bytes."""

    @abstractmethod
    def size(self) -> int:
        """Return the bytes of a file."""

    @abstractmethod
    def name_exists(self) -> bool:
        """Return whether anything has this name, a dangling link included."""

    @abstractmethod
    def full_name(self) -> str:
        """Return the address of an object, or the absolute path of a file."""

    # Directories.

    @abstractmethod
    def missing_directory(self) -> str:
        """Return the reason why the path cannot be a root; empty if it may be one."""

    @abstractmethod
    def subdirectories(self) -> list[PathT]:
        """Return the directories in the path (no links), ascending by name."""

    @abstractmethod
    def directory_names(self) -> list[str]:
        """Return the names of the directories in the path, and of links, ascending."""

    @abstractmethod
    def manifests(self, known: Iterable[PathT]) -> list[PathT]:
        """Return the documents of the checkpoint directories below the path.

        Args:
            known: Documents that were found before. A service whose listing lags adds them.
        """

    @abstractmethod
    def check_directory(self) -> None:
        """Raise ``Damaged`` if the path is a link or a file. A missing path passes."""

    @abstractmethod
    def start_array_file(
        self, name: str, make: Callable[[int], None], durability: Durability
    ) -> Any:
        """Begin to write a file of an array, which no other writer names, below the path.

        Args:
            name: The file's name.
            make: Called with the descriptor of an empty file, into which it writes the content.
            durability: Whether the file is synced.

        Returns:
            The future of the write; ``None`` if the storage has the file already.
        """

    @abstractmethod
    def start_document(self, name: str, content: bytes, durability: Durability) -> Any:
        """Begin to write a file below the path in one atomic step, which no other writer names.

        Args:
            name: The file's name.
            content: Its content.
            durability: Whether the file is synced. Its name is not.

        Returns:
            The future of the write; ``None`` if the storage has the file already.
        """

    @abstractmethod
    def open_array_files(self, files: Sequence[ArrayFile]) -> Iterator[int]:
        """Open files of arrays below the path for the native reader.

        A service without files gives anonymous ones, which have at least the wanted chunks, at
        their places, and the index.

        Yields:
            A descriptor of each file in order, for the caller to close.

        Raises:
            ChainBroken: A file is missing.
            Damaged: A directory or a file is a link or something else, or a file is too large.
        """

    @abstractmethod
    def remove_tree(self, ignore_errors: bool) -> None:
        """Remove a directory and all below it, or as much of it as possible."""

    @abstractmethod
    def remove_tree_with_others(self) -> None:
        """Remove a directory that other processes may be removing at the same moment."""

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Remove the files in a directory whose atomic creation was cut short."""

    @abstractmethod
    def bytes_below(self) -> int | None:
        """Return the bytes of all files below the path; ``None`` if a listing has no sizes."""

    @abstractmethod
    def bytes_written(self) -> int:
        """Return the bytes of a segment that this process has just written at the path."""

    @abstractmethod
    def exclude_from_written(self, size: int) -> None:
        """Leave ``size`` bytes, just written, out of the next ``bytes_written``."""

    # Durability. An object store has nothing to sync.

    @abstractmethod
    def sync_directory(self) -> None:
        """Make the names in the directory survive a power cut."""

    @abstractmethod
    def directories_below(self) -> Iterable[PathT]:
        """Return the directories of the tree, and the parent, whose names must be synced."""

    @abstractmethod
    def directories_above(self) -> Iterable[PathT]:
        """Return the directories above the path whose names must be synced for it to survive."""

    # Exclusion of other writers.

    @abstractmethod
    def is_fresh_root(self) -> bool:
        """Return whether the path holds at most the beginnings of a new root."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise an error if this process cannot write a root here safely, which need not exist."""

    @abstractmethod
    def take_lease(self) -> Lease:
        """Take the right to write to the root; ``RootBusy`` if another writer has it."""

    @abstractmethod
    def lease_seconds_left(self) -> float | None:
        """Return how long this process's lease of the root holds; ``None``: until it is released.

        Raises:
            RootBusy: The lease was lost.
        """

    @abstractmethod
    def lock(self, conflict: str) -> AbstractContextManager[None]:
        """Hold a short exclusive lock on an existing file.

        Args:
            conflict: What another holder has been doing, for the error.

        Raises:
            RootBusy: Another process holds the lock for longer than a few seconds.
            OSError: The lock cannot be had. ``StorageFailed``: the file system has none.
        """

    @abstractmethod
    def pin(self) -> Pin | None:
        """Keep a file from being removed while the pin lives; ``None`` if that is impossible."""

    @abstractmethod
    def unlink_unless_pinned(self) -> bool:
        """Remove a file; return ``False`` if a reader has pinned it."""
