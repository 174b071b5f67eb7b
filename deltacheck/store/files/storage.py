"""The registry of storage services: a root is a local directory or a prefix of an object store.

To add a service, write a module with an implementation of ``storage_interface.Storage`` and add it
to ``_SERVICES`` (and its path type, if it has one of its own, to ``Place``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeAlias

import tensorstore as ts

from deltacheck.errors import StorageFailed
from deltacheck.store.files import object_path
from deltacheck.store.files.local_storage import LocalStorage
from deltacheck.store.files.object_path import SERVICES, ObjectPath, ObjectStore
from deltacheck.store.files.object_storage import ObjectStorage
from deltacheck.store.files.storage_interface import Storage
from deltacheck.store.lock.lease import Lease

Place: TypeAlias = Path | ObjectPath

_SERVICES: tuple[tuple[type, type[Storage[Any]]], ...] = (
    (Path, LocalStorage),
    (ObjectPath, ObjectStorage),
)
# ``os.path.abspath`` puts the working directory before an address.
_LOST_SLASH = re.compile(r"(?:^|/)([A-Za-z][A-Za-z0-9+.-]+):(?:/|\Z)")
# Without DOTALL, a name would be cut off at a line feed.
_ADDRESS = re.compile(r"(\w[\w+.-]*)://(.*)", re.DOTALL)


def storage_of(path: Place) -> Storage[Any]:
    """Return the storage operations of a path."""
    for path_type, storage in _SERVICES:
        if isinstance(path, path_type):
            return storage(path)
    raise TypeError(f"a root is a local path or a prefix of an object store, not {path!r}")


def of(where: str | os.PathLike[str] | ObjectPath, store: ObjectStore | None = None) -> Place:
    """Return the path that an address names.

    Args:
        where: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, or a path
            of the local file system. Of the latter, ``~`` is the home directory, and ``..`` is
            resolved.
        store: How an object store is reached; ``None``: the defaults.

    Raises:
        ValueError: The address is none of these, has lost a slash (as in ``pathlib.Path``), or has
            a backslash.
    """
    if isinstance(where, ObjectPath):
        return where
    text = os.fspath(where)
    parsed = None if isinstance(where, Path) else _ADDRESS.match(text)
    if parsed is None:
        return _local_path(text)
    scheme, rest = parsed.groups()
    if scheme not in SERVICES:
        raise ValueError(
            f"{text!r}: a root is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or"
            f" a local path (without file://), not {scheme}://"
        )
    return object_path.parse(text, scheme, rest, store)


def _local_path(text: str) -> Path:
    """Return a local path in the form in which TensorStore can write below it."""
    lost = _LOST_SLASH.search(text)
    if lost is not None:
        raise ValueError(
            f"{text!r} looks like an address that has lost a slash ({lost[1]}:/), as pathlib.Path"
            " and os.path change it: give the address as a string, s3://BUCKET/PREFIX,"
            " gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, or a local path without file://"
        )
    if text == "~" or text.startswith("~/"):
        text = os.path.expanduser(text)
    # TensorStore takes a backslash for a slash.
    if "\\" in os.path.abspath(text):
        raise ValueError(
            f"{os.path.abspath(text)!r} has a backslash, which no part of a path may have: rename"
            " the directory"
        )
    # Not by the names alone: the directory above a link is not the one that its name shows.
    if ".." in text.split("/"):
        text = os.path.realpath(text)
    # POSIX leaves the meaning of two leading slashes to the system.
    return Path("/" + text.lstrip("/") if text.startswith("//") else text)


def local(where: str | os.PathLike[str] | ObjectPath, what: str) -> Path:
    """Return a path of the local file system.

    Args:
        where: An address.
        what: The operation that needs a local path, for the error.

    Raises:
        StorageFailed: The address is that of an object store.
    """
    place = of(where)
    if not isinstance(place, Path):
        raise StorageFailed(
            f"{what} needs a local directory, not {place}: name one (a copy of the root is a root),"
            " or use deltacheck.backends.torch.Engine and deltacheck.open, which take object"
            " stores"
        )
    return place


def context(path: Place) -> ts.Context | None:
    """Return TensorStore's resources of a path, shared by all that is done there."""
    return storage_of(path).context()


def subdirectories(path: Place) -> list[Place]:
    """Return the directories in ``path`` (no links), ascending by name."""
    return storage_of(path).subdirectories()


def size_of(path: Place) -> int:
    """Return the bytes of a file."""
    return storage_of(path).size()


def full_name(path: Place) -> str:
    """Return the address of an object, or the absolute path of a file."""
    return storage_of(path).full_name()


def take_lease(root: Place) -> Lease:
    """Take the right to write to a root.

    Raises:
        RootBusy: Another writer has it; the message names that writer.
    """
    return storage_of(root).take_lease()


def inside(root: Place, path: Place) -> Place:
    """Return ``path``, which may be written to or deleted.

    No change below a root may follow a link to another place. The root itself may be reached
    through links, because the user names it; below it, everything is a directory or a regular file
    (``docs/reference/format.md``, section 1). Every directory from below ``root`` down to ``path``
    is looked at; those that do not exist yet pass. A process that puts a link in place between the
    check and the change is not kept out. On an object store there are no links.

    Args:
        root: The root, or the store of a manager root.
        path: A directory below it.

    Raises:
        Damaged: A link or a file stands in the place of one of the directories; names it.
    """
    if isinstance(root, Path) and isinstance(path, Path):
        directory = root
        for name in path.relative_to(root).parts:
            directory = directory / name
            storage_of(directory).check_directory()
    return path


def remove_tree(root: Place, path: Place, *, ignore_errors: bool = False) -> None:
    """Remove a directory below a root and all below it. Raises what ``inside`` raises."""
    storage_of(inside(root, path)).remove_tree(ignore_errors)
