"""A second opener of a root in the process that holds it already.

An owner that nobody refers to any more (a notebook cell that ran twice, a retry after an exception)
finishes its saves and gives its root back by itself; the second opener waits for that. If the owner
is still in use, the error names the line of the program that opened it.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from dataclasses import dataclass, field

log = logging.getLogger("deltacheck")

# The longest wait for the saves of an owner that nobody refers to. Longer: a slow storage gets them
# through; shorter: an error comes sooner if the storage hangs.
_LONGEST_SECONDS = 600.0
_PACKAGE = __name__.partition(".")[0]


def _caller() -> str:
    """Return the line of the program that called this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


@dataclass(eq=False, slots=True)
class Holding:
    """A lease as a second opener in the same process sees it.

    Attributes:
        opened_at: The line of the program that took the lease.
        is_abandoned: Nobody refers to the owner, or it is being closed: the lease is given back
            after the saves under way.
        released: Set once the lease is given back.
    """

    opened_at: str = field(default_factory=_caller)
    is_abandoned: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def await_release(self, root: object) -> bool:
        """Wait for the release if nobody refers to the owner; return false if it is in use.

        Args:
            root: The root, for the log.
        """
        if self.released.is_set():
            return True
        if not self.is_abandoned:
            # Owners that refer to each other in a cycle, or that only such objects refer to.
            gc.collect()
        if not self.is_abandoned:
            return self.released.is_set()
        log.info("%s: waiting for the saves of an engine that was dropped without close()", root)
        return self.released.wait(_LONGEST_SECONDS)

    def __str__(self) -> str:
        if self.is_abandoned:
            return (
                f"this process: the engine opened at {self.opened_at} was dropped without close(),"
                f" and its saves have not ended within {_LONGEST_SECONDS:.0f} s"
            )
        return (
            f"this process: it was opened at {self.opened_at} and is still in use (a variable or"
            " the traceback of an exception refers to it). Call close() of that object first"
        )
