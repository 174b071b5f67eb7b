"""Bounded waits for TensorStore, which retries some failures of a file system without end."""

from __future__ import annotations

from typing import Any

from deltacheck.errors import StorageTimeout

# Of one read, or one small file. Longer: a stalled file system gets more time; shorter: a caller
# learns of a lost one sooner.
TIMEOUT_SECONDS = 600.0


def wait_for(future: Any, path: object, seconds: float | None = None) -> Any:
    """Return the result of a future of TensorStore; ``StorageTimeout`` after ``seconds``.

    Args:
        future: The operation under way.
        path: The file or array that it concerns, for the error.
        seconds: Longest wait; ``None``: ``TIMEOUT_SECONDS``.
    """
    seconds = TIMEOUT_SECONDS if seconds is None else seconds
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        raise StorageTimeout(
            f"{path}: the storage did not answer within {seconds:.3g} s; it may hang"
        ) from None
