"""Limits of what a call may take, and the default that follows from the files of a root.

A manifest of a few kilobytes can name petabytes. Whoever reads a root compares what its documents
name with a limit before anything is allocated. The limits of the present call are ambient, so that
every function below it keeps them: ``applied`` sets them, ``check_bytes``, ``check_tables`` and
``check_time`` compare.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltacheck.errors import BudgetExceeded

_SEGMENTS = "segments"  # permanent: the folder of a root's segments

# The default limit. Chunks of one value, the most regular content, shrink to a 12,000th, those of
# 16-byte elements to a 23,000th; this leaves a margin of 11, so that only a forged root reaches it.
_BYTES_PER_FILE_BYTE = 1 << 18
_TABLE_BYTES_PER_FILE_BYTE = 1 << 6
_SMALL_BYTES = 256 << 20  # never refused by default
_SMALL_TABLES_BYTES = 64 << 20  # never refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one call may take. ``BudgetExceeded`` names the limit that a call reaches.

    Args:
        max_bytes: Decoded bytes of the leaves that the call returns, writes, compares or checks.
            Larger: larger steps pass; smaller: a forged root can take less memory, disk and time.
            ``None``: 256 MiB, or 16,384 times what the files or objects of the segments hold if
            that is more, which no root that this package wrote reaches.
        max_chunks: Chunks of these leaves, each of which takes about 100 bytes. ``None``: as many
            as 64 MiB of tables hold, or 64 times what the files hold.
        max_seconds: Wall time of the call, looked at between two reads. ``None``: no limit.
    """

    max_bytes: int | None = None
    max_chunks: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_chunks", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be at least 0, not {value}")


@dataclass(frozen=True, slots=True)
class _Current:
    limits: Limits = Limits()
    deadline: float | None = None


_DEFAULT = _Current()
_current: ContextVar[_Current] = ContextVar("deltacheck-limits", default=_DEFAULT)


@contextlib.contextmanager
def applied(limits: Limits | None) -> Iterator[None]:
    """Apply limits to the calls in this block; ``None`` leaves those outside of it."""
    if limits is None:
        yield
        return
    seconds = limits.max_seconds
    deadline = None if seconds is None else time.monotonic() + seconds
    token = _current.set(_Current(limits, deadline))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Limits:
    """Return the limits of the present call."""
    return _current.get().limits


def check_time() -> None:
    """Raise ``BudgetExceeded`` if the time of the present call is over."""
    current = _current.get()
    if current.deadline is not None and time.monotonic() > current.deadline:
        raise BudgetExceeded(
            f"the call took longer than max_seconds={current.limits.max_seconds:g}; allow more, or"
            " name fewer leaves"
        )


def check_bytes(place: object, segments: Iterable[str], size: int, subject: str) -> None:
    """Raise ``BudgetExceeded`` if leaves decode to more bytes than the present call may take.

    Args:
        place: The store of the segments: a directory, or a prefix of an object store.
        segments: The names of the segments that hold the leaves.
        size: The decoded bytes of all leaves.
        subject: The step, the leaf or the root, for the message.
    """
    check_time()
    limit = _current.get().limits.max_bytes
    if limit is None:
        limit = _default(place, segments, size, _SMALL_BYTES, _BYTES_PER_FILE_BYTE)
        origin = "the default for files of this size; a forged document is likely."
    else:
        origin = "max_bytes."
    if size > limit:
        raise BudgetExceeded(
            f"{subject} decodes to {size} bytes, more than {limit}, {origin} To read it all the"
            " same, name fewer leaves or raise max_bytes (--max-bytes)"
        )


def check_files(subject: str, size: int, stored_bytes: int) -> None:
    """Raise ``BudgetExceeded`` if files of whole tensors have more bytes than a call may take.

    Args:
        subject: The files, for the message.
        size: Their bytes.
        stored_bytes: The bytes that they occupy on disk. Weights leave no holes in a file, so that
            only a forged file has far more bytes than it occupies.
    """
    check_time()
    limit = _current.get().limits.max_bytes
    origin = "max_bytes"
    if limit is None:
        limit = max(_SMALL_BYTES, stored_bytes * _TABLE_BYTES_PER_FILE_BYTE)
        origin = f"the default for the {stored_bytes} bytes that they occupy"
    if size > limit:
        raise BudgetExceeded(
            f"{subject} have {size} bytes, more than {limit}, {origin}. To read them all the same,"
            " give limits=Limits(max_bytes=...)"
        )


def check_tables(
    place: object, segments: Iterable[str], chunks: int, table_bytes: int, subject: str
) -> None:
    """Raise ``BudgetExceeded`` if the tables of chunks take more than the present call may take.

    Args:
        place: The store of the segments: a directory, or a prefix of an object store.
        segments: The names of the segments that hold the chunks.
        chunks: The number of chunks.
        table_bytes: The memory of their digests and indexes.
        subject: The step, the leaf or the root, for the message.
    """
    check_time()
    limit = _current.get().limits.max_chunks
    if limit is not None:
        if chunks > limit:
            raise BudgetExceeded(f"{subject} has {chunks} chunks, more than max_chunks={limit}")
        return
    default = _default(
        place, segments, table_bytes, _SMALL_TABLES_BYTES, _TABLE_BYTES_PER_FILE_BYTE
    )
    if table_bytes > default:
        raise BudgetExceeded(
            f"{subject}: the digests and indexes of {chunks} chunks would take {table_bytes} bytes,"
            f" more than {default}, the default for files of this size; a forged document is"
            " likely. To read it all the same, raise max_chunks of Limits"
        )


def _default(place: object, segments: Iterable[str], size: int, small: int, ratio: int) -> int:
    """Return the default limit, or ``size`` as soon as it is known to be below."""
    if size <= small:
        return size
    stored_bytes = 0
    for name in dict.fromkeys(segments):
        sizes = (
            _file_sizes(place / _SEGMENTS / name)
            if isinstance(place, Path)
            else _object_sizes(place / _SEGMENTS / name)  # type: ignore[operator] # of the store
        )
        for count in sizes:
            stored_bytes += count
            # A large step is known to be real after a few files.
            if stored_bytes * ratio >= size:
                return size
    return max(small, stored_bytes * ratio)


def _file_sizes(folder: Path) -> Iterator[int]:
    for directory, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                yield os.lstat(Path(directory, file)).st_size


class _Prefix(Protocol):
    """The part of ``ObjectPath`` that is used here; the store is above this module."""

    key: str

    def __truediv__(self, name: str) -> _Prefix: ...
    def keys(self) -> list[str]: ...
    def read_bytes(self) -> bytes: ...


def _object_sizes(folder: _Prefix) -> Iterator[int]:
    """Yield the sizes of objects, those of data first.

    Listings have no sizes, so the objects are read: of a real step one or two, because each proves
    thousands of times its size.
    """
    begin = len(folder.key) + 1
    keys = folder.keys()
    names = [key[begin:] for key in keys]
    for name in sorted(names, key=lambda name: not name.rpartition("/")[2].startswith("c.")):
        check_time()
        with contextlib.suppress(FileNotFoundError):
            yield len((folder / name).read_bytes())
