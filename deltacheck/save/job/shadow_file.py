"""Memory of the shadow in scratch files, which the system may take back under pressure.

Anonymous memory can only go to swap space, which machines for training often lack.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from deltacheck.codec import memory
from deltacheck.codec.base import U8

log = logging.getLogger("deltacheck")

# Leaves share files, since the number of open files is limited. Larger: fewer files; smaller: less
# space is reserved beyond the state.
_FILE_BYTES = 256 << 20
# Smaller leaves stay in anonymous memory: a page each would be lost, and they are few bytes.
_LEAST_BYTES = 64 << 10


class ShadowFile:
    """Memory in unlinked files of the folder for temporary files (``TMPDIR``).

    Space on the disk is reserved before memory is given out, because a write to memory without it
    would end the process. The files are gone when the memory is, or the process.
    """

    def __init__(self) -> None:
        self._free: U8 = np.empty(0, np.uint8)
        self._is_refused = False

    def take(self, size: int) -> U8 | None:
        """Return memory of ``size`` bytes, uint8 1-D, zeroed; ``None``: use anonymous memory.

        If the disk has no space, that is logged once.
        """
        if size < _LEAST_BYTES or self._is_refused:
            return None
        if self._free.size < size:
            try:
                self._free = _mapped(max(size, _FILE_BYTES))
            except OSError as error:
                log.warning(
                    "the shadow stays in anonymous memory: no scratch file of %d bytes can be made"
                    " in %s: %s; set TMPDIR to a local disk with the size of the state",
                    max(size, _FILE_BYTES),
                    tempfile.gettempdir(),
                    str(error),
                )
                self._is_refused = True
                return None
        taken = self._free[:size]
        # The next leaf begins at a page.
        self._free = self._free[-(-size // mmap.PAGESIZE) * mmap.PAGESIZE :]
        return taken

    def moved(self, bases: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same bases, those in host memory in the files as far as possible."""
        result = dict(bases)
        for path, base in bases.items():
            out = self.take(base.nbytes) if isinstance(base, np.ndarray) else None
            if out is not None:
                result[path] = memory.copied(base, out)
        return result


def _mapped(size: int) -> U8:
    """Return the memory of a new file. Raises ``OSError`` if the disk has no space for it."""
    with tempfile.TemporaryFile(prefix="deltacheck-shadow-") as file:
        # Not `truncate`, which reserves nothing.
        os.posix_fallocate(file.fileno(), 0, size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
