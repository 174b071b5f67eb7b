"""A file with a random name that shows whether several processes see the same root."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from deltacheck.store import layout
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, storage_of

# The longest wait for a name that another machine has just made. Longer: network file systems may
# show new names later; shorter: a rank with another folder is refused sooner.
_WAIT_SECONDS = 3.0
_POLL_SECONDS = 0.1


class Probe:
    """A small file in the control group of a root, which need not exist yet.

    Directories that are missing are made. The caller must call ``remove``.

    Args:
        root: The root.
    """

    def __init__(self, root: Place) -> None:
        folder = root / layout.CONTROL
        storage_of(folder).check_directory()
        self._new_folders: list[Path] = []
        if isinstance(folder, Path):
            ways = (folder, *folder.parents)
            self._new_folders = [way for way in ways if not os.path.lexists(way)]
        self.name = f"probe-{secrets.token_hex(8)}"
        self._path = folder / self.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            arrays.create_file(folder, self.name, b"probe\n", Durability.PROCESS)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the file, and the directories that were made for it if they are still empty."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._path.unlink()
        for folder in self._new_folders:
            # Another process may use it by now.
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._new_folders = []


def sees_probe(root: Place, name: str) -> bool:
    """Return whether this process sees a probe that another one has placed in its root."""
    return awaited(root / layout.CONTROL / name)


def awaited(path: Place) -> bool:
    """Return whether a name exists that another process has made, perhaps on another machine."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        if isinstance(path, Path):
            # A network file system may remember that a name was missing. It asks the server again
            # when a directory is opened.
            for folder in reversed(path.parents):
                with contextlib.suppress(OSError), os.scandir(folder) as entries:
                    next(entries, None)
        time.sleep(_POLL_SECONDS)
    return True
