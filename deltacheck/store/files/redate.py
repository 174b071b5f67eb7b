"""Re-date the files of a root that a purge by age would remove."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path


def redate(root: Path, older_than_seconds: float) -> None:
    """Give the present time to the files below ``root`` that were not read or changed for long.

    Purges go by the time of the last change or of the last access, so both are set. No content
    changes, no link is followed, and files that another user owns are left out.

    Args:
        root: A directory.
        older_than_seconds: Files whose change or access is older than this get the present time.
    """
    oldest = time.time() - older_than_seconds
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            # A collection may remove files meanwhile, and those of others cannot be changed.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and min(status.st_atime, status.st_mtime) < oldest:
                    os.utime(path, follow_symlinks=False)
