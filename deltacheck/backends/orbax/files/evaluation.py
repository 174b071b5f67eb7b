"""Provide the JAX part of ``deltacheck eval``.

It has states as bytes, the saves of deltacheck, and the peer that they are compared with.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deltacheck.backends.orbax.handler import DeltaRestoreArgs, DeltaSaveArgs
from deltacheck.backends.orbax.manager import manager
from deltacheck.backends.orbax.state import leaves
from deltacheck.leaf import tree
from deltacheck.policy import Policy
from deltacheck.store.files.arrays import bytes_on_disk

FRAMEWORK, PEER = "jax", "numpy.savez + fsync"


def flat(state: object) -> tree.Flat:
    """Flatten a state without a copy."""
    return tree.flatten(state, leaves.describe, leaves.expand)


bytes_of = leaves.bytes_of


def peer_save(state: object, file: Path) -> int:
    """Save the arrays of a state uncompressed to a new file, sync it, and return its bytes."""
    file.unlink(missing_ok=True)
    arrays = {
        str(number): bytes_of(array) for number, array in enumerate(flat(state).arrays.values())
    }
    with file.open("wb") as out:
        np.savez(out, **arrays)  # type: ignore[arg-type]
        out.flush()
        # The saves of deltacheck survive a power cut, so the peer must sync, too.
        os.fsync(out.fileno())
    return file.stat().st_size


class Saver:
    """Saves the checkpoints of one run in a ``CheckpointManager``."""

    def __init__(self, root: Path, policy: Policy) -> None:
        # The share of the largest learning rate that is the least unit of a contract.
        self.rate_floor = 0.0 if policy.hidden is None else policy.hidden.rate_floor
        self._root = root
        self._manager = manager(root, policy=policy)
        self._running: _Watched | None = None

    def save(self, step: int, state: object, metrics: Mapping[str, float]) -> None:
        """Begin to save. ``finish`` must have been called for the save before."""
        bytes_before, start_time = bytes_on_disk(self._root), time.perf_counter()
        self._manager.save(step, args=DeltaSaveArgs(state, metrics=metrics))
        self._running = _Watched(self._manager, step, bytes_before, start_time)

    def finish(self) -> tuple[int, float, float, int] | None:
        """Wait for the running save and return its figures.

        They are those of ``deltacheck.backends.torch.files.evaluation``. The manager has no record
        of when a save became durable, so a thread waits for it.
        """
        running_save, self._running = self._running, None
        if running_save is None:
            return None
        # The training waits from here on, so this counts as blocking time.
        start_time = time.perf_counter()
        running_save.join()
        wait_seconds = time.perf_counter() - start_time
        if running_save.error is not None:
            raise running_save.error
        stored_bytes = bytes_on_disk(self._root) - running_save.bytes_before
        return (
            running_save.step,
            running_save.called_seconds + wait_seconds,
            running_save.durable_seconds,
            stored_bytes,
        )

    def restore(self, like: object) -> tuple[int, Any]:
        """Return the newest step and its state, in the types of ``like``."""
        step = self._manager.latest_step()
        return step, self._manager.restore(step, args=DeltaRestoreArgs(like))

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()


def load(root: Path, step: int, like: object) -> Any:
    """Return the state of a step, in the types of ``like``."""
    opened = manager(root)
    try:
        return opened.restore(step, args=DeltaRestoreArgs(like))
    finally:
        opened.close()


class _Watched(threading.Thread):
    """A running save, and the time until it is durable."""

    def __init__(self, manager: Any, step: int, bytes_before: int, began: float) -> None:
        # A daemon: an evaluation that fails must not wait for a storage that hangs.
        super().__init__(name="deltacheck-eval-watch", daemon=True)
        self.step, self.bytes_before, self.durable_seconds = step, bytes_before, 0.0
        self.called_seconds = time.perf_counter() - began
        self.error: BaseException | None = None
        self._manager, self._began = manager, began
        self.start()

    def run(self) -> None:
        """Wait until the save is durable, and record the time or the error."""
        try:
            self._manager.wait_until_finished()
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self.error = error
        self.durable_seconds = time.perf_counter() - self._began
