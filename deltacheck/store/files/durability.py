"""The durability of saves, and every sync that follows from it.

No other module of the store decides about ``fsync``.
"""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum

from deltacheck.store.files.storage import Place, storage_of


class Durability(StrEnum):
    """The event that an acknowledged save survives.

    ``POWER``: a save is acknowledged when it survives a power cut. This costs a flush of the disk's
    cache for every file and directory.

    ``PROCESS``: a save is acknowledged when it survives the death of the process. Nothing is
    synced, so saves end sooner. A power cut or a crash of the operating system may take any of the
    last saves, and leave files of the right size with wrong content. Their digests find these, as
    they find all damage: a restore raises an error and never gives wrong values. Only the order of
    writing, not that of reaching the disk, is the same under both.
    """

    POWER = "power"
    PROCESS = "process"

    @classmethod
    def of(cls, name: str) -> Durability:
        """Return the member that an option names; ``ValueError`` for another name."""
        try:
            return cls(name)
        except ValueError:
            raise ValueError(f"durability must be 'power' or 'process', not {name!r}") from None

    @property
    def syncs(self) -> bool:
        """``True`` if files and directories are synced."""
        return self is Durability.POWER

    def sync_file(self, descriptor: int) -> None:
        """Make the content of an open file survive, but not its name."""
        # The names of all files follow with one sync of their directory.
        if self.syncs:
            os.fsync(descriptor)

    def sync_directory(self, path: Place) -> None:
        """Make the names in a directory survive."""
        if self.syncs:
            sync_directory(path)

    def sync_tree(self, path: Place) -> None:
        """Make the names in every directory of a tree survive, and its own name.

        TensorStore syncs files and the directories that it puts them in.
        """
        if self.syncs:
            for directory in storage_of(path).directories_below():
                sync_directory(directory)

    def sync_ancestors(self, path: Place) -> None:
        """Make the way to ``path`` survive: its name, and those of the directories above it.

        All directories of the same file system are synced, whoever made them: a process that made
        one may have been killed before its sync. Directories that may not be read are left out.
        """
        if not self.syncs:
            return
        for directory in storage_of(path).directories_above():
            # A directory above may belong to another user, and a save must not fail for that.
            with contextlib.suppress(PermissionError):
                sync_directory(directory)


def sync_directory(path: Place) -> None:
    """Sync a directory, so that the names in it survive a power cut.

    On an object store this does nothing: its answers say that it has the object.
    """
    storage_of(path).sync_directory()
