"""Name the capability that a file system lacks, its cost, and the ways around it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

from deltacheck.errors import StorageFailed
from deltacheck.leaf.external_errors import system_error

# The system's answers of a file system that does not have an operation.
_MISSING = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK}


class _Capability(NamedTuple):
    pattern: str  # of the operation in a message
    fault: str
    remedy: str


_CAPABILITIES = (
    _Capability(
        r"\block",
        "has no file locks (flock), without which two processes could commit the same step",
        "mount it with them (Lustre: -o flock; -o localflock if one machine writes)",
    ),
    _Capability(
        r"\bfsync",
        "cannot sync a directory, so a power cut could take the names of files that a save has"
        " acknowledged",
        'accept that with SaveOptions(durability="process"), after which a save survives the end of'
        " the process only",
    ),
    _Capability(
        r"\brename",
        "cannot rename a file, without which a reader could see half a file",
        "name an object store by its address (s3://bucket/run) instead of its mount",
    ),
)


def lacking(path: Path, error: Exception, operation: str = "") -> StorageFailed | None:
    """Return the error for a capability that the file system of a path lacks.

    Args:
        path: The file or directory.
        error: The system's error, or TensorStore's.
        operation: The operation that failed, if the error does not name it.

    Returns:
        The error; ``None`` if it has another reason.
    """
    number = system_error(error)
    if number not in _MISSING:
        return None
    # Without the names of files, which may contain anything.
    call = operation or re.sub(r'"[^"]*"|/\S*', "", str(error))
    for capability in _CAPABILITIES:
        if re.search(capability.pattern, call, re.IGNORECASE):
            return StorageFailed(
                f"{path}: its file system {capability.fault} ({os.strerror(number or 0)}). Use"
                f" another file system, or {capability.remedy}; see"
                " docs/explanation/guarantees.md#file-systems"
            )
    return None
