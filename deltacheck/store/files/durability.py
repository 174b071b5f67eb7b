"""What an acknowledged save survives, and every sync that follows from it: no other file of the
store calls ``fsync``.
"""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum

from deltacheck.store.files.storage import Place, storage_of


class Durability(StrEnum):
    """``POWER``: a save is acknowledged when it survives a power cut. Costs a flush of the disk's
    cache for every file and directory.

    ``PROCESS``: when it survives the death of the process, however it dies. Nothing is synced, so
    saves end sooner; a power cut or a crash of the operating system may take any of the last saves,
    acknowledged or not, and leave files of the right size and wrong content. Those are found by
    their digests, as all damage is, and a step that lost files is an error when it is restored,
    never wrong values. Only the order of writing, not that of reaching the disk, is the same under
    both.
    """

    POWER = "power"
    PROCESS = "process"

    @classmethod
    def of(cls, name: str) -> Durability:
        """From an option; ``ValueError`` for another name."""
        try:
            return cls(name)
        except ValueError:
            raise ValueError(f"durability must be 'power' or 'process', not {name!r}") from None

    @property
    def syncs(self) -> bool:
        return self is Durability.POWER

    def sync_file(self, descriptor: int) -> None:
        """Make the content of an open file survive; not the name it has."""
        if self.syncs:
            os.fsync(descriptor)

    def sync_directory(self, path: Place) -> None:
        """Make the names in a directory survive."""
        if self.syncs:
            sync_directory(path)

    def sync_tree(self, path: Place) -> None:
        """Make the names in every directory of a tree survive, and its own (TensorStore syncs files
        and the directory that it puts them in).
        """
        if self.syncs:
            for directory in storage_of(path).directories_below():
                sync_directory(directory)

    def sync_ancestors(self, path: Place) -> None:
        """Make the way to ``path`` survive: its name, and that of every directory above it in the
        same
        file system, whoever made it and whenever: somebody may have made it a moment ago, and a
        process that made it may have been killed before it could sync it.

        Directories that may not be read are none of ours, and are left out.
        """
        if not self.syncs:
            return
        for directory in storage_of(path).directories_above():
            with contextlib.suppress(PermissionError):
                sync_directory(directory)


def sync_directory(path: Place) -> None:
    """fsync a directory, so that the names in it survive a power cut. On an object store nothing:
    its answers say that it has the object.
    """
    storage_of(path).sync_directory()
