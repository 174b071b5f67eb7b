"""A folder in memory for the files of tests, which sync many small ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_MEMORY = Path("/dev/shm")


def memory_folder(room_bytes: int = 1 << 30) -> Path | None:
    """Return the folder of a file system in memory.

    A killed process loses nothing of what it has written there. A power cut would, but tests of
    power cuts model their own disk.

    Args:
        room_bytes: The free space that is needed.

    Returns:
        ``None`` if there is no such folder, or if it has less room: ``tempfile`` then takes its
        own.
    """
    if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= room_bytes:
        return _MEMORY
    return None
