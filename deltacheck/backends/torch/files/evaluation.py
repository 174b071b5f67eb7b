"""Provide the PyTorch part of ``deltacheck eval``.

It flattens states, saves them with deltacheck, and saves them with the peer for a comparison.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.files.load import load as read
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf import tree
from deltacheck.policy import Policy
from deltacheck.save.handle import SaveHandle

FRAMEWORK, PEER = "torch", "torch.save + fsync"


def flat(state: object) -> tree.Flat:
    """Flatten a state without a copy."""
    return leaves.flatten(state)


# A part of the interface that ``deltacheck eval`` uses for every framework.
bytes_of = leaves.bytes_of


def peer_save(state: object, file: Path) -> int:
    """Save a state with ``torch.save`` to a new file, sync it, and return the bytes of the file.

    This is what a training without deltacheck does.
    """
    file.unlink(missing_ok=True)
    with file.open("wb") as out:
        torch.save(state, out)
        out.flush()
        # The saves of deltacheck are durable too, so the comparison is fair only with a sync.
        os.fsync(out.fileno())
    return file.stat().st_size


class Saver:
    """Saves the checkpoints of one run."""

    def __init__(self, root: Path, policy: Policy) -> None:
        # The share of the largest learning rate that is the least unit of a contract.
        self.rate_floor = 0.0 if policy.hidden is None else policy.hidden.rate_floor
        self._engine = Engine(root, policy=policy)
        self._running: SaveHandle | None = None

    def save(self, step: int, state: object, metrics: Mapping[str, float]) -> None:
        """Begin to save. ``finish`` must have been called for the save before."""
        self._running = self._engine.save(step, state, metrics=metrics)

    def finish(self) -> tuple[int, float, float, int] | None:
        """Wait for the running save.

        The wait counts as blocking: in a run without an evaluation the next save would wait as
        long.

        Returns:
            The step, the seconds that training has waited, the seconds until the save was durable,
            and the bytes that it added. ``None`` if no save is running.
        """
        if self._running is None:
            return None
        begin = time.perf_counter()
        report = self._running.result()
        wait_seconds = time.perf_counter() - begin
        self._running = None
        assert report is not None  # nothing is skipped: one save at a time
        return (
            report.step,
            report.blocking_seconds + wait_seconds,
            report.durable_seconds,
            report.stored_bytes,
        )

    def restore(self, like: object) -> tuple[int, Any]:
        """Return the newest step and its state. ``like`` is not used."""
        state = self._engine.restore()
        assert self._engine.restored_step is not None
        return self._engine.restored_step, state

    def close(self) -> None:
        self._engine.close()


def load(root: Path, step: int, like: object) -> Any:
    """Return the state of a step. ``like`` is not used."""
    return read(root, step)
