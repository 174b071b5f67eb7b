"""What `deltacheck eval` needs of JAX: states as bytes, our saves, and the peer that they are
compared with.
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

PEER = "numpy.savez + fsync"


def flat(state: object) -> tree.Flat:
    """A state taken apart, nothing copied."""
    return tree.flatten(state, leaves.describe, leaves.expand)


bytes_of = leaves.bytes_of


def peer_save(state: object, file: Path) -> int:
    """What the state takes as one plain file, synced to disk: its arrays as bytes, uncompressed.
    The bytes of the file.
    """
    file.unlink(missing_ok=True)
    arrays = {
        str(number): bytes_of(array) for number, array in enumerate(flat(state).arrays.values())
    }
    with file.open("wb") as out:
        np.savez(out, **arrays)  # type: ignore[arg-type]
        out.flush()
        os.fsync(out.fileno())
    return file.stat().st_size


class Saver:
    """The checkpoints of one run, in a ``CheckpointManager``."""

    def __init__(self, root: Path, policy: Policy) -> None:
        self._root = root
        self._manager = manager(root, policy=policy)
        self._under_way: _Watched | None = None

    def save(self, step: int, state: object, metrics: Mapping[str, float]) -> None:
        """Begin to save. REQUIRES: ``finish`` was called for the save before."""
        before, began = bytes_on_disk(self._root), time.perf_counter()
        self._manager.save(step, args=DeltaSaveArgs(state, metrics=metrics))
        self._under_way = _Watched(self._manager, step, before, began)

    def finish(self) -> tuple[int, float, float, int] | None:
        """As in ``deltacheck.backends.torch.files.evaluation``. The manager does not tell when it
        was durable: a thread that waits for it does.
        """
        watched, self._under_way = self._under_way, None
        if watched is None:
            return None
        began = time.perf_counter()
        watched.join()
        waited = time.perf_counter() - began
        if watched.error is not None:
            raise watched.error
        stored = bytes_on_disk(self._root) - watched.bytes_before
        return watched.step, watched.called_seconds + waited, watched.durable_seconds, stored

    def restore(self, like: object) -> tuple[int, Any]:
        """The newest step and its state, in the types of ``like``."""
        step = self._manager.latest_step()
        return step, self._manager.restore(step, args=DeltaRestoreArgs(like))

    def close(self) -> None:
        self._manager.close()


class _Watched(threading.Thread):
    """A save under way, and how long it takes until it is durable."""

    def __init__(self, manager: Any, step: int, bytes_before: int, began: float) -> None:
        super().__init__(name="deltacheck-eval-watch", daemon=True)
        self.step, self.bytes_before, self.durable_seconds = step, bytes_before, 0.0
        self.called_seconds = time.perf_counter() - began
        self.error: BaseException | None = None
        self._manager, self._began = manager, began
        self.start()

    def run(self) -> None:
        try:
            self._manager.wait_until_finished()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the training thread raises it
            self.error = error
        self.durable_seconds = time.perf_counter() - self._began
